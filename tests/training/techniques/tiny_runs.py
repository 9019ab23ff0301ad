"""Runs whose steps take a few milliseconds."""

from __future__ import annotations

from typing import Any

from small_runs import small_run

from entp.config import Run, model_for
from entp.tasks.counting import Count3

TINY = Count3(prompt_length=2, length=6, num_values=6)
"""With four targets in each sequence."""


def tiny_run(**changes: Any) -> Run:
    """Count3 of 6 integers, two layers of width 8, 10 steps of 8 sequences, saved every 5.

    Two layers, because one layer of ENTP is one of a decoder.
    """
    model = model_for(TINY, "small", layers=2, heads=2, width=8)
    return small_run(**{"task": TINY, "model": model, **changes})
