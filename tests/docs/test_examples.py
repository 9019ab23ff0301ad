"""The examples of the documents run as written, with fewer steps where they train."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from documents import DOCS, EXAMPLES, code_blocks, commands_in

from entp.cli.main import main
from entp.experiments.recipe import find_recipe
from entp.results.store import read_record
from entp.training.checkpoint import load_run
from entp.training.plan import Plan

ADD_A_TASK = DOCS / "add-a-task.md"
QUICK = "--steps 5 --model.width 48 --device cpu"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of docs/add-a-task.md, which only the command line looks into."""
    for name, source in zip(EXAMPLES, code_blocks(ADD_A_TASK, "python"), strict=True):
        (tmp_path / name).write_text(source)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def output_of(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What an `entp ...` line prints."""
    program, *words = shlex.split(line)
    assert program == "entp"
    code = main(words)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


@pytest.mark.usefixtures("folder")
def test_task_in_30_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(Path("parity.py").read_text().splitlines()) <= 30
    draw, train, evaluate = code_blocks(ADD_A_TASK, "sh")[0].splitlines()
    drawn = output_of(draw, capsys)
    assert "is the number of ones so far odd?" in drawn
    assert re.search(r"input +[01]( +[01]){15}\ntarget +[01]( +[01]){15}\n", drawn)
    assert "step 5," in output_of(f"{train} {QUICK}", capsys)
    measured = output_of(f"{evaluate} --device cpu", capsys)
    assert "128 sequences of test" in measured
    assert re.search(r"^12 +0\.\d+", measured, re.MULTILINE)


@pytest.mark.usefixtures("folder")
def test_metric_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    train, evaluate = code_blocks(ADD_A_TASK, "sh")[1].splitlines()
    assert "last_answer" in output_of(f"{train} {QUICK}", capsys)
    measured = output_of(f"{evaluate} --device cpu", capsys)
    assert "last_answer" in measured
    assert "baseline last bit" in measured
    assert re.search(r"^ones +token_accuracy", measured, re.MULTILINE)


def test_recipe_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, _ = code_blocks(ADD_A_TASK, "sh")[2].splitlines()
    shown = output_of(f"{tiny} --device cpu", capsys)
    assert "Which mode learns parity" in shown
    root = folder / "runs" / "parity-tiny"
    assert len(list(root.glob("*/test.json"))) == 4
    assert (root / "results.json").exists()
    assert (root / "results.png").stat().st_size > 10_000


@pytest.mark.usefixtures("folder")
def test_recipe_that_begins_with_a_built_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    tiny, _ = code_blocks(ADD_A_TASK, "sh")[3].splitlines()
    shown = output_of(f"{tiny} --device cpu", capsys)
    assert "ENTP small, reversed, examples 2500, lr 0.001" in shown
    recorded = read_record(DOCS.parent / "results/addition-samples.json").arms.values()
    known = {run.config_hash for arm in recorded for run in arm.runs}
    runs = find_recipe("attack:RECIPE").runs()
    assert (len(runs), sum(one.hash in known for one in runs)) == (28, 10)


@pytest.mark.usefixtures("folder")
def test_quick_training(capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of docs/training.md, the first with fewer steps; all three parts act in it."""
    train, evaluate, *_ = (command.line for command in commands_in(DOCS / "training.md"))
    few = "--steps 6 --curriculum.steps 4 --optim.warmup-steps 2 --train.eval-batches 1"
    assert "step 6," in output_of(f"{train} {few} --device cpu", capsys)
    run = load_run("runs/quick")
    plan = Plan(run)
    assert (plan.mode(0), plan.batch_size(0)) == ("random-prefix", 64)
    assert (plan.mode(4), plan.batch_size(4)) == ("entp", 128)
    assert {technique.name for technique in plan.techniques} == {"curriculum", "importance", "ema"}
    assert (run.optim.name, run.optim.precondition_every) == ("muon", 10)
    assert "256 sequences of test" in output_of(f"{evaluate} --batches 2 --device cpu", capsys)
