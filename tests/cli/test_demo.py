"""The demo, with few steps: everything it promises is printed and the figure is there."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from entp import pretrained
from entp.cli.demo import demo, demo_run, shipped
from entp.cli.main import main
from entp.config import Run, model_for
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.addition import Addition
from entp.tasks.base import Batch, Split
from entp.tasks.counting import Count3
from entp.terminal import format_table
from entp.theory import compiled
from entp.training.checkpoint import save_model
from entp.training.trainer import train


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few test sequences, and none for the models that come with entp."""
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(pretrained, "HERE", tmp_path / "none")
    monkeypatch.setattr("entp.cli.demo.TEST_BATCHES", 2)


def test_demo_compares_generates_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], short: None
) -> None:
    out = tmp_path / "demo"
    numbers = demo(out, steps=4)
    printed = capsys.readouterr().out
    assert set(numbers) == {"ENTP", "decoder"}
    assert numbers["ENTP"]["flops"] > numbers["decoder"]["flops"] > 0
    assert numbers["ENTP"]["n"] == 128
    for words in ("causal", "95% interval", "training GFLOP", "generated", "# # # # # #"):
        assert words in printed
    assert re.search(r"128 of 128 right as an encoder, \d under a causal mask", printed)
    assert f"figure: {out / 'demo.png'}" in printed
    assert (out / "demo.png").stat().st_size > 10_000
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/checkpoints/*/model.safetensors")}
    assert demo(out, steps=4) == numbers  # nothing is trained a second time, or deleted
    assert before == {p: p.stat().st_mtime_ns for p in before}
    with pytest.raises(InputError, match=r"demo/entp holds another run: .*another --out"):
        demo(out, steps=5)


def test_interrupted_demo_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short: None,
) -> None:
    make = Addition.batch

    def batch(self: Addition, seed: int, split: Split, step: int, size: int) -> Batch:
        if split == "train" and step == 30:
            signal.raise_signal(signal.SIGINT)
        return make(self, seed, split, step, size)

    monkeypatch.setattr(Addition, "batch", batch)
    out = tmp_path / "demo"
    assert main(["demo", f"--out={out}", "--steps=200"]) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    saved = (out / "entp/checkpoints").glob("step-*")
    last = max(int(path.name.removeprefix("step-")) for path in saved)
    assert 20 <= last < 200
    monkeypatch.setattr(Addition, "batch", make)
    run = replace(demo_run("entp", 0, 200), steps=last + 2)
    assert train(run, out / "entp", resume=True, device="cpu").step == last + 2


def test_models_that_come_with_entp_are_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was set by hand and has no error, one that was never trained."""
    task = Count3(prompt_length=4, length=12, num_values=12)
    by_hand = compiled.count3(12, ratio=3)
    runs = {
        "good": Run(task, by_hand.config, batch_size=32),
        "new": Run(task, model_for(task, "small", layers=1), batch_size=32),
    }
    models = {"good": by_hand, "new": Transformer(runs["new"].model)}
    for name, run in runs.items():
        save_model(models[name], tmp_path / name, run)
    monkeypatch.setattr(pretrained, "HERE", tmp_path)
    *_, good, new, about = shipped(3, 64).splitlines()
    assert good.split()[-2:] == ["100.0%", "94.3%..100.0%"]
    assert new.split()[-2:] == ["0.0%", "0.0%..5.7%"]
    assert about == "64 test sequences each"


def test_both_sides_differ_in_the_mode_only() -> None:
    assert replace(demo_run("decoder"), mode="entp") == demo_run("entp")


def test_table_lines_up() -> None:
    table = format_table(["name", "value"], [["a", "1"], ["longer", "22"]])
    assert table.splitlines() == [
        "name    value",
        "------  -----",
        "a           1",
        "longer     22",
    ]
