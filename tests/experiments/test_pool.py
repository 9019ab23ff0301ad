"""Work side by side: as many at once as asked, and after a signal everybody saves and nothing else begins."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from entp.errors import TrainingStopped
from entp.experiments.pool import side_by_side

LIMIT = 60.0
SCRIPT = """
import sys
from pathlib import Path
from entp.experiments.pool import side_by_side
from test_pool import until_stopped

if __name__ == "__main__":
    print([*side_by_side(2, until_stopped, [(Path(sys.argv[1]), n) for n in range(6)])])
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
    handlers = {s: signal.signal(s, lambda found, _: caught.append(found)) for s in (signal.SIGINT, signal.SIGTERM)}
    (folder / f"{number}.begun").touch()
    while not caught:
        time.sleep(0.01)
    (folder / f"{number}.saved").touch()
    for s, handler in handlers.items():
        signal.signal(s, handler)
    return caught[-1]


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


@pytest.mark.parametrize("send", [os.kill, os.killpg])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_or_to_all_stops_all(
    how: signal.Signals, send: Callable[[int, int], None], tmp_path: Path
) -> None:
    """Ctrl-C reaches the parent and those at work: both save, the others of six are not begun, the parent names its signal."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    (tmp_path / "script.py").write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, "script.py", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert see(tmp_path / "0.begun")
        assert see(tmp_path / "1.begun")
        send(parent.pid, how)
        said, _ = parent.communicate(timeout=LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nobody is left, unless the test fails
            os.killpg(parent.pid, signal.SIGKILL)
    assert said in (f"[(0, {how.value})]\n", f"[(1, {how.value})]\n")
    assert sorted(file.name for file in tmp_path.glob("?.*")) == ["0.begun", "0.saved", "1.begun", "1.saved"]
