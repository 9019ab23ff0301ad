"""A picture is on disk whole, or as it was before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from entp.bench import picture
from entp.demo import draw as draw_demo
from entp.experiments.pictures import draw_curves, draw_depth
from entp.experiments.recipe import find_recipe
from entp.experiments.summary import draw_summary
from entp.figures import save_figure

RESULTS = Path(__file__).parent.parent / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


DRAWN: dict[str, Callable[[Path], object]] = {
    "demo": lambda path: draw_demo([], path),
    "curves": lambda path: draw_curves(find_recipe("match3"), read("match3"), path),
    "depth": lambda path: draw_depth(read("count3-depth"), path),
    "summary": lambda path: draw_summary(RESULTS, path),
    "bench": lambda path: picture.draw(read("engine_speed"), path),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN.keys())
def test_a_picture_that_fails_leaves_the_old_one(
    draw: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: Figure, target: Any, **options: Any) -> None:
        data = b"\x89PNG, half of it"
        target.write_bytes(data) if isinstance(target, Path) else target.write(data)
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", half)
    (tmp_path / "old.png").write_bytes(b"old")
    with pytest.raises(OSError, match="no space left"):
        draw(tmp_path / "old.png")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old.png": b"old"}


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")])
def test_the_suffix_says_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    save_figure(Figure(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
