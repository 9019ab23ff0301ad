"""Mode refresh-N: ENTP that is computed anew every N tokens only, between ENTP and a decoder.

Of the n tokens that a prediction reads, the first N floor(n / N) see each other; each of the rest
sees what is before it. With N = 1 it would be ENTP; with N beyond the sequence it is a decoder.
Predictions with the same first tokens are read from one row, under the mask of mode prefix-lm:

    N = 3          row 1      row 2          row 3
    first tokens   none       a b c          a b c d e f
    reads          a b        a b c d e      a b c d e f g h
    predicts after a, b       c, d, e        f, g, h

A sequence of T tokens has T/N + 1 rows where ENTP has T: the cost is ENTP's over N. In generation
the rest is a decoder's with a cache, from one refresh to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from entp.config import refresh_of
from entp.engine.layout import Shared, positions_of, trim, whole_sequences
from entp.engine.protocol import ModelProtocol

WIDTHS = 4
"""Rows are padded to one of so many widths: with four, a quarter more tokens than without padding.
"""

Causal = Callable[..., Tensor]
"""The last block's output (R, W, D) in mode decoder or prefix-lm: as engine.api.causal_hidden."""


class Rows(NamedTuple):
    """Rows of one width."""

    width: int
    sequence: Tensor
    """(R,) the sequence of each."""
    prefix: Tensor
    """(R,) how many first tokens see each other; 1 where none do, which is the same."""
    causal: bool
    """Whether none do in any row."""
    at: Tensor
    """Where the predictions are in (R, W), flat."""


@dataclass(frozen=True, eq=False)
class Refreshed:
    """The rows of a batch, and how their predictions come back in the order of its targets."""

    rows: tuple[Rows, ...]
    order: Tensor


def first_tokens(known: Any, every: int) -> Any:
    """How many first tokens see each other once so many are known, at least 1: a token always sees
    itself."""
    fresh = known // every * every
    return fresh.clip(1) if isinstance(fresh, np.ndarray | Tensor) else max(1, fresh)


def reference_hidden(
    model: ModelProtocol,
    x: Tensor,
    target_mask: Tensor,
    position_ids: Tensor | None,
    every: int,
    causal: Causal,
) -> Tensor:
    """The definition: for each target, one pass over all that its prediction reads."""
    outputs, order = [], []
    for t in range(x.shape[1]):
        rows = target_mask[:, t].nonzero()[:, 0].to(x.device)
        if len(rows):
            ids = None if position_ids is None else position_ids[rows, : t + 1]
            tokens, prefix = x[rows, : t + 1], first_tokens(t + 1, every)
            hidden = causal(model, tokens, "prefix-lm", prefix=prefix, position_ids=ids)
            outputs.append(hidden[:, -1])
            order.append(rows * x.shape[1] + t)
    if not outputs:
        return model.embed(x, position_ids).flatten(0, 1)[:0]
    return torch.cat(outputs)[torch.argsort(torch.cat(order))]


def refreshed_hidden(
    model: ModelProtocol,
    x: Tensor,
    target_mask: Tensor,
    position_ids: Tensor | None,
    every: int,
    causal: Causal,
) -> Tensor:
    """The same, (number of targets, D), with predictions that share a row computed together."""
    layout = lay_out(target_mask, x.device, every)
    if not layout.rows:
        return model.embed(x, position_ids).flatten(0, 1)[:0]
    outputs = []
    for rows in layout.rows:
        tokens = x[:, : rows.width].index_select(0, rows.sequence)
        ids = position_ids
        if ids is not None:
            ids = ids[:, : rows.width].index_select(0, rows.sequence)
        mode, prefix = ("decoder", None) if rows.causal else ("prefix-lm", rows.prefix)
        hidden = causal(model, tokens, mode, prefix=prefix, position_ids=ids)
        outputs.append(hidden.flatten(0, 1).index_select(0, rows.at))
    return torch.cat(outputs).index_select(0, layout.order)


def lay_out(target_mask: Tensor, device: torch.device, every: int) -> Refreshed:
    """The rows that predictions in target_mask (B, T) need."""
    found: Refreshed = _layouts(every)(target_mask, device)
    return found


def row_widths(target_mask: Tensor | np.ndarray, every: int) -> list[int]:
    """Tokens of each row, padding included."""
    mask = target_mask.cpu().numpy() if isinstance(target_mask, Tensor) else target_mask
    widths: list[int] = _padded(_rows_of(mask, every)[1]).tolist()
    return widths


def computed_rows(target_mask: Tensor | np.ndarray, mode: str) -> int:
    """Tokens that run through the layers for these targets in this mode."""
    every, lengths = refresh_of(mode), np.arange(1, target_mask.shape[1] + 1)
    if mode == "entp":
        return int(lengths @ np.asarray(target_mask.sum(0)))
    if every is not None:
        return sum(row_widths(target_mask, every))
    return math.prod(target_mask.shape)


def tables(target_mask: Tensor, every: int, device: torch.device) -> list[object]:
    """What the engine looks up for these targets, made before a step is captured."""
    found: list[object] = [positions_of(target_mask, device)]
    layout = lay_out(target_mask[trim(target_mask)], device, every)
    for rows in layout.rows:
        packing = whole_sequences(len(rows.sequence), rows.width, device)
        found += [packing, packing.tables()]
    return [*found, layout]


def split(target_mask: Tensor, every: int, token_budget: int) -> Iterator[Tensor]:
    """Disjoint masks that add up to target_mask, each of at most token_budget tokens in its rows,
    or of one row."""
    mask = target_mask.cpu().numpy()
    _, widths, of_target = _rows_of(mask, every)
    chunk = np.zeros(len(widths), int)
    size = number = 0
    for row, width in enumerate(widths.tolist()):
        if size and size + width > token_budget:
            size, number = 0, number + 1
        chunk[row], size = number, size + width
    for one in range(number + 1 if len(widths) else 0):
        found = np.zeros_like(mask)
        found[mask.nonzero()] = (chunk == one)[of_target]
        yield torch.from_numpy(found)


@lru_cache(maxsize=64)
def _layouts(every: int) -> Shared:
    return Shared(lambda mask, device: _make(mask, device, every), recent=8)


def _rows_of(mask: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(2, R) the sequence and the refresh of each row, its width, and the row of each target."""
    sequence, time = mask.nonzero()
    many = mask.shape[1] // every + 1
    keys, of_target = np.unique(sequence * many + (time + 1) // every, return_inverse=True)
    widths = np.zeros(len(keys), int)
    widths[of_target] = time + 1  # in order of time: the last is the largest
    return np.stack([keys // many, keys % many]), widths, of_target


def _padded(widths: np.ndarray) -> np.ndarray:
    """Each row's width as one of WIDTHS."""
    step = max(1, -(-int(widths.max(initial=0)) // WIDTHS))
    kinds = (widths - 1) // step
    widest = np.zeros(WIDTHS, int)
    np.maximum.at(widest, kinds, widths)
    return widest[kinds]


def _make(mask: np.ndarray, device: torch.device, every: int) -> Refreshed:
    time = mask.nonzero()[1]
    rows, widths, of_target = _rows_of(mask, every)
    padded, made, order = _padded(widths), [], []
    for width in np.unique(padded).tolist():
        chosen = np.flatnonzero(padded == width)
        place = np.full(len(widths), -1)
        place[chosen] = np.arange(len(chosen))
        targets = np.flatnonzero(place[of_target] >= 0)
        prefix = first_tokens(rows[1, chosen] * every, every)
        arrays = (rows[0, chosen], prefix, place[of_target[targets]] * width + time[targets])
        one, two, three = (torch.from_numpy(a).to(device) for a in arrays)
        made.append(Rows(width, one, two, bool((prefix <= 1).all()), three))
        order.append(targets)
    back = np.argsort(np.concatenate(order)) if order else np.zeros(0, int)
    return Refreshed(tuple(made), torch.from_numpy(back).to(device))
