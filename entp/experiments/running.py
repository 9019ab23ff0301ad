"""Carry runs out: one by one here, or several at a time, each in a process of its own; train, then
test the best checkpoint.

Runs of several recipes may share one queue, so that a GPU is not left to the last run of each.
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
from typing import Literal, NamedTuple

from entp.config import PretrainedConfig, Run
from entp.errors import DeviceFailed, InputError
from entp.experiments.claims import UnderWay, claimed, owner_of
from entp.experiments.collect import find_folder, read_folder, read_test
from entp.experiments.deadline import Deadline
from entp.experiments.jobs import expected_seconds, gpus_of, how_many, seconds_left, spread
from entp.experiments.recipe import ArmRun
from entp.experiments.study import Study
from entp.experiments.testing import is_measured, measure_best, stopping_at_signals
from entp.experiments.workers import Ending, in_parallel
from entp.results.schema import RunRecord
from entp.training.checkpoint import newest, read_trainer, step_of
from entp.training.distributed import World, pick_device
from entp.training.initialise import Init, read_init
from entp.training.mps import Shared, shared_gpu
from entp.training.trainer import train


class Item(NamedTuple):
    """A run to be carried out."""

    arm: ArmRun
    study: Study
    """The results that it belongs to, of one of the recipes in the queue."""
    init: Path | None = None
    """The folder of the weights that it may begin with."""

    @property
    def root(self) -> Path:
        """The folder of the recipe's run folders."""
        return self.study.folders


class Resources(NamedTuple):
    """What runs are carried out with."""

    device: str
    concurrent: int
    """Runs at a time, over all devices."""
    max_minutes: float | None
    """Most training time of each."""
    environment: Mapping[str, str] | None = None
    """Variables of the processes that carry them out, where there are several."""
    gpus: int = 1
    """GPUs that they are spread over."""
    end: float | None = None
    """When they have to be done, by time.monotonic()."""

    @property
    def sharing(self) -> int:
        """Runs at a time on one device."""
        return -(-self.concurrent // self.gpus)


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


def run_all(items: list[Item], resources: Resources) -> Generator[tuple[Item, Ending], None, None]:
    """How each run ended, as they do; closing it stops those that run. A GPU that fails ends them
    all."""
    each = _at_once if resources.concurrent > 1 else _one_by_one
    items = in_order(items, resources)
    with closing(each(items, resources)) as endings:
        for ending in endings:
            name = items[ending.number].arm.name
            if isinstance(ending.error, DeviceFailed):
                raise ending.error
            if ending.error is not None and not isinstance(ending.error, UnderWay):
                print(f"{name} failed: {ending.error}", file=sys.stderr, flush=True)
            yield items[ending.number], ending


def in_order(items: list[Item], resources: Resources) -> list[Item]:
    """The order in which runs begin. Where there are several at a time the longest are first, so
    that all end early. Where the time is limited those named first are: a recipe's first arms
    decide its verdict."""
    if resources.concurrent == 1 or resources.end is not None:
        return items
    minutes = resources.max_minutes
    return sorted(items, key=lambda item: -seconds_left(item.arm, item.root, minutes))


def _deadline(items: list[Item], resources: Resources) -> Deadline:
    minutes = resources.max_minutes
    seconds = [seconds_left(item.arm, item.root, minutes) for item in items]
    return Deadline([one / resources.gpus for one in seconds], resources.end)


def _one_by_one(items: list[Item], resources: Resources) -> Endings:
    start, deadline = time.monotonic(), _deadline(items, resources)
    todo = list(range(len(items)))
    for done in range(len(items)):
        number = deadline(todo, 0)
        todo.remove(number)
        left = time_left(time.monotonic() - start, done, len(items))
        name = items[number].arm.name
        print(f"[{done + 1}/{len(items)}] {name}{left}", file=sys.stderr, flush=True)
        ending = _try(number, items[number], resources)
        deadline.ended(ending)
        if isinstance(ending.error, UnderWay):
            print(f"{name}: {ending.error}", file=sys.stderr, flush=True)
        yield ending
        if ending.stopped_by:
            return


def _try(number: int, item: Item, resources: Resources) -> Ending:
    try:
        return Ending(number, run_arm(item, resources))
    except Exception as error:
        return Ending(number, error=error)


def _at_once(items: list[Item], resources: Resources) -> Endings:
    """Several at once, each in a process of its own. A signal stops all; those that train save what
    they have."""
    jobs, start = resources.concurrent, time.monotonic()
    where = f" on {resources.gpus} GPUs" if resources.gpus > 1 else ""
    print(f"{len(items)} runs, {jobs} at a time{where}", file=sys.stderr, flush=True)
    tasks = [(item, resources, True) for item in items]
    costs = {number: expected_seconds(item.arm.run) for number, item in enumerate(items)}
    ended: list[float] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sets = spread(resources.gpus, resources.environment or {}, visible)
    deadline = _deadline(items, resources)
    with closing(in_parallel(jobs, run_arm, tasks, sets, deadline)) as endings:
        for done, ending in enumerate(endings, 1):
            deadline.ended(ending)
            ended.append(costs.pop(ending.number))
            longer = _mean(list(costs.values())) / _mean(ended)
            left = time_left(time.monotonic() - start, done, len(items), jobs, longer)
            state = "done" + left
            if ending.stopped_by:
                state = "stopped"
            elif isinstance(ending.error, UnderWay):
                state = str(ending.error)
            elif ending.error is not None:
                state = "failed"
            name = items[ending.number].arm.name
            print(f"[{done}/{len(items)}] {name}: {state}", file=sys.stderr, flush=True)
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


def run_arm(item: Item, resources: Resources, quiet: bool = False) -> int | None:
    """Train one run, or what is left of it, and test its best checkpoint. Returns the signal that
    stopped it, if one did. What is trained is recorded before it is tested. UnderWay, if another
    process has begun it."""
    with claimed(item.root, item.arm.hash):
        return _carry_out(item, resources, quiet)


def _carry_out(item: Item, resources: Resources, quiet: bool) -> int | None:
    arm, folder = item.arm, find_folder(item.arm, item.root)
    before = read_folder(arm, item.root)
    if not is_trained(arm, folder, before):
        run = _limited(arm.run, resources.max_minutes)
        begun = (folder / "config.json").exists()
        init = _beginning(item)
        result = train(run, folder, device=resources.device, resume=begun, init=init, quiet=quiet)
        if result.stopped_by:
            return result.stopped_by
        concurrent = _concurrent(folder, arm.run, begun, resources.sharing)
    else:
        concurrent = _concurrent(folder, arm.run, True, None)
    with stopping_at_signals() as signals:
        if not is_measured(arm, folder):
            item.study.write_so_far()
            measure_best(arm, folder, pick_device(resources.device, World()), concurrent)
    return signals.caught


def is_done(arm: ArmRun, root: Path) -> bool:
    """Whether a run needs nothing any more, by its folder."""
    folder = find_folder(arm, root)
    try:
        return is_trained(arm, folder, read_folder(arm, root)) and is_measured(arm, folder)
    except InputError:  # a damaged folder: whoever trains it says so
        return False


def is_trained(arm: ArmRun, folder: Path, found: RunRecord | None) -> bool:
    """Whether only the test is left to do. A process that ended between the last evaluation and its
    checkpoint leaves the metrics of a run that is done, and the weights of an earlier step."""
    if found is None or not found.done:
        return False
    if read_test(folder, arm.run, arm.test_name) is not None:
        return True
    last = newest(folder)
    if last is not None:
        return step_of(last) >= found.steps and _measured_at(last) >= found.curve[-1].step
    return newest(folder, "best") is not None and not arm.test_last


def _measured_at(folder: Path) -> int:
    """The last evaluation that a checkpoint knows of."""
    return int(read_trainer(folder)["measured_at"])


def _beginning(item: Item) -> Init | None:
    """The best weights of the run that an arm begins with, or those of HuggingFace's."""
    arm, root, model = item.arm, item.root, item.arm.run.model
    if arm.needs_weights and item.init is not None and isinstance(model, PretrainedConfig):
        from entp.hf.beginning import like, read_pretrained

        return read_pretrained(item.init, arm.run.task, **like(model))
    if arm.source is None:
        return None
    there = root.parent / arm.source_folder
    found = read_folder(arm.source, there)
    if found is None or not found.done:
        if owner := owner_of(there, arm.source.hash):
            raise UnderWay(f"it begins with {arm.source.name}, which is under way {owner}")
        raise InputError(
            f"{arm.name} begins with {arm.source.name} of {arm.source_folder}, which is not "
            "finished: train that first."
        )
    return read_init(find_folder(arm.source, there))


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
