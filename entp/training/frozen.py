"""Weights that a run does not train: they are written once, and checkpoints name them.

    runs/lora/
      frozen/                         model-….safetensors, the index, checksums.json
      checkpoints/step-00000200/      what is trained, and frozen.json: the checksum of frozen/

With LoRA on a model of 8 billion weights each checkpoint has some megabytes instead of 32 GB.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from entp.errors import InputError
from entp.files import CHECKSUMS, Damaged, json_bytes, parse_json, verify_folder, write_folder
from entp.training.weights import INDEX, read_weights, shards_of

FOLDER = "frozen"
NOTE = "frozen.json"
SHARD_MIB = 1024
"""Size of a file of frozen weights: so much is in memory beside the model when it is written."""


class Frozen:
    """The frozen weights of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        without = {name for name, p in model.named_parameters() if not p.requires_grad}
        self.names = without & set(model.state_dict())
        self.note: dict[str, bytes] | None = None

    def trained(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights without those that are frozen."""
        return {name: t for name, t in weights.items() if name not in self.names}

    def write(self, out: Path, weights: dict[str, Tensor]) -> dict[str, bytes]:
        """What a checkpoint says of them, after they are in the run's folder."""
        if self.note is None:
            frozen = {name: weights[name] for name in sorted(self.names)}
            self.note = _write(out / FOLDER, frozen) if frozen else {}
        return self.note


def join(folder: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint with the frozen ones of its run."""
    if not (folder / NOTE).is_file():
        return weights
    try:
        verify_frozen(folder)
    except Damaged as error:
        raise InputError(f"{folder} cannot be read: {error}.") from None
    return {**read_weights(_beside(folder)), **weights}


def verify_frozen(folder: Path) -> None:
    """Raise Damaged unless the frozen weights that a checkpoint names are there and whole."""
    if not (folder / NOTE).is_file():
        return
    frozen = _beside(folder)
    try:
        named = parse_json((folder / NOTE).read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{NOTE}: {error}") from None
    if not frozen.is_dir():
        raise Damaged(
            f"it holds the trained weights alone, and the others are not in {frozen}: keep it in "
            "its run's folder, or write a whole model with `entp export`"
        )
    if _note(frozen) != named:
        raise Damaged(f"{frozen} holds the frozen weights of another run")
    verify_folder(frozen, (INDEX,))


def _beside(folder: Path) -> Path:
    """Where the frozen weights of a checkpoint's run are."""
    return folder.resolve().parent.parent / FOLDER


def _write(folder: Path, weights: dict[str, Tensor]) -> dict[str, bytes]:
    """A checkpoint's note of these weights; they are written unless the folder has them."""
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in shards_of(weights, SHARD_MIB)}
    if _sums(folder) != sums or not _is_whole(folder):
        write_folder(folder, shards_of(weights, SHARD_MIB))
    return {NOTE: json_bytes(_note(folder))}


def _sums(folder: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return parse_json((folder / CHECKSUMS).read_bytes())
    return None


def _is_whole(folder: Path) -> bool:
    try:
        verify_folder(folder, (INDEX,))
    except Damaged:
        return False
    return True


def _note(folder: Path) -> dict[str, Any]:
    """The checksum of a folder of frozen weights; empty without a folder."""
    with contextlib.suppress(OSError):
        return {"sha256": hashlib.sha256((folder / CHECKSUMS).read_bytes()).hexdigest()}
    return {}
