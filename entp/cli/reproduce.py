"""`entp reproduce RECIPE`: the runs of a figure or table of the paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from entp.bench.options import check_out
from entp.cli.parse import look_here, name_of, parse
from entp.errors import InputError


@dataclass(frozen=True)
class ReproduceOptions:
    """Train what a figure or table of the paper needs and print paper | ours. Run again to
    continue."""

    tiny: bool = False
    """A version for a CPU minute: shows that everything works, not the result."""
    only: tuple[str, ...] = ("all",)
    """Train the arms with these labels only, each in quotes."""
    seed: int | None = None
    """Train with this seed only, of those that the recipe has: one machine per seed."""
    jobs: int | Literal["auto"] = 1
    """Runs at a time, each in a process of its own: for small models, which do not fill a GPU.
    auto: as many as the device serves best."""
    max_minutes: float | None = None
    """Most training time of an arm whose schedule follows steps. What it has by then is tested; run
    again to go on."""
    data: str | None = None
    """Other data for tasks that read files: a prepared corpus, a text, a folder. None: the
    recipe's."""
    init: Path | None = None
    """Folder of the pretrained weights, in HuggingFace's format, that some arms begin with. None:
    no such arm is begun."""
    out: Path = Path("runs")
    """Folder for all recipes' runs."""
    record: Path | None = None
    """Add the results to this file, which may hold arms from other machines; table and figures are
    then of all of them."""
    baselines: bool = True
    """Let the task's baselines answer the test sequences too; slow ones take CPU minutes, and may
    be added later."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""

    def __post_init__(self) -> None:
        if not self.only:
            raise InputError(
                "--only names no arm: give one or more, each in quotes, or leave it out to train "
                "all of them."
            )
        check_out(self.record, "--record")


def reproduce_command(args: list[str]) -> int:
    """reproduce RECIPE: a figure or table of the paper"""
    from entp.experiments import RECIPES

    name = name_of(args, "recipe", [*RECIPES, "or module:NAME of your own"], "reproduce")
    look_here(name)
    options = parse(ReproduceOptions, args[1:], f"entp reproduce {name}")
    from entp.experiments.recipe import find_recipe
    from entp.experiments.reproduce import reproduce
    from entp.report.tables import record_table

    recipe = find_recipe(name).tiny() if options.tiny else find_recipe(name)
    if options.data is not None:
        recipe = recipe.with_data(options.data)
    print(f"{recipe.title}\n{recipe.question}", flush=True)
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
    )
    files = [options.out / recipe.name, options.record]
    where = " and ".join(str(path) for path in files if path is not None)
    print(f"\n{record_table(found)}\n\nresults and figure: {where}")
    if found.stopped_by:
        print("stopped: run the same command again to go on")
    if options.tiny:
        print("tiny runs show that everything works; they say nothing about the paper's claim")
    return 128 + found.stopped_by if found.stopped_by else 0
