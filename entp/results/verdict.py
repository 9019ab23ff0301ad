"""Whether the recorded runs bear a recipe's rule out: each check holds, fails or is undecided.

A check is about test values, or about how long validation took to reach one; means over seeds. It
is undecided while an arm that it names is not finished and tested, or has too few seeds for the p
that it asks for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from entp.results.schema import (
    ArmRecord,
    Check,
    CheckResult,
    Factor,
    Record,
    Selector,
    Verdict,
)
from entp.results.summary import source_words, status, until, values_of
from entp.stats import t_test, welch_test

Outcome = Literal["holds", "fails", "undecided"]
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "above": operator.gt,
    "below": operator.lt,
    "at least": operator.ge,
    "at most": operator.le,
}


class Finding(NamedTuple):
    """What one comparison says, and why."""

    outcome: Outcome
    why: str


def judge(record: Record) -> Verdict | None:
    """The verdict on a record; None where it has no rule."""
    if not record.checks:
        return None
    results = [check_record(record, check) for check in record.checks]
    outcomes = {result.outcome for result in results}
    pairs = zip(record.checks, results, strict=True)
    if any(check.control and result.outcome != "holds" for check, result in pairs):
        return Verdict(verdict="undecided", checks=results)
    if "fails" in outcomes:
        return Verdict(verdict="not reproduced" if record.of_paper else "not shown", checks=results)
    if "undecided" in outcomes:
        return Verdict(verdict="undecided", checks=results)
    return Verdict(verdict="reproduced" if record.of_paper else "shown", checks=results)


def check_record(record: Record, check: Check) -> CheckResult:
    """Whether a check holds, with a reason for every comparison that it makes."""
    findings = _findings(record, check)
    outcomes: list[Outcome] = [finding.outcome for finding in findings]
    outcome: Outcome = "holds"
    if "fails" in outcomes:
        outcome = "fails"
    elif "undecided" in outcomes or not outcomes:
        outcome = "undecided"
    why = [finding.why for finding in findings] or ["no arms to compare"]
    return CheckResult(says=check.says, outcome=outcome, why=why)


def _findings(record: Record, check: Check) -> list[Finding]:
    left = select(record.arms, check.left)
    if not isinstance(check.right, Mapping):
        return [_against_number(record, check, label, check.right) for label in left]
    right = select(record.arms, check.right)
    if check.best_of:
        return [_best_against_best(record, check, left, right)]
    return [
        _against_arm(record, check, label, other)
        for label in left
        for other in right
        if label != other and _agree(record.arms[label], record.arms[other], check.same)
    ]


def select(arms: dict[str, ArmRecord], selector: Selector) -> list[str]:
    """Labels of the arms that have these factors."""
    return [label for label, arm in arms.items() if matches(arm.factors, selector)]


def matches(factors: Mapping[str, Factor], selector: Selector) -> bool:
    """Whether an arm has these factors."""
    for name, wanted in selector.items():
        allowed = [wanted] if isinstance(wanted, str | int | float) else wanted
        if name not in factors or factors[name] not in allowed:
            return False
    return True


def _agree(one: ArmRecord, other: ArmRecord, same: Sequence[str]) -> bool:
    return all(one.factors.get(name) == other.factors.get(name) for name in same)


def _against_number(record: Record, check: Check, label: str, number: float) -> Finding:
    missing = _missing(record, check, label)
    if missing:
        return Finding("undecided", missing)
    values = _values(record, check, label)
    right = check.times * number
    p = t_test(values, right) if check.p is not None and _all_finite(values) else None
    return _finding(check, label, values, right, f"{_times(check)}{number:g}", p)


def _best_against_best(record: Record, check: Check, left: list[str], right: list[str]) -> Finding:
    """The arms with the best mean on each side."""
    missing = [told for one in (*left, *right) if (told := _missing(record, check, one))]
    if missing:
        return Finding("undecided", "; ".join(missing))
    more = check.reach is None and record.metric(check.metric).better == "higher"
    choose = max if more else min  # of training up to a value, the least is the best

    def mean(label: str) -> float:
        values = _values(record, check, label)
        return sum(values) / len(values)

    return _against_arm(record, check, choose(left, key=mean), choose(right, key=mean))


def _against_arm(record: Record, check: Check, label: str, other: str) -> Finding:
    missing = [told for one in (label, other) if (told := _missing(record, check, one))]
    if missing:
        return Finding("undecided", "; ".join(missing))
    values, others = (_values(record, check, one) for one in (label, other))
    mean = sum(others) / len(others)
    if check.reach is not None and math.isinf(mean) and math.isinf(sum(values)):
        told = "not by every seed, and neither by every one of"
        if not any(math.isfinite(value) for value in (*values, *others)):
            told = "never, and neither did"
        return Finding("undecided", f"{_about(check, label)}: {told} {other}")
    right = [check.times * value for value in others]
    if check.paired and _seeds(record, label) != _seeds(record, other):
        return Finding("undecided", f"{label} and {other} have other seeds: no pairs")
    p = _p(check, values, right) if check.p is not None else None
    told = f"{_times(check)}{mean:.4g} of {other}"
    return _finding(check, label, values, check.times * mean, told, p)


def _seeds(record: Record, label: str) -> list[int]:
    return [run.seed for run in record.arms[label].runs]


def _p(check: Check, values: list[float], right: list[float]) -> float | None:
    """None where a seed never reached what the check is about."""
    if not _all_finite([*values, *right]):
        return None
    if check.paired:
        return t_test([a - b for a, b in zip(values, right, strict=True)], 0.0)
    return welch_test(values, right)


def _all_finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _times(check: Check) -> str:
    return "" if check.times == 1 else f"{check.times:g} times "


def _values(record: Record, check: Check, label: str) -> list[float]:
    """What a check is about, of each seed of an arm."""
    arm = record.arms[label]
    if check.reach is not None:
        metric = record.metric(check.metric)
        return [until(run, metric, check.reach, check.axis) for run in arm.runs]
    return values_of(record, arm, check.metric, check.source, check.by, check.bin)


def _about(check: Check, label: str) -> str:
    """The arm, and the bin and source where a check is about one: "ENTP, digits 12, last
    checkpoint"."""
    parts = [label]
    if check.by:
        parts.append(f"{check.by} {check.bin}")
    if check.reach is not None:
        parts.append(f"{check.axis} to {check.metric} {check.reach:g}")
    elif check.source != "test":
        parts.append(source_words(check.source))
    return ", ".join(parts)


def _missing(record: Record, check: Check, label: str) -> str:
    """What is not there yet to decide a check; empty if everything is."""
    arm = record.arms[label]
    now = status(arm)
    if now != "done":
        return f"{label}: {now}"
    values = _values(record, check, label)
    if len(values) < len(arm.runs):
        return f"{_about(check, label)}: not tested by {check.metric}"
    if check.p is not None and len(values) < 2:
        return f"{label}: one seed says nothing about p"
    return ""


def _finding(
    check: Check, label: str, values: list[float], right: float, told: str, p: float | None
) -> Finding:
    mean = sum(values) / len(values)
    true = RELATIONS[check.relation](mean, right)
    why = f"{_about(check, label)}: {mean:.4g} is {'' if true else 'not '}{check.relation} {told}"
    if check.p is not None and p is not None:
        why += f", p = {p:.2g}"
        true = true and p < check.p
    elif check.p is not None and true:
        return Finding("undecided", f"{why}, but a seed never reached it: no p")
    return Finding("holds" if true else "fails", why)
