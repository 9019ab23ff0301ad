"""Scores of generated texts: well-formed, exact match, token accuracy, the last by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from entp.errors import InputError
from entp.llm.prompts import Counting, parse_answer
from entp.tasks.base import IGNORE, Batch
from entp.tasks.metrics import (
    EXACT_MATCH,
    TOKEN_ACCURACY,
    Metric,
    Predicted,
    Score,
    Totals,
    token_accuracy,
)

WELL_FORMED = Metric("well_formed", unit="sequence", bounds=(0.0, 1.0))
"""Answers that are one list of the right number of integers, and nothing else."""
METRICS = (WELL_FORMED, EXACT_MATCH, TOKEN_ACCURACY)
MISSING = -1
"""Stands for an integer that is not there; no target is negative."""


def score_texts(task: Counting, sequences: np.ndarray, texts: Sequence[str]) -> Totals:
    """The totals of generated texts, one for each row of sequences (n, length).

    Token accuracy is that of the integers made by the rule, missing ones being wrong. An exact
    match is well-formed and repeats the seed as well.
    """
    if len(texts) != len(sequences) or not len(texts):
        raise InputError(
            f"there are {len(texts)} texts for {len(sequences)} sequences: each needs one."
        )
    answers = [parse_answer(text, task.length) for text in texts]
    formed = np.array([answer.well_formed for answer in answers])
    grid = np.array([padded(answer.integers, task.length) for answer in answers])
    batch = batch_of(task, sequences)
    got = Predicted(grid[:, 1:][batch.target_mask], None)
    ones = np.ones(len(texts))
    scores: dict[str, Score | None] = {
        "well_formed": Score(formed, ones),
        "exact_match": Score(formed & (grid == sequences).all(axis=1), ones),
        "token_accuracy": token_accuracy(batch, got),
    }
    return Totals.of(METRICS, batch, scores)


def batch_of(task: Counting, sequences: np.ndarray) -> Batch:
    """Whole sequences (n, length) as a batch of the task."""
    y = sequences[:, 1:].copy()
    y[:, : task.prompt_length - 1] = IGNORE
    return Batch(sequences[:, :-1], y)


def summary(totals: Totals) -> dict[str, Any]:
    """Values with their 95 % intervals, for results.json; positions count the integers read."""
    by_position = {
        key: {"value": value, "interval": totals.sliced_interval("token_accuracy", "length", key)}
        for key, value in totals.sliced("token_accuracy", "length").items()
    }
    values = {
        metric.name: {"value": totals.value(metric.name), "interval": totals.interval(metric.name)}
        for metric in METRICS
    }
    return {
        "n": totals.sequences,
        **values,
        "token_accuracy_by_position": by_position,
        "totals": totals.to_json(),
    }


def padded(integers: list[int], length: int) -> list[int]:
    """So many integers: the first ones, or all and MISSING."""
    return (integers + [MISSING] * length)[:length]
