"""Algorithms for Count3: right answers, counted steps and counters, and what con:ts2 says."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entp import InputError
from entp.report import tradeoff as figures
from entp.theory import tradeoff
from entp.theory.count3_algorithms import (
    AppendOnlyTable,
    CellPerToken,
    Counted,
    Meter,
    RunningTable,
    blocked,
    in_place,
    linear,
    plain_blocked,
    plain_linear,
    plain_quadratic,
    quadratic,
)

LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096]
sequences = st.lists(st.integers(0, 2**40), min_size=1, max_size=64)
tables = pytest.mark.parametrize("make", [RunningTable, AppendOnlyTable, CellPerToken])


def count3(x: list[int]) -> int:
    """|{(i, j) in [n]^2 : x_i + x_j + x_n = 0 mod n}| mod n."""
    n = len(x)
    return sum((a + b + x[-1]) % n == 0 for a in x for b in x) % n


def random_sequence(n: int, values: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, values, n)


def with_every_block_size(n: int) -> list[Callable[[Any], Counted]]:
    return [quadratic, linear, in_place, *(lambda x, s=s: blocked(x, s) for s in range(1, n + 1))]


@pytest.mark.parametrize("n", range(1, 6))
def test_all_sequences_of_a_length(n: int) -> None:
    for x in itertools.product(range(n), repeat=n):
        expected = count3(list(x))
        assert all(algorithm(x).value == expected for algorithm in with_every_block_size(n))


@pytest.mark.parametrize("n", range(1, 4))
def test_all_sequences_with_values_above_n(n: int) -> None:
    for x in itertools.product(range(3 * n + 1), repeat=n):
        expected = count3(list(x))
        assert all(algorithm(x).value == expected for algorithm in with_every_block_size(n))


@given(sequences, st.data())
def test_any_sequence_and_block_size(x: list[int], data: st.DataObject) -> None:
    n, expected = len(x), count3(x)
    s = data.draw(st.integers(1, n))
    assert quadratic(x) == plain_quadratic(x) == Counted(expected, n * n, 0)
    assert linear(x) == plain_linear(x) == blocked(x, n) == Counted(expected, 2 * n, n)
    assert blocked(x, s) == plain_blocked(x, s) == Counted(expected, 2 * n * math.ceil(n / s), s)
    assert in_place(x).value == expected


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_narrow_types_do_not_overflow(dtype: Any) -> None:
    x = np.iinfo(dtype).max - np.arange(7, dtype=dtype)
    expected = count3(x.tolist())
    assert all(algorithm(x).value == expected for algorithm in with_every_block_size(7))


def test_neither_branch_of_the_conjecture_holds_for_blocks_of_sqrt_n() -> None:
    ratios = []
    for n in LENGTHS:
        s = round(math.sqrt(n))
        counted = blocked(random_sequence(n, n), s)
        assert counted.space == s
        assert counted.time <= 2 * n * (n / s + 1)
        ratios.append((counted.time / n**2, counted.space / n))
    for shorter, longer in itertools.pairwise(ratios):
        assert longer[0] < shorter[0]
        assert longer[1] < shorter[1]
    assert ratios[-1][0] <= ratios[0][0] / 7.9  # n grew 64-fold, both ratios fell by its root
    assert ratios[-1][1] <= ratios[0][1] / 7.9


@pytest.mark.parametrize("n", [50, 64, 100])
def test_time_times_space_is_at_least_2_n_squared_for_every_block_size(n: int) -> None:
    x = random_sequence(n, n)
    for s in range(1, n + 1):
        counted = blocked(x, s)
        assert 2 * n**2 <= counted.time * counted.space < 2 * n * (n + s)


def test_sorting_in_place_takes_n_log_n_steps_and_leaves_the_callers_x() -> None:
    for n in LENGTHS:
        x = random_sequence(n, 2 * n)
        before = x.copy()
        counted = in_place(x)
        assert (x == before).all()
        assert counted.space == 0
        assert counted.time <= 2 * n * math.log2(n)
    assert in_place(np.zeros(4096, dtype=int)).time < 8 * 4096  # all equal: no exchanges


@tables
@given(values=st.integers(1, 200), data=st.data())
def test_tables_are_right_at_every_length(
    make: type[RunningTable], values: int, data: st.DataObject
) -> None:
    x = data.draw(st.lists(st.integers(0, values - 1), min_size=1, max_size=40))
    table = make(values)
    for n, value in enumerate(x, 1):
        table.append(value)
        assert table.count3() == table.count3()  # asking changes nothing
        assert table.count3().value == count3(x[:n])


@pytest.mark.parametrize("n", [16, 64, 256])
def test_tables_take_few_steps_and_make_few_cells_for_a_length(n: int) -> None:
    x, depth = random_sequence(n, n), math.ceil(math.log2(n))
    running, appending = RunningTable(n), AppendOnlyTable(n)
    for table in (running, appending):
        table.extend(x)
    assert running.count3() == Counted(count3(x.tolist()), n + 1, 0, n)
    new = depth + 1
    assert appending.count3() == Counted(count3(x.tolist()), new + n * new, new, (n - 1) * new)


def test_a_running_table_changes_one_cell_per_token() -> None:
    table = RunningTable(32)
    for value in random_sequence(64, 32).tolist():
        before = table.table.copy()
        table.append(value)
        assert ((table.table - before) == (np.arange(32) == value)).all()


def test_an_append_only_table_never_changes_a_node() -> None:
    table = AppendOnlyTable(32)
    for value in random_sequence(64, 32).tolist():
        before = list(zip(table.left, table.right, table.count, strict=True))
        table.append(value)
        after = list(zip(table.left, table.right, table.count, strict=True))
        assert after[: len(before)] == before
        assert len(after) - len(before) == table.count3().space == 6


def test_a_cell_per_token_is_written_once_and_stays() -> None:
    table, sequence = CellPerToken(32), random_sequence(64, 32).tolist()
    for n, value in enumerate(sequence, 1):
        before = set(table.written)
        table.append(value)
        assert table.written - before == {(value, sequence[:n].count(value))}
        assert before < table.written
        assert (table.count3().space, table.count3().shared) == (1, n - 1)


def probes(times: int) -> int:
    """How many a count takes: doubling finds the first power of two above it, then bisection."""
    return max(1, 2 * times.bit_length())


@given(st.integers(1, 12), st.data())
def test_probes_of_one_cell_a_token_are_the_formulas(n: int, data: st.DataObject) -> None:
    x = data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    table = CellPerToken(n)
    table.extend(x)
    counts = [x.count(value) for value in range(n)]
    added = probes(counts[x[-1]] - 1) + 1
    assert table.count3() == Counted(count3(x), added + 2 * sum(map(probes, counts)), 1, n - 1)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("kind", ["random", "all equal", "all different", "each twice", "half"])
def test_one_cell_a_token_takes_at_most_five_n_steps(n: int, kind: str) -> None:
    values = np.arange(n)
    kinds = {
        "random": random_sequence(n, n),
        "all equal": np.full(n, n // 2),
        "all different": values,
        "each twice": values // 2,
        "half": np.where(values % 2, values, n // 3),
    }
    table = CellPerToken(n)
    table.extend(kinds[kind])
    counted = table.count3()
    assert counted.value == linear(kinds[kind]).value
    assert (counted.space, counted.shared) == (1, n - 1)
    assert counted.time <= 5 * n + 2 * math.log2(n) + 3
    if kind == "each twice" and n % 2 == 0:
        assert counted.time >= 5 * n  # the bound is reached


@pytest.mark.parametrize("values", [1, 5, 40, 500])
def test_one_cell_a_token_for_values_that_are_not_n(values: int) -> None:
    """At most 2 values + 3 n steps, besides those of adding x_n."""
    table = CellPerToken(values)
    for n, value in enumerate(random_sequence(40, values).tolist(), 1):
        table.append(value)
        assert table.count3().time <= 2 * max(n, values) + 3 * n + 2 * math.log2(n) + 3


def test_a_running_table_beats_n_squared_for_values_far_above_n() -> None:
    products = []
    for n in (64, 256, 1024):
        values = n * math.isqrt(n)  # n^1.5
        table = RunningTable(values)
        table.extend(random_sequence(n, values))
        counted = table.count3()
        assert (counted.time, counted.space) == (1 + values, 0)
        assert counted.value == linear(table.x).value
        products.append(counted.time / n**2)
    assert products[2] < products[1] / 1.9 < products[0] / 3.8


def test_a_meter_keeps_the_most_that_was_alive() -> None:
    meter = Meter()
    with meter.table(3) as first:
        assert first.tolist() == [0, 0, 0]
        with meter.table(2):
            meter.step(5)
    with meter.table(4):
        meter.step()
    assert (meter.time, meter.live, meter.peak) == (6, 0, 5)


@pytest.mark.parametrize("algorithm", [blocked, plain_blocked])
@pytest.mark.parametrize("s", [0, -1, 4])
def test_block_size_errors(algorithm: Any, s: int) -> None:
    with pytest.raises(
        InputError, match=f"s is {s}: for a sequence of 3 a block has 1 to 3 residues"
    ):
        algorithm([1, 2, 3], s)


@pytest.mark.parametrize("x", [[], [[1, 2]], [1.5], 3, ["1"], [2**63], np.zeros(0, dtype=int)])
def test_sequence_errors(x: Any) -> None:
    for algorithm in (
        quadratic,
        linear,
        in_place,
        plain_quadratic,
        plain_linear,
        lambda x: blocked(x, 1),
    ):
        with pytest.raises(InputError, match="give one sequence of at least 1 whole number"):
            algorithm(x)


@tables
def test_table_errors(make: type[RunningTable]) -> None:
    with pytest.raises(InputError, match="values is 0"):
        make(0)
    with pytest.raises(InputError, match="give one sequence"):
        make(5).count3()
    for value in (-1, 5, 1.5):
        with pytest.raises(
            InputError, match=f"{value} does not fit a table of 5 values: allowed are 0 to 4"
        ):
            make(5).append(value)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return tradeoff.measure([256, 64, 90, 64], seed=3)


def test_measured_rows(result: dict[str, Any]) -> None:
    assert result["lengths"] == [64, 90, 256]
    assert all(row["correct"] for row in result["rows"])
    assert [
        row["s"] for row in result["rows"] if row["n"] == 90 and row["algorithm"] == "blocked"
    ] == [
        *(1, 2, 4, 8, 9, 16, 32, 64),
    ]
    for row in result["rows"]:
        n, s = row["n"], row["s"]
        if row["algorithm"] == "blocked":
            assert (row["time"], row["space"]) == (2 * n * math.ceil(n / s), s)
        assert row["time_space"] == row["time"] * max(1, row["space"]) / n**2
    assert result["environment"]["commit"] is None or len(result["environment"]["commit"]) >= 40
    assert json.loads(json.dumps(result)) == result


def test_measuring_again_gives_the_same(result: dict[str, Any]) -> None:
    again = tradeoff.measure([64, 90, 256], seed=3)
    assert (again["rows"], again["fits"]) == (result["rows"], result["fits"])
    assert tradeoff.measure([64, 90], seed=4)["rows"] != tradeoff.measure([64, 90], seed=3)["rows"]


def test_lengths_of_the_document_have_the_exponents() -> None:
    assert inspect.signature(tradeoff.measure).parameters["lengths"].default == tuple(LENGTHS)
    full = tradeoff.measure()
    assert all(row["correct"] for row in full["rows"])
    fits = {fit["algorithm"]: (fit["time"], fit["space"]) for fit in full["fits"]}
    assert fits["quadratic"] == (pytest.approx(2), None)
    assert fits["linear"] == (pytest.approx(1), pytest.approx(1))
    assert fits["blocked"] == (pytest.approx(1.5, abs=0.01), pytest.approx(0.5, abs=0.01))
    assert fits["running table"] == (pytest.approx(1, abs=0.01), None)
    text = tradeoff.report(full)
    assert "fitted: time ~ n^1.50, space ~ n^0.50" in text
    assert "4096  64  524288     64    0.0312   0.0156           2.000" in text


def test_report(result: dict[str, Any]) -> None:
    text = tradeoff.report(result)
    assert max(map(len, text.splitlines())) <= 128
    lines = [line.split() for line in text.splitlines()]
    assert ["quadratic", "65536", "0", "1.0000", "0.0000", "1.000"] in lines
    assert ["linear", "512", "256", "0.0078", "1.0000", "2.000"] in lines
    assert ["blocked", "16", "8192", "16", "0.1250", "0.0625", "2.000"] in lines
    assert ["90", "9", "1800", "9", "0.2222", "0.1000", "2.000"] in lines
    for name in tradeoff.OTHER:
        products = [row["time_space"] for row in result["rows"] if row["algorithm"] == name]
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        ends = [f"{products[0]:.5f}", f"{products[-1]:.5f}"]  # n = 64 and n = 256
        assert line.split()[-2:] == ends
        assert products[0] > products[-1]
    assert f"{len(result['rows'])} of {len(result['rows'])} answers equal Count3; seed 3" in text
    wrong = {**result, "rows": [{**result["rows"][0], "correct": False}, *result["rows"][1:]]}
    assert f"{len(result['rows']) - 1} of {len(result['rows'])} answers" in tradeoff.report(wrong)


@pytest.mark.parametrize(("name", "start"), [("a.pdf", b"%PDF"), ("a", b"\x89PNG")])
def test_figure(result: dict[str, Any], tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    tradeoff.draw(result, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_the_figure_shows(result: dict[str, Any]) -> None:
    figure: Any = pytest.importorskip("matplotlib.figure").Figure()
    curves, products = figure.subplots(1, 2)
    figures._draw_curves(curves, result)
    figures._draw_products(products, result, tradeoff.READ_ONLY, tradeoff.OTHER)
    first, spaces = curves.get_lines()[0], [1, 2, 4, 8, 16, 32, 64]  # of n = 64
    assert (list(first.get_xdata()), list(first.get_ydata())) == (
        spaces,
        [2 * 64 * 64 // s for s in spaces],
    )
    assert "counters alive at once (number" in curves.get_xlabel()
    assert "steps after x_n (number" in curves.get_ylabel()
    shown = [text.get_text() for text in curves.get_legend().get_texts()]
    assert shown == [
        "quadratic (alg:tc1)",
        "linear (alg:tc2)",
        "s = root of n",
        "n = 64",
        "n = 90",
        "n = 256",
    ]
    assert {text.get_text() for text in curves.texts} == {
        "(i) time n^2 = 65,536",
        "(ii) space n = 256",
    }
    assert len(products.get_lines()) == 7
    assert products.get_xlabel() == "n (tokens, log)"


def test_without_matplotlib(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError):
        tradeoff.draw(result, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lengths", [[], [64], [64, 64], [1, 64], [0, 64]])
def test_length_errors(lengths: list[int]) -> None:
    with pytest.raises(InputError, match="give at least two different ones, each at least 2"):
        tradeoff.measure(lengths)
