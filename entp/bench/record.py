"""Where the numbers are kept: one JSON file with a section per benchmark, and one picture of all of them beside it.

results/engine_speed.json       {"step": {...}, "generate": {...}, "scaling": {...}}, each with its machine, commit and date
results/engine_speed.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from entp.bench.picture import draw
from entp.record_shapes import read_sections
from entp.training.checkpoint import write_file


def record(path: Path, name: str, section: dict[str, Any]) -> str:
    """Put a section into the file in place of its older self, and draw all sections. Returns a sentence for a person."""
    sections = {**read_sections(path), name: section}
    write_file(path, (json.dumps(sections, indent=1) + "\n").encode())
    picture = path.with_suffix(".png")
    try:
        draw(sections, picture)
    except ImportError:
        return f"numbers: {path}; no picture: pip install 'entp[plot]' to draw one."
    return f"numbers: {path}, picture: {picture}"
