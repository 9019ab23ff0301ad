"""The record of runs that are under way, written again and again: a machine that is taken away
leaves what its runs had half a minute before.

A process of its own writes it, so that training waits for nothing. Nothing here imports torch: the
process loads what it needs when it is time for the first writing, and runs that are over by then
have no cost.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

FIRST, EVERY, MOST = 10.0, 30.0, 60.0
"""Seconds before the first writing, between two of them, and at most where writing takes long."""
SHARE = 0.05
"""The part of a core's time that writing may take, up to that."""


class Study(Protocol):
    """What can be written."""

    def write_so_far(self) -> object: ...

    def locked(self) -> AbstractContextManager[None]:
        """Inside, nobody else writes."""


@contextmanager
def recording(study: Study | None) -> Iterator[None]:
    """Inside, what there is of a study is written every half minute, and once more where this
    process dies."""
    if study is None:
        yield
        return
    message = _message(study)
    recorder = _Thread(study) if message is None else _Process(message)
    try:
        yield
    finally:
        with study.locked():  # so it is not writing
            recorder.end()
        recorder.wait()


def _message(study: Study) -> bytes | None:
    """The study for another process; None where that could not find a class of it."""
    try:
        found = pickle.dumps(study)
    except Exception:
        return None
    return None if os.name != "posix" or b"__main__" in found else found


class _Process:
    """A process that writes.

    It runs this file alone: multiprocessing would run the caller's script in it once more. A signal
    to all processes of a terminal or of `timeout` does not reach it.
    """

    def __init__(self, message: bytes) -> None:
        self.here, there = Pipe()
        path = os.pathsep.join(one or os.getcwd() for one in sys.path)
        more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **more},
            start_new_session=True,
        )
        there.close()  # its end is the process's alone, so that it notices when this one is gone
        with contextlib.suppress(OSError):  # it died: what ends is recorded all the same
            self.here.send((FIRST, EVERY, message))

    def end(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        self.process.wait()
        self.here.close()


class _Thread:
    """A thread that writes, for studies of classes that only this process has."""

    def __init__(self, study: Study) -> None:
        self.study, self.over = study, threading.Event()
        self.thread = threading.Thread(target=self._keep, daemon=True)
        self.thread.start()

    def _keep(self) -> None:
        seconds = FIRST
        while not self.over.wait(seconds):
            seconds = _write(self.study, EVERY)

    def end(self) -> None:
        self.over.set()

    def wait(self) -> None:
        self.thread.join()


def serve(pipe: Connection) -> None:
    """Write until the other side is gone, and once more then."""
    first, every, message = pipe.recv()
    gone = pipe.poll(first)
    try:
        study = pickle.loads(message)  # which imports torch
    except Exception as error:
        _tell(f"nothing is recorded while runs are under way: {error}")
        return
    while not gone:
        gone = pipe.poll(_write(study, every))
    _write(study, every)


def _write(study: Study, every: float) -> float:
    """Write; the seconds until that is due again."""
    start = time.monotonic()
    try:
        study.write_so_far()
    except Exception as error:  # whoever carries the runs out writes as well, and raises it
        _tell(f"nothing is recorded just now: {error}")
    return min(MOST, max(every, (time.monotonic() - start) / SHARE))


@cache
def _tell(message: str) -> None:
    """Say it once. The process has no `sys.stderr`: warnings of what is read have been given."""
    os.write(2, f"{message}\n".encode())


def main() -> None:
    os.nice(10)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until it ends)
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
