"""Bootstrap intervals resample sequences, not targets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from small_records import arm_record, make_record, run_record, run_test

from entp.results.bootstrap import Scored, bootstrap
from entp.results.schema import Bootstrap
from entp.results.summary import estimate, sliced
from entp.tasks.base import Batch
from entp.tasks.metrics import Metric, Score

ERROR = Metric("error", better="lower", slices=("half",))


def scored(values: np.ndarray, weights: np.ndarray | None = None) -> Scored:
    """A batch with a target for each of these values (sequences, targets), halved by position."""
    x = np.zeros(values.shape, np.int64)
    batch = Batch(x, x)
    halves = batch.position // max(1, values.shape[1] // 2)
    weight = np.ones(values.size) if weights is None else weights.ravel()
    return Scored(batch, {"error": Score(values.ravel(), weight, {"half": halves})})


def test_interval_is_that_of_means_of_resampled_sequences() -> None:
    values = np.random.default_rng(1).exponential(size=(1000, 1))
    found = bootstrap([ERROR], [scored(values[:300]), scored(values[300:])])
    error = values.std() / math.sqrt(1000)
    wanted = [values.mean() - 1.645 * error, values.mean() + 1.645 * error]
    assert found.all["error"] == pytest.approx(wanted, abs=0.15 * error)
    assert (found.level, found.resamples) == (0.9, 1000)


def test_targets_of_a_sequence_are_drawn_together() -> None:
    each = np.random.default_rng(1).exponential(size=(1000, 1))
    alike = bootstrap([ERROR], [scored(np.tile(each, (1, 16)))]).all["error"]
    assert alike == pytest.approx(bootstrap([ERROR], [scored(each)]).all["error"])


def test_bins_have_intervals_of_their_own() -> None:
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.exponential(size=(500, 2)), rng.normal(9, 1, (500, 2))], axis=1)
    bins = bootstrap([ERROR], [scored(values)]).slices["error"]["half"]
    assert list(bins) == ["0", "1"]
    for key, part in {"0": values[:, :2], "1": values[:, 2:]}.items():
        own = bootstrap([ERROR], [scored(part.mean(1, keepdims=True))]).all["error"]
        assert bins[key] == pytest.approx(own)


def test_rows_without_weight_do_not_count() -> None:
    values = np.random.default_rng(3).exponential(size=(200, 2))
    weights = np.ones((200, 2))
    spoiled, weights[:, 1] = values.copy(), 0
    spoiled[:, 1] = np.nan
    found = bootstrap([ERROR], [scored(spoiled, weights)])
    assert found.slices["error"]["half"].keys() == {"0"}
    low, high = found.all["error"]
    assert low < values[:, 0].mean() < high


def test_per_byte_the_cost_of_targets_without_bytes_counts() -> None:
    """The end token's nats are a cost of the text, as in the estimate that stands beside it."""
    per_byte = Metric("error", unit="byte", better="lower")
    nats = np.random.default_rng(4).exponential(size=(300, 4))
    size = np.tile([4.0, 3.0, 5.0, 0.0], (300, 1))
    low, high = bootstrap([per_byte], [scored(nats, size)]).all["error"]
    assert low < nats.sum() / size.sum() < high
    assert low > nats[:, :3].sum() / size.sum()


def test_one_sequence_has_no_interval() -> None:
    found = bootstrap([ERROR], [scored(np.ones((1, 4)))])
    assert (found.all, found.slices) == ({}, {"error": {"half": {}}})
    assert bootstrap([ERROR], [Scored(scored(np.ones((3, 2))).batch, {})]).all == {}


def test_summary_of_one_seed_has_its_bootstrap_and_says_so() -> None:
    ends = Bootstrap(
        level=0.9,
        resamples=10,
        all={"exact_match": [0.41, 0.62]},
        slices={"token_accuracy": {"length": {"1": [0.3, 0.7]}}},
    )
    runs = [run_record(seed, test=run_test(50, bootstrap=ends)) for seed in (0, 1)]
    record = make_record({"one": arm_record(runs=runs[:1]), "two": arm_record(runs=runs)})
    one, two = record.arms.values()
    found = estimate(record, one, "exact_match")
    assert found is not None
    assert found.interval == [0.41, 0.62]
    assert found.basis == "one seed, 90 % bootstrap over test sequences"
    bins = sliced(record, one, "token_accuracy", "length")
    assert bins["1"].interval == [0.3, 0.7]
    assert bins["2"].basis == "one seed, test sampling only"
    over_seeds = estimate(record, two, "exact_match")
    assert over_seeds is not None
    assert over_seeds.basis == "2 seeds"
