"""The command line: `entp demo | train | evaluate | generate | export | reproduce | report | bench | theory | tasks`.

Options come from dataclasses through tyro. What a user got wrong is one sentence on standard error and exit code 2.
Heavy imports stay inside the commands, so that `entp --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from entp import __version__
from entp.config import Run
from entp.config_json import read_run
from entp.errors import DeviceFailed, InputError, TrainingStopped, one_of
from entp.options import (
    BenchGenerateOptions,
    BenchScalingOptions,
    BenchStepOptions,
    DemoOptions,
    ReportOptions,
    ReproduceOptions,
    TrainOptions,
)
from entp.parsing import look_here, name_of, named_task, parse
from entp.run_commands import evaluate_command, export_command, generate_command
from entp.tasks.base import TASKS, Task, task_class

BENCHES: dict[str, type] = {"step": BenchStepOptions, "generate": BenchGenerateOptions, "scaling": BenchScalingOptions}
"""The benchmarks: each is the module entp.bench.NAME with `bench(options)` and `report(section)`."""


def train_command(args: list[str]) -> int:
    """train TASK: train a model"""
    cls = named_task(name_of(args, "task", TASKS, "train"))
    saved = _saved_run(args[1:], cls.name)
    options = parse(TrainOptions[cls], args[1:], f"entp train {args[0]}", _defaults(cls, saved))  # type: ignore[valid-type]
    run = options.run(saved)
    out = options.out or Path("runs") / f"{run.task.name}-{run.mode}"
    from entp.training.trainer import announce, train

    result = train(run, out, device=options.device, resume=options.resume, fork=options.fork)
    if os.environ.get("RANK", "0") == "0":
        print(announce(result))
    return 128 + result.stopped_by if result.stopped_by else 0


def reproduce_command(args: list[str]) -> int:
    """reproduce RECIPE: a figure or table of the paper"""
    from entp.experiments import RECIPES

    name = name_of(args, "recipe", [*RECIPES, "or module:NAME of your own"], "reproduce")
    look_here(name)
    options = parse(ReproduceOptions, args[1:], f"entp reproduce {name}")
    from entp.experiments.recipe import find_recipe
    from entp.experiments.records import results_table
    from entp.experiments.reproduce import reproduce

    recipe = find_recipe(name).tiny() if options.tiny else find_recipe(name)
    print(f"{recipe.title}\n{recipe.question}", flush=True)
    results = reproduce(
        recipe,
        options.out,
        device=options.device,
        only=() if options.only == ("all",) else options.only,
        seed=options.seed,
        jobs=options.jobs,
        record=options.record,
        minutes=options.minutes,
    )
    where = f"{options.out / recipe.name}{f' and {options.record}' if options.record else ''}"
    print(f"\n{results_table(results, recipe.metrics)}\n\nresults and picture: {where}")
    if results["stopped_by"]:
        print("stopped: run the same command again to go on")
    if options.tiny:
        print("tiny runs show that everything works; they say nothing about the paper's claim")
    return 128 + results["stopped_by"] if results["stopped_by"] else 0


def report_command(args: list[str]) -> int:
    """report: the page of all recorded results"""
    options = parse(ReportOptions, args, "entp report")
    from entp.experiments.summary import draw_summary
    from entp.report import draw_again, page
    from entp.training.checkpoint import write_file

    draw_again(options.results)
    write_file(options.out, page(options.results, options.out).encode())
    picture = options.out.with_suffix(".png")
    drawn = draw_summary(options.results, picture)
    print(f"page: {options.out}" + (f", picture: {picture}" if drawn else ""))
    return 0


def bench_command(args: list[str]) -> int:
    """bench [WHAT]: time and memory: a training step, generation, growth with length"""
    if args and args[0] in ("-h", "--help"):
        about = [f"  {name:10} {(kind.__doc__ or '').strip()}" for name, kind in BENCHES.items()]
        print("\n".join(["usage: entp bench [WHAT] [OPTIONS]      entp bench WHAT --help", "", *about, "", "default: step"]))
        raise SystemExit(0)
    what = args[0] if args and not args[0].startswith("-") else "step"
    if what not in BENCHES:
        raise one_of("benchmark", what, BENCHES)
    options: Any = parse(BENCHES[what], args[1:] if args[:1] == [what] else args, f"entp bench {what}")
    from entp.bench import record
    from entp.record_shapes import read_sections

    out = options.out
    if out is not None:
        read_sections(out)  # a file that cannot be used is an error before the work, not after it
    module = importlib.import_module(f"entp.bench.{what}")
    keep = {"save": lambda part: record.record(out, what, part)} if what == "step" and out is not None else {}
    section = module.bench(options, **keep)
    print(module.report(section))
    if out is not None:
        print(f"\n{record.record(out, what, section)}")
    return 0


def theory_command(args: list[str]) -> int:
    """theory [WHAT]: check the paper's statements; RASP programs, Count3's trade-off, Count3 as weights"""
    from entp.theory_commands import THEORY

    if args and args[0] in ("-h", "--help"):
        about = [f"  {name:16} {(kind.__doc__ or '').strip()}" for name, kind in THEORY.items()]
        print(
            "\n".join(
                ["usage: entp theory [WHAT] [OPTIONS]      entp theory WHAT --help", "", *about, "", "default: statements"]
            )
        )
        raise SystemExit(0)
    what = args[0] if args and not args[0].startswith("-") else "statements"
    if what not in THEORY:
        raise one_of("part of theory", what, THEORY)
    rest = args[1:] if args[:1] == [what] else args
    if what == "rasp" and rest and not rest[0].startswith("-"):
        rest = ["--program", *rest]
    options: Any = parse(THEORY[what], rest, f"entp theory {what}")
    text, code = options.run()
    print(text)
    return code


def demo_command(args: list[str]) -> int:
    """demo: ENTP and a decoder side by side, live"""
    options = parse(DemoOptions, args, "entp demo")
    from entp.demo import demo

    demo(options.out, options.seed, options.steps)
    return 0


def tasks_command(args: list[str]) -> int:
    """tasks [TASK]: list the tasks, or draw an example of one"""
    if args and args[0] not in ("-h", "--help"):
        task = parse(named_task(args[0]), args[1:], f"entp tasks {args[0]}")
        print(f"{task.name}: {task.about}\n\n{task.draw()}\n\nentp train {args[0]} takes:")
        for f in dataclasses.fields(task):
            print(f"  --task.{f.name.replace('_', '-')} {getattr(task, f.name)}")
        return 0
    for name in TASKS:
        print(f"{name:10} {task_class(name).about}")
    return 0


COMMANDS = {
    "demo": demo_command,
    "train": train_command,
    "evaluate": evaluate_command,
    "generate": generate_command,
    "export": export_command,
    "reproduce": reproduce_command,
    "report": report_command,
    "bench": bench_command,
    "theory": theory_command,
    "tasks": tasks_command,
}


def _leave_at_once(code: int) -> None:
    """End the process without giving anything back to a GPU that failed: torch would abort with a stack."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 training stopped, 2 bad input, 128 + signal interrupted."""
    args = sys.argv[1:] if argv is None else argv
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_help(), flush=True)
            return 0
        if args[0] == "--version":
            print(f"entp {__version__}", flush=True)
            return 0
        if args[0] not in COMMANDS:
            raise one_of("command", args[0], COMMANDS)
        return COMMANDS[args[0]](args[1:])
    except (InputError, TrainingStopped) as error:
        print(f"entp: {error}", file=sys.stderr)
        if isinstance(error, DeviceFailed):
            _leave_at_once(1)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("entp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error))):
            raise
        print(f"entp: there is not enough memory for a model, batch or task of this size ({error}).", file=sys.stderr)
        return 2
    except OSError as error:  # a path that cannot be read or written; anything else has a sentence of its own
        print(f"entp: {error.filename or 'a file'} cannot be used: {error.strerror}. Give another path.", file=sys.stderr)
        return 2


def _help() -> str:
    lines = [
        f"  {(command.__doc__ or '').partition(': ')[0]:20} {(command.__doc__ or '').partition(': ')[2]}"
        for command in COMMANDS.values()
    ]
    return "\n".join(
        [
            "entp: encoder-only next-token prediction",
            "",
            "usage: entp COMMAND [OPTIONS]      entp COMMAND --help      entp --version",
            "",
            *lines,
            "",
            "first: entp train addition --mode entp --size small --steps 200 --batch 16 --out runs/first",
        ]
    )


def _saved_run(args: list[str], task: str) -> Run | None:
    """The run that --resume or --fork continues, whose settings are the defaults then."""
    joined = "\n".join(args)
    found = re.search(r"^--fork[=\n](.+)$", joined, re.MULTILINE)
    folder = Path(found.group(1)) if found else None
    if "--resume" in args:
        out, mode = (re.search(rf"^--{name}[=\n](.+)$", joined, re.MULTILINE) for name in ("out", "mode"))
        folder = Path(out.group(1)) if out else Path("runs") / f"{task}-{mode.group(1) if mode else 'entp'}"
    config = folder / "config.json" if folder else None
    return read_run(config) if config is not None and config.is_file() else None


def _defaults(cls: type[Task], saved: Run | None) -> TrainOptions[Any]:
    if saved is None or not isinstance(saved.task, cls):
        return TrainOptions(cls())
    parts = {"optim": saved.optim, "train": saved.train, "start": saved.start}
    return TrainOptions(saved.task, saved.mode, None, saved.steps, saved.batch, saved.seed, **parts)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
