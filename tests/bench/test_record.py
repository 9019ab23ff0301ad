"""The results file keeps its other sections, and its picture is drawn from all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from entp.cli.main import main
from entp.errors import InputError
from entp.report.bench import PANELS, draw
from entp.results.schema import read_sections
from entp.results.sections import record

WHERE = {"device": "somewhere", "torch": "2.0", "commit": None, "date": "2026-01-01"}


def generation() -> dict[str, Any]:
    rows = [
        {"name": "entp", "tokens_per_s": 10.0, "ratio": 2.0},
        {"name": "decoder", "tokens_per_s": 50.0, "ratio": 10.0},
    ]
    return {
        "environment": WHERE,
        "config": {"size": "small", "batch": 1, "prompt": 2, "total": 4},
        "runs": rows,
    }


def steps(ratio: float | None) -> dict[str, Any]:
    row = {
        "name": "entp reference",
        "median": 0.5,
        "peak_bytes": 2**24,
        "ratio": ratio,
        "memory_ratio": ratio,
    }
    shape = {
        "name": "own",
        "size": "small",
        "batch": 1,
        "tokens": 8,
        "steps": [row, {**row, "name": "decoder", "median": 0.01}],
    }
    return {"environment": WHERE, "shapes": [shape, {**shape, "name": "other", "steps": [row]}]}


def growth() -> dict[str, Any]:
    values = {n: {"step": n**2 / 1e4, "token": n / 1e4, "memory": 2**20 * n} for n in (8, 16, 32)}
    points = [{"n": n, "entp": v, "decoder": v} for n, v in values.items()]
    fits = [
        {"what": what, "mode": mode, "from_n": 16, "exponent": power}
        for mode in ("entp", "decoder")
        for what, power in (("step", 2.0), ("token", 1.0), ("memory", 1.0))
    ]
    return {
        "environment": WHERE,
        "config": {"size": "small", "batch": 1},
        "points": points,
        "fits": fits,
    }


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height from a PNG's head."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_other_sections_stay_and_the_same_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"what": "kept as it is"}))
    record(path, "generate", generation())
    record(path, "step", steps(2.0))
    record(path, "step", steps(None))
    assert read_sections(path) == {
        "what": "kept as it is",
        "generate": generation(),
        "step": steps(None),
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["speed.json", "speed.png"]


def test_the_picture_has_a_panel_for_every_measure(tmp_path: Path) -> None:
    sections = {"generate": generation()}
    draw(sections, tmp_path / "one.png")
    draw({**sections, "step": steps(2.0), "scaling": growth()}, tmp_path / "six.png")
    assert sum(map(len, PANELS.values())) == 6
    one, six = picture_size(tmp_path / "one.png"), picture_size(tmp_path / "six.png")
    assert (six[0], six[1]) == (3 * one[0], 2 * one[1])


def test_a_file_without_sections_gets_no_picture(tmp_path: Path) -> None:
    draw({"what": "something else"}, tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_numbers_are_written_and_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = record(tmp_path / "speed.json", "generate", generation())
    assert "pip install 'entp[plot]'" in said
    assert read_sections(tmp_path / "speed.json") == {"generate": generation()}


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "not a file of benchmark sections")]
)
def test_a_file_that_is_something_else_is_not_touched(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        record(path, "step", steps(2.0))
    assert path.read_text() == text


@pytest.mark.slow
def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    words = [
        "--length=6",
        "--batch=1",
        "--repeats=1",
        "--contenders=packed,decoder",
        "--device=cpu",
        f"--out={out}",
    ]
    assert main(["bench", *words]) == 0  # plain `entp bench` is `entp bench step`
    printed = capsys.readouterr().out
    section = read_sections(out)["step"]
    assert section["config"] == {"contenders": ["packed", "decoder"], "repeats": 1, "warmup": 1}
    for row in section["shapes"][0]["steps"]:
        assert f"{row['median'] * 1e3:.2f}" in printed
    assert {"device", "torch", "commit", "date"} <= set(section["environment"])
    assert str(out.with_suffix(".png")) in printed
    assert picture_size(out.with_suffix(".png"))[0] > 0


def test_a_bad_file_is_noticed_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    out.write_text("not JSON")
    assert main(["bench", "generate", f"--out={out}"]) == 2
    assert "is not JSON" in capsys.readouterr().err
