"""The package's modules import in one direction only, and heavy or optional libraries only where
they are used."""

from __future__ import annotations

import ast
import pydoc
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import entp

ROOT = Path(entp.__file__).parent
LEVELS = [
    {"errors", "intervals", "table", "pretrained"},
    {"checks", "named"},
    {"tasks", "config", "config_json", "record_shapes"},
    {"attention"},
    {"engine"},
    {"model"},
    {"training", "theory", "hf", "figures"},
    {"experiments"},
    {"report"},
    {"parsing", "options", "demo", "bench", "run_commands", "theory_commands", "cli"},
]
"""Parts of the package, lowest first: a module imports from its own level and from those before it.
"""
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
OPTIONAL = {"matplotlib", "tyro", "pydantic", "tensorboard", "wandb", "trackio"}
EXEMPT = {"entp", "entp.__main__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
CHECKED = sorted(set(MODULES) - EXEMPT)


def is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def statements(body: list[ast.stmt], inside: bool = False) -> Iterator[ast.stmt]:
    """All statements that run when the module is imported; inside: also those in functions and
    under TYPE_CHECKING."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside:
            continue
        if isinstance(node, ast.If) and is_type_checking(node.test) and not inside:
            yield from statements(node.orelse, inside)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []), inside)
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body, inside)


def imports_of(source: str, name: str, is_package: bool, inside: bool = False) -> set[str]:
    """Full names of what a module imports when it is imported; `from a import b` counts as a and
    a.b. inside: see above."""
    found: set[str] = set()
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in statements(ast.parse(source).body, inside):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.update([origin, *(f"{origin}.{alias.name}" for alias in node.names)])
    return found


def module_imports(name: str, inside: bool = False) -> set[str]:
    path = MODULES[name]
    return imports_of(path.read_text(encoding="utf-8"), name, path.name == "__init__.py", inside)


def part(name: str) -> str:
    """The part of the package a module belongs to: entp.engine.api is in engine."""
    return name.split(".")[1]


def test_the_reader_of_imports_sees_what_it_should() -> None:
    source = """
import torch.nn
from typing import TYPE_CHECKING
from .. import model
from .api import choose
if TYPE_CHECKING:
    import wandb
else:
    import tyro
try:
    import a
except ImportError:
    import b
class C:
    import c
def f():
    import pydantic
"""
    assert imports_of(source, "entp.engine.packed", False) == {
        *(
            "torch.nn",
            "typing",
            "typing.TYPE_CHECKING",
            "entp",
            "entp.model",
            "entp.engine.api",
            "entp.engine.api.choose",
        ),
        *("tyro", "a", "b", "c"),
    }


def test_the_reader_of_imports_looks_inside_functions() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a
def f():
    if True:
        import b
class C:
    def g(self):
        from c import d
"""
    assert imports_of(source, "entp.x", False) == {"typing", "typing.TYPE_CHECKING"}
    assert imports_of(source, "entp.x", False, inside=True) == {
        "typing",
        "typing.TYPE_CHECKING",
        "a",
        "b",
        "c",
        "c.d",
    }


def test_modules_are_found() -> None:
    assert {
        "entp.errors",
        "entp.config",
        "entp.tasks.counting",
        "entp.model",
        "entp.engine.packed",
    } <= set(CHECKED)


@pytest.mark.parametrize("name", CHECKED)
def test_imports_go_one_way(name: str) -> None:
    assert part(name) in LEVEL, f"{name} has no level: add it to LEVELS"
    for other in module_imports(name, inside=True):
        if other in MODULES and other not in EXEMPT:
            assert LEVEL[part(other)] <= LEVEL[part(name)], (
                f"{name} imports {other}, which is above it"
            )


def test_no_cycles() -> None:
    graph = {
        name: {
            o for o in module_imports(name) & set(CHECKED) if o != name and not is_parent(o, name)
        }
        for name in CHECKED
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def is_parent(package: str, name: str) -> bool:
    return name.startswith(package + ".")


@pytest.mark.parametrize("name", CHECKED)
def test_optional_libraries_are_imported_where_they_are_used(name: str) -> None:
    roots = {other.split(".")[0] for other in module_imports(name)}
    allowed = {"tyro"} if name == "entp.cli.main" else set()
    assert not (roots & OPTIONAL) - allowed


@pytest.mark.parametrize(
    "name", [n for n in CHECKED if part(n) in {"errors", "config", "tasks", "options", "cli"}]
)
def test_no_torch_before_it_is_needed(name: str) -> None:
    assert "torch" not in {other.split(".")[0] for other in module_imports(name)}


def test_public_names_are_shown_by_dir_and_help() -> None:
    names = {
        "all_prefixes",
        "check",
        "generate",
        "load",
        "predict",
        "train",
        "ModelConfig",
        "Transformer",
    }
    assert names <= set(dir(entp))
    text = pydoc.plain(pydoc.render_doc(entp))
    assert all(
        f"{name}(" in text for name in ("all_prefixes", "check", "generate", "predict", "train")
    )
    with pytest.raises(AttributeError, match="module 'entp' has no attribute 'nothing'"):
        entp.nothing  # noqa: B018
