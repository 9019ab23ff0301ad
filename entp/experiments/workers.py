"""Work in parallel, in processes that save what they have when they are told to stop, and end with
their parent.

A process does one task after another, so that what it has loaded and compiled serves the next. One
that dies takes only its own task with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from entp.errors import TrainingStopped
from entp.training.prefetch import cores
from entp.training.signals import StopSignals

Work = Callable[..., int | None]
"""Returns the signal that stopped it, if one did."""
Choose = Callable[[Sequence[int], int], int]
"""The number of one of the waiting tasks, -1 for none yet."""

_working = threading.Lock()
"""Held while a process is at work."""


class Ending(NamedTuple):
    """How one of the tasks ended."""

    number: int
    stopped_by: int | None = None
    """The signal, if one stopped it."""
    error: Exception | None = None
    """What it failed by, if it did."""


def in_parallel(
    jobs: int,
    work: Work,
    tasks: Sequence[tuple[Any, ...]],
    environment: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    choose: Choose = lambda waiting, busy: waiting[0],
) -> Generator[Ending, None, None]:
    """How each of the tasks ended, as they do: work(*task) for all, `jobs` at a time.

    SIGTERM and SIGINT are passed on to those at work, which save what they have; nothing else is
    begun then. A second SIGINT ends them at once. Whoever stops asking for endings stops those at
    work too.

    environment: variables that the processes have beside those of this one; or several such sets,
        one for each GPU, say, of which as many processes have each.
    choose: which of the waiting tasks begins next, beside so many at work.

    The cores are divided among them. Torch would start a thread for every core in each process, and
    threads that wait for a core hold up those that work.
    """
    threads = max(1, cores() // jobs)
    todo = dict(enumerate(tasks))
    workers: list[_Worker] = []
    several = [environment or {}] if not isinstance(environment, Sequence) else list(environment)

    def begin() -> Iterator[Ending]:
        """Give idle processes, or new ones, the tasks that are due; the endings of those that
        cannot be sent."""
        while todo and (busy := sum(worker.number is not None for worker in workers)) < jobs:
            number = choose(list(todo), busy)
            if number < 0:
                return
            task = todo.pop(number)
            worker = next((one for one in workers if one.number is None), None)
            if worker is None:
                worker = _Worker(_least_used(several, workers), threads)
                workers.append(worker)
            error = worker.give(number, work, task)
            if error is not None:
                yield Ending(number, error=error)

    def terminate() -> None:
        for worker in workers:
            worker.process.terminate()

    def kill() -> None:
        for worker in workers:
            worker.process.kill()

    with StopSignals(terminate, kill) as signals:
        try:
            yield from begin()
            while busy := {worker.pipe: worker for worker in workers if worker.number is not None}:
                done = connection.wait(list(busy), timeout=1)
                if signals.caught:
                    terminate()  # again: one that had not begun to train did not listen
                for pipe in done:
                    worker = busy[pipe]  # type: ignore[index]
                    ending = worker.ending()
                    if not worker.is_there:
                        workers.remove(worker)
                    if signals.caught:  # one that was only just starting may have died of it
                        error = ending.error if worker.is_there else None
                        ending = Ending(ending.number, signals.caught, error)
                    if not ending.stopped_by:
                        yield from begin()
                    yield ending
                    if ending.stopped_by:
                        return
        finally:
            for worker in workers:
                worker.pipe.close()  # one without work ends by that
            while left := [worker for worker in workers if worker.process.is_alive()]:
                terminate()
                left[0].process.join(1)
            for worker in workers:
                worker.process.join()


def _least_used(
    several: Sequence[Mapping[str, str]], workers: Sequence[_Worker]
) -> Mapping[str, str]:
    """The variables that the fewest of these processes have."""
    return min(several, key=lambda one: sum(worker.environment is one for worker in workers))


class _Worker:
    """A process that does one task after another, and this side of its pipe."""

    def __init__(self, environment: Mapping[str, str], threads: int) -> None:
        self.environment = environment
        context = get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, dict(environment), threads))
        self.process.start()
        there.close()  # its end is the process's alone, so that each notices when the other is gone
        self.number: int | None = None
        """The task that it is at work on."""
        self.is_there = True

    def give(self, number: int, work: Work, task: tuple[Any, ...]) -> Exception | None:
        """Let it do a task; why that cannot be sent, if so."""
        try:
            message = pickle.dumps((work, task))
        except Exception as error:
            return error
        with contextlib.suppress(OSError):  # it died: that is its ending
            self.pipe.send_bytes(message)
        self.number = number
        return None

    def ending(self) -> Ending:
        """How its task ended, once there is something to read."""
        assert self.number is not None
        number, self.number = self.number, None
        try:
            return Ending(number, *self.pipe.recv())
        except (EOFError, OSError):
            self.is_there = False
            self.process.join()
            self.pipe.close()
            return Ending(number, error=TrainingStopped(_died(self.process.exitcode)))


def _died(code: int | None) -> str:
    """What is known about a process that ended without a word."""
    how = f"code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = signal.Signals(-code).name
    return (
        f"its process died ({how}), perhaps because memory ran out: run again to go on, with fewer "
        "--jobs; what was saved is kept."
    )


def _serve(pipe: Connection, environment: dict[str, str], threads: int) -> None:
    """Do what is asked for until the other side is gone."""
    os.environ.update(environment)  # before anything asks for a GPU
    _wait_quietly()
    _share_cores(threads)
    try:
        while True:
            result = _done(pipe.recv_bytes())
            _release()
            pipe.send(result)
    except (EOFError, OSError):
        return  # nobody asks any more


def _share_cores(threads: int) -> None:
    """Let torch take so many, now or when it is loaded, unless a person has said how many."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _done(message: bytes) -> tuple[int | None, Exception | None]:
    """The signal that stopped a task, and the error that it failed by, if any."""
    try:
        work, task = pickle.loads(message)
        return _at_work(work, *task), None
    except Exception as error:
        return None, _that_travels(error)


def _that_travels(error: Exception) -> Exception:
    """A copy of the error, without what it was raised in, or one that says the same where it
    cannot be sent."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if isinstance(copy, Exception):
        return copy
    return TrainingStopped(f"{type(error).__name__}: {error}")


def _wait_quietly() -> None:
    """A process that waits for work does not die of a signal; one that trains sees it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # what is trained is saved
        with _working:
            os._exit(1)


def _at_work(work: Work, *task: Any) -> int | None:
    with _working:
        return work(*task)


def _release() -> None:
    """Give back the memory of a task that is done: others on the device may want it."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a GPU that failed: the task said so
            torch.cuda.empty_cache()
