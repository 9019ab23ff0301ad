"""What is wrong with a recipe: all that would only come to light while its arms run, or later."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from entp.config import Run
from entp.errors import InputError, one_of
from entp.fields import as_int
from entp.results.schema import SPLIT, Check, MetricSpec, PaperValue, SliceValues
from entp.results.verdict import matches
from entp.tasks.base import Task

if TYPE_CHECKING:
    from entp.experiments.recipe import Arm, ArmRun, Recipe


def problems_of(recipe: Recipe) -> Iterator[list[str]]:
    """Problems of a recipe, those first that others may follow from."""
    for kinds in (
        (_arm_problems, _size_problems),
        (_twins, _generation_problems, _metric_problems),
        (_table_problems, _figure_problems, _check_problems),
        (_split_problems, _baseline_problems, _source_problems),
    ):
        yield [problem for kind in kinds for problem in kind(recipe)]


def _arm_problems(recipe: Recipe) -> Iterator[str]:
    for arm in recipe.arms:
        if not isinstance(arm.run, Run):
            yield f"arm {arm.label!r} has {arm.run!r}, which is not a Run"
            return
        for name, value in arm.factors.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not isinstance(value, str) and not (number and math.isfinite(value)):
                yield f"factor {name} of an arm is {value!r}: it must be a text or a number"
        seeds = [as_int(seed) for seed in arm.seeds]
        if not seeds or None in seeds or len(set(seeds)) < len(seeds):
            yield f"seeds of arm {arm.label!r} are {arm.seeds}: give whole numbers, each once"
        known = {metric.name for metric in (recipe.test_on or arm.run.task).metrics}
        for metric, paper in arm.paper.items():
            if metric not in known:
                yield _unknown(f"metric in paper of arm {arm.label!r}", metric, known)
            elif not isinstance(paper, PaperValue):
                yield f"paper of arm {arm.label!r} has {paper!r}: it must be a PaperValue"
        yield from _authors_problems(arm)


def _authors_problems(arm: Arm) -> Iterator[str]:
    metrics = {metric.name: metric for metric in arm.run.task.metrics}
    for values in arm.authors:
        if not isinstance(values, SliceValues):
            yield f"authors of arm {arm.label!r} has {values!r}: it must be SliceValues"
        elif values.metric not in metrics:
            yield _unknown(f"metric in authors of arm {arm.label!r}", values.metric, metrics)
        elif values.by not in metrics[values.metric].slices:
            slices = metrics[values.metric].slices
            yield _unknown(f"slice in authors of arm {arm.label!r}", values.by, slices)


def _unknown(what: str, got: object, allowed: object) -> str:
    return str(one_of(what, got, allowed)).rstrip(".")


def _size_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.test_sequences < 1 or recipe.generated_sequences < 0:
        yield (
            f"test_sequences is {recipe.test_sequences} and generated_sequences "
            f"{recipe.generated_sequences}: give at least 1 and at least 0"
        )
    if not any(matches(arm.factors, recipe.tiny_arms) for arm in recipe.arms):
        yield f"tiny_arms is {recipe.tiny_arms}: no arm has these factors"


def _generation_problems(recipe: Recipe) -> Iterator[str]:
    for arm in recipe.arms if recipe.generated_sequences else []:
        if not _can_generate(arm.run.task):
            yield (
                f"generated_sequences is {recipe.generated_sequences}, and {arm.run.task.name} has "
                "nothing to generate: its targets are not the tokens that follow"
            )
            return


def _can_generate(task: Task) -> bool:
    from entp.training.evaluate import check_generation

    if task.writes:
        return True
    try:
        check_generation(task, task.batch(0, "test", 0, 8))
    except InputError:
        return False
    return True


def _split_problems(recipe: Recipe) -> Iterator[str]:
    """Further splits that a task does not have, or that are shown and not tested."""
    for arm in recipe.arms:
        allowed = ("valid", *arm.run.task.more_splits)
        strangers = [split for split in recipe.test_splits if split not in allowed]
        if strangers:
            yield _unknown(f"split in test_splits of {arm.run.task.name}", strangers[0], allowed)
            return
    if recipe.test_orders == 1 or recipe.test_orders < 0:
        yield f"test_orders is {recipe.test_orders}: give at least 2 orders, or 0"
    for arm in recipe.arms if recipe.test_orders else []:
        task = arm.run.task
        if not task.reordered(task.batch(0, "test", 0, 1), np.random.default_rng(0)):
            yield f"test_orders is {recipe.test_orders}, and {task.name} has no other order: give 0"
            return
    tested = [SPLIT + split for split in recipe.runs()[0].splits]
    shown = [source for figure in recipe.figures for source in (figure.source, *figure.sources)]
    shown += [check.source for check in recipe.checks]
    for source in shown:
        if source.startswith(SPLIT) and source not in tested:
            yield _unknown("split in the source of a figure or check", source, tested)


def _baseline_problems(recipe: Recipe) -> Iterator[str]:
    """Baselines that no task of the recipe has."""
    known = {name for arm in recipe.runs() for name in arm.test_task.baselines()}
    named = [("baselines", name) for name in recipe.baselines or ()]
    named += [("a figure", name) for figure in recipe.figures for name in figure.baselines]
    if recipe.table is not None and recipe.table.excess_over:
        named.append(("table.excess_over", recipe.table.excess_over))
    for what, name in named:
        if name not in known:
            yield _unknown(f"baseline in {what}", name, known)


def _source_problems(recipe: Recipe) -> Iterator[str]:
    """Arms that begin with runs which the recipe's source does not have."""
    known = [arm.label for arm in recipe.source.arms] if recipe.source else []
    for arm in recipe.arms:
        if arm.begins and arm.begins not in known:
            yield _unknown(f"arm that {arm.label!r} begins with", arm.begins, known)
    for one in recipe.runs():
        begins = next(arm.begins for arm in recipe.arms if arm.label == one.label)
        if begins in known and one.source is None:
            yield f"{one.name} begins with {begins!r}, which does not have this seed"
    other = recipe.test_on
    if other is not None and type(other).split_batches is Task.split_batches:
        yield f"test_on is {other.name}, whose test has no end: give a task that has one"


def _twins(recipe: Recipe) -> Iterator[str]:
    """Arms that a person or a run folder could not tell apart."""
    labels = [arm.label for arm in recipe.arms]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield f"two arms have the factors of {label!r}: give them different ones"
    seen: dict[str, ArmRun] = {}
    told: set[tuple[str, str]] = set()
    for one in recipe.runs():
        other = seen.setdefault(one.hash, one)
        if other is not one and (pair := (one.label, other.label)) not in told:
            told.add(pair)  # further seeds of both are no news
            yield f"{one.name} and {other.name} are the same run: leave one of them out"


def _metric_problems(recipe: Recipe) -> Iterator[str]:
    found: dict[str, MetricSpec] = {}
    for arm in recipe.arms:
        for metric in map(MetricSpec.of, (recipe.test_on or arm.run.task).metrics):
            if found.setdefault(metric.name, metric) != metric:
                yield f"metric {metric.name} is not the same in all arms: give one another name"
    for label, curve in recipe.authors_curves.items():
        for name in curve.values:
            if name not in found:
                yield _unknown(f"metric in authors_curves of {label!r}", name, found)


def _table_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.table is None:
        return
    metrics = {metric.name: metric for metric in recipe.metrics}
    cells = recipe.table.cells or tuple(metrics)[:1]
    yield from (_unknown("metric in table", c, metrics) for c in cells if c not in metrics)
    slices = {name for cell in cells if cell in metrics for name in metrics[cell].slices}
    factors = _factors(recipe)
    for part, allowed in (("rows", factors), ("columns", factors | slices)):
        names = getattr(recipe.table, part)
        strangers = [name for name in names if name not in allowed]
        yield from (_unknown(f"factor in table.{part}", name, allowed) for name in strangers)
    if recipe.table.by and recipe.table.by not in slices:
        yield _unknown("slice in table.by", recipe.table.by, slices)
    if recipe.table.versus and recipe.table.versus not in factors:
        yield _unknown("factor in table.versus", recipe.table.versus, factors)
    for side in (side for pair in recipe.table.pairs for side in pair):
        if not any(matches(arm.factors, side) for arm in recipe.arms):
            yield f"table.pairs has {side}: no arm has these factors"


def _factors(recipe: Recipe) -> set[str]:
    return {name for arm in recipe.arms for name in arm.factors}


def _figure_problems(recipe: Recipe) -> Iterator[str]:
    metrics, factors = {metric.name: metric for metric in recipe.metrics}, _factors(recipe)
    for figure in recipe.figures:
        yield from (_unknown("metric in figure", y, metrics) for y in figure.y if y not in metrics)
        named = [*figure.lines, *figure.where, *([figure.panels] if figure.panels else [])]
        yield from (_unknown("factor in figure", n, factors) for n in named if n not in factors)
        slices = {name for y in figure.y or metrics if y in metrics for name in metrics[y].slices}
        allowed = factors | slices if figure.kind in ("slices", "grid") else None
        if allowed is not None and figure.x not in allowed:
            yield _unknown(f"x of a figure of {figure.kind}", figure.x, sorted(allowed))


def _check_problems(recipe: Recipe) -> Iterator[str]:
    metrics, factors = {metric.name: metric for metric in recipe.metrics}, _factors(recipe)
    for check in recipe.checks:
        if check.metric not in metrics:
            yield _unknown("metric in a check", check.metric, metrics)
        elif check.by and check.by not in metrics[check.metric].slices:
            yield _unknown("slice in a check", check.by, metrics[check.metric].slices)
        if check.best_of and not isinstance(check.right, Mapping):
            yield f"the check {check.says!r} has best_of and a number: give arms to compare with"
        strangers = [name for name in check.same if name not in factors]
        yield from (_unknown("factor in a check", name, factors) for name in strangers)
        sides = [check.left, check.right] if isinstance(check.right, Mapping) else [check.left]
        for side in sides:
            if not any(matches(arm.factors, side) for arm in recipe.arms):
                yield f"the check {check.says!r} is about {side}: no arm has these factors"
        yield from _without_partner(recipe, check)


def _without_partner(recipe: Recipe, check: Check) -> Iterator[str]:
    """Arms that a check is about and would pass over: no other agrees with them in `same`."""
    if not isinstance(check.right, Mapping) or not check.same or check.best_of:
        return
    rights = [arm for arm in recipe.arms if matches(arm.factors, check.right)]
    for arm in recipe.arms if rights else []:
        if matches(arm.factors, check.left) and not any(
            other is not arm
            and all(arm.factors.get(name) == other.factors.get(name) for name in check.same)
            for other in rights
        ):
            yield (
                f"the check {check.says!r} has nothing to compare {arm.label!r} with: no arm of "
                f"{check.right} has its {', '.join(check.same)}"
            )
