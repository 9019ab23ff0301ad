"""Chase and compose as weights set by hand: right where they should be, wrong where they must."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.base import IGNORE, Batch, Task
from entp.tasks.composition import Compose
from entp.tasks.pointers import Chase
from entp.theory import pointer_checks
from entp.theory.pointers import (
    chase_decoder,
    chase_encoder,
    compose_by_arcs,
    compose_decoder,
    compose_encoder,
    tried,
)

BUILDERS = {"entp": chase_encoder, "decoder": chase_decoder}
COMPOSE = {"entp": compose_encoder, "decoder": compose_decoder}
modes = pytest.mark.parametrize("mode", ["entp", "decoder"])


def chase_batch(tables: list[tuple[int, ...]], hops: int) -> Batch:
    """Every table with every query, each asked for 1, 2, ... hops, answered by a walk."""
    nodes = len(tables[0])
    x = [[*table, *[query] * hops] for table in tables for query in range(nodes)]
    y = []
    for row in x:
        node, answers = row[-1], []
        for _ in range(hops):
            node = row[node]
            answers.append(node)
        y.append([IGNORE] * nodes + answers)
    return Batch(np.array(x), np.array(y))


def cycles(nodes: int) -> list[tuple[int, ...]]:
    """All tables that are one cycle through all nodes."""
    found = []
    for order in itertools.permutations(range(1, nodes)):
        walk = [0, *order]
        after = dict(zip(walk, [*walk[1:], 0], strict=True))
        found.append(tuple(after[node] for node in range(nodes)))
    return found


def by_number(model: Transformer, task: Task, mode: str, batch: Batch, first: int) -> list[float]:
    """The share of right answers to the first query, the second, ..."""
    with torch.no_grad():
        at = torch.from_numpy(batch.target_mask)
        outputs = model(torch.from_numpy(batch.x), mode, at=at, prefix=task.prefix)
    right = outputs.argmax(-1).numpy() == batch.targets
    number = batch.position - first
    return [float(right[number == n].mean()) for n in range(number.max() + 1)]


@modes
@pytest.mark.parametrize(("nodes", "hops"), [(2, 5), (3, 7), (4, 8)])
def test_all_functions_on_few_nodes(mode: str, nodes: int, hops: int) -> None:
    """8,799 targets in all."""
    batch = chase_batch(list(itertools.product(range(nodes), repeat=nodes)), hops)
    got = tried(BUILDERS[mode](nodes, hops), batch, mode)
    assert got.right == got.targets == nodes**nodes * nodes * hops
    assert got.margin == pytest.approx(60)


@modes
@pytest.mark.parametrize("nodes", [5, 6])
def test_all_cycles(mode: str, nodes: int) -> None:
    batch = chase_batch(cycles(nodes), nodes)
    got = tried(BUILDERS[mode](nodes, nodes), batch, mode)
    assert got.right == got.targets == len(cycles(nodes)) * nodes**2
    assert got.margin == pytest.approx(60)


@modes
@pytest.mark.parametrize("table", ["cycle", "function"])
@pytest.mark.parametrize(("nodes", "hops", "size"), [(32, 16, 200), (64, 32, 30)])
def test_large_tables_in_float32(mode: str, table: Any, nodes: int, hops: int, size: int) -> None:
    """Scores are multiples of 60 below 2^26, which float32 holds exactly."""
    model = BUILDERS[mode](nodes, hops).float()
    got = tried(model, Chase(nodes, hops, table).batch(0, "test", 0, size), mode)
    assert (got.right, got.margin) == (size * hops, 60)


@pytest.mark.parametrize("hops", range(1, 10))
def test_blocks_and_width(hops: int) -> None:
    """Widths are fixed; an encoder's blocks grow like the logarithm, a decoder's like the hops."""
    encoder, decoder = chase_encoder(9, hops).config, chase_decoder(9, hops).config
    blocks = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 3, 7: 3, 8: 4, 9: 4}[hops]
    assert (encoder.layers, encoder.width, encoder.heads) == (blocks, 6, 1)
    assert (decoder.layers, decoder.width, decoder.heads) == (hops, 5, 1)
    encoder, decoder = compose_encoder(hops, 2, 3).config, compose_decoder(hops, 2, 3).config
    assert (encoder.layers, encoder.width, encoder.heads) == (1 + blocks, 8, 2)
    assert (decoder.layers, decoder.width, decoder.heads) == (1 + hops, 8, 2)


def test_chase_encoder_takes_a_prefix_and_no_causal_mask() -> None:
    """A node sees earlier nodes only: the second hop is right where it goes back, every second."""
    task, model = Chase(32, 16), chase_encoder(32, 16)
    batch = task.batch(0, "test", 0, 300)
    assert by_number(model, task, "prefix-lm", batch, 32) == [1.0] * 16
    right = by_number(model, task, "decoder", batch, 32)
    assert right[0] == 1.0
    assert right[1:4] == [pytest.approx(share, abs=0.06) for share in (0.5, 0.5, 0.13)]
    assert max(right[8:]) < 0.05


def test_decoders_are_right_in_every_mode() -> None:
    for task, model in (
        (Chase(12, 6), chase_decoder(12, 6)),
        (Compose(3, 2, 4), compose_decoder(3, 2, 4)),
        (Compose(3, 1, 4), compose_by_arcs(3, 4)),
    ):
        batch = task.batch(0, "test", 0, 40)
        for mode in ("entp", "decoder", "prefix-lm"):
            got = tried(model, batch, mode, task.prefix)
            assert got.right == got.targets, (task.name, mode)


def compose_batch(task: Compose, values: list[tuple[int, ...]]) -> Batch:
    """Everything there is: a value list for each choice of each table, starts and choices."""
    tables = itertools.product(values, repeat=task.tables * task.choices)
    starts, choices = range(task.size), range(task.choices)
    x, y = [], []
    for each, start in itertools.product(tables, starts):
        for chosen in itertools.product(choices, repeat=task.tables):
            value, answers = start, []
            for step, choice in enumerate(chosen):
                value = each[step * task.choices + choice][value]
                answers.append(value)
            x.append([*itertools.chain(*placed(task, each)), start, *chosen])
            y.append([IGNORE] * (task.start_at + 1) + answers)
    return Batch(np.array(x), np.array(y))


def placed(task: Compose, each: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, ...]]:
    """The tables' parts in the order of the sequence."""
    steps = range(task.tables)
    for step in steps if task.order == "first-to-last" else reversed(steps):
        yield from each[step * task.choices : (step + 1) * task.choices]


@modes
@pytest.mark.parametrize("order", ["first-to-last", "last-to-first"])
@pytest.mark.parametrize("of", [(2, 1, 2), (3, 1, 2), (2, 2, 2), (2, 1, 3)])
def test_all_functions_of_small_tables(mode: str, order: Any, of: tuple[int, int, int]) -> None:
    """Not permutations alone: 8,918 targets in each order."""
    task = Compose(*of, order)
    batch = compose_batch(task, list(itertools.product(range(task.size), repeat=task.size)))
    got = tried(COMPOSE[mode](*of, order), batch, mode)
    assert got.right == got.targets == len(batch.x) * task.tables
    assert got.margin == pytest.approx(60)


@modes
@pytest.mark.parametrize("of", [(1, 1, 2), (1, 5, 3), (5, 3, 6), (4, 4, 8), (8, 2, 8), (16, 2, 4)])
def test_random_tables_in_float32(mode: str, of: tuple[int, int, int]) -> None:
    """Up to 16 steps; also more choices than values."""
    model = COMPOSE[mode](*of).float()
    got = tried(model, Compose(*of).batch(0, "test", 0, 20), mode)
    assert (got.right, got.margin) == (20 * of[0], 60)


@pytest.mark.parametrize("order", ["first-to-last", "last-to-first"])
def test_compose_encoder_takes_neither_prefix_nor_causal_mask(order: Any) -> None:
    """Rows of a table must know the next choice, which no prefix holds: hardly above guessing."""
    task, model = Compose(8, 2, 8, order), compose_encoder(8, 2, 8, order)
    batch = task.batch(0, "test", 0, 300)
    for mode in ("decoder", "prefix-lm"):
        right = by_number(model, task, mode, batch, task.start_at + 1)
        assert right[0] == 1.0
        assert max(right[1:]) < 0.4
        assert max(right[2:]) < 0.25


def test_control_without_choices_and_back_to_front_doubles_under_a_causal_mask() -> None:
    task, model = Compose(8, 1, 6, "last-to-first"), compose_encoder(8, 1, 6, "last-to-first")
    batch = task.batch(0, "test", 0, 100)
    for mode in ("entp", "decoder", "prefix-lm"):
        assert tried(model, batch, mode, task.prefix).right == 800
    forward = Compose(8, 1, 6)
    batch = forward.batch(0, "test", 0, 300)
    right = by_number(compose_encoder(8, 1, 6), forward, "decoder", batch, forward.start_at + 1)
    assert right[0] == 1.0
    assert max(right[1:]) < 0.3


@pytest.mark.parametrize("tables", [1, 2, 3, 4, 5, 8, 9, 16])
def test_permutations_without_choices_are_shallow_for_a_decoder(tables: int) -> None:
    """Whatever the order: without choices compose does not separate."""
    model, task = compose_by_arcs(tables, 5), Compose(tables, 1, 5)
    blocks = {1: 2, 2: 2, 3: 3, 4: 3, 5: 4, 8: 4, 9: 5, 16: 5}[tables]
    assert (model.config.layers, model.config.width, model.config.heads) == (blocks, 12, 2)
    for precision in (torch.float64, torch.float32):
        got = tried(model.to(precision), task.batch(0, "test", 0, 60), "decoder")
        assert got.right == got.targets == 60 * tables
        assert got.margin == pytest.approx(60)


def test_arcs_are_right_on_all_permutations_and_need_them() -> None:
    task, model = Compose(3, 1, 3), compose_by_arcs(3, 3)
    batch = compose_batch(task, list(itertools.permutations(range(3))))
    assert tried(model, batch, "decoder").right == 6**3 * 3 * 3
    functions = compose_batch(task, [(0, 0, 1), (2, 1, 1)])
    assert tried(model, functions, "decoder").right < functions.targets.size


def test_wrong_answers_have_a_negative_margin() -> None:
    batch = Chase(6, 3).batch(0, "test", 0, 5)
    y = batch.y.copy()
    y[2, -1] = (y[2, -1] + 1) % 6
    got = tried(chase_encoder(6, 3), Batch(batch.x, y), "entp")
    assert (got.right, got.targets) == (14, 15)
    assert got.margin < 0


@pytest.mark.parametrize(
    ("build", "sizes", "says"),
    [
        (chase_encoder, (1, 2), r"task\.nodes 1 must be at least 2"),
        (chase_decoder, (4, 0), r"task\.hops 0 at least 1"),
        (compose_encoder, (2, 0, 4), r"task\.choices 0 must be at least 1"),
        (compose_decoder, (2, 2, 4, "round"), r"unknown task\.order 'round'"),
        (compose_by_arcs, (0, 4), r"task\.tables 0"),
    ],
)
def test_wrong_sizes_are_refused(build: Any, sizes: tuple[Any, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        build(*sizes)


def test_checks_would_see_wrong_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that fetches nothing, weights of another size, and such as need no full attention."""
    assert pointer_checks.chase_one_by_one()[1]
    monkeypatch.setattr(pointer_checks, "HOPS", (4,))

    def short(nodes: int, hops: int) -> Transformer:
        model = chase_decoder(nodes, hops)
        torch.nn.init.zeros_(model.blocks[0].proj.weight)  # type: ignore[union-attr]
        return model

    monkeypatch.setattr(pointer_checks, "chase_decoder", short)
    assert not pointer_checks.chase_one_by_one()[1]
    monkeypatch.setattr(pointer_checks, "chase_decoder", chase_encoder)
    assert not pointer_checks.chase_one_by_one()[1]
    monkeypatch.setattr(pointer_checks, "compose_encoder", compose_decoder)
    assert not pointer_checks.compose_by_mode()[1]


def test_every_chase_is_every_function_with_every_query() -> None:
    batch = pointer_checks.every_chase(3, 5)
    want = chase_batch(list(itertools.product(range(3), repeat=3)), 5)
    assert np.array_equal(batch.x, want.x)
    assert np.array_equal(batch.y, want.y)
