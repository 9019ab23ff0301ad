"""Real processes that begin with what is imported here: a new interpreter would take seconds.

child = start(lambda: main(["train", ...]), tmp_path)     # in that folder
child.kill(signal.SIGKILL)
code, said = child.wait()
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from entp.cli.main import main
from entp.training.loggers import read_metrics

NUMBER = itertools.count()
FORK = multiprocessing.get_context("fork")
Work = Callable[[], object]


@dataclass
class Child:
    """A process, and the file that it writes to."""

    process: multiprocessing.process.BaseProcess
    log: Path

    def kill(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> tuple[int, str]:
        """Its exit code, negative for a signal, and what it wrote; it is killed after a while."""
        self.process.join(timeout=120)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode, self.log.read_text()

    def wait_for_step(self, out: Path, step: int) -> None:
        """Until metrics.jsonl has that step, or the process is gone."""
        while self.process.is_alive():
            rows = read_metrics(out)
            if rows and rows[-1]["step"] >= step:
                return
            self.process.join(timeout=0.005)


def start(work: Work, folder: Path, **variables: str) -> Child:
    """A process that does `work` in `folder` and ends with the number that it returns, if any."""
    log = folder / f"output-{next(NUMBER)}.txt"
    process = FORK.Process(target=_do, args=(work, folder, log, variables))
    process.start()
    return Child(process, log)


def _do(work: Work, folder: Path, log: Path, variables: dict[str, str]) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(handle, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    os.environ.update(variables)
    os.chdir(folder)
    code = 70
    try:
        returned = work()
        code = returned if isinstance(returned, int) else 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def start_entp(*words: str, cwd: Path) -> Child:
    """`entp WORDS`."""
    return start(lambda: main(list(words)), cwd)


def entp(*words: str, cwd: Path) -> tuple[int, str]:
    """`entp WORDS`, done: its exit code and what it wrote."""
    return start_entp(*words, cwd=cwd).wait()


def together(work: Work, folder: Path, size: int = 2) -> list[tuple[int, str]]:
    """What becomes of `size` processes that find each other as torchrun's do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = [
        start(work, folder, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(size)
    ]
    return [child.wait() for child in children]


def torchrun(work: Callable[..., object], *arguments: object, size: int = 2) -> dict[int, object]:
    """What `work` returns in each process of torchrun's own launcher, which forks here."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
        monitor_interval=0.05,
    )
    return dict(elastic_launch(config, work)(*arguments))
