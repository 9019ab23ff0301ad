"""The README's Python runs as printed, and the tree names what exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_python_example_runs_and_is_short() -> None:
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    names: dict[str, object] = {}
    exec(code, names)
    assert tuple(names["logits"].shape) == (2, 32, 64)  # type: ignore[attr-defined]
    assert tuple(names["two"].shape) == (2, 2, 64)  # type: ignore[attr-defined]
    assert tuple(names["text"].shape) == (2, 24)  # type: ignore[attr-defined]


def test_the_tree_names_what_exists() -> None:
    tree = next(block for block in blocks("") if block.startswith("entp/"))
    for folder, name in re.findall(r"^( *)([\w/.]+(?:, [\w.]+)*)", tree, re.MULTILINE):
        depth = len(folder) // 2
        for part in name.split(", "):
            if depth == 1:
                assert (ROOT / "entp" / part).exists(), part
            elif depth == 0:
                assert (ROOT / part).exists(), part
            else:
                assert list((ROOT / "entp").glob(f"*/{part}")), part


def test_first_commands_are_the_two() -> None:
    assert [line.split("#")[0].strip() for line in blocks("sh")[0].splitlines()] == [
        "make demo",
        "make test",
    ]
    makefile = (ROOT / "Makefile").read_text()
    assert "\ndemo:" in makefile
    assert "\ntest:" in makefile
