"""The hash that tells runs apart: changed by all that a step computes or an evaluation measures."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from config_runs import DEFAULTS, RANDOM_TARGETS, TECHNIQUES, as_json, changed

from entp.config import (
    TECHNIQUE_CONFIGS,
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    ModelConfig,
    OptimConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.config.json import (
    FREE_TO_CHANGE,
    config_hash,
    free_to_change,
    identity,
    run_from_json,
)
from entp.tasks import base
from entp.tasks.counting import Count3

ARMS = json.loads((Path(__file__).parents[1] / "fixtures/before_the_move/arms.json").read_text())
"""Arms of all recipes before the move: their settings in the old words, and their old hashes."""


def test_arms_from_before_the_move_are_told_apart_as_before() -> None:
    """Equal new hashes if and only if the old ones are equal; today's words change nothing."""
    runs = [run_from_json(arm["settings"]) for arm in ARMS]
    old, new = [arm["hash"] for arm in ARMS], [config_hash(run) for run in runs]
    assert len(ARMS) == 84
    assert len(set(zip(old, new, strict=True))) == len(set(old)) == len(set(new))
    again = [run_from_json(as_json(run)) for run in runs]
    assert again == runs
    assert [config_hash(run) for run in again] == new


OLD_FREE = ("checkpoint_every", "log_every", "mirror", "target", "max_seconds")
OLD_ADDED = {"norm_placement": "pre", "bias": True, "tied_head": True, "kv_heads": None, "loops": 1}


def old_hash(settings: dict[str, Any]) -> str:
    """The hash that a run had before the move."""
    data = copy.deepcopy(settings)
    del data["steps"]
    kept = data["train"]["max_seconds"]
    for name in OLD_FREE:
        del data["train"][name]
    for name, value in OLD_ADDED.items():
        if data["model"][name] == value:
            del data["model"][name]
    if data["optim"]["decay"] == "seconds":
        data["train"]["max_seconds"] = kept
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]


CHANGES_IN_OLD_WORDS: list[dict[str, Any]] = [
    {"steps": 7},
    {"train.checkpoint_every": 7},
    {"train.log_every": 7},
    {"train.mirror": "wandb"},
    {"train.target": 0.7},
    {"train.max_seconds": 7.0},
    {"train.max_seconds": 7.0, "optim.decay": "seconds"},
    {"train.max_seconds": 8.0, "optim.decay": "seconds"},
    {"train.target_metric": "loss"},
    {"train.target_metric": "sequence_accuracy"},
    {"train.eval_batches": 7},
    {"train.token_budget": 7},
    {"train.graph": False},
    {"seed": 7},
    {"batch": 7},
    {"mode": "decoder"},
    {"mode": "prefix"},
    {"model.loops": 7},
    {"model.bias": False},
    {"model.position": "rotary"},
    {"model.scale": "one"},
    {"optim.max_lr": 7e-4},
    {"optim.warmup": 7},
    {"optim.shape": "linear"},
    {"optim.clip": 0.7},
    {"optim.name": "muon"},
    {"optim.name": "muon", "optim.whiten": 7},
    {"optim.average": 7},
    {"optim.average": 8},
    {"optim.late_at": 7, "optim.late_batch": 8},
    {"optim.late_at": 8, "optim.late_batch": 8},
    {"optim.late_at": 7, "optim.late_batch": 7},
    {"optim.select": True},
    {"optim.take": 77},
    {"optim.take": 78},
    {"start.steps": 700},
    {"start.steps": 701},
    {"start.steps": 700, "start.mode": "entp"},
    {"start.steps": 700, "start.mode": "prefixes"},
    {"start.steps": 700, "start.mode": "prefix"},
    {"start.steps": 700, "start.mode": "prefixes", "start.even": True},
    {"start.steps": 700, "start.batch": 7},
    {"start.steps": 700, "start.max_lr": 7e-3},
]


def test_changes_of_an_arm_are_told_apart_as_before() -> None:
    """Of every two of them: equal new hashes if and only if the old ones are equal."""
    assert [old_hash(arm["settings"]) for arm in ARMS] == [arm["hash"] for arm in ARMS]
    plain = ARMS[0]["settings"]
    variants = [plain, *(put(plain, change) for change in CHANGES_IN_OLD_WORDS)]
    old = [old_hash(settings) for settings in variants]
    new = [config_hash(run_from_json(settings)) for settings in variants]
    assert len(set(zip(old, new, strict=True))) == len(set(old)) == len(set(new))
    assert len(set(old)) == len(variants) - 6


def put(data: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy with other values at paths such as model.layers."""
    data = copy.deepcopy(data)
    for path, value in values.items():
        *parents, last = path.split(".")
        inner = data
        for name in parents:
            inner = inner[name]
        inner[last] = value
    return data


def leaves(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from leaves(value, here)
        else:
            yield here, value


OTHER_VALUES = {
    "task.name": "count2",
    "mode": "decoder",
    "model.heads": 6,
    "model.width": 384,
    "model.norm": "none",
    "model.activation": "relu",
    "model.position_embedding": "none",
    "model.attention_scale": "one",
    "model.norm_placement": "post",
    "model.bias": False,
    "model.tied_head": False,
    "model.kv_heads": 1,
    "optim.name": "muon",
    "optim.lr": 8e-4,
    "optim.min_lr": 0.0,
    "optim.decay_by": "seconds",
    "optim.schedule": "linear",
    "optim.beta1": 0.5,
    "optim.beta2": 0.5,
    "train.monitor": "loss",
    "train.stop_at": 0.5,
    "train.eval_splits": ["test"],
    "train.patience": 3,
    "train.patience_from": 1.1,
    "train.max_seconds": 5.0,
    "train.impl": "packed",
    "train.token_budget": 9,
    "train.precision": "fp32",
    "train.cuda_graph": False,
    "train.logger": "wandb",
    "importance.proposal": "entp",
    "random_targets": {"count": 3},
    "curriculum.mode": "decoder",
    "curriculum.lr": 2e-3,
    "curriculum.uniform_lengths": False,
    "curriculum.prefixes": "always",
    "init": "0123456789abcdef",
}
"""Another allowed value of each field to which 1 cannot be added."""
TOGETHER: dict[str, dict[str, Any]] = {
    "task.num_values": {"model.vocab": 65},
    "task.length": {"model.context_length": 65},
    "mode": {"importance": None},
    "optim.decay_by": {"train.max_seconds": 5.0, "curriculum": None},
    "optim.precondition_every": {"optim.name": "muon"},
    "train.patience_from": {"train.patience": 3},
    "importance.proposal": {"importance.samples": None},
    "random_targets": {"importance": None},
    "curriculum.mode": {"curriculum.uniform_lengths": False},
}
"""What has to be another value too; the run that is compared with has it as well if it can."""
FIXED_BY_THE_TASK = {"model.vocab", "model.input_dim", "model.outputs"}
PATHS = [path for path, _ in leaves(as_json(TECHNIQUES)) if path not in FIXED_BY_THE_TASK]


def with_values(run: Run, values: dict[str, Any]) -> Run:
    return run_from_json(put(as_json(run), values))


@pytest.mark.parametrize("path", PATHS)
def test_hash_changes_with_every_field_that_is_not_free(path: str) -> None:
    now = dict(leaves(as_json(TECHNIQUES)))[path]
    value = OTHER_VALUES[path] if path in OTHER_VALUES else now + 1
    needed = TOGETHER.get(path, {})
    other = with_values(TECHNIQUES, {**needed, path: value})
    run = TECHNIQUES
    if path in TOGETHER and not path.startswith(("task.", "importance.")):
        run = with_values(TECHNIQUES, needed)
    assert other != run
    assert (config_hash(other) == config_hash(run)) == (path in FREE_TO_CHANGE)


def test_fields_free_to_change_exist() -> None:
    assert set(FREE_TO_CHANGE) <= set(PATHS)


@pytest.mark.parametrize("name", TECHNIQUE_CONFIGS)
def test_hash_changes_when_a_technique_is_turned_on(name: str) -> None:
    config = getattr(TECHNIQUES, name) or getattr(RANDOM_TARGETS, name)
    on = dataclasses.replace(DEFAULTS, **{name: config})
    assert config_hash(on) != config_hash(DEFAULTS)


def test_hash_changes_with_the_number_of_random_targets() -> None:
    other = with_values(RANDOM_TARGETS, {"random_targets.count": 13})
    assert config_hash(other) != config_hash(RANDOM_TARGETS)


def test_hash_changes_with_a_technique_whose_fields_are_all_defaults() -> None:
    on = dataclasses.replace(DEFAULTS, importance=ImportanceConfig())
    assert identity(on)["importance"] == {}
    assert config_hash(on) != config_hash(DEFAULTS)


def test_hash_has_the_time_where_the_schedule_follows_it() -> None:
    timed = with_values(DEFAULTS, {"train.max_seconds": 5.0})
    clocked = with_values(timed, {"optim.decay_by": "seconds"})
    longer = with_values(clocked, {"train.max_seconds": 6.0})
    assert config_hash(timed) == config_hash(DEFAULTS)
    assert len({config_hash(one) for one in (DEFAULTS, clocked, longer)}) == 3
    assert free_to_change(timed) - free_to_change(clocked) == {"train.max_seconds"}


@dataclass(frozen=True)
class LaterModel(ModelConfig):
    added: int = 7
    """A field that came later, as in the other classes here."""


@dataclass(frozen=True)
class LaterOptim(OptimConfig):
    added: float = 0.5


@dataclass(frozen=True)
class LaterTrain(TrainConfig):
    added: tuple[str, ...] = field(default_factory=lambda: ("a", "b"))


@dataclass(frozen=True)
class LaterEma(EmaConfig):
    added: str | None = None


@dataclass(frozen=True)
class LaterImportance(ImportanceConfig):
    added: bool = False


@dataclass(frozen=True)
class LaterBatchSchedule(BatchScheduleConfig):
    added: int | None = None


@dataclass(frozen=True)
class LaterCurriculum(CurriculumConfig):
    added: str = "linear"


@dataclass(frozen=True)
class LaterCount3(Count3):
    added: int = 3


@dataclass(frozen=True)
class LaterRun(Run):
    added: int = 9
    technique: EmaConfig | None = None


LATER: dict[str, tuple[type, Any]] = {
    "model": (LaterModel, 8),
    "optim": (LaterOptim, 1.5),
    "train": (LaterTrain, ("a",)),
    "ema": (LaterEma, "x"),
    "importance": (LaterImportance, True),
    "batch_schedule": (LaterBatchSchedule, 3),
    "curriculum": (LaterCurriculum, "cosine"),
    "task": (LaterCount3, 4),
}
"""Each part of a run as it might be in a later version, and another value of its new field."""


def as_later(run: Run, part: str, **values: Any) -> Run:
    """The run with one of its parts of a later class."""
    config = getattr(run, part)
    now = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return dataclasses.replace(run, **{part: LATER[part][0](**now, **values)})


@pytest.fixture
def later_count3(monkeypatch: pytest.MonkeyPatch) -> None:
    """LaterCount3 as the built-in task."""
    path = f"{LaterCount3.__module__}:{LaterCount3.__qualname__}"
    monkeypatch.setitem(base.TASKS, "count3", path)


@pytest.mark.usefixtures("later_count3")
@pytest.mark.parametrize("part", LATER)
def test_new_field_at_its_default_keeps_the_hash(part: str) -> None:
    run = TECHNIQUES if part == "task" else as_later(TECHNIQUES, "task")
    before = config_hash(as_later(TECHNIQUES, "task"))
    later = as_later(run, part)
    assert type(getattr(later, part)) is LATER[part][0]
    assert config_hash(later) == before
    assert config_hash(as_later(run, part, added=LATER[part][1])) != before


def test_new_field_of_the_run_keeps_the_hash() -> None:
    now = {f.name: getattr(TECHNIQUES, f.name) for f in dataclasses.fields(TECHNIQUES)}
    assert config_hash(LaterRun(**now)) == config_hash(TECHNIQUES)
    assert config_hash(LaterRun(**now, added=10)) != config_hash(TECHNIQUES)
    assert config_hash(LaterRun(**now, technique=EmaConfig(1))) != config_hash(TECHNIQUES)


def test_task_of_our_own_is_told_from_the_one_it_derives_from() -> None:
    own = Run(LaterCount3(), model_for(LaterCount3()))
    assert config_hash(own) != config_hash(DEFAULTS)


def test_hash_of_the_defaults_is_pinned() -> None:
    """Folders and records name it: whatever changes it needs a line in config/upgrade.py."""
    assert identity(DEFAULTS) == {"task": {"name": "count3"}, "model": {"vocab": 64}}
    assert config_hash(DEFAULTS) == "47fd37fea5"


def test_hash_does_not_depend_on_the_order_of_keys() -> None:
    data = as_json(TECHNIQUES)
    turned = {
        key: dict(reversed(value.items())) if isinstance(value, dict) else value
        for key, value in reversed(data.items())
    }
    assert config_hash(run_from_json(turned)) == config_hash(TECHNIQUES)
    assert config_hash(run_from_json(changed(TECHNIQUES, "seed", 1))) != config_hash(TECHNIQUES)
