"""The documents, and what is read out of them: code blocks, paths, commands, tables."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = ("README.md", "CONTRIBUTING.md")
DOCUMENTS = [*(ROOT / name for name in NAMES if (ROOT / name).exists()), *sorted(DOCS.glob("*.md"))]
EXAMPLES = ("parity.py", "by_ones.py", "mine.py", "attack.py")
"""What docs/add-a-task.md asks its reader to save, in its order."""
MADE_BY_RUNS = ("runs", "demo")
SUFFIXES = ("py", "md", "toml", "txt", "json", "yml", "yaml", "sh", "cfg")


class Command(NamedTuple):
    """A command that a document has its reader type."""

    document: str
    line: str


def code_blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands_in(path: Path) -> list[Command]:
    """Lines that begin with `entp`, in shell blocks and indented; continued lines are joined."""
    indented = re.findall(r"^    (entp [a-z-].*)$", path.read_text(), re.MULTILINE)
    blocks = "".join(code_blocks(path, "sh")).replace("\\\n", " ")
    lines = [line for line in blocks.splitlines() if line.startswith("entp ")]
    return [Command(path.name, line) for line in [*lines, *indented]]


def spans_in(path: Path) -> list[str]:
    """What stands in backticks, outside fenced blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def looks_like_a_path(span: str) -> bool:
    """`entp/engine/` and `docs/engine.md`, not `x[:, :t+1]`, `parity.py` or `runs/first`."""
    plain = span.split("::")[0]
    if not re.fullmatch(r"\.?[\w-][\w.*-]*(/[\w.*-]+)*/?", plain):
        return False
    first, _, rest = plain.partition("/")
    if first in MADE_BY_RUNS:
        return False
    in_a_folder = bool(rest) and plain.rsplit(".", 1)[-1] in SUFFIXES
    known = "/" in plain and (ROOT / first).is_dir()
    return in_a_folder or known or plain.endswith((".md", ".toml"))


def paths_in(path: Path) -> list[str]:
    """Repository paths in backticks, and targets of relative links, which start at the document."""
    text = path.read_text()
    spans = [span for span in spans_in(path) if looks_like_a_path(span)]
    links = [
        link.split("#")[0]
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if not re.match(r"\w+:|#", link)
    ]
    return spans + [os.path.relpath(path.parent / link, ROOT) for link in links]


def exists(name: str) -> bool:
    """Whether the path, or pattern, is there; for `file::test` also whether it has the test."""
    file, _, test = name.partition("::")
    found = list(ROOT.glob(file.rstrip("/"))) or list(DOCS.glob(file))
    return bool(found) and (not test or f"def {test}(" in found[0].read_text())


def tables(path: Path) -> list[list[list[str]]]:
    """Every table of a document as rows of cells, its head first."""
    found: list[list[list[str]]] = []
    inside = False
    for line in path.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        if not inside:
            found.append([])
        inside = True
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            found[-1].append(cells)
    return found


def rows_of(path: Path, *head: str) -> list[list[str]]:
    """The rows of all tables whose head begins like this, without the heads."""
    matching = [table for table in tables(path) if table[0][: len(head)] == list(head)]
    assert matching, f"{path.name} has no table with the head {head}"
    return [row for table in matching for row in table[1:]]
