"""A file of benchmarks keeps its other sections, and is read under today's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_sections import generation, steps

from entp.errors import InputError
from entp.results.sections import read_sections, record_section

RESULTS = Path(__file__).parents[2] / "results"


def test_other_sections_stay_and_the_same_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"what": "kept as it is"}))
    record_section(path, "generate", generation())
    record_section(path, "step", steps(2.0))
    assert record_section(path, "step", steps(None)) == f"numbers: {path}"
    assert read_sections(path) == {
        "what": "kept as it is",
        "generate": generation(),
        "step": steps(None),
    }


def test_sections_of_earlier_versions_are_upgraded(tmp_path: Path) -> None:
    old = generation()
    old["config"] = {"size": "small", "batch": 1, "prompt": 2, "total": 4}
    shape = steps(2.0)
    shape["config"] = {"contenders": ["packed"]}
    shape["shapes"] = [
        {("batch" if k == "batch_size" else k): v for k, v in one.items()}
        for one in shape["shapes"]
    ]
    (tmp_path / "old.json").write_text(json.dumps({"generate": old, "step": shape}))
    found = read_sections(tmp_path / "old.json")
    assert found["generate"] == generation()
    assert found["step"] == {**steps(2.0), "config": {"variants": ["packed"]}}


@pytest.mark.parametrize("name", ["engine_speed", "bench_step"])
def test_recorded_benchmarks_are_read(name: str) -> None:
    assert "step" in read_sections(RESULTS / f"{name}.json")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "not a file of benchmark sections")]
)
def test_file_of_another_kind_is_not_touched(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        record_section(path, "step", steps(2.0))
    assert path.read_text() == text


def damaged(change: dict[str, Any]) -> dict[str, Any]:
    return {**steps(2.0), **change}


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (damaged({"shapes": 3}), "step: shapes is 3"),
        (damaged({"shapes": []}), "step: shapes is []"),
        (damaged({"environment": {"device": 3}}), "step: environment.device is 3"),
        (3, "step: it is 3"),
    ],
)
def test_damaged_section_names_its_key(section: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"step": section}))
    with pytest.raises(InputError) as caught:
        read_sections(path)
    assert told in str(caught.value)
    assert f"make it anew with `entp bench step --out {path}`" in str(caught.value)
