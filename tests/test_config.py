"""Configurations: their JSON, every check they make on themselves, their hash, and that reading
them imports nothing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from entp import SIZES, InputError, ModelConfig, OptimConfig, Run, TrainConfig
from entp.config import model_for
from entp.config.json import config_hash, run_from_json, run_to_json
from entp.tasks import Task
from entp.tasks.counting import Count2, Count3, Match3, count2_next

RUNS = {
    "defaults": Run(Count3(), model_for(Count3())),
    "all set": Run(
        Count2(4, 9, 5),
        model_for(
            Count2(4, 9, 5),
            "small-deep",
            norm="none",
            activation="relu",
            position_embedding="none",
            attention_scale="one",
        ),
        mode="prefix-lm",
        steps=7,
        batch_size=3,
        seed=11,
        optim=OptimConfig(
            "muon",
            lr=0.1,
            min_lr=0.01,
            warmup_steps=5,
            decay_steps=50,
            beta1=0.8,
            beta2=0.95,
            grad_clip=0.0,
        ),
        train=TrainConfig(
            eval_every=1,
            monitor="loss",
            stop_at=0.5,
            impl="reference",
            token_budget=100,
            compile=True,
        ),
    ),
    "match3": Run(
        Match3(),
        model_for(Match3(), "medium"),
        mode="decoder",
        train=TrainConfig(monitor="token_accuracy"),
    ),
}
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))


class Halved(Count3):
    """A task of our own that inherits the name of a built-in one."""

    rule = staticmethod(count2_next)


def changed(run: Run, path: str, value: Any) -> dict[str, Any]:
    """The run's JSON with the value at a path such as model.layers replaced or added."""
    data = json.loads(json.dumps(run_to_json(run)))
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return data


@every_run
def test_json_round_trip(run: Run) -> None:
    again = run_from_json(json.loads(json.dumps(run_to_json(run))))
    assert again == run
    assert type(again.task) is type(run.task)
    assert config_hash(again) == config_hash(run)


def test_hash_survives_a_round_trip_of_whole_numbers_given_as_floats() -> None:
    run = dataclasses.replace(RUNS["defaults"], optim=OptimConfig(grad_clip=1))
    again = run_from_json(run_to_json(run))
    assert again == run
    assert config_hash(again) == config_hash(run)


def test_json_of_a_subclass_of_a_built_in_task() -> None:
    run = Run(Halved(), model_for(Halved()))
    assert type(run_from_json(run_to_json(run)).task) is Halved
    assert config_hash(run) != config_hash(RUNS["defaults"])


@pytest.mark.parametrize(
    "path", ["extra", "task.extra", "model.extra", "optim.extra", "train.extra"]
)
def test_unknown_keys_are_named(path: str) -> None:
    with pytest.raises(InputError, match=r"run\.json.*extra"):
        run_from_json(changed(RUNS["defaults"], path, 1), "run.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("task.length", "long"),
        ("task.values", None),
        ("model.layers", "three"),
        ("model.width", 2.5),
        ("model.norm", "batch"),
        ("model.vocab", [64]),
        ("optim.lr", "fast"),
        ("optim.name", 3),
        ("train.compile", "perhaps"),
        ("train.target", "high"),
        ("mode", 3),
        ("steps", "200"),
        ("steps", None),
        ("steps", 10.5),
        ("batch", [64]),
        ("seed", 1.5),
        ("optim", []),
        ("train", "x"),
        ("model", None),
    ],
)
def test_wrong_types_are_named(path: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"\b{path.split('.')[-1]}\b"):
        run_from_json(changed(RUNS["defaults"], path, value))


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
def test_not_a_run(data: Any) -> None:
    with pytest.raises(InputError, match="config is not the configuration of a run"):
        run_from_json(data)


def test_checks_apply_to_json_too() -> None:
    with pytest.raises(
        InputError, match=r"^config cannot be read: model\.heads 5 does not divide model\.width 192"
    ):
        run_from_json(changed(RUNS["defaults"], "model.heads", 5))
    with pytest.raises(InputError, match="swapped"):
        run_from_json(changed(RUNS["defaults"], "optim.min_lr", 1.0))


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
        (
            {"heads": 4, "width": 8, "kv_heads": 3},
            r"model\.kv_heads 3 does not divide model\.heads 4",
        ),
        (
            {"heads": 4, "width": 12, "position_embedding": "rotary"},
            "rotary needs an even head size, and 3 is odd",
        ),
        ({"loops": 0}, r"model\.loops is 0: it must be at least 1"),
        ({"activation": "swish"}, r"unknown model\.activation 'swish'"),
        ({"position_embedding": "learnt"}, r"unknown model\.position_embedding 'learnt'.*Did you mean learned"),
        ({"attention_scale": "two"}, r"unknown model\.attention_scale 'two'"),
    ],
)
def test_model_checks(change: dict[str, Any], message: str) -> None:
    ModelConfig(**MODEL)
    with pytest.raises(InputError, match=message):
        ModelConfig(**{**MODEL, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_lr": 1e-2}, r"optim\.min_lr 0\.01 is above optim\.lr 0\.0005: swapped\?$"),
        ({"max_lr": 0.0, "min_lr": 0.0}, r"optim\.lr 0 must be positive"),
        ({"min_lr": -1e-5}, r"optim\.min_lr -1e-05 not negative"),
        ({"warmup": -1}, r"optim\.warmup -1, which must not be negative"),
        (
            {"warmup": 500, "decay_steps": 500},
            r"optim\.decay_steps 500 must be above optim\.warmup 500",
        ),
        ({"beta1": 1.0}, r"optim\.beta1 is 1\.0"),
        ({"beta2": -0.1}, r"optim\.beta2 is -0\.1"),
        ({"weight_decay": -0.1}, "must not be negative"),
        ({"clip": -1.0}, "must not be negative"),
        ({"name": "adam"}, r"unknown optim\.name 'adam'.*Did you mean adamw"),
        ({"max_lr": float("nan")}, "max_lr"),
        ({"clip": float("nan")}, "clip"),
        ({"clip": True}, r"optim\.clip is True: it must be a finite number"),
    ],
)
def test_optim_checks(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        OptimConfig(**change)


def test_what_turns_a_part_of_the_optimizer_off_is_allowed() -> None:
    """No momentum, no warm-up, a rate that stays or falls to nothing, no weight decay, no clipping."""
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
    "name", ["eval_every", "eval_batches", "checkpoint_every", "log_every", "token_budget"]
)
def test_train_sizes(name: str) -> None:
    with pytest.raises(InputError, match=rf"train\.{name} is 0: it must be at least 1"):
        TrainConfig(**{name: 0})


def test_train_time() -> None:
    with pytest.raises(InputError, match=r"train\.max_seconds is 0: it must be above 0"):
        TrainConfig(max_seconds=0.0)


@pytest.mark.parametrize("name", ["impl", "precision", "mirror"])
def test_train_names(name: str) -> None:
    with pytest.raises(InputError, match=rf"unknown train\.{name} 'none such'"):
        TrainConfig(**{name: "none such"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0: it must be at least 1"),
        ({"batch": 0}, "batch is 0"),
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
            "mode prefix needs a task with a prefix, and match3",
        ),
        (
            {"train": TrainConfig(monitor="f1")},
            r"train\.target_metric 'f1' is not measured: .*exact_match, loss",
        ),
    ],
)
def test_run_checks(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(RUNS["defaults"], **change)


def test_position_free_models_read_any_length() -> None:
    run = dataclasses.replace(
        RUNS["defaults"], model=model_for(Count3(), context_length=1, position_embedding="none")
    )
    assert run.model.context_length == 1
    assert (
        ModelConfig(**{**MODEL, "position_embedding": "none", "context_length": 10**12}).positions == 10**12
    )  # no table of them is made
    with pytest.raises(InputError, match=r"positions 1000000000000 has 8e\+12 weights"):
        ModelConfig(**{**MODEL, "context_length": 10**12})


def test_several_problems_are_reported_at_once() -> None:
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
        dataclasses.replace(RUNS["defaults"], steps=0, mode="x", seed=-1)  # type: ignore[arg-type]
    for part in ("steps is 0", "unknown mode 'x'", "seed is -1"):
        assert part in str(error.value)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str) -> None:
    model = model_for(Match3(), size)
    assert (
        dataclasses.asdict(model).items()
        >= {**SIZES[size], "vocab": 128, "context_length": 64, "outputs": 2}.items()
    )


def test_the_papers_sizes() -> None:
    shapes = {name: (s["layers"], s["heads"], s["width"]) for name, s in SIZES.items()}
    assert shapes == {
        "small": (3, 3, 192),
        "medium": (6, 6, 384),
        "large": (12, 12, 768),
        "small-deep": (8, 2, 128),
    }


def test_model_for_takes_changes_and_knows_its_sizes() -> None:
    assert model_for(Count3(), "small", layers=1, context_length=99).positions == 99
    with pytest.raises(
        InputError, match=r"unknown size 'smal': allowed are small.*Did you mean small"
    ):
        model_for(Count3(), "smal")


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
    "model.scale": "one",
    "model.norm_placement": "post",
    "model.bias": False,
    "model.tied_head": False,
    "model.kv_heads": 1,
    "optim.name": "muon",
    "optim.lr": 0.25,
    "optim.min_lr": 0.0,
    "optim.beta1": 0.5,
    "optim.beta2": 0.5,
    "train.target_metric": "loss",
    "train.target": 0.5,
    "train.impl": "packed",
    "train.token_budget": 9,
    "train.max_seconds": 5.0,
    "optim.decay": "seconds",
    "optim.shape": "linear",
    "optim.select": True,
    "train.precision": "fp32",
    "train.graph": False,
    "train.compile": True,
    "train.mirror": "wandb",
    "start.steps": 600,
    "start.mode": "prefix-lm",
    "start.even": True,
}
"""Another allowed value of each field to which 1 cannot be added."""
TOGETHER = {
    "task.values": [("model.vocab", 65)],
    "task.length": [("model.context_length", 65)],
    "optim.decay": [("train.max_seconds", 5.0)],
    "optim.whiten": [("optim.name", "muon")],
    "optim.late_batch": [("optim.late_at", 5)],
    "optim.late_at": [("optim.late_batch", 2)],
    "start.mode": [("start.steps", 600)],
    "start.batch": [("start.steps", 600)],
    "start.max_lr": [("start.steps", 600)],
    "start.even": [("start.steps", 600), ("start.mode", "random-prefix")],
}
FREE_TO_CHANGE = {
    "steps",
    "train.checkpoint_every",
    "train.log_every",
    "train.mirror",
    "train.target",
    "train.max_seconds",
}
"""What a run may be resumed with another value of."""
FIXED_BY_THE_TASK = {"model.vocab", "model.input_dim", "model.outputs"}


@pytest.mark.parametrize(
    "path", [p for p, _ in leaves(run_to_json(RUNS["defaults"])) if p not in FIXED_BY_THE_TASK]
)
def test_hash_changes_with_everything_that_a_step_computes(path: str) -> None:
    run = RUNS["defaults"]
    value = OTHER_VALUES[path] if path in OTHER_VALUES else dict(leaves(run_to_json(run)))[path] + 1
    data = changed(run, path, value)
    for other, needed in TOGETHER.get(path, []):
        *_, part, name = other.split(".")
        data[part][name] = needed
    other_run = run_from_json(data)
    if (
        path.startswith("start.") and path in TOGETHER
    ):  # what the others change is not what is tested
        run = run_from_json(changed(other_run, path, dict(leaves(run_to_json(run)))[path]))
    assert other_run != run
    assert (config_hash(other_run) == config_hash(run)) == (path in FREE_TO_CHANGE)


def test_time_is_part_of_a_schedule_that_follows_it() -> None:
    run = RUNS["defaults"]
    timed = dataclasses.replace(run, train=dataclasses.replace(run.train, max_seconds=5.0))
    clocked = dataclasses.replace(timed, optim=dataclasses.replace(run.optim, decay_by="seconds"))
    longer = dataclasses.replace(clocked, train=dataclasses.replace(run.train, max_seconds=6.0))
    assert config_hash(timed) == config_hash(run)
    assert len({config_hash(one) for one in (run, clocked, longer)}) == 3


def test_options_of_the_model_that_came_later_keep_the_hash() -> None:
    """The hash of the defaults, as it was recorded before these options were there."""
    assert config_hash(RUNS["defaults"]) == "4e8cd302c5"


def test_options_that_are_gone_are_read_where_they_did_nothing() -> None:
    """Files of earlier runs name them."""
    run = RUNS["defaults"]
    data = run_to_json(run)
    data["optim"] |= {"grow_from": None, "grow_at": 0, "late_adamw": 0.0}
    assert run_from_json(data) == run
    data["optim"]["grow_from"] = 2
    with pytest.raises(InputError, match="grow_from"):
        run_from_json(data)


def test_whitening_is_part_of_muon() -> None:
    run = RUNS["defaults"]
    hashes = {
        config_hash(dataclasses.replace(run, optim=OptimConfig("muon", precondition_every=steps)))
        for steps in (0, 1, 100)
    }
    assert len(hashes) == 3
    for name, steps in (("adamw", 100), ("muon", -1)):
        with pytest.raises(
            InputError, match=f"optim.whiten is {steps} with optim.name {name}: it must be 0, or"
        ):
            OptimConfig(name, precondition_every=steps)


def test_hash_is_ten_characters_and_the_same_everywhere() -> None:
    imports = "from entp.config import *; from entp.config.json import config_hash; from entp.tasks.counting import Count3"
    assert fresh_python(
        f"{imports}; print(config_hash(Run(Count3(), model_for(Count3()))))"
    ) == config_hash(RUNS["defaults"])
    assert len(config_hash(RUNS["defaults"])) == 10


def fresh_python(script: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_file_never_imports_code(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "entp_test_trap.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match="entp_test_trap:Trap, which is not built in: import it first"
    ):
        run_from_json(changed(RUNS["defaults"], "task.name", "entp_test_trap:Trap"))
    assert "entp_test_trap" not in sys.modules
    assert not (tmp_path / "sprung").exists()


@dataclasses.dataclass(frozen=True)
class Own(Task):
    """A task of our own, in a module that is imported."""

    size: int = 4

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": self.size, "context_length": self.size}


def test_an_imported_task_of_your_own_is_found() -> None:
    run = Run(Own(5), model_for(Own(5)))
    assert run_from_json(json.loads(json.dumps(run_to_json(run)))) == run


def test_importing_entp_and_its_config_needs_no_torch() -> None:
    heavy = "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'matplotlib', 'pydantic', 'tyro'}))"
    assert (
        fresh_python(
            f"import sys, entp, entp.config; entp.Run, entp.SIZES, entp.InputError; {heavy}"
        )
        == "[]"
    )


def test_public_names_are_found_and_others_are_not() -> None:
    import entp

    assert entp.Run is Run
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        entp.nothing  # noqa: B018


def test_numpys_whole_numbers_are_numbers() -> None:
    config = ModelConfig(vocab=np.int64(8), layers=np.int32(2))  # type: ignore[arg-type]
    assert config == ModelConfig(vocab=8, layers=2)
    assert {type(config.vocab), type(config.layers)} == {int}
    assert type(Count3(length=np.int64(20)).length) is int  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"task\.length is 20\.5: it must be a whole number"):
        Count3(length=20.5)  # type: ignore[arg-type]
