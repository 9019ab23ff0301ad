"""Work side by side, in processes that save what they have when they are told to stop, and end with their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from types import FrameType
from typing import Any

from entp.errors import TrainingStopped

_working = threading.Lock()
"""Held while a process is at work."""


def side_by_side(
    jobs: int, work: Callable[..., int | None], tasks: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, int | None]]:
    """work(*task) for all tasks, `jobs` at a time: the number of each that is done, and the signal that stopped it, if one did.

    SIGTERM and SIGINT are passed on to those at work, which save what they have; nothing else is begun then. A second SIGINT
    ends them at once.
    """
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_wait_quietly)
    caught: list[int] = []
    todo = iter(enumerate(tasks))
    waiting: dict[Future[int | None], int] = {}

    def begin(count: int) -> None:  # no more than are at work: what a pool has taken in, it begins even after a signal
        waiting.update({pool.submit(_at_work, work, *task): number for number, task in islice(todo, count)})

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in caught:
            for process in active_children():
                process.kill()
            raise KeyboardInterrupt
        caught.append(number)
        _terminate_all()

    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM) if ours}
    try:
        begin(jobs)
        while waiting:
            future = next(iter(wait(waiting, return_when=FIRST_COMPLETED).done))
            stopped = None
            try:
                stopped = future.result()
            except BrokenProcessPool:  # one that was only just starting died of the signal
                if not caught:
                    told = "a process died, perhaps because memory ran out: run again to go on, with fewer --jobs"
                    raise TrainingStopped(f"{told}; what was saved is kept.") from None
            stopped = caught[0] if caught else stopped
            begin(0 if stopped else 1)
            yield waiting.pop(future), stopped
            if stopped:
                return
    finally:
        pool.shutdown(wait=not caught, cancel_futures=True)
        while caught and (left := active_children()):  # some may have begun after the signal
            _terminate_all()
            left[0].join(1)
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate_all() -> None:
    for process in active_children():
        process.terminate()


def _wait_quietly() -> None:
    """A process that waits for work does not die of a signal; one that trains sees it all the same."""
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
