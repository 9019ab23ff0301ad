"""Batches made ahead of the step that needs them: by a thread, or by processes where making one
takes longer than a GPU's step.

A batch is a pure function of (seed, split, step), so who makes it does not matter. Nothing here
imports torch: a process that makes batches starts in a moment.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from entp.tasks.base import Batch, Task

CHUNK = 8
"""Batches that a process makes at a time."""
SECONDS = 0.4e-3
"""A process is added for each such stretch of time that a batch takes to make: the step of a small
model on a GPU."""
MOST = 8
"""Processes at most, and at most half of the cores."""


def batches_ahead(
    task: Task, seed: int, size: int, steps: range, processes: int = 0
) -> Iterator[Batch]:
    """The training batches of these steps, in order."""
    if processes:
        return _by_processes(task, seed, size, steps, processes)
    return _by_thread(task, seed, size, steps)


def processes_for(task: Task, seed: int, size: int, last: int = 1) -> int:
    """How many processes keep up with a GPU; 0 where a thread does, or where a process could not
    find the task's class.

    last: the step whose batch is timed; sequences may grow up to the last one.
    """
    if os.name != "posix" or not _travels(task):
        return 0
    task.batch(seed, "train", 0, size)  # the first one may read files
    start = time.perf_counter()
    task.batch(seed, "train", last, size)
    wanted = int((time.perf_counter() - start) / SECONDS)
    return min(wanted, MOST, cores() // 2)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _travels(task: Task) -> bool:
    """Whether another process can be given the task: its class must be importable, and its fields
    plain."""
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return type(task).__module__ != "__main__"


def _by_thread(task: Task, seed: int, size: int, steps: range) -> Iterator[Batch]:
    """Each made while the one before it is used."""
    with ThreadPoolExecutor(1) as pool:
        ahead = [pool.submit(task.batch, seed, "train", step, size) for step in steps[:1]]
        for n in range(len(steps)):
            batch = ahead.pop().result()
            ahead += [
                pool.submit(task.batch, seed, "train", step, size) for step in steps[n + 1 : n + 2]
            ]
            yield batch


def _by_processes(
    task: Task, seed: int, size: int, steps: range, processes: int
) -> Iterator[Batch]:
    """Chunks by each process in turn, each two ahead. What a process that died does not send is
    made here."""
    workers: list[Worker] = []
    try:
        workers += (Worker(task, seed, size) for _ in range(processes))
        chunks = (steps[n : n + CHUNK] for n in range(0, len(steps), CHUNK))
        waiting = list(islice(chunks, 2 * processes))
        for n, chunk in enumerate(waiting):
            workers[n % processes].ask(chunk)
        turn = 0
        while waiting:
            worker, chunk = workers[turn % processes], waiting.pop(0)
            made = worker.receive(chunk)
            for more in islice(chunks, 1):
                worker.ask(more)
                waiting.append(more)
            yield from made
            turn += 1
    finally:
        for worker in workers:
            worker.here.close()  # it ends when its pipe does
        for worker in workers:
            worker.wait()


class Worker:
    """A process that makes batches, and this side of its pipe.

    It runs this file alone: multiprocessing would run the caller's script in it once more.
    """

    def __init__(self, task: Task, seed: int, size: int) -> None:
        self.task, self.seed, self.size = task, seed, size
        self.here, there = Pipe()
        command = [sys.executable, "-m", __name__, str(there.fileno())]
        found_here = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        self.process = subprocess.Popen(
            command, pass_fds=[there.fileno()], stdout=subprocess.DEVNULL, env=found_here
        )
        there.close()  # its end is the process's alone, so that each notices when the other is gone
        self._send((task, seed, size))

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it died: receive makes what it was to make
            self.here.send(message)

    def ask(self, steps: range) -> None:
        """Let it make these."""
        self._send(steps)

    def receive(self, steps: range) -> list[Batch]:
        """What it made of these."""
        try:
            made = self.here.recv()
        except (EOFError, OSError):
            made = None
        return made or make(
            self.task, self.seed, self.size, steps
        )  # an error of the task's is raised here

    def wait(self) -> None:
        """Until it has ended, by itself or not."""
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def make(task: Task, seed: int, size: int, steps: range) -> list[Batch]:
    """The batches of some steps."""
    return [task.batch(seed, "train", step, size) for step in steps]


def serve(pipe: Connection) -> None:
    """Make what is asked for until the other side is gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group: the trainer decides what it means
    try:
        task, seed, size = pipe.recv()
        while True:
            steps = pipe.recv()
            try:
                made = make(task, seed, size, steps)
            except Exception:  # the trainer makes it again and sees the error itself
                made = None
            pipe.send(made)
    except (EOFError, OSError, ImportError, AttributeError):
        # the other side is gone, or the task cannot be found from here: the trainer makes its
        # batches itself
        return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
