"""Work for processes in parallel: what they do is told by files. Imports little, as every process
begins with it."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

LIMIT = 60.0


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


def fails(number: int) -> int | None:
    if number == 1:
        raise ValueError("the second")
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
    """The second does not listen before the first has saved, as one that is still loading its
    data."""
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


def main() -> None:
    """Two at a time do six tasks of the work that the command names."""
    import parallel_work

    from entp.experiments.workers import in_parallel

    work = getattr(parallel_work, sys.argv[1])
    tasks = [(Path(), number) for number in range(6)]
    print([tuple(ending)[:2] for ending in in_parallel(2, work, tasks)])
    print(sorted(path.name for path in Path().glob("*.saved")))


if __name__ == "__main__":
    main()
