"""Files of benchmarks: one JSON file with a section for each.

results/engine_speed.json    {"step": {...}, "generate": {...}, "scaling": {...}}, each with its
                             machine, commit and date
results/sweep_speed.json     {"sweep": {...}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len
from pydantic import BaseModel, ConfigDict

from entp.errors import InputError
from entp.files import json_bytes, parse_json, write_file
from entp.results.schema import Environment, parse

RENAMED = {
    "batch": "batch_size",
    "prompt": "prompt_length",
    "total": "length",
    "contenders": "variants",
}
"""Keys of earlier versions, in a section's `config` and `shapes`."""


class Section(BaseModel):
    """What tables and figures need of a section; a benchmark may keep more."""

    model_config = ConfigDict(extra="allow", strict=True)


class StepRow(Section):
    name: str
    median: float
    peak_bytes: float
    ratio: float | None
    memory_ratio: float | None


class Shape(Section):
    name: str
    size: str
    batch_size: int
    tokens: int
    steps: Annotated[list[StepRow], Len(1)]


class StepSection(Section):
    environment: Environment
    shapes: Annotated[list[Shape], Len(1)]


class GenerateConfig(Section):
    size: str
    batch_size: int
    prompt_length: int
    length: int


class GenerateRow(Section):
    name: str
    tokens_per_s: float
    ratio: float


class GenerateSection(Section):
    environment: Environment
    config: GenerateConfig
    runs: Annotated[list[GenerateRow], Len(1)]


class Growth(Section):
    step: float
    token: float
    memory: float


class GrowthPoint(Section):
    n: int
    entp: Growth
    decoder: Growth


class Fit(Section):
    what: str
    mode: str
    from_n: int
    exponent: float


class ScalingConfig(Section):
    size: str
    batch_size: int


class ScalingSection(Section):
    environment: Environment
    config: ScalingConfig
    points: Annotated[list[GrowthPoint], Len(1)]
    fits: list[Fit]


class SweepConfig(Section):
    size: str
    batch_size: int
    tokens: int


class SweepRow(Section):
    mode: str
    how: str
    runs: int
    median: float | None
    ratio: float | None


class SweepSection(Section):
    environment: Environment
    config: SweepConfig
    runs: Annotated[list[SweepRow], Len(1)]


SECTIONS: dict[str, type[Section]] = {
    "step": StepSection,
    "generate": GenerateSection,
    "scaling": ScalingSection,
    "sweep": SweepSection,
}


def read_sections(path: Path) -> dict[str, Any]:
    """The sections of a file of benchmarks under today's names; none if there is no file."""
    if not path.exists():
        return {}
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): give another file.") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} is not a file of benchmark sections: give another file.")
    return {name: _checked(path, name, section) for name, section in data.items()}


def _checked(path: Path, name: str, section: Any) -> Any:
    """A section that fits its schema; sections of other names are nobody's business."""
    if name not in SECTIONS:
        return section
    section = upgrade_section(section)
    try:
        parse(SECTIONS[name], section)
    except ValueError as error:
        raise InputError(
            f"{path} is damaged ({name}: {error}): remove {name!r} from it, and make it anew with "
            f"`entp bench {name} --out {path}`."
        ) from None
    return section


def upgrade_section(section: Any) -> Any:
    """A section under today's names; what is not one stays as it is."""
    if not isinstance(section, dict):
        return section
    found = dict(section)
    if isinstance(found.get("config"), dict):
        found["config"] = _renamed(found["config"])
    if isinstance(found.get("shapes"), list):
        found["shapes"] = [_renamed(shape) for shape in found["shapes"]]
    return found


def _renamed(fields: Any) -> Any:
    if not isinstance(fields, dict):
        return fields
    return {RENAMED.get(name, name): value for name, value in fields.items()}


def record_section(path: Path, name: str, section: dict[str, Any]) -> str:
    """Put a section into the file in place of its older self; returns a message for a person.

    `entp.report.bench.draw_sections` draws the file.
    """
    sections = {**read_sections(path), name: _checked(path, name, section)}
    write_file(path, json_bytes(sections))
    return f"numbers: {path}"
