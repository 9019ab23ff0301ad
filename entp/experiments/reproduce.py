"""Carry a recipe out: train what is missing, test it, then the table paper | ours and the figures.

runs/count3/
  ENTP-medium-tuned-3f2a91c0de/   one run folder per arm and seed; test.json: its best checkpoint on
                                  test sequences (of a recipe with a `folder`: in runs/FOLDER)
  results.json                    per arm and seed: values with intervals, the paper's, curve,
                                  steps, seconds, device, commit, date
  results.png                     the figures
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from entp.config import PretrainedConfig, Run
from entp.errors import DeviceFailed, InputError, TrainingStopped, one_of
from entp.experiments.collect import (
    find_folder,
    read_folder,
    read_test,
)
from entp.experiments.jobs import expected_seconds, gpus_of, how_many, longest_first, spread
from entp.experiments.recipe import ArmRun, Recipe, check_recipe
from entp.experiments.recorder import recording
from entp.experiments.study import RESULTS, Study
from entp.experiments.testing import (
    is_measured,
    measure_best,
    stopping_at_signals,
)
from entp.experiments.workers import Ending, in_parallel
from entp.results.schema import Record
from entp.training.checkpoint import newest
from entp.training.distributed import World, pick_device
from entp.training.initialise import Init, read_init
from entp.training.mps import Shared, shared_gpu
from entp.training.trainer import train

MOST_MINUTES = 1e9


class Resources(NamedTuple):
    """What runs are carried out with."""

    study: Study
    device: str
    concurrent: int
    """Runs at a time, over all devices."""
    max_minutes: float | None
    """Most training time of each."""
    environment: Mapping[str, str] | None = None
    """Variables of the processes that carry them out, where there are several."""
    init: Path | None = None
    """The folder of the weights that some begin with."""
    gpus: int = 1
    """GPUs that they are spread over."""

    @property
    def sharing(self) -> int:
        """Runs at a time on one device."""
        return -(-self.concurrent // self.gpus)

    @property
    def root(self) -> Path:
        """The folder of the recipe's run folders."""
        return self.study.folders


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
    """
    recipe = recipe if init is None else recipe.with_init(init)
    check_recipe(recipe)
    _check(recipe, only, seed, jobs, max_minutes)
    folders = runs / (recipe.folder or recipe.name)
    study = Study(recipe.record(), recipe.runs(), runs / recipe.name, folders, record)
    for folder in (study.root, study.folders):
        folder.mkdir(parents=True, exist_ok=True)
    study.keep_what_is_left_out(len(study.read_kept(quiet=False)))
    known = study.read_known(quiet=False)
    arms = [arm for arm in recipe.runs(only, seed) if study.is_to_do(arm, known)]
    _check_data(recipe, arms)
    _check_weights(recipe, arms, study.folders, init)
    options = {"device": device, "jobs": jobs, "max_minutes": max_minutes}
    stopped = _train_sources(recipe.source, arms, runs, **options)
    if stopped:
        return Outcome(**dict(study.write()), stopped_by=stopped)
    found, failed = study.write(), {}
    gpus, sharing = gpus_of(device), shared_device(arms, device, jobs)
    with sharing as (jobs, shared), recording(study.recorded(arms)):
        gpus = min(gpus, jobs)
        resources = Resources(study, device, jobs, max_minutes, shared.environment, init, gpus)
        if jobs > 1:
            arms = longest_first(arms, study.folders)
        with closing(_run_all(arms, resources)) as endings:
            for ending in endings:
                found = study.write()  # what is done is not lost with what is not
                stopped = ending.stopped_by
                if ending.error is not None and not stopped:
                    failed[arms[ending.number].name] = ending.error
    if stopped:
        found = study.write()  # those beside it have saved since
    elif baselines:
        found = study.add_baselines(found, only)
    study.draw(found)
    _raise_failed(failed, len(arms), study.root / RESULTS)
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


def _train_sources(
    source: Recipe | None, arms: Sequence[ArmRun], runs: Path, **options: Any
) -> int | None:
    """Train what these runs begin with, as runs of the recipe that has them. Returns the signal
    that stopped it, if one did."""
    if source is None:
        return None
    needed: dict[int, list[str]] = {}
    for one in (arm.source for arm in arms if arm.source is not None):
        labels = needed.setdefault(one.run.seed, [])
        labels += [one.label] if one.label not in labels else []
    for seed, labels in needed.items():
        found = reproduce(source, runs, only=labels, seed=seed, baselines=False, **options)
        if found.stopped_by:
            return found.stopped_by
    return None


def _check(
    recipe: Recipe,
    only: Sequence[str],
    seed: int | None,
    jobs: int | Literal["auto"],
    max_minutes: float | None,
) -> None:
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


Endings = Generator[Ending, None, None]
"""How each arm ended, as they do; closing it stops those that run."""


@contextmanager
def shared_device(
    arms: Sequence[ArmRun], device: str, jobs: int | Literal["auto"]
) -> Iterator[tuple[int, Shared]]:
    """How many of the arms are carried out at a time, and how these share the device meanwhile."""
    most = len(arms) if jobs == "auto" else min(jobs, len(arms))
    if most <= 1:
        yield 1, Shared()
        return
    where, gpus = pick_device(device, World()), gpus_of(device)
    if jobs == "auto" and how_many(arms, where, at_once=True, gpus=gpus) == 1:
        yield 1, Shared()
        return
    with shared_gpu(str(where)) as shared:
        if shared.told:
            print(shared.told, file=sys.stderr, flush=True)
        auto = how_many(arms, where, shared.at_once, gpus) if jobs == "auto" else most
        yield auto, shared


def _run_all(arms: list[ArmRun], resources: Resources) -> Endings:
    """A GPU that fails ends them all."""
    each = _one_by_one if resources.concurrent == 1 else _at_once
    with closing(each(arms, resources)) as endings:
        for ending in endings:
            name = arms[ending.number].name
            if isinstance(ending.error, DeviceFailed):
                raise ending.error
            if ending.error is not None:
                print(f"{name} failed: {ending.error}", file=sys.stderr, flush=True)
            yield ending


def _one_by_one(arms: list[ArmRun], resources: Resources) -> Endings:
    start = time.monotonic()
    for number, arm in enumerate(arms):
        left = time_left(time.monotonic() - start, number, len(arms))
        print(f"[{number + 1}/{len(arms)}] {arm.name}{left}", file=sys.stderr, flush=True)
        ending = _try_arm(number, arm, resources)
        yield ending
        if ending.stopped_by:
            return


def _try_arm(number: int, arm: ArmRun, resources: Resources) -> Ending:
    try:
        return Ending(number, run_arm(arm, resources))
    except Exception as error:
        return Ending(number, error=error)


def _at_once(arms: list[ArmRun], resources: Resources) -> Endings:
    """Several at once, each in a process of its own. A signal stops all; those that train save what
    they have."""
    jobs, start = resources.concurrent, time.monotonic()
    where = f" on {resources.gpus} GPUs" if resources.gpus > 1 else ""
    print(f"{len(arms)} runs, {jobs} at a time{where}", file=sys.stderr, flush=True)
    tasks = [(arm, resources, True) for arm in arms]
    costs = {number: expected_seconds(arm.run) for number, arm in enumerate(arms)}
    ended: list[float] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sets = spread(resources.gpus, resources.environment or {}, visible)
    with closing(in_parallel(jobs, run_arm, tasks, sets)) as endings:
        for done, ending in enumerate(endings, 1):
            ended.append(costs.pop(ending.number))
            longer = _mean(list(costs.values())) / _mean(ended)
            left = time_left(time.monotonic() - start, done, len(arms), jobs, longer)
            state = "done" + left
            if ending.stopped_by:
                state = "stopped"
            elif ending.error is not None:
                state = "failed"
            name = arms[ending.number].name
            print(f"[{done}/{len(arms)}] {name}: {state}", file=sys.stderr, flush=True)
            yield ending


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


def time_left(seconds: float, done: int, runs: int, jobs: int = 1, longer: float = 1.0) -> str:
    """A word on how long the other runs will take, where they come in rounds that take as long as
    those before, or so many times as long."""
    if not 0 < done < runs:
        return ""
    left = longer * seconds / math.ceil(done / jobs) * math.ceil((runs - done) / jobs)
    return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"


def run_arm(arm: ArmRun, resources: Resources, quiet: bool = False) -> int | None:
    """Train one run, or what is left of it, and test its best checkpoint. Returns the signal that
    stopped it, if one did. What is trained is recorded before it is tested."""
    folder = find_folder(arm, resources.root)
    before = read_folder(arm, resources.root)
    if before is None or not before.done:
        run = _limited(arm.run, resources.max_minutes)
        begun = (folder / "config.json").exists()
        init = _beginning(arm, resources)
        result = train(run, folder, device=resources.device, resume=begun, init=init, quiet=quiet)
        if result.stopped_by:
            return result.stopped_by
        concurrent = _concurrent(folder, arm.run, begun, resources.sharing)
    else:
        concurrent = _concurrent(folder, arm.run, True, None)
    with stopping_at_signals() as signals:
        if not is_measured(arm, folder):
            resources.study.write_so_far()
            measure_best(arm, folder, pick_device(resources.device, World()), concurrent)
    return signals.caught


def _beginning(arm: ArmRun, resources: Resources) -> Init | None:
    """The best weights of the run that an arm begins with, or those of HuggingFace's."""
    root, model = resources.root, arm.run.model
    if arm.needs_weights and resources.init is not None and isinstance(model, PretrainedConfig):
        from entp.hf.beginning import like, read_pretrained

        return read_pretrained(resources.init, arm.run.task, **like(model))
    if arm.source is None:
        return None
    found = read_folder(arm.source, root.parent / arm.source_folder)
    if found is None or not found.done:
        raise InputError(
            f"{arm.name} begins with {arm.source.name} of {arm.source_folder}, which is not "
            "finished: train that first."
        )
    return read_init(find_folder(arm.source, root.parent / arm.source_folder))


def _limited(run: Run, max_minutes: float | None) -> Run:
    """The run with at most so many minutes, unless its schedule follows the clock anyway."""
    if max_minutes is None or run.optim.decay_by == "seconds":
        return run
    seconds = min(60 * max_minutes, run.train.max_seconds or math.inf)
    return dataclasses.replace(run, train=dataclasses.replace(run.train, max_seconds=seconds))


def _concurrent(folder: Path, run: Run, begun: bool, now: int | None) -> int | None:
    """Runs that shared the device all along; None where that is not known or changed."""
    if not begun:
        return now
    before = read_test(folder, run)
    if before is None or now not in (None, before.concurrent_runs):
        return None
    return before.concurrent_runs
