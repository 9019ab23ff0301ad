"""Language models from GGUF files, which hold weights in few bits, a tokenizer, and all settings.

entp.hf.load("model.gguf")              # dequantised, in memory
convert("model.gguf", "model", "bf16")  # a folder in HuggingFace's format, to load in a moment

transformers reads the file and dequantises it; the library `gguf` comes with the extra `hf`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from entp.errors import InputError, one_of
from entp.hf import need_transformers
from entp.hf.adapters import PretrainedModel
from entp.hf.families import check_config, wrap
from entp.hf.loading import quiet, readable_errors

SUFFIX = ".gguf"
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Precision = Literal["bf16", "fp32"]


def is_gguf(source: str | Path) -> bool:
    """Whether it is named like a GGUF file."""
    return str(source).endswith(SUFFIX)


def load(file: Path, dtype: torch.dtype) -> PretrainedModel:
    """A model of the engine's protocol: see `entp.hf.load`. GGUF files know of no dropout."""
    return wrap(load_network(file, dtype))


def load_network(file: Path, dtype: torch.dtype) -> Any:
    """HuggingFace's causal language model of a GGUF file, with nothing left of its quantisation."""
    transformers = _need(file)
    readable = _readable(file, "A whole GGUF file of a Llama is needed.")
    with quiet(transformers), _no_bar(), readable:
        read = transformers.AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=dtype, local_files_only=True
        )
    config = read.config
    check_config(config)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    network = type(read)._from_config(config, dtype=dtype, attn_implementation="sdpa")
    network.load_state_dict(read.state_dict())
    network.generation_config = read.generation_config
    return network.eval()


def convert(source: str | Path, folder: str | Path, precision: Precision = "bf16") -> Path:
    """The new folder with config.json, model.safetensors and the tokenizer of a GGUF file."""
    file, out = Path(source).expanduser(), Path(folder)
    if precision not in TYPES:
        raise one_of("precision", precision, TYPES)
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty: give a new folder by --out.")
    transformers = _need(file)
    network = load_network(file, TYPES[precision])
    with quiet(transformers), _readable(file, "A tokenizer is needed in it."):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True
        )
    out.mkdir(parents=True, exist_ok=True)
    with quiet(transformers):
        tokenizer.save_pretrained(out)
        network.save_pretrained(out)
    return out


def _no_bar() -> contextlib.AbstractContextManager[Any]:
    """Without the reader's progress bar, which the library cannot turn off."""
    return contextlib.redirect_stderr(io.StringIO())


@contextlib.contextmanager
def _readable(file: Path, needs: str) -> Iterator[None]:
    """Errors of the library as InputErrors, those about a torn file too."""
    with readable_errors(str(file), needs):
        try:
            yield
        except (struct.error, IndexError, AssertionError) as error:
            raise ValueError(f"it is damaged ({error}).") from error


def _need(file: Path) -> Any:
    """transformers, if it can read this file."""
    transformers = need_transformers()
    if not file.is_file():
        raise InputError(f"there is no file {file}: give a {SUFFIX} file.")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(f"{file} is no GGUF file: it does not begin with GGUF.")
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise InputError(
            f"GGUF files need the gguf library, which cannot be imported ({error}): "
            "pip install 'entp[hf]'."
        ) from None
    return transformers
