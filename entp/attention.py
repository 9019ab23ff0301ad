"""The three modes as masks, and the one function that computes attention.

A mask says which keys a query may see: `visible("decoder", 4)[0, query, key]`. ENTP has no single mask: each prediction has
one of its own, full over its prefix (paper, Figure "Attention patterns").
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

from entp.checks import whole
from entp.config import MODES
from entp.errors import InputError, one_of

# cuDNN's attention returns NaN gradients with some masks and for single queries, so it is kept out of both.
_SAFE_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def as_prefix(prefix: Any, device: torch.device | None = None) -> Tensor | int | None:
    """A prefix given as any whole number, or as a list, array or tensor of them, as an int or a tensor."""
    number = None if isinstance(prefix, Tensor) else whole(prefix)
    if prefix is None or number is not None:
        return number
    try:
        given = prefix if isinstance(prefix, Tensor) else torch.as_tensor(np.array(prefix), device=device)
    except (TypeError, ValueError, RuntimeError):
        given = None
    if given is None or given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        raise InputError(f"prefix is {prefix!r}: it must be a whole number, or one for each sequence.")
    return given


def visible(
    mode: str,
    time: int,
    *,
    prefix: Tensor | np.ndarray | Sequence[int] | int | None = None,
    lengths: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each query sees, as bool (batch or 1, query, key), on `device` or where its arguments are; never padding.

    decoder: keys up to the query. prefix: also all of the first `prefix` tokens (an int, or one per sequence).
    """
    given = as_prefix(prefix, device)
    if device is None:
        device = lengths.device if lengths is not None else given.device if isinstance(given, Tensor) else None
    steps = torch.arange(time, device=device)
    mask = (steps[None, :] <= steps[:, None])[None]
    if mode == "prefix":
        if given is None:
            raise InputError(
                "mode prefix needs prefix=: the number of first tokens that see each other, or one number per sequence."
            )
        if not (given >= 1 if isinstance(given, int) else bool((given >= 1).all())):
            raise InputError(f"prefix must be at least 1 token, got {torch.as_tensor(given).tolist()}.")
        first = given if isinstance(given, int) else given.to(device).reshape(-1, 1, 1)
        mask = mask | (steps[None, None, :] < first) & (steps[None, :, None] < first)
    elif mode != "decoder":
        raise one_of("mode", mode, ("decoder", "prefix"))
    if lengths is not None:
        mask = mask & (steps[None, None, :] < lengths.reshape(-1, 1, 1))
    return mask


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
    """softmax(scale q k^T + bias) v for q (batch, heads, query, d), k and v (batch, heads or fewer, key, d).

    mask: bool, True = seen. bias: (batch or 1, heads, query, key). Keys and values of fewer heads are shared by groups.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    if bias is not None:
        bias = bias.to(q.dtype)
        if causal:
            mask, causal = visible("decoder", q.shape[-2], device=q.device)[:, None], False
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    guarded = q.is_cuda and (mask is not None or q.shape[-2] == 1)
    with sdpa_kernel(_SAFE_BACKENDS) if guarded else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def draw(mode: str, time: int = 8, prefix: int = 4) -> str:
    """The pattern of a mode in characters; for entp, the separate patterns of the last few predictions side by side.

    decoder:  # . .      rows are queries, columns keys; # is seen, . is masked
              # # .
              # # #
    """
    if mode not in MODES:
        raise one_of("mode", mode, MODES)
    if mode != "entp":
        return "\n".join(_line(row) for row in visible(mode, time, prefix=prefix)[0].tolist())
    squares = []
    for n in range(max(1, time - 2), time + 1):
        square = torch.zeros(time, time, dtype=torch.bool)
        square[:n, :n] = True
        squares.append([_line(row) for row in square.tolist()])
    return "\n".join("   ".join(parts) for parts in zip(*squares, strict=True))


def _line(row: list[bool]) -> str:
    return " ".join("#" if seen else "." for seen in row)
