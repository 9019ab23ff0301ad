"""`entp reproduce RECIPE`: the runs of a figure or table of the paper; `all`: of the paper."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from entp.bench.options import check_out
from entp.cli.parse import HELP, look_here, name_of, parse
from entp.errors import InputError, TrainingStopped

NAMES = "all, for the whole paper"


@dataclass(frozen=True)
class StateOptions:
    """Show how far every recipe is: runs recorded, minutes left on an H200, and the verdict."""

    records: Path = Path("results")
    """Folder with the records, RECIPE.json; without one here nothing is recorded yet."""


@dataclass(frozen=True)
class SharedOptions:
    """What one recipe and several have in common."""

    tiny: bool = False
    """A version for a CPU minute: shows that everything works, not the result."""
    seed: int | None = None
    """Train with this seed only, of those that the recipe has: one machine per seed."""
    jobs: int | Literal["auto"] = 1
    """Runs at a time, each in a process of its own: for small models, which do not fill a GPU.
    auto: as many as the device serves best."""
    max_minutes: float | None = None
    """Most training time of an arm whose schedule follows steps. What it has by then is tested; run
    again to go on."""
    total_minutes: float | None = None
    """Stop after so long in all, as by an interrupt: what is trained by then is saved and recorded.
    Runs that can be done by then begin first, in the order of the recipes and their arms. Run again
    to go on."""
    data: str | None = None
    """Other data for tasks that read files: a prepared corpus, a text, a folder. None: the
    recipe's."""
    out: Path = Path("runs")
    """Folder for all recipes' runs."""
    baselines: bool = True
    """Let the task's baselines answer the test sequences too; slow ones take CPU minutes, and may
    be added later."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""


@dataclass(frozen=True)
class ReproduceOptions(SharedOptions):
    """Train what a figure or table of the paper needs and print paper | ours. Run again to
    continue."""

    only: tuple[str, ...] = ("all",)
    """Train the arms with these labels only, each in quotes."""
    init: Path | None = None
    """Folder of the pretrained weights, in HuggingFace's format, that some arms begin with. None:
    no such arm is begun."""
    record: Path | None = None
    """Add the results to this file, which may hold arms from other machines, every half minute
    while runs train; table and figures are then of all of them."""

    def __post_init__(self) -> None:
        if not self.only:
            raise InputError(
                "--only names no arm: give one or more, each in quotes, or leave it out to train "
                "all of them."
            )
        check_out(self.record, "--record")


@dataclass(frozen=True)
class SeveralOptions(SharedOptions):
    """Carry several recipes out, and print how far each is: one after the other, or with --jobs as
    one queue. What cannot begin or fails does not stop the others. Run again to continue."""

    init: tuple[str, ...] = ()
    """RECIPE=FOLDER of the pretrained weights that arms of a recipe begin with."""
    records: Path = Path("results")
    """Folder with the records, RECIPE.json, to which results are added; tiny runs are not."""


def reproduce_command(args: list[str]) -> int:
    """reproduce RECIPE ...: figures and tables of the paper, or all; alone: how far each is"""
    names = list(takewhile(lambda word: not word.startswith("-"), args))
    if not names and not {*HELP, "--help-all"} & set(args):
        return _show_state(parse(StateOptions, args, "entp reproduce"))
    from entp.experiments import RECIPES
    from entp.experiments.whole import ALL, names_of

    name = name_of(args, "recipe", [*RECIPES, NAMES, "or module:NAME of your own"], "reproduce")
    if names != [name] or name == ALL:
        for one in names:
            look_here(one)
        return _several(names_of(names), args[len(names) :])
    look_here(name)
    return _one(name, parse(ReproduceOptions, args[1:], f"entp reproduce {name}"))


def _show_state(options: StateOptions) -> int:
    from entp.experiments.whole import STATE_HEAD, every_recipe, state_rows
    from entp.terminal import format_table

    if not options.records.is_dir() and options != StateOptions():
        raise InputError(
            f"--records {options.records} is no folder: give the one with RECIPE.json."
        )
    print(format_table(STATE_HEAD, state_rows(every_recipe(), options.records)))
    print("\nentp reproduce RECIPE: one of them. entp reproduce all: those of the paper.")
    print("Minutes are those of one H200, one run after the other; a CPU takes many times as long.")
    return 0


def _several(names: list[str], words: list[str]) -> int:
    """Several recipes, and how far they are at the end."""
    options = parse(SeveralOptions, words, "entp reproduce RECIPE ...")
    from entp.experiments.recipe import find_recipe
    from entp.experiments.reproduce import Chosen
    from entp.experiments.whole import (
        STATE_HEAD,
        parse_inits,
        reproduce_all,
        state_rows,
        time_limit,
    )
    from entp.terminal import format_table

    for name in names:
        find_recipe(name)
    inits = parse_inits(options.init, names)
    chosen = Chosen(
        options.device,
        seed=options.seed,
        jobs=options.jobs,
        max_minutes=options.max_minutes,
        baselines=options.baselines,
        end=_end(options.total_minutes),
    )
    ended = None
    if not options.tiny:
        options.records.mkdir(parents=True, exist_ok=True)
    with time_limit(options.total_minutes) as time_is_up:
        ended = reproduce_all(
            names,
            options.out,
            options.records,
            chosen,
            tiny=options.tiny,
            data=options.data,
            inits=inits,
        )
    if not options.tiny:
        print(f"\n{format_table(STATE_HEAD, state_rows(names, options.records))}")
    if ended is None:
        return _stopped(0, True)
    for what, told in (("skipped", ended.skipped), ("failed", ended.failed)):
        for name, why in told.items():
            print(f"{what}: {name}: {why}")
    if ended.stopped_by:
        return _stopped(ended.stopped_by, bool(time_is_up))
    if ended.failed:
        raise TrainingStopped(f"{len(ended.failed)} of {len(names)} recipes failed.")
    return 2 if len(ended.skipped) == len(names) else 0


def _end(minutes: float | None) -> float | None:
    """When so many minutes are over, by time.monotonic()."""
    return None if minutes is None else time.monotonic() + 60 * minutes


def _stopped(signal: int, time_is_up: bool) -> int:
    """The exit code, after a word on how to go on."""
    if time_is_up:
        print("the time is up: run the same command again to go on")
        return 0
    print("stopped: run the same command again to go on")
    return 128 + signal


def _one(name: str, options: ReproduceOptions) -> int:
    """One recipe, and its table."""
    from entp.experiments.recipe import find_recipe
    from entp.experiments.reproduce import reproduce
    from entp.experiments.whole import time_limit
    from entp.report.tables import record_table

    recipe = find_recipe(name).tiny() if options.tiny else find_recipe(name)
    if options.data is not None:
        recipe = recipe.with_data(options.data)
    print(f"{recipe.title}\n{recipe.question}", flush=True)
    found = None
    with time_limit(options.total_minutes) as time_is_up:
        found = reproduce(
            recipe,
            options.out,
            device=options.device,
            only=() if options.only == ("all",) else options.only,
            seed=options.seed,
            jobs=options.jobs,
            record=options.record,
            max_minutes=options.max_minutes,
            baselines=options.baselines,
            init=options.init,
            end=_end(options.total_minutes),
        )
    if found is None:
        return _stopped(0, True)
    files = [options.out / recipe.name, options.record]
    where = " and ".join(str(path) for path in files if path is not None)
    print(f"\n{record_table(found)}\n\nresults and figure: {where}")
    if options.tiny:
        print("tiny runs show that everything works; they say nothing about the paper's claim")
    return _stopped(found.stopped_by, bool(time_is_up)) if found.stopped_by else 0
