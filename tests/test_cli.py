"""The command line as a person meets it: what works, and one sentence for what does not."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import FLAGS, entp, environment

from entp import __version__
from entp.cli.main import main

TRAIN = ["train", "count3", *FLAGS, "--batch=8", "--steps=6", "--train.eval-every=3"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run in runs/first."""
    folder = tmp_path_factory.mktemp("cli")
    done = entp(*TRAIN, "--mode=entp", "--out=runs/first", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "all steps done: step 6" in done.stdout
    return folder


def test_help_and_version_are_quick_and_need_no_torch() -> None:
    """In less than 2 s; what else the machine does may slow a start down, but not every one of
    twenty."""
    code = "import sys; from entp.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    command, seconds = [sys.executable, "-c", code], [math.inf]
    while min(seconds) >= 2 and len(seconds) <= 20:
        start = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(), timeout=300, check=True
        )
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2
    assert {
        "demo",
        "train",
        "evaluate",
        "generate",
        "reproduce",
        "bench",
        "theory",
        "tasks",
    } <= set(done.stdout.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"entp {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        "train count3",
        "evaluate x",
        "generate x",
        "reproduce count3",
        "bench",
        "bench step",
        "bench generate",
        "bench scaling",
        "theory",
        "theory statements",
        "theory rasp",
        "theory count3-tradeoff",
        "theory compiled",
        "theory complexity",
        "demo",
    ],
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert f"usage: entp {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "evaluate", "generate", "export", "reproduce"])
def test_help_without_a_name_says_where_the_options_are(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("--help", "-h"):
        with pytest.raises(SystemExit):
            main([command, word])
        assert re.search(
            rf"^options: entp {command} [A-Z_]+ --help$", capsys.readouterr().out, re.MULTILINE
        )


def test_bench_lists_its_three(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert {"step", "generate", "scaling"} <= {
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()
    }


def test_train_offers_the_promised_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "count3", "--help"])
    text = capsys.readouterr().out
    flags = "--mode --size --steps --batch --seed --device --out --resume --optim.max-lr --optim.min-lr --train.checkpoint-every"
    assert all(flag in text for flag in flags.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("frain", "unknown command 'frain': allowed are demo, train"),
        ("train", "needs a task: allowed are count2, count3"),
        ("train cuont3", "unknown task 'cuont3': allowed are .* Did you mean count3"),
        ("train count3 --mode enpt", "'enpt' .* Expected one of .*'entp', 'decoder', 'prefix-lm'"),
        ("train count3 --size huge", "'huge' .* Expected one of .*'medium'"),
        ("train count3 --sise small", "Unrecognized options: --sise"),
        ("train count3 --optim.foo 1", r"Unrecognized options: --optim\.foo"),
        (
            "train count3 --steps many",
            "entp: 'many' is not a whole number. Expected --steps INT Optimizer steps",
        ),
        (
            "reproduce count3 --tiny --seed one",
            "entp: 'one' is not a whole number. Expected --seed INT Train with",
        ),
        (
            "reproduce count3 --tiny --minutes ten",
            "entp: 'ten' is not a number. Expected --minutes FLOAT Most",
        ),
        ("train count3 --steps 0", "steps is 0"),
        (
            "train count3 --optim.min-lr 6e-4 --optim.max-lr 6e-5",
            r"optim\.min_lr 0\.0006 is above optim\.max_lr 6e-05: swapped\?",
        ),
        ("train count3 --model.heads 5", r"model\.heads 5 does not divide model\.width 192"),
        ("train match3 --mode prefix", "mode prefix needs a task with a prefix"),
        ("train count3 --device tpu", "device 'tpu'"),
        ("train count3 --out runs/first", "already holds a run: continue it with --resume"),
        ("train count3 --out runs/first --resume --batch 9", "batch was 8 and is now 9"),
        ("train count3 --out runs/none --resume", "no run to resume"),
        ("train nowhere:Task", "task 'nowhere:Task' cannot be imported"),
        ("evaluate", "needs a run folder"),
        ("evaluate runs/none", "no run folder runs/none"),
        ("evaluate runs", "holds no complete checkpoint"),
        (
            "generate runs/first --prompt 3,1,64",
            "64, outside the vocabulary of count3: allowed are 0 to 9",
        ),
        ("generate runs/first --prompt one", "not a list of whole numbers"),
        ("generate runs/first --max-new-tokens 100", "positions"),
        ("generate runs/first --temperature -1", "temperature"),
        (
            "reproduce figure9",
            "unknown recipe 'figure9': allowed are count3, count3-depth, count3-longer, "
            "count3-rates, match3",
        ),
        (
            "reproduce nowhere:RECIPE",
            "recipe 'nowhere:RECIPE' cannot be imported: No module named 'nowhere'",
        ),
        ("reproduce entp.tasks.base:TASKS", "it must be an entp.experiments.recipe.Recipe"),
        ("reproduce count3 --tiny --only", "--only names no arm: give one or more"),
        (
            "reproduce count3 --tiny --only None",
            "unknown arm of count3-tiny 'None': allowed are ENTP medium",
        ),
        (
            "reproduce count3 --tiny --only none",
            "unknown arm of count3-tiny 'none': allowed are ENTP medium",
        ),
        (
            "reproduce match3 --tiny --only none",
            "ENTP medium, 'decoder medium, integers below 128', 'ENTP",
        ),
        (
            "train count3 --out runs/first/config.json/x",
            "config.json.* cannot be used: Not a directory",
        ),
        ("reproduce count3 --tiny --out runs/first/config.json", "cannot be used: Not a directory"),
        ("demo --steps 4 --out runs/first/config.json", "cannot be used: Not a directory"),
        ("bench --out nowhere/x.json", "in a folder that does not exist: make nowhere first"),
        ("evaluate runs/first --batches 0", "batches is 0: at least 1 is needed"),
        (
            "theory nothing",
            "unknown part of theory 'nothing': allowed are statements, rasp, count3-tradeoff, "
            "compiled",
        ),
        ("theory rasp count4 --input 1", "invalid choice 'count4' for argument '--program'"),
        (
            "theory rasp count3 --input 1,x",
            "--input '1,x' is not a list of whole numbers: write them like",
        ),
        (
            "theory rasp count3-printed --input 3,1,4",
            "count3-printed takes whole numbers from 0 to n - 1 = 2",
        ),
        ("theory count3-tradeoff --n-max 64", "--n-max is 64: allowed are 128 to 4096"),
        ("theory count3-tradeoff --n-max 4097", "--n-max is 4097: allowed are 128 to 4096"),
        ("theory compiled --ratio 0", "--ratio is 0: it must be at least 1"),
        (
            "theory complexity --out nowhere/x.json",
            "in a folder that does not exist: make nowhere first",
        ),
        ("theory count3-tradeoff --seed -1", "--seed is -1: it must be at least 0"),
        ("theory compiled --n-max 0", "--n-max is 0: it must be at least 1"),
        ("theory compiled --n-max 5000", "--n-max is 5000: allowed are 1 to 4096"),
        ("theory compiled --seed -1", "--seed is -1: it must be at least 0"),
        ("demo --seed -1", "seed -1 is outside 0 to 2"),
        ("reproduce count3 --tiny --jobs 0", "--jobs is 0: it must be at least 1"),
        (
            "train count3 --train.max-seconds 0",
            "train.max_seconds is 0: it must be above 0, or None",
        ),
        ("train count3 --optim.decay seconds", "optim.decay seconds needs train.max_seconds"),
        ("bench walk", "unknown benchmark 'walk': allowed are step, generate, scaling"),
        (
            "bench step --shapes count4",
            "unknown shape 'count4': allowed are count3, text, small-deep, small, paper",
        ),
        ("bench --shapes small --length 9", "--shapes small decides what --length would"),
        (
            "bench --contenders loop",
            "unknown contender 'loop': allowed are reference, packed, triton, decoder",
        ),
        ("bench generate --total 4", "--total is 4: it must be above --prompt 16"),
        ("bench scaling --lengths 8,16", "at least three different lengths"),
        ("bench scaling --out speed.txt", "speed.txt must end in .json"),
        ("bench --repeats 0", "--repeats is 0: it must be at least 1"),
        (
            "train count3 --model.width 1000000000000",
            r"model\.width is 1000000000000: it must be at least 1, at most 100000;",
        ),
        (
            "train count3 --model.width 100000 --model.heads 1",
            r"width 100000, .* has 3\.6e\+11 weights: it must be at most",
        ),
        (
            "train count3 --model.layers 1000000000000000000000",
            r"model\.layers is 10+: it must be at most 1e\+12",
        ),
        (
            "train count3 --model.layers 20000",
            r"model\.layers is 20000: it must be at least 1, at most 10000",
        ),
        ("train count3 --optim.max-lr 1e38", r"optim\.max_lr is 1e\+38: it must be at most 1e\+12"),
        ("train count3 --optim.max-lr inf", r"optim\.max_lr is inf: it must be a finite number"),
        (f"train count3 --steps 1{'0' * 400}", r"steps is 10+: it must be at most 1e\+12"),
        (
            "train count3 --batch 1000000000000",
            "not enough memory for a model, batch or task of this size",
        ),
        (
            "train count3 --task.values 100000000000000000000",
            r"task\.values is 10+: it must be at most 1e\+12",
        ),
        (
            "train count3 --task.values 1000000000000",
            r"vocab 1000000000000, .* make one of them smaller",
        ),
        (
            "train match3 --task.modulus 100000000000000000000",
            r"task\.modulus is 10+: it must be at most",
        ),
        ("train addition --task.split-seed -1", r"task\.split_seed is -1: it must be at least 0"),
        (
            "reproduce count3 --tiny --minutes inf",
            r"--minutes is inf: it must be above 0 and at most 1e\+09; leave it out",
        ),
        ("reproduce count3 --tiny --minutes nan", "--minutes is nan: it must be above 0"),
        ("tasks count9", "unknown task 'count9'"),
        ("tasks count3 --length 3", "prompt_length 16 must be at least 1 and below"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    words: str,
    message: str,
    first: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    monkeypatch.chdir(first)
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert captured.err.startswith("entp: ")
    assert [line.startswith("entp: ") for line in captured.err.splitlines()] == [True]
    assert "Traceback" not in captured.err


def test_sequence_longer_than_positions_is_a_sentence(first: Path, tmp_path: Path) -> None:
    """A run folder whose config was changed by hand."""
    config = json.loads((first / "runs/first/config.json").read_text())
    config["model"]["context_length"] = 5
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    done = entp("train", "count3", "--out=run", "--resume", cwd=tmp_path)
    assert done.returncode == 2
    assert "model.context_length 5 is shorter than the sequences of count3, 10" in done.stderr


def test_a_half_written_config_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"task": {"na')
    done = entp("train", "count3", "--out=run", "--resume", cwd=tmp_path)
    assert done.returncode == 2
    assert "config.json cannot be read" in done.stderr


def test_evaluate_prints_a_table_and_json(first: Path) -> None:
    table = entp("evaluate", "runs/first", "--batches=2", cwd=first)
    assert table.returncode == 0, table.stderr
    assert "count3, mode entp, 16 sequences of test" in table.stdout
    assert "sequence_accuracy" in table.stdout
    values = json.loads(entp("evaluate", "runs/first", "--batches=2", "--json", cwd=first).stdout)
    assert values["n"] == 16
    reference = json.loads(
        entp(
            "evaluate", "runs/first", "--batches=2", "--json", "--impl=reference", cwd=first
        ).stdout
    )
    assert values["loss"] == pytest.approx(reference["loss"], rel=1e-5)


def test_generate_continues_prompts(first: Path) -> None:
    done = entp(
        "generate", "runs/first", "--prompt", "3 1 4 1", "3, 1, 4", "--max-new-tokens=3", cwd=first
    )
    assert done.returncode == 0, done.stderr
    lines = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [len(line) for line in lines] == [7, 6]
    assert lines[0][:4] == [3, 1, 4, 1]
    fresh = entp("generate", "runs/first", cwd=first).stdout.splitlines()
    assert [len(line.split()) for line in fresh] == [10, 10, 10]


SORT = """
from dataclasses import dataclass
from typing import Any, ClassVar
import numpy as np
from entp.tasks import Batch, Split, Task

@dataclass(frozen=True)
class Sort(Task):
    name: ClassVar[str] = "sort"
    about: ClassVar[str] = "six numbers, then the same in order"

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 10, "context_length": 11}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).integers(0, 10, (size, 6))
        whole = np.concatenate([x, np.sort(x, 1)], 1)
        y = whole[:, 1:].copy()
        y[:, :5] = -100
        return Batch(whole[:, :-1], y)
"""


def test_generate_gives_the_whole_answer_of_a_sequence_that_fills_the_positions(
    tmp_path: Path,
) -> None:
    """Six numbers come back, though the model has positions for eleven tokens: the last one is
    never read."""
    (tmp_path / "sort.py").write_text(SORT)
    small = [
        "--model.layers=2",
        "--model.heads=2",
        "--model.width=16",
        "--batch=8",
        "--steps=2",
        "--device=cpu",
    ]
    assert entp("train", "sort:Sort", *small, "--out=run", cwd=tmp_path).returncode == 0
    done = entp("generate", "run", "--task", "sort:Sort", "--prompt", "3 1 4 1 5 9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 12


def test_options_of_the_model_train_save_and_load(tmp_path: Path) -> None:
    """A model like Llama's, looped: trained, evaluated and continued."""
    llama = [
        "--model.position_embedding=rotary",
        "--model.norm=rms",
        "--model.activation=swiglu",
        "--model.kv-heads=1",
        "--model.loops=2",
    ]
    llama += ["--model.bias=False", "--model.tied-head=False", "--optim.name=muon"]
    done = entp(*TRAIN, *llama, "--out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = entp("evaluate", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert entp("generate", "run", cwd=tmp_path).returncode == 0


def test_resume_takes_the_settings_of_the_run(tmp_path: Path) -> None:
    """Only what changes need be said again."""
    assert entp(*TRAIN, "--seed=3", "--out=run", cwd=tmp_path).returncode == 0
    done = entp("train", "count3", "--resume", "--out", "run", "--steps", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all steps done: step 8" in done.stdout
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert (saved["seed"], saved["steps"], saved["model"]["width"]) == (3, 8, 16)


def test_tasks_lists_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("count2", "count3", "match3", "addition"))
    assert main(["tasks", "count3", "--length", "8", "--seed-length", "4"]) == 0
    drawn = capsys.readouterr().out
    assert "input " in drawn
    assert "target  .  .  ." in drawn


CLOCK = ["--steps=1000000", "--train.max-seconds=3", "--train.log-every=1"]


@pytest.mark.parametrize("clock", [[], CLOCK])
def test_a_progress_bar_on_a_terminal(clock: list[str], tmp_path: Path) -> None:
    """A real pseudo-terminal: the bar is redrawn with carriage returns and shows the steps, or
    those that time allows."""
    import fcntl
    import os
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, "-m", "entp", *TRAIN, *clock, "--out=run"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=slave, env=environment()
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:  # the other end is closed
            break
    os.close(master)
    assert process.wait(timeout=300) == 0
    assert b"\r" in shown
    assert b"count3 entp: 100%" in shown
    shown_steps = re.findall(rb"(\d+)/(\d+) \[", shown)
    assert shown_steps[-1] == (b"6", b"6") or (clock and shown_steps[-1][0] == shown_steps[-1][1])


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    done = entp(*TRAIN, "--out=run", cwd=tmp_path)
    assert "count3 entp: step 3/6  loss" in done.stderr
    assert "\r" not in done.stderr
    short = entp(*TRAIN, *CLOCK, "--out=short", cwd=tmp_path)
    expected = [
        int(steps) for steps in re.findall(r"count3 entp: step \d+/about (\d+)  loss", short.stderr)
    ]
    assert expected  # not a million steps, which would take days
    assert max(expected) < 100_000


@pytest.mark.parametrize("words", [["--help"], ["tasks", "count3"]])
def test_a_reader_that_stops_reading_is_no_error(words: list[str], tmp_path: Path) -> None:
    """As in `entp --help | head -1`: the pipe's other end is closed before anything is written."""
    code = "import sys; from entp.cli.main import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    os.close(write)
    assert "Traceback" not in done.stderr
    assert done.returncode in (120, 141)  # Python's own for what is left at the end, or ours
