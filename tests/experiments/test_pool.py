"""Work side by side: as many at once as asked, and after a signal everybody saves and nothing else
begins."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from entp.errors import TrainingStopped
from entp.experiments.workers import side_by_side

LIMIT = 60.0
SCRIPT = """
import sys
from pathlib import Path
from entp.experiments.workers import side_by_side
import test_pool

if __name__ == "__main__":
    work = getattr(test_pool, sys.argv[1])
    print([*side_by_side(2, work, [(Path(), n) for n in range(6)])])
    print(sorted(path.name for path in Path().glob("*.saved")))
"""


def see(path: Path) -> bool:
    """Wait until the file is there."""
    end = time.monotonic() + LIMIT
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


def meet(folder: Path, mine: str, other: str) -> int | None:
    """Done where another process is at work at the same time."""
    (folder / mine).touch()
    return None if see(folder / other) else 1


def stop(folder: Path, number: int) -> int | None:
    """The first is stopped by a signal to itself; any other would leave a file."""
    if number == 0:
        return 15
    (folder / f"{number}.begun").touch()
    return None


def until_stopped(folder: Path, number: int) -> int | None:
    """As training does it: a signal is a wish to stop, and what is there is saved."""
    caught: list[int] = []
    handlers = {
        s: signal.signal(s, lambda found, _: caught.append(found))
        for s in (signal.SIGINT, signal.SIGTERM)
    }
    (folder / f"{number}.begun").touch()
    while not caught:
        time.sleep(0.01)
    time.sleep(0.1)  # that takes a moment
    (folder / f"{number}.saved").touch()
    for s, handler in handlers.items():
        signal.signal(s, handler)
    return caught[-1]


def late(folder: Path, number: int) -> int | None:
    """The second does not listen before the first has saved, as one that is still loading its data."""
    (folder / f"{number}.begun").touch()
    if number == 1:
        see(folder / "0.saved")
        time.sleep(0.3)
    return until_stopped(folder, number)


def both_late(folder: Path, number: int) -> int | None:
    """Nobody listens when the signal comes."""
    (folder / f"{number}.begun").touch()
    time.sleep(1.5)
    return until_stopped(folder, number)


def deaf(folder: Path, number: int) -> int | None:
    """Does not stop, whatever it is told."""
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda *_: (folder / f"{number}.told").touch())
    (folder / f"{number}.begun").touch()
    while True:
        time.sleep(0.01)


@contextlib.contextmanager
def two_at_work(folder: Path, work: str) -> Iterator[subprocess.Popen[str]]:
    """The parent of two that are at work on six tasks, in a group of its own, of which nobody is
    left behind."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    (folder / "script.py").write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, "script.py", work],
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
    assert sorted(side_by_side(2, meet, tasks)) == [(0, None), (1, None), (2, None)]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_process_that_dies_is_not_one_that_is_done() -> None:
    """As the system ends one where memory runs out."""
    with pytest.raises(TrainingStopped, match="run again to go on, with fewer --jobs"):
        list(side_by_side(2, os._exit, [(9,)]))


def test_where_one_is_stopped_nothing_else_begins(tmp_path: Path) -> None:
    assert list(side_by_side(1, stop, [(tmp_path, n) for n in range(5)])) == [(0, 15)]
    assert list(tmp_path.iterdir()) == []


def both(pid: int, how: int) -> None:
    """As `timeout` does it."""
    os.kill(pid, how)
    time.sleep(0.05)
    os.killpg(pid, how)


@pytest.mark.parametrize("send", [os.kill, os.killpg, both])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
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
