"""Kernels are compiled for an H200 on a machine without one, and fit its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED = 232_448
"""Bytes that a program may use on compute capability 9.0."""


def compiled(*words: str) -> dict[str, int]:
    """Bytes of shared memory by kernel, from a process that does not interpret kernels."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (line.split(" ", 1) for line in done.stdout.splitlines())
    return {name: int(size) for size, name in lines}


def test_types_and_shapes_of_kernels_fit() -> None:
    assert len(compiled("all", "front-end")) > 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", ["attention", "attention of 128 keys", "queries", "one query", "rows"]
)
def test_kernels_compile_and_fit(group: str) -> None:
    """At the largest sizes that `choose` lets through, or those of the paper's models."""
    found = compiled(group)
    assert len(found) >= 2
    assert all(0 <= size <= SHARED for size in found.values()), found
