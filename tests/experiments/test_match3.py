"""What docs/LOG.md says of the recorded runs of Match3': two tables of the first integer are all
that was learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from entp.config.json import run_from_json
from entp.results.store import read_record
from entp.tasks.counting import Match3

RECORDED = Path(__file__).parents[2] / "results" / "match3.json"
LABELS = ("decoder medium, integers below 128", "ENTP medium, integers below 128")


def by_two_tables(task: Match3, sequences: int) -> tuple[float, float, float]:
    """Loss, tokens and sequences right of one who sees x_1 + x_1 + x_j = 0 and x_1 + x_i + x_i = 0,
    and guesses by length."""
    batch = task.batch(0, "test", 0, sequences)
    seen = ((2 * batch.x[:, :1] + batch.x) % task.modulus == 0) | (
        (batch.x[:, :1] + 2 * batch.x) % task.modulus == 0
    )
    seen = np.logical_or.accumulate(seen, axis=1)
    share = np.where(seen, 0.0, batch.y).sum(0) / np.maximum(
        1, (~seen).sum(0)
    )  # how often it is 1 all the same
    chance = np.where(seen, 1.0, share[None])
    loss = -np.log(np.maximum(np.where(batch.y == 1, chance, 1 - chance), 1e-12)).mean()
    right = (chance > 0.5) == batch.y
    return float(loss), float(right.mean()), float(right.all(1).mean())


@pytest.mark.parametrize("label", LABELS)
def test_with_integers_below_128_two_tables_are_what_was_learned(label: str) -> None:
    loss, tokens, sequences = by_two_tables(Match3(), 40_000)
    record = read_record(RECORDED)
    (run,) = record.arms[label].runs
    assert run_from_json(run.config).task == Match3()
    assert run.test is not None
    totals = run.test.totals.totals(record.metrics)
    assert totals.value("loss") == pytest.approx(loss, abs=0.003)
    assert totals.value("token_accuracy") == pytest.approx(tokens, abs=0.001)
    low, high = totals.interval("exact_match") or (1, 0)
    assert low < sequences < high


def test_with_integers_below_64_two_tables_are_far_from_all_of_it() -> None:
    """So a run that learns it has learned sums of three."""
    loss, _, sequences = by_two_tables(Match3(num_values=64), 40_000)
    assert loss > 0.2
    assert sequences < 0.3
