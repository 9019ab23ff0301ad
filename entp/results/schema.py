"""What a file of results holds, as one schema: a Record.

    Record                  the recipe's question, rule, table and figures, as data
      arms: label -> ArmRecord    factors, the paper's values, a summary for people
        runs: RunRecord           one seed: curve, test totals, configuration, environment
      baselines: BaselineRecord   answers without a model to the same test sequences

Unknown keys and wrong types are errors that name the key. `entp.results.upgrade` turns the files of
earlier versions into this. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Len
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from entp.tasks.metrics import Metric, Totals

VERSION = 2
"""Of files of results. The first had no number."""
AXES = ("steps", "seconds", "sequences", "flops")
"""What curves are drawn against."""
SPLIT = "split:"
"""Before the name of a further split, the source of its values."""
PERMUTED = "permuted"
"""The split of prompts whose examples stand in several orders. Its values are no errors but the
variance of the answers over the orders, in the same units."""


def _source(value: str) -> str:
    known = ("test", "generated", "last", "best")
    if value not in known and not (value.startswith(SPLIT) and value != SPLIT):
        raise ValueError(f"it must be one of {', '.join(known)}, {SPLIT}NAME")
    return value


Source = Annotated[str, AfterValidator(_source)]
"""What test values are of: the best checkpoint ("test"), answers that it generates ("generated"),
the last checkpoint ("last"), of every number the best of all evaluations on the test itself
("best"), or the best checkpoint on a further split ("split:NAME")."""
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _names(value: Any) -> Any:
    """One name is a tuple of one."""
    if isinstance(value, str):
        return (value,)
    return value


Names = Annotated[Sequence[str], BeforeValidator(_names), AfterValidator(tuple)]
"""Several names; one alone may be given as it is."""
Factor = str | int | float
"""What an arm has of a factor: "ENTP", 3, 0.001."""


def _lists(value: Mapping[str, Factor | Sequence[Factor]]) -> dict[str, Factor | list[Factor]]:
    """Several values as a list, as JSON gives them back."""
    return {k: v if isinstance(v, str | int | float) else list(v) for k, v in value.items()}


Selector = Annotated[Mapping[str, Factor | Sequence[Factor]], AfterValidator(_lists)]
"""Factor to its value, or to some values: the arms that have one of them."""


@dataclass(frozen=True, config=STRICT)
class MetricSpec(Metric):
    """A metric as a record keeps it."""

    slices: Annotated[tuple[str, ...], Strict(False)] = ()

    @classmethod
    def of(cls, metric: Metric) -> MetricSpec:
        return cls(**dataclasses.asdict(metric))


@dataclass(frozen=True, config=STRICT)
class PaperValue:
    """A number of the paper, or of its authors' published curves, and where it stands."""

    value: float
    source: str


@dataclass(frozen=True, config=STRICT)
class SliceValues:
    """Numbers of the authors in bins of a slice, and where they stand."""

    metric: str
    by: str
    """The slice."""
    values: Mapping[str, float]
    """Bin to value."""
    source: Source = "test"
    """Which of ours they compare with."""
    told_in: str = ""


@dataclass(frozen=True, config=STRICT)
class Table:
    """A grid of arms. Without rows, the table has a row for each arm instead."""

    rows: Names = ()
    """Factors whose values make a row."""
    columns: Names = ()
    """Factors whose values make a column."""
    cells: Names = ()
    """Metrics in each cell. None: the first."""
    versus: str = ""
    """A factor: arms that differ in it alone are compared over their seeds, its first value with
    each other one."""
    pairs: Annotated[Sequence[tuple[Selector, Selector]], AfterValidator(tuple)] = ()
    """Arms that are compared besides, whatever else they differ in: each of the first with each of
    the second."""
    paired: bool = False
    """Compare runs of one seed, which read the same data, where both arms have the same seeds."""
    by: str = ""
    """A slice of the first cell's metric: another table has the arms and the baselines in some of
    its bins."""
    bins: Names = ()
    """Those bins."""
    excess_over: str = ""
    """A baseline: in that table, what the arms have above it, not their own values."""
    reach: Annotated[Sequence[float], AfterValidator(tuple)] = ()
    """Validation values of the first cell's metric: another table has the steps and the seconds
    after which each arm first had them."""

    def __post_init__(self) -> None:
        if bool(self.by) != bool(self.bins) or (self.excess_over and not self.by):
            raise ValueError(
                f"by is {self.by!r}, bins {list(self.bins)} and excess_over {self.excess_over!r}: "
                "give by and bins together, and excess_over only with them"
            )


@dataclass(frozen=True, config=STRICT)
class Figure:
    """A row of panels."""

    kind: Literal["curves", "slices", "grid", "bars"]
    """curves: validation against steps, seconds, sequences or FLOPs. slices: test values against a
    factor or against a slice of the metric, with the baselines. grid: a heat map of arms; of a
    slice whose bins are pairs such as 11x3, a heat map for each arm. bars: a bar for each arm."""
    x: str = ""
    """curves: steps (default), seconds, sequences or flops. slices: a factor, or a slice of the
    metric. grid: the factor of the columns, or a slice of pairs."""
    y: Names = ()
    """Metrics, a panel for each. None: all of the record."""
    lines: Names = ()
    """Factors whose values make a line, or a row of the grid. None: a line for each arm."""
    panels: str = ""
    """A factor with a panel for each of its values; x is then a slice, if both have one name."""
    where: Selector = dataclasses.field(default_factory=dict)
    """Only these arms."""
    source: Source = "test"
    """Which test values; curves have none."""
    sources: Annotated[Sequence[Source], AfterValidator(tuple)] = ()
    """Several sources of slices, with panels for each; then `source` is not used."""
    baselines: Names = ()
    """Baselines that slices show. None: all."""

    def __post_init__(self) -> None:
        if self.kind == "curves" and self.x not in ("", *AXES):
            raise ValueError(f"x of curves is {self.x!r}: it must be one of {', '.join(AXES)}")


@dataclass(frozen=True, config=STRICT)
class Check:
    """A statement about test values that the recorded runs decide."""

    says: str
    """The statement in words."""
    left: Selector
    """The arms that it is about; it must be true of each."""
    metric: str
    relation: Literal["above", "below", "at least", "at most"]
    right: float | Selector
    """A number, or the arms that they are compared with."""
    same: Names = ()
    """Factors in which two arms must agree to be compared."""
    times: float = 1.0
    """What the right side is multiplied by: 1.1 for "at most 10 % above"."""
    p: float | None = None
    """Seeds must make it this unlikely to be chance: Welch's test, or Student's for a number."""
    paired: bool = False
    """Student's test of the differences between runs of one seed, which read the same data."""
    source: Source = "test"
    """Which test values."""
    by: str = ""
    """A slice of the metric, for a statement about one of its bins."""
    bin: str = ""
    """That bin."""
    reach: float | None = None
    """A value of the metric in validation: the statement is about how much training it took to
    reach it, not about the test."""
    axis: Literal["steps", "seconds", "sequences", "flops"] = "steps"
    """What that training is counted in."""
    best_of: bool = False
    """Only the best of the left arms is compared, with the best of the right."""
    control: bool = False
    """Whether the others say nothing unless it holds: until then, the verdict is undecided."""

    def __post_init__(self) -> None:
        if bool(self.by) != bool(self.bin):
            raise ValueError(f"by is {self.by!r} and bin {self.bin!r}: give both, or neither")


class Part(BaseModel):
    model_config = STRICT


class Forked(BaseModel):
    """The run that another began with."""

    model_config = ConfigDict(extra="allow", strict=True)
    run: str
    step: int


class Began(BaseModel):
    """The weights that a run began with."""

    model_config = ConfigDict(extra="allow", strict=True)
    run: str
    weights: str
    step: int | None = None
    config: str | None = None


class Environment(Part):
    """Where a run was made: environment.json of its folder."""

    entp: str | None = None
    commit: str | None = None
    date: str = "unknown"
    python: str | None = None
    torch: str = "unknown"
    device: str = "an unknown device"
    threads: int | None = None
    cores: int | None = None
    processes: int | None = None
    resumed: list[Environment] = []
    forked: Forked | None = None
    init: Began | None = None


SumsData = Annotated[list[int | float | None], Len(6, 6)]
"""entp.tasks.metrics.Sums: n, v, w, vv, vw, ww."""


class TotalsData(Part):
    """entp.tasks.metrics.Totals as JSON."""

    sequences: int
    all: dict[str, SumsData]
    slices: dict[str, dict[str, dict[str, SumsData]]] = {}

    @classmethod
    def of(cls, totals: Totals) -> TotalsData:
        return cls.model_validate(totals.to_json())

    def totals(self, metrics: list[MetricSpec]) -> Totals:
        data = {"sequences": self.sequences, "all": self.all, "slices": self.slices}
        return Totals.from_json(metrics, data)


Ends = Annotated[list[float], Len(2, 2)]
"""The ends of an interval."""


class Bootstrap(Part):
    """Intervals of metrics by a bootstrap over test sequences (entp.results.bootstrap)."""

    level: float
    """The probability between the ends: 0.9 from the 5th to the 95th percentile."""
    resamples: int
    all: dict[str, Ends]
    slices: dict[str, dict[str, dict[str, Ends]]] = {}
    """Metric to slice to bin."""


class RunTest(Part):
    """What the best checkpoint does on test sequences: test.json of a run folder."""

    checkpoint: str
    concurrent_runs: int | None
    """Runs that shared the device in training. None: unknown."""
    totals: TotalsData
    generated: TotalsData | None = None
    """Answers that the model generated, reading what it wrote itself."""
    last: TotalsData | None = None
    """The last checkpoint on the same sequences."""
    last_checkpoint: str = ""
    splits: dict[str, TotalsData] = {}
    """The best checkpoint on further splits, by name."""
    bootstrap: Bootstrap | None = None
    """Intervals of `totals` by resampling."""
    baselines: dict[str, TotalsData] = {}
    """In files from before a record had baselines of its own."""
    note: str = ""
    """What a reader must know about the test sequences."""


class Point(Part):
    """One evaluation on validation sequences."""

    step: int
    seconds: float | None
    """Of training. None: unknown."""
    sequences: int
    """Read in training."""
    values: dict[str, float]
    flops: float | None = None
    """Floating-point operations of training up to here, by formula. None: unknown."""


class SplitPoint(Part):
    """One evaluation on a further split during training."""

    step: int
    totals: TotalsData
    """Without slices of many bins."""


class SplitBest(Part):
    """Of every metric and bin the best of all evaluations on a split during training. No checkpoint
    has them all, and the split itself chose them."""

    evaluations: int
    totals: TotalsData


class RunRecord(Part):
    """One seed of an arm."""

    seed: int
    status: str
    """"done", or how far it came."""
    best: dict[str, float]
    """Of each metric the best validation value."""
    test: RunTest | None = None
    n: int
    """Validation sequences of an evaluation."""
    steps: int
    sequences: int
    seconds: float
    curve: Annotated[list[Point], Len(1)]
    splits: dict[str, list[SplitPoint]] = {}
    """Evaluations on further splits, as many as the curve has."""
    best_of_splits: dict[str, SplitBest] = {}
    config_hash: str
    config: dict[str, Any]
    environment: Environment
    caveats: list[str] = []

    @property
    def done(self) -> bool:
        return self.status == "done"

    @model_validator(mode="after")
    def _has_task(self) -> RunRecord:
        task = self.config.get("task")
        if not isinstance(task, dict) or not isinstance(task.get("name"), str):
            raise ValueError("config has no task with a name")
        return self


class Estimate(Part):
    """A metric of an arm."""

    mean: float
    interval: Ends | None = None
    """95 %, unless the basis has another number."""
    basis: str
    """What the interval is over, and how many."""


class ArmSummary(Part):
    """Of an arm, computed from its runs; for people who read the file."""

    status: str
    test: dict[str, Estimate] = {}
    generated: dict[str, Estimate] = {}
    last: dict[str, Estimate] = {}
    best: dict[str, Estimate] = {}
    """Of the best evaluations on the test itself."""
    validation: dict[str, Estimate] = {}
    splits: dict[str, dict[str, Estimate]] = {}
    """Of each further split."""


class ArmRecord(Part):
    """An arm over its seeds."""

    factors: dict[str, Factor]
    paper: dict[str, PaperValue] = {}
    authors: list[SliceValues] = []
    seeds: list[int]
    """Planned."""
    summary: ArmSummary | None = None
    runs: list[RunRecord] = []


class AuthorsCurve(Part):
    """A published training curve."""

    steps: list[int]
    sequences: list[int]
    values: dict[str, list[float]]

    @model_validator(mode="after")
    def _as_many(self) -> AuthorsCurve:
        counts = {len(self.steps), len(self.sequences), *map(len, self.values.values())}
        if len(counts) > 1:
            raise ValueError("steps, sequences and values are not as many")
        return self


class BaselineRecord(Part):
    """Answers without a model to test sequences of a task: those of the first seed of the arms that
    have it."""

    task: dict[str, Any]
    """Its configuration, as that of a run has it."""
    seed: int
    split: str = "test"
    batch_size: int
    sequences: int
    totals: dict[str, TotalsData] = {}
    """By name of the baseline."""

    @property
    def stream(self) -> tuple[str, int, str, int, int]:
        """What tells the test sequences from others."""
        task = json.dumps(self.task, sort_keys=True)
        return task, self.seed, self.split, self.batch_size, self.sequences


class CheckResult(Part):
    says: str
    outcome: Literal["holds", "fails", "undecided"]
    why: list[str]


class Verdict(Part):
    verdict: Literal["reproduced", "not reproduced", "shown", "not shown", "undecided"]
    """shown, not shown: by a rule about something that the paper does not claim."""
    checks: list[CheckResult]


class Record(Part):
    """The results of a recipe."""

    schema_version: int
    recipe: str
    title: str
    question: str
    command: str
    metrics: Annotated[list[MetricSpec], Len(1)]
    table: Table | None = None
    figures: list[Figure] = []
    reproduced_if: str = ""
    """The rule in words; `checks` has it as data."""
    checks: list[Check] = []
    verdict: Verdict | None = None
    authors_curves: dict[str, AuthorsCurve] = {}
    arms: dict[str, ArmRecord]
    baselines: list[BaselineRecord] = []
    not_run: dict[str, str] = {}
    """Parts of the figure that are not run here, and why."""
    one_test: bool = False
    """Whether runs of all seeds are tested on the same sequences, those of a file."""
    of_paper: bool = True
    """Whether its rule is about a claim of the paper."""

    def metric(self, name: str) -> MetricSpec:
        return next(metric for metric in self.metrics if metric.name == name)

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        """Runs, table, figures and checks are about metrics of the record; no seed is there
        twice."""
        known = {metric.name for metric in self.metrics}
        named = [name for figure in self.figures for name in figure.y]
        named += [*(self.table.cells if self.table else ()), *(c.metric for c in self.checks)]
        for curve in self.authors_curves.values():
            named += list(curve.values)
        named += [values.metric for arm in self.arms.values() for values in arm.authors]
        strangers = [name for name in named if name not in known]
        if strangers:
            raise ValueError(f"it is about {strangers[0]!r}, which is not in metrics")
        for number, one in enumerate(self.baselines):
            for name, totals in one.totals.items():
                unknown = sorted((set(totals.all) | set(totals.slices)) - known)
                if unknown:
                    where = f"baselines.{number}.totals.{name}"
                    raise ValueError(f"{where} measures {unknown[0]!r}, which is not in metrics")
        for label, arm in self.arms.items():
            seeds = [run.seed for run in arm.runs]
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"arms.{label} has two runs of one seed")
            for number, run in enumerate(arm.runs):
                unknown = sorted(measured(run) - known)
                if unknown:
                    where = f"arms.{label}.runs.{number}"
                    raise ValueError(f"{where} measures {unknown[0]!r}, which is not in metrics")
        return self


def measured(run: RunRecord) -> set[str]:
    """Names of all metrics of a run."""
    found = set(run.best).union(*(point.values for point in run.curve))
    totals = [point.totals for points in run.splits.values() for point in points]
    totals += [best.totals for best in run.best_of_splits.values()]
    if run.test is not None:
        more = (run.test.generated, run.test.last)
        totals += [run.test.totals, *run.test.baselines.values()]
        totals += [one for one in more if one is not None]
        totals += run.test.splits.values()
    return found.union(*(one.all for one in totals), *(one.slices for one in totals))


Kind = TypeVar("Kind", bound=BaseModel)


def parse(kind: type[Kind], data: Any) -> Kind:
    """`data`, read from JSON, as this kind; a ValueError names every key that is wrong."""
    try:
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise ValueError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """pydantic's findings, each with the key it is about."""
    found = []
    for one in error.errors(include_url=False):
        where = ".".join(map(str, one["loc"])) or "it"
        if one["type"] == "missing":
            parent, _, key = where.rpartition(".")
            found.append(f"{parent or 'it'} has no {key!r}")
        elif one["type"] == "extra_forbidden":
            found.append(f"{where} is an unknown key")
        else:
            message = one["msg"].removeprefix("Value error, ")
            found.append(f"{where} is {_short(one['input'])}: {message}")
    return "; ".join(found[:3])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
