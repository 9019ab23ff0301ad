"""Configurations of earlier versions: every old name is read, and nothing else is let in."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from config_runs import DEFAULTS, RUNS, TECHNIQUES, as_json, changed

from entp.config import (
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    Run,
    upgrade,
)
from entp.config.json import model_from_json, run_from_json
from entp.config.upgrade import (
    GONE,
    METRICS,
    MODES,
    OPTIONS,
    RENAMED,
    TASK_FIELDS,
    option_today,
    upgrade_config,
    upgrade_values,
)
from entp.errors import InputError
from entp.tasks import task_class

OTHER = {
    "context_length": 70,
    "position_embedding": "rotary",
    "attention_scale": "one",
    "lr": 7e-4,
    "warmup_steps": 7,
    "decay_by": "seconds",
    "schedule": "linear",
    "grad_clip": 0.7,
    "precondition_every": 7,
    "monitor": "loss",
    "stop_at": 0.7,
    "cuda_graph": False,
    "logger": "wandb",
    "batch_size": 7,
    "prompt_length": 7,
    "num_values": 9,
    "train_examples": 77,
    "uniform_lengths": True,
}
"""A value that is not the default, for every field that was renamed."""


def get(data: Any, *path: str) -> Any:
    for name in path:
        data = data[name] if isinstance(data, dict) else getattr(data, name)
    return data


def in_old_words(data: dict[str, Any], part: str, old: str, new: str) -> dict[str, Any]:
    """The configuration with one field under its old name and with another value."""
    data = copy.deepcopy(data)
    fields = data[part] if part else data
    del fields[new]
    fields[old] = OTHER[new]
    return data


RENAMES = [
    (part, old, new)
    for part, names in RENAMED.items()
    if part != "start"
    for old, new in names.items()
]


@pytest.mark.parametrize(("part", "old", "new"), RENAMES)
def test_old_field_is_read_as_the_new_one(part: str, old: str, new: str) -> None:
    data = as_json(DEFAULTS)
    data["train"]["max_seconds"] = 5.0  # for decay_by seconds
    data["optim"]["name"] = "muon"  # for precondition_every
    run = run_from_json(in_old_words(data, part, old, new))
    assert get(run, *filter(None, [part]), new) == OTHER[new]


@pytest.mark.parametrize(("part", "old", "new"), RENAMES)
def test_old_and_new_name_together_are_refused(part: str, old: str, new: str) -> None:
    data = as_json(DEFAULTS)
    (data[part] if part else data)[old] = OTHER[new]
    with pytest.raises(InputError, match=rf"\b{old}\b.*\b{new}, which are the same"):
        run_from_json(data)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [(name, old, new) for name, fields in TASK_FIELDS.items() for old, new in fields.items()],
)
def test_old_field_of_a_task_is_read_as_the_new_one(name: str, old: str, new: str) -> None:
    run = next(run for run in RUNS.values() if run.task.name == name)
    data = in_old_words(as_json(run), "task", old, new)
    data["model"]["vocab"] = vocab_needed(data)
    assert get(run_from_json(data), "task", new) == OTHER[new]
    data["task"][new] = OTHER[new]
    with pytest.raises(InputError, match=rf"task\.{old} and task\.{new}, which are the same"):
        run_from_json(data)


def vocab_needed(data: dict[str, Any]) -> int:
    """The vocabulary that the task of a configuration in old words needs."""
    fields = upgrade_config(data)["task"]
    task = task_class(fields.pop("name"))(**fields)
    return task.model_needs()["vocab"]


def test_names_of_tasks_do_not_touch_other_tasks() -> None:
    """`values` was a field of counting tasks: a task of our own may still have one."""
    data = {"task": {"name": "mine:Task", "values": 3, "examples": 4}}
    assert upgrade_config(data) == data


@pytest.mark.parametrize(("old", "new"), MODES.items())
def test_old_mode_is_read_as_the_new_one(old: str, new: str) -> None:
    start = {"steps": 600, "mode": old, "batch": 0, "max_lr": 0.0, "even": False}
    run = run_from_json({**as_json(DEFAULTS), "curriculum": None, "start": start})
    assert run.curriculum == CurriculumConfig(600, new)  # type: ignore[arg-type]
    if new == "prefix-lm":
        assert run_from_json(changed(DEFAULTS, "mode", old)).mode == new
    else:
        with pytest.raises(InputError, match=f"unknown mode '{new}'"):
            run_from_json(changed(DEFAULTS, "mode", old))


@pytest.mark.parametrize(("old", "new"), METRICS.items())
def test_old_metric_is_read_as_the_new_one(old: str, new: str) -> None:
    data = as_json(DEFAULTS)
    del data["train"]["monitor"]
    data["train"]["target_metric"] = old
    assert run_from_json(data).train.monitor == new
    assert run_from_json(changed(DEFAULTS, "train.monitor", old)).train.monitor == new
    assert upgrade_values({old: 0.5, "loss": 2.0}) == {new: 0.5, "loss": 2.0}


@pytest.mark.parametrize(
    ("part", "name", "nothing"),
    [(part, name, nothing) for part, gone in GONE.items() for name, nothing in gone.items()],
)
def test_gone_field_is_read_where_it_did_nothing(part: str, name: str, nothing: Any) -> None:
    assert run_from_json(changed(DEFAULTS, f"{part}.{name}", nothing)) == DEFAULTS
    with pytest.raises(
        InputError, match=rf"^{part}\.{name} is 5: this version of entp cannot do that, and reads"
    ):
        run_from_json(changed(DEFAULTS, f"{part}.{name}", 5))


OPTIMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"average": 0, "late_at": 0, "late_batch": 0, "select": False, "take": 0}, {}),
    "average": ({"average": 4}, {"ema": EmaConfig(4)}),
    "late": (
        {"late_at": 6, "late_batch": 12},
        {"batch_schedule": BatchScheduleConfig(6, 12)},
    ),
    "take": ({"take": 20}, {"importance": ImportanceConfig(20, "decoder")}),
    "select": ({"select": True}, {"importance": ImportanceConfig(None, "entp")}),
    "all": (
        {"average": 4, "late_at": 6, "late_batch": 12, "select": True},
        {
            "ema": EmaConfig(4),
            "batch_schedule": BatchScheduleConfig(6, 12),
            "importance": ImportanceConfig(),
        },
    ),
}


@pytest.mark.parametrize(("optim", "techniques"), OPTIMS.values(), ids=OPTIMS)
def test_techniques_are_taken_out_of_optim(
    optim: dict[str, Any], techniques: dict[str, Any]
) -> None:
    data = as_json(DEFAULTS)
    data["optim"] |= optim
    assert run_from_json(data) == run_with(techniques)


def run_with(techniques: dict[str, Any]) -> Run:
    return Run(DEFAULTS.task, DEFAULTS.model, **techniques)


STARTS: dict[str, tuple[dict[str, Any] | None, CurriculumConfig | None]] = {
    "null": (None, None),
    "empty": ({}, None),
    "off": ({"steps": 0, "mode": "decoder", "batch": 0, "max_lr": 0.0, "even": False}, None),
    "steps": ({"steps": 600}, CurriculumConfig(600)),
    "plain": (
        {"steps": 600, "mode": "decoder", "batch": 0, "max_lr": 0.0, "even": False},
        CurriculumConfig(600),
    ),
    "all": (
        {"steps": 600, "mode": "prefixes", "batch": 16, "max_lr": 1e-3, "even": True},
        CurriculumConfig(600, "random-prefix", 16, 1e-3, uniform_lengths=True),
    ),
}


@pytest.mark.parametrize(("start", "curriculum"), STARTS.values(), ids=STARTS)
def test_start_is_read_as_a_curriculum(
    start: dict[str, Any] | None, curriculum: CurriculumConfig | None
) -> None:
    data = as_json(DEFAULTS)
    del data["curriculum"]
    assert run_from_json({**data, "start": start}) == run_with({"curriculum": curriculum})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "late without a batch": ({"optim": {"late_at": 6}}, r"batch_schedule\.batch_size is 0"),
    "late without a step": ({"optim": {"late_batch": 12}}, r"batch_schedule\.step is 0"),
    "negative average": ({"optim": {"average": -1}}, r"ema\.steps is -1"),
    "average of a wrong type": ({"optim": {"average": "x"}}, r"ema\.steps"),
    "negative take": ({"optim": {"take": -1}}, r"importance\.samples is -1"),
    "start of a wrong type": ({"start": 5}, "curriculum"),
    "start with an unknown key": ({"start": {"steps": 600, "odd": 1}}, r"curriculum\.odd"),
    "no start, an unknown key": ({"start": {"steps": 0, "odd": 1}}, r"curriculum\.odd"),
    "start with a wrong mode": ({"start": {"steps": 600, "mode": []}}, r"curriculum\.mode"),
    "start without steps": ({"start": {"batch": 4}}, r"curriculum\.steps"),
    "start of 0 steps": ({"start": {"steps": 0, "batch": 4}}, r"curriculum\.steps is 0"),
    "start in both words": ({"start": {"steps": 600, "batch": 4, "batch_size": 4}}, "the same"),
    "average and ema": ({"optim": {"average": 3}, "ema": {"steps": 3}}, "says twice what ema is"),
    "start and curriculum": (
        {"start": {"steps": 600}, "curriculum": {"steps": 600}},
        "says twice what curriculum is",
    ),
}


@pytest.mark.parametrize(("old", "says"), REFUSED.values(), ids=REFUSED)
def test_old_configuration_is_refused(old: dict[str, Any], says: str) -> None:
    data = {"task": {"name": "count3"}, "model": as_json(DEFAULTS)["model"], **old}
    with pytest.raises(InputError, match=says):
        run_from_json(data)


@pytest.mark.parametrize("part", ["model", "optim", "train"])
def test_changed_default_is_told_by_a_line_in_defaults(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without the field means the old default; one with it means what it says."""
    name, before = {
        "model": ("activation", "relu"),
        "optim": ("beta2", 0.999),
        "train": ("eval_every", 50),
    }[part]
    monkeypatch.setitem(upgrade.DEFAULTS, part, {name: before})
    data = as_json(DEFAULTS)
    assert run_from_json(data) == DEFAULTS
    del data[part][name]
    assert get(run_from_json(data), part, name) == before


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_upgrade_leaves_todays_configurations_as_they_are(run: Run) -> None:
    data = as_json(run)
    before = copy.deepcopy(data)
    assert upgrade_config(data) == before
    assert data == before


def test_upgrade_changes_nothing_in_place() -> None:
    data = as_json(DEFAULTS)
    data["optim"] |= {"average": 3, "grow_at": 0}
    data["start"] = {"steps": 600, "mode": "prefixes", "batch": 0}
    data["train"]["monitor"] = "sequence_accuracy"
    before = copy.deepcopy(data)
    once = upgrade_config(data)
    assert data == before
    assert upgrade_config(once) == once


@pytest.mark.parametrize("data", [None, 3, "run", [], {}, {"model": 3, "optim": [], "train": "x"}])
def test_upgrade_leaves_what_is_no_configuration(data: Any) -> None:
    assert upgrade_config(data) == data


def test_old_names_of_a_model_are_read_alone() -> None:
    old = {"vocab": 8, "positions": 9, "position": "rotary", "scale": "one", "heads": 2, "width": 8}
    model = model_from_json({"model": old}, "x")
    assert (model.context_length, model.position_embedding, model.attention_scale) == (
        9,
        "rotary",
        "one",
    )


def test_tables_name_fields_of_today() -> None:
    """Whatever they translate to exists, and no old name is one of today's."""
    today = as_json(TECHNIQUES)
    for part, names in RENAMED.items():
        where = today["curriculum" if part == "start" else part] if part else today
        assert set(names.values()) <= set(where)
        assert not set(names) & set(where)
    for part, gone in GONE.items():
        assert not set(gone) & set(today[part])
    tasks = {run.task.name: as_json(run)["task"] for run in RUNS.values()}
    for name, fields in TASK_FIELDS.items():
        assert set(fields.values()) <= set(tasks[name])
        assert not set(fields) & set(tasks[name])


def test_old_option_is_found_under_todays_name() -> None:
    renamed = {
        f"--{part}.{old}".replace("_", "-"): f"--{part}.{new}".replace("_", "-")
        for part, old, new in RENAMES
        if part
    }
    assert renamed.keys().isdisjoint(OPTIONS)
    for old, new in itertools.chain(renamed.items(), OPTIONS.items()):
        assert option_today(old) == new
    assert option_today("--seed") is None
    assert option_today("--optim.lr") is None
