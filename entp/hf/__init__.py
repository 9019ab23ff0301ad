"""HuggingFace's models here, and trained runs in other people's tools.

import entp.hf
model = entp.hf.load("folder-of-gpt2")
logits = model(tokens, mode="entp")  # or decoder, prefix-lm
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entp.errors import InputError
from entp.files import parse_json

MOST_READ = 1024
"""Tokens of a text where a pretrained model is measured as it is, unless more are asked for."""

EXPORTED = "entp"
"""The model_type of our own models, exported for HuggingFace."""

if TYPE_CHECKING:
    import torch

    from entp.hf.adapters import PretrainedModel


def load(
    source: str | Path,
    *,
    download: bool = False,
    dropout: bool = False,
    dtype: torch.dtype | None = None,
) -> PretrainedModel:
    """A pretrained GPT-2, BERT, Llama or one of their relatives as a model for `entp.predict`.

    source: a folder in HuggingFace's format, a .gguf file of a Llama, or with download=True a name
        on the hub.
    dropout: keep the model's dropout. In training, only the reference is exact with it.
    dtype: of the weights; None for float32.
    """
    need_transformers()
    import torch

    from entp.hf import gguf, loading

    kind = torch.float32 if dtype is None else dtype
    if gguf.is_gguf(source):
        return gguf.load(Path(source).expanduser(), kind)
    return loading.load(source, download=download, dropout=dropout, dtype=kind)


def wrap(network: Any) -> PretrainedModel:
    """The same for a HuggingFace model at hand, or peft's model around one; weights are shared."""
    from entp.hf import families

    return families.wrap(network)


def is_huggingface(folder: Path) -> bool:
    """Whether a folder is in HuggingFace's format, and no run."""
    return model_type(folder) is not None


def model_type(folder: Path) -> str | None:
    """What HuggingFace calls the model in a folder; None where it is not in its format."""
    try:
        data = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict) or "model_type" not in data or "model" in data:
        return None
    return str(data["model_type"])


def refuse_exported(folder: Path) -> None:
    """InputError for a model of our own that was exported for HuggingFace's tools."""
    if model_type(folder) == EXPORTED:
        raise InputError(
            f"{folder} is what `entp export --format hf` wrote, for HuggingFace's tools: give the "
            "run itself, or its export in entp's own format."
        )


def refuse_gguf(source: Path) -> None:
    """InputError for a GGUF file where a folder is needed."""
    if source.suffix == ".gguf":
        raise InputError(
            f"{source} is a GGUF file, and a folder in HuggingFace's format is needed: write it by "
            f"`entp llm convert {source} --out FOLDER`."
        )


def need_transformers() -> Any:
    """The transformers library, or an InputError that says how to install it."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            "pretrained models need the transformers library, which is not installed: "
            "pip install 'entp[hf]'."
        ) from None
