"""Checks hold, fail or are undecided, by what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_records import DIGITS, arm_record, make_record, run_record, sourced_run

from entp.experiments import PAPER
from entp.results.schema import ArmRecord, Check, Point, Verdict
from entp.results.store import complete, find_records, read_record
from entp.results.verdict import check_record, judge, matches

RESULTS = Path(__file__).parents[2] / "results"


def check(right: Any, relation: Any = "at least", **more: Any) -> Check:
    left = more.pop("left", {"mode": "ENTP"})
    return Check("it is so", left, "exact_match", relation, right, **more)


def outcome(arms: dict[str, ArmRecord], one: Check) -> tuple[str, list[str]]:
    found = check_record(make_record(arms), one)
    return found.outcome, found.why


@pytest.mark.parametrize(
    ("relation", "number", "expected"),
    [
        ("at least", 0.5, "holds"),
        ("above", 0.5, "fails"),
        ("at most", 0.5, "holds"),
        ("below", 0.5, "fails"),
        ("at least", 0.51, "fails"),
        ("above", 0.49, "holds"),
    ],
)
def test_mean_over_seeds_is_compared_with_a_number(
    relation: str, number: float, expected: str
) -> None:
    arms = {"a": arm_record(40, 60, mode="ENTP"), "b": arm_record(0, mode="decoder")}
    found, why = outcome(arms, check(number, relation))
    assert found == expected
    assert len(why) == 1
    assert why[0].startswith("a: 0.5 is ")


def test_check_must_hold_for_every_arm_that_it_names() -> None:
    arms = {"a": arm_record(90, mode="ENTP", layers=4), "b": arm_record(10, mode="ENTP", layers=5)}
    found, why = outcome(arms, check(0.5))
    assert found == "fails"
    assert why == ["a: 0.9 is at least 0.5", "b: 0.1 is not at least 0.5"]
    assert outcome(arms, check(0.5, left={"mode": "ENTP", "layers": [4, 6]}))[0] == "holds"


@pytest.mark.parametrize(
    ("arm", "told"),
    [
        (arm_record(mode="ENTP"), "a: not run"),
        (arm_record(runs=[run_record(status="5 of 9 steps")], mode="ENTP"), "a: 5 of 9 steps"),
        (arm_record(None, mode="ENTP"), "a: done, untested"),
    ],
)
def test_check_is_undecided_while_an_arm_is_missing(arm: ArmRecord, told: str) -> None:
    assert outcome({"a": arm}, check(0.5)) == ("undecided", [told])


def test_best_arm_is_compared_with_the_best() -> None:
    """.9 with 8 layers against .8 with 4: that others of the left are behind says nothing."""
    rights = {("ENTP", 4): 70, ("ENTP", 8): 90, ("decoder", 4): 80, ("decoder", 8): 75}
    arms = {
        f"{mode} {n}": arm_record(right, mode=mode, layers=n) for (mode, n), right in rights.items()
    }
    one = check({"mode": "decoder"}, "above", best_of=True)
    found, why = outcome(arms, one)
    assert found == "holds"
    assert why == ["ENTP 8: 0.9 is above 0.8 of decoder 4"]
    assert outcome(arms, check({"mode": "decoder"}, "above"))[0] == "fails"
    arms["decoder 8"] = arm_record(mode="decoder", layers=8)
    assert outcome(arms, one) == ("undecided", ["decoder 8: not run"])


def test_check_about_no_arm_is_undecided() -> None:
    assert outcome({"a": arm_record(9, mode="x")}, check(0.5))[0] == "undecided"


def test_p_needs_seeds() -> None:
    """.97 and .99 of two seeds are above .5; whether above .97, two seeds do not say."""
    arms = {"a": arm_record(97, 99, mode="ENTP")}
    assert outcome(arms, check(0.5, "above", p=0.05))[0] == "holds"
    found, why = outcome(arms, check(0.97, "above", p=0.05))
    assert found == "fails"
    assert "p = 0.5" in why[0]
    assert outcome({"a": arm_record(97, mode="ENTP")}, check(0.5, p=0.05))[0] == "undecided"


def test_arms_are_compared_by_welchs_test() -> None:
    arms = {
        "a": arm_record(90, 91, 92, mode="ENTP"),
        "b": arm_record(10, 11, 12, mode="decoder"),
        "c": arm_record(10, 90, 91, mode="other"),
    }
    assert outcome(arms, check({"mode": "decoder"}, "above", p=0.01))[0] == "holds"
    assert outcome(arms, check({"mode": "decoder"}, "below", p=0.01))[0] == "fails"
    assert outcome(arms, check({"mode": "other"}, "above"))[0] == "holds"
    assert outcome(arms, check({"mode": "other"}, "above", p=0.01))[0] == "fails"


def test_pairs_of_seeds_are_compared_by_their_differences() -> None:
    """Seeds differ by more than the arms, which Welch's test takes for noise."""
    arms = {"a": arm_record(12, 52, 91, mode="ENTP"), "b": arm_record(10, 50, 90, mode="decoder")}
    other = {"mode": "decoder"}
    assert outcome(arms, check(other, "above", p=0.05))[0] == "fails"
    assert outcome(arms, check(other, "above", p=0.05, paired=True))[0] == "holds"
    assert outcome(arms, check(other, "above", p=0.01, paired=True))[0] == "fails"
    short = {"a": arms["a"], "b": arm_record(10, 50, mode="decoder")}
    assert outcome(short, check(other, "above", p=0.05, paired=True))[0] == "undecided"


def test_only_arms_that_agree_in_some_factors_are_compared() -> None:
    arms = {
        f"{mode} {n}": arm_record(right, mode=mode, examples=n)
        for mode, n, right in (
            ("ENTP", 1, 20),
            ("ENTP", 5, 90),
            ("decoder", 1, 10),
            ("decoder", 5, 80),
        )
    }
    ahead = check({"mode": "decoder"}, "above", same="examples")
    found, why = outcome(arms, ahead)
    assert found == "holds"
    assert why == [
        "ENTP 1: 0.2 is above 0.1 of decoder 1",
        "ENTP 5: 0.9 is above 0.8 of decoder 5",
    ]
    assert outcome(arms, check({"mode": "decoder"}, "above"))[0] == "fails"


def test_selector_takes_one_value_or_several() -> None:
    factors = {"mode": "ENTP", "layers": 5}
    assert matches(factors, {})
    assert matches(factors, {"mode": "ENTP"})
    assert matches(factors, {"layers": [4, 5]})
    assert not matches(factors, {"mode": "EN"})
    assert not matches(factors, {"length": 3})


def verdict(*checks: Check, of_paper: bool = True) -> str:
    arms = {"a": arm_record(90, mode="ENTP"), "b": arm_record(mode="decoder")}
    found = judge(make_record(arms, checks=list(checks), of_paper=of_paper))
    assert isinstance(found, Verdict)
    return found.verdict


def test_verdict_is_that_of_all_checks() -> None:
    holds, fails = check(0.5), check(0.95)
    open_still = check(0.5, left={"mode": "decoder"})
    assert verdict(holds, holds) == "reproduced"
    assert verdict(holds, fails, open_still) == "not reproduced"
    assert verdict(holds, open_still) == "undecided"
    assert judge(make_record({"a": arm_record(1)})) is None


def test_only_claims_of_the_paper_are_reproduced() -> None:
    holds, fails = check(0.5), check(0.95)
    assert verdict(holds, of_paper=False) == "shown"
    assert verdict(holds, fails, of_paper=False) == "not shown"
    for path, record in find_records(RESULTS).items():
        assert record.of_paper == (record.recipe in PAPER), path


def test_tuned_decoders_contradict_that_decoders_do_not_learn_count3() -> None:
    found = complete(read_record(RESULTS / "count3.json")).verdict
    assert found is not None
    outcomes = {one.says: one.outcome for one in found.checks}
    assert outcomes["decoders do not learn Count3 with tuned training"] == "fails"
    assert outcomes["ENTP learns Count3 after a curriculum"] == "holds"
    assert outcomes["ENTP learns Count3 with the paper's training"] == "undecided"
    assert found.verdict == "not reproduced"


def test_match3_is_reproduced() -> None:
    found = complete(read_record(RESULTS / "match3.json")).verdict
    assert found is not None
    assert found.verdict == "reproduced"


def test_check_may_be_about_a_bin_and_another_source() -> None:
    entp = [sourced_run(test={"11": 90, "12": 10}, last={"11": 80, "12": 20})]
    arms = {
        "a": arm_record(runs=entp, mode="ENTP"),
        "b": arm_record(runs=[sourced_run(test={"11": 50, "12": 60})], mode="decoder"),
    }
    record = make_record(arms, metrics=DIGITS)

    def found(right: Any, **more: Any) -> tuple[str, list[str]]:
        one = check_record(record, check(right, "above", **more))
        return one.outcome, one.why

    decoder = {"mode": "decoder"}
    told = "a, digits 11: 0.9 is above 0.5 of b"
    assert found(decoder, by="digits", bin="11") == ("holds", [told])
    assert found(decoder, by="digits", bin="12")[0] == "fails"
    assert found(0.5, source="last") == ("holds", ["a, last checkpoint: 0.8 is above 0.5"])
    told = "a, digits 12, last checkpoint: 0.2 is not above 0.3"
    assert found(0.3, source="last", by="digits", bin="12") == ("fails", [told])
    told = "b, last checkpoint: not tested by exact_match"
    assert found(decoder, source="last") == ("undecided", [told])
    told = "a, best evaluation on the test itself: not tested by exact_match"
    assert found(0.3, source="best") == ("undecided", [told])
    assert found(0.3, by="digits", bin="13")[0] == "undecided"


@pytest.mark.parametrize("half", [{"by": "digits"}, {"bin": "11"}])
def test_check_of_a_slice_names_its_bin(half: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="give both, or neither"):
        check(0.5, **half)


@pytest.mark.parametrize(
    ("control", "other", "verdict"),
    [
        (90, 0, "reproduced"),
        (90, 80, "not reproduced"),
        (10, 0, "undecided"),
        (10, 80, "undecided"),
        (None, 0, "undecided"),
        (None, 80, "undecided"),
    ],
)
def test_control_that_does_not_hold_leaves_the_verdict_open(
    control: int | None, other: int, verdict: str
) -> None:
    first = arm_record(*([] if control is None else [control]), task="Count2")
    arms = {"control": first, "other": arm_record(other, task="Count3")}
    checks = [
        check(0.5, left={"task": "Count2"}, control=True),
        check(0.1, "at most", left={"task": "Count3"}),
    ]
    found = judge(make_record(arms, checks=checks))
    assert found is not None
    assert found.verdict == verdict
    assert [one.outcome for one in found.checks] == [
        "undecided" if control is None else "holds" if control > 50 else "fails",
        "holds" if other < 10 else "fails",
    ]


def curve_record(seed: int, *values: float) -> Any:
    """A run that was evaluated every 5 steps, of 2 seconds each, with these exact matches."""
    points = [
        Point(step=5 * n, seconds=10.0 * n, sequences=40 * n, values={"exact_match": value})
        for n, value in enumerate(values, 1)
    ]
    return run_record(seed, curve=points)


def reach_arms(*left: float, right: tuple[float, ...] = (0.1, 0.5, 0.95)) -> dict[str, ArmRecord]:
    return {
        "a": arm_record(runs=[curve_record(0, *left)], mode="ENTP"),
        "b": arm_record(runs=[curve_record(0, *right)], mode="decoder"),
    }


@pytest.mark.parametrize(
    ("left", "expected", "why"),
    [
        ((0.2, 0.9, 0.8), "holds", "a, steps to exact_match 0.9: 10 is below 15 of b"),
        ((0.2, 0.3, 0.9), "fails", "a, steps to exact_match 0.9: 15 is not below 15 of b"),
        ((0.2, 0.3, 0.4), "fails", "a, steps to exact_match 0.9: inf is not below 15 of b"),
    ],
)
def test_training_up_to_a_value_is_compared(
    left: tuple[float, ...], expected: str, why: str
) -> None:
    one = check({"mode": "decoder"}, "below", reach=0.9)
    assert outcome(reach_arms(*left), one) == (expected, [why])


def test_training_up_to_a_value_that_nobody_reached_is_undecided() -> None:
    one = check({"mode": "decoder"}, "below", reach=0.98, axis="seconds")
    found, why = outcome(reach_arms(0.2, 0.9), one)
    assert found == "undecided"
    assert why == ["a, seconds to exact_match 0.98: never, and neither did b"]
    seconds = check(25.0, "below", reach=0.9, axis="seconds")
    assert outcome(reach_arms(0.2, 0.9), seconds)[0] == "holds"


def test_training_that_a_seed_never_reached_has_no_p() -> None:
    """Where the means already say that it is not so, no p is needed."""
    reached, half = [(0.1, 0.95), (0.95, 0.96)], [(0.1, 0.2), (0.2, 0.95)]

    def arm(curves: list[tuple[float, ...]], mode: str) -> ArmRecord:
        return arm_record(runs=[curve_record(n, *one) for n, one in enumerate(curves)], mode=mode)

    decoder: dict[str, Any] = {"mode": "decoder"}
    arms = {"a": arm(reached, "ENTP"), "b": arm(half, "decoder")}
    one = check(decoder, "below", reach=0.9, p=0.05)
    found, (why,) = outcome(arms, one)
    assert found == "undecided"
    assert why.endswith("7.5 is below inf of b, but a seed never reached it: no p")
    other = {"a": arm(half, "ENTP"), "b": arm(reached, "decoder")}
    assert outcome(other, one)[0] == "fails"
    assert outcome(other, check(20.0, "below", reach=0.9, p=0.05))[0] == "fails"
    assert outcome(other, check(20.0, "above", reach=0.9, p=0.05))[0] == "undecided"
    both = {"a": arm(half, "ENTP"), "b": arm(half, "decoder")}
    told = "a, steps to exact_match 0.9: not by every seed, and neither by every one of b"
    assert outcome(both, one) == ("undecided", [told])


def test_best_arm_is_the_one_that_needed_least_training() -> None:
    arms = {
        "slow": arm_record(runs=[curve_record(0, 0.1, 0.2, 0.3, 0.9)], mode="ENTP", layers=4),
        "fast": arm_record(runs=[curve_record(0, 0.1, 0.9)], mode="ENTP", layers=8),
        "b": arm_record(runs=[curve_record(0, 0.1, 0.2, 0.9)], mode="decoder"),
    }
    found, why = outcome(arms, check({"mode": "decoder"}, "below", reach=0.9, best_of=True))
    assert found == "holds"
    assert why == ["fast, steps to exact_match 0.9: 10 is below 15 of b"]
