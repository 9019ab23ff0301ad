"""Real processes: killed, interrupted, out of disk, and several at once."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import entp, start, start_entp, together
from small_runs import FLAGS, run_python, small_run

from entp.bench.measure import peak_resident
from entp.cli.main import main
from entp.config import ImportanceConfig, Run
from entp.training import checkpoint
from entp.training.checkpoint import find, load
from entp.training.loggers import read_metrics
from entp.training.trainer import train

TRAIN = [
    "train",
    "count3",
    *FLAGS,
    "--batch-size=8",
    "--optim.warmup-steps=3",
    "--train.log-every=1",
    "--train.eval-every=10",
    "--device=cpu",
]


def assert_same(a: Path, b: Path) -> None:
    """Bit for bit the same weights."""
    x, y = (load(out, "last").state_dict() for out in (a, b))
    assert x.keys() == y.keys()
    assert all(torch.equal(x[k], y[k]) for k in x)


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(out) if row["kind"] == kind]


def without_seconds(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


@pytest.fixture(scope="module", autouse=True)
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps, trained here: what it imports, the forked processes have as well."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*TRAIN, "--steps=60", f"--out={out}"]) == 0
    return out


def test_run_killed_at_random_moments_equals_one_run(whole: Path, tmp_path: Path) -> None:
    words = [*TRAIN, "--steps=60", "--train.checkpoint-every=3"]
    rng = random.Random(0)
    kills = 0
    for attempt in range(4):
        resume = ["--resume"] if (tmp_path / "cut/config.json").exists() else []
        child = start_entp(*words, "--out=cut", *resume, cwd=tmp_path)
        child.wait_for_step(tmp_path / "cut", 10 * attempt + rng.randint(1, 9))
        time.sleep(rng.random() * 0.05)
        child.kill(signal.SIGKILL)
        kills += child.wait()[0] == -signal.SIGKILL
    assert kills >= 3  # it really was killed in the middle
    code, said = entp(*words, "--out=cut", "--resume", cwd=tmp_path)
    assert code == 0, said
    assert_same(whole, tmp_path / "cut")
    found = [without_seconds(rows(out, "eval")) for out in (whole, tmp_path / "cut")]
    assert found[0] == found[1]
    assert find(whole).name == find(tmp_path / "cut").name
    assert len(list((tmp_path / "cut/checkpoints").glob("best-*"))) == 1
    assert not list((tmp_path / "cut/checkpoints").glob(".*"))  # leftovers of the kills are gone


def test_best_of_an_abandoned_trajectory_does_not_win(tmp_path: Path) -> None:
    """Killed after a better best was written and before its checkpoint; resumed with fewer
    steps, the run never comes to that best."""
    every = {"monitor": "loss", "eval_every": 1, "checkpoint_every": 5}
    whole = checkpoint.save_checkpoint

    def killed(out: Path, step: int, *rest: Any) -> Path:
        if step == 10 and rest[-1] is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(out, step, *rest)

    def work() -> None:
        checkpoint.save_checkpoint = killed
        train(small_run(train=every), "run", device="cpu", quiet=True)

    out = tmp_path / "run"
    assert start(work, tmp_path).wait()[0] == -signal.SIGKILL
    names = {p.name for p in (out / "checkpoints").iterdir()}
    assert names == {"step-00000005", "best-00000005", "best-00000010"}
    result = train(small_run(steps=7, train=every), out, device="cpu", quiet=True, resume=True)
    assert result.best["step"] == min(rows(out, "eval"), key=lambda row: row["loss"])["step"] <= 7
    assert find(out).name == f"best-{result.best['step']:08d}"
    assert len(list((out / "checkpoints").glob("best-*"))) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    child = start_entp(*TRAIN, "--steps=2000", "--out=run", cwd=tmp_path)
    child.wait_for_step(tmp_path / "run", 3)
    for _ in range(2):  # at once again it is the same one: `timeout` signals a process and its group
        child.kill(number)
    code, said = child.wait()
    assert code == 128 + number
    assert f"stopped by {number.name} and saved; continue with --resume" in said
    assert "Traceback" not in said
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    words = [*TRAIN, f"--steps={int(saved.name.removeprefix('step-')) + 2}"]
    for more in (["--out=run", "--resume"], ["--out=whole"]):
        code, said = entp(*words, *more, cwd=tmp_path)
        assert code == 0, said
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    """The limit on file size makes real writes fail half-way, as a full disk does."""
    words = [*TRAIN, "--train.checkpoint-every=5"]

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
        return main([*words, "--steps=20", "--out=run", "--resume"])

    assert entp(*words, "--steps=5", "--out=run", cwd=tmp_path)[0] == 0
    code, said = start(limited, tmp_path).wait()
    assert code == 2
    assert "no space to write" in said
    assert "the last good checkpoint is run/checkpoints/step-00000005" in said
    assert "Traceback" not in said
    assert [p.name for p in (tmp_path / "run/checkpoints").glob("*step*")] == ["step-00000005"]
    assert entp(*words, "--steps=20", "--out=run", "--resume", cwd=tmp_path)[0] == 0
    assert entp(*words, "--steps=20", "--out=whole", cwd=tmp_path)[0] == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_two_processes_give_the_losses_of_one(tmp_path: Path, mode: str) -> None:
    words = [*TRAIN, f"--mode={mode}", "--steps=12"]
    code, said = entp(*words, "--out=one", cwd=tmp_path)
    assert code == 0, said
    ends = together(lambda: main([*words, "--out=two"]), tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    one, both = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [r["step"] for r in one] == [r["step"] for r in both]  # one writer: no line twice
    for a, b in zip(one, both, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    assert json.loads((tmp_path / "two/environment.json").read_text())["processes"] == 2
    assert sum(said.count("all steps done") for _, said in ends) == 1


def test_two_processes_stop_together_at_a_signal_to_one(tmp_path: Path) -> None:
    """Whoever gets it: the checkpoint is the same step's, and resuming goes on from there."""

    def work() -> None:
        if os.environ["RANK"] == "1":
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
        result = train(small_run(steps=10**5), "run", device="cpu", quiet=True)
        print(result.step, result.reason)

    ends = together(work, tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    (first, one), (second, other) = (said.strip().splitlines()[-1].split(" ", 1) for _, said in ends)
    assert first == second
    assert one == "stopped by another process and saved; continue with --resume"
    assert other == "stopped by SIGTERM and saved; continue with --resume"
    assert find(tmp_path / "run", "last").name == f"step-{int(first):08d}"


ONE_PROCESS: dict[str, tuple[dict[str, Any], str]] = {
    "importance": ({"importance": ImportanceConfig(8, "decoder")}, "importance is for one process"),
    "clock": (
        {"optim": {"decay_by": "seconds"}, "train": {"max_seconds": 9.0}},
        "optim.decay_by seconds is for one process",
    ),
}


@pytest.mark.parametrize(("changes", "told"), ONE_PROCESS.values(), ids=ONE_PROCESS.keys())
def test_settings_for_one_process_are_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    run: Run = small_run(**changes)
    ends = together(lambda: train(run, "two", device="cpu", quiet=True), tmp_path)
    assert all(code == 70 and told in said for code, said in ends), ends
    assert not (tmp_path / "two").exists()


def test_torchrun_measures_and_saves_when_the_time_is_over(tmp_path: Path) -> None:
    """The one test with torchrun itself. Resumed, there is nothing left to do."""
    words = [*TRAIN, "--steps=1000000", "--train.max-seconds=0.5", "--train.eval-every=1000000"]
    words += ["--train.monitor=loss", "--out=run"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = run_python(*torchrun, "-m", "entp", *words, cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("0.5 seconds are over") == 1
    out = tmp_path / "run"
    (measured,), last = rows(out, "eval"), rows(out, "train")[-1]
    assert measured["step"] == last["step"]
    assert {p.name for p in (out / "checkpoints").iterdir()} == {
        f"step-{last['step']:08d}",
        f"best-{last['step']:08d}",
    }
    before = (out / "metrics.jsonl").read_bytes()
    ends = together(lambda: main([*words, "--resume"]), tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    assert (out / "metrics.jsonl").read_bytes() == before


def test_small_model_at_256_tokens_trains_in_3_gb(tmp_path: Path) -> None:
    """Small, T = 256, batch 4, every prefix: one whole step of `entp train` in bounded memory."""
    words = ["train", "match3", "--task.length=256", "--batch-size=4", "--steps=1"]
    words += ["--train.eval-batches=1", "--device=cpu", "--out=run"]

    def work() -> int:
        code = main(words)
        print("peak", peak_resident())
        return code

    code, said = start(work, tmp_path).wait()
    assert code == 0, said
    assert int(said.split("peak")[1]) < 3e9
