"""In-context learning: functions against direct code, shifts by their statistics, the curriculum by
its shapes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import entp
from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.config.json import run_from_json, run_to_json
from entp.errors import InputError
from entp.tasks.base import IGNORE, SPLITS, Batch, task_class, task_name
from entp.tasks.in_context import (
    SHIFTS,
    InContext,
    examples_of,
    net_values,
    permuted,
    tree_values,
)
from entp.tasks.metrics import Predicted, Totals
from entp.training.evaluate import evaluate, evaluate_baseline, split_batches
from entp.training.forward import Forward

FUNCTIONS: list[Any] = ["linear", "sparse", "net", "tree"]
functions = pytest.mark.parametrize("function", FUNCTIONS)


def whole(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and values of sequences without padding, the last value from the targets."""
    return batch.x[:, ::2].astype(float), batch.y[:, ::2].astype(float)


def queries(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Of sequences with one query: examples before it, and the query."""
    return batch.position // 2, batch.x[batch.row, batch.position].astype(float)


def errors(task: InContext, batch: Batch, name: str) -> dict[str, float]:
    """A baseline's squared error by the number of examples."""
    totals = Totals.of(task.metrics, batch, task.measure(batch, task.baselines()[name](batch)))
    return totals.sliced("squared_error", "examples")


@given(
    st.sampled_from(FUNCTIONS),
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_sequences_are_inputs_and_values_in_turn(
    function: Any, dim: int, points: int, size: int, seed: int
) -> None:
    task = InContext(function, dim, points, sparsity=1, hidden=5, depth=2)
    batch = task.batch(seed, "train", 3, size)
    assert batch.x.shape == (size, 2 * points - 1, dim)
    assert batch.x.dtype == batch.y.dtype == np.float32
    assert batch.lengths is None
    assert (batch.target_mask == (np.arange(2 * points - 1) % 2 == 0)).all()
    assert np.array_equal(batch.x[:, 1::2, 0], batch.y[:, ::2][:, :-1])  # targets are read next
    assert (batch.x[:, 1::2, 1:] == 0).all()
    needs = task.model_needs()
    assert needs == {"input_dim": dim, "outputs": 1, "context_length": 2 * points}


def test_interval_of_errors_is_never_below_zero() -> None:
    """Of three prompts one is far off."""
    task = InContext("linear", 2, 4)
    batch = task.batch(0, "test", 0, 3)
    answer = batch.targets.astype(float) + 9.0 * (batch.row == 0)
    got = Predicted(answer, (answer - batch.targets) ** 2)
    totals = Totals.of(task.metrics, batch, task.measure(batch, got))
    for low, high in (
        totals.interval("squared_error") or (-1.0, 0.0),
        totals.interval("loss") or (-1.0, 0.0),
        totals.sliced_interval("squared_error", "examples", "2") or (-1.0, 0.0),
    ):
        assert low == 0.0
        assert 0.0 < high < 1000.0


@functions
def test_inputs_are_standard_normal(function: Any) -> None:
    x, _ = whole(InContext(function, points=10).batch(0, "valid", 0, 2_000))
    flat = x.reshape(-1, 20)
    assert np.abs(flat.mean(axis=0)).max() < 5 / math.sqrt(len(flat))
    assert np.abs(np.cov(flat.T) - np.eye(20)).max() < 5 * math.sqrt(2 / len(flat))


@functions
def test_answer_zero_has_an_error_of_one(function: Any) -> None:
    """What the squared error is divided by is the mean of f(x)²."""
    task = InContext(function, points=4)
    batches = split_batches(task, "test", 4, 4_000, 0)
    totals = evaluate_baseline(task, "zero", batches)
    assert totals.value("squared_error") == pytest.approx(1, abs=0.04)


def recovered(batch: Batch) -> np.ndarray:
    """The weights of linear functions, from more points than coordinates."""
    x, y = whole(batch)
    return np.stack([np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y, strict=True)])


def test_linear_functions_are_linear_and_normal() -> None:
    batch = InContext(dim=5, points=12).batch(0, "train", 0, 1_500)
    w = recovered(batch)
    x, y = whole(batch)
    np.testing.assert_allclose((x @ w[..., None])[..., 0], y, atol=1e-4)
    assert np.abs(w.mean(axis=0)).max() < 5 / math.sqrt(1_500)
    assert np.abs(np.cov(w.T) - np.eye(5)).max() < 5 * math.sqrt(2 / 1_500)


def test_sparse_functions_read_few_coordinates_all_equally_often() -> None:
    batch = InContext("sparse", dim=6, points=12, sparsity=2).batch(0, "train", 0, 3_000)
    w = recovered(batch)
    x, y = whole(batch)
    np.testing.assert_allclose((x @ w[..., None])[..., 0], y, atol=1e-4)
    read = np.abs(w) > 1e-4
    assert set(read.sum(axis=1)) <= {1, 2}  # a weight may be this close to 0
    assert (read.sum(axis=1) == 2).mean() > 0.99
    assert np.abs(read.mean(axis=0) - 1 / 3).max() < 5 * math.sqrt(2 / 9 / 3_000)
    assert w[read].std() == pytest.approx(1, abs=0.05)


def test_net_is_the_sum_over_its_hidden_units() -> None:
    rng = np.random.default_rng(0)
    x, first, second = (rng.standard_normal(shape) for shape in ((2, 3, 4), (2, 4, 5), (2, 5)))
    found = net_values(x, first, second)
    for row, at in np.ndindex(2, 3):
        units = [max(0.0, float(x[row, at] @ first[row, :, unit])) for unit in range(5)]
        expected = math.sqrt(2 / 5) * sum(u * v for u, v in zip(units, second[row], strict=True))
        assert found[row, at] == pytest.approx(expected, rel=1e-12)


def test_nets_of_a_batch_have_one_slope_on_either_side_of_zero() -> None:
    """Of one number a ReLU net without biases is a x above 0 and b x below."""
    x, y = whole(InContext("net", dim=1, points=40, hidden=7).batch(0, "test", 0, 30))
    slopes = y / x[..., 0]
    above = x[..., 0] > 0
    sides = np.stack(
        [[row[side].mean() for side in (up, ~up)] for row, up in zip(slopes, above, strict=True)]
    )
    np.testing.assert_allclose(slopes, np.where(above, sides[:, :1], sides[:, 1:]), atol=1e-4)
    assert np.abs(sides[:, 0] - sides[:, 1]).mean() > 0.5
    assert np.abs(sides.mean()) < 0.5


def walk(x: np.ndarray, coordinates: np.ndarray, leaves: np.ndarray, depth: int) -> float:
    """A tree's value at x, node by node: the children of node n are 2n + 1 and 2n + 2."""
    nodes = [*coordinates.tolist(), *leaves.tolist()]
    at = 0
    for _ in range(depth):
        at = 2 * at + 2 if x[nodes[at]] > 0 else 2 * at + 1
    return float(nodes[at])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 999))
def test_tree_is_walked_node_by_node(depth: int, dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 6, dim))
    x[0, 0] = 0.0  # neither above nor below: left
    coordinates = rng.integers(0, dim, (2, 2**depth - 1))
    leaves = rng.standard_normal((2, 2**depth))
    found = tree_values(x, coordinates, leaves)
    for row, at in np.ndindex(2, 6):
        assert found[row, at] == walk(x[row, at], coordinates[row], leaves[row], depth)


def test_trees_of_a_batch_use_signs_and_reach_all_leaves() -> None:
    """Of 3 coordinates there are 8 patterns of signs; each has one value, and depth 1 has two."""
    x, y = whole(InContext("tree", dim=3, points=400, depth=1).batch(0, "train", 0, 30))
    read = []
    for row, values in zip(x, y, strict=True):
        by_sign = {tuple(v > 0) for v in row}
        assert len(by_sign) == 8
        (coordinate,) = [c for c in range(3) if len(np.unique(values[row[:, c] > 0])) == 1]
        assert len(np.unique(values)) == 2
        read.append(coordinate)
    assert set(read) == {0, 1, 2}


def test_noise_is_added_to_every_value() -> None:
    clean = InContext(dim=3, points=30).batch(0, "test", 0, 500)
    noisy = InContext(dim=3, points=30, noise=0.5).batch(0, "test", 0, 500)
    assert np.array_equal(clean.x[:, ::2], noisy.x[:, ::2])
    noise = noisy.targets - clean.targets
    assert noise.std() == pytest.approx(0.5, abs=0.02)
    assert np.array_equal(noisy.x[:, 1::2, 0], noisy.y[:, ::2][:, :-1])


@functions
def test_batch_is_pure_and_no_two_streams_meet(function: Any) -> None:
    task = InContext(function, dim=4, points=5)
    splits = [*SPLITS, *(name for name in task.more_splits if name != "permuted")]
    found = {}
    for seed, split, step in itertools.product((0, 1), splits, (0, 7)):
        batch, again = (task.batch(seed, split, step, 16) for _ in range(2))
        assert np.array_equal(batch.x, again.x)
        assert np.array_equal(batch.y, again.y)
        found[seed, split, step] = {row.tobytes() for row in batch.x[:, 0]}
    assert len(set.union(*found.values())) == 16 * len(found)


def test_order_of_batches_does_not_matter() -> None:
    task = InContext(dim=4, points=5)
    forwards = [task.batch(0, "train", step, 3).x for step in range(4)]
    backwards = [task.batch(0, "train", step, 3).x for step in reversed(range(4))]
    assert all(np.array_equal(a, b) for a, b in zip(forwards, backwards[::-1], strict=True))


@pytest.mark.parametrize(
    ("function", "first", "points"),
    [("linear", 11, 40), ("sparse", 11, 40), ("net", 26, 100), ("tree", 26, 100)],
)
def test_curriculum_grows_to_the_whole_task(function: Any, first: int, points: int) -> None:
    task = InContext(function, points=points, curriculum_steps=300, hidden=4)
    stages = [task.stage(step) for step in range(301)]
    assert stages[0] == (5, first)
    assert stages[19] == (5, first)
    assert stages[20] == (6, first + (points - first) // 15)
    assert stages[299] == (19, first + (points - first) * 14 // 15)
    assert stages[300] == task.stage(10**6) == (20, points)
    assert len(set(stages)) == 16
    for step in (0, 150, 300):
        dims, count = task.stage(step)
        batch = task.batch(0, "train", step, 4)
        assert batch.x.shape == (4, 2 * count - 1, 20)
        assert (batch.x[:, ::2, dims:] == 0).all()
        assert (batch.x[:, ::2, :dims] != 0).all()
        assert len(batch.targets) == 4 * count
    assert task.batch(0, "valid", 0, 4).x.shape == (4, 2 * points - 1, 20)
    assert (task.batch(0, "valid", 0, 4).x[:, ::2] != 0).all()


def test_curriculum_of_garg_is_one_dimension_and_two_points_at_a_time() -> None:
    task = InContext(points=41, curriculum_steps=30_000)
    assert [task.stage(2_000 * n) for n in range(16)] == [(5 + n, 11 + 2 * n) for n in range(16)]


def test_curriculum_of_a_small_task_starts_with_all_of_it() -> None:
    assert InContext(dim=3, points=7, curriculum_steps=10).stage(0) == (3, 7)
    assert InContext("sparse", dim=9, sparsity=7, curriculum_steps=10).stage(0) == (7, 11)
    assert InContext(dim=3, points=7).stage(0) == (3, 7)


def test_sparse_functions_of_the_curriculum_read_live_coordinates() -> None:
    """After a few steps of it the values still depend on as many coordinates as they will."""
    batch = InContext("sparse", dim=9, points=40, curriculum_steps=10).batch(0, "train", 0, 500)
    w = recovered(batch)  # least norm: 0 where inputs are
    assert (np.abs(w[:, 5:]) < 1e-5).all()
    read = np.abs(w[:, :5]) > 1e-4
    assert (read.sum(axis=1) == 3).mean() > 0.97


def test_only_linear_functions_have_shifts() -> None:
    assert InContext().more_splits == ("permuted", *SHIFTS)
    assert {"quadrants", "orthogonal", "half_subspace", "skewed", "noisy"} < set(SHIFTS)
    scales = [f"{of}_scale_{by}" for of in "xy" for by in ("0.333", "0.5", "2", "3")]
    assert set(scales) < set(SHIFTS)
    for function in FUNCTIONS[1:]:
        task = InContext(function)
        assert task.more_splits == ("permuted",)
        with pytest.raises(InputError, match="unknown split 'skewed'"):
            task.batch(0, "skewed", 0, 1)


@pytest.mark.parametrize(("split", "most"), [("quadrants", 6), ("orthogonal", 4)])
def test_shifted_queries_end_their_sequences(split: str, most: int) -> None:
    """One after the other the sequences have 0, 1, 2, ... examples, from batch to batch."""
    task = InContext(dim=4, points=6)
    counts = []
    for step in range(2):
        batch = task.batch(0, split, step, 9)
        examples, _ = queries(batch)
        assert batch.row.tolist() == list(range(9))
        assert batch.lengths is not None
        assert batch.lengths.tolist() == (2 * examples + 1).tolist()
        counts += examples.tolist()
        for row, length in enumerate(batch.lengths):
            assert (batch.x[row, length:] == 0).all()
            assert (batch.x[row, 0:length:2] != 0).all()
    assert counts == [n % most for n in range(18)]


@pytest.mark.parametrize("split", ["quadrants", "orthogonal"])
def test_shifted_queries_have_the_value_of_the_same_function(split: str) -> None:
    """Least squares through the examples and the query leaves no residual; with more points than
    coordinates it could."""
    task = InContext(dim=3, points=9 if split == "quadrants" else 3)
    batch = task.batch(0, split, 0, 90)
    x, y = examples_of(batch)
    for row, target, count in zip(batch.row, batch.targets, batch.position // 2, strict=True):
        inputs = x[row, : count + 1]
        values = np.append(y[row, :count], target)
        w = np.linalg.lstsq(inputs, values, rcond=None)[0]
        np.testing.assert_allclose(inputs @ w, values, atol=1e-4)


def test_quadrants_fix_the_signs_of_examples_only() -> None:
    task = InContext(dim=3, points=5)
    batch = task.batch(0, "quadrants", 0, 4_000)
    count, query = queries(batch)
    x, _ = examples_of(batch)
    for row in np.flatnonzero(count == 4)[:50]:
        assert len({tuple(v > 0) for v in x[row, :4]}) == 1
    some = count > 0
    first = x[some, 0] > 0
    assert np.abs(first.mean(axis=0) - 0.5).max() < 0.05
    assert np.abs((first == (query[some] > 0)).mean(axis=0) - 0.5).max() < 0.05  # independent
    assert np.abs(np.cov(query.T) - np.eye(3)).max() < 0.15


def test_orthogonal_queries_are_orthogonal_and_as_long_as_others() -> None:
    task = InContext(dim=6, points=9)
    batch = task.batch(0, "orthogonal", 0, 3_000)
    count, query = queries(batch)
    assert set(count) == set(range(6))
    x, _ = examples_of(batch)
    before = np.arange(x.shape[1]) < count[:, None]
    dots = np.abs((x @ query[..., None])[..., 0])[before]
    assert dots.max() < 1e-5
    lengths = (query**2).sum(axis=1)
    assert [lengths[count == n].mean() for n in range(6)] == pytest.approx([6] * 6, rel=0.1)
    found = errors(task, batch, "least squares")
    assert list(found.values()) == pytest.approx(list(errors(task, batch, "zero").values()))


def covariances(task: InContext, split: str) -> np.ndarray:
    """The eigenvalues of each prompt's inputs, the largest first."""
    x, _ = whole(task.batch(0, split, 0, 20))
    return np.stack([np.linalg.eigvalsh(a.T @ a / len(a))[::-1] for a in x])


def test_half_subspace_has_half_the_dimension_and_the_same_length() -> None:
    found = covariances(InContext(dim=6, points=4_000), "half_subspace")
    assert found[:, :3] == pytest.approx(np.full((20, 3), 2), rel=0.15)
    assert np.abs(found[:, 3:]).max() < 1e-6


def test_skewed_inputs_have_falling_deviations_and_the_same_length() -> None:
    found = covariances(InContext(dim=4, points=8_000), "skewed")
    squares = np.array([1, 1 / 4, 1 / 9, 1 / 16])
    assert found == pytest.approx(np.tile(squares * 4 / squares.sum(), (20, 1)), rel=0.15)


@pytest.mark.parametrize("split", ["half_subspace", "skewed"])
def test_each_prompt_has_its_own_axes(split: str) -> None:
    x, _ = whole(InContext(dim=4, points=50).batch(0, split, 0, 3_000))
    flat = x.reshape(-1, 4)
    assert np.abs(np.cov(flat.T) - np.eye(4)).max() < 0.1  # over all prompts none is special


@pytest.mark.parametrize("by", [0.333, 0.5, 2, 3])
def test_scales_multiply_inputs_or_values(by: float) -> None:
    task = InContext(dim=4, points=30)
    x, y = whole(task.batch(0, f"x_scale_{by:g}", 0, 2_000))
    assert x.std() == pytest.approx(by, rel=0.02)
    assert (y**2).mean() == pytest.approx(4 * by**2, rel=0.1)
    x, y = whole(task.batch(0, f"y_scale_{by:g}", 0, 2_000))
    assert x.std() == pytest.approx(1, rel=0.02)
    assert (y**2).mean() == pytest.approx(4 * by**2, rel=0.1)
    w = recovered(task.batch(0, f"y_scale_{by:g}", 0, 500))
    assert w.std() == pytest.approx(by, rel=0.1)


def test_noisy_values_keep_their_variance() -> None:
    task = InContext(dim=4, points=60)
    batch = task.batch(0, "noisy", 0, 2_000)
    x, y = whole(batch)
    assert (y**2).mean() == pytest.approx(4, rel=0.06)
    w = recovered(batch)
    residual = y - (x @ w[..., None])[..., 0]
    variance = (residual**2).sum() / (2_000 * (60 - 4))
    assert variance == pytest.approx(4 / 5, rel=0.03)  # noise of 1, scaled back


def rows_of(batch: Batch, row: int) -> set[tuple[float, ...]]:
    """The examples of a sequence as a set: input and value."""
    x, y = examples_of(batch)
    return {(*a.tolist(), float(b)) for a, b in zip(x[row, :-1], y[row, :-1], strict=True)}


@functions
def test_permuted_prompts_are_those_of_test_in_another_order(function: Any) -> None:
    task = InContext(function, dim=3, points=8, hidden=4)
    test, other = task.batch(5, "test", 2, 6), task.batch(5, "permuted", 2, 6)
    assert other.x.shape == test.x.shape
    assert np.array_equal(other.x[:, -1], test.x[:, -1])
    assert other.position.tolist() == [14] * 6  # the last query only
    assert np.array_equal(other.targets, test.y[:, -1])
    assert not np.array_equal(other.x, test.x)
    for row in range(6):
        assert rows_of(other, row) == rows_of(test, row)


def test_permuted_orders_are_uniform_and_may_end_early() -> None:
    batch = InContext(dim=1, points=5).batch(0, "test", 0, 1)
    many = Batch(np.repeat(batch.x, 6_000, axis=0), np.repeat(batch.y, 6_000, axis=0))
    found = permuted(many, np.random.default_rng(0), examples=3)
    assert found.x.shape == (6_000, 7, 1)
    assert np.array_equal(found.x[:, 6], many.x[:, 6])
    assert (found.y[:, :-1] == IGNORE).all()
    assert (found.y[:, -1] == many.y[:, 6]).all()
    orders, counts = np.unique(found.x[:, :6:2, 0], axis=0, return_counts=True)
    assert len(orders) == 6
    assert (np.abs(counts / 6_000 - 1 / 6) < 5 * math.sqrt(1 / 6 / 6_000)).all()


def test_permuted_refuses_what_it_cannot_reorder() -> None:
    task, rng = InContext(dim=3, points=5), np.random.default_rng(0)
    with pytest.raises(InputError, match=r"examples is 5: .* 0 to 4 examples"):
        permuted(task.batch(0, "test", 0, 2), rng, examples=5)
    with pytest.raises(InputError, match="without padding"):
        permuted(task.batch(0, "quadrants", 0, 2), rng)


def test_squared_error_is_sliced_by_examples_and_divided() -> None:
    task = InContext("sparse", dim=5, points=4, sparsity=2)
    batch = task.batch(0, "test", 0, 3)
    wrong = batch.targets + np.tile([0.0, 1.0, 2.0, 4.0], 3)
    loss = (wrong - batch.targets) ** 2
    totals = Totals.of(task.metrics, batch, task.measure(batch, Predicted(wrong, loss)))
    assert totals.sliced("squared_error", "examples") == pytest.approx(
        {"0": 0.0, "1": 0.5, "2": 2.0, "3": 8.0}, rel=1e-5
    )
    assert totals.value("loss") == pytest.approx(21 / 4, rel=1e-5)
    assert task.metrics[0].better == "lower"


def test_answers_of_nan_do_not_count_for_baselines_but_do_for_models() -> None:
    task = InContext(dim=2, points=3)
    batch = task.batch(0, "test", 0, 4)
    answer = batch.targets.astype(float)
    answer[batch.position == 2] = np.nan
    baseline = Totals.of(task.metrics, batch, task.measure(batch, Predicted(answer, None)))
    assert baseline.sliced("squared_error", "examples") == {"0": 0.0, "2": 0.0}
    assert baseline.value("squared_error") == 0.0
    model = task.measure(batch, Predicted(answer, (answer - batch.targets) ** 2))
    assert math.isnan(Totals.of(task.metrics, batch, model).value("squared_error"))


CHEAP = ["least squares", "ridge (alpha 1)", "3 nearest neighbours", "averaging", "zero"]
SLOW = {
    "linear": [],
    "sparse": [f"Lasso (alpha {alpha})" for alpha in ("1", "0.1", "0.01", "0.001", "0.0001")],
    "net": ["two-layer net"],
    "tree": ["tree of depth 2", "tree of any depth", "gradient boosting"],
}


@functions
@pytest.mark.parametrize("split", ["test", "permuted"])
def test_baselines_answer_every_query_or_a_thinned_grid(function: Any, split: str) -> None:
    task = InContext(function, dim=4, points=23, depth=2)
    assert list(task.baselines()) == CHEAP + SLOW[function]
    batch = task.batch(0, split, 0, 2)
    grid = {2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22}
    for name, baseline in task.baselines().items():
        got = baseline(batch)
        assert got.answer.shape == batch.targets.shape
        assert got.loss is None
        answered = set((batch.position // 2)[~np.isnan(got.answer)].tolist())
        asked = set((batch.position // 2).tolist())
        assert answered == (asked if name in CHEAP else asked & grid)


def test_baselines_are_fitted_to_the_examples_before_each_query() -> None:
    """Least squares knows a linear function after as many examples as it has coordinates."""
    task = InContext(dim=4, points=8)
    for split in ("test", "quadrants", "y_scale_3"):
        found = errors(task, task.batch(0, split, 0, 400), "least squares")
        assert [int(n) for n in found] == list(range(8))
        values = list(found.values())
        assert max(values[4:]) < 1e-6
        assert min(values[:4]) > 0.05
    expected = [1 - n / 4 for n in range(4)]
    found = errors(task, task.batch(0, "test", 0, 8_000), "least squares")
    assert list(found.values())[:4] == pytest.approx(expected, abs=0.1)


def test_ridge_is_the_best_linear_method_for_its_noise() -> None:
    """Its alpha is the variance of the noise, as the posterior mean has it."""
    task = InContext(dim=4, points=8, noise=0.7)
    assert "ridge (alpha 0.49)" in task.baselines()
    batch = task.batch(0, "test", 0, 8_000)
    ridge = list(errors(task, batch, "ridge (alpha 0.49)").values())
    other = list(errors(task, batch, "least squares").values())
    assert all(a < b for a, b in zip(ridge[1:], other[1:], strict=True))
    one = list(errors(InContext(dim=4, points=8), batch, "ridge (alpha 1)").values())
    assert sum(ridge) < sum(one)


def test_lasso_beats_least_squares_on_sparse_functions() -> None:
    task = InContext("sparse", dim=10, points=9, sparsity=1)
    batch = task.batch(0, "test", 0, 40)
    assert (
        errors(task, batch, "Lasso (alpha 0.01)")["8"]
        < 0.3 * errors(task, batch, "least squares")["8"]
    )


def test_trees_learn_a_tree_and_nets_a_net() -> None:
    """Better than a linear function does, after as many examples."""
    task = InContext("tree", dim=3, points=40, depth=1)
    batch = task.batch(0, "permuted", 1, 12)  # one query each
    linear = errors(task, batch, "least squares")["39"]
    for name in ("tree of depth 1", "tree of any depth", "gradient boosting"):
        assert errors(task, batch, name)["39"] < 0.5 * linear
    task = InContext("net", dim=2, points=40)
    batch = task.batch(0, "permuted", 0, 20)
    linear = errors(task, batch, "least squares")["39"]
    assert errors(task, batch, "two-layer net")["39"] < 0.5 * linear


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"function": "cubic"}, r"unknown task\.function 'cubic': allowed are linear, sparse, net"),
        ({"dim": 0}, r"task\.dim is 0: it must be at least 1"),
        ({"points": 0}, r"task\.points is 0: it must be at least 1"),
        ({"hidden": 0}, r"task\.hidden is 0: it must be at least 1"),
        ({"curriculum_steps": -1}, r"task\.curriculum_steps is -1: it must be at least 0"),
        ({"function": "sparse", "dim": 2}, r"task\.sparsity is 3: of 2 coordinates .* 1 to 2"),
        ({"depth": 0}, r"task\.depth is 0: allowed are 1 to 12"),
        ({"depth": 13}, r"task\.depth is 13: allowed are 1 to 12"),
        ({"noise": -0.1}, r"task\.noise is -0\.1: it must be at least 0"),
        ({"noise": math.nan}, r"task\.noise is nan: it must be a finite number"),
        ({"points": 2.5}, r"task\.points is 2\.5: it must be a whole number"),
    ],
)
def test_in_context_refuses(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        InContext(**fields)


def test_sparsity_is_checked_of_sparse_functions_only() -> None:
    assert InContext(dim=2).sparsity == 3


def test_example_is_drawn_as_points() -> None:
    task = InContext(dim=20, points=40)
    lines = task.draw().splitlines()
    assert lines[0].startswith("input x (6 of 20 coordinates)")
    assert len(lines) == 9
    assert lines[-2].strip() == "..."
    one = task.batch(0, "train", 0, 1)
    assert [float(word) for word in lines[1].split()] == pytest.approx(
        [*one.x[0, 0, :6], one.y[0, 0]], abs=0.006
    )
    assert float(lines[-1].split()[-1]) == pytest.approx(float(one.y[0, -1]), abs=0.006)
    assert len(InContext(dim=2, points=1).draw().splitlines()) == 2


def test_vectors_are_never_continued_nor_repeated() -> None:
    task = InContext()
    with pytest.raises(InputError, match=r"icl reads vectors.*entp evaluate"):
        task.prompts(0, 3)
    with pytest.raises(InputError, match=r"icl reads vectors.*entp evaluate"):
        task.from_text("1 2 3")
    assert task.caveats(10**9) == []


def test_task_is_found_by_its_name() -> None:
    assert task_class("icl") is InContext
    assert task_name(InContext("tree")) == "icl"


def small_run(task: InContext, **changes: Any) -> Run:
    config: dict[str, Any] = {
        "task": task,
        "model": model_for(task, "small", layers=2, heads=2, width=32),
        "steps": 100,
        "batch_size": 32,
        "optim": OptimConfig(lr=3e-3, min_lr=1e-3, warmup_steps=10, decay_steps=100),
        "train": TrainConfig(eval_every=100, eval_batches=4, checkpoint_every=100),
    }
    return Run(**{**config, **changes})


def test_run_survives_json() -> None:
    run = small_run(InContext("sparse", dim=4, points=3, curriculum_steps=20, noise=0.5))
    assert run_from_json(run_to_json(run)) == run


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_models_learn_in_context(mode: Any, tmp_path: Path) -> None:
    """A tree with one decision about one number: examples tell its two values, and the error falls
    below that of 0, which is 1."""
    task = InContext("tree", dim=1, points=6, depth=1)
    result = entp.train(small_run(task, mode=mode), tmp_path, device="cpu", quiet=True)
    assert result.metrics["squared_error"] < 0.75


def test_training_goes_through_the_curriculum(tmp_path: Path) -> None:
    """Its batches grow, and a run that is stopped within it ends like one that is not."""
    task = InContext(dim=6, points=13, curriculum_steps=6)
    assert len({task.stage(step) for step in range(8)}) >= 3
    train = TrainConfig(eval_every=8, eval_batches=1, checkpoint_every=4)
    run = small_run(task, steps=8, batch_size=4, train=train)
    at_once = entp.train(run, tmp_path / "whole", device="cpu", quiet=True)
    entp.train(replace(run, steps=4), tmp_path / "parts", device="cpu", quiet=True)
    resumed = entp.train(run, tmp_path / "parts", resume=True, device="cpu", quiet=True)
    assert resumed.metrics == at_once.metrics


@pytest.mark.parametrize("split", ["test", "quadrants", "orthogonal", "skewed", "permuted"])
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_models_are_measured_on_every_kind_of_split(mode: Any, split: str) -> None:
    """By the same numbers as prefix by prefix: what follows a query does not count."""
    task = InContext(dim=3, points=4)
    torch.manual_seed(0)
    model = entp.Transformer(model_for(task, "small", layers=2, heads=2, width=16))
    batch = task.batch(0, split, 0, 6)
    how = Forward.of(small_run(task, mode=mode))
    totals = evaluate(model, task, [batch], how)
    expected: dict[str, list[float]] = {}
    for row, position, target in zip(batch.row, batch.position, batch.targets, strict=True):
        prefix = torch.from_numpy(batch.x[row : row + 1, : position + 1])
        with torch.no_grad():
            answer = model(prefix, mode)[0, -1].item()
        expected.setdefault(str(position // 2), []).append((answer - float(target)) ** 2 / 3)
    found = totals.sliced("squared_error", "examples")
    assert found == pytest.approx({n: np.mean(v) for n, v in expected.items()}, rel=1e-4)
