"""A daemon of NVIDIA's Multi-Process Service: started where that works, ended in any case, and
never somebody else's. The program here is a small one that takes the same words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from entp.training import mps
from entp.training.mps import CONTROL, LOGS, PID, PIPES, Shared, shared_gpu

PROGRAM = """#!{python}
import os, pathlib, sys, time
pipes, told = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), pathlib.Path({told!r})
def tell(word):
    with told.open("a") as file:
        file.write(word + "\\n")
if "-f" in sys.argv:
    if {broken!r}:
        sys.exit("no GPU for a daemon")
    assert pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
    (pipes / "{pid}").write_text(str(os.getpid()))
    tell(f"daemon {{os.getpid()}} {{os.getsid(0)}}")
    while not (pipes / "quit").exists():
        time.sleep(0.01)
    tell("ended")
else:
    if not (pipes / "{pid}").exists():
        sys.exit("Cannot find MPS control daemon process")
    words = sys.stdin.read().split()
    tell(words[0])
    if words[0] == "quit":
        (pipes / "quit").touch()
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the program was asked for; its place is the first of the path."""
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(mps, "USUAL_PIPES", tmp_path / "nobody")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    write_program(tmp_path)
    return tmp_path / "told"


def write_program(folder: Path, broken: bool = False) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / CONTROL
    text = PROGRAM.format(python=sys.executable, told=str(folder / "told"), broken=broken, pid=PID)
    path.write_text(text)
    path.chmod(0o755)


def lines(told: Path) -> list[str]:
    return told.read_text().splitlines() if told.exists() else []


def works(environment: Mapping[str, str]) -> str | None:
    """A process can use the GPU where the daemon listens."""
    return None if (Path(environment[PIPES]) / PID).exists() else "nobody listens"


def gone(process: int) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_daemon_lives_as_long_as_the_context(told: Path) -> None:
    with shared_gpu("cuda", works) as shared:
        assert shared.at_once
        assert shared.told == "MPS: the runs use the GPU at the same time."
        assert shared.environment.keys() == {PIPES, LOGS}
        assert PIPES not in os.environ  # the workers' alone
        folder = Path(shared.environment[PIPES]).parent
        _, process, session = lines(told)[0].split()
        os.kill(int(process), 0)
        assert int(session) != os.getsid(0)  # Ctrl-C does not reach it
    assert lines(told)[-2:] == ["quit", "ended"]
    assert gone(int(process))
    assert not folder.exists()


def test_daemon_ends_after_an_error(told: Path) -> None:
    with pytest.raises(KeyboardInterrupt), shared_gpu("cuda:1", works):
        raise KeyboardInterrupt
    assert lines(told)[-1] == "ended"


def test_daemon_ends_with_a_process_that_is_killed(told: Path) -> None:
    script = (
        "import time; from entp.training.mps import shared_gpu\n"
        "with shared_gpu('cuda', lambda _: None): print('ready', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    process = int(lines(told)[0].split()[1])
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert gone(process)
    assert lines(told)[-1] == "ended"


def taken(told: Path) -> Iterator[str]:
    """What is said where the runs take turns; nothing is left behind."""
    with shared_gpu("cuda", works) as shared:
        assert (shared.at_once, dict(shared.environment)) == (False, {})
        yield shared.told


def test_without_the_program_runs_take_turns(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (said,) = taken(told)
    assert said == f"no MPS ({CONTROL} is not installed): the runs take turns on the GPU."


def test_program_that_fails_is_quoted(told: Path) -> None:
    write_program(told.parent, broken=True)
    (said,) = taken(told)
    assert said == (
        "no MPS (the daemon ended with 1: no GPU for a daemon): the runs take turns on the GPU."
    )


def test_daemon_that_no_process_can_use_is_ended(told: Path) -> None:
    with shared_gpu("cuda", lambda _: "cuInit returned CUDA error 805") as shared:
        assert shared.told.startswith("no MPS (cuInit returned CUDA error 805)")
        assert lines(told)[-1] == "ended"


def test_probe_says_what_went_wrong(told: Path) -> None:
    """There is no GPU of this number anywhere, and on most machines no driver."""
    said = mps._probe(10_000)({})
    assert said is not None
    assert "libcuda" in said or "CUDA error" in said


def test_daemon_of_somebody_else_is_left_alone(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path / "usual"
    usual.mkdir()
    monkeypatch.setattr(mps, "USUAL_PIPES", usual)
    (usual / PID).write_text(str(os.getpid()))  # somebody who lives
    with shared_gpu("cuda", works) as shared:
        assert shared == Shared(True, {}, f"MPS: the daemon of {usual} serves the runs.")
    (usual / PID).write_text("not a number")  # left behind
    monkeypatch.setenv(PIPES, "/theirs")
    with shared_gpu("cuda", works) as shared:
        assert shared == Shared(True, {}, f"MPS: the daemon of {PIPES}=/theirs serves the runs.")
    assert lines(told) == []
    monkeypatch.delenv(PIPES)
    with shared_gpu("cuda", works) as shared:
        assert shared.environment


def test_cpu_needs_no_daemon(told: Path) -> None:
    with shared_gpu("cpu", works) as shared:
        assert shared == Shared()
    assert lines(told) == []
