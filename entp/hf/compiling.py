"""torch.compile on the layers of HuggingFace's models.

Their layers do much between matrix products: a decoder's layer of SmolLM2 with LoRA takes 237
kernels for a training step under autocast, most of which copy numbers from one type to another.
Compiled, all layers share one piece of code. What is computed stays; bf16 is rounded less often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from entp.hf.adapters import Layer, PretrainedModel

MOST_VARIANTS = 64
"""Of a layer's code: by the shape of its rows, whether gradients are wanted, and precision."""


BACKEND = "inductor"


def compile_layers(model: PretrainedModel) -> None:
    """See PretrainedModel.compile_layers."""
    import torch._dynamo.config as limits

    limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)
    for layer in model.layers() if model.compiles_whole else ():
        layer.compile(backend=BACKEND)
    model.compiled = True


def as_compiled(layer: Layer) -> None:
    """Let a layer's methods on packed rows be the compiled ones of its class."""
    project, finish = _methods(type(layer), BACKEND)  # type: ignore[arg-type]
    layer.project = functools.partial(project, layer)  # type: ignore[method-assign]
    layer.finish = functools.partial(finish, layer)  # type: ignore[method-assign]


@functools.cache
def _methods(kind: type[Layer], backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return torch.compile(kind.project, backend=backend), torch.compile(kind.finish, backend=backend)
