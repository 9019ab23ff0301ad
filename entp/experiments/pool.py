"""Work side by side, in processes that save what they have when they are told to stop, and end with their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from types import FrameType
from typing import Any

_working = threading.Lock()
"""Held while a process is at work."""


def side_by_side(
    jobs: int, work: Callable[..., int | None], tasks: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, int | None]]:
    """work(*task) for all tasks, `jobs` at a time: the number of each that is done, and the signal that stopped it, if one did.

    SIGTERM is passed on to those at work, which save what they have; nothing else is begun then.
    """
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_wait_quietly)
    caught: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        _terminate_all()

    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, pass_on) if ours else None
    try:
        waiting = {pool.submit(_at_work, work, *task): number for number, task in enumerate(tasks)}
        for future in as_completed(waiting):
            try:
                stopped = future.result() or next(iter(caught), None)
            except BrokenProcessPool:  # one that was only just starting died of the signal
                if not caught:
                    raise
                stopped = caught[0]
            yield waiting[future], stopped
            if stopped:
                return
    finally:
        pool.shutdown(wait=not caught, cancel_futures=True)
        while caught and (left := active_children()):  # some may have begun after the signal
            _terminate_all()
            left[0].join(1)
        if ours:
            signal.signal(signal.SIGTERM, before)


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
