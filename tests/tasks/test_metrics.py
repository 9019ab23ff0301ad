"""Totals of metrics against a direct computation, sequence by sequence."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from entp.errors import InputError
from entp.results.schema import MetricSpec
from entp.stats import wilson
from entp.tasks.base import IGNORE, Batch, Task
from entp.tasks.metrics import (
    EXACT_MATCH,
    LOSS,
    TOKEN_ACCURACY,
    Metric,
    Predicted,
    Score,
    Sums,
    Totals,
    exact_match,
    mean_loss,
    token_accuracy,
)

METRICS = (
    Metric("exact_match", unit="sequence", slices=("note", "targets")),
    Metric("token_accuracy", slices=("length", "parity")),
    Metric("bits_per_byte", unit="byte", better="lower", show="bits", slices=("parity",)),
    Metric("perplexity", better="lower", show="exp"),
    LOSS,
)


class Measured(NamedTuple):
    """A batch, the answers to it, and the bytes of its targets."""

    batch: Batch
    got: Predicted
    size: np.ndarray

    def scores(self) -> dict[str, Score | None]:
        batch, got, size = self
        assert got.loss is not None
        per_row = {"note": batch.note, "targets": np.bincount(batch.row, minlength=len(batch.x))}
        parity = np.where(batch.position % 2, "odd", "even")
        return {
            "exact_match": exact_match(batch, got, per_row),  # type: ignore[arg-type]
            "token_accuracy": token_accuracy(
                batch, got, {"length": batch.position + 1, "parity": parity}
            ),
            "bits_per_byte": Score(got.loss, size, {"parity": parity}),
            "perplexity": mean_loss(got),
            "loss": mean_loss(got),
        }

    def totals(self) -> Totals:
        return Totals.of(METRICS, self.batch, self.scores())

    def part(self, rows: list[int]) -> Measured:
        """Some of its sequences."""
        kept = np.isin(self.batch.row, rows)
        order = np.argsort([rows.index(row) for row in self.batch.row[kept]], kind="stable")
        batch = self.batch
        assert batch.lengths is not None
        assert batch.note is not None
        assert self.got.loss is not None
        some = Batch(batch.x[rows], batch.y[rows], batch.lengths[rows], note=batch.note[rows])
        got = Predicted(self.got.answer[kept][order], self.got.loss[kept][order])
        return Measured(some, got, self.size[kept][order])


@st.composite
def measured(draw: Any) -> Measured:
    """Sequences of any length, some without a target, with answers of which half are right."""
    rows, time = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    lengths = rng.integers(1, time + 1, rows)
    y = rng.integers(0, 2, (rows, time))
    y[rng.random((rows, time)) < draw(st.sampled_from([0.0, 0.3, 0.8]))] = IGNORE
    y[np.arange(time) >= lengths[:, None]] = IGNORE
    batch = Batch(np.zeros((rows, time)), y, lengths, note=rng.choice(["a", "b"], rows))
    many = len(batch.targets)
    got = Predicted(rng.integers(0, 2, many), rng.exponential(size=many))
    return Measured(batch, got, rng.integers(0, 4, many))


Pairs = list[tuple[float, float]]


def direct(one: Measured) -> tuple[dict[str, Pairs], dict[tuple[str, str, str], Pairs]]:
    """By metric, and by metric, slice and bin: the value and the weight of each sequence."""
    everything: dict[str, Pairs] = defaultdict(list)
    sliced: dict[tuple[str, str, str], Pairs] = defaultdict(list)
    batch, got, size = one
    assert got.loss is not None
    assert batch.note is not None
    number = -1
    for row, targets in enumerate(batch.y.tolist()):
        found: dict[str, Pairs] = defaultdict(list)
        by: dict[tuple[str, str, str], Pairs] = defaultdict(list)
        for position, target in enumerate(targets):
            if target == IGNORE:
                continue
            number += 1
            right, nats, parity = (
                float(got.answer[number] == target),
                float(got.loss[number]),
                "odd" if position % 2 else "even",
            )
            found["token_accuracy"].append((right, 1.0))
            found["loss"].append((nats, 1.0))
            found["perplexity"].append((nats, 1.0))
            by["token_accuracy", "length", str(position + 1)].append((right, 1.0))
            by["token_accuracy", "parity", parity].append((right, 1.0))
            found["bits_per_byte"].append((nats, float(size[number])))
            by["bits_per_byte", "parity", parity].append((nats, float(size[number])))
        if found["token_accuracy"]:
            whole = float(all(right for right, _ in found["token_accuracy"])), 1.0
            found["exact_match"].append(whole)
            by["exact_match", "note", str(batch.note[row])].append(whole)
            by["exact_match", "targets", str(len(found["token_accuracy"]))].append(whole)
        for name, pairs in found.items():
            if pairs:
                everything[name].append((sum(v for v, _ in pairs), sum(w for _, w in pairs)))
        for key, pairs in by.items():
            sliced[key].append((sum(v for v, _ in pairs), sum(w for _, w in pairs)))
    return everything, sliced


def ratio(pairs: Pairs) -> float:
    """Their total value by their total weight; nan where targets have no bytes at all."""
    weight = sum(w for _, w in pairs)
    return sum(v for v, _ in pairs) / weight if weight else math.nan


def ratio_error(pairs: Pairs) -> float | None:
    """The standard error of a ratio of two totals, from its residuals."""
    n, mean = len(pairs), ratio(pairs)
    if n < 2 or math.isnan(mean):
        return None
    variance = sum((v - mean * w) ** 2 for v, w in pairs) / (n - 1)
    mean_weight = sum(w for _, w in pairs) / n
    return math.sqrt(variance / n) / mean_weight


def check_sums(found: Sums, pairs: Pairs) -> None:
    assert found.n == len(pairs)
    assert found.mean == pytest.approx(ratio(pairs), nan_ok=True)
    error = ratio_error(pairs)
    if error is None:
        assert found.standard_error() is None
    else:
        assert found.standard_error() == pytest.approx(error, abs=1e-7)


@given(measured())
def test_totals_are_those_of_a_direct_computation(one: Measured) -> None:
    totals, (everything, sliced) = one.totals(), direct(one)
    assert totals.sequences == len(everything.get("exact_match", []))
    for metric in METRICS:
        pairs = everything.get(metric.name, [])
        assert totals.all[metric.name].n == len(pairs)
        if pairs:
            check_sums(totals.all[metric.name], pairs)
            shown = {"mean": ratio(pairs), "bits": ratio(pairs) / math.log(2)}
            shown["exp"] = math.exp(ratio(pairs))
            assert totals.value(metric.name) == pytest.approx(shown[metric.show], nan_ok=True)
    found = {
        (metric, by, key): sums
        for metric, slices in totals.slices.items()
        for by, bins in slices.items()
        for key, sums in bins.items()
    }
    assert found.keys() == sliced.keys()
    for place, pairs in sliced.items():
        check_sums(found[place], pairs)
        metric, by, key = place
        shown_mean = totals.metric(metric).shown(ratio(pairs))
        assert totals.sliced(metric, by)[key] == pytest.approx(shown_mean, nan_ok=True)


def same(one: Totals, other: Totals) -> None:
    """Equal up to rounding."""
    assert one.sequences == other.sequences
    assert one.all.keys() == other.all.keys()
    pairs = [(one.all[name], other.all[name]) for name in one.all]
    for metric in {*one.slices, *other.slices}:
        for by in {*one.slices.get(metric, {}), *other.slices.get(metric, {})}:
            mine, others = (totals.slices.get(metric, {}).get(by, {}) for totals in (one, other))
            assert mine.keys() == others.keys()
            pairs += [(mine[key], others[key]) for key in mine]
    for a, b in pairs:
        assert a.to_json() == pytest.approx(b.to_json())


@given(measured(), st.data())
def test_totals_add_over_any_split(one: Measured, data: Any) -> None:
    """Whatever sequences come together, and in whatever order."""
    order = data.draw(st.permutations(range(len(one.batch.x))))
    cuts = sorted(data.draw(st.lists(st.integers(1, len(order)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    total = Totals(METRICS)
    for rows in parts:
        if rows:
            total += one.part(rows).totals()
    same(total, one.totals())


@given(measured(), measured(), measured())
def test_totals_add_in_any_order_and_in_place_of_none(
    one: Measured, two: Measured, three: Measured
) -> None:
    a, b, c = (each.totals() for each in (one, two, three))
    before = json.dumps(a.to_json())
    same(a + b + c, c + (b + a))
    same(Totals(METRICS) + a, a)
    same(a + Totals(METRICS), a)
    assert json.dumps(a.to_json()) == before  # nothing was changed in place


@given(measured())
def test_totals_survive_json(one: Measured) -> None:
    totals = one.totals()
    again = Totals.from_json(METRICS, json.loads(json.dumps(totals.to_json())))
    assert again == totals
    if totals.sequences:
        assert again.interval("loss") == totals.interval("loss")


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_interval_of_zeros_and_ones_is_wilsons(right: list[bool]) -> None:
    batch = Batch(np.zeros((len(right), 1)), np.ones((len(right), 1)))
    got = Predicted(np.array(right), np.ones(len(right)))
    scores = {"exact_match": exact_match(batch, got), "token_accuracy": token_accuracy(batch, got)}
    totals = Totals.of((EXACT_MATCH, TOKEN_ACCURACY), batch, scores)
    expected = wilson(sum(right), len(right))
    assert totals.interval("exact_match") == pytest.approx(expected)
    assert totals.interval("token_accuracy") == pytest.approx(expected)  # one in each sequence
    assert totals.sliced_interval("token_accuracy", "length", "1") == pytest.approx(expected)


def test_interval_of_several_targets_in_a_sequence_is_that_of_a_ratio() -> None:
    """Sequences are drawn, not targets: Wilson's would be far too narrow."""
    rng = np.random.default_rng(0)
    y = np.ones((200, 50), int)
    answer = np.repeat(rng.integers(0, 2, 200), 50)  # all right or all wrong
    batch = Batch(np.zeros((200, 50)), y)
    got = Predicted(answer, None)
    totals = Totals.of((TOKEN_ACCURACY,), batch, {"token_accuracy": token_accuracy(batch, got)})
    low, high = totals.interval("token_accuracy") or (0.0, 0.0)
    spread = answer[::50].std(ddof=1) / math.sqrt(200)
    assert high - low == pytest.approx(2 * 1.96 * spread)
    assert low < totals.value("token_accuracy") < high


@pytest.mark.parametrize("right", [0, 1])
def test_sequences_that_are_all_right_or_all_wrong_leave_doubt(right: int) -> None:
    """A standard error of 0 would be sure after six sequences; three targets each say no more."""
    batch = Batch(np.zeros((6, 3)), np.ones((6, 3)))
    score = {"token_accuracy": token_accuracy(batch, Predicted(np.full(18, right), None))}
    totals = Totals.of((TOKEN_ACCURACY,), batch, score)
    assert totals.interval("token_accuracy") == pytest.approx(wilson(6 * right, 6))
    free = Totals.of((replace(TOKEN_ACCURACY, bounds=None),), batch, score)
    assert free.interval("token_accuracy") == (right, right)  # not known to be a share


def test_interval_ends_at_the_bounds() -> None:
    """Nineteen targets of twenty in one sequence, all in the other: more than all is impossible."""
    batch = Batch(np.zeros((2, 20)), np.ones((2, 20)))
    answer = np.ones(40)
    answer[0] = 0
    score = {"token_accuracy": token_accuracy(batch, Predicted(answer, None))}
    totals = Totals.of((TOKEN_ACCURACY,), batch, score)
    free = Totals.of((replace(TOKEN_ACCURACY, bounds=None),), batch, score)
    low, high = free.interval("token_accuracy") or (0.0, 0.0)
    assert low > 0
    assert high > 1
    assert totals.interval("token_accuracy") == (low, 1.0)


def test_interval_without_an_upper_bound_ends_at_the_lower_one() -> None:
    """One sequence is far off: four without error and one of 10 would give 2 less 3.9."""
    batch = Batch(np.zeros((5, 1)), np.ones((5, 1)))
    error = Score(np.array([0.0, 0.0, 0.0, 0.0, 10.0]), np.ones(5))
    for metric in (Metric("error", bounds=(0.0, math.inf)), LOSS):
        totals = Totals.of((metric,), batch, {metric.name: error})
        free = Totals.of((replace(metric, bounds=None),), batch, {metric.name: error})
        low, high = free.interval(metric.name) or (0.0, 0.0)
        assert low < -1
        assert totals.interval(metric.name) == (0.0, high)
        assert high == pytest.approx(5.92)


def test_infinite_bounds_survive_a_record() -> None:
    """Its JSON has no infinity."""
    adapter = TypeAdapter(MetricSpec)
    spec = MetricSpec.of(Metric("error", bounds=(-math.inf, math.inf)))
    assert adapter.validate_json(adapter.dump_json(spec)).bounds == spec.bounds
    assert spec == MetricSpec.of(Metric("error"))  # as older records have it
    batch = Batch(np.zeros((2, 1)), np.ones((2, 1)))
    score = Score(np.array([-5.0, 5.0]), np.ones(2))
    assert Totals.of((spec,), batch, {"error": score}).interval("error") == pytest.approx(
        (-9.8, 9.8)
    )


def test_standard_error_is_the_spread_of_repeated_draws() -> None:
    """Of a ratio whose values and weights go together; within the error of 2000 repetitions."""
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(2000):
        w = rng.integers(1, 9, 60).astype(float)
        v = w * rng.random(60) + rng.random(60)
        sums = Sums(60, v.sum(), w.sum(), v @ v, v @ w, w @ w)
        means.append(sums.mean)
        errors.append(sums.standard_error() or 0.0)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.06)


@pytest.mark.parametrize(
    ("show", "value"), [("mean", 2.0), ("exp", math.exp(2.0)), ("bits", 2.0 / math.log(2))]
)
def test_value_and_interval_are_shown_alike(
    show: Literal["mean", "exp", "bits"], value: float
) -> None:
    metric = Metric("nats", better="lower", show=show)
    batch = Batch(np.zeros((2, 1)), np.ones((2, 1)))
    totals = Totals.of((metric,), batch, {"nats": Score(np.array([1.5, 2.5]), np.ones(2))})
    assert totals.value("nats") == pytest.approx(value)
    half = 1.96 * 0.5  # of the mean of two values that differ by 1
    ends = [metric.shown(2.0 - half), metric.shown(2.0 + half)]
    assert totals.interval("nats") == pytest.approx(ends)


def test_perplexity_of_a_huge_loss_is_finite() -> None:
    assert math.isfinite(Metric("perplexity", show="exp").shown(1e6))


@pytest.mark.parametrize("unit", ["sequence", "target"])
@pytest.mark.parametrize("wrong", ["value", "weight", "slice by"])
def test_score_of_a_wrong_shape_is_refused(unit: Literal["sequence", "target"], wrong: str) -> None:
    batch = Batch(np.zeros((2, 3)), np.array([[1, 1, 1], [1, IGNORE, IGNORE]]))
    rows = {"sequence": 2, "target": 4}[unit]
    arrays = {name: np.ones(rows) for name in ("value", "weight", "slice by")}
    metric = Metric("m", unit=unit, slices=("by",))
    for shape in ((rows + 1,), (rows, 1), (), (6 - rows,)):
        bad = {**arrays, wrong: np.ones(shape)}
        score = Score(bad["value"], bad["weight"], {"by": bad["slice by"]})
        with pytest.raises(
            InputError,
            match=rf"'m' has a {wrong} of shape .*: it must be \({rows},\), one for each {unit}",
        ):
            Totals.of((metric,), batch, {"m": score})


@pytest.mark.parametrize("answers", [np.zeros(3), np.zeros(5), np.zeros((4, 1)), np.array(1.0)])
@pytest.mark.parametrize("metric", [exact_match, token_accuracy])
def test_answers_of_a_wrong_shape_are_refused(metric: Any, answers: np.ndarray) -> None:
    batch = Batch(np.zeros((2, 2)), np.ones((2, 2)))
    with pytest.raises(InputError, match=r"the answers have shape .*: it must be \(4,\)"):
        metric(batch, Predicted(answers, None))


def test_sequences_without_targets_count_nowhere() -> None:
    """Neither in the number of sequences, nor as right or wrong, nor as a bin of their own."""
    y = np.array([[1, 1], [IGNORE, IGNORE], [1, IGNORE], [IGNORE, IGNORE]])
    batch = Batch(np.zeros((4, 2)), y, note=np.array(["a", "a", "b", "c"]))
    got = Predicted(np.array([1, 1, 0]), np.ones(3))
    one = Measured(batch, got, np.ones(3, int))
    totals = one.totals()
    assert totals.values()["n"] == totals.sequences == 2
    assert totals.all["exact_match"].to_json() == [2, 1.0, 2.0, 1.0, 1.0, 2.0]
    assert totals.value("exact_match") == 0.5
    assert totals.sliced("exact_match", "note") == {"a": 1.0, "b": 0.0}
    assert totals.sliced("exact_match", "targets") == {"1": 0.0, "2": 1.0}
    assert totals.value("token_accuracy") == pytest.approx(2 / 3)


def test_batch_without_targets_has_no_totals() -> None:
    batch = Batch(np.zeros((2, 2)), np.full((2, 2), IGNORE), note=np.array(["a", "b"]))
    totals = Measured(batch, Predicted(np.zeros(0), np.zeros(0)), np.zeros(0)).totals()
    assert totals.sequences == 0
    assert all(math.isnan(totals.value(metric.name)) for metric in METRICS)
    assert not any(bins for by in totals.slices.values() for bins in by.values())


def test_metrics_that_are_not_measured_are_left_out() -> None:
    batch = Batch(np.zeros((2, 2)), np.ones((2, 2)))
    generated = Predicted(np.array([1, 1, 1, 0]), None)
    metrics = Task().metrics
    totals = Totals.of(metrics, batch, Task().measure(batch, generated))
    assert totals.values() == {"exact_match": 0.5, "token_accuracy": 0.75, "n": 2}
    assert list(totals.values()) == ["exact_match", "token_accuracy", "n"]
    again = totals + Totals.of(metrics, batch, Task().measure(batch, replace_loss(generated)))
    assert again.values() == {"exact_match": 0.5, "token_accuracy": 0.75, "loss": 2.0, "n": 4}


def replace_loss(got: Predicted) -> Predicted:
    return got._replace(loss=np.full(len(got.answer), 2.0))


def test_bins_are_in_order_numbers_first() -> None:
    keys = ["10", "b", "9", "-1", "2.5", "a"]
    batch = Batch(np.zeros((6, 1)), np.ones((6, 1)), note=np.array(keys))
    score = Score(np.ones(6), np.ones(6), {"by": np.array(keys)})
    metric = Metric("m", unit="sequence", slices=("by",))
    totals = Totals.of((metric,), batch, {"m": score})
    expected = ["-1", "2.5", "9", "10", "a", "b"]
    assert list(totals.sliced("m", "by")) == expected
    assert list(totals.to_json()["slices"]["m"]["by"]) == expected
    assert totals.sliced("m", "other") == {}


def test_slice_that_the_metric_does_not_ask_for_is_left_out() -> None:
    batch = Batch(np.zeros((1, 1)), np.ones((1, 1)))
    score = Score(np.ones(1), np.ones(1), {"by": np.ones(1)})
    totals = Totals.of((Metric("m", unit="sequence"),), batch, {"m": score})
    assert totals.slices == {}


def test_unknown_squares_give_a_mean_without_an_interval() -> None:
    """Records from before there were totals have sums only."""
    old = Sums(3, 2.0, 3.0, None, None, None)
    assert old.mean == pytest.approx(2 / 3)
    assert old.interval() is None
    both = old + Sums(1, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert both.to_json() == [4, 3.0, 4.0, None, None, None]
    totals = Totals((EXACT_MATCH,), {"exact_match": old}, sequences=3)
    assert Totals.from_json((EXACT_MATCH,), json.loads(json.dumps(totals.to_json()))) == totals
    assert totals.interval("exact_match") is None


def test_one_sequence_has_no_interval_unless_it_is_counted() -> None:
    assert Sums(1, 2.5, 1.0, 6.25, 2.5, 1.0).interval() is None
    assert Sums(1, 1.0, 1.0, 1.0, 1.0, 1.0).interval() == pytest.approx(wilson(1, 1))


@pytest.mark.parametrize(
    ("better", "goal_met"), [("higher", [False, True, True]), ("lower", [True, True, False])]
)
def test_metric_knows_its_direction(
    better: Literal["higher", "lower"], goal_met: list[bool]
) -> None:
    metric = Metric("m", better=better)
    assert [metric.reached(value, 2.0) for value in (1.0, 2.0, 3.0)] == goal_met
    assert metric.is_better(3.0, 2.0) == (better == "higher")
    assert metric.is_better(1.0, 2.0) == (better == "lower")
    assert not metric.is_better(2.0, 2.0)


@dataclass(frozen=True)
class Numbers(Task):
    loss: ClassVar[Literal["cross_entropy", "squared_error"]] = "squared_error"


def test_task_of_numbers_measures_its_loss_only() -> None:
    task = Numbers()
    batch = Batch(np.zeros((2, 1, 3)), np.array([[0.5], [1.5]]))
    totals = Totals.of(
        task.metrics, batch, task.measure(batch, Predicted(np.zeros(2), np.array([0.25, 2.25])))
    )
    assert totals.values() == {"loss": 1.25, "n": 2}


def test_token_accuracy_is_by_the_tokens_read() -> None:
    batch = Batch(np.zeros((2, 3)), np.array([[IGNORE, 1, 1], [IGNORE, 1, 0]]))
    got = Predicted(np.array([1, 0, 1, 0]), None)
    totals = Totals.of(Task().metrics, batch, Task().measure(batch, got))
    assert totals.sliced("token_accuracy", "length") == {"2": 1.0, "3": 0.5}
