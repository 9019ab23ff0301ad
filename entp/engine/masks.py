"""The three modes as masks, and the one function that computes attention.

A mask says which keys a query sees: `visible("decoder", 4)[0, query, key]`. ENTP has no single
mask: each prediction has one of its own, full over its prefix (paper, Figure "Attention patterns").
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from entp.config import check_mode, refresh_of
from entp.errors import InputError, one_of
from entp.fields import as_int

# cuDNN's attention returns NaN gradients with some masks and for single queries: neither uses it.
_SAFE_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def as_prefix(prefix: Any, device: torch.device | None = None) -> Tensor | int | None:
    """A prefix as an int or a tensor, given as any whole number, or a list or array of them."""
    if prefix is None:
        return None
    if isinstance(prefix, Tensor):
        return _whole_tensor(prefix, prefix)
    number = as_int(prefix)
    if number is not None:
        return number
    try:
        given = torch.as_tensor(np.array(prefix), device=device)
    except (TypeError, ValueError, RuntimeError):
        raise _no_prefix(prefix) from None
    return _whole_tensor(given, prefix)


def _whole_tensor(given: Tensor, prefix: Any) -> Tensor:
    """The tensor, or an InputError if it has no whole numbers."""
    if given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        raise _no_prefix(prefix)
    return given


def _no_prefix(prefix: Any) -> InputError:
    return InputError(f"prefix is {prefix!r}: it must be a whole number, or one for each sequence.")


def visible(
    mode: str,
    time: int,
    *,
    prefix: Tensor | np.ndarray | Sequence[int] | int | None = None,
    lengths: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each query sees, as bool (batch or 1, query, key); never padding.

    decoder: keys up to the query. prefix-lm: also all of the first `prefix` tokens (an int, or one
        per sequence).
    device: where the mask is made; without one, where lengths or prefix are.
    """
    given = as_prefix(prefix, device)
    if device is None:
        device = _device_of(lengths, given)
    steps = torch.arange(time, device=device)
    mask = (steps[None, :] <= steps[:, None])[None]
    if mode == "prefix-lm":
        first = _prefix_length(given, device)
        mask = mask | (steps[None, None, :] < first) & (steps[None, :, None] < first)
    elif mode != "decoder":
        raise one_of("mode", mode, ("decoder", "prefix-lm"))
    if lengths is not None:
        mask = mask & (steps[None, None, :] < lengths.reshape(-1, 1, 1))
    return mask


def _device_of(lengths: Tensor | None, prefix: Tensor | int | None) -> torch.device | None:
    if lengths is not None:
        return lengths.device
    if isinstance(prefix, Tensor):
        return prefix.device
    return None


def _prefix_length(prefix: Tensor | int | None, device: torch.device | None) -> Tensor | int:
    """The prefix, an int or (B, 1, 1), or an InputError if it is not at least 1."""
    if prefix is None:
        raise InputError(
            "mode prefix-lm needs prefix=: the number of first tokens that see each other, or one "
            "number per sequence."
        )
    if isinstance(prefix, int):
        if prefix < 1:
            raise InputError(f"prefix must be at least 1 token, got {prefix}.")
        return prefix
    # Elsewhere than on a CPU, looking at values would wait for the device.
    if prefix.device.type == "cpu" and not bool((prefix >= 1).all()):
        raise InputError(f"prefix must be at least 1 token, got {prefix.tolist()}.")
    return prefix.to(device).reshape(-1, 1, 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v, (batch, heads, query, d).

    q: (batch, heads, query, d). k, v: (batch, heads or fewer, key, d); fewer heads are shared by
        groups.
    mask: bool, True = seen. bias: (batch or 1, heads or 1, query, key).
    """
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if bias is not None:
        bias = bias.to(q.dtype)
        if causal:
            mask, causal = visible("decoder", q.shape[-2], device=q.device)[:, None], False
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    guarded = q.is_cuda and (mask is not None or q.shape[-2] == 1)
    backends = sdpa_kernel(_SAFE_BACKENDS) if guarded else contextlib.nullcontext()
    with backends:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale
        )


def draw(mode: str, time: int = 8, prefix: int = 4) -> str:
    """The pattern of a mode in characters; for entp and refresh-N, those of the last three
    predictions in a row.

    decoder:  # . .      rows are queries, columns keys; # is seen, . is masked
              # # .
              # # #
    """
    check_mode(mode)
    every = 1 if mode == "entp" else refresh_of(mode)
    if every is None:
        return "\n".join(_line(row) for row in visible(mode, time, prefix=prefix)[0].tolist())
    squares = []
    for n in range(max(1, time - 2), time + 1):
        square = torch.zeros(time, time, dtype=torch.bool)
        square[:n, :n] = visible("prefix-lm", n, prefix=max(1, n // every * every))[0]
        squares.append([_line(row) for row in square.tolist()])
    return "\n".join("   ".join(lines) for lines in zip(*squares, strict=True))


def _line(row: list[bool]) -> str:
    return " ".join("#" if seen else "." for seen in row)
