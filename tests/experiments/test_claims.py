"""Several processes carry out the runs of one folder: each run once, and a dead one's are taken
over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import shared_runs
from shared_runs import recipe_of
from small_runs import environment

from entp.experiments import claims
from entp.experiments.claims import UnderWay, claimed, owner_of
from entp.experiments.reproduce import reproduce
from entp.experiments.study import RESULTS
from entp.results.store import read_record
from entp.training.loggers import read_metrics

LIMIT = 300.0


def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def claim_of(folder: Path, *, system: str | None = None, pid: int, age: float = 0.0) -> Path:
    """A claim that somebody else has left."""
    path = folder / claims.FOLDER / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = {"host": "elsewhere", "system": system or claims._system(), "pid": pid}
    path.write_text(json.dumps(owner))
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_claim_is_for_one_and_is_given_back(tmp_path: Path) -> None:
    with claimed(tmp_path, "run"):
        with pytest.raises(UnderWay, match=f"process {os.getpid()}"), claimed(tmp_path, "run"):
            pass
        assert str(os.getpid()) in owner_of(tmp_path, "run")
        with claimed(tmp_path, "other"):
            pass
    assert owner_of(tmp_path, "run") == ""
    with claimed(tmp_path, "run"):
        pass


def test_claim_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), claimed(tmp_path, "run"):
        raise ValueError("broken")
    assert owner_of(tmp_path, "run") == ""


def test_claim_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    claim_of(tmp_path, pid=dead_process())
    with claimed(tmp_path, "run"):
        assert str(os.getpid()) in owner_of(tmp_path, "run")


def test_claim_of_an_earlier_process_of_the_same_number_is_taken_over(tmp_path: Path) -> None:
    claim_of(tmp_path, pid=os.getppid())
    with claimed(tmp_path, "run"):
        pass


def test_claim_of_a_process_that_nobody_waits_for_is_taken_over(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    end = time.monotonic() + LIMIT
    while claims._begun(process.pid) and time.monotonic() < end:
        time.sleep(0.01)
    claim_of(tmp_path, pid=process.pid)
    with claimed(tmp_path, "run"):
        pass
    process.wait()


def test_claim_of_another_machine_holds_while_it_is_touched(tmp_path: Path) -> None:
    """A process number says nothing there."""
    path = claim_of(tmp_path, system="another", pid=dead_process(), age=claims.STALE - 60)
    with pytest.raises(UnderWay, match="on elsewhere"), claimed(tmp_path, "run"):
        pass
    os.utime(path, (0, time.time() - claims.STALE - 60))
    with claimed(tmp_path, "run"):
        pass


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"pid": "x"}'])
def test_damaged_claim_holds_for_a_while(text: str, tmp_path: Path) -> None:
    path = claim_of(tmp_path, pid=1)
    path.write_text(text)
    with pytest.raises(UnderWay, match="another machine, process"), claimed(tmp_path, "run"):
        pass
    os.utime(path, (0, time.time() - claims.STALE - 60))
    with claimed(tmp_path, "run"):
        pass


def test_owner_touches_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.01)
    path = tmp_path / claims.FOLDER / "run.json"
    with claimed(tmp_path, "run"):
        os.utime(path, (0, 0))
        end = time.monotonic() + LIMIT
        while path.stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert claims._age(path) < claims.STALE


def test_many_who_ask_at_once_get_one_claim(tmp_path: Path) -> None:
    """Also where all of them find one to take over."""
    claim_of(tmp_path, pid=dead_process())
    got: list[str] = []
    begin, done = threading.Barrier(8), threading.Event()

    def ask() -> None:
        begin.wait()
        try:
            with claimed(tmp_path, "run"):
                got.append("mine")
                done.wait(LIMIT)
        except UnderWay:
            got.append("theirs")

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for one in asking:
        one.start()
    end = time.monotonic() + LIMIT
    while len(got) < 8 and time.monotonic() < end:
        time.sleep(0.01)
    done.set()
    for one in asking:
        one.join()
    assert sorted(got) == ["mine"] + 7 * ["theirs"]


def start(folder: Path, *numbers: int) -> subprocess.Popen[str]:
    words = [sys.executable, shared_runs.__file__, str(folder), *map(str, numbers)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    where = {**environment(), **paths}
    return subprocess.Popen(words, env=where, stderr=subprocess.PIPE, text=True)


def folders_of(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/*/config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_processes_share_the_runs_of_a_folder(jobs: int, tmp_path: Path) -> None:
    seeds, steps = 6, 40
    processes = [start(tmp_path, seeds, steps, jobs) for _ in range(2)]
    told = [process.communicate(timeout=LIMIT)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert len(folders_of(tmp_path)) == seeds
    for folder in folders_of(tmp_path):
        trained = [row["step"] for row in read_metrics(folder) if row["kind"] == "train"]
        assert trained == sorted(set(trained))
        assert trained[-1] == steps
        assert "resumed" not in json.loads((folder / "environment.json").read_text())
    found = reproduce(recipe_of(seeds, steps), tmp_path, device="cpu")
    (arm,) = found.arms.values()
    assert [run.status for run in arm.runs] == ["done"] * seeds
    assert all(run.test is not None for run in arm.runs)
    assert not list(tmp_path.glob(f"*/{claims.FOLDER}/*"))


@pytest.mark.slow
def test_runs_of_a_killed_process_are_taken_over(tmp_path: Path) -> None:
    seeds, steps = 2, 300
    first = start(tmp_path, seeds, steps, 1)
    end = time.monotonic() + LIMIT
    while not any(map(read_metrics, folders_of(tmp_path))) and time.monotonic() < end:
        time.sleep(0.02)
    second = start(tmp_path, seeds, steps, 1)
    while len(folders_of(tmp_path)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    told = second.communicate(timeout=LIMIT)[1]
    assert second.returncode == 0, told
    again = start(tmp_path, seeds, steps, 1)
    assert again.wait(timeout=LIMIT) == 0
    (record,) = [read_record(path) for path in tmp_path.glob(f"*/{RESULTS}")]
    (arm,) = record.arms.values()
    assert [run.status for run in arm.runs] == ["done", "done"]
