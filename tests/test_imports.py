"""The package's modules import in one direction only, and heavy or optional libraries only where
they are used."""

from __future__ import annotations

import ast
import pydoc
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import entp

ROOT = Path(entp.__file__).parent
LEVELS = [
    {"errors", "fields", "files", "registry", "stats", "terminal", "pretrained"},
    {"data"},
    {"tasks"},
    {"config"},
    {"engine"},
    {"model"},
    {"results"},
    {"report"},
    {"training"},
    {"hf", "llm", "theory", "bench"},
    {"experiments"},
    {"cli"},
]
"""Parts of the package, lowest first: a module imports from its own level and from those before it,
inside functions too."""
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
OPTIONAL = {"matplotlib", "tyro", "pydantic", "scipy", "tensorboard", "wandb", "trackio", "sklearn"}
OPTIONAL |= {"tokenizers", "zstandard", "datasets", "transformers", "peft", "openai", "lm_eval"}
OPTIONAL |= {"jinja2"}
EXEMPT = {"entp", "entp.__main__"}
TECHNIQUES = ("ema", "importance", "curriculum", "batch_schedule", "random_targets")
PLAIN_STEP = ("gradients", "inputs", "cuda_graph")
"""Modules of training that know of techniques in general, and of none in particular."""


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
        for inner in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from statements(inner.body, inside)


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


@cache
def module_imports(name: str, inside: bool = False) -> set[str]:
    path = MODULES[name]
    return imports_of(path.read_text(encoding="utf-8"), name, path.name == "__init__.py", inside)


def part(name: str) -> str:
    """The part of the package a module belongs to: entp.engine.api is in engine."""
    return name.split(".")[1]


def test_reader_sees_what_runs_on_import() -> None:
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
    found = {"torch.nn", "typing", "typing.TYPE_CHECKING", "entp", "entp.model"}
    found |= {"entp.engine.api", "entp.engine.api.choose", "tyro", "a", "b", "c"}
    assert imports_of(source, "entp.engine.packed", False) == found


def test_reader_looks_inside_functions() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a
def f():
    if True:
        import b
class C:
    def g(self):
        with x:
            from c import d
def h():
    match x:
        case 1:
            import e
"""
    outside = {"typing", "typing.TYPE_CHECKING"}
    assert imports_of(source, "entp.x", False) == outside
    assert imports_of(source, "entp.x", False, inside=True) == outside | {*"abce", "c.d"}


def test_modules_are_found() -> None:
    some = {"errors", "config.json", "tasks.counting", "model.transformer", "engine.packed"}
    assert {f"entp.{name}" for name in some} <= set(CHECKED)


def test_every_part_has_one_level() -> None:
    assert sum(map(len, LEVELS)) == len(LEVEL)
    assert {part(name) for name in CHECKED} == set(LEVEL)


@pytest.mark.parametrize("name", CHECKED)
def test_imports_go_one_way(name: str) -> None:
    assert part(name) in LEVEL, f"{name} has no level: add it to LEVELS"
    for other in module_imports(name, inside=True):
        if other in MODULES and other not in EXEMPT:
            assert LEVEL[part(other)] <= LEVEL[part(name)], (
                f"{name} imports {other}, which is above it"
            )


def test_lowest_modules_import_errors_at_most() -> None:
    for name in ("errors", "fields", "files", "registry", "stats"):
        ours = {o for o in module_imports(f"entp.{name}", inside=True) if o in MODULES}
        assert ours - EXEMPT <= ({"entp.errors"} if name != "errors" else set()), name


def test_imports_have_no_cycles() -> None:
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
    """But for the records' schema and its sections, pydantic's, the command line, tyro's, and the
    two classes that are those of another library."""
    roots = {other.split(".")[0] for other in module_imports(name)}
    allowed = {"pydantic"} if part(name) in {"results", "experiments"} else set()
    alone = {"cli.main": "tyro", "hf.lm_eval": "lm_eval", "hf.modeling_entp": "transformers"}
    allowed |= {library for module, library in alone.items() if name == f"entp.{module}"}
    assert not (roots & OPTIONAL) - allowed


@pytest.mark.parametrize("name", [n for n in CHECKED if part(n) == "tasks"])
def test_tasks_import_numpy_alone(name: str) -> None:
    roots = {other.split(".")[0] for other in module_imports(name, inside=True)}
    allowed = {"numpy", "entp"}
    if name == "entp.tasks.regression":  # its slow baselines
        allowed.add("sklearn")
    assert roots - sys.stdlib_module_names <= allowed


@pytest.mark.parametrize(
    "name", [n for n in CHECKED if part(n) in {*LEVELS[0], "data", "tasks", "config"}]
)
def test_low_levels_import_no_torch(name: str) -> None:
    """Not even inside functions: workers and `--help` start without it."""
    assert "torch" not in {other.split(".")[0] for other in module_imports(name, inside=True)}


@pytest.mark.parametrize("name", [n for n in CHECKED if part(n) == "cli"])
def test_command_line_imports_no_torch_before_it_is_needed(name: str) -> None:
    assert "torch" not in {other.split(".")[0] for other in module_imports(name)}


@pytest.mark.parametrize("name", [n for n in CHECKED if part(n) == "report"])
def test_report_draws_any_record_without_tasks_or_recipes(name: str) -> None:
    others = {o for o in module_imports(name, inside=True) if o in MODULES} - EXEMPT
    forbidden = {o for o in others if part(o) in {"training", "experiments", "config"}}
    forbidden |= {o for o in others if part(o) == "tasks"} - {"entp.tasks", "entp.tasks.metrics"}
    assert not forbidden
    assert "entp.tasks" not in others or "entp.tasks.metrics" in others


@pytest.mark.parametrize("name", PLAIN_STEP)
def test_step_names_no_technique(name: str) -> None:
    full = f"entp.training.{name}"
    room = "entp.training.techniques."
    named = {o for o in module_imports(full, inside=True) if o.startswith(room)}
    assert {o for o in named if not o.startswith(f"{room}base")} == set()
    texts = {
        node.value
        for node in ast.walk(ast.parse(MODULES[full].read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not texts & set(TECHNIQUES)
    assert all(
        node.attr not in TECHNIQUES
        for node in ast.walk(ast.parse(MODULES[full].read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    )


def test_techniques_know_nothing_of_each_other() -> None:
    """Each can be deleted with its file and its line."""
    room = "entp.training.techniques."
    for name in CHECKED:
        if name.startswith(room) and name != f"{room}base":
            named = {o for o in module_imports(name, inside=True) if o.startswith(room)}
            assert {o for o in named if not o.startswith(f"{room}base")} == set()


def test_nobody_imports_a_technique_by_name() -> None:
    """They are found by the lines of TECHNIQUES: whoever imports one cannot do without it."""
    room = "entp.training.techniques."
    files = {n for n in CHECKED if n.startswith(room) and n != f"{room}base"}
    for name in CHECKED:
        assert not module_imports(name, inside=True) & files - {name}, name


def test_public_names_are_shown_by_dir_and_help() -> None:
    functions = {"all_prefixes", "check", "generate", "load", "train"}
    assert functions | {"ModelConfig", "Transformer"} <= set(dir(entp))
    text = pydoc.plain(pydoc.render_doc(entp))
    assert all(f"{name}(" in text for name in functions)
    with pytest.raises(AttributeError, match="module 'entp' has no attribute 'nothing'"):
        entp.nothing  # noqa: B018
