"""`all_prefixes`: what it means, what it checks, and which implementation computes it."""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from entp.config import IMPLS
from entp.engine import packed, reference
from entp.engine.budget import default_token_budget
from entp.engine.layout import positions_of, split, trim
from entp.errors import InputError, one_of

if TYPE_CHECKING:
    from entp.model import Transformer

LARGEST_HEAD, LARGEST_QUERIES = 128, {2: 2**14, 4: 2**14, 8: 2**12}
"""Limits of the Triton kernels, whose shared memory is 227 KiB: numbers in a head, and in the queries of all heads, each as
wide as a row, by the bytes of a number."""


class Choice(NamedTuple):
    """Which implementation runs, and why."""

    impl: str
    reason: str


def choose(impl: str = "auto", device: torch.device | str = "cpu", model: Transformer | None = None) -> Choice:
    """What `impl` means on a device, for a model. A name asked for is taken as it is: it works or says why not."""
    if impl not in IMPLS:
        raise one_of("impl", impl, IMPLS)
    where = torch.device(device)
    why_not = triton_missing(where) or (model and _too_much_for_kernels(model, where))
    if impl == "triton" and why_not:
        raise InputError(f"impl 'triton' cannot run here: {why_not}. Use impl='packed', which gives the same numbers.")
    if impl != "auto":
        return Choice(impl, "asked for by name")
    if where.type == "cuda" and not why_not:
        return Choice("triton", "exact, and the fastest on CUDA")
    return Choice("packed", f"exact and faster than the reference loop; no kernels: {why_not or 'the device is a CPU'}")


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on this device, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device.type}, and kernels need CUDA (TRITON_INTERPRET=1 runs them slowly on a CPU)"
    return None


def _too_much_for_kernels(model: Transformer, device: torch.device) -> str | None:
    """Why the kernels cannot run this model, or None if they can."""
    config, weight = model.config, next(model.parameters())
    if weight.dtype not in (torch.float32, torch.float64):
        return f"the weights are {weight.dtype}: keep them in float32 and use torch.autocast for half precision"
    if config.width // config.heads > LARGEST_HEAD:
        return f"head size {config.width // config.heads} is above {LARGEST_HEAD}"
    size = 2 if torch.is_autocast_enabled(device.type) else weight.element_size()
    widest = LARGEST_QUERIES[size] // max(16, 1 << (config.heads - 1).bit_length())
    if config.width > widest:
        return f"width {config.width} is above {widest}, the most for {config.heads} heads in {8 * size} bits"
    return None


def _implementation(name: str, generous: bool) -> Callable[[Transformer, Tensor, Tensor], Tensor]:
    """The function (model, x, wanted) -> (M, D) of an implementation; generous: with memory, where that saves time."""
    if name == "reference":
        return reference.prefix_hidden
    if name == "packed":
        return packed.prefix_hidden
    from entp.engine.triton import stack

    return functools.partial(stack.prefix_hidden, generous=generous)


def all_prefixes(
    model: Transformer,
    x: Tensor,
    at: Tensor | np.ndarray | Sequence[int] | None = None,
    impl: str = "auto",
    *,
    lengths: Tensor | None = None,
    token_budget: int | None = None,
) -> Tensor:
    """ENTP: for each wanted position t the model's output with only tokens 0..t visible, and full attention among them.

    x: token ids (B, T), or vectors (B, T, input_dim).
    at: None for all positions -> (B, T, outputs); a list of K positions -> (B, K, outputs);
        a bool mask (B, T) -> (number of True, outputs), sequence by sequence.
    lengths: (B,) true lengths of rows padded on the right; outputs at padding are 0 and nothing depends on it.
    token_budget: most rows computed at once. Chunks are recomputed in the backward pass, so that only one is in memory. Without
        one the kernels also make activations of large inputs again instead of keeping them; with one, memory is the caller's.
    """
    compute, at = _implementation(choose(impl, x.device, model).impl, token_budget is not None), _as_at(at)
    x, lengths = check_inputs(model, x, lengths)
    wanted = wanted_prefixes(x, at, lengths)
    if token_budget is not None and token_budget < 1:
        raise InputError(f"token_budget is {token_budget}: it must be at least 1, or None for the default.")
    budget = token_budget or default_token_budget(model, x.device)
    rows = _in_chunks(compute, model, x, wanted, budget)
    if isinstance(at, Tensor) and at.dtype == torch.bool:
        return model.readout(rows) if lengths is None else _spread(model.readout(rows), wanted)[at]
    return select(model, _spread(rows, wanted), at, lengths)


def causal_hidden(
    model: Transformer, x: Tensor, mode: str, *, lengths: Tensor | None, prefix: Tensor | int | None, impl: str
) -> Tensor:
    """The last block's output (B, T, D) in mode decoder or prefix: by torch, or by the kernels; `auto` as in mode entp."""
    free = prefix if mode == "prefix" else 0
    if isinstance(free, Tensor):
        takes = lengths is None and free.shape == x.shape[:1] and free.device == x.device
    else:
        takes = lengths is None and free is not None and (mode == "decoder" or free >= 1)
    if impl == "triton" and not takes:
        choose(impl, x.device, model)  # works or says why not
        raise InputError(
            f"impl 'triton' in mode {mode} takes no padding, and in mode prefix one number from 1 on, or a tensor with one for "
            f"each sequence, on their device (got {prefix}): use impl='auto' for anything else."
        )
    if choose(impl, x.device, model).impl != "triton" or not takes:
        return model.hidden(x, mode, lengths=lengths, prefix=prefix)
    from entp.engine.triton import stack

    assert free is not None
    return stack.causal_hidden(model, x, free)


def wanted_prefixes(x: Tensor, at: Tensor | Sequence[int] | None, lengths: Tensor | None) -> Tensor:
    """`at` as a bool mask (B, T) on the CPU, without padding: laying prefixes out must not wait for the device."""
    batch, time = x.shape[:2]
    if isinstance(at, Tensor) and at.dtype == torch.bool:
        _check_mask(at, batch, time)
        wanted = at.cpu()
    else:
        wanted = torch.zeros(batch, time, dtype=torch.bool)
        wanted[:, _positions(at, time)] = True
    if lengths is not None:
        wanted = wanted & (torch.arange(time) < lengths.cpu()[:, None])
    return wanted


def select(
    model: Transformer, hidden_BTD: Tensor, at: Tensor | np.ndarray | Sequence[int] | None, lengths: Tensor | None
) -> Tensor:
    """Outputs at the positions `at` (see all_prefixes) of hidden states (B, T, D); 0 at padding."""
    time, at = hidden_BTD.shape[1], _as_at(at)
    padding = None
    if lengths is not None:
        padding = torch.arange(time, device=hidden_BTD.device) >= lengths[:, None]
    if isinstance(at, Tensor) and at.dtype == torch.bool:
        _check_mask(at, *hidden_BTD.shape[:2])
        rows = positions_of(at, hidden_BTD.device)
        out = model.readout(hidden_BTD.flatten(0, 1).index_select(0, rows))
        padding = None if padding is None else padding.flatten()[rows]
    else:
        index = torch.as_tensor(_positions(at, time), dtype=torch.long, device=hidden_BTD.device)
        every = at is None
        out = model.readout(hidden_BTD if every else hidden_BTD[:, index])
        padding = padding if padding is None or every else padding[:, index]
    return out if padding is None else out.masked_fill(padding[..., None], 0)


def check_inputs(model: Transformer, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x with its padding blanked and lengths as a tensor beside it; InputError for inputs the model cannot read."""
    config = model.config
    if config.input_dim is None and (x.ndim != 2 or x.is_floating_point()):
        raise InputError(f"the model reads token ids (batch, time) of an integer type, got {tuple(x.shape)} of {x.dtype}.")
    if config.input_dim is not None and (x.ndim != 3 or x.shape[2] != config.input_dim or not x.is_floating_point()):
        raise InputError(f"the model reads vectors (batch, time, {config.input_dim}), got {tuple(x.shape)} of {x.dtype}.")
    x = x.long() if config.input_dim is None else x
    if x.shape[1] < 1:
        raise InputError("the sequences are empty: at least one token is needed.")
    if config.position != "none" and x.shape[1] > config.positions:
        raise InputError(
            f"sequences of {x.shape[1]} tokens do not fit the model's {config.positions} positions: "
            "shorten them, or build the model with more positions."
        )
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=x.device)
        if lengths.shape != x.shape[:1] or not bool(((lengths >= 1) & (lengths <= x.shape[1])).all()):
            raise InputError(f"lengths must be {x.shape[0]} numbers from 1 to {x.shape[1]}, got {lengths.tolist()}.")
        x = _blank_padding(x, lengths)
    if config.vocab is not None and not x.is_cuda and not bool(((x >= 0) & (x < config.vocab)).all()):
        raise InputError(f"token ids go from {int(x.min())} to {int(x.max())}: the vocabulary is 0 to {config.vocab - 1}.")
    return x, lengths


def _blank_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """x with 0 in place of whatever stands past each row's length, so that not even a NaN there can matter."""
    padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return x.masked_fill(padding.reshape(*padding.shape, *(1,) * (x.ndim - 2)), 0)


def _in_chunks(compute: Callable[..., Tensor], model: Transformer, x: Tensor, wanted: Tensor, budget: int) -> Tensor:
    """compute(model, x, wanted), at most `budget` rows at a time."""
    time = x.shape[1]
    at_most = x.shape[0] * time * (time + 1) // 2
    chunks = [wanted] if at_most <= budget else list(split(wanted, budget))
    if len(chunks) <= 1:
        return compute(model, x[trim(wanted)], wanted[trim(wanted)])
    keep = torch.is_grad_enabled()
    used = [(x[trim(c)], c[trim(c)]) for c in chunks]
    parts = [checkpoint(compute, model, *u, use_reentrant=False) if keep else compute(model, *u) for u in used]
    where = torch.cat([c.flatten().nonzero()[:, 0] for c in chunks])
    return torch.cat(parts)[torch.argsort(where)]


def _spread(rows: Tensor, wanted: Tensor) -> Tensor:
    """Rows (M, ...) back to (B, T, ...), 0 elsewhere."""
    out = rows.new_zeros(wanted.numel(), *rows.shape[1:])
    return out.index_copy(0, positions_of(wanted, rows.device), rows).view(*wanted.shape, *rows.shape[1:])


def _as_at(at: Tensor | np.ndarray | Sequence[int] | None) -> Tensor | Sequence[int] | None:
    """numpy's masks as tensors, its other arrays as lists."""
    if not isinstance(at, np.ndarray):
        return at
    return torch.from_numpy(np.ascontiguousarray(at)) if at.dtype == bool else at.tolist()


def _check_mask(at: Tensor, batch: int, time: int) -> None:
    if at.shape != (batch, time):
        raise InputError(f"at is a mask of shape {tuple(at.shape)}: a mask must have the shape of the batch, {(batch, time)}.")


def _positions(at: Tensor | Sequence[int] | None, time: int) -> list[int]:
    if at is None:
        return list(range(time))
    try:
        positions = [operator.index(t) for t in at]
    except TypeError:
        positions = None
    if positions is None or any(isinstance(t, bool) for t in at):
        raise InputError(f"at is {at!r}: it must be a list of positions, or a bool mask of the shape of the batch.")
    bad = [t for t in positions if not 0 <= t < time]
    if bad:
        raise InputError(f"at asks for position {bad[0]}: allowed are 0 to {time - 1}.")
    return positions
