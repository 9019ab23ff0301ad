"""Options of `entp train` are derived from the configs, and become a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from entp.cli.derive import docs_of, optional, options_of
from entp.cli.parse import parse
from entp.cli.train import TASK_DECIDES, _defaults, run_of, train_options
from entp.config import (
    TECHNIQUE_CONFIGS,
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    ModelConfig,
    RandomTargetsConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.errors import InputError
from entp.tasks.base import Task
from entp.tasks.counting import Count3

TRAIN = train_options(Count3)


def run(*words: str, saved: Run | None = None) -> Run:
    """The run that `entp train count3 WORDS` asks for, continuing `saved`."""
    defaults = None if saved is None else _defaults(TRAIN, saved)
    return run_of(parse(TRAIN, list(words), "entp train count3", defaults), saved)


def test_without_options_the_run_is_the_default_one() -> None:
    assert run() == Run(Count3(), model_for(Count3(), "small"))


@pytest.mark.parametrize(
    ("words", "technique"),
    [
        ("--ema.steps 10", {"ema": EmaConfig(10)}),
        (
            "--importance.samples 9 --importance.proposal decoder",
            {"importance": ImportanceConfig(9, "decoder")},
        ),
        ("--importance.proposal entp", {"importance": ImportanceConfig()}),
        ("--random-targets.count 8", {"random_targets": RandomTargetsConfig(8)}),
        (
            "--batch-schedule.step 5 --batch-schedule.batch-size 8",
            {"batch_schedule": BatchScheduleConfig(5, 8)},
        ),
        (
            "--curriculum.steps 600 --curriculum.mode random-prefix --curriculum.uniform-lengths",
            {"curriculum": CurriculumConfig(600, "random-prefix", uniform_lengths=True)},
        ),
        ("--curriculum.steps=600 --curriculum.lr 1", {"curriculum": CurriculumConfig(600, lr=1)}),
    ],
)
def test_one_option_switches_a_technique_on(words: str, technique: dict[str, Any]) -> None:
    assert run(*words.split()) == dataclasses.replace(run(), **technique)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--batch-schedule.batch-size 8",
            "--batch-schedule.batch-size needs --batch-schedule.step as well",
        ),
        ("--curriculum.mode decoder", "--curriculum.mode needs --curriculum.steps as well"),
    ],
)
def test_missing_fields_of_a_technique_are_named(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(*words.split())


@pytest.fixture
def configs() -> Iterator[dict[str, type]]:
    """TECHNIQUE_CONFIGS, which is put right afterwards, order included."""
    kept = dict(TECHNIQUE_CONFIGS)
    yield TECHNIQUE_CONFIGS
    TECHNIQUE_CONFIGS.clear()
    TECHNIQUE_CONFIGS.update(kept)


@pytest.mark.parametrize("name", list(TECHNIQUE_CONFIGS))
def test_technique_without_a_config_has_no_options(name: str, configs: dict[str, type]) -> None:
    option = f"--{name.replace('_', '-')}."
    before = list(options_of(TRAIN))
    del configs[name]
    after = train_options(Count3)
    gone = [one for one in before if one.startswith(option)]
    assert gone
    assert list(options_of(after)) == [one for one in before if one not in gone]
    assert run_of(parse(after, [], "entp train count3")) == run()


def test_model_options_are_the_config_without_what_the_task_decides() -> None:
    names = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in TASK_DECIDES]
    found = [name for name in options_of(TRAIN) if name.startswith("--model.")]
    assert found == [f"--model.{name.replace('_', '-')}" for name in names]


def test_help_of_derived_options_is_the_docstring_of_the_field() -> None:
    docs = docs_of(CurriculumConfig)
    assert set(docs) == {f.name for f in dataclasses.fields(CurriculumConfig)}
    assert docs["batch_size"] == "Sequences per step. None: as many as later."
    found = options_of(optional(CurriculumConfig))
    assert {name: option.help for name, option in found.items()} == {
        f"--{name.replace('_', '-')}": text for name, text in docs.items()
    }


def test_a_size_and_changes_to_it() -> None:
    asked = run("--size", "medium", "--heads", "4", "--model.context-length", "100")
    assert asked.model == model_for(Count3(), "medium", heads=4, context_length=100)


SAVED = Run(
    Count3(length=32),
    model_for(Count3(length=32), "medium", norm="rms"),
    "decoder",
    steps=7,
    batch_size=3,
    seed=5,
    train=TrainConfig(eval_every=9),
    ema=EmaConfig(4),
    curriculum=CurriculumConfig(600, "decoder", lr=1.0),
)


def test_a_saved_run_gives_the_defaults() -> None:
    assert run(saved=SAVED) == SAVED
    changed = dataclasses.replace(SAVED, steps=8, ema=EmaConfig(6))
    assert run("--steps", "8", "--ema.steps", "6", saved=SAVED) == changed


def test_none_switches_a_technique_of_a_saved_run_off() -> None:
    found = run("--ema.steps", "None", "--curriculum.steps", "None", saved=SAVED)
    assert found == dataclasses.replace(SAVED, ema=None, curriculum=None)


def test_another_size_or_task_changes_the_saved_model() -> None:
    small = run("--size", "small", saved=SAVED).model
    assert small == model_for(Count3(length=32), "small", norm="rms")
    longer = run("--task.length", "70", saved=SAVED).model
    assert longer == model_for(Count3(length=70), "medium", norm="rms")


@dataclass(frozen=True)
class Required(Task):
    """A task with a field that has no default."""

    name: ClassVar[str] = "required"

    size: int
    """How many tokens."""

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 3, "context_length": self.size}


def test_a_task_may_have_fields_without_defaults() -> None:
    kind = train_options(Required)
    assert run_of(parse(kind, ["--task.size", "3"], "entp train x")).task == Required(3)
    with pytest.raises(InputError, match=r"--task\.size"):
        parse(kind, [], "entp train x")
