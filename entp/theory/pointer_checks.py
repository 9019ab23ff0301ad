"""What `entp theory` checks of chase's and compose's weights: how, and whether it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from entp.model import Transformer
from entp.tasks.base import IGNORE, Batch
from entp.tasks.composition import Compose
from entp.tasks.pointers import Chase
from entp.theory.pointers import (
    chase_decoder,
    chase_encoder,
    compose_by_arcs,
    compose_decoder,
    compose_encoder,
    tried,
)

HOPS = (1, 2, 3, 4, 8, 16)
STEPS = (1, 2, 3, 4, 8)
SIZE = 20
Found = tuple[str, bool]


def chase_by_doubling() -> Found:
    """An encoder of width 6: a block for each bit of the hops."""
    return _chase(chase_encoder, "entp", lambda hops: (hops.bit_length(), 6))


def chase_one_by_one() -> Found:
    """A decoder of width 5: a block for each hop."""
    return _chase(chase_decoder, "decoder", lambda hops: (hops, 5))


def chase_by_mode() -> Found:
    """The encoder's weights: right with a prefix, wrong under a causal mask."""
    task = Chase(32, 16)
    causal, prefix = _shares(chase_encoder(32, 16), task)
    return f"random 100: {_told(causal, prefix)}", prefix == 1 and causal < 0.5


def compose_by_doubling() -> Found:
    """An encoder of width 8: one block, and one for each bit of the steps."""
    return _compose(compose_encoder, "entp", lambda steps: (1 + steps.bit_length(), 8))


def compose_one_by_one() -> Found:
    """A decoder of width 8: one block, and one for each step."""
    return _compose(compose_decoder, "decoder", lambda steps: (1 + steps, 8))


def compose_by_mode() -> Found:
    """The encoder's weights: wrong with a prefix too."""
    task = Compose(8, 2, 8)
    causal, prefix = _shares(compose_encoder(8, 2, 8), task)
    return f"random 100: {_told(causal, prefix)}", max(causal, prefix) < 0.5


def compose_without_choices() -> Found:
    """A decoder of width 12: one block, and one for each doubling."""
    right = True
    for steps in STEPS[1:]:
        model, task = compose_by_arcs(steps, 8), Compose(steps, 1, 8)
        right = right and _size(model) == (1 + (steps - 1).bit_length(), 12)
        right = right and _right(model, task.batch(0, "test", 0, SIZE), "decoder")
    return f"weights: {_sizes(model)}; random {SIZE} each", right


def _chase(
    build: Callable[[int, int], Transformer], mode: str, size: Callable[[int], tuple[int, int]]
) -> Found:
    right = _right(build(3, 5), every_chase(3, 5), mode)
    for hops in HOPS:
        model, task = build(32, hops), Chase(32, hops, "function")
        right = right and _size(model) == size(hops)
        right = right and _right(model, task.batch(0, "test", 0, SIZE), mode)
    how = f"exhaustive on 3 nodes, random {SIZE} each on 32"
    return f"weights: {_sizes(model)} for {HOPS[-1]} hops; {how}", right


def _compose(
    build: Callable[[int, int, int], Transformer],
    mode: str,
    size: Callable[[int], tuple[int, int]],
) -> Found:
    right = True
    for steps in STEPS:
        model, task = build(steps, 2, 8), Compose(steps, 2, 8)
        right = right and _size(model) == size(steps)
        right = right and _right(model, task.batch(0, "test", 0, SIZE), mode)
    return f"weights: {_sizes(model)} for {STEPS[-1]} steps; random {SIZE} each", right


def every_chase(nodes: int, hops: int) -> Batch:
    """Every function on these nodes with every query, asked for 1, 2, ... hops."""
    task = Chase(nodes, hops, "function")
    rows = np.array(list(itertools.product(range(nodes), repeat=nodes + 1)))
    table, queries = rows[:, :nodes], np.repeat(rows[:, nodes:], hops, axis=1)
    none = np.full_like(table, IGNORE)
    return Batch(
        np.concatenate([table, queries], axis=1),
        np.concatenate([none, task.answers(table, queries)], axis=1),
    )


def _right(model: Transformer, batch: Batch, mode: str) -> bool:
    got = tried(model, batch, mode)
    return got.right == got.targets


def _shares(model: Transformer, task: Chase | Compose) -> list[float]:
    """What is right under a causal mask, and in mode prefix-lm."""
    batch = task.batch(0, "test", 0, 100)
    found = [tried(model, batch, mode, task.prefix) for mode in ("decoder", "prefix-lm")]
    return [one.right / one.targets for one in found]


def _told(causal: float, prefix: float) -> str:
    return f"{prefix:.0%} right with a prefix, {causal:.0%} under a causal mask".replace("%", " %")


def _size(model: Transformer) -> tuple[int, int]:
    return model.config.layers, model.config.width


def _sizes(model: Transformer) -> str:
    return "{} layers, width {}".format(*_size(model))
