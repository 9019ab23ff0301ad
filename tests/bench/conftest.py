"""Benchmarks without a process for every measured memory: test_measure.py has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from entp.bench import generate, scaling, step

MEMORY = 3 * 2**20


def prepared(
    make: Callable[..., Any], args: tuple[Any, ...], device: torch.device, warmup: int
) -> tuple[Any, int]:
    """What `entp.bench.measure.prepare` returns, with a memory that was not measured."""
    return make(*args, device), MEMORY


@contextmanager
def _in_one_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (generate, scaling, step):
            patch.setattr(module, "prepare", prepared)
        yield


@pytest.fixture(scope="session")
def in_one_process() -> Callable[[], AbstractContextManager[None]]:
    """A context in which benchmarks measure no memory."""
    return _in_one_process
