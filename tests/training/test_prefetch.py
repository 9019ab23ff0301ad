"""Batches made ahead are the task's own, whoever makes them, and whatever happens to its maker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from entp.tasks.base import Batch, Split
from entp.tasks.counting import Count3
from entp.training import prefetch
from entp.training.prefetch import CHUNK, Worker, batches_ahead, processes_for

TASK = Count3(prompt_length=4, length=10, num_values=10)


@dataclass(frozen=True)
class Slow(Count3):
    """Count3 whose batches take their time, until one of them fails."""

    fails_at: int = 10**9

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        time.sleep(3e-3)
        if step >= self.fails_at:
            raise ValueError(f"no batch {step}")
        return super().batch(seed, split, step, size)


def same(batch: Batch, step: int) -> bool:
    wanted = TASK.batch(5, "train", step, 6)
    return np.array_equal(batch.x, wanted.x) and np.array_equal(batch.y, wanted.y)


RANGES = {
    "none": range(0),
    "one": range(7, 8),
    "a chunk": range(2, 2 + CHUNK),
    "many": range(3, 3 + 11 * CHUNK + 5),
}


@pytest.mark.parametrize(
    ("steps", "processes"),
    [*((name, 0) for name in RANGES), ("none", 1), ("one", 1), ("many", 3)],
)
def test_batches_ahead_are_the_tasks_in_order(steps: str, processes: int) -> None:
    found = list(batches_ahead(TASK, 5, 6, RANGES[steps], processes))
    assert len(found) == len(RANGES[steps])
    assert all(same(batch, step) for batch, step in zip(found, RANGES[steps], strict=True))


def test_dead_process_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Worker] = []

    class Seen(Worker):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            started.append(self)

    monkeypatch.setattr(prefetch, "Worker", Seen)
    steps = range(12 * CHUNK)
    stream = batches_ahead(TASK, 5, 6, steps, 2)
    found = [next(stream) for _ in range(CHUNK + 1)]
    os.kill(started[0].process.pid, signal.SIGKILL)
    found += stream
    assert all(same(batch, step) for batch, step in zip(found, steps, strict=True))
    assert [worker.process.poll() for worker in started] == [-signal.SIGKILL, 0]


@pytest.mark.parametrize("processes", [0, 1])
def test_task_error_reaches_the_caller(processes: int) -> None:
    stream = batches_ahead(Slow(fails_at=CHUNK + 2), 0, 2, range(100), processes)
    with pytest.raises(ValueError, match=f"no batch {CHUNK + 2}"):
        list(stream)


MADE_ELSEWHERE = """
import sys
sys.path.insert(0, "mine")
from own_task import Mine
from entp.training import prefetch
task = Mine(prompt_length=4, length=10, num_values=10)
def here(*args):
    raise SystemExit("made here")
prefetch.make = here
print(len(list(prefetch.batches_ahead(task, 5, 6, range(20), 1))))
"""


def test_custom_task_is_found_by_processes(tmp_path: Path) -> None:
    """Its module lies beside the script, in a folder that only sys.path knows."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_task.py").write_text(
        "from entp.tasks.counting import Count3\n\nclass Mine(Count3):\n    pass\n"
    )
    (tmp_path / "script.py").write_text(MADE_ELSEWHERE)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "20\n", "")


def test_closed_stream_ends_its_processes() -> None:
    before = set(children(os.getpid()))
    stream = batches_ahead(TASK, 5, 6, range(10**7), 2)
    next(stream)
    assert len(set(children(os.getpid())) - before) == 2
    stream.close()  # type: ignore[attr-defined]
    assert not set(children(os.getpid())) - before


ENDLESS = """
from entp.training.prefetch import batches_ahead
from entp.tasks.counting import Count3
stream = batches_ahead(Count3(), 0, 8, range(10**7), 2)
for n, batch in enumerate(stream):
    if n == 20:
        print("going", flush=True)
"""


def test_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"`, killed: its processes notice, and end."""
    (tmp_path / "script.py").write_text(ENDLESS)
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "going\n"
        helpers = children(script.pid)
        assert len(helpers) == 2
        script.kill()
    end = time.monotonic() + 120
    while any(alive(pid) for pid in helpers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in helpers)


def test_slow_batches_get_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "cores", lambda: 32)
    assert 7 <= processes_for(Slow(), 0, 2) <= prefetch.MOST
    monkeypatch.setattr(prefetch, "cores", lambda: 1)
    assert processes_for(Slow(), 0, 2) == 0


def test_the_batch_of_the_last_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curriculum begins with short sequences."""
    asked = []

    def batch(self: Count3, seed: int, split: Split, step: int, size: int) -> Batch:
        asked.append(step)
        return TASK.batch(seed, split, step, size)

    monkeypatch.setattr(Slow, "batch", batch)
    processes_for(Slow(), 0, 2, last=99)
    assert asked[-1] == 99


def test_unimportable_task_gets_no_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Local(Slow):
        pass

    monkeypatch.setattr(prefetch, "cores", lambda: 32)
    assert processes_for(Slow(), 0, 2) > 0
    assert processes_for(Local(), 0, 2) == 0
    monkeypatch.setattr(Slow, "__module__", "__main__")
    assert processes_for(Slow(), 0, 2) == 0


def children(pid: int) -> list[int]:
    """Processes that this one started, as Linux tells it."""
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
