"""The demo, with few steps: everything it promises is printed and the picture is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from entp.demo import demo, demo_run
from entp.intervals import wilson
from entp.table import format_table


def test_demo_compares_generates_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = demo(tmp_path / "demo", steps=12)
    printed = capsys.readouterr().out
    assert set(numbers) == {"ENTP", "decoder"}
    assert numbers["ENTP"]["flops"] > numbers["decoder"]["flops"] > 0
    for words in ("causal", "95% interval", "training s", "training GFLOP", "generated", "picture:", "# # # # # #"):
        assert words in printed
    assert re.search(r"128 of 128 right as an encoder, \d under a causal mask", printed)
    assert (tmp_path / "demo/demo.png").stat().st_size > 10_000
    demo(tmp_path / "demo", steps=12)  # again, over the old folder


def test_both_sides_differ_in_the_mode_only() -> None:
    from dataclasses import replace

    assert replace(demo_run("decoder"), mode="entp") == demo_run("entp")


def test_wilson_interval() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    low, high = wilson(500, 1000)
    assert low == pytest.approx(0.469, abs=1e-3)
    assert high == pytest.approx(0.531, abs=1e-3)


def test_table_lines_up() -> None:
    table = format_table(["name", "value"], [["a", "1"], ["longer", "22"]])
    assert table.splitlines() == ["name    value", "------  -----", "a           1", "longer     22"]
