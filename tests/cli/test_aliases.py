"""What people type from habit gives the right run, and old names are answered with today's."""

from __future__ import annotations

from typing import Any

import pytest

from entp.cli.aliases import HABITS, SWITCHES
from entp.cli.bench import BENCHES
from entp.cli.derive import options_of
from entp.cli.main import main
from entp.cli.parse import parse
from entp.cli.train import run_of, train_options
from entp.config import Run, model_for, upgrade
from entp.tasks.addition import Addition
from entp.tasks.counting import Count3

TRAIN = train_options(Count3)


def run(*words: str) -> Run:
    """The run that `entp train count3 WORDS` asks for."""
    return run_of(parse(TRAIN, list(words), "entp train count3"))


def field_of(asked: Run, path: str) -> Any:
    found: Any = asked
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--lr 0.001", "optim.lr", 1e-3),
        ("--learning-rate 0.001", "optim.lr", 1e-3),
        ("--learning_rate=0.001", "optim.lr", 1e-3),
        ("--optim.lr=0.001", "optim.lr", 1e-3),
        ("--bs 7", "batch_size", 7),
        ("--batch-size 7", "batch_size", 7),
        ("--batch_size=7", "batch_size", 7),
        ("--max-steps 9", "steps", 9),
        ("--iters 9", "steps", 9),
        ("--max-iters 9", "steps", 9),
        ("--max_iters=9", "steps", 9),
        ("--layers 2", "model.layers", 2),
        ("--n-layer 2", "model.layers", 2),
        ("--n_layers 2", "model.layers", 2),
        ("--heads 6", "model.heads", 6),
        ("--n-head 6", "model.heads", 6),
        ("--n-heads 6", "model.heads", 6),
        ("--width 96", "model.width", 96),
        ("--d-model 96", "model.width", 96),
        ("--n_embd 96", "model.width", 96),
        ("--weight-decay 0", "optim.weight_decay", 0.0),
        ("--wd 0", "optim.weight_decay", 0.0),
        ("--warmup 3", "optim.warmup_steps", 3),
        ("--warmup-steps 3", "optim.warmup_steps", 3),
        ("--grad-clip 2", "optim.grad_clip", 2.0),
        ("--eval-every 4", "train.eval_every", 4),
        ("--max-seconds 5", "train.max_seconds", 5.0),
        ("--bf16", "train.precision", "bf16"),
        ("--fp32", "train.precision", "fp32"),
        ("--wandb", "train.logger", "wandb"),
        ("--tensorboard", "train.logger", "tensorboard"),
        ("--model.bias False", "model.bias", False),
        ("--model.no-bias", "model.bias", False),
        ("--no-model.bias", "model.bias", False),
        ("--model.bias", "model.bias", True),
        ("--train.cuda-graph False", "train.cuda_graph", False),
        ("--train.no-cuda-graph", "train.cuda_graph", False),
        ("--train.cuda-graph=true", "train.cuda_graph", True),
    ],
)
def test_habit_gives_the_run_it_means(words: str, path: str, value: Any) -> None:
    found = field_of(run(*words.split()), path)
    assert (found, type(found)) == (value, type(value))


def test_several_habits_work_together() -> None:
    asked = run("--lr=1e-3", "--bf16", "--bs", "8", "--n-layer", "2", "--mode", "decoder")
    assert (asked.optim.lr, asked.train.precision, asked.batch_size) == (1e-3, "bf16", 8)
    assert (asked.model, asked.mode) == (model_for(Count3(), "small", layers=2), "decoder")


def test_every_habit_means_an_option_that_exists() -> None:
    from entp.cli.generate import GenerateOptions

    there = {**options_of(TRAIN), **options_of(GenerateOptions)}
    assert set(HABITS) <= set(there)
    assert {target for target, _ in SWITCHES.values()} <= set(there)
    habits = [f"--{habit}" for names in HABITS.values() for habit in names]
    assert len(set(habits)) == len(habits)
    assert not set(habits) & set(options_of(TRAIN))


def test_habit_counts_only_where_its_option_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(BENCHES["step"], ["--bs", "3"], "entp bench").batch_size == 3
    assert parse(BENCHES["step"], ["--warmup", "3"], "entp bench").warmup == 3
    assert main(["evaluate", "runs/none", "--lr", "1"]) == 2
    assert "Unrecognized options: --lr" in capsys.readouterr().err


OLD_TRAIN = [
    ("--batch 8", "--batch is now --batch-size."),
    ("--optim.max-lr 1", "--optim.max-lr is now --optim.lr."),
    ("--optim.max_lr=1", "--optim.max-lr is now --optim.lr."),
    ("--optim.warmup 5", "--optim.warmup is now --optim.warmup-steps."),
    ("--optim.average 10", "--optim.average is now --ema.steps."),
    ("--start.steps 10", "--start.steps is now --curriculum.steps."),
    ("--start.even", "--start.even is now --curriculum.uniform-lengths."),
    ("--train.mirror wandb", "--train.mirror is now --train.logger."),
    ("--model.position rotary", "--model.position is now --model.position-embedding."),
    ("--task.values 9", "--task.values is now --task.num-values."),
    ("--task.seed-length 9", "--task.seed-length is now --task.prompt-length."),
    ("--mode prefix", "--mode prefix is now --mode prefix-lm."),
    ("--mode=prefix", "--mode prefix is now --mode prefix-lm."),
    ("--compile", "--compile is gone, because it never reached the kernels: leave it out"),
    ("--train.compile", "--train.compile is gone, because it never reached the kernels"),
    ("--optim.grow-at 3", "--optim.grow-at is gone: leave it out."),
    (
        "--curriculum.steps 9 --curriculum.mode prefixes",
        "--curriculum.mode prefixes is now --curriculum.mode random-prefix.",
    ),
    (
        "--train.monitor sequence_accuracy",
        "--train.monitor sequence_accuracy is now --train.monitor exact_match.",
    ),
    ("--batch 8 --optim.clip 1", "--batch is now --batch-size; --optim.clip is now --optim.grad"),
]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        *((f"train count3 {words}", answer) for words, answer in OLD_TRAIN),
        ("train addition --task.examples 9", "--task.examples is now --task.train-examples."),
        ("evaluate run --which last", "--which is now --checkpoint."),
        ("evaluate run --by-length", "--by-length is now --by length."),
        ("evaluate run --by-generation", "--by-generation is now --generate."),
        ("generate run --which last", "--which is now --checkpoint."),
        ("generate run --mode prefix", "--mode prefix is now --mode prefix-lm."),
        ("export run --fresh 9", "--fresh is now --test-sequences."),
        ("reproduce count3 --minutes 9", "--minutes is now --max-minutes."),
        ("bench --batch 9", "--batch is now --batch-size."),
        ("bench step --contenders packed", "--contenders is now --variants."),
        ("bench generate --prompt 9", "--prompt is now --prompt-length."),
        ("bench generate --total 9", "--total is now --length."),
        ("bench scaling --batch 9", "--batch is now --batch-size."),
        ("tasks count3 --seed-length 4", "--seed-length is now --prompt-length."),
    ],
)
def test_old_name_is_answered_with_the_new_one(
    words: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"entp: {answer}")


def test_every_renamed_option_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the run's parts; the names that they have today exist."""
    there = options_of(TRAIN)
    for part in ("model", "optim", "train"):
        for old, new in upgrade.RENAMED[part].items():
            name, today = (f"--{part}.{one}".replace("_", "-") for one in (old, new))
            assert today in there or new == "context_length"
            assert main(["train", "count3", name, "1"]) == 2
            assert f"{name} is now {today}." in capsys.readouterr().err
    for name, answer in upgrade.OPTIONS.items():
        if name.startswith(("--optim.", "--start.")):
            assert answer.split()[0] in there
            assert main(["train", "count3", name, "1"]) == 2
            assert f"{name} is now {answer}." in capsys.readouterr().err


def test_a_name_that_is_an_option_is_never_answered() -> None:
    """`--prompt` is an old name in `entp bench generate`, and today's in `entp generate`."""
    from entp.cli.generate import GenerateOptions

    found = parse(GenerateOptions, ["--prompt", "1 2", "3"], "entp generate")
    assert found.prompt == ["1 2", "3"]


def test_values_may_begin_with_a_hyphen() -> None:
    from entp.cli.generate import GenerateOptions

    assert parse(GenerateOptions, ["--temperature=-1"], "entp generate").temperature == -1
    assert parse(GenerateOptions, ["--temperature", "-1"], "entp generate").temperature == -1


def test_switches_of_a_task_take_both_forms() -> None:
    kind = train_options(Addition)
    for words, value in [
        (["--task.reversed", "False"], False),
        (["--task.no-reversed"], False),
        (["--no-task.reversed"], False),
        (["--task.reversed"], True),
    ]:
        assert parse(kind, words, "entp train addition").task.reversed is value  # type: ignore[attr-defined]
