"""Runs that several processes share: `python shared_runs.py FOLDER SEEDS STEPS JOBS`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from small_records import small_recipe

from entp.experiments.recipe import Arm, Recipe
from entp.experiments.reproduce import reproduce


def recipe_of(seeds: int, steps: int) -> Recipe:
    """Several seeds of a decoder."""
    run = replace(small_recipe().arms[1].run, steps=steps)
    arms = [Arm(run, tuple(range(seeds)), mode="decoder")]
    return small_recipe(arms=arms, generated_sequences=0, test_sequences=16, not_run={})


if __name__ == "__main__":
    seeds, steps, jobs = map(int, sys.argv[2:])
    found = reproduce(recipe_of(seeds, steps), Path(sys.argv[1]), device="cpu", jobs=jobs)
    sys.exit(found.stopped_by or 0)
