"""What a task measures: metrics, the scores of a batch, and totals that add over batches.

    scores = task.measure(batch, Predicted(answer, loss))     # one Score per metric
    totals = Totals.of(task.metrics, batch, scores)           # add them: totals_a + totals_b
    totals.value("exact_match"), totals.interval("exact_match"), totals.sliced("exact_match",
    "digits")

Everything is numpy: workers and `--help` start without torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from entp.errors import InputError
from entp.stats import wilson

if TYPE_CHECKING:
    from entp.tasks.base import Batch


LARGEST = sys.float_info.max
NOT_NEGATIVE = (0.0, math.inf)
"""Bounds of what has no upper one."""


@dataclass(frozen=True)
class Metric:
    """A number that a task measures."""

    name: str
    unit: Literal["sequence", "target", "byte"] = "target"
    """What the denominator counts. sequence: a score has a row per sequence, else per target."""
    better: Literal["higher", "lower"] = "higher"
    show: Literal["mean", "exp", "bits"] = "mean"
    """exp: exp of the mean, for perplexity. bits: the mean over ln 2, for bits per byte."""
    slices: tuple[str, ...] = ()
    """What it is also measured by, such as "length"."""
    bounds: tuple[float, float] | None = field(default=None, compare=False)
    """The least and the most that it can be, as it is shown; intervals end there. Either may be
    infinite. A metric is the same with and without them: older records have fewer."""

    def __post_init__(self) -> None:
        """Records are JSON, which has no infinity: the largest number stands for it."""
        if self.bounds is not None:
            least, most = self.bounds
            object.__setattr__(self, "bounds", (max(least, -LARGEST), min(most, LARGEST)))

    def shown(self, mean: float) -> float:
        """The number that people read."""
        if self.show == "exp":
            return math.exp(min(mean, 700.0))
        return mean / math.log(2) if self.show == "bits" else mean

    def is_better(self, one: float, other: float) -> bool:
        return one > other if self.better == "higher" else one < other

    def reached(self, value: float, goal: float) -> bool:
        return value >= goal if self.better == "higher" else value <= goal


EXACT_MATCH = Metric("exact_match", unit="sequence", bounds=(0.0, 1.0))
"""Sequences whose every answer is right."""
TOKEN_ACCURACY = Metric("token_accuracy", slices=("length",), bounds=(0.0, 1.0))
"""Right answers, also by the number of tokens read."""
LOSS = Metric("loss", better="lower", bounds=NOT_NEGATIVE)
"""Nats per target, or squared error."""
PERPLEXITY = Metric("perplexity", better="lower", show="exp", bounds=(1.0, math.inf))
"""exp of the mean of the nats."""
BITS_PER_BYTE = Metric(
    "bits_per_byte", unit="byte", better="lower", show="bits", bounds=NOT_NEGATIVE
)
"""Nats over ln 2 times the bytes of the targets."""


class Predicted(NamedTuple):
    """Answers with a row per target, in the order of `batch.targets`."""

    answer: np.ndarray
    """The likeliest token, or a real number."""
    loss: np.ndarray | None
    """Nats, or squared error. None for generated answers and baselines that have no loss."""


class Score(NamedTuple):
    """What one metric found in a batch, with a row per sequence or per target."""

    value: np.ndarray
    weight: np.ndarray
    """What the value is divided by: 1, the target's bytes, or 0 for a row that does not count. Per
    byte every row counts: the loss of a target without bytes is a cost of the others."""
    slices: Mapping[str, np.ndarray] = {}
    """By slice, the bin of each row: whole numbers or short texts."""


def right_answers(batch: Batch, got: Predicted) -> np.ndarray:
    """Whether each answer is its target."""
    if np.shape(got.answer) != batch.targets.shape:
        raise InputError(
            f"the answers have shape {np.shape(got.answer)}: it must be {batch.targets.shape}, one "
            "for each target of the batch."
        )
    return got.answer == batch.targets


def exact_match(
    batch: Batch, got: Predicted, slices: Mapping[str, np.ndarray] | None = None
) -> Score:
    """1 for sequences without a wrong answer; one that has no target does not count."""
    wrong = np.bincount(batch.row, ~right_answers(batch, got), len(batch.x))
    some = np.bincount(batch.row, minlength=len(batch.x)) > 0
    return Score((wrong == 0) & some, some, slices or {})


def token_accuracy(
    batch: Batch, got: Predicted, slices: Mapping[str, np.ndarray] | None = None
) -> Score:
    """1 for right answers; by default also by the number of tokens read."""
    right = right_answers(batch, got)
    slices = {"length": batch.position + 1} if slices is None else slices
    return Score(right, np.ones(len(right)), slices)


def mean_loss(got: Predicted, slices: Mapping[str, np.ndarray] | None = None) -> Score | None:
    """The loss of each target; None where answers have none."""
    if got.loss is None:
        return None
    return Score(got.loss, np.ones(len(got.loss)), slices or {})


@dataclass(frozen=True)
class Sums:
    """Sums over sequences of their values v and weights w; squares are None where unknown."""

    n: int = 0
    v: float = 0.0
    w: float = 0.0
    vv: float | None = 0.0
    vw: float | None = 0.0
    ww: float | None = 0.0

    def __add__(self, other: Sums) -> Sums:
        squares = [
            None if a is None or b is None else a + b
            for a, b in ((self.vv, other.vv), (self.vw, other.vw), (self.ww, other.ww))
        ]
        return Sums(self.n + other.n, self.v + other.v, self.w + other.w, *squares)

    @property
    def mean(self) -> float:
        return self.v / self.w if self.w else math.nan

    def standard_error(self) -> float | None:
        """Of the mean, sequences being drawn anew: that of a ratio of totals. None if unknown."""
        if self.vv is None or self.vw is None or self.ww is None or self.n < 2 or not self.w:
            return None
        mean = self.mean
        squares = max(0.0, self.vv - 2 * mean * self.vw + mean**2 * self.ww)
        return math.sqrt(squares * self.n / (self.n - 1)) / self.w

    def counts(self) -> bool:
        """Whether every sequence has weight 1 and value 0 or 1."""
        return self.vv == self.v and self.ww == self.w == self.n

    def interval(
        self, z: float = 1.96, bounds: tuple[float, float] | None = None
    ) -> tuple[float, float] | None:
        """95 % of the mean, other sequences of the same kind being drawn; Wilson's for counts, and
        where all answers of all sequences are right, or wrong: no standard error would be sure."""
        if self.n and (self.counts() or self._is_extreme(bounds)):
            return wilson(round(self.mean * self.n), self.n, z)
        error = self.standard_error()
        return None if error is None else (self.mean - z * error, self.mean + z * error)

    def _is_extreme(self, bounds: tuple[float, float] | None) -> bool:
        """Whether a share is 0 or 1, its squares being known."""
        return bounds == (0.0, 1.0) and self.vv is not None and self.mean in bounds

    def to_json(self) -> list[Any]:
        return [self.n, self.v, self.w, self.vv, self.vw, self.ww]


def _sums(sequence: np.ndarray, value: np.ndarray, weight: np.ndarray, kept: np.ndarray) -> Sums:
    """The sums of the rows that are kept, which belong to these sequences."""
    mine = sequence[kept]
    seen = np.bincount(mine) > 0
    v = np.bincount(mine, value[kept].astype(float))[seen]
    w = np.bincount(mine, weight[kept].astype(float))[seen]
    return Sums(len(v), *(float(x) for x in (v.sum(), w.sum(), v @ v, v @ w, w @ w)))


@dataclass
class Totals:
    """What an evaluation found: for every metric, sums over all sequences and over each slice."""

    metrics: tuple[Metric, ...]
    all: dict[str, Sums] = field(default_factory=dict)
    slices: dict[str, dict[str, dict[str, Sums]]] = field(default_factory=dict)
    """Metric to slice to bin."""
    sequences: int = 0

    @classmethod
    def of(
        cls, metrics: tuple[Metric, ...], batch: Batch, scores: Mapping[str, Score | None]
    ) -> Totals:
        """The totals of one batch."""
        found = cls(metrics, sequences=int((np.bincount(batch.row) > 0).sum()))
        for metric in metrics:
            score = scores.get(metric.name)
            if score is None:
                continue
            rows = np.arange(len(batch.x)) if metric.unit == "sequence" else batch.row
            value, weight = np.asarray(score.value), np.asarray(score.weight)
            _check_rows(metric, len(rows), value, weight, score.slices)
            kept = (weight != 0) | (metric.unit == "byte")
            found.all[metric.name] = _sums(rows, value, weight, kept)
            for name in metric.slices:
                if name in score.slices:
                    bins = _bins(np.asarray(score.slices[name]), rows, value, weight, kept)
                    found.slices.setdefault(metric.name, {})[name] = bins
        return found

    def __add__(self, other: Totals) -> Totals:
        both = Totals(self.metrics, dict(self.all), sequences=self.sequences + other.sequences)
        for name, sums in other.all.items():
            both.all[name] = both.all.get(name, Sums()) + sums
        for metric, by in self.slices.items():
            both.slices[metric] = {name: dict(bins) for name, bins in by.items()}
        for metric, by in other.slices.items():
            for name, bins in by.items():
                mine = both.slices.setdefault(metric, {}).setdefault(name, {})
                for key, sums in bins.items():
                    mine[key] = mine[key] + sums if key in mine else sums
        return both

    def metric(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)

    def value(self, name: str) -> float:
        """The number that people read of a metric."""
        return self.metric(name).shown(self.all[name].mean)

    def values(self) -> dict[str, float]:
        """All of them, in the task's order, and n, the number of sequences."""
        found = {m.name: self.value(m.name) for m in self.metrics if m.name in self.all}
        return {**found, "n": self.sequences}

    def interval(self, name: str) -> tuple[float, float] | None:
        """95 % of a metric, other sequences being drawn."""
        return self._shown(name, self.all[name])

    def sliced(self, name: str, by: str) -> dict[str, float]:
        """A metric in each bin of a slice, in order."""
        bins = self.slices.get(name, {}).get(by, {})
        return {key: self.metric(name).shown(bins[key].mean) for key in sorted(bins, key=_in_order)}

    def sliced_interval(self, name: str, by: str, key: str) -> tuple[float, float] | None:
        return self._shown(name, self.slices[name][by][key])

    def _shown(self, name: str, sums: Sums) -> tuple[float, float] | None:
        metric = self.metric(name)
        interval = sums.interval(bounds=metric.bounds)
        if interval is None:
            return None
        low, high = (metric.shown(end) for end in interval)
        least, most = metric.bounds or (low, high)
        return max(low, least), min(high, most)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives the totals back."""
        slices = {
            metric: {
                name: {key: bins[key].to_json() for key in sorted(bins, key=_in_order)}
                for name, bins in by.items()
            }
            for metric, by in self.slices.items()
        }
        sums = {name: found.to_json() for name, found in self.all.items()}
        return {"sequences": self.sequences, "all": sums, "slices": slices}

    @classmethod
    def from_json(cls, metrics: Iterable[Metric], data: Mapping[str, Any]) -> Totals:
        slices = {
            metric: {
                name: {key: Sums(*sums) for key, sums in bins.items()} for name, bins in by.items()
            }
            for metric, by in data["slices"].items()
        }
        sums = {name: Sums(*found) for name, found in data["all"].items()}
        return cls(tuple(metrics), sums, slices, data["sequences"])


def _bins(
    keys: np.ndarray, rows: np.ndarray, value: np.ndarray, weight: np.ndarray, kept: np.ndarray
) -> dict[str, Sums]:
    """The sums of each bin that has a row which is kept."""
    names, number = _numbered(keys[kept])
    if not len(names):
        return {}
    most = int(rows.max()) + 1
    pairs, place = _numbered(number * most + rows[kept])  # each sequence in each bin
    v = np.bincount(place, value[kept].astype(float))
    w = np.bincount(place, weight[kept].astype(float))
    bins = pairs // most
    sums = [np.bincount(bins, x).tolist() for x in (v, w, v * v, v * w, w * w)]
    found = zip(names, np.bincount(bins).tolist(), *sums, strict=True)
    return {str(name): Sums(*numbers) for name, *numbers in found}


def _numbered(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different keys in order, and the number of each one; small whole numbers are not
    sorted."""
    small = keys.dtype.kind in "iu" and len(keys) and keys.min() >= 0
    if not small or keys.max() > 4 * len(keys):
        return np.unique(keys, return_inverse=True)
    seen = np.bincount(keys) > 0
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[keys]


def _in_order(key: str) -> tuple[float, str]:
    """Numbers by size, then texts."""
    try:
        return float(key), ""
    except ValueError:
        return math.inf, key


def _check_rows(
    metric: Metric,
    rows: int,
    value: np.ndarray,
    weight: np.ndarray,
    slices: Mapping[str, np.ndarray],
) -> None:
    """A score must have a row for each sequence or target."""
    shapes = {"value": value.shape, "weight": weight.shape}
    shapes |= {f"slice {name}": np.shape(bins) for name, bins in slices.items()}
    for what, shape in shapes.items():
        if shape != (rows,):
            unit = "sequence" if metric.unit == "sequence" else "target"
            raise InputError(
                f"the score of metric {metric.name!r} has a {what} of shape {shape}: it must be "
                f"({rows},), one for each {unit} of the batch."
            )
