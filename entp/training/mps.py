"""NVIDIA's Multi-Process Service: kernels of several processes on one GPU at the same time, not in
turns.

    with shared_gpu(device) as shared:
        start_workers(environment=shared.environment)   # for them alone

The daemon is a private one: its pipes and logs are in a temporary folder, and only processes that
are given `environment` find it. A process of its own keeps it, and ends it when this one closes its
pipe or is gone, however that came about. A daemon that somebody else started is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
USUAL_PIPES = Path("/tmp/nvidia-mps")
"""Where a daemon listens that was given no folder."""
PID = f"{CONTROL}.pid"
START_SECONDS = 60.0
"""Longest wait for the daemon and a first process that uses it."""
END_SECONDS = 60
"""Longest wait for those that still use it when it is told to end."""

Probe = Callable[[Mapping[str, str]], str | None]


@dataclass(frozen=True)
class Shared:
    """How processes share a GPU."""

    at_once: bool = False
    """Whether their kernels run at the same time."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the processes must have."""
    told: str = ""
    """A line for a person."""


@contextlib.contextmanager
def shared_gpu(device: str, probe: Probe | None = None) -> Iterator[Shared]:
    """A daemon while the context lasts, where that is possible; else why not, and no harm done.

    device: "cpu", "cuda" or "cuda:NUMBER".
    probe: says why a process with these variables cannot use the GPU; None if it can.
    """
    if not device.startswith("cuda"):
        yield Shared()
        return
    found = _other_daemon()
    if found:
        yield Shared(True, {}, f"MPS: {found} serves the runs.")
        return
    program = shutil.which(CONTROL)
    if program is None:
        yield _in_turns(f"{CONTROL} is not installed")
        return
    number = int(device.partition(":")[2] or 0)
    with contextlib.ExitStack() as stack:
        try:
            daemon = stack.enter_context(_Daemon(program))
            problem = daemon.start() or (probe or _probe(number))(daemon.environment)
        except OSError as error:
            problem = str(error)
        if problem:
            stack.close()
            yield _in_turns(problem)
            return
        yield Shared(True, daemon.environment, "MPS: the runs use the GPU at the same time.")


def _in_turns(problem: str) -> Shared:
    return Shared(told=f"no MPS ({problem.rstrip('.')}): the runs take turns on the GPU.")


def _other_daemon() -> str | None:
    """The daemon that somebody else started and processes here would use, or None."""
    named = os.environ.get(PIPES)
    if named:
        return f"the daemon of {PIPES}={named}"
    return f"the daemon of {USUAL_PIPES}" if _is_alive(USUAL_PIPES) else None


def _is_alive(pipes: Path) -> bool:
    """Whether a daemon listens in a folder."""
    try:
        os.kill(int((pipes / PID).read_text()), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


class _Daemon:
    """A daemon of our own, and the process that keeps it."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.folder = Path(tempfile.mkdtemp(prefix="entp-mps-"))
        self.environment = {PIPES: str(self.folder / "pipes"), LOGS: str(self.folder / "logs")}
        self.keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Daemon:
        return self

    def start(self) -> str | None:
        """Start it; why that failed, if it did."""
        for folder in self.environment.values():
            Path(folder).mkdir()
        self.keeper = subprocess.Popen(
            [sys.executable, "-m", __name__, self.program, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **self.environment,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            start_new_session=True,  # Ctrl-C reaches the group: runs save first, with the GPU
        )
        assert self.keeper.stdout is not None
        said = self.keeper.stdout.readline().strip()
        return None if said == "started" else said or "its keeper ended"

    def __exit__(self, *_: object) -> None:
        if self.keeper is not None:
            assert self.keeper.stdin is not None
            with contextlib.suppress(OSError):
                self.keeper.stdin.close()
            self.keeper.wait()
            if self.keeper.stdout is not None:
                self.keeper.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _probe(number: int) -> Probe:
    """Whether a process can have a context on the GPU of this number."""

    def probe(environment: Mapping[str, str]) -> str | None:
        try:
            found = subprocess.run(
                [sys.executable, "-c", _CONTEXT, str(number)],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=START_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"a process waited {START_SECONDS:.0f} s for the daemon"
        if found.returncode == 0:
            return None
        lines = found.stderr.strip().splitlines()
        return lines[-1] if lines else f"a process that used it ended with {found.returncode}"

    return probe


_CONTEXT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
for name, arguments in (
    ("cuInit", (0,)),
    ("cuDeviceGet", (ctypes.byref(device), int(sys.argv[1]))),
    ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name} returned CUDA error {code}")
"""
"""A process that makes a context on a GPU, without torch: a second instead of ten."""


def keep(program: str, folder: Path) -> int:
    """Run the daemon until standard input ends, then end it; the folder goes too.

    Says "started" on standard output, or why not.
    """
    _die_with_nobody()
    errors = (folder / "errors").open("w+")
    daemon = subprocess.Popen(
        [program, "-f"], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
    )
    try:
        problem = _wait_until_ready(program, daemon)
        if problem is not None:
            errors.seek(0)
            said = errors.read().strip().splitlines()
            print(f"{problem}: {said[-1]}" if said else problem, flush=True)
            return 1
        print("started", flush=True)
        sys.stdin.read()
        return 0
    finally:
        _end(program, daemon)
        errors.close()
        shutil.rmtree(folder, ignore_errors=True)


def _die_with_nobody() -> None:
    """Signals to groups are not for the keeper: it ends with its pipe."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _ask(program: str, what: str, seconds: float) -> bool:
    """Whether the daemon took a command."""
    try:
        asked = subprocess.run(
            [program], input=f"{what}\n", capture_output=True, text=True, timeout=seconds
        )
    except (subprocess.TimeoutExpired, OSError):
        return False
    return asked.returncode == 0


def _wait_until_ready(program: str, daemon: subprocess.Popen[bytes]) -> str | None:
    """Until the daemon answers; why it does not, if so."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if daemon.poll() is not None:
            return f"the daemon ended with {daemon.returncode}"
        if _ask(program, "get_server_list", 5):
            return None
        time.sleep(0.05)
    return f"the daemon did not answer in {START_SECONDS:.0f} s"


def _end(program: str, daemon: subprocess.Popen[bytes]) -> None:
    """Ask the daemon to end when nobody uses it any more; then end it."""
    if daemon.poll() is None:
        _ask(program, f"quit -t {END_SECONDS}", END_SECONDS + 10)
    for end in (daemon.terminate, daemon.kill):
        try:
            daemon.wait(timeout=10)
            return
        except subprocess.TimeoutExpired:
            end()
    daemon.wait()


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], Path(sys.argv[2])))
