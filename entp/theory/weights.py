"""Transformers as weights set by hand: heads, units and registers, written into a model.

A register is a dimension of the residual stream, a form is linear in registers. A head's score is
a sum of products (query's form) x (key's form), a unit is ReLU of a form. There is no norm, scores
are not scaled, positions are given, and the readout is tied to the tokens' table:

    model = build(registers, layers, heads=2, tokens=table, positions=table)

`look_up` reads positions from registers J and J2, the position and its square.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from entp.config import ModelConfig
from entp.model import Block, Transformer

Form = dict[str, float]
"""A linear form over registers, "1" being the constant: {"N": 2.0, "1": -1.0} is 2 n - 1."""
Table = Mapping[str, Tensor]
"""Registers to columns: what a row of the tokens' or positions' table holds."""

SHARP = 60.0
"""Score by which the right key of a lookup beats the next: others weigh less than exp(-60)."""


@dataclass(frozen=True)
class Head:
    """An attention head: a score is a sum of products (query form) x (key form)."""

    scores: list[tuple[Form, Form]]
    values: dict[str, Form]
    """What is added to each register."""


@dataclass(frozen=True)
class Unit:
    """A hidden unit of an MLP: ReLU of a form, added to registers with these weights."""

    form: Form
    out: dict[str, float]


@dataclass(frozen=True)
class Layer:
    """A block: heads, then units."""

    heads: list[Head] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)


def build(
    registers: Mapping[str, int],
    layers: Sequence[Layer],
    *,
    heads: int,
    tokens: Table,
    positions: Table,
) -> Transformer:
    """A float64 Transformer of these blocks; its width is the least that holds everything."""
    needed = max(len(set(registers.values())), *(_width(layer, heads) for layer in layers))
    config = ModelConfig(
        vocab=_rows(tokens),
        context_length=_rows(positions),
        layers=len(layers),
        heads=heads,
        width=needed + -needed % heads,
        norm="none",
        activation="relu",
        position_embedding="given",
        attention_scale="one",
    )
    model = Transformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert model.tokens is not None
        model.tokens.weight.copy_(_table(tokens, registers, config.width))
        model.set_positions(_table(positions, registers, config.width))
        for block, layer in zip(model.blocks, layers, strict=True):
            _write_block(block, layer, registers)  # type: ignore[arg-type]
    return model.eval()


def where_positive(
    e: Form, height: Form, out: dict[str, float], most: float, shut: float = 0.0
) -> Iterable[Unit]:
    """height [e > 0] for integers e and 0 <= height <= most; nothing in row 0 if `shut`."""
    steep = {name: 2 * most * weight for name, weight in e.items()}
    steep["1"] = steep.get("1", 0.0) - most
    if shut:
        steep["FIRST"] = -2 * most * shut
    yield Unit(steep, out)
    lower = {name: steep.get(name, 0.0) - height.get(name, 0.0) for name in steep | height}
    yield Unit(lower, {name: -weight for name, weight in out.items()})


def clear(*names: str) -> list[Unit]:
    """Registers that are not negative, set to 0."""
    return [Unit({name: 1.0}, {name: -1.0}) for name in names]


def look_up(index: Form, values: dict[str, Form]) -> Head:
    """Fetches from the row at a position; from the last row there is, if it comes later."""
    query = {name: 2 * SHARP * weight for name, weight in index.items()}
    return Head([(query, {"J": 1.0}), ({"1": -SHARP}, {"J2": 1.0})], values)


def swap(old: str, new: str, e: Form, most: float) -> list[Unit]:
    """old becomes new where e >= 1, for integers e and 0 <= old, new <= most."""
    steep = {name: 2 * most * weight for name, weight in e.items()}
    steep["1"] = steep.get("1", 0.0) - most
    return [
        Unit({**steep, old: steep.get(old, 0.0) - 1}, {old: 1.0}),
        Unit({**steep, new: steep.get(new, 0.0) - 1}, {old: -1.0}),
    ]


def say(register: str, layer: Layer) -> Layer:
    """The last block: of the tied readout's outputs the largest is the token in `register`.

    The table of tokens must hold the token in X, its square in X2 and no more: with r in the
    register the outputs are SHARP (2 v r - v^2).
    """
    loud = 2 * SHARP
    units = [Unit(u.form, {"X": loud * u.out[register]}) for u in layer.units if register in u.out]
    units.append(Unit({register: 1.0}, {"X": loud}))
    units.append(Unit({"1": 1.0}, {"X2": -SHARP}))
    return Layer(layer.heads, [*units, *clear("X", "X2")])


def _width(layer: Layer, heads: int) -> int:
    """Least width that has room for a block's units and for its heads' products and values."""
    head = max((max(len(h.scores), len(h.values)) for h in layer.heads), default=0)
    return max(-(-len(layer.units) // 4), heads * head)


def _rows(table: Table) -> int:
    return len(next(iter(table.values())))


def _table(table: Table, at: Mapping[str, int], width: int) -> Tensor:
    """The columns in their registers' places."""
    full = torch.zeros(_rows(table), width, dtype=torch.float64)
    for name, column in table.items():
        full[:, at[name]] = column.double()
    return full


def _write_block(block: Block, layer: Layer, at: Mapping[str, int]) -> None:
    """Heads and units as the block's matrices."""
    width = block.proj.weight.shape[0]
    size = width // block.heads
    for number, head in enumerate(layer.heads):
        for e, (query, key) in enumerate(head.scores):
            _write_form(block.qkv, number * size + e, query, at)
            _write_form(block.qkv, width + number * size + e, key, at)
        for e, (register, value) in enumerate(head.values.items()):
            _write_form(block.qkv, 2 * width + number * size + e, value, at)
            block.proj.weight[at[register], number * size + e] = 1.0
    for number, unit in enumerate(layer.units):
        _write_form(block.fc, number, unit.form, at)
        for register, weight in unit.out.items():
            block.out.weight[at[register], number] += weight


def _write_form(linear: torch.nn.Linear, row: int, form: Form, at: Mapping[str, int]) -> None:
    weight: Tensor = linear.weight
    for name, factor in form.items():
        if name == "1":
            linear.bias[row] += factor
        else:
            weight[row, at[name]] += factor
