"""Five tasks with metrics of their own, defined here, are trained, evaluated, recorded and reported
without a line in trainer, records or report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.experiments.collect import find_folder
from entp.experiments.recipe import Arm, Figure, Recipe
from entp.experiments.reproduce import Outcome, reproduce
from entp.report.page import page
from entp.report.tables import record_table
from entp.results.store import find_records, read_record
from entp.tasks.base import IGNORE, Baseline, Batch, Split, Task
from entp.tasks.metrics import Metric, Predicted, Score, exact_match
from entp.training.checkpoint import load
from entp.training.evaluate import untouched_batches
from entp.training.loggers import read_metrics

SEQUENCES = 24


@dataclass(frozen=True)
class Ones(Task):
    """How many ones so far, modulo 4; measured by the defaults, by length."""

    name: ClassVar[str] = "ones"
    length: int = 6

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 2, "context_length": self.length, "outputs": 4}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).integers(0, 2, (size, self.length))
        return Batch(x, x.cumsum(1) % 4)


@dataclass(frozen=True)
class Sums(Task):
    """a + b of one or two digits; exact match by digits and by carries."""

    name: ClassVar[str] = "sums"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (Metric("exact_match", unit="sequence", slices=("digits", "carries")),)

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        a, b = batch.x[:, :2].T, batch.x[:, 2:4].T
        carries = 1 * (a[1] + b[1] > 9) + (10 * a[0] + a[1] + 10 * b[0] + b[1] > 99)
        digits = 1 + ((a[0] > 0) | (b[0] > 0))
        return {"exact_match": exact_match(batch, got, {"digits": digits, "carries": carries})}

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 11, "context_length": 7}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        a, b = rng.integers(0, 10 ** rng.integers(1, 3, (2, size)))
        total = a + b
        columns = [a // 10, a % 10, b // 10, b % 10, np.full(size, 10)]
        answer = [total // 100, total // 10 % 10, total % 10]
        x = np.stack([*columns, *answer[:2]], axis=1)
        y = np.full_like(x, IGNORE)
        y[:, 4:] = np.stack(answer, axis=1)
        return Batch(x, y)


@dataclass(frozen=True)
class Regression(Task):
    """Linear functions in context: squared error by the number of examples read."""

    name: ClassVar[str] = "regression"
    loss: ClassVar[Any] = "squared_error"
    dim: int = 2
    examples: int = 4

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (Metric("squared_error", better="lower", slices=("examples",)),)

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        if got.loss is None:
            return {}
        error = got.loss / self.dim
        by = {"examples": batch.position // 2}
        return {"squared_error": Score(error, np.ones(len(error)), by)}

    def model_needs(self) -> dict[str, Any]:
        return {"input_dim": self.dim, "context_length": 2 * self.examples, "outputs": 1}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        points = rng.normal(size=(size, self.examples, self.dim))
        values = np.einsum("bed,bd->be", points, rng.normal(size=(size, self.dim)))
        x = np.zeros((size, 2 * self.examples, self.dim))
        x[:, ::2], x[:, 1::2, 0] = points, values
        y = np.full((size, 2 * self.examples), float(IGNORE))
        y[:, ::2] = values
        return Batch(x, y)


@dataclass(frozen=True)
class Text(Task):
    """Words of one to three bytes: perplexity per word, bits per byte."""

    name: ClassVar[str] = "text"
    length: int = 6

    @property
    def metrics(self) -> tuple[Metric, ...]:
        perplexity = Metric("perplexity", better="lower", show="exp")
        return (
            Metric("bits_per_byte", unit="byte", better="lower", show="bits"),
            perplexity,
        )

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        if got.loss is None:
            return {}
        return {
            "perplexity": Score(got.loss, np.ones(len(got.loss))),
            "bits_per_byte": Score(got.loss, word_bytes(batch.targets)),
        }

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 9, "context_length": self.length}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        words = np.minimum(rng.geometric(0.4, (size, self.length + 1)) - 1, 8)
        return Batch(words[:, :-1], words[:, 1:])


def word_bytes(words: np.ndarray) -> np.ndarray:
    return 1 + words % 3


@dataclass(frozen=True)
class Majority(Task):
    """Which of three tokens is the commonest: one class at the last position of sequences of
    different lengths; accuracy by class, which is a note of the batch."""

    name: ClassVar[str] = "majority"
    length: int = 7

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (Metric("accuracy", unit="sequence", slices=("class",)),)

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        assert batch.note is not None
        right = got.answer == batch.targets
        return {"accuracy": Score(right, np.ones(len(right)), {"class": batch.note})}

    def baselines(self) -> dict[str, Baseline]:
        return {"always 0": lambda batch: Predicted(np.zeros(len(batch.targets)), None)}

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 3, "context_length": self.length, "outputs": 3}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        x = rng.integers(0, 3, (size, self.length))
        lengths = rng.integers(3, self.length + 1, size)
        y = np.full_like(x, IGNORE)
        for row, length in enumerate(lengths):
            y[row, length - 1] = np.bincount(x[row, :length], minlength=3).argmax()
            x[row, length:] = 0
        names = np.array(["first", "second", "third"])[y.max(1)]
        return Batch(x, y, lengths, note=names)


def same(run: Run) -> Run:
    return run


def own_recipe(task: Task, figure: Figure, lr: float = 3e-3) -> Recipe:
    """ENTP and a decoder, eight steps each, evaluated every second."""
    run = Run(
        task,
        model_for(task, "small", layers=1, heads=2, width=16),
        steps=8,
        batch_size=12,
        optim=OptimConfig(lr=lr, min_lr=lr / 10, warmup_steps=1, decay_steps=8),
        train=TrainConfig(eval_every=2, eval_batches=1, checkpoint_every=4, log_every=4),
    )
    return Recipe(
        name=f"own-{task.name}",
        title=f"My {task.name}",
        question="Does a task of my own fit?",
        arms=[Arm(run, mode="ENTP"), Arm(replace(run, mode="decoder"), mode="decoder")],
        tiny_run=same,
        figure=figure,
        test_sequences=SEQUENCES,
    )


TASKS: dict[str, tuple[Task, Figure]] = {
    "ones": (Ones(), Figure("slices", x="length", y="token_accuracy", lines="mode")),
    "sums": (Sums(), Figure("slices", x="carries", y="exact_match", lines="mode")),
    "regression": (Regression(), Figure("slices", x="examples", lines="mode")),
    "text": (Text(), Figure("bars")),
    "majority": (Majority(), Figure("slices", x="class", lines="mode")),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of all five."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "results").mkdir()
    for name, (task, figure) in TASKS.items():
        recipe = own_recipe(task, figure)
        found = reproduce(
            recipe, folder / "runs", device="cpu", record=folder / "results" / f"{name}.json"
        )
        assert found.stopped_by is None
    return folder


def outputs(model: Any, mode: str, batch: Batch) -> np.ndarray:
    """What the model says after each target's prefix, one sequence at a time, in float64."""
    rows = []
    for row, position in zip(batch.row, batch.position, strict=True):
        x = torch.from_numpy(batch.x[row : row + 1, : position + 1])
        rows.append(model(x, "decoder" if mode == "decoder" else "entp")[0, -1].double().numpy())
    return np.stack(rows)


def nats(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(targets)), targets]


Values = dict[str, float]


def by(keys: np.ndarray, values: np.ndarray) -> dict[str, float]:
    return {str(key): float(values[keys == key].mean()) for key in np.unique(keys)}


def ones_directly(batch: Batch, said: np.ndarray) -> tuple[Values, dict[str, Values]]:
    right = said.argmax(1) == batch.targets
    whole = right.reshape(len(batch.x), -1).all(1)
    loss = nats(said, batch.targets).mean()
    values = {"exact_match": whole.mean(), "token_accuracy": right.mean(), "loss": loss}
    return values, {"token_accuracy by length": by(batch.position + 1, right)}


def sums_directly(batch: Batch, said: np.ndarray) -> tuple[Values, dict[str, Values]]:
    right = (said.argmax(1) == batch.targets).reshape(len(batch.x), 3).all(1)
    a, b = 10 * batch.x[:, 0] + batch.x[:, 1], 10 * batch.x[:, 2] + batch.x[:, 3]
    digits = np.where((a > 9) | (b > 9), 2, 1)
    carries = (a % 10 + b % 10 > 9).astype(int) + (a + b > 99)
    return {"exact_match": right.mean()}, {
        "exact_match by digits": by(digits, right),
        "exact_match by carries": by(carries, right),
    }


def regression_directly(batch: Batch, said: np.ndarray) -> tuple[Values, dict[str, Values]]:
    error = (said[:, 0] - batch.targets) ** 2 / 2
    examples = by(batch.position // 2, error)
    return {"squared_error": error.mean()}, {"squared_error by examples": examples}


def text_directly(batch: Batch, said: np.ndarray) -> tuple[Values, dict[str, Values]]:
    loss = nats(said, batch.targets)
    bits = loss.sum() / math.log(2) / (1 + batch.targets % 3).sum()
    return {"bits_per_byte": bits, "perplexity": math.exp(loss.mean())}, {}


def majority_directly(batch: Batch, said: np.ndarray) -> tuple[Values, dict[str, Values]]:
    right = said.argmax(1) == batch.targets
    names = np.array(["first", "second", "third"])[batch.targets]
    return {"accuracy": right.mean()}, {"accuracy by class": by(names, right)}


DIRECTLY: dict[str, Callable[[Batch, np.ndarray], tuple[Values, dict[str, Values]]]] = {
    "ones": ones_directly,
    "sums": sums_directly,
    "regression": regression_directly,
    "text": text_directly,
    "majority": majority_directly,
}


def one_batch(task: Task) -> Batch:
    """All test sequences of seed 0 in one batch."""
    parts = list(untouched_batches(task, SEQUENCES, 12, 0))
    assert len(parts) == 2
    fields = {
        name: [getattr(part, name) for part in parts] for name in ("x", "y", "lengths", "note")
    }
    joined = {k: None if v[0] is None else np.concatenate(v) for k, v in fields.items()}
    return Batch(**joined)


@pytest.mark.parametrize("mode", ["ENTP", "decoder"])
@pytest.mark.parametrize("name", TASKS)
def test_recorded_values_are_those_of_direct_computation(
    name: str, mode: str, recorded: Path
) -> None:
    task, figure = TASKS[name]
    record = read_record(recorded / "results" / f"{name}.json")
    arm = next(one for one in own_recipe(task, figure).runs() if one.label == mode)
    model = load(find_folder(arm, recorded / "runs" / f"own-{name}"))
    batch = one_batch(task)
    with torch.no_grad():
        values, slices = DIRECTLY[name](batch, outputs(model, mode, batch))
    test = record.arms[mode].runs[0].test
    assert test is not None
    totals = test.totals.totals(record.metrics)
    measured = totals.values()
    assert measured.pop("n") == SEQUENCES
    assert measured == pytest.approx(values, rel=1e-5)
    for what, bins in slices.items():
        metric, _, slice_name = what.partition(" by ")
        assert totals.sliced(metric, slice_name) == pytest.approx(bins, rel=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_slices_stand_in_record_terminal_and_page(name: str, recorded: Path) -> None:
    path = recorded / "results" / f"{name}.json"
    record = read_record(path)
    text = page({path: record}, recorded / "page.md")
    test = record.arms["ENTP"].runs[0].test
    assert test is not None
    assert set(test.totals.slices) == {m.name for m in record.metrics if m.slices}
    for metric in record.metrics:
        title = metric.name.replace("_", " ")
        assert f"{title}: test" in text
        assert f"{title}: test" in record_table(record)
        for by_what in metric.slices:
            bins = test.totals.slices[metric.name][by_what]
            assert f"Test {title} by {by_what}:\n\n| arm | {' | '.join(bins)} |" in text


def test_page_shows_all_five_and_figures_are_drawn(recorded: Path) -> None:
    records = find_records(recorded / "results")
    assert len(records) == 5
    text = page(records, recorded / "page.md")
    for name in TASKS:
        assert f"## own-{name}\n" in text
        assert (recorded / "results" / f"{name}.png").stat().st_size > 5_000


def test_baseline_goes_through_the_same_measure(recorded: Path) -> None:
    record = read_record(recorded / "results" / "majority.json")
    (answered,) = record.baselines  # both arms have the same test sequences
    assert (answered.split, answered.seed, answered.task["length"]) == ("test", 0, 7)
    found = answered.totals["always 0"].totals(record.metrics)
    zeros = one_batch(Majority()).targets == 0
    assert found.value("accuracy") == pytest.approx(zeros.mean())
    assert found.sliced("accuracy", "class") == {"first": 1, "second": 0, "third": 0}


def trained_apart(task: Task, lr: float, folder: Path) -> tuple[Outcome, list[dict[str, Any]]]:
    """A decoder with this learning rate, and its evaluations."""
    recipe = own_recipe(task, Figure("curves"), lr)
    recipe = replace(recipe, arms=recipe.arms[1:])
    found = reproduce(recipe, folder, device="cpu")
    run_folder = find_folder(recipe.runs()[0], folder / recipe.name)
    return found, [row for row in read_metrics(run_folder) if row["kind"] == "eval"]


@pytest.mark.parametrize(("name", "lr"), [("regression", 1.0), ("text", 1.0)])
def test_lower_is_better_decides_the_best_checkpoint(
    name: str, lr: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entp.experiments import study as study_module

    monkeypatch.setattr(study_module, "draw_record", lambda *_: False)
    found, rows = trained_apart(TASKS[name][0], lr, tmp_path)
    metric = found.metrics[0].name
    values = [row[metric] for row in rows]
    best = rows[values.index(min(values))]
    assert min(values) < max(values)
    run = found.arms["decoder"].runs[0]
    assert run.best[metric] == min(values)
    assert run.test is not None
    assert run.test.checkpoint == f"best-{best['step']:08d}"
