"""Files of results: read, choose between two records of a run, write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from entp.errors import InputError
from entp.files import parse_json, write_file
from entp.results.schema import VERSION, Record, RunRecord, RunTest, parse
from entp.results.summary import summarise
from entp.results.upgrade import upgrade_record
from entp.results.verdict import judge

WIDTH = 160
"""Columns of a file of results: what fits stands on one line."""


def read_record(path: Path) -> Record:
    """A file of results of any recipe, also of earlier versions; an InputError names what is
    wrong."""
    return _record(path, _read_json(path))


def find_records(folder: Path) -> dict[Path, Record]:
    """The files of results in a folder, by name; JSON files of other kinds are passed over."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem)
    found = {path: _read_json(path) for path in paths}
    return {path: _record(path, data) for path, data in found.items() if _is_record(data)}


def _is_record(data: Any) -> bool:
    return isinstance(data, dict) and "recipe" in data


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(_told(path, str(error))) from None


def _record(path: Path, data: Any) -> Record:
    try:
        if isinstance(data, dict) and data.get("schema_version", VERSION) != VERSION:
            raise ValueError(f"schema_version is {data['schema_version']}, here it is {VERSION}")
        return parse(Record, upgrade_record(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(_told(path, str(error))) from None


def _told(path: Path, problem: str) -> str:
    return f"{path} is not a file of results ({problem}): give another name, or remove it."


def write_record(path: Path, record: Record) -> Record:
    """Write a record with its summaries and verdict, and return that."""
    found = complete(record)
    data = found.model_dump(mode="json", exclude_defaults=True)
    write_file(path, f"{compact_json(data)}\n".encode())
    return found


def complete(record: Record) -> Record:
    """The record with what follows from its runs: summaries and the verdict."""
    return summarise(record).model_copy(update={"verdict": judge(record)})


def better_run(one: RunRecord | None, other: RunRecord | None) -> RunRecord | None:
    """Of two records of a run the one that is done, then tested, then further, then tested on more;
    else the first."""
    if one is None or other is None:
        return one or other
    return other if _rank(other) > _rank(one) else one


def _rank(run: RunRecord) -> tuple[bool, bool, int, int]:
    return run.done, run.test is not None, run.steps, _tests(run.test)


def _tests(test: RunTest | None) -> int:
    """How many tests a run has had besides the first."""
    if test is None:
        return 0
    others = (test.last, test.generated, test.bootstrap)
    return len(test.splits) + sum(one is not None for one in others)


def compact_json(data: Any, indent: int = 0) -> str:
    """JSON with everything on one line that fits, so that a point of a curve is a line."""
    line = json.dumps(data)
    if len(line) + indent <= WIDTH or not isinstance(data, dict | list):
        return line
    start, end = "[]"
    parts = [compact_json(value, indent + 1) for value in _values(data)]
    if isinstance(data, dict):
        start, end = "{}"
        parts = [f"{json.dumps(key)}: {part}" for key, part in zip(data, parts, strict=True)]
    inner = ",\n".join(f"{' ' * (indent + 1)}{part}" for part in parts)
    return f"{start}\n{inner}\n{' ' * indent}{end}"


def _values(data: dict[str, Any] | list[Any]) -> list[Any]:
    return list(data.values()) if isinstance(data, dict) else data
