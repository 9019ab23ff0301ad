"""The README's Python runs as printed, and its tree names what exists."""

from __future__ import annotations

import re

from documents import NAMES, ROOT, code_blocks

README = ROOT / "README.md"


def test_python_example_runs_and_is_short() -> None:
    (code,) = code_blocks(README, "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    names: dict[str, object] = {}
    exec(code, names)
    assert tuple(names["logits"].shape) == (2, 32, 64)  # type: ignore[attr-defined]
    assert tuple(names["two"].shape) == (2, 2, 64)  # type: ignore[attr-defined]
    assert tuple(names["text"].shape) == (2, 24)  # type: ignore[attr-defined]


def test_tree_names_what_exists() -> None:
    tree = next(block for block in code_blocks(README, "") if block.startswith("entp/"))
    named = re.findall(r"^( *)([\w./]+(?:, [\w./]+)*)", tree, re.MULTILINE)
    assert len(named) > 5
    for indent, names in named:
        above = ROOT / "entp" if indent else ROOT
        for name in names.split(", "):
            assert (above / name).exists(), name


def test_tree_names_every_room() -> None:
    tree = next(block for block in code_blocks(README, "") if block.startswith("entp/"))
    rooms = {path.parent.name for path in (ROOT / "entp").glob("*/__init__.py")}
    assert rooms <= set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))


def test_make_targets_exist() -> None:
    """Of the README and of CONTRIBUTING.md."""
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join((ROOT / name).read_text() for name in NAMES if (ROOT / name).exists())
    for target in re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
