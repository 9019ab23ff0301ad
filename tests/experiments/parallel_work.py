"""Work for processes in parallel: what they do is told by files. Imports little, as every process
begins with it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

LIMIT = 300.0


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


def dies(number: int) -> int | None:
    """The second process is killed."""
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return None


class Large:
    """What a task holds, in a circle that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def keeps(folder: Path, number: int) -> int | None:
    """Tells the process, and how many large things there are in it."""
    gc.disable()  # nothing is collected by chance
    held = Large()
    alive = sum(isinstance(thing, Large) for thing in gc.get_objects())
    (folder / str(number)).write_text(f"{os.getpid()} {alive}")
    return None if held.itself is held else 1


def trains(folder: Path, number: int, device: str) -> int | None:
    """Tells how many models there are, and how many bytes on a GPU, before it trains one more."""
    import torch
    from small_runs import small_run

    from entp.model import Transformer
    from entp.training.trainer import train

    alive = sum(isinstance(thing, Transformer) for thing in gc.get_objects())
    used = torch.cuda.memory_allocated() if device == "cuda" and number else 0
    (folder / str(number)).write_text(f"{alive} {used}")
    run = small_run(seed=number, mode="entp" if number % 2 else "decoder")
    return train(run, folder / f"run{number}", device=device, quiet=True).stopped_by


def tells_threads(path: Path) -> int | None:
    import torch

    path.write_text(str(torch.get_num_threads()))
    return None


def tells_variable(path: Path, name: str) -> int | None:
    path.write_text(os.environ[name])
    return None


def meets_and_tells(folder: Path, number: int, count: int) -> int | None:
    """Done where so many processes are at work at the same time."""
    (folder / str(number)).write_text(os.environ["ENTP_TEST"])
    return None if all(see(folder / str(other)) for other in range(count)) else 1


def dies_or_tells(folder: Path, number: int) -> int | None:
    """The first process is killed; the second waits for the one in the first's place."""
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / str(number)).write_text(os.environ["ENTP_TEST"])
    return None if number != 1 or see(folder / "2") else 1


class Odd(Exception):
    """Cannot be made again from what it says."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raises_odd(number: int) -> int | None:
    raise Odd(number, number + 1)


def until_stopped_or_first(folder: Path, number: int) -> int | None:
    """The first is done once the second is at work."""
    if number == 0:
        return None if see(folder / "1.begun") else 1
    return until_stopped(folder, number)


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
