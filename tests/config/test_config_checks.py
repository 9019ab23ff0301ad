"""Every check that configurations make on themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from config_runs import DEFAULTS

from entp.config import (
    SIZES,
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
from entp.errors import InputError
from entp.tasks.base import Task
from entp.tasks.counting import Count3, Match3

MODEL = {"vocab": 8, "context_length": 8, "layers": 1, "heads": 2, "width": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 2.0}, r"model\.layers is 2\.0: it must be a whole number"),
        ({"context_length": 0}, r"model\.context_length is 0: it must be at least 1"),
        ({"layers": 0}, r"model\.layers is 0"),
        ({"heads": 0}, r"model\.heads is 0"),
        ({"width": -8}, r"model\.width is -8"),
        ({"vocab": 0}, r"model\.vocab is 0: it must be at least 1, or None"),
        ({"outputs": 0}, r"model\.outputs is 0"),
        ({"vocab": None, "input_dim": 0, "outputs": 1}, r"model\.input_dim is 0"),
        ({"heads": 3}, r"model\.heads 3 does not divide model\.width 8: .*such as 9"),
        ({"heads": 20}, r"model\.heads 20 does not divide model\.width 8: .*such as 20"),
        ({"vocab": None}, "exactly one of vocab .* and input_dim"),
        ({"input_dim": 3}, "exactly one of vocab .* and input_dim"),
        ({"vocab": None, "input_dim": 3}, r"model\.outputs must be set"),
        ({"norm": "batch"}, r"unknown model\.norm 'batch': allowed are layer, rms, none"),
        ({"heads": 4, "kv_heads": 3}, r"model\.kv_heads 3 does not divide model\.heads 4"),
        (
            {"heads": 4, "width": 12, "position_embedding": "rotary"},
            "rotary needs an even head size, and 3 is odd",
        ),
        ({"loops": 0}, r"model\.loops is 0: it must be at least 1"),
        ({"loops": 1001}, r"model\.loops is 1001: .* at most 1000"),
        ({"bias": 1}, r"model\.bias is 1: it must be True or False"),
        ({"activation": "swish"}, r"unknown model\.activation 'swish'"),
        (
            {"position_embedding": "learnt"},
            r"unknown model\.position_embedding 'learnt'.*Did you mean learned",
        ),
        ({"attention_scale": "two"}, r"unknown model\.attention_scale 'two'"),
        ({"width": 100_000, "layers": 10_000}, r"has 1\.2e\+15 weights: it must be at most"),
    ],
)
def test_model_refuses(change: dict[str, Any], message: str) -> None:
    ModelConfig(**MODEL)
    with pytest.raises(InputError, match=message):
        ModelConfig(**{**MODEL, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_lr": 1e-2}, r"optim\.min_lr 0\.01 is above optim\.lr 0\.0005: .* swapped\?$"),
        ({"lr": 0.0, "min_lr": 0.0}, r"optim\.lr 0 must be positive"),
        ({"min_lr": -1e-5}, r"optim\.min_lr -1e-05 not negative"),
        ({"warmup_steps": -1}, r"optim\.warmup_steps -1, which must not be negative"),
        (
            {"warmup_steps": 500, "decay_steps": 500},
            r"optim\.decay_steps 500 must be above optim\.warmup_steps 500",
        ),
        ({"beta1": 1.0}, r"optim\.beta1 is 1\.0"),
        ({"beta2": -0.1}, r"optim\.beta2 is -0\.1"),
        ({"weight_decay": -0.1}, "must not be negative"),
        ({"grad_clip": -1.0}, "must not be negative"),
        ({"name": "adam"}, r"unknown optim\.name 'adam'.*Did you mean adamw"),
        ({"lr": float("nan")}, r"optim\.lr is nan: it must be a finite number"),
        ({"grad_clip": float("inf")}, r"optim\.grad_clip is inf"),
        ({"grad_clip": True}, r"optim\.grad_clip is True: it must be a finite number"),
        ({"precondition_every": 100}, r"optim\.precondition_every is 100 with optim\.name adamw"),
        ({"name": "muon", "precondition_every": -1}, r"optim\.precondition_every is -1"),
    ],
)
def test_optim_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        OptimConfig(**change)


def test_optim_allows_what_turns_a_part_off() -> None:
    """Momentum, warm-up, decay of the learning rate and of weights, and clipping."""
    off = OptimConfig(
        lr=1e-3,
        min_lr=1e-3,
        warmup_steps=0,
        decay_steps=1,
        beta1=0.0,
        beta2=0.0,
        weight_decay=0.0,
        grad_clip=0.0,
    )
    assert dataclasses.replace(off, min_lr=0.0).min_lr == 0


@pytest.mark.parametrize(
    "name",
    ["eval_every", "eval_batches", "checkpoint_every", "log_every", "token_budget", "patience"],
)
def test_train_refuses_sizes_below_1(name: str) -> None:
    with pytest.raises(InputError, match=rf"train\.{name} is 0: it must be at least 1"):
        TrainConfig(**{name: 0})


@pytest.mark.parametrize("name", ["max_seconds", "checkpoint_seconds"])
def test_train_refuses_no_time(name: str) -> None:
    with pytest.raises(InputError, match=rf"train\.{name} is 0: it must be above 0, or None"):
        TrainConfig(**{name: 0.0})


def test_patience_from_needs_patience() -> None:
    with pytest.raises(InputError, match=r"patience_from is 1\.1 without train\.patience"):
        TrainConfig(patience_from=1.1)
    assert TrainConfig(patience=3, patience_from=1).patience_from == 1.0


@pytest.mark.parametrize("splits", ["test", ("test", 3), 3])
def test_eval_splits_are_a_tuple_of_names(splits: Any) -> None:
    with pytest.raises(InputError, match=r"train\.eval_splits is .*: it must be a tuple of names"):
        TrainConfig(eval_splits=splits)


def test_eval_splits_are_named_once() -> None:
    with pytest.raises(InputError, match="give each name once"):
        TrainConfig(eval_splits=("test", "test"))
    assert TrainConfig(eval_splits=["test"]).eval_splits == ("test",)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", ["valid", "train", "longer", ""])
def test_run_refuses_splits_that_the_task_does_not_have(split: str) -> None:
    train = TrainConfig(eval_splits=("test", split))
    with pytest.raises(InputError, match=rf"eval_splits has '{split}': count3 allows test\."):
        dataclasses.replace(DEFAULTS, train=train)


@pytest.mark.parametrize("name", ["impl", "precision", "logger"])
def test_train_refuses_unknown_names(name: str) -> None:
    with pytest.raises(InputError, match=rf"unknown train\.{name} 'none such'"):
        TrainConfig(**{name: "none such"})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (EmaConfig, {"steps": 0}, r"ema\.steps is 0: it must be at least 1"),
        (EmaConfig, {"steps": -1}, r"ema\.steps is -1"),
        (EmaConfig, {"steps": 1.5}, r"ema\.steps is 1\.5: it must be a whole number"),
        (BatchScheduleConfig, {"step": 0, "batch_size": 12}, r"batch_schedule\.step is 0"),
        (BatchScheduleConfig, {"step": 6, "batch_size": 0}, r"batch_schedule\.batch_size is 0"),
        (BatchScheduleConfig, {"step": -1, "batch_size": -1}, r"step is -1.*batch_size is -1"),
        (CurriculumConfig, {"steps": 0}, r"curriculum\.steps is 0: it must be above 0"),
        (CurriculumConfig, {"steps": 9, "batch_size": -1}, r"curriculum\.batch_size is -1"),
        (CurriculumConfig, {"steps": 9, "lr": 0.0}, r"curriculum\.lr is 0: it must be above 0"),
        (
            CurriculumConfig,
            {"steps": 9, "mode": "encoder"},
            r"unknown curriculum\.mode 'encoder': .*entp, decoder, prefix-lm, random-prefix",
        ),
        (
            CurriculumConfig,
            {"steps": 9, "uniform_lengths": True},
            r"curriculum\.uniform_lengths is for curriculum\.mode random-prefix, not decoder",
        ),
        (ImportanceConfig, {"proposal": "model"}, r"unknown importance\.proposal 'model'"),
        (ImportanceConfig, {"samples": 20}, "give a number of targets with proposal decoder"),
        (ImportanceConfig, {"proposal": "decoder"}, r"importance\.samples is None"),
        (
            ImportanceConfig,
            {"samples": 0, "proposal": "decoder"},
            r"importance\.samples is 0: it must be at least 1",
        ),
        (ImportanceConfig, {"samples": -1, "proposal": "decoder"}, r"importance\.samples is -1"),
    ],
)
def test_technique_refuses(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0: it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
        ({"seed": 2**32}, "seed is 4294967296: it must be below"),
        ({"mode": "enpt"}, r"unknown mode 'enpt'.*Did you mean entp"),
        (
            {"model": model_for(Count3(), context_length=63)},
            r"model\.context_length 63 is shorter than the sequences of count3, 64",
        ),
        ({"model": model_for(Count3(), vocab=65)}, r"model\.vocab is 65 but count3 needs 64"),
        ({"model": model_for(Count3(), outputs=2)}, r"model\.outputs is 2 but count3 needs None"),
        (
            {"model": ModelConfig(input_dim=3, outputs=2)},
            r"model\.vocab is None but .*; model\.input_dim is 3 but .*; model\.outputs is 2",
        ),
        (
            {"task": Match3(), "model": model_for(Match3()), "mode": "prefix-lm"},
            "mode prefix-lm needs a task with a prefix, and match3 has none",
        ),
        (
            {"train": TrainConfig(monitor="f1")},
            r"train\.monitor 'f1' is not measured: allowed are exact_match, token_accuracy, loss",
        ),
        (
            {"optim": OptimConfig(decay_by="seconds")},
            r"optim\.decay_by seconds needs train\.max_seconds",
        ),
        (
            {"mode": "decoder", "importance": ImportanceConfig()},
            "importance is for mode entp, .* not for decoder",
        ),
        (
            {"curriculum": CurriculumConfig(500)},
            r"curriculum\.steps 500 must be above optim\.warmup_steps 500",
        ),
        (
            {"curriculum": CurriculumConfig(600, lr=1e-5)},
            r"optim\.lr 0\.0005 is above curriculum\.lr 1e-05: swapped\?$",
        ),
        (
            {
                "curriculum": CurriculumConfig(600),
                "optim": OptimConfig(decay_by="seconds"),
                "train": TrainConfig(max_seconds=3.0),
            },
            r"curriculum needs optim\.decay_by steps",
        ),
        (
            {
                "task": Match3(),
                "model": model_for(Match3()),
                "curriculum": CurriculumConfig(600, "prefix-lm"),
            },
            "mode prefix-lm needs a task with a prefix, and match3 has none",
        ),
    ],
)
def test_run_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(DEFAULTS, **change)


def test_run_refuses_several_outputs_of_one_number() -> None:
    class Pairs(Count3):
        loss = "squared_error"

        def model_needs(self) -> dict[str, Any]:
            return {"vocab": 64, "context_length": 64, "outputs": 2}

    with pytest.raises(InputError, match=r"model\.outputs is 2: squared_error is of one number"):
        Run(Pairs(), model_for(Pairs()))


def test_model_without_a_table_of_positions_reads_any_length() -> None:
    free = model_for(Count3(), context_length=1, position_embedding="none")
    assert dataclasses.replace(DEFAULTS, model=free).model.context_length == 1
    long = {**MODEL, "context_length": 10**12}
    assert ModelConfig(**{**long, "position_embedding": "none"}).context_length == 10**12
    with pytest.raises(InputError, match=r"context_length 1000000000000 has 8e\+12 weights"):
        ModelConfig(**long)


def test_problems_are_reported_together() -> None:
    with pytest.raises(InputError) as error:
        ModelConfig(layers=0, heads=5, width=12, norm="batch")  # type: ignore[arg-type]
    for part in (
        "model.layers is 0",
        "model.heads 5",
        "exactly one of",
        "model.outputs must be set",
        "model.norm 'batch'",
    ):
        assert part in str(error.value)
    with pytest.raises(InputError) as error:
        dataclasses.replace(DEFAULTS, steps=0, mode="x", seed=-1)  # type: ignore[arg-type]
    for part in ("steps is 0", "unknown mode 'x'", "seed is -1"):
        assert part in str(error.value)


@pytest.mark.parametrize("size", SIZES)
def test_model_for_has_the_size_and_the_tasks_needs(size: str) -> None:
    model = model_for(Match3(), size)
    needs = {"vocab": 128, "context_length": 64, "outputs": 2}
    assert dataclasses.asdict(model).items() >= {**SIZES[size], **needs}.items()


def test_sizes_are_the_papers() -> None:
    shapes = {name: (s["layers"], s["heads"], s["width"]) for name, s in SIZES.items()}
    assert shapes == {
        "small": (3, 3, 192),
        "medium": (6, 6, 384),
        "large": (12, 12, 768),
        "small-deep": (8, 2, 128),
    }


def test_model_for_takes_changes_and_refuses_unknown_sizes() -> None:
    assert model_for(Count3(), "small", layers=1, context_length=99).context_length == 99
    with pytest.raises(
        InputError, match=r"unknown size 'smal': allowed are small.*Did you mean small"
    ):
        model_for(Count3(), "smal")


def test_model_for_refuses_needs_under_an_old_name() -> None:
    class Old(Task):
        name = "old"

        def model_needs(self) -> dict[str, Any]:
            return {"vocab": 4, "positions": 8}

    with pytest.raises(InputError, match=r"model_needs of old has 'positions'.*context_length"):
        model_for(Old())


def test_task_without_a_length_is_refused() -> None:
    class Endless(Count3):
        def model_needs(self) -> dict[str, Any]:
            return {"vocab": 64}

    with pytest.raises(InputError, match="model_needs of count3 has no context_length"):
        Run(Endless(), model_for(Endless()))


def test_model_for_refuses_needs_that_it_does_not_know() -> None:
    class Misspelt(Task):
        name = "misspelt"

        def model_needs(self) -> dict[str, Any]:
            return {"vocab": 4, "contextlength": 8}

    with pytest.raises(InputError, match=r"'contextlength'.*Did you mean context_length"):
        model_for(Misspelt())


def test_task_without_a_method_is_told_which() -> None:
    class Empty(Task):
        name = "empty"

    with pytest.raises(InputError, match=r"task empty has no method model_needs"):
        model_for(Empty())
    with pytest.raises(InputError, match=r"task empty has no method batch"):
        Empty().batch(0, "train", 0, 8)


def test_whole_numbers_of_numpy_become_ints() -> None:
    config = ModelConfig(vocab=np.int64(8), layers=np.int32(2))  # type: ignore[arg-type]
    assert config == ModelConfig(vocab=8, layers=2)
    assert {type(config.vocab), type(config.layers)} == {int}
    assert type(Count3(length=np.int64(20)).length) is int  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"task\.length is 20\.5: it must be a whole number"):
        Count3(length=20.5)  # type: ignore[arg-type]


def test_monitor_is_the_tasks_first_metric_unless_given() -> None:
    assert DEFAULTS.monitor == "exact_match"
    by_loss = dataclasses.replace(DEFAULTS, train=TrainConfig(monitor="loss"))
    assert by_loss.monitor == "loss"
