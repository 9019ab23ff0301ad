"""Runs for a process that is killed: `python killed_runs.py RECORD JOBS STEPS TEST_SEQUENCES`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from small_records import small_recipe

from entp.experiments import recorder
from entp.experiments.recipe import Arm, Check, Recipe
from entp.experiments.reproduce import Outcome, reproduce

QUICK = (0.05, 0.05)
"""Seconds before the record is first written, and between two writings."""


def two_runs(steps: int, test_sequences: int = 16) -> Recipe:
    """Two seeds of a decoder, and a rule that they follow."""
    run = replace(small_recipe().arms[1].run, steps=steps)
    return small_recipe(
        arms=[Arm(run, (0, 1), mode="decoder")],
        generated_sequences=0,
        test_sequences=test_sequences,
        checks=(Check("it is tested", {"mode": "decoder"}, "loss", "above", 0.0),),
        not_run={},
    )


def carry_out(record: Path, recipe: Recipe, jobs: int = 1) -> Outcome:
    """Beside the record are the run folders."""
    return reproduce(recipe, record.parent / "runs", device="cpu", jobs=jobs, record=record)


if __name__ == "__main__":
    recorder.FIRST, recorder.EVERY = QUICK
    words = [int(word) for word in sys.argv[2:]]
    found = carry_out(Path(sys.argv[1]), two_runs(words[1], words[2]), words[0])
    sys.exit(found.stopped_by or 0)
