"""`entp train TASK`: the options of a run, and the run that they ask for.

Options of the model and of the techniques are derived from their config classes: a technique that
is taken out of TECHNIQUE_CONFIGS has no options.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from entp.bench.options import Size
from entp.cli.aliases import translate
from entp.cli.begin import (
    TASK_DECIDES,
    Beginning,
    adapters,
    check_unchanged,
    read_beginning,
    read_weights,
    refuse_adapters,
)
from entp.cli.derive import MISSING, about, given, optional, options_of
from entp.cli.help import first_sentence, short_help
from entp.cli.parse import HELP, name_of, named_task, parse
from entp.config import (
    SIZES,
    TECHNIQUE_CONFIGS,
    AnyModelConfig,
    Mode,
    ModelConfig,
    OptimConfig,
    PretrainedConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.config.json import read_run
from entp.data.sources import SUFFIXES
from entp.errors import InputError
from entp.tasks.base import TASKS, Task
from entp.tasks.tokens import look_into

ESSENTIAL = (
    *("mode", "size", "steps", "batch-size", "seed", "device", "out", "resume", "fork", "init"),
    *("data", "task."),
    *("model.layers", "model.width"),
    *("optim.name", "optim.lr", "optim.warmup-steps", "optim.weight-decay"),
    *("train.eval-every", "train.stop-at", "train.max-seconds", "train.precision"),
)
"""The options that `--help` shows; `--help-all` shows all."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a model on a task. With --resume or --fork, options that are not given are those of
    that run."""

    mode: Mode = "entp"
    """How predictions attend: entp, decoder, prefix-lm, or refresh-N, which is entp computed anew
    every N tokens only."""
    size: Size | None = None
    """One of the paper's sizes. None: small."""
    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 64
    """Sequences per step, over all processes together."""
    seed: int = 0
    """Decides the initial weights and the data."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Folder of the run. None: runs/TASK-MODE."""
    resume: bool = False
    """Continue the run in --out."""
    fork: Path | None = None
    """Begin with the last checkpoint of the run in this folder, optimizer state included. That run
    stays as it is."""
    init: Path | None = None
    """Begin with the best weights of the run in this folder, at step 0 with a new optimizer. Model,
    mode and tokenizer are that run's; where the output head differs, it is new. Or a folder in
    HuggingFace's format, such as a BERT's."""
    lora_rank: int | None = None
    """For a model of HuggingFace's: train LoRA adapters of this rank on all linear layers, and no
    other weights. None: train all weights."""
    lora_alpha: float | None = None
    """Adapters count lora_alpha / lora_rank times. None: 8."""


def train_command(args: list[str]) -> int:
    """train TASK: train a model"""
    args = _with_text(args)
    name = name_of(args, "task", TASKS, "train")
    task = named_task(name)
    kind = train_options(task)
    program = f"entp train {name}"
    every = options_of(kind)
    if set(args) & set(HELP):
        print(short_help(program, about(kind), every, ESSENTIAL))
        return 0
    words = translate(args[1:], every)
    saved = _saved_run(words, task)
    began = None if saved else _beginning(words)
    options = parse(kind, words, program, _start(kind, task, saved, began))
    options = _with_data(options, saved)
    run = run_of(options, saved, began)
    out = options.out or default_folder(run.task, run.mode)
    from entp.experiments.step_time import long_step
    from entp.training.trainer import announce, train

    init = None if options.init is None else read_weights(options.init, run.task, run.model)
    note = long_step(run, options.device)
    if note and os.environ.get("RANK", "0") == "0":
        print(note, file=sys.stderr)
    result = train(
        run, out, device=options.device, resume=options.resume, fork=options.fork, init=init
    )
    if os.environ.get("RANK", "0") == "0":
        print(announce(result))
    return 128 + result.stopped_by if result.stopped_by else 0


def _with_text(args: list[str]) -> list[str]:
    """The words with `FILE` at their beginning as `text --data FILE`."""
    name = args[0] if args else ""
    _refuse_file_of_python(name)
    known = name in TASKS or ":" in name or not name
    if known or not (Path(name).exists() or name.endswith(SUFFIXES)):
        return args
    begun = any(word.split("=")[0] in ("--init", "--resume", "--fork") for word in args)
    if not begun and Path(name).exists() and os.environ.get("RANK", "0") == "0":
        print(
            f"{name} is read as bytes: the command is entp train text --data {name}. For another "
            f"tokenizer: entp data prepare {name} --tokenizer bpe, and --data with its name.",
            file=sys.stderr,
        )
    return ["text", f"--data={name}", *args[1:]]


def _refuse_file_of_python(name: str) -> None:
    """It is no text to train on, and may hold a task."""
    file, _, task = name.partition(":")
    if file.endswith(".py"):
        own = f"{Path(file).stem}:{task or 'NAME'}"
        raise InputError(
            f"{name} names a file of Python, which is not read as text: a task of your own is "
            f"module:Class. In the folder of the file: entp train {own}."
        )


def _with_data(options: Any, saved: Run | None) -> Any:
    """The options with the task on the data that --data names; a saved run's has its own."""
    data = getattr(options, "data", None)
    if data is None and saved is not None:
        return options
    return dataclasses.replace(options, task=options.task.with_data(data))


def default_folder(task: Task | type[Task], mode: str) -> Path:
    return Path("runs") / f"{task.name}-{mode}"


def train_options(task: type[Task]) -> type[TrainOptions]:
    """The options of `entp train` for a task: its own, the model's, and every technique's."""
    elsewhere = dict.fromkeys(SIZES["small"], "that of --size")
    elsewhere["context_length"] = "that of the task"
    parts = {
        "task": task,
        "model": optional(ModelConfig, without=TASK_DECIDES, defaults=elsewhere),
        "optim": OptimConfig,
        "train": TrainConfig,
        **{name: optional(config) for name, config in TECHNIQUE_CONFIGS.items()},
    }
    return dataclasses.make_dataclass(
        "TrainOptions",
        [*_data_field(task), *(_part(name, kind) for name, kind in parts.items())],
        bases=(TrainOptions,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": TrainOptions.__doc__},
    )


def _data_field(task: type[Task]) -> list[Any]:
    """The option --data, for tasks that read files."""
    from tyro.conf import arg

    told = (
        "Files to train on: text, or a prepared corpus by its folder, name or hash. None: the "
        "task's default, or the data of the run that is continued."
    )
    return [("data", Annotated[str | None, arg(help=told)], None)] if task.takes_data else []


def _part(name: str, kind: Any) -> Any:
    """A field for a part of the options; one with fields that must be given has no default."""
    from tyro.conf import arg

    hint = Annotated[kind, arg(help=first_sentence(about(kind)))]
    needed = [f for f in dataclasses.fields(kind) if _must_be_given(f)]
    return (name, hint) if needed else (name, hint, field(default_factory=kind))


def _must_be_given(f: dataclasses.Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def run_of(options: Any, saved: Run | None = None, began: Beginning | None = None) -> Run:
    """The run that these options ask for; `saved` is the one that it continues, and `began` what
    it takes over from --init."""
    return Run(
        task=options.task,
        model=_model(options, saved, began),
        mode=options.mode,
        steps=options.steps,
        batch_size=options.batch_size,
        seed=options.seed,
        optim=options.optim,
        train=options.train,
        init="" if saved is None else saved.init,
        **{name: _technique(name, getattr(options, name), saved) for name in TECHNIQUE_CONFIGS},
    )


def _model(options: Any, saved: Run | None, began: Beginning | None) -> AnyModelConfig:
    changes = given(options.model)
    if began is not None:
        return began.model_for(options.task, options, changes)
    if saved is not None and isinstance(saved.model, PretrainedConfig):
        check_unchanged(options.size, changes)
        return dataclasses.replace(saved.model, **adapters(options, saved.model))
    refuse_adapters(options)
    if saved is None:
        return model_for(options.task, options.size or "small", **changes)
    if options.size is not None:
        changes = {**SIZES[options.size], **changes}
    if options.task != saved.task:
        changes = {**options.task.model_needs(), **changes}
    return dataclasses.replace(saved.model, **changes)


def _technique(name: str, options: Any, saved: Run | None) -> Any:
    """The config of a technique; None if it is off, which is where none of its options is given."""
    values = given(options)
    fields = dataclasses.fields(TECHNIQUE_CONFIGS[name])
    missing = [f.name for f in fields if _must_be_given(f) and f.name not in values]
    was_on = saved is not None and getattr(saved, name) is not None
    if not values or (missing and was_on):
        return None
    if missing:
        needs = " and ".join(_option(name, one) for one in missing)
        got = " and ".join(_option(name, one) for one in values)
        raise InputError(f"{got} needs {needs} as well: give it, or leave {name} out.")
    return TECHNIQUE_CONFIGS[name](**values)


def _option(part: str, name: str) -> str:
    return f"--{part}.{name}".replace("_", "-")


def _saved_run(words: list[str], task: type[Task]) -> Run | None:
    """The run that --resume or --fork continues; None if there is none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--out", "--mode", "--fork"):
        parser.add_argument(name, nargs="?")
    parser.add_argument("--resume", nargs="?", const=True)  # tyro complains about a value
    asked = parser.parse_known_args(words)[0]
    folder = asked.fork and Path(asked.fork)
    if asked.resume:
        folder = Path(asked.out) if asked.out else default_folder(task, asked.mode or "entp")
    if not folder or not (folder / "config.json").is_file():
        return None
    look_into(folder)
    saved = read_run(folder / "config.json")
    return saved if isinstance(saved.task, task) else None


def _beginning(words: list[str]) -> Beginning | None:
    """What --init hands on; None without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--init", nargs="?")
    folder = parser.parse_known_args(words)[0].init
    return read_beginning(Path(folder)) if folder else None


def _start(
    kind: type[TrainOptions], task: type[Task], saved: Run | None, began: Beginning | None
) -> TrainOptions | None:
    """The options that hold unless others are given; None for those of the class."""
    if saved is not None:
        return _defaults(kind, saved)
    first = None if began is None else began.task(task)
    if began is None or first is None:
        return None
    return kind(task=first, mode=began.mode)  # type: ignore[call-arg]


def _defaults(kind: type[TrainOptions], saved: Run) -> TrainOptions:
    """The options that ask for a saved run."""
    plain: Any = kind(task=saved.task)  # type: ignore[call-arg]
    techniques = {
        name: dataclasses.replace(getattr(plain, name), **dataclasses.asdict(config))
        for name in TECHNIQUE_CONFIGS
        if (config := getattr(saved, name)) is not None
    }
    return dataclasses.replace(
        plain,
        mode=saved.mode,
        steps=saved.steps,
        batch_size=saved.batch_size,
        seed=saved.seed,
        optim=saved.optim,
        train=saved.train,
        **techniques,
    )
