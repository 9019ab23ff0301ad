"""Weights as files and back: one safetensors file, or shards with an index.

    model.safetensors                                           all tensors
    model-00001-of-00003.safetensors …, model.safetensors.index.json    the same in shards

The index says which file a tensor is in, as HuggingFace's do. A tensor that is larger than a shard
is cut into rows: `tokens.weight/0`, `tokens.weight/1`, …
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from entp.errors import InputError
from entp.files import json_bytes, parse_json

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER = 256
"""Bytes that a tensor's name, shape and type take at most in a file, and the header's own."""


def weight_files(
    tensors: dict[str, Tensor], dtype: torch.dtype | None = None, shard_mib: float | None = None
) -> dict[str, bytes]:
    """The contents of the files by name.

    dtype: of the saved weights, if not their own.
    shard_mib: no file is larger than so many MiB; None: one file.
    """
    saved = {name: t.detach().to(dtype or t.dtype) for name, t in tensors.items()}
    if shard_mib is None:
        return {WHOLE: _contents(saved)}
    return dict(shards_of(saved, shard_mib))


def shards_of(tensors: dict[str, Tensor], shard_mib: float) -> Iterator[tuple[str, bytes]]:
    """Shards one after another, each made when it is asked for, and their index at the end."""
    shards = _groups(tensors, int(shard_mib * 2**20))
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        yield file, _contents(shard)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {p: file for file, shard in zip(names, shards, strict=True) for p in shard},
    }
    yield INDEX, json_bytes(index)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    name = weights_name(folder) or WHOLE
    try:
        if name == WHOLE:
            return load_tensors((folder / WHOLE).read_bytes())
        pieces: dict[str, Tensor] = {}
        for file in _shard_names(folder):
            pieces |= load_tensors((folder / file).read_bytes())
        return _join(pieces)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise InputError(f"the weights in {folder} cannot be read: {error}.") from None


def weights_name(folder: Path) -> str | None:
    """The file that a folder with weights has: the weights, or the index of their shards."""
    return next((name for name in (WHOLE, INDEX) if (folder / name).is_file()), None)


def _contents(tensors: dict[str, Tensor]) -> bytes:
    return save_tensors({name: t.detach().cpu().contiguous() for name, t in tensors.items()})


def _groups(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """What goes into each shard."""
    shards: list[dict[str, Tensor]] = []
    room = 0
    for name, piece in _pieces(tensors, limit):
        size = piece.nbytes + HEADER
        if not shards or size > room:
            shards.append({})
            room = limit
        shards[-1][name] = piece
        room -= size
    return shards


def _pieces(tensors: dict[str, Tensor], limit: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors, those larger than a shard in parts that fit."""
    for name, tensor in tensors.items():
        if tensor.nbytes + HEADER <= limit:
            yield name, tensor
            continue
        row = tensor.nbytes // len(tensor)
        rows = (limit - HEADER) // row
        if rows < 1:
            raise InputError(
                f"a row of {name} has {row} bytes, more than fit into a shard of {limit} bytes: "
                "give a larger --shard-mib."
            )
        for part, first in enumerate(range(0, len(tensor), rows)):
            yield f"{name}/{part}", tensor[first : first + rows]


def _join(pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from those that were cut."""
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in pieces.items():
        stem, _, part = name.partition("/")
        parts.setdefault(stem, {})[int(part or 0)] = tensor
    return {
        stem: found[0] if len(found) == 1 else torch.cat([found[i] for i in range(len(found))])
        for stem, found in parts.items()
        if _complete(stem, found)
    }


def _complete(name: str, found: dict[int, Tensor]) -> bool:
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"{name} lacks some of its parts")
    return True


def _shard_names(folder: Path) -> list[str]:
    """The files that the index names, each of this folder."""
    index = parse_json((folder / INDEX).read_bytes())
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not all(isinstance(f, str) for f in found.values()):
        raise ValueError(f"{INDEX} has no weight_map")
    names = sorted(set(found.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{INDEX} names {outside[0]!r}, which is not a file of the folder")
    return names
