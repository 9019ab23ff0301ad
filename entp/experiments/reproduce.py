"""Carry a recipe out: train what is missing, test it, then the table paper | ours and the figures.

runs/count3/
  ENTP-medium-tuned-3f2a91c0de/   one run folder per arm and seed; test.json: its best checkpoint on
                                  test sequences (of a recipe with a `folder`: in runs/FOLDER)
  results.json                    per arm and seed: values with intervals, the paper's, curve,
                                  steps, seconds, device, commit, date
  results.png                     the figures
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from entp.errors import DeviceFailed, InputError, TrainingStopped, one_of
from entp.experiments.claims import UnderWay
from entp.experiments.collect import find_folder
from entp.experiments.jobs import gpus_of
from entp.experiments.recipe import ArmRun, Recipe, check_recipe
from entp.experiments.recorder import recording
from entp.experiments.running import Item, Resources, is_done, run_all, shared_device
from entp.experiments.study import RESULTS, Study
from entp.results.schema import Record
from entp.training.checkpoint import newest

MOST_MINUTES = 1e9


class Outcome(Record):
    """The record that came out."""

    stopped_by: int | None = Field(default=None, exclude=True)
    """The signal that stopped it, if one did."""


def reproduce(
    recipe: Recipe,
    runs: Path,
    *,
    device: str = "auto",
    only: Sequence[str] = (),
    seed: int | None = None,
    jobs: int | Literal["auto"] = 1,
    record: Path | None = None,
    max_minutes: float | None = None,
    baselines: bool = True,
    init: Path | None = None,
    end: float | None = None,
) -> Outcome:
    """Train the arms that are not finished, or `only` some, or those of one seed, and write what
    came out. Returns the results.

    An arm that fails does not stop the others; all that failed are named in an error at the end.
    The record has what runs have so far every half minute while they train, and before each is
    tested.

    jobs: runs at a time, or "auto" for as many as the device serves best. Where there are several,
        the longest begin first.
    max_minutes: most training time of an arm, for arms whose schedule does not follow the clock
        anyway. What an arm has by then is tested and recorded with its number of steps; without the
        limit it goes on from there.
    record: a results file that may hold runs of other machines. Those that are done and tested in
        it are not trained again; what comes out here is added to it, the figure is drawn beside it,
        and the results are all of it. A recipe with the `folder` of another also takes runs that
        FOLDER.json beside it has, where they have been tested on all that it asks for.
    baselines: after the runs, let the baselines answer test sequences whose answers are not
        recorded yet. They need no GPU, and slow ones take minutes: False leaves them for another
        call.
    init: a folder in HuggingFace's format, for arms of a pretrained model.
    end: when the time is up, by time.monotonic(). Runs that would be done by then begin before
        longer ones, and not more at a time than will be. Stopping is the caller's.
    """
    chosen = Chosen(device, only, seed, jobs, max_minutes, baselines, end)
    part = plan(recipe, runs, chosen, record=record, init=init)
    stopped = carry_out([part], runs, chosen)
    return finish(part, chosen, stopped)


class Chosen(NamedTuple):
    """What somebody chose for all recipes of a call; see `reproduce`."""

    device: str = "auto"
    only: Sequence[str] = ()
    seed: int | None = None
    jobs: int | Literal["auto"] = 1
    max_minutes: float | None = None
    baselines: bool = True
    end: float | None = None


@dataclass
class Part:
    """A recipe of a call: its results, and those of its runs that are to be carried out."""

    recipe: Recipe
    study: Study
    arms: list[ArmRun]
    init: Path | None = None
    failed: dict[str, Exception] = field(default_factory=dict)
    """What its runs failed by, by name."""
    elsewhere: list[str] = field(default_factory=list)
    """Names of runs that other processes have begun."""
    error: InputError | TrainingStopped | None = None
    """Why it could not begin, or its results not be written."""

    @property
    def items(self) -> list[Item]:
        return [Item(arm, self.study, self.init) for arm in self.arms]


def plan(
    recipe: Recipe,
    runs: Path,
    chosen: Chosen,
    *,
    record: Path | None = None,
    init: Path | None = None,
) -> Part:
    """A recipe ready to be carried out; an InputError if it cannot begin."""
    recipe = recipe if init is None else recipe.with_init(init)
    check_recipe(recipe)
    _check(recipe, chosen)
    folders = runs / (recipe.folder or recipe.name)
    study = Study(recipe.record(), recipe.runs(), runs / recipe.name, folders, record)
    for folder in (study.root, study.folders):
        folder.mkdir(parents=True, exist_ok=True)
    study.keep_what_is_left_out(len(study.read_kept(quiet=False)))
    known = study.read_known(quiet=False)
    arms = [arm for arm in recipe.runs(chosen.only, chosen.seed) if study.is_to_do(arm, known)]
    _check_data(recipe, arms)
    _check_weights(recipe, arms, study.folders, init)
    return Part(recipe, study, arms, init)


def carry_out(parts: Sequence[Part], runs: Path, chosen: Chosen) -> int | None:
    """Train and test the runs of these recipes, as one queue, and record each as it ends. Returns
    the signal that stopped them, if one did. What failed is in `failed` and `error` of its part."""
    for part in parts:
        with _kept_in(part):
            stopped = _train_sources(part, runs, chosen)
            if stopped:
                return stopped
            part.study.write()
    begun = [part for part in parts if part.error is None]
    items = [item for part in begun for item in part.items]
    sharing = shared_device([item.arm for item in items], chosen.device, chosen.jobs)
    stopped = None
    with ExitStack() as stack:
        jobs, shared = stack.enter_context(sharing)
        for part in begun:
            stack.enter_context(recording(part.study.recorded(part.arms)))
        gpus = min(gpus_of(chosen.device), jobs)
        environment = shared.environment
        resources = Resources(
            chosen.device, jobs, chosen.max_minutes, environment, gpus, chosen.end
        )
        endings = stack.enter_context(closing(run_all(items, resources)))
        for item, ending in endings:
            part = next(part for part in begun if part.study is item.study)
            with _kept_in(part):
                part.study.write()  # what is done is not lost with what is not
            stopped = ending.stopped_by
            if isinstance(ending.error, UnderWay):
                part.elsewhere.append(item.arm.name)
            elif ending.error is not None and not stopped:
                part.failed[item.arm.name] = ending.error
    return stopped


@contextmanager
def _kept_in(part: Part) -> Iterator[None]:
    """Errors inside are this recipe's own: the others go on. A GPU that fails ends all."""
    try:
        yield
    except DeviceFailed:
        raise
    except (InputError, TrainingStopped) as error:
        part.error = part.error or error


def finish(part: Part, chosen: Chosen, stopped: int | None) -> Outcome:
    """The results of a recipe that was carried out, with baselines and figure; an error if runs
    failed."""
    if part.error is not None:
        raise part.error
    found = part.study.write()  # those beside one that was stopped have saved since
    if chosen.baselines and not stopped:
        found = part.study.add_baselines(found, chosen.only)
    part.study.draw()
    if part.elsewhere:
        told = f"{part.recipe.name}: under way in other processes: {'; '.join(part.elsewhere)}."
        print(f"{told} Run again for their results.", file=sys.stderr, flush=True)
    _raise_failed(part.failed, len(part.arms), part.study.root / RESULTS)
    return Outcome(**dict(found), stopped_by=stopped)


def _check_data(recipe: Recipe, arms: Sequence[ArmRun]) -> None:
    """InputError if the data of a task that reads files is not here, before anything is trained."""
    for task in {arm.run.task: None for arm in arms if arm.run.task.takes_data}:
        try:
            task.split_batches("test", 1)
        except InputError as error:
            made = f" This recipe's is made by `{recipe.prepare}`." if recipe.prepare else ""
            raise InputError(f"{error}{made}") from None
    if arms and recipe.test_on is not None:
        recipe.test_on.split_batches("test", 1)


def _check_weights(
    recipe: Recipe, arms: Sequence[ArmRun], folders: Path, init: Path | None
) -> None:
    """InputError if arms begin with weights that nobody gave, before anything is trained."""
    for arm in arms:
        if arm.needs_weights and init is None and newest(find_folder(arm, folders)) is None:
            told = f" {recipe.weights}" if recipe.weights else ""
            raise InputError(
                f"{arm.name} begins with pretrained weights: give --init with their folder, or "
                f"leave the arm out with --only.{told}"
            )


def _train_sources(part: Part, runs: Path, chosen: Chosen) -> int | None:
    """Train what these runs begin with, as runs of the recipe that has them. Returns the signal
    that stopped it, if one did."""
    source = part.recipe.source
    if source is None:
        return None
    needed: dict[int, list[str]] = {}
    there = runs / (source.folder or source.name)
    for one in (arm.source for arm in part.arms if arm.source is not None):
        if is_done(one, there):
            continue
        labels = needed.setdefault(one.run.seed, [])
        labels += [one.label] if one.label not in labels else []
    for seed, labels in needed.items():
        options = chosen._replace(only=labels, seed=seed, baselines=False)
        found = reproduce(source, runs, **options._asdict())
        if found.stopped_by:
            return found.stopped_by
    return None


def _check(recipe: Recipe, chosen: Chosen) -> None:
    only, seed, jobs, max_minutes = chosen.only, chosen.seed, chosen.jobs, chosen.max_minutes
    labels = [arm.label for arm in recipe.arms]
    for label in only:
        if label not in labels:
            raise one_of(f"arm of {recipe.name}", label, labels)
    if not recipe.runs(only, seed):
        raise one_of("seed", seed, sorted({str(arm.run.seed) for arm in recipe.runs(only)}))
    if jobs != "auto" and jobs < 1:
        raise InputError(f"--jobs is {jobs}: it must be at least 1, or auto.")
    if max_minutes is not None and not 0 < max_minutes <= MOST_MINUTES:
        raise InputError(
            f"--max-minutes is {max_minutes:g}: it must be above 0 and at most {MOST_MINUTES:g}; "
            "leave it out to train to the end."
        )


def _raise_failed(failed: dict[str, Exception], arms: int, results: Path) -> None:
    """One error about all arms that failed, if some did."""
    if not failed:
        return
    if len(failed) == arms == 1:
        raise next(iter(failed.values()))
    told = "; ".join(f"{name}: {str(error).rstrip('.')}" for name, error in failed.items())
    kind = InputError if all(isinstance(e, InputError) for e in failed.values()) else None
    raise (kind or TrainingStopped)(
        f"{len(failed)} of {arms} runs failed. {told}. The others are in {results}."
    )
