"""Documents name what exists: paths, tests, commands with their options, recipes."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import shlex
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from documents import (
    DOCS,
    DOCUMENTS,
    EXAMPLES,
    Command,
    code_blocks,
    commands_in,
    exists,
    looks_like_a_path,
    paths_in,
    rows_of,
    spans_in,
)

import entp.cli
from entp.bench.options import BENCHES
from entp.cli.aliases import HABITS, SWITCHES
from entp.cli.derive import options_of
from entp.cli.main import COMMANDS, main
from entp.cli.theory import THEORY
from entp.cli.train import run_of, train_options
from entp.config import Run, model_for
from entp.config.json import run_to_json
from entp.experiments import RECIPES
from entp.experiments.recipe import find_recipe
from entp.tasks.base import TASKS, task_class
from entp.tasks.text import Text

MODULES = [
    importlib.import_module(f"entp.cli.{found.name}")
    for found in pkgutil.iter_modules(entp.cli.__path__)
]
OTHER_PROGRAMS = "hf download|lm-eval|mypy|pip|pytest|torchrun"
MAP = DOCS / "map.md"
PRETRAINED = {
    "smollm2": "llama",
    "small-bert": "bert",
    "tiny-llama": "llama",
    "small-llama": "llama",
}
"""Folders in HuggingFace's format that documents make, by their type of model."""
SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("entp/engine/packed.py", True),
        ("entp/engine/", True),
        ("tests/engine/test_packed.py::test_split", True),
        ("engine/packed.py", True),
        ("docs/engine.md", True),
        ("pyproject.toml", True),
        ("runs/parity", False),
        ("runs/first/config.json", False),
        ("parity.py", False),
        ("x[:, :t+1]", False),
        ("--task.length", False),
        ("entp train parity", False),
    ],
)
def test_paths_are_told_from_other_spans(span: str, expected: bool) -> None:
    assert looks_like_a_path(span) is expected


def test_missing_path_or_test_is_noticed() -> None:
    assert not exists("entp/engine/nowhere.py")
    assert not exists("tests/engine/test_packed.py::test_that_is_not_there")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_paths_exist(path: Path) -> None:
    missing = [name for name in paths_in(path) if not exists(name)]
    assert not missing, f"{path.name} names what is not there: {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_recipes_exist(path: Path) -> None:
    lines = [span for span in spans_in(path) if span.startswith("entp ")]
    text = "\n".join([*lines, *(command.line for command in commands_in(path))])
    commands = set(re.findall(r"^entp ([a-z-]+)", text, re.MULTILINE))
    recipes = set(re.findall(r"^entp reproduce ([a-z][\w-]*)(?![\w:-])", text, re.MULTILINE))
    assert commands <= set(COMMANDS)
    assert recipes <= {*RECIPES, "all"}


@lru_cache
def every_option() -> set[str]:
    """The options of all commands, and what else they may be called."""
    kinds = [train_options(task_class(name)) for name in TASKS]
    kinds += [*BENCHES.values(), *THEORY.values()]
    for module in MODULES:
        found = [value for name, value in vars(module).items() if name.endswith("Options")]
        kinds += [kind for kind in found if isinstance(kind, type)]
    options = {name: option for kind in kinds for name, option in options_of(kind).items()}
    for name in TASKS:
        options |= options_of(task_class(name), prefix="--on.")
    switches = [name for name, option in options.items() if "bool" in str(option.kind)]
    habits = {f"--{habit}" for names in HABITS.values() for habit in names}
    return {*options, *map(negated, switches), *habits, *SWITCHES}


def negated(switch: str) -> str:
    """--a.b as --a.no-b."""
    part, dot, last = switch.removeprefix("--").rpartition(".")
    return f"--{part}{dot}no-{last}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_exist(path: Path) -> None:
    ours = [span for span in spans_in(path) if not re.search(OTHER_PROGRAMS, span)]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", " ".join(ours)))
    known = every_option() | {"--help", "--help-all", "--version"}
    assert named <= known, sorted(named - known)


class Parsed(Exception):
    """The options of a command, in place of running it."""


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it has the files of docs/add-a-task.md, folders like the repository's,
    and the configurations of a run of text and of pretrained models."""
    for name, source in zip(EXAMPLES, code_blocks(DOCS / "add-a-task.md", "python"), strict=True):
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in EXAMPLES:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    for name in ("docs", "results"):
        (tmp_path / name).mkdir()
    run = Run(Text(block=32), model_for(Text(block=32)))
    (tmp_path / "runs/pydoc").mkdir(parents=True)
    (tmp_path / "runs/pydoc/config.json").write_text(json.dumps(run_to_json(run)))
    for name, kind in PRETRAINED.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind, **SIZES}))
    tokens = {"model": {"type": "WordLevel", "vocab": {"</s>": 0, "1": 1}, "unk_token": "</s>"}}
    (tmp_path / "tiny-llama/tokenizer.json").write_text(json.dumps(tokens))
    told = {"eos_token": "</s>"}
    (tmp_path / "tiny-llama/tokenizer_config.json").write_text(json.dumps(told))
    return tmp_path


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end with an exception once their words are parsed."""
    for module in MODULES:
        if hasattr(module, "parse"):
            monkeypatch.setattr(module, "parse", parse_and_stop(module.parse))


def parse_and_stop(parse: Any) -> Any:
    def stop(*args: Any, **options: Any) -> Any:
        raise Parsed(parse(*args, **options))

    return stop


def from_the_map() -> list[Command]:
    """The commands of docs/map.md, with a name in place of TASK and RUN."""
    cells = " ".join(row[3] for row in rows_of(MAP, "paper"))
    spans = re.findall(r"`(entp [^`]+)`", cells)
    lines = [span.replace("TASK", "count3").replace("RUN", "runs/first") for span in set(spans)]
    return [Command(MAP.name, line) for line in sorted(lines)]


ALL = [*(command for path in DOCUMENTS for command in commands_in(path)), *from_the_map()]


@pytest.mark.usefixtures("examples", "only_parse")
@pytest.mark.parametrize("command", sorted(set(ALL)), ids=lambda command: command.line[:60])
def test_command_parses(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.line, comments=True)
    assert words[0] == "entp"
    try:
        code = main(words[1:])
    except Parsed as parsed:
        (options,) = parsed.args
        if words[1] == "train" and str(options.init) not in PRETRAINED:
            run_of(options)
        if words[1] == "reproduce" and getattr(options, "only", ("all",)) != ("all",):
            assert {arm.label for arm in find_recipe(words[2]).arms} >= set(options.only)
    else:
        assert code == 0, f"{command.document}: {capsys.readouterr().err}"


def test_command_with_unknown_option_is_noticed(
    only_parse: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "runs/first", "--speed", "3"]) == 2
    assert "--speed" in capsys.readouterr().err


def test_map_rows_have_a_status() -> None:
    rows = rows_of(MAP, "paper")
    assert len(rows) > 40
    for row in rows:
        assert len(row) == 5, row
        assert re.match(r"(done|not yet|not run)\b", row[4]), row
        if row[4].startswith("done"):
            assert row[1], f"{row[0]} is done, but no file is named"


def test_map_names_every_recipe() -> None:
    assert set(re.findall(r"entp reproduce ([a-z][\w-]*)", MAP.read_text())) == set(RECIPES)
