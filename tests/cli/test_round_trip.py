"""A tiny run goes through train, evaluate, generate and export."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import FLAGS

from entp.cli.main import main

TRAIN = ["train", "count3", *FLAGS, "--batch-size=8", "--steps=6", "--train.eval-every=3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a trained run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main([*TRAIN, f"--out={folder}"]) == 0
    return str(folder)


def read(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints that ends well."""
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_train_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = read(capsys, *TRAIN, f"--out={tmp_path / 'run'}")
    assert said.startswith("all steps done: step 6, ")
    assert "exact_match" in said


def test_evaluate_prints_values_with_intervals(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = read(capsys, "evaluate", run, "--batches=2")
    assert "count3, mode entp, 16 sequences of test\n" in table
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[3:]}
    assert list(rows) == ["exact_match", "token_accuracy", "loss"]
    for value, interval in rows.values():
        low, high = map(float, interval.split(".."))
        assert low <= float(value) <= high


def test_evaluate_prints_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("evaluate", run, "--batches=2", "--json")
    values = json.loads(read(capsys, *words))
    assert (values["n"], values["split"], values["checkpoint"]) == (16, "test", "best")
    low, high = values["intervals"]["loss"]
    assert low < values["loss"] < high
    reference = json.loads(read(capsys, *words, "--impl=reference"))
    assert values["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert json.loads(read(capsys, *words, "--seed=3"))["loss"] != values["loss"]
    assert json.loads(read(capsys, *words, "--split=valid"))["loss"] != values["loss"]


def test_evaluate_in_another_mode(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Between a decoder, which these weights are not, and ENTP, which they are."""
    words = ("evaluate", run, "--batches=2")
    found = {}
    for mode in ("decoder", "refresh-4", "refresh-100", "entp"):
        told = json.loads(read(capsys, *words, "--mode", mode, "--json"))
        assert told["mode"] == mode
        found[mode] = told["loss"]
    assert found["entp"] == json.loads(read(capsys, *words, "--json"))["loss"]
    assert found["refresh-100"] == pytest.approx(found["decoder"], rel=1e-5)
    assert len({round(found[mode], 6) for mode in ("decoder", "refresh-4", "entp")}) == 3
    assert "mode refresh-4, 16" in read(capsys, *words, "--mode", "refresh-4")


def test_evaluate_by_slice_and_of_generated_answers(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", run, "--batches=2", "--by", "length", "--generate")
    values = json.loads(read(capsys, *words, "--json"))
    by_length = values["by"]["length"]["token_accuracy"]
    assert list(by_length) == [str(n) for n in range(4, 10)]
    assert sum(by_length.values()) / 6 == pytest.approx(values["token_accuracy"])
    generated = values["generated"]
    assert generated["n"] == 16
    assert "loss" not in generated
    first = generated["by"]["length"]["token_accuracy"]["4"]
    assert first == by_length["4"]  # the first answer reads nothing that was generated
    table = read(capsys, *words)
    assert "\nmetric, generated " in table
    assert len(re.findall(r"^length +token_accuracy", table, re.MULTILINE)) == 2


def test_evaluate_measures_baselines_and_slices_of_another_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chase: the answer after one hop is right for the first query."""
    task = ["--task.nodes=6", "--task.hops=3", "--layers=2", "--heads=1", "--width=8"]
    assert main(["train", "chase", *task, "--bs=8", "--steps=1", f"--out={tmp_path / 'run'}"]) == 0
    words = ("evaluate", str(tmp_path / "run"), "--batches=1", "--by=hops", "--baselines", "--json")
    values = json.loads(read(capsys, *words))
    assert list(values["by"]["hops"]["token_accuracy"]) == ["1", "2", "3"]
    assert values["baseline one hop"]["by"]["hops"]["token_accuracy"]["1"] == 1.0


def test_last_checkpoint_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate at which the loss grows: the first evaluation is the best."""
    out = tmp_path / "run"
    worse = ["--train.monitor=loss", "--eval-every=2", "--lr=10", "--warmup=20"]
    assert main([*TRAIN, *worse, f"--out={out}"]) == 0
    assert (out / "checkpoints/best-00000002").is_dir()
    words = ("evaluate", str(out), "--batches=1", "--json")
    best, last = (json.loads(read(capsys, *words, f"--checkpoint={c}")) for c in ("best", "last"))
    assert best["loss"] < last["loss"]
    assert json.loads(read(capsys, *words)) == best


def test_generate_continues_prompts(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = read(capsys, "generate", run, "--prompt", "3 1 4 1", "3, 1, 4", "--max-new-tokens=3")
    lines = [list(map(int, line.split())) for line in said.splitlines()]
    assert [len(line) for line in lines] == [7, 6]
    assert lines[0][:4] == [3, 1, 4, 1]
    own = read(capsys, "generate", run).splitlines()
    assert [len(line.split()) for line in own] == [10, 10, 10]


def test_export_writes_a_model_that_other_commands_read(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    said = read(capsys, "export", run, f"--out={out}", "--test-sequences=16")
    assert "in bf16, " in said
    assert "On 16 test sequences: exact_match " in said
    assert {path.name for path in out.iterdir()} >= {"model.safetensors", "config.json"}
    values = json.loads(read(capsys, "evaluate", str(out), "--batches=2", "--json"))
    whole = json.loads(read(capsys, "evaluate", run, "--batches=2", "--json"))
    assert values["loss"] == pytest.approx(whole["loss"], rel=1e-2)
    assert read(capsys, "generate", str(out)).count("\n") == 3


def test_resume_takes_the_config_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what changes need be said again; the folder is the default one."""
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, "--mode=decoder", "--seed=3"]) == 0
    said = read(capsys, "train", "count3", "--mode", "decoder", "--resume", "--max-steps", "8")
    assert "all steps done: step 8" in said
    saved = json.loads((tmp_path / "runs/count3-decoder/config.json").read_text())
    assert (saved["seed"], saved["steps"], saved["model"]["width"]) == (3, 8, 16)


def test_fork_takes_the_config_of_the_source(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fork"
    words = ("--fork", run, "--steps=8", "--mode=decoder", f"--out={out}")
    assert "step 8" in read(capsys, "train", "count3", *words)
    saved = json.loads((out / "config.json").read_text())
    assert (saved["mode"], saved["batch_size"], saved["model"]["width"]) == ("decoder", 8, 16)


def test_options_of_model_and_techniques_train_save_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model like Llama's, looped, with every technique that fits together."""
    model = ["position-embedding=rotary", "norm=rms", "activation=swiglu", "kv-heads=1", "loops=2"]
    words = [f"--model.{word}" for word in [*model, "no-bias", "tied-head=False"]]
    words += ["--optim.name=muon", "--ema.steps=3", "--warmup=1", "--curriculum.steps=3"]
    words += ["--batch-schedule.step=5", "--batch-schedule.batch-size=4"]
    assert main([*TRAIN, *words, f"--out={tmp_path / 'run'}"]) == 0
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["ema"] == {"steps": 3}
    assert saved["importance"] is None
    assert json.loads(read(capsys, "evaluate", str(tmp_path / "run"), "--json"))["n"] == 128
    assert read(capsys, "generate", str(tmp_path / "run"))


SORT = """
from dataclasses import dataclass
from typing import Any, ClassVar
import numpy as np
from entp.tasks import Batch, Split, Task

@dataclass(frozen=True)
class Sort(Task):
    name: ClassVar[str] = "sort"

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 10, "context_length": 11}

    def position_ids(self, tokens: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.arange(tokens.shape[1]) % 6, tokens.shape)

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).integers(0, 10, (size, 6))
        whole = np.concatenate([x, np.sort(x, 1)], 1)
        y = whole[:, 1:].copy()
        y[:, :5] = -100
        return Batch(whole[:, :-1], y, position_ids=self.position_ids(y))
"""


def test_own_task_with_position_ids_trains_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six numbers come back, though the model has positions for eleven tokens: the last one is
    never read."""
    (tmp_path / "sort_task.py").write_text(SORT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    small = ["--layers=2", "--heads=2", "--width=16", "--bs=8", "--steps=2", "--device=cpu"]
    assert main(["train", "sort_task:Sort", *small, "--out=run"]) == 0
    own = ("--task", "sort_task:Sort")
    assert len(read(capsys, "generate", "run", *own, "--prompt", "3 1 4 1 5 9").split()) == 12
    assert read(capsys, "evaluate", "run", *own, "--batches=1", "--generate")


def test_progress_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pseudo-terminal: the bar is redrawn with carriage returns and shows the steps."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main([*TRAIN, f"--out={tmp_path / 'run'}"]) == 0
    shown = os.read(master, 100_000)
    os.close(master)
    assert b"\r" in shown
    assert b"count3 entp: 100%" in shown
    assert re.findall(rb"(\d+)/(\d+) \[", shown)[-1] == (b"6", b"6")


def test_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = ["--steps=1000000", "--max-seconds=1", "--train.log-every=1"]
    assert main([*TRAIN, *clock, f"--out={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().err
    assert "count3 entp: step 3/" in said
    assert "\r" not in said
    expected = [int(steps) for steps in re.findall(r"step \d+/about (\d+) ", said)]
    assert max(expected) < 100_000  # not a million steps, which would take days


def test_slow_steps_are_told_between_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an evaluation is an hour away, a line a minute says how far it is."""
    steps = r"count3 entp: step (\d)/6"
    assert main([*TRAIN, f"--out={tmp_path / 'quick'}"]) == 0
    assert re.findall(steps, capsys.readouterr().err) == ["3", "6"]
    monkeypatch.setattr("entp.terminal.SILENCE", 0.0)
    assert main([*TRAIN, f"--out={tmp_path / 'slow'}"]) == 0
    assert list(dict.fromkeys(re.findall(steps, capsys.readouterr().err))) == list("123456")


@pytest.mark.parametrize("words", [["--help"], ["tasks", "count3"]])
def test_a_reader_that_stops_reading_is_no_error(words: list[str], tmp_path: Path) -> None:
    """As in `entp --help | head -1`: the pipe's other end is closed before anything is written."""
    code = "import sys; from entp.cli.main import main; sys.exit(main(sys.argv[1:]))"
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert "Traceback" not in done.stderr
    assert done.returncode in (120, 141)  # Python's own for what is left at the end, or ours


@pytest.mark.skipif(os.name != "posix", reason="needs a shell of POSIX")
def test_streams_that_were_closed_are_no_error(tmp_path: Path) -> None:
    """As a service's may be; what is said is in no file of the run."""
    command = ["sh", "-c", 'exec "$@" 0<&- 2>&-', "sh", sys.executable, "-m", "entp", *TRAIN]
    done = subprocess.run([*command, f"--out={tmp_path}"], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, "all steps done" in done.stdout) == (0, True)
    assert "step 6/6" not in done.stdout  # a line of progress
    assert all(line[0] == "{" for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize(("encoding", "name"), [("ascii", "\u03a9"), ("utf-8", "\udcff")])
def test_text_that_the_terminal_has_no_characters_for_is_no_error(
    encoding: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter of another language, and a byte of a name that is no letter."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert main([*TRAIN, f"--out={tmp_path / name}"]) == 0
    said = terminal.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert said.startswith("all steps done")
    assert f"{name!a}"[1:-1] in said
