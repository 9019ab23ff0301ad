"""Bootstrap intervals of metrics over test sequences.

A resample draws as many sequences as there are, with replacement, and has a mean of each metric;
the interval reaches from a percentile of these means to another. Garg et al. show the 5th to the
95th over 1,280 prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from entp.results.schema import Bootstrap, Ends
from entp.tasks.base import Batch
from entp.tasks.metrics import Metric, Score

LEVEL, RESAMPLES = 0.9, 1000


class Scored(NamedTuple):
    """What was measured of a batch."""

    batch: Batch
    scores: Mapping[str, Score | None]


def bootstrap(
    metrics: Sequence[Metric],
    scored: Iterable[Scored],
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Bootstrap:
    """Intervals of each metric, and of each of its bins, over the sequences of these batches.

    All of them are of the same resamples, which are the same every time.
    """
    batches = list(scored)
    counts = _counts(sum(len(one.batch.x) for one in batches), resamples)
    found = Bootstrap(level=level, resamples=resamples, all={})
    for metric in metrics:
        rows = _rows(metric, batches)
        if not len(rows.sequence):
            continue
        ends = _ends(rows, counts, level)
        if ends is not None:
            found.all[metric.name] = _shown(metric, ends)
        for by, keys in rows.slices.items():
            bins = {
                str(key): _ends(rows.where(keys == key), counts, level) for key in np.unique(keys)
            }
            shown = {key: _shown(metric, ends) for key, ends in bins.items() if ends is not None}
            found.slices.setdefault(metric.name, {})[by] = shown
    return found


def _counts(sequences: int, resamples: int) -> np.ndarray:
    """(resamples, sequences): how often each resample has each sequence."""
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(sequences, np.full(sequences, 1 / sequences), size=resamples)
    return drawn.astype(float)


class _Rows(NamedTuple):
    """The rows of a metric in all batches that count."""

    sequence: np.ndarray
    """Its number over all batches."""
    value: np.ndarray
    weight: np.ndarray
    slices: dict[str, np.ndarray]

    def where(self, kept: np.ndarray) -> _Rows:
        return _Rows(self.sequence[kept], self.value[kept], self.weight[kept], {})


def _rows(metric: Metric, batches: Sequence[Scored]) -> _Rows:
    parts: list[_Rows] = []
    before = 0
    for batch, scores in batches:
        score = scores.get(metric.name)
        if score is not None:
            rows = np.arange(len(batch.x)) if metric.unit == "sequence" else batch.row
            weight = np.asarray(score.weight, dtype=float)
            kept = (weight != 0) | (metric.unit == "byte")  # as Totals has it
            parts.append(
                _Rows(
                    rows[kept] + before,
                    np.asarray(score.value, dtype=float)[kept],
                    weight[kept],
                    {by: np.asarray(keys)[kept] for by, keys in score.slices.items()},
                )
            )
        before += len(batch.x)
    names = [by for by in metric.slices if parts and all(by in part.slices for part in parts)]
    empty = [np.zeros(0, int)]
    return _Rows(
        np.concatenate([part.sequence for part in parts] or empty),
        np.concatenate([part.value for part in parts] or empty),
        np.concatenate([part.weight for part in parts] or empty),
        {by: np.concatenate([part.slices[by] for part in parts]) for by in names},
    )


def _ends(rows: _Rows, counts: np.ndarray, level: float) -> tuple[float, float] | None:
    """The ends for these rows; None where fewer than two sequences have one."""
    if len(np.unique(rows.sequence)) < 2:
        return None
    sequences = counts.shape[1]
    value = counts @ np.bincount(rows.sequence, rows.value, sequences)
    weight = counts @ np.bincount(rows.sequence, rows.weight, sequences)
    some = weight > 0
    if not some.any():
        return None
    low, high = np.quantile(value[some] / weight[some], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _shown(metric: Metric, ends: tuple[float, float]) -> Ends:
    return [metric.shown(end) for end in ends]
