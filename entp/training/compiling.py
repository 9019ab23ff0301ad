"""Runs whose model's layers torch compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from entp.errors import InputError


def compile_layers(model: Any) -> None:
    """Let a model compile its layers, if it can."""
    compile_them = getattr(model, "compile_layers", None)
    if compile_them is None:
        raise InputError(
            "train.compile_layers is for models of HuggingFace's, which --init names, and this is "
            f"a {type(model).__name__}: leave it out."
        )
    compile_them()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """What torch.compile cannot do here as an error that says so."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        text = str(error).strip() or type(error).__name__
        raise InputError(
            "train.compile_layers: torch cannot compile this model here "
            f"({text.splitlines()[0]}). Leave it out: the same is computed, more slowly."
        ) from error
