"""Work in parallel, in processes that save what they have when they are told to stop, and end with
their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from typing import Any, NamedTuple

from entp.errors import TrainingStopped
from entp.training.signals import StopSignals

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
    jobs: int, work: Callable[..., int | None], tasks: Sequence[tuple[Any, ...]]
) -> Iterator[Ending]:
    """How each of the tasks ended, as they do: work(*task) for all, `jobs` at a time.

    `work` returns the signal that stopped it, if one did.

    SIGTERM and SIGINT are passed on to those at work, which save what they have; nothing else is
    begun then. A second SIGINT ends them at once.
    """
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_wait_quietly)
    todo = iter(enumerate(tasks))
    waiting: dict[Future[int | None], int] = {}

    def begin(count: int) -> None:
        """No more than are at work: what a pool has taken in, it begins even after a signal."""
        for number, task in islice(todo, count):
            waiting[pool.submit(_at_work, work, *task)] = number

    with StopSignals(_terminate_all, _kill_all) as signals:
        try:
            begin(jobs)
            while waiting:
                done = wait(waiting, timeout=1, return_when=FIRST_COMPLETED).done
                if signals.caught:
                    _terminate_all()  # again: one that had not begun to train did not listen
                for future in done:
                    ending = _ending(waiting.pop(future), future, signals)
                    if not ending.stopped_by:
                        begin(1)
                    yield ending
                    if ending.stopped_by:
                        return
        finally:
            pool.shutdown(wait=not signals.caught, cancel_futures=True)
            while signals.caught and (left := active_children()):
                _terminate_all()
                left[0].join(1)


def _ending(number: int, future: Future[int | None], signals: StopSignals) -> Ending:
    """How what is done ended: by the parent's own signal, where it caught one."""
    try:
        return Ending(number, signals.caught or future.result())
    except BrokenProcessPool:
        if signals.caught:  # one that was only just starting died of the signal
            return Ending(number, signals.caught)
        raise TrainingStopped(
            "a process died, perhaps because memory ran out: run again to go on, with fewer "
            "--jobs; what was saved is kept."
        ) from None
    except Exception as error:
        return Ending(number, signals.caught, error)


def _terminate_all() -> None:
    for process in active_children():
        process.terminate()


def _kill_all() -> None:
    for process in active_children():
        process.kill()


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


def _at_work(work: Callable[..., int | None], *task: Any) -> int | None:
    with _working:
        return work(*task)
