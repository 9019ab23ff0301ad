"""Runs as JSON and back: every wrong key and type is named, and reading imports nothing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_runs import DEFAULTS, RANDOM_TARGETS, RUNS, TECHNIQUES, as_json, changed

from entp.config import OptimConfig, Run, model_for
from entp.config.json import config_hash, model_from_json, read_run, run_from_json, run_to_json
from entp.errors import InputError
from entp.tasks.base import Task
from entp.tasks.counting import Count3, count2_next


class Halved(Count3):
    """A task of our own that inherits the name of a built-in one."""

    rule = staticmethod(count2_next)


@dataclasses.dataclass(frozen=True)
class Own(Task):
    """A task of our own, in a module that is imported."""

    size: int = 4

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": self.size, "context_length": self.size}


@pytest.mark.parametrize(
    "run",
    [*RUNS.values(), Run(Halved(), model_for(Halved())), Run(Own(5), model_for(Own(5)))],
    ids=[*RUNS, "subclass of a built-in task", "own task"],
)
def test_run_survives_json(run: Run) -> None:
    again = run_from_json(as_json(run))
    assert again == run
    assert as_json(run) == run_to_json(run)  # plain values: no tuples
    assert type(again.task) is type(run.task)
    assert config_hash(again) == config_hash(run)


def test_missing_keys_are_defaults() -> None:
    data = {"task": {"name": "count3"}, "model": as_json(DEFAULTS)["model"]}
    assert run_from_json(data) == DEFAULTS


def test_whole_numbers_in_float_fields_become_floats() -> None:
    run = dataclasses.replace(DEFAULTS, optim=OptimConfig(grad_clip=1))
    again = run_from_json(run_to_json(run))
    assert again == run
    assert json.dumps(run_to_json(again)) == json.dumps(run_to_json(run))
    assert config_hash(again) == config_hash(run)


PARTS = [name for name, value in as_json(TECHNIQUES).items() if isinstance(value, dict)]


@pytest.mark.parametrize("path", ["extra", *(f"{part}.extra" for part in PARTS)])
def test_unknown_keys_are_named(path: str) -> None:
    with pytest.raises(InputError, match=r"run\.json.*extra"):
        run_from_json(changed(TECHNIQUES, path, 1), "run.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("task.length", "long"),
        ("task.num_values", None),
        ("model.layers", "three"),
        ("model.width", 2.5),
        ("model.norm", "batch"),
        ("model.vocab", [64]),
        ("optim.lr", "fast"),
        ("optim.name", 3),
        ("train.cuda_graph", "perhaps"),
        ("train.stop_at", "high"),
        ("train.monitor", []),
        ("train.monitor", {}),
        ("mode", 3),
        ("mode", []),
        ("steps", "200"),
        ("steps", None),
        ("steps", 10.5),
        ("batch_size", [64]),
        ("seed", 1.5),
        ("optim", []),
        ("optim", None),
        ("train", "x"),
        ("train", None),
        ("model", None),
        ("ema", 4),
        ("ema.steps", "many"),
        ("importance.proposal", ["decoder"]),
        ("batch_schedule", []),
        ("curriculum", True),
        ("curriculum.mode", {}),
    ],
)
def test_wrong_types_are_named(path: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"\b{path.split('.')[-1]}\b"):
        run_from_json(changed(TECHNIQUES, path, value))


@pytest.mark.parametrize("name", ["ema", "importance", "batch_schedule", "curriculum"])
def test_null_turns_a_technique_off(name: str) -> None:
    run = run_from_json(changed(TECHNIQUES, name, None))
    assert run == dataclasses.replace(TECHNIQUES, **{name: None})


def test_null_turns_random_targets_off() -> None:
    run = run_from_json(changed(RANDOM_TARGETS, "random_targets", None))
    assert run == dataclasses.replace(TECHNIQUES, importance=None)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "run",
        {},
        {"task": None},
        {"task": "count3"},
        {"task": {}},
        {"task": {"length": 64}},
    ],
)
def test_what_is_no_run_is_refused(data: Any) -> None:
    with pytest.raises(InputError, match="config is not the configuration of a run"):
        run_from_json(data)


def test_checks_apply_to_json() -> None:
    with pytest.raises(
        InputError, match=r"^config cannot be read: model\.heads 5 does not divide model\.width 192"
    ):
        run_from_json(changed(DEFAULTS, "model.heads", 5))
    with pytest.raises(InputError, match="swapped"):
        run_from_json(changed(DEFAULTS, "optim.min_lr", 1.0))


@pytest.mark.parametrize("text", ["{", "[" * 10_000, '{"task": 1}', "\x00"])
def test_unreadable_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        read_run(file)


def test_model_is_read_alone() -> None:
    """Also next to a run that cannot be read."""
    data = changed(DEFAULTS, "model.layers", 5)
    data["train"]["compile"] = True
    assert model_from_json(data, "x").layers == 5
    for wrong in (None, [], {}, {"model": 3}):
        with pytest.raises(InputError, match="x does not describe a model"):
            model_from_json(wrong, "x")
    with pytest.raises(InputError, match=r"model\.extra"):
        model_from_json({"model": {"vocab": 4, "extra": 1}}, "x")


def test_file_never_imports_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sprung = tmp_path / "sprung"
    (tmp_path / "entp_test_trap.py").write_text(f"open({str(sprung)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match="entp_test_trap:Trap, which is not built in: import it first"
    ):
        run_from_json(changed(DEFAULTS, "task.name", "entp_test_trap:Trap"))
    assert "entp_test_trap" not in sys.modules
    assert not sprung.exists()


def test_config_is_imported_without_torch_and_hashes_alike() -> None:
    """Every import of entp.config, and of the public names of entp that are configurations."""
    script = """
import sys, entp, entp.config
entp.Run, entp.SIZES, entp.InputError
heavy = {"torch", "matplotlib", "pydantic", "tyro", "scipy"}
print(sorted({name.split(".")[0] for name in sys.modules} & heavy))
from entp.config.json import config_hash
from entp.tasks.counting import Count3
print(config_hash(entp.Run(Count3(), entp.config.model_for(Count3()))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", config_hash(DEFAULTS)]


def test_public_names_are_found_and_others_are_not() -> None:
    import entp

    assert entp.Run is Run
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        entp.nothing  # noqa: B018
