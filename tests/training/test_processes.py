"""Real processes: killed, interrupted, out of disk, and several at once."""

from __future__ import annotations

import json
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from small_runs import FLAGS, entp, run_python, start_entp, wait_for_step

from entp import load
from entp.training.loggers import read_metrics

TRAIN = [
    "train",
    "count3",
    *FLAGS,
    "--batch_size=8",
    "--optim.warmup_steps=3",
    "--train.log-every=1",
    "--train.eval-every=10",
]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "entp"]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load(out, "last").state_dict()


def assert_same(a: Path, b: Path) -> None:
    """Bit for bit the same weights."""
    x, y = weights(a), weights(b)
    assert x.keys() == y.keys()
    assert all(torch.equal(x[k], y[k]) for k in x)


def evaluations(out: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(out) if row["kind"] == "eval"]


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_one_run(tmp_path: Path) -> None:
    words = [*TRAIN, "--steps=100", "--train.checkpoint-every=3"]
    assert entp(*words, "--out=whole", cwd=tmp_path).returncode == 0
    rng = random.Random(0)
    kills = 0
    for attempt in range(4):
        resume = ["--resume"] if (tmp_path / "cut/config.json").exists() else []
        process = start_entp(*words, "--out=cut", *resume, cwd=tmp_path)
        wait_for_step(tmp_path / "cut", 10 * attempt + rng.randint(1, 9), process)
        time.sleep(rng.random() * 0.05)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
    assert kills >= 3  # it really was killed in the middle
    done = entp(*words, "--out=cut", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "whole", tmp_path / "cut")
    assert evaluations(tmp_path / "whole") == evaluations(tmp_path / "cut")
    assert not list((tmp_path / "cut/checkpoints").glob(".*"))  # leftovers of the kills are gone


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    words = [*TRAIN, "--steps=2000", "--out=run"]
    process = start_entp(*words, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 3, process)
    for _ in range(
        2
    ):  # one that comes again at once is the same: `timeout` sends its own to a process and to its group
        process.send_signal(number)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name} and saved; continue with --resume" in stdout
    assert "Traceback" not in stderr
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    done = entp(*words[:-2], f"--steps={step + 2}", "--out=run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert entp(*words[:-2], f"--steps={step + 2}", "--out=whole", cwd=tmp_path).returncode == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


def limit_file_size() -> None:
    """Writes beyond 6000 bytes fail, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    words = [*TRAIN, "--train.checkpoint-every=5"]
    assert entp(*words, "--steps=5", "--out=run", cwd=tmp_path).returncode == 0
    full = entp(
        *words, "--steps=20", "--out=run", "--resume", cwd=tmp_path, preexec_fn=limit_file_size
    )
    assert full.returncode == 2
    assert "no space to write" in full.stderr
    assert "the last good checkpoint is run/checkpoints/step-00000005" in full.stderr
    assert "Traceback" not in full.stderr
    assert [p.name for p in (tmp_path / "run/checkpoints").glob("*step*")] == ["step-00000005"]
    assert entp(*words, "--steps=20", "--out=run", "--resume", cwd=tmp_path).returncode == 0
    assert entp(*words, "--steps=20", "--out=whole", cwd=tmp_path).returncode == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_two_processes_give_the_losses_of_one(tmp_path: Path, mode: str) -> None:
    words = [*TRAIN, f"--mode={mode}", "--steps=12", "--device=cpu"]
    assert entp(*words, "--out=one", cwd=tmp_path).returncode == 0
    two = run_python(*TWO, *words, "--out=two", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    one, both = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [r["step"] for r in one] == [r["step"] for r in both]  # one writer: no line twice
    for a, b in zip(one, both, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    assert json.loads((tmp_path / "two/environment.json").read_text())["processes"] == 2
    assert two.stdout.count("all steps done") == 1


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--optim.select", "--optim.decay=seconds"])
def test_what_is_for_one_process_says_so(tmp_path: Path, flag: str) -> None:
    words = [*TRAIN, "--steps=2", "--device=cpu", "--train.max-seconds=9", flag]
    two = run_python(*TWO, *words, "--out=two", cwd=tmp_path)
    assert two.returncode != 0
    assert f"{flag[2:].replace('=', ' ')} is for one process" in two.stderr
    assert not (tmp_path / "two").exists()


@pytest.mark.slow
def test_small_at_256_tokens_trains_in_3_gb(tmp_path: Path) -> None:
    """Small, T = 256, batch 4, every prefix: one whole step of `entp train` in bounded memory."""
    words = [
        "train",
        "match3",
        "--task.length=256",
        "--batch_size=4",
        "--steps=1",
        "--train.eval-batches=1",
        "--out=run",
    ]
    code = (
        "import sys; from entp.cli.main import main; from entp.bench.measure import peak_resident\n"
        "status = main(sys.argv[1:]); print('peak', peak_resident()); sys.exit(status)"
    )
    done = run_python("-c", code, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("peak")[1]) < 3e9
