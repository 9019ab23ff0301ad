"""A process's first large `exp`: with `warm_math` before it, its bits are those of the second.

`python tests/engine/test_cold_start.py 2000` counts 2,000 starts of each function, with and
without `warm_math`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from entp.engine.cold_start import warm_math

FUNCTIONS = ["exp", "log", "sqrt", "tanh", "sin", "cos", "erf", "log1p", "expm1", "logsumexp"]
THREADS, NUMBERS = 2, 5200
"""torch gives each thread at least 2,048 numbers."""


def differs(function: str, x: torch.Tensor, kind: str) -> bool:
    """Whether this process's first large call of the function differs from its second."""
    torch.set_num_threads(THREADS)
    if kind == "warm":
        warm_math()
    first, second = (
        x.logsumexp(0) if function == "logsumexp" else getattr(x, function)() for _ in range(2)
    )
    return not torch.equal(first, second)


def forked_starts(starts: int, cases: list[str]) -> list[int]:
    """In how many forks of this process the first call differs, for each case ("exp float64 warm").

    This process must not have used the library itself.
    """
    counts = [0] * len(cases)
    for _ in range(starts):
        for i, case in enumerate(cases):
            function, dtype, kind = case.split()
            # Too few to start threads here.
            x = torch.arange(1, NUMBERS + 1, dtype=getattr(torch, dtype)) / (NUMBERS + 1)
            child = os.fork()
            if not child:
                status = 2
                try:
                    status = int(differs(function, x, kind))
                finally:
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status not in (0, 1):
                raise RuntimeError(f"a start of {case} ended with status {status}")
            counts[i] += status
    return counts


def count_starts(starts: int, cases: list[str]) -> list[int]:
    """The same in forks of a new process: this one may have used the library, and have threads."""
    command = [sys.executable, __file__, str(starts), *cases]
    limit = 60 + starts * len(cases)
    out = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=limit
    ).stdout
    return [int(count) for count in out.split()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_warm_start_computes_the_same_bits_at_once() -> None:
    """Without `warm_math`, up to 10 of 100 starts differ with MKL 2024.2, fewer on busy cores."""
    assert count_starts(
        40, ["exp float64 warm", "sqrt float64 warm", "logsumexp float64 warm"]
    ) == [0, 0, 0]


def test_warm_math_calls_exp_once_with_too_few_numbers_for_threads() -> None:
    warm_math.cache_clear()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        warm_math()
        warm_math()
    assert [
        event.input_shapes[0] for event in profile.function_events if event.name == "aten::exp"
    ] == [[8]]


def main(starts: int) -> None:
    """Print in how many starts each function's first call differs, with and without `warm_math`."""
    print(f"{'function':<12}{'type':<10}{'starts':>8}{'cold':>8}{'warm':>8}")
    for function, dtype in [*((name, "float64") for name in FUNCTIONS), ("exp", "float32")]:
        cold, warm = count_starts(starts, [f"{function} {dtype} cold", f"{function} {dtype} warm"])
        print(f"{function:<12}{dtype:<10}{starts:>8}{cold:>8}{warm:>8}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(int(sys.argv[1]))
    else:
        print(*forked_starts(int(sys.argv[1]), sys.argv[2:]))
