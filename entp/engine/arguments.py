"""Arguments of `all_prefixes`, `predict` and `generate` as tensors, or an InputError."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entp.engine.cold_start import warm_math
from entp.engine.protocol import ModelProtocol
from entp.errors import InputError
from entp.fields import as_int


def check_inputs(
    model: ModelProtocol,
    x: Tensor | np.ndarray | Sequence,
    lengths: Tensor | np.ndarray | Sequence[int] | None = None,
    position_ids: Tensor | np.ndarray | Sequence | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x with its padding blanked, lengths and position ids, as tensors on the device of x.

    Raises InputError for what the model cannot read.
    """
    warm_math()
    _check_model(model)
    x = _as_inputs(model, x)
    if lengths is not None:
        lengths = _whole_numbers("lengths", lengths, x.device)
        inside = (lengths >= 1) & (lengths <= x.shape[1])
        if lengths.shape != x.shape[:1] or not bool(inside.all()):
            raise InputError(
                f"lengths must be {x.shape[0]} numbers from 1 to {x.shape[1]}, got "
                f"{lengths.tolist()}."
            )
        x = _blank_padding(x, lengths)
    vocab = getattr(model, "vocab", None)
    if vocab is not None and _may_look(x) and not bool(((x >= 0) & (x < vocab)).all()):
        raise InputError(
            f"token ids go from {int(x.min())} to {int(x.max())}: the vocabulary is 0 to "
            f"{vocab - 1}."
        )
    return x, lengths, _as_position_ids(model, x, position_ids)


def _may_look(x: Tensor) -> bool:
    """Whether values may be read: elsewhere than on a CPU that would wait for the device, and
    torch.export has none."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_model(model: Any) -> None:
    """InputError for what is no model of protocol.py."""
    missing = [n for n in ("width", "encode", "embed", "stack", "readout") if not hasattr(model, n)]
    if missing or not isinstance(model, torch.nn.Module):
        lacks = f"has no {', '.join(missing)}" if missing else "is no torch.nn.Module"
        raise InputError(
            f"a {type(model).__name__} {lacks}: entp/engine/protocol.py says what a model must "
            "have."
        )


def _as_inputs(model: ModelProtocol, x: Any) -> Tensor:
    """x as a tensor of a type and shape that the model reads."""
    input_dim = getattr(model, "input_dim", None)
    if not isinstance(x, Tensor):
        x = _as_tensor("x", x, next(model.parameters()).device)  # type: ignore[attr-defined]
        if x.is_floating_point():
            x = x.to(torch.get_default_dtype())
    if input_dim is None and (x.ndim != 2 or not _is_whole(x)):
        raise InputError(
            f"the model reads token ids (batch, time) of an integer type, got {tuple(x.shape)} of "
            f"{x.dtype}."
        )
    are_vectors = x.ndim == 3 and x.shape[2] == input_dim and x.is_floating_point()
    if input_dim is not None and not are_vectors:
        raise InputError(
            f"the model reads vectors (batch, time, {input_dim}), got {tuple(x.shape)} of "
            f"{x.dtype}."
        )
    if x.shape[1] < 1:
        raise InputError("the sequences are empty: at least one token is needed.")
    return x.long() if input_dim is None else x


def _as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    """Lists and arrays as a tensor on the device."""
    try:
        return torch.as_tensor(np.asarray(value), device=device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"{name} cannot be read as numbers in rows of equal length: got {type(value).__name__}."
        ) from None


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _whole_numbers(name: str, value: Any, device: torch.device) -> Tensor:
    """An int64 tensor on the device."""
    found = value if isinstance(value, Tensor) else _as_tensor(name, value, device)
    if not _is_whole(found):
        raise InputError(f"{name} must be whole numbers, got {found.dtype}.")
    return found.to(device=device, dtype=torch.long)


def _as_position_ids(model: ModelProtocol, x: Tensor, position_ids: Any) -> Tensor | None:
    """Position ids as (B, T) on the device of x, below the model's context length."""
    limit = getattr(model, "context_length", None)
    if position_ids is None:
        if limit is not None and x.shape[1] > limit:
            raise InputError(
                f"sequences of {x.shape[1]} tokens do not fit the model's {limit} positions: "
                "shorten them, or build the model with more positions."
            )
        return None
    ids = _whole_numbers("position_ids", position_ids, x.device)
    if ids.shape not in (x.shape[:2], x.shape[1:2]):
        raise InputError(
            f"position_ids have shape {tuple(ids.shape)}: {tuple(x.shape[:2])} is needed, or "
            f"{(x.shape[1],)}."
        )
    most = limit or 2**31
    if _may_look(x) and not bool(((ids >= 0) & (ids < most)).all()):
        raise InputError(
            f"position_ids go from {int(ids.min())} to {int(ids.max())}: allowed are 0 to "
            f"{most - 1}."
        )
    return ids.expand(x.shape[:2])


def as_budget(token_budget: Any) -> int | None:
    """A token budget as an int, or None."""
    if token_budget is None:
        return None
    budget = as_int(token_budget)
    if budget is None or budget < 1:
        raise InputError(
            f"token_budget is {token_budget!r}: it must be a whole number from 1 on, or None for "
            "the default."
        )
    return budget


def _blank_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """x with 0 past each row's length: not even a NaN there can matter."""
    padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return x.masked_fill(padding.reshape(*padding.shape, *(1,) * (x.ndim - 2)), 0)


def as_at(at: Any) -> Tensor | Sequence[int] | None:
    """numpy's masks as tensors, anything else that can be gone through as a list."""
    if at is None or (isinstance(at, Tensor) and at.dtype == torch.bool):
        return at
    if isinstance(at, np.ndarray) and at.dtype == bool:
        return torch.from_numpy(np.ascontiguousarray(at))
    try:
        return at.tolist() if isinstance(at, Tensor | np.ndarray) else list(at)
    except TypeError:
        raise _no_positions(at) from None


def _no_positions(at: Any) -> InputError:
    return InputError(
        f"at is {at!r}: it must be a list of positions, or a bool mask of the shape of the batch."
    )


def check_mask(at: Tensor, batch: int, time: int) -> None:
    """InputError unless the mask has the shape of the batch."""
    if at.shape != (batch, time):
        raise InputError(
            f"at is a mask of shape {tuple(at.shape)}: a mask must have the shape of the batch, "
            f"{(batch, time)}."
        )


def positions(at: Tensor | Sequence[int] | None, time: int) -> list[int]:
    """Positions in `at` as ints below `time`; all of them for None."""
    if at is None:
        return list(range(time))
    try:
        positions = [operator.index(t) for t in at]
    except TypeError:
        raise _no_positions(at) from None
    if any(isinstance(t, bool | np.bool_) or getattr(t, "dtype", None) == torch.bool for t in at):
        raise _no_positions(at)
    bad = [t for t in positions if not 0 <= t < time]
    if bad:
        raise InputError(f"at asks for position {bad[0]}: allowed are 0 to {time - 1}.")
    return positions
