"""`entp llm openai prepare|submit|status|evaluate`: GPT-4o fine-tuned on Count3 or Count2.

`entp llm convert FILE.gguf`: a model that is fine-tuned here, from a GGUF file.
`entp llm trim FOLDER --task TASK`: a pretrained model with the tokens of a task alone.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal

from entp.cli.export import check_shards
from entp.cli.help import part_list
from entp.cli.parse import HELP, name_of, named_task, parse, part_of
from entp.errors import InputError, one_of
from entp.terminal import format_table

NOTHING_SENT = "Nothing was sent: add --yes to send it."


@dataclass(frozen=True)
class PrepareOptions:
    """Write train, validation and test files in the chat format; nothing is sent."""

    out: Path
    """Folder for the files."""
    task: Literal["count3", "count2"] = "count3"
    """The task; count2 is the paper's control."""
    train: int = 1000
    """Sequences to train on."""
    valid: int = 100
    """Sequences for the service's validation loss."""
    test: int = 200
    """Sequences for evaluate."""
    seed: int = 0
    """Of the draws."""
    prompt_length: int = 16
    """Random integers at the start of each sequence."""
    length: int = 64
    """Integers per sequence."""
    num_values: int = 64
    """The random integers are below this."""
    train_price: float = 25.0
    """For the estimate: US dollars per million training tokens. Look up today's."""
    input_price: float = 3.75
    """For the estimate: US dollars per million tokens that the fine-tuned model reads."""
    output_price: float = 15.0
    """For the estimate: US dollars per million tokens that it writes."""


@dataclass(frozen=True)
class SubmitOptions:
    """Upload the files of a prepared folder and start one fine-tuning job; without --yes, say what
    would be sent."""

    model: str = "gpt-4o-2024-08-06"
    """Model to fine-tune."""
    epochs: int = 1
    """Times that the job reads the training file."""
    batch_size: int = 4
    """Sequences per step; the paper's."""
    learning_rate_multiplier: float = 10.0
    """Multiplier of the service's learning rate; the paper's."""
    seed: int = 0
    """Of the job."""
    yes: bool = False
    """Send it. It costs money."""


@dataclass(frozen=True)
class StatusOptions:
    """Show how the job of a folder stands, with its last events."""

    events: int = 5
    """Events to show."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Ask the fine-tuned model for the answers to test.jsonl and score them; without --yes, say
    what would be sent."""

    limit: int | None = None
    """Only the first so many prompts. None: all."""
    yes: bool = False
    """Send it. It costs money."""


@dataclass(frozen=True)
class ConvertOptions:
    """Write the model and the tokenizer of a GGUF file as a folder in HuggingFace's format, for
    --init."""

    out: Path
    """The new folder."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the weights in the folder. They are trained in fp32."""


@dataclass(frozen=True)
class TrimOptions:
    """Write a pretrained model with the tokens of one task alone, as a folder in HuggingFace's
    format that is small enough to copy; runs that begin with it are the same."""

    out: Path
    """The new folder."""
    shard_mib: float | None = None
    """Largest file of weights in MiB; no tensor is cut. None: one file."""

    def __post_init__(self) -> None:
        check_shards(self.shard_mib)


OPENAI: dict[str, type] = {
    "prepare": PrepareOptions,
    "submit": SubmitOptions,
    "status": StatusOptions,
    "evaluate": EvaluateOptions,
}


def llm_command(args: list[str]) -> int:
    """llm openai|convert|trim: fine-tune GPT-4o on Count3 or Count2; make a folder for --init"""
    if not args or args[0] in (*HELP, "--help-all"):
        print(part_list("llm openai", OPENAI, "prepare"))
        print("\nentp llm convert FILE.gguf --out FOLDER: a GGUF file in HuggingFace's format")
        print("entp llm trim FOLDER --task TASK --out FOLDER: a model with a task's tokens alone")
        return 0
    if args[0] in FOLDERS:
        return FOLDERS[args[0]](args[1:])
    if args[0] != "openai":
        raise one_of("part of entp llm", args[0], ["openai", *FOLDERS])
    part, words = part_of(args[1:], "llm openai", "part of entp llm openai", OPENAI, "prepare")
    if part == "prepare":
        return _prepare(parse(PrepareOptions, words, "entp llm openai prepare"))
    command = f"llm openai {part}"
    folder = Path(name_of(words, "prepared folder", [], command))
    program = f"entp {command} {folder}"
    if part == "submit":
        return _submit(folder, parse(SubmitOptions, words[1:], program))
    if part == "status":
        return _status(folder, parse(StatusOptions, words[1:], program))
    return _evaluate(folder, parse(EvaluateOptions, words[1:], program))


def _convert(words: list[str]) -> int:
    file = name_of(words, "GGUF file", [], "llm convert")
    options = parse(ConvertOptions, words[1:], f"entp llm convert {file}")
    from entp.hf import need_transformers

    need_transformers()
    from entp.hf.gguf import convert

    print(f"next: entp train count-text --init {convert(file, options.out, options.precision)}")
    return 0


def _trim(words: list[str]) -> int:
    folder = Path(name_of(words, "folder", [], "llm trim"))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", nargs="?")
    asked, rest = parser.parse_known_args(words[1:])
    if asked.task is None and not set(rest) & {*HELP, "--help-all"}:
        raise InputError(
            "entp llm trim needs --task with the task whose tokens are kept: `entp tasks` lists "
            "them."
        )
    program = f"entp llm trim {folder} --task {asked.task or 'TASK'}"
    options: Any = parse(_trim_options(asked.task), rest, program)
    from entp.hf import need_transformers

    need_transformers()
    from entp.hf.trimming import trim

    task = options.task.for_model(folder).with_data(None)
    found = trim(folder, task, options.out, options.shard_mib)
    print(
        f"{options.out}: {len(found.rows.ids):,} of {found.vocab:,} tokens, {found.size / 1e6:.1f} "
        f"MB. {found.rows.told}"
    )
    parser.add_argument("--out")
    parser.add_argument("--shard-mib")
    words = ["train", asked.task, *parser.parse_known_args(rest)[1]]
    print(f"next: entp {shlex.join(words)} --init {options.out}")
    return 0


def _trim_options(task: str | None) -> type:
    """The options of `entp llm trim` with those of a task."""
    if task is None:
        return TrimOptions
    return make_dataclass(
        "TrimOptions",
        [("task", named_task(task))],
        bases=(TrimOptions,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": TrimOptions.__doc__},
    )


FOLDERS: dict[str, Callable[[list[str]], int]] = {"convert": _convert, "trim": _trim}
"""What writes a folder of a model for --init."""


def _prepare(options: PrepareOptions) -> int:
    from entp.llm.chat_files import Prices, prepare
    from entp.llm.prompts import counting_task

    task = counting_task(
        options.task,
        prompt_length=options.prompt_length,
        length=options.length,
        num_values=options.num_values,
    )
    sizes = {"train": options.train, "valid": options.valid, "test": options.test}
    prices = Prices(options.train_price, options.input_price, options.output_price)
    report = prepare(task, sizes, options.seed, options.out, prices)
    columns = ("lines", "bytes", "duplicates_dropped", "leaks_dropped")
    rows = [
        [f"{split}.jsonl", *(f"{found[name]:,}" for name in columns)]
        for split, found in report["splits"].items()
    ]
    print(format_table(["file", "lines", "bytes", "duplicates dropped", "leaks dropped"], rows))
    told = report["estimates"]
    print(
        f"estimates: {told['train_tokens_per_epoch']:,} training tokens an epoch, about "
        f"${told['train_dollars_per_epoch']:.2f}; evaluation about ${told['test_dollars']:.2f}"
    )
    print(f"next: entp llm openai submit {options.out}")
    return 0


def _submit(folder: Path, options: SubmitOptions) -> int:
    from entp.llm.openai_client import host
    from entp.llm.openai_jobs import JobRequest, planned, submit

    request = JobRequest(
        options.model,
        options.epochs,
        options.seed,
        options.batch_size,
        options.learning_rate_multiplier,
    )
    if options.yes:
        job = submit(folder, request)
        print(f"job {job['job']} on {job['model']}: {job['status']}")
        print(f"next: entp llm openai status {folder}")
        return 0
    plan = planned(folder, request)
    for name, found in plan["files"].items():
        print(f"upload {name} to {host()}: {found['lines']:,} lines, {found['bytes']:,} bytes")
    settings = ", ".join(f"{name} {value}" for name, value in request.hyperparameters.items())
    print(f"start one job on {request.model}: {settings}, seed {request.seed}")
    print(f"estimate: {plan['tokens']:,} training tokens, about ${plan['dollars']:.2f}")
    print(NOTHING_SENT)
    return 0


def _status(folder: Path, options: StatusOptions) -> int:
    """0, or 1 where the job ended without a model."""
    from entp.llm.openai_jobs import ENDED_BADLY, status

    job, events = status(folder, options.events)
    for line in events:
        print(f"  {line}")
    print(f"job {job['job']} on {job['model']}: {job['status']}")
    if job["error"]:
        print(f"error: {job['error']}")
    if job["fine_tuned_model"]:
        print(f"model: {job['fine_tuned_model']}")
        print(f"next: entp llm openai evaluate {folder}")
    return 1 if job["status"] in ENDED_BADLY else 0


def _evaluate(folder: Path, options: EvaluateOptions) -> int:
    from entp.llm.openai_answers import RESULTS, evaluate
    from entp.llm.score import METRICS

    if not options.yes:
        return _plan_evaluation(folder, options.limit)
    totals = evaluate(folder, options.limit)
    rows = []
    for metric in METRICS:
        low, high = totals.interval(metric.name) or (float("nan"), float("nan"))
        rows.append([metric.name, f"{totals.value(metric.name):.4f}", f"{low:.4f} to {high:.4f}"])
    print(format_table(["metric", "value", "95 % interval"], rows))
    print(f"{totals.sequences:,} sequences; by position in {folder / RESULTS}")
    return 0


def _plan_evaluation(folder: Path, limit: int | None) -> int:
    from entp.llm.chat_files import read_report
    from entp.llm.openai_answers import chosen_items, unanswered
    from entp.llm.openai_client import host

    items = chosen_items(folder, limit)
    missing = unanswered(folder, items)
    report = read_report(folder)
    share = len(missing) / report["splits"]["test"]["lines"]
    dollars = report["estimates"]["test_dollars"] * share
    there = len(items) - len(missing)
    print(f"ask {host()} for {len(missing):,} answers; {there:,} are there already")
    print(f"estimate: about ${dollars:.2f}")
    print(NOTHING_SENT)
    return 0
