"""What a recipe is: a figure or table of the paper as data.

Recipe(
    name="examples", title="Figure 3", question="Who needs fewer examples?",
    arms=[Arm(run(mode, n), mode=mode, examples=n) for mode in MODES for n in (1_000, 5_000)],
    table=Table(rows="examples", columns="mode", cells="exact_match"),
    figure=Figure("slices", x="examples", y="exact_match", lines="mode"),
    reproduced_if="ENTP is ahead at every size, p < 0.01",
    checks=(Check("ENTP is ahead", {"mode": "ENTP"}, "exact_match", "above",
                  {"mode": "decoder"}, same="examples", p=0.01),),
)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from entp.config import PretrainedConfig, Run, refit
from entp.config.json import config_hash
from entp.errors import InputError
from entp.experiments import PAPER, RECIPES
from entp.experiments.recipe_problems import problems_of
from entp.fields import raise_problems
from entp.registry import find_named
from entp.results.schema import (
    PERMUTED,
    VERSION,
    ArmRecord,
    AuthorsCurve,
    Check,
    Factor,
    Figure,
    MetricSpec,
    PaperValue,
    Record,
    Selector,
    SliceValues,
    Table,
)
from entp.results.verdict import matches
from entp.tasks.base import Task

__all__ = [
    "Arm",
    "Check",
    "Figure",
    "PaperValue",
    "Recipe",
    "SliceValues",
    "Table",
    "find_recipe",
]
TINY_TEST, TINY_GENERATED, TINY_SEEDS, TINY_ORDERS = 64, 32, 2, 3
"""Sequences, seeds and orders of tiny runs."""
CURVES = Figure("curves")


@dataclass(frozen=True, init=False)
class Arm:
    """A run, the seeds that it is repeated with, and the factors that tell it from other arms."""

    run: Run
    seeds: tuple[int, ...]
    paper: Mapping[str, PaperValue]
    """Metric to the paper's value."""
    factors: Mapping[str, Factor]
    authors: tuple[SliceValues, ...]
    """The authors' values in bins of a slice."""
    begins: str
    """Label of the arm of the recipe's `source` whose best weights it begins with, seed by seed."""

    def __init__(
        self,
        run: Run,
        seeds: Sequence[int] = (0,),
        paper: Mapping[str, PaperValue] | None = None,
        *,
        authors: Sequence[SliceValues] = (),
        begins: str = "",
        factors: Mapping[str, Factor] | None = None,
        **more: Factor,
    ) -> None:
        """Factors by name, or those of another arm as `factors`: so `replace(arm, seeds=...)`
        makes an arm too."""
        values = {"run": run, "seeds": tuple(seeds), "paper": dict(paper or {})}
        values |= {"authors": tuple(authors), "begins": begins}
        values["factors"] = {**(factors or {}), **more}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def label(self) -> str:
        """The factors in words: "ENTP medium, tuned"; numbers with their name: "layers 3"."""
        model = " ".join(str(self.factors[name]) for name in MODEL if name in self.factors)
        rest = [_in_words(k, v) for k, v in self.factors.items() if k not in MODEL]
        return ", ".join([model, *rest] if model else rest)

    def with_data(self, data: str) -> Arm:
        """The arm with a task that reads other files, and a model that fits it."""
        task = self.run.task.with_data(data)
        run = replace(self.run, task=task, model=refit(self.run.model, task.model_needs()))
        return replace(self, run=run)

    def with_init(self, folder: Path) -> Arm:
        """The arm with the model, and if it begins with weights the weights, of a folder in
        HuggingFace's format; an arm of another model as it is."""
        model = self.run.model
        if not isinstance(model, PretrainedConfig):
            return self
        from entp.hf.beginning import like, read_pretrained

        task = self.run.task.for_model(folder)
        init = read_pretrained(folder, task, **like(model))
        name = init.name if self.run.init else ""
        return replace(self, run=replace(self.run, task=task, model=init.model, init=name))

    def as_tiny(self, tiny_run: Callable[[Run], Run]) -> Arm:
        """The arm with a tiny run, whose bins are not those of the authors' values."""
        return replace(self, run=tiny_run(self.run), seeds=self.seeds[:TINY_SEEDS], authors=())


MODEL = ("mode", "size")
"""Factors that a label has side by side, before the others."""


def _in_words(name: str, value: Factor) -> str:
    if isinstance(value, str):
        return value
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{name.replace('_', ' ')} {number}"


@dataclass(frozen=True)
class ArmRun:
    """One seed of an arm, with all that it takes to train and test it."""

    label: str
    run: Run
    test_sequences: int
    generated_sequences: int
    test_last: bool = False
    test_splits: tuple[str, ...] = ()
    test_orders: int = 0
    bootstrap: bool = False
    baselines: tuple[str, ...] | None = None
    test_on: Task | None = None
    test_name: str = "test"
    """Of the file in its folder that has the test's results."""
    source: ArmRun | None = None
    """The run whose best weights it begins with."""
    source_folder: str = ""
    """The recipe's folder that has the source."""
    reach: tuple[tuple[str, float], ...] = ()
    """Metrics and values: the recipe asks when validation first had them."""

    @property
    def test_task(self) -> Task:
        """What it is tested on: its own task, unless the recipe names another."""
        return self.test_on or self.run.task

    @property
    def splits(self) -> tuple[str, ...]:
        """The names that its values on further splits have in a record."""
        return (*self.test_splits, *([PERMUTED] if self.test_orders else []))

    @property
    def baseline_names(self) -> list[str]:
        """The baselines that answer its test sequences."""
        wanted = self.baselines
        return [name for name in self.test_task.baselines() if wanted is None or name in wanted]

    @property
    def name(self) -> str:
        """For a person: "ENTP medium, tuned, seed 0"."""
        return f"{self.label}, seed {self.run.seed}"

    @property
    def hash(self) -> str:
        """The run's identity: equal runs have equal ones, under any label."""
        begun = config_hash(self.source.run) if self.source else self.run.init
        return config_hash(replace(self.run, init="")) + begun

    @property
    def needs_weights(self) -> bool:
        """Whether it begins with weights of HuggingFace's, which `--init` names."""
        return bool(self.run.init) and self.source is None


@dataclass(frozen=True)
class Recipe:
    """A figure or table of the paper as runs to carry out."""

    name: str
    title: str
    """The figure or table."""
    question: str
    """What is being asked."""
    arms: Sequence[Arm]
    """In the order of the table."""
    tiny_run: Callable[[Run], Run]
    """A run small enough for a few CPU seconds, of the same kind."""
    tiny_arms: Selector = field(default_factory=dict)
    """Factors of the arms that the tiny version has."""
    table: Table | None = None
    """A grid of arms. None: a row for each."""
    figure: Figure | Sequence[Figure] = CURVES
    """The figure, or several one above the other."""
    reproduced_if: str = ""
    """The rule that decides the verdict, in words; written down before the runs."""
    checks: Sequence[Check] = ()
    """The rule as data."""
    test_sequences: int = 10_000
    """Test sequences for the best checkpoint of a finished run."""
    generated_sequences: int = 0
    """Test sequences whose answers it also generates."""
    test_last: bool = False
    """Test the last checkpoint too, on the same sequences."""
    test_splits: tuple[str, ...] = ()
    """Further splits that the best checkpoint is tested on, with as many sequences each; valid is
    one too."""
    test_on: Task | None = None
    """Another task, with an end, that the best checkpoint is tested on instead of its own."""
    tiny_test_on: Task | None = None
    """The same for tiny runs, which may have other tokens."""
    test_orders: int = 0
    """Random orders of a prompt's examples in which the best checkpoint answers its queries, of
    tasks that have some: the variance of the answers is the split "permuted". 0: not tested."""
    bootstrap: bool = False
    """Also intervals by a bootstrap over test sequences; they are shown for arms of one seed."""
    baselines: tuple[str, ...] | None = None
    """Baselines that answer the test sequences, and those of further splits. None: all of the
    task."""
    folder: str = ""
    """A recipe in whose folder its run folders are: runs that both have are trained once. Empty:
    its own."""
    prepare: str = ""
    """The command that makes the data of its tasks, where they read files."""
    weights: str = ""
    """Where the weights in HuggingFace's format are from that arms whose run has an `init` begin
    with; `--init` names their folder."""
    source: Recipe | None = None
    """The recipe with the arms that arms of this one begin with; what is missing of it is trained
    first."""
    authors_curves: Mapping[str, AuthorsCurve] = field(default_factory=dict)
    """Label to the authors' curve, drawn in grey."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Parts of the figure that are not run here, and why."""
    command: str = ""
    """How a person runs it; empty: by its name."""

    @property
    def figures(self) -> list[Figure]:
        return [self.figure] if isinstance(self.figure, Figure) else list(self.figure)

    @property
    def metrics(self) -> list[MetricSpec]:
        """What its arms measure, each once."""
        tasks = [self.test_on or arm.run.task for arm in self.arms]
        found = {metric.name: MetricSpec.of(metric) for task in tasks for metric in task.metrics}
        return list(found.values())

    def runs(self, only: Sequence[str] = (), seed: int | None = None) -> list[ArmRun]:
        """Every seed of every arm; or those of some labels, or of one seed."""
        return [
            ArmRun(
                arm.label,
                replace(arm.run, seed=own, task=arm.run.task.for_seed(own)),
                self.test_sequences,
                self.generated_sequences,
                self.test_last,
                self.test_splits,
                self.test_orders,
                self.bootstrap,
                self.baselines,
                self.test_on,
                f"test-{self.name}" if self.test_on else "test",
                self._source_of(arm, own),
                self.source.folder or self.source.name if self.source else "",
                self._reach,
            )
            for arm in self.arms
            for own in arm.seeds
            if (not only or arm.label in only) and seed in (None, own)
        ]

    @property
    def _reach(self) -> tuple[tuple[str, float], ...]:
        """The validation values that its table and its checks ask the training for."""
        found = [(one.metric, one.reach) for one in self.checks if one.reach is not None]
        if self.table is not None and self.table.reach:
            metric = (*self.table.cells, *(one.name for one in self.metrics))[0]
            found += [(metric, value) for value in self.table.reach]
        return tuple(dict.fromkeys(found))

    def with_data(self, data: str) -> Recipe:
        """The recipe on other data, where its tasks read files."""
        return replace(self, arms=[arm.with_data(data) for arm in self.arms])

    def with_init(self, folder: Path) -> Recipe:
        """The recipe with the pretrained model of a folder in HuggingFace's format."""
        if not any(isinstance(arm.run.model, PretrainedConfig) for arm in self.arms):
            raise InputError(
                f"{self.name} has no arm of a pretrained model: leave --init {folder} out."
            )
        return replace(self, arms=[arm.with_init(folder) for arm in self.arms])

    def _source_of(self, arm: Arm, seed: int) -> ArmRun | None:
        """The run that a seed of an arm begins with."""
        if self.source is None or not arm.begins:
            return None
        return next(iter(self.source.runs([arm.begins], seed)), None)

    def record(self) -> Record:
        """Its results before anything is run."""
        arms = {
            arm.label: ArmRecord(
                factors=dict(arm.factors),
                paper=dict(arm.paper),
                authors=list(arm.authors),
                seeds=list(arm.seeds),
            )
            for arm in self.arms
        }
        return Record(
            schema_version=VERSION,
            recipe=self.name,
            title=self.title,
            question=self.question,
            command=self.command or f"entp reproduce {self.name}",
            metrics=self.metrics,
            table=self.table,
            figures=self.figures,
            reproduced_if=self.reproduced_if,
            checks=list(self.checks),
            authors_curves=dict(self.authors_curves),
            arms=arms,
            not_run=dict(self.not_run),
            one_test=all(arm.run.task.one_test for arm in self.arms),
            of_paper=self.name.removesuffix("-tiny") in PAPER,
        )

    def tiny(self) -> Recipe:
        """The same recipe for a CPU minute: it shows that everything works, not the result."""
        arms = [arm for arm in self.arms if matches(arm.factors, self.tiny_arms)]
        found = replace(
            self,
            name=f"{self.name}-tiny",
            folder=f"{self.folder}-tiny" if self.folder else "",
            title=f"{self.title}, tiny runs",
            arms=[arm.as_tiny(self.tiny_run) for arm in arms],
            test_sequences=min(self.test_sequences, TINY_TEST),
            generated_sequences=min(self.generated_sequences, TINY_GENERATED),
            test_orders=min(self.test_orders, TINY_ORDERS),
            authors_curves={},
            checks=(),
            table=self.table and replace(self.table, pairs=()),
            test_on=self.tiny_test_on,
            source=self.source.tiny() if self.source else None,
            command=f"{self.command or f'entp reproduce {self.name}'} --tiny",
        )
        try:
            check_recipe(found)
        except InputError as error:
            raise InputError(f"after tiny_run and tiny_arms of {self.name}: {error}") from None
        return found


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or one of your own as `module:NAME`."""
    found = find_named("recipe", name, RECIPES, "module:NAME")
    if not isinstance(found, Recipe):
        raise InputError(
            f"recipe {name!r} is {found!r}: it must be an entp.experiments.recipe.Recipe."
        )
    check_recipe(found)
    return replace(found, command=f"entp reproduce {name}")


def check_recipe(recipe: Recipe) -> None:
    """InputError for what would only come to light while its arms run, or after that."""
    for what, name in (("name", recipe.name), ("folder", recipe.folder or recipe.name)):
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise InputError(
                f"the recipe's {what} is {name!r}: letters, digits, - and _ are allowed, as it "
                "names a folder."
            )
    strangers = [arm for arm in recipe.arms if not isinstance(arm, Arm)]
    if strangers or not recipe.arms:
        told = f"{strangers[0]!r} among its arms" if strangers else "no arms"
        raise InputError(f"recipe {recipe.name} has {told}: give it at least one Arm, and no more.")
    for problems in problems_of(recipe):
        raise_problems(problems)
