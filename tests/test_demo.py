"""The demo, with few steps: everything it promises is printed and the picture is there."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import start_entp, wait_for_step

from entp import pretrained
from entp.cli.demo import demo, demo_run, shipped
from entp.config import Run, model_for
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.counting import Count3
from entp.terminal import format_table
from entp.theory import compiled
from entp.training.checkpoint import save_model
from entp.training.trainer import train


def test_demo_compares_generates_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = demo(tmp_path / "demo", steps=12)
    printed = capsys.readouterr().out
    assert set(numbers) == {"ENTP", "decoder"}
    assert numbers["ENTP"]["flops"] > numbers["decoder"]["flops"] > 0
    for words in (
        "causal",
        "95% interval",
        "training s",
        "training GFLOP",
        "generated",
        "picture:",
        "# # # # # #",
    ):
        assert words in printed
    assert re.search(r"128 of 128 right as an encoder, \d under a causal mask", printed)
    assert (tmp_path / "demo/demo.png").stat().st_size > 10_000
    weights = {
        p: p.stat().st_mtime_ns
        for p in (tmp_path / "demo").glob("*/checkpoints/*/model.safetensors")
    }
    assert (
        demo(tmp_path / "demo", steps=12) == numbers
    )  # again: nothing is trained a second time, or deleted
    assert {
        p: p.stat().st_mtime_ns
        for p in (tmp_path / "demo").glob("*/checkpoints/*/model.safetensors")
    } == weights
    with pytest.raises(InputError, match=r"demo/entp holds another run: .*another --out"):
        demo(tmp_path / "demo", steps=13)


def test_an_interrupted_demo_goes_on(tmp_path: Path) -> None:
    running = start_entp("demo", "--out=demo", "--steps=400", cwd=tmp_path)
    wait_for_step(tmp_path / "demo/entp", 30, running)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "the same command goes on from there" in told
    last = max(
        int(p.name.removeprefix("step-"))
        for p in (tmp_path / "demo/entp/checkpoints").glob("step-*")
    )
    assert 30 <= last < 400
    run = replace(demo_run("entp", 0, 400), steps=last + 2)
    assert train(run, tmp_path / "demo/entp", resume=True, device="cpu").step == last + 2


def test_the_models_that_come_with_entp_are_tested_on_new_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was set by hand and has no error, one that was never trained: the table tells them
    apart."""
    task = Count3(prompt_length=4, length=12, values=12)
    by_hand = compiled.count3(12, ratio=3)
    runs = {
        "good": Run(task, by_hand.config, batch=32),
        "new": Run(task, model_for(task, "small", layers=1), batch=32),
    }
    models = {"good": by_hand, "new": Transformer(runs["new"].model)}
    for name, run in runs.items():
        save_model(models[name], tmp_path / name, run)
    monkeypatch.setattr(pretrained, "HERE", tmp_path)
    first, second = (
        re.findall(r"^(good|new) .*?([\d.]+)% \(", line)[0]
        for line in shipped(3, 64).splitlines()[2:]
    )
    assert (first, second) == (("good", "100.0"), ("new", "0.0"))


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
