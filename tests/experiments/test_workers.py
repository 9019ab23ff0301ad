"""Work in parallel: as many at once as asked, and after a signal everybody saves and nothing else
begins."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from parallel_work import (
    LIMIT,
    dies,
    dies_or_tells,
    fails,
    keeps,
    meet,
    meets_and_tells,
    raises_odd,
    see,
    stop,
    tells_threads,
    tells_variable,
    trains,
    until_stopped_or_first,
)

from entp.errors import TrainingStopped
from entp.experiments import workers
from entp.experiments.workers import Ending, in_parallel


@contextlib.contextmanager
def two_at_work(folder: Path, work: str) -> Iterator[subprocess.Popen[str]]:
    """The parent of two that are at work on six tasks, in a group of its own, of which nobody is
    left behind."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-m", "parallel_work", work],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert see(folder / "0.begun")
        assert see(folder / "1.begun")
        yield parent
    finally:
        with contextlib.suppress(ProcessLookupError):  # nobody is left, unless the test fails
            os.killpg(parent.pid, signal.SIGKILL)


def test_as_many_at_once_as_asked_and_signals_are_then_handled_as_before(tmp_path: Path) -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    tasks = [(tmp_path, "a", "b"), (tmp_path, "b", "a"), (tmp_path, "c", "a")]
    assert sorted(in_parallel(2, meet, tasks)) == [Ending(0), Ending(1), Ending(2)]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_process_that_dies_takes_only_its_own_task_with_it() -> None:
    """As the system ends one where memory runs out."""
    endings = sorted(in_parallel(2, dies, [(n,) for n in range(4)]), key=lambda end: end.number)
    assert [end.error is None for end in endings] == [True, False, True, True]
    assert isinstance(endings[1].error, TrainingStopped)
    assert "its process died (SIGKILL)" in str(endings[1].error)
    assert "run again to go on, with fewer --jobs" in str(endings[1].error)


def test_the_next_task_is_chosen_and_may_wait(tmp_path: Path) -> None:
    """The last first, and the first beside nobody."""
    asked = []

    def choose(waiting: Sequence[int], busy: int) -> int:
        asked.append((list(waiting), busy))
        return waiting[-1] if len(waiting) > 1 else -1 if busy else waiting[0]

    tasks = [(tmp_path, "a", "a"), (tmp_path, "b", "c"), (tmp_path, "c", "b")]
    ends = [ending.number for ending in in_parallel(2, meet, tasks, choose=choose)]
    assert sorted(ends[:2]) == [1, 2]
    assert ends[2] == 0
    assert asked == [([0, 1, 2], 0), ([0, 1], 1), ([0], 1), ([0], 0)]


def test_a_process_does_one_task_after_another(tmp_path: Path) -> None:
    """What it has loaded serves the next, and memory of the last is given back."""
    assert len(list(in_parallel(1, keeps, [(tmp_path, n) for n in range(3)]))) == 3
    found = [(tmp_path / str(n)).read_text().split() for n in range(3)]
    assert len({process for process, _ in found}) == 1
    assert [alive for _, alive in found] == ["1", "1", "1"]


def after_training(folder: Path, device: str, runs: int) -> list[list[int]]:
    """Models, and bytes on a GPU, that a process still holds when it begins each of so many
    runs."""
    endings = list(in_parallel(1, trains, [(folder, n, device) for n in range(runs)]))
    assert [ending.error for ending in endings] == [None] * runs
    return [[int(word) for word in (folder / str(n)).read_text().split()] for n in range(runs)]


def test_nothing_of_a_finished_run_is_kept(tmp_path: Path) -> None:
    assert after_training(tmp_path, "cpu", 2) == [[0, 0]] * 2


@pytest.mark.gpu
def test_memory_of_finished_runs_does_not_add_up(tmp_path: Path) -> None:
    """What stays is the engine's workspace and the tables of the last few masks."""
    alive, used = zip(*after_training(tmp_path, "cuda", 4), strict=True)
    assert alive == (0, 0, 0, 0)
    assert used[3] <= used[2] + 2**20
    assert used[3] < 2**27


def test_the_cores_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would start a thread for each core in every process."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(workers, "cores", lambda: 2)
    assert list(in_parallel(2, tells_threads, [(tmp_path / "a",)])) == [Ending(0)]
    assert (tmp_path / "a").read_text() == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(workers, "cores", lambda: 100)
    assert list(in_parallel(2, tells_threads, [(tmp_path / "b",)])) == [Ending(0)]
    assert (tmp_path / "b").read_text() == "1"


def test_processes_have_the_variables_that_they_are_given(tmp_path: Path) -> None:
    (ending,) = in_parallel(1, tells_variable, [(tmp_path / "a", "ENTP_TEST")], {"ENTP_TEST": "b"})
    assert ending == Ending(0)
    assert (tmp_path / "a").read_text() == "b"
    assert "ENTP_TEST" not in os.environ


def test_processes_are_spread_evenly_over_sets_of_variables(tmp_path: Path) -> None:
    """Also the one that takes the place of a process that died."""
    sets = [{"ENTP_TEST": "0"}, {"ENTP_TEST": "1"}]
    tasks = [(tmp_path, n, 4) for n in range(4)]
    assert sorted(in_parallel(4, meets_and_tells, tasks, sets)) == [Ending(n) for n in range(4)]
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["0", "0", "1", "1"]
    again = tmp_path / "again"
    again.mkdir()
    endings = list(in_parallel(2, dies_or_tells, [(again, n) for n in range(4)], sets))
    assert sorted(ending.number for ending in endings if ending.error is not None) == [0]
    assert {path.read_text() for path in again.iterdir()} == {"0", "1"}


def test_what_cannot_be_sent_is_an_ending_too(tmp_path: Path) -> None:
    """A task, or an error that takes other arguments than it has."""
    tasks: list[tuple[Any, ...]] = [(lambda: None,), (2,)]
    one, two = sorted(in_parallel(1, raises_odd, tasks), key=lambda end: end.number)
    assert "pickle" in str(one.error)
    assert str(two.error) == "Odd: 2 and 3"


def test_whoever_asks_no_more_stops_those_at_work(tmp_path: Path) -> None:
    tasks = [(tmp_path, n) for n in (0, 1)]
    before = {child.pid for child in active_children()}  # other tests' baselines keep some
    endings = in_parallel(2, until_stopped_or_first, tasks)
    assert next(endings) == Ending(0)
    endings.close()
    assert {child.pid for child in active_children()} <= before
    assert (tmp_path / "1.saved").exists()


def test_one_that_fails_does_not_stop_the_others() -> None:
    endings = sorted(in_parallel(1, fails, [(n,) for n in range(3)]), key=lambda end: end.number)
    assert [end.stopped_by for end in endings] == [None] * 3
    assert [str(end.error) for end in endings] == ["None", "the second", "None"]


def test_where_one_is_stopped_nothing_else_begins(tmp_path: Path) -> None:
    assert list(in_parallel(1, stop, [(tmp_path, n) for n in range(5)])) == [Ending(0, 15)]
    assert list(tmp_path.iterdir()) == []


def both(pid: int, how: int) -> None:
    """As `timeout` does it."""
    os.kill(pid, how)
    time.sleep(0.05)
    os.killpg(pid, how)


@pytest.mark.parametrize(
    ("how", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill), (signal.SIGTERM, both)],
)
def test_a_signal_to_the_parent_or_to_all_stops_all(
    how: signal.Signals, send: Callable[[int, int], None], tmp_path: Path
) -> None:
    """Ctrl-C reaches the parent and those at work: both save, the others of six are not begun, the
    parent names its signal."""
    with two_at_work(tmp_path, "until_stopped") as parent:
        send(parent.pid, how)
        said, _ = parent.communicate(timeout=LIMIT)
    first, saved = said.splitlines()
    assert first in (f"[(0, {how.value})]", f"[(1, {how.value})]")
    assert (
        saved == "['0.saved', '1.saved']"
    )  # before the parent goes on, which records what was saved
    assert sorted(file.name for file in tmp_path.glob("?.*")) == [
        "0.begun",
        "0.saved",
        "1.begun",
        "1.saved",
    ]


def test_one_that_does_not_listen_yet_is_told_again(tmp_path: Path) -> None:
    with two_at_work(tmp_path, "late") as parent:
        parent.terminate()
        said, _ = parent.communicate(timeout=LIMIT)
    assert said == "[(0, 15)]\n['0.saved', '1.saved']\n"


def test_a_signal_is_not_lost_where_nobody_listens_yet(tmp_path: Path) -> None:
    with two_at_work(tmp_path, "both_late") as parent:
        parent.terminate()
        said, _ = parent.communicate(timeout=LIMIT)
    assert said.endswith("\n['0.saved', '1.saved']\n")


def gone(group: int) -> bool:
    """Wait until a group has no process."""
    end = time.monotonic() + LIMIT
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.01)
        return False
    return True


def test_those_whose_parent_was_killed_save_and_end(tmp_path: Path) -> None:
    with two_at_work(tmp_path, "until_stopped") as parent:
        parent.kill()
        parent.wait()
        assert gone(parent.pid)
    assert sorted(file.name for file in tmp_path.glob("?.*")) == [
        "0.begun",
        "0.saved",
        "1.begun",
        "1.saved",
    ]


def test_a_second_interrupt_ends_also_those_that_do_not_stop(tmp_path: Path) -> None:
    with two_at_work(tmp_path, "deaf") as parent:
        parent.send_signal(signal.SIGINT)
        assert see(tmp_path / "0.told")
        assert see(tmp_path / "1.told")
        assert parent.poll() is None
        time.sleep(1)  # what comes at once is the first
        parent.send_signal(signal.SIGINT)
        parent.communicate(timeout=LIMIT)
        assert parent.returncode == -signal.SIGINT
        assert gone(parent.pid)
