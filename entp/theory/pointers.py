"""Chase and compose as weights set by hand: pointers followed by doubling, and one by one.

    model = chase_encoder(nodes=32, hops=16)              # 5 blocks, width 6, 1 head
    model = chase_decoder(nodes=32, hops=16)              # 16 blocks, width 5, 1 head
    model = compose_encoder(tables=4, choices=4, size=8)  # 4 blocks, width 8, 2 heads
    model = compose_decoder(tables=4, choices=4, size=8)  # 5 blocks, width 8, 2 heads
    tried(model, Chase(32, 16).batch(0, "test", 0, 64), "entp")

**By doubling.** Every table row holds where its pointer goes. In each block it looks up that row
and takes over where that one's goes: 2, 4, 8, ... steps. A query that asks for k steps looks up a
row in each block as well, and takes the result over where k has that bit. R holds these bits, the
first block's as the highest, so that R >= 2^l tells it, and 2^l is subtracted then; in table rows
every bit is 1. The number of blocks grows like log2 k, and width and heads are fixed.

**One by one.** The query itself goes one step in each block, and stops after k.

Chase's pointers are the nodes. Compose's are the positions of rows: a row with value i of table b
points to the row of i in table b + 1, under the choice of step b + 1, which its first block looks
up. That choice comes after all tables: rows need full attention over everything to know it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from entp.model import Transformer
from entp.tasks.base import Batch
from entp.tasks.composition import Compose
from entp.tasks.pointers import Chase
from entp.theory.weights import (
    SHARP,
    Form,
    Head,
    Layer,
    Table,
    Unit,
    build,
    clear,
    look_up,
    say,
    swap,
    where_positive,
)

TOKEN: Form = {"X": 1.0}


class Tried(NamedTuple):
    """What a model did on a batch."""

    right: int
    targets: int
    margin: float
    """The least by which a right answer's output is above all others; negative if one is wrong."""


@torch.no_grad()
def tried(model: Transformer, batch: Batch, mode: str, prefix: int | None = None) -> Tried:
    """How many targets of a batch are right in a mode, and by how much."""
    at = torch.from_numpy(batch.target_mask)
    outputs = model(torch.from_numpy(batch.x), mode=mode, at=at, prefix=prefix)
    targets = torch.from_numpy(batch.targets)[:, None]
    wanted = outputs.gather(1, targets)[:, 0]
    others = outputs.scatter(1, targets, -math.inf).amax(1)
    margins = wanted - others
    return Tried(int((margins > 0).sum()), len(margins), float(margins.min()))


def weights_for(task: Chase | Compose) -> dict[str, tuple[str, Transformer]]:
    """All weights there are for a task, by name, with the mode that they are for."""
    if isinstance(task, Chase):
        sizes = task.nodes, task.hops
        return {
            "encoder": ("entp", chase_encoder(*sizes)),
            "decoder": ("decoder", chase_decoder(*sizes)),
        }
    of = task.tables, task.choices, task.size, task.order
    found = {
        "encoder": ("entp", compose_encoder(*of)),
        "decoder": ("decoder", compose_decoder(*of)),
    }
    if task.choices == 1 and task.order == "first-to-last":
        found["arcs"] = ("decoder", compose_by_arcs(task.tables, task.size))
    return found


def chase_encoder(nodes: int, hops: int) -> Transformer:
    """Right in mode entp on any table and query: log2(hops + 1) blocks, rounded up, width 6.

    With the table as its prefix it is right in mode prefix-lm too.
    """
    Chase(nodes, hops, "function")  # refuses wrong sizes
    levels = hops.bit_length()
    layers = _doubling("X", {"X": "NEW"}, levels, nodes)
    asked = [2**levels - 1] * nodes + [_reversed(k, levels) for k in range(1, hops + 1)]
    return _built(layers, {"R": torch.tensor(asked), **_places(len(asked))}, ("NEW",), nodes)


def chase_decoder(nodes: int, hops: int) -> Transformer:
    """Right in every mode on any table and query: as many blocks as hops, width 5."""
    Chase(nodes, hops, "function")  # refuses wrong sizes
    fetch = look_up(TOKEN, {"NEW": TOKEN})
    layers = []
    for block in range(hops):
        goes_on: Form = {"J": 1.0, "1": float(1 - nodes - block)}  # k - block in the row of k
        layers.append(Layer([fetch], [*swap("X", "NEW", goes_on, nodes), *clear("NEW")]))
    return _built(layers, _places(nodes + hops), ("NEW",), nodes)


def compose_encoder(
    tables: int, choices: int, size: int, order: str = "first-to-last"
) -> Transformer:
    """Right in mode entp: 1 + log2(tables + 1) blocks, rounded up, width 8, 2 heads.

    With one choice and tables last to first pointers go back, and choices need no looking up: then
    it is right in every mode.
    """
    task = _compose(tables, choices, size, order)
    levels = tables.bit_length()
    most = task.start_at + size * (task.model_needs()["vocab"] + 1)
    point = [look_up({"VALUE_AT": 1.0}, {"P": TOKEN})]
    if choices > 1:
        point.append(look_up({"CHOICE_AT": 1.0}, {"P": {"X": float(size)}}))
    first = Layer(point, clear("VALUE_AT", "CHOICE_AT"))
    moved = {"P": "CHOICE_AT", "X": "VALUE_AT"}  # both are free after the first block
    layers = [first, *_doubling("P", moved, levels, most)]
    return _built(layers, _pointers(task, levels), (), task.model_needs()["vocab"], heads=2)


def compose_decoder(
    tables: int, choices: int, size: int, order: str = "first-to-last"
) -> Transformer:
    """Right in every mode: tables + 1 blocks, width 8, 2 heads."""
    task = _compose(tables, choices, size, order)
    start_at, needs = task.start_at, task.model_needs()
    point = [look_up({"1": float(start_at)}, {"P": TOKEN}), _choice(task, 1, "P")]
    layers = [Layer(point, [Unit({"1": 1.0}, {"P": float(task.table_at(1))})])]
    here, there = "P", "Q"
    for step in range(1, tables + 1):
        goes_on: Form = {"J": 1.0, "1": float(1 - start_at - step)}  # k - step + 1
        heads = [look_up({here: 1.0}, {"NEW": TOKEN, there: TOKEN})]
        units = [*swap("Y", "NEW", goes_on, needs["vocab"]), *clear("NEW", here)]
        if step < tables:
            heads.append(_choice(task, step + 1, there))
            units.append(Unit({"1": 1.0}, {there: float(task.table_at(step + 1))}))
        layers.append(Layer(heads, units))
        here, there = there, here
    known, free = _places(needs["context_length"]), ("P", "Q", "NEW", "Y")
    return _built(layers, known, free, needs["vocab"], heads=2, answer="Y")


def compose_by_arcs(tables: int, size: int) -> Transformer:
    """Compose of one choice, tables first to last: right in every mode, width 12, 2 heads.

    1 + log2(tables) blocks, rounded up: permutations can be followed backwards. A row keeps S, the
    value from which the steps that end in its token begin, at first its own step alone. The row of
    the table before whose token is S has the rest of the way, and so on in steps of 2, 4, 8, ...
    In the end a query looks in the table of its number for the row whose S is the start.
    """
    task = _compose(tables, 1, size, "first-to-last")
    layers = []
    for level in range(max(1, (tables - 1).bit_length())):
        back = float(2**level)
        goes_on: Form = {"TABLE": 1.0, "1": -back}
        heads = [_find(goes_on, {"S": 1.0}, "X", {"NEW": {"S": 1.0}, "NEW2": {"S2": 1.0}})]
        moved = {"S": "NEW", "S2": "NEW2"}
        layers.append(Layer(heads, _take_over(moved, goes_on, size**2)))
    layers[0].heads.append(Head([({"1": SHARP}, {"IS_START": 1.0})], {"START": TOKEN}))
    answer = _find({"STEP": 1.0}, {"START": 1.0}, "S", {"NEW": TOKEN})
    layers.append(Layer([answer]))
    return _built(layers, _arcs(task), ("START", "NEW", "NEW2"), size, heads=2, answer="NEW")


def _doubling(pointer: str, moved: Mapping[str, str], levels: int, most: float) -> list[Layer]:
    """Blocks that look up the row `pointer` and take its registers over where R has the bit.

    moved: for each register the one that it is fetched into, which is 0 and is cleared again.
    """
    layers = []
    for level in reversed(range(levels)):
        bit = 2.0**level
        has_bit: Form = {"R": 1.0, "1": 1 - bit}
        head = look_up({pointer: 1.0}, {new: {old: 1.0} for old, new in moved.items()})
        less = where_positive(has_bit, {"1": bit}, {"R": -1.0}, bit)
        layers.append(Layer([head], [*_take_over(moved, has_bit, most), *less]))
    return layers


def _take_over(moved: Mapping[str, str], e: Form, most: float) -> list[Unit]:
    """Each register becomes what was fetched for it where e >= 1."""
    swaps = [unit for old, new in moved.items() for unit in swap(old, new, e, most)]
    return [*swaps, *clear(*moved.values())]


def _reversed(k: int, levels: int) -> int:
    """k's bits, the lowest one first."""
    return int(f"{k:0{levels}b}"[::-1], 2)


def _choice(task: Compose, step: int, pointer: str) -> Head:
    """Adds to a pointer where the permutation begins that a step's choice names."""
    return look_up({"1": float(task.start_at + step)}, {pointer: {"X": float(task.size)}})


def _find(table: Form, value: Form, by: str, values: dict[str, Form]) -> Head:
    """Fetches from the row of a table that has a value in register `by`; its square is by + 2."""
    wanted_table, wanted_value = (
        {name: 2 * SHARP * weight for name, weight in form.items()} for form in (table, value)
    )
    square: Form = {"TABLE2": 1.0, f"{by}2": 1.0}
    scores = [(wanted_table, {"TABLE": 1.0}), (wanted_value, {by: 1.0}), ({"1": -SHARP}, square)]
    return Head(scores, values)


def _pointers(task: Compose, levels: int) -> Table:
    """What positions know: where the next table begins, and where value and choice are."""
    rows, length = task.start_at, task.model_needs()["context_length"]
    block = task.choices * task.size
    known = {name: [0] * length for name in ("P", "R", "VALUE_AT", "CHOICE_AT")}
    for b in range(1, task.tables + 1):
        here = slice(task.table_at(b), task.table_at(b) + block)
        known["P"][here] = [task.table_at(b + 1) if b < task.tables else 0] * block
        known["CHOICE_AT"][here] = [rows + b + 1] * block
    known["R"][:rows] = [2**levels - 1] * rows
    known["VALUE_AT"][:rows] = range(rows)  # a table's row: its own token
    for k in range(1, task.tables + 1):
        at = rows + k
        known["P"][at], known["R"][at] = task.table_at(1), _reversed(k, levels)
        known["VALUE_AT"][at], known["CHOICE_AT"][at] = rows, rows + 1
    columns = {name: torch.tensor(column) for name, column in known.items()}
    return {**columns, **_places(length)}


def _arcs(task: Compose) -> Table:
    """What positions know: table and argument of a table's row, step of a query, the start."""
    position = torch.arange(task.model_needs()["context_length"])
    in_table = position < task.start_at
    table = in_table * (1 + position // task.size)
    argument = in_table * (position % task.size)
    return {
        "TABLE": table,
        "TABLE2": table**2,
        "S": argument,
        "S2": argument**2,
        "STEP": (position - task.start_at).clamp(min=0),
        "IS_START": position == task.start_at,
    }


def _places(length: int) -> Table:
    """What `look_up` reads."""
    position = torch.arange(length)
    return {"J": position, "J2": position**2}


def _built(
    layers: list[Layer],
    known: Table,
    free: tuple[str, ...],
    vocab: int,
    heads: int = 1,
    answer: str = "X",
) -> Transformer:
    """The model that says what is in a register; known: what positions hold, free: the others."""
    token = torch.arange(vocab)
    registers = ("X", "X2", *known, *free)
    return build(
        {name: number for number, name in enumerate(registers)},
        [*layers[:-1], say(answer, layers[-1])],
        heads=heads,
        tokens={"X": token, "X2": token**2},
        positions=known,
    )


def _compose(tables: int, choices: int, size: int, order: str) -> Compose:
    """The task, whose layout the weights are for; it refuses wrong sizes."""
    return Compose(tables, choices, size, order)  # type: ignore[arg-type]
