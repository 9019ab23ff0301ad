"""Intervals are over seeds, or say that they are not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from small_records import (
    DIGITS,
    arm_record,
    counted,
    make_record,
    run_record,
    run_test,
    sourced_run,
)

from entp.results.schema import (
    MetricSpec,
    Record,
    RunRecord,
    RunTest,
    SliceValues,
    Source,
    TotalsData,
)
from entp.results.store import read_record
from entp.results.summary import (
    authors_values,
    best,
    estimate,
    sliced,
    source_label,
    sources_of,
    status,
    summarise,
    values_of,
)
from entp.stats import welch_test, wilson

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def count3() -> Record:
    return read_record(RESULTS / "count3.json")


def test_interval_of_an_arm_contains_its_seeds(count3: Record) -> None:
    """ "matched data": sequences pooled over seeds gave .5775 to .5885, which has none of them."""
    arm = count3.arms["decoder medium, matched data"]
    assert values_of(count3, arm, "exact_match") == pytest.approx([0.539, 0.541, 0.669], abs=6e-4)
    found = estimate(count3, arm, "exact_match")
    assert found is not None
    assert found.interval == pytest.approx([0.40, 0.77], abs=5e-3)
    assert found.basis == "3 seeds"


def test_decoder_above_entp_on_count3_is_not_significant_over_seeds(count3: Record) -> None:
    decoder, entp = (
        values_of(count3, count3.arms[label], "exact_match")
        for label in ("decoder medium, tuned", "ENTP medium, curriculum")
    )
    assert min(decoder) > max(entp)
    assert welch_test(decoder, entp) == pytest.approx(0.08, abs=5e-3)


def test_one_seed_has_the_interval_of_test_sampling_and_says_so() -> None:
    record = make_record({"a": arm_record(29)})
    found = estimate(record, record.arms["a"], "exact_match")
    assert found is not None
    assert found.interval == pytest.approx(wilson(29, 100))
    assert found.basis == "one seed, test sampling only"


def test_seeds_that_agree_know_no_more_than_their_sequences() -> None:
    """Student's interval of 0, 0 is a point; 0 of 200 sequences is not."""
    record = make_record({"a": arm_record(0, 0)})
    found = estimate(record, record.arms["a"], "exact_match")
    assert found is not None
    assert found.interval == pytest.approx(wilson(0, 200))


def test_seeds_that_are_tested_on_one_file_know_no_more_than_one_of_them() -> None:
    """100 items, of which every seed has about half right, are not 300."""

    def interval(one_test: bool) -> list[float] | None:
        runs = [run_record(seed, right) for seed, right in enumerate((45, 46, 47))]
        record = make_record({"a": arm_record(runs=runs)}, one_test=one_test)
        found = estimate(record, record.arms["a"], "exact_match")
        assert found is not None
        bins = sliced(record, record.arms["a"], "token_accuracy", "length")
        assert bins["1"].interval == found.interval
        return found.interval

    assert interval(True) == pytest.approx(wilson(46, 100))
    assert interval(False) == pytest.approx(wilson(138, 300))


def test_interval_of_a_fraction_stays_inside_0_and_1() -> None:
    record = make_record({"a": arm_record(99, 90)})
    found = estimate(record, record.arms["a"], "exact_match")
    assert found is not None
    assert found.interval is not None
    assert found.interval[1] == 1


def test_interval_by_hand() -> None:
    """Of .2, .4, .6: mean .4, standard error .2 / sqrt 3, t of two degrees of freedom 4.3027."""
    record = make_record({"a": arm_record(20, 40, 60)})
    found = estimate(record, record.arms["a"], "exact_match")
    assert found is not None
    half = 4.302653 * 0.2 / math.sqrt(3)
    assert found.interval == pytest.approx([max(0, 0.4 - half), 0.4 + half], abs=1e-6)


def perplexity_run(seed: int, nats: float) -> RunRecord:
    totals = TotalsData(sequences=2, all={"perplexity": [2, nats, 2.0, nats**2, nats * 2, 2.0]})
    test = RunTest(checkpoint="best-1", concurrent_runs=1, totals=totals)
    run = run_record(seed, None, test=test, best={"perplexity": 3.0})
    return run.model_copy(update={"curve": [run.curve[0].model_copy(update={"values": {}})]})


def test_values_are_those_that_people_read() -> None:
    """Perplexity is exp of the mean: of two seeds, the mean of their perplexities."""
    arm = arm_record(runs=[perplexity_run(0, 2.0), perplexity_run(1, 4.0)])
    metric = MetricSpec("perplexity", better="lower", show="exp")
    record = make_record({"a": arm}, metrics=[metric])
    found = estimate(record, arm, "perplexity")
    assert found is not None
    assert found.mean == pytest.approx((math.exp(1) + math.exp(2)) / 2)


def test_slices_are_estimated_as_the_whole_is() -> None:
    record = make_record({"a": arm_record(20, 40, 60), "b": arm_record(29)})
    bins = sliced(record, record.arms["a"], "token_accuracy", "length")
    assert {key: one.mean for key, one in bins.items()} == pytest.approx({"1": 0.4, "2": 0.2})
    assert bins["1"].basis == "3 seeds"
    one = sliced(record, record.arms["b"], "token_accuracy", "length")["1"]
    assert one.interval == pytest.approx(wilson(29, 100))
    assert sliced(record, record.arms["a"], "loss", "length") == {}


def test_validation_is_the_mean_of_the_best() -> None:
    runs = [run_record(seed, best={"exact_match": value}) for seed, value in enumerate((0.2, 0.4))]
    found = best(arm_record(runs=runs), "exact_match")
    assert found is not None
    assert found.mean == pytest.approx(0.3)
    assert best(arm_record(runs=runs), "loss") is None


@pytest.mark.parametrize(
    ("statuses", "planned", "told"),
    [
        (["done", "done"], 2, "done"),
        (["done", "5 of 20 steps"], 2, "done, 5 of 20 steps"),
        (["done"], 2, "done, 1 seed not run"),
        (["done"], 3, "done, 2 seeds not run"),
        ([], 1, "not run"),
    ],
)
def test_status_tells_how_far_the_seeds_are(statuses: list[str], planned: int, told: str) -> None:
    runs = [run_record(seed, status=text) for seed, text in enumerate(statuses)]
    arm = arm_record(runs=runs).model_copy(update={"seeds": list(range(planned)), "runs": runs})
    assert status(arm) == told


def test_status_tells_a_run_that_is_done_but_untested() -> None:
    assert status(arm_record(50, None)) == "done, untested"


def test_summary_stands_in_the_record() -> None:
    generated = TotalsData(sequences=20, all={"exact_match": counted(3, 20)})
    run = run_record(test=run_test(50, generated=generated))
    record = summarise(make_record({"a": arm_record(runs=[run])}))
    found = record.arms["a"].summary
    assert found is not None
    assert found.test["exact_match"].mean == 0.5
    assert found.test["loss"].interval is None
    assert found.generated["exact_match"].mean == 0.15
    assert found.validation["loss"].mean == 0.25


def sourced_record() -> Record:
    runs = [
        sourced_run(
            seed,
            test={"11": 50 + seed},
            last={"11": 40 + seed},
            best={"11": 60 + seed},
            evaluations=7 + seed,
        )
        for seed in (0, 2)
    ]
    return make_record({"a": arm_record(runs=runs), "b": arm_record(5)}, metrics=DIGITS)


@pytest.mark.parametrize(("source", "value"), [("test", 0.51), ("last", 0.41), ("best", 0.61)])
def test_values_are_of_the_source_that_is_asked_for(source: Source, value: float) -> None:
    record = sourced_record()
    arm = record.arms["a"]
    whole = estimate(record, arm, "exact_match", source)
    assert whole is not None
    assert whole.mean == pytest.approx(value)
    bins = sliced(record, arm, "exact_match", "digits", source)
    assert {key: one.mean for key, one in bins.items()} == pytest.approx({"11": value})
    each = pytest.approx([value - 0.01, value + 0.01])
    assert values_of(record, arm, "exact_match", source) == each
    assert values_of(record, arm, "exact_match", source, "digits", "11") == each
    assert values_of(record, arm, "exact_match", source, "digits", "12") == []
    assert values_of(record, arm, "loss", source) == []


def test_sources_are_those_that_some_run_has() -> None:
    record = sourced_record()
    assert sources_of(record) == ["test", "last", "best"]
    assert sources_of(make_record({"a": arm_record(None)})) == []
    assert source_label(record, "last") == "last checkpoint"
    told = "best evaluation on the test itself, 7 to 9 evaluations"
    assert source_label(record, "best") == told
    found = summarise(record).arms["a"].summary
    assert found is not None
    means = (found.last["exact_match"].mean, found.best["exact_match"].mean)
    assert means == pytest.approx((0.41, 0.61))
    assert estimate(record, record.arms["b"], "exact_match", "best") is None


def test_authors_values_are_those_of_metric_slice_and_source() -> None:
    arm = arm_record(5)
    arm.authors.append(SliceValues("exact_match", "digits", {"11": 0.9}, "last", "a file"))
    arm.authors.append(SliceValues("exact_match", "digits", {"12": 0.8}, "last", "a file"))
    assert authors_values(arm, "exact_match", "digits", "last") == {"11": 0.9, "12": 0.8}
    assert authors_values(arm, "exact_match", "digits", "best") == {}
    assert authors_values(arm, "exact_match", "carries", "last") == {}
    assert authors_values(arm, "loss", "digits", "last") == {}
