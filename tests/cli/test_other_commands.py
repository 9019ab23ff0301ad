"""Commands hand their options on: reproduce, report and bench."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entp.cli.main import main


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `entp reproduce` asked for; nothing is trained."""
    from entp.experiments import reproduce as experiments
    from entp.report import tables

    found: dict[str, Any] = {"stopped_by": None}

    def reproduce(recipe: Any, runs: Path, **options: Any) -> Any:
        found.update(options, recipe=recipe, runs=runs)
        return SimpleNamespace(stopped_by=found["stopped_by"])

    monkeypatch.setattr(experiments, "reproduce", reproduce)
    monkeypatch.setattr(tables, "record_table", lambda record: "the table")
    return found


def test_reproduce_hands_its_options_on(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "x.json"
    words = ["--only", "one arm", "another", "--seed=2", "--jobs=3", "--max-minutes=4"]
    assert main(["reproduce", "count3", *words, f"--record={record}", "--out=there"]) == 0
    assert (asked["only"], asked["seed"], asked["jobs"]) == (("one arm", "another"), 2, 3)
    assert (asked["max_minutes"], asked["record"], asked["runs"]) == (4.0, record, Path("there"))
    printed = capsys.readouterr().out
    assert f"the table\n\nresults and figure: there/count3 and {record}\n" in printed


def test_reproduce_trains_all_arms_by_default(asked: dict[str, Any]) -> None:
    assert main(["reproduce", "count3", "--tiny"]) == 0
    assert (asked["only"], asked["max_minutes"], asked["seed"]) == ((), None, None)
    assert asked["recipe"].name == "count3-tiny"


def test_reproduce_ends_with_the_signal_that_stopped_it(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked["stopped_by"] = signal.SIGTERM
    assert main(["reproduce", "count3"]) == 128 + signal.SIGTERM
    assert "stopped: run the same command again to go on" in capsys.readouterr().out


def test_bench_prints_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain `entp bench` is `entp bench step`; memory is not measured here."""
    from entp.bench import step

    monkeypatch.setattr(step, "prepare", lambda make, args, device, n: (make(*args, device), 9))
    out = tmp_path / "speed.json"
    words = ["--length=6", "--bs=1", "--repeats=1", "--variants=packed,decoder", "--device=cpu"]
    assert main(["bench", *words, f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    section = json.loads(out.read_text())["step"]
    assert section["config"] == {"variants": ["packed", "decoder"], "repeats": 1, "warmup": 1}
    assert section["shapes"][0]["batch_size"] == 1
    for row in section["shapes"][0]["steps"]:
        assert f"{row['median'] * 1e3:.2f}" in printed
    assert f"numbers: {out}, figure: {out.with_suffix('.png')}" in printed
    assert out.with_suffix(".png").is_file()


def test_bench_notices_a_bad_file_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    out.write_text("not JSON")
    assert main(["bench", "generate", f"--out={out}"]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_report_says_where_the_page_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from entp.report import page

    monkeypatch.setattr(page, "write_report", lambda results, out: f"{results} in {out}")
    out = tmp_path / "page.md"
    assert main(["report", "--results=there", f"--out={out}"]) == 0
    assert capsys.readouterr().out == f"there in {out}\n"
