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
from forked import entp, start, start_entp, together, torchrun
from small_runs import FLAGS, small_run

from entp.bench.measure import peak_resident
from entp.cli.main import main
from entp.config import ImportanceConfig, Run
from entp.training import checkpoint
from entp.training.checkpoint import find, load
from entp.training.cuda_graph import Stepper
from entp.training.loggers import read_metrics
from entp.training.trainer import Loop, train

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


def assert_same_losses(out: Path, whole: Path) -> None:
    """Bit for bit the same losses, as far as both runs go."""
    ours, others = ([row["loss"] for row in rows(one, "train")] for one in (out, whole))
    assert len(ours) > 3
    assert all(a == b for a, b in zip(ours, others, strict=False))


def without_seconds(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


@pytest.fixture(scope="module", autouse=True)
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps, trained here: what it imports, the forked processes have as well."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*TRAIN, "--steps=30", f"--out={out}"]) == 0
    return out


def test_run_killed_at_random_moments_equals_one_run(whole: Path, tmp_path: Path) -> None:
    words = [*TRAIN, "--steps=30", "--train.checkpoint-every=3"]
    rng = random.Random(0)
    kills = 0
    for attempt in range(3):
        resume = ["--resume"] if (tmp_path / "cut/config.json").exists() else []
        child = start_entp(*words, "--out=cut", *resume, cwd=tmp_path)
        child.wait_for_step(tmp_path / "cut", 8 * attempt + rng.randint(1, 7))
        time.sleep(rng.random() * 0.05)
        child.kill(signal.SIGKILL)
        kills += child.wait()[0] == -signal.SIGKILL
    assert kills >= 2  # it really was killed in the middle
    code, said = entp(*words, "--out=cut", "--resume", cwd=tmp_path)
    assert code == 0, said
    assert_same(whole, tmp_path / "cut")
    found = [without_seconds(rows(out, "eval")) for out in (whole, tmp_path / "cut")]
    assert found[0] == found[1]
    assert find(whole).name == find(tmp_path / "cut").name
    assert len(list((tmp_path / "cut/checkpoints").glob("best-*"))) == 1
    assert not list((tmp_path / "cut/checkpoints").glob(".*"))  # leftovers of the kills are gone


def test_killed_run_has_the_checkpoint_of_the_clock(whole: Path, tmp_path: Path) -> None:
    words = [*TRAIN, "--train.checkpoint-every=1000000", "--train.checkpoint-seconds=0.1"]
    child = start_entp(*words, "--steps=1000000", "--out=run", cwd=tmp_path)
    end = time.monotonic() + 120
    while not list((tmp_path / "run").glob("checkpoints/step-*")) and time.monotonic() < end:
        time.sleep(0.01)
    child.kill(signal.SIGKILL)
    assert child.wait()[0] == -signal.SIGKILL
    step = int(find(tmp_path / "run", "last").name.removeprefix("step-"))
    code, said = entp(*words, f"--steps={step + 2}", "--out=run", "--resume", cwd=tmp_path)
    assert code == 0, said
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == list(range(1, step + 3))
    assert_same_losses(tmp_path / "run", whole)


def test_two_processes_save_by_the_clock_of_the_first(tmp_path: Path) -> None:
    """At one step: the other is asked for nothing, and goes on."""
    rare = {"eval_every": 10**6, "checkpoint_every": 10**6, "max_seconds": 1.0}

    def work() -> None:
        saved = Loop.save

        def told(loop: Loop) -> None:
            print("saved", loop.state.step)
            saved(loop)

        Loop.save = told  # type: ignore[method-assign]
        seconds = 0.1 if os.environ["RANK"] == "0" else 1e9
        run = small_run(steps=10**6, train={**rare, "checkpoint_seconds": seconds})
        train(run, "run", device="cpu", quiet=True)

    ends = together(work, tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    one, other = ([w for w in said.splitlines() if w.startswith("saved")] for _, said in ends)
    assert one == other
    assert len(one) >= 2  # by the clock, and at the end


def test_best_of_an_abandoned_trajectory_does_not_win(tmp_path: Path) -> None:
    """Killed after a better best was written and before its checkpoint; resumed with fewer
    steps, the run never comes to that best."""
    every = {"monitor": "loss", "eval_every": 1, "checkpoint_every": 5}
    whole = checkpoint.save_checkpoint

    def killed(out: Path, step: int, *rest: Any) -> Path:
        if step == 10 and rest[2] is not None:  # with the trainer's state
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(out, step, *rest)

    def work() -> None:
        checkpoint.save_checkpoint = killed  # type: ignore[assignment]
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
def test_signal_saves_and_says_so(whole: Path, tmp_path: Path, number: signal.Signals) -> None:
    child = start_entp(*TRAIN, "--steps=2000", "--out=run", cwd=tmp_path)
    child.wait_for_step(tmp_path / "run", 3)
    for _ in range(
        2
    ):  # at once again it is the same one: `timeout` signals a process and its group
        child.kill(number)
    code, said = child.wait()
    assert code == 128 + number
    assert f"stopped by {number.name} and saved; continue with --resume" in said
    assert "Traceback" not in said
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    more = f"--steps={int(saved.name.removeprefix('step-')) + 2}"
    code, said = entp(*TRAIN, more, "--out=run", "--resume", cwd=tmp_path)
    assert code == 0, said
    assert_same_losses(tmp_path / "run", whole)


def test_signal_saves_though_nobody_reads_what_is_said(whole: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches all of `entp train ... 2>&1 | tee log`, and `tee` may be gone first."""

    def work() -> int:
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(reading)
        return main([*TRAIN, "--steps=2000", "--train.eval-every=2000", "--out=run"])

    child = start(work, tmp_path)
    child.wait_for_step(tmp_path / "run", 3)
    child.kill(signal.SIGINT)
    code, said = child.wait()
    assert (code, "saved; continue with --resume" in said) == (128 + signal.SIGINT, True), said
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert rows(tmp_path / "run", "train")[-1]["step"] == int(saved.name.removeprefix("step-"))
    assert_same_losses(tmp_path / "run", whole)


def test_full_disk_keeps_the_last_good_checkpoint(whole: Path, tmp_path: Path) -> None:
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
    assert_same_losses(tmp_path / "run", whole)


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_two_processes_give_the_losses_of_one(tmp_path: Path, mode: str) -> None:
    words = [*TRAIN, f"--mode={mode}", "--steps=6"]
    assert main([*words, f"--out={tmp_path / 'one'}"]) == 0
    ends = together(lambda: main([*words, "--out=two"]), tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    one, both = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [r["step"] for r in one] == [r["step"] for r in both]  # one writer: no line twice
    for a, b in zip(one, both, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    assert json.loads((tmp_path / "two/environment.json").read_text())["processes"] == 2
    for line in ("all steps done", f"count3 {mode}: step 6/6"):  # one process speaks
        assert sum(said.count(line) for _, said in ends) == 1


def test_two_processes_stop_together_at_a_signal_to_one(tmp_path: Path) -> None:
    """Whoever gets it: the checkpoint is the same step's, and resuming goes on from there."""

    def work() -> None:
        step = Stepper.__call__

        def signalled(stepper: Stepper, *rest: Any) -> Any:
            if os.environ["RANK"] == "1" and stepper.state.step == 6:
                signal.raise_signal(signal.SIGTERM)
            return step(stepper, *rest)

        Stepper.__call__ = signalled  # type: ignore[method-assign,assignment]
        result = train(small_run(steps=10**5), "run", device="cpu", quiet=True)
        print(result.step, result.reason)

    ends = together(work, tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    (first, one), (second, other) = (
        said.strip().splitlines()[-1].split(" ", 1) for _, said in ends
    )
    assert first == second == "8"  # it is told with the next step's gradients
    assert one == "stopped by another process and saved; continue with --resume"
    assert other == "stopped by SIGTERM and saved; continue with --resume"
    assert find(tmp_path / "run", "last").name == "step-00000008"


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
    """Also where log_every is not reached. Resumed, there is nothing left to do."""
    rare = {"eval_every": 10**6, "checkpoint_every": 10**6, "log_every": 10**6}
    run = small_run(steps=10**6, train={**rare, "monitor": "loss", "max_seconds": 0.3})
    out = tmp_path / "run"

    def work(resume: bool) -> tuple[str, int]:
        result = train(run, out, device="cpu", quiet=True, resume=resume)
        return result.reason, result.step

    def launch(resume: bool) -> None:
        one, other = torchrun(work, resume).values()
        assert one == other == ("0.3 seconds are over", read_metrics(out)[-1]["step"])

    code, said = start(lambda: launch(False), tmp_path).wait()
    assert code == 0, said
    trained, measured = read_metrics(out)
    assert (trained["kind"], measured["kind"]) == ("train", "eval")
    assert trained["step"] == measured["step"] >= 1
    assert trained["seconds"] >= 0.3
    assert {p.name for p in (out / "checkpoints").iterdir()} == {
        f"step-{trained['step']:08d}",
        f"best-{trained['step']:08d}",
    }
    before = (out / "metrics.jsonl").read_bytes()
    code, said = start(lambda: launch(True), tmp_path).wait()
    assert code == 0, said
    assert (out / "metrics.jsonl").read_bytes() == before


def test_token_budget_bounds_memory(tmp_path: Path) -> None:
    """All prefixes at once would take 180 MB."""
    words = ["train", "match3", "--task.length=192", "--batch-size=2", "--steps=1"]
    words += ["--model.width=24", "--model.heads=1", "--train.token-budget=4096"]
    words += ["--train.eval-batches=1", "--device=cpu", "--out=run"]

    def work() -> int:
        before = peak_resident()
        code = main(words)
        print("more", peak_resident() - before)
        return code

    code, said = start(work, tmp_path).wait()
    assert code == 0, said
    assert int(said.split("more")[1]) < 100e6
