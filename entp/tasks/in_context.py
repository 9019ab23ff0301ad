"""In-context learning: a function is shown by examples, and its value at the next input is asked.

Four classes of functions, their curriculum and their shifted tests, as Garg et al. (2022) define
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems
from entp.tasks import regression
from entp.tasks.base import IGNORE, Baseline, Batch, Split, Task
from entp.tasks.metrics import LOSS, NOT_NEGATIVE, Metric, Predicted, Score, mean_loss

INCREMENTS = 15
"""Steps of equal size in which the curriculum grows: Garg et al.'s dimensions go from 5 to 20."""
FIRST_DIMS = 5
FIRST_POINTS = {"linear": 11, "sparse": 11, "net": 26, "tree": 26}
MOST_DEPTH = 12

QUERY_SHIFTS = ("quadrants", "orthogonal")
"""Splits whose examples and query differ in kind. A sequence ends with its only query."""
INPUT_SHIFTS = ("half_subspace", "skewed")
SCALES = {
    f"{of}_scale_{scale:g}": (of, scale) for of in ("x", "y") for scale in (0.333, 0.5, 2.0, 3.0)
}
SHIFTS = (*QUERY_SHIFTS, *INPUT_SHIFTS, *SCALES, "noisy")
"""Splits that only linear functions have: training never sees their kind of prompt."""
LASSO_ALPHAS = (1.0, 0.1, 0.01, 0.001, 0.0001)
QUARTERS = (1, 2, 3, 4)
"""Queries after these quarters of the examples are asked in another order."""


@dataclass(frozen=True)
class InContext(Task):
    """x_1 f(x_1) x_2 f(x_2) ... x_N, with a new f in every sequence; predict f(x) at every x.

    input    x_1     (f(x_1), 0, ..., 0)  x_2     (f(x_2), 0, ..., 0)  ...  x_N
    target   f(x_1)  .                    f(x_2)  .                    ...  f(x_N)

    Inputs are normal, N(0, I). The last f(x) is a target only, so a sequence has 2N - 1 vectors.
    """

    name: ClassVar[str] = "icl"
    about: ClassVar[str] = "learn a function from examples in the sequence (in-context learning)"
    loss: ClassVar[Literal["cross_entropy", "squared_error"]] = "squared_error"

    function: Literal["linear", "sparse", "net", "tree"] = "linear"
    """linear: w x. sparse: w has few coordinates. net: two layers, ReLU. tree: of decisions."""
    dim: int = 20
    """Coordinates of an input."""
    points: int = 40
    """Inputs per sequence, N; the last one has N - 1 examples before it."""
    sparsity: int = 3
    """Coordinates that a sparse function reads."""
    hidden: int = 100
    """Hidden units of a net."""
    depth: int = 4
    """Decisions from the root of a tree to a leaf."""
    curriculum_steps: int = 0
    """Training step by which coordinates and points have grown to their numbers. 0: from the
    start."""
    noise: float = 0.0
    """Standard deviation of normal noise that is added to every f(x), targets included."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        problems = choice_problems(self, "task.")
        problems += [
            f"task.{name} is {getattr(self, name)}: it must be at least {least}"
            for name, least in {"dim": 1, "points": 1, "hidden": 1, "curriculum_steps": 0}.items()
            if getattr(self, name) < least
        ]
        if self.function == "sparse" and not 1 <= self.sparsity <= self.dim:
            problems.append(
                f"task.sparsity is {self.sparsity}: of {self.dim} coordinates (task.dim) 1 to "
                f"{self.dim} can be read"
            )
        if not 1 <= self.depth <= MOST_DEPTH:
            problems.append(f"task.depth is {self.depth}: allowed are 1 to {MOST_DEPTH}")
        if self.noise < 0:
            problems.append(f"task.noise is {self.noise:g}: it must be at least 0")
        raise_problems(problems)

    @property
    def more_splits(self) -> tuple[str, ...]:
        """permuted: the prompts of test, their examples in another order and only the last query.
        The others are Garg et al.'s shifts of linear functions.

        quadrants: the examples lie in one random quadrant, the query anywhere.
        orthogonal: the query is orthogonal to its examples, of which there are fewer than dim.
        half_subspace: the inputs lie in a random subspace of half the dimension.
        skewed: their standard deviations along random axes are as 1, 1/2, 1/3, ...
        x_scale_2, y_scale_2: inputs, or values, times 2; also 0.333, 0.5 and 3.
        noisy: values with noise of 1, whatever `noise` is, scaled back to a variance of dim.

        In half_subspace and skewed the mean of |x|² stays dim. Each prompt has its own axes, where
        Garg et al. draw them once. In noisy the scale is the exact one, theirs a batch's.
        """
        return ("permuted", *(SHIFTS if self.function == "linear" else ()))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The squared error, also by the number of examples before the query, 0 to N - 1.

        It is divided by the mean of f(x)², as in Garg et al.'s figures: by dim for linear functions
        and nets, by sparsity for sparse ones, by 1 for trees. Without shift and noise the answer 0
        has an error of 1. The loss is not divided.
        """
        slices = ("examples",)
        error = Metric("squared_error", better="lower", slices=slices, bounds=NOT_NEGATIVE)
        return error, LOSS

    @property
    def variance(self) -> float:
        """The mean of f(x)² over functions and inputs."""
        return float({"sparse": self.sparsity, "tree": 1}.get(self.function, self.dim))

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        """A baseline's answer of NaN does not count: slow ones answer for some numbers of examples.
        Their mean over all numbers is not comparable with that of others; slices are."""
        error, weight = got.loss, np.ones(len(batch.targets))
        if error is None:
            error = (got.answer - batch.targets.astype(float)) ** 2
            weight = 1.0 - np.isnan(got.answer)
        slices = {"examples": batch.position // 2}
        score = Score(error / self.variance, weight, slices)
        return {"squared_error": score, "loss": mean_loss(got)}

    def baselines(self) -> dict[str, Baseline]:
        """Answers of a method that is fitted to the examples before each query.

        The last ones are slow: they answer after a tenth, two tenths, ... of the points and at the
        last, and except for the net they need scikit-learn.
        """
        alpha = self.noise**2 or 1.0
        found = {
            "least squares": _at_every_query(regression.least_squares),
            f"ridge (alpha {alpha:g})": _at_every_query(
                lambda x, y: regression.least_squares(x, y, alpha)
            ),
            "3 nearest neighbours": _at_every_query(regression.nearest_neighbours),
            "averaging": _at_every_query(regression.averaging),
            "zero": lambda batch: Predicted(np.zeros(len(batch.targets)), None),
        }
        if self.function == "sparse":
            for value in LASSO_ALPHAS:
                found[f"Lasso (alpha {value:g})"] = self._at_some(regression.lasso(value))
        if self.function == "net":
            found["two-layer net"] = self._at_some(_in_float32(regression.train_nets))
        if self.function == "tree":
            found[f"tree of depth {self.depth}"] = self._at_some(regression.tree(self.depth))
            found["tree of any depth"] = self._at_some(regression.tree(None))
            found["gradient boosting"] = self._at_some(regression.gradient_boosting())
        return found

    def _at_some(self, fit: regression.Fit) -> Baseline:
        """A slow method as a baseline: NaN except after some numbers of examples."""

        def answers(batch: Batch) -> Predicted:
            x, y = examples_of(batch)
            before, found = batch.position // 2, np.full(len(batch.targets), np.nan)
            for count in regression.thinned(self.points):
                at = np.flatnonzero(before == count)
                if len(at):
                    rows = batch.row[at]
                    found[at] = fit(x[rows, :count], y[rows, :count], x[rows, count])
            return Predicted(found, None)

        return answers

    def model_needs(self) -> dict[str, Any]:
        return {"input_dim": self.dim, "outputs": 1, "context_length": 2 * self.points}

    def stage(self, step: int) -> tuple[int, int]:
        """The coordinates that are not 0 and the points of a sequence, in this training step.

        Both grow in 15 equal increments, up to rounding. Garg et al. take 30,000 of 500,000 steps.
        """
        if not self.curriculum_steps:
            return self.dim, self.points
        done = min(INCREMENTS, INCREMENTS * step // self.curriculum_steps)
        fewest = max(FIRST_DIMS, self.sparsity) if self.function == "sparse" else FIRST_DIMS
        ends = (fewest, self.dim), (FIRST_POINTS[self.function], self.points)
        dims, points = (min(a, b) + max(0, b - a) * done // INCREMENTS for a, b in ends)
        return dims, points

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        if split == "permuted":
            return permuted(self.batch(seed, "test", step, size), rng)
        dims, points = self.stage(step) if split == "train" else (self.dim, self.points)
        x = rng.standard_normal((size, points, self.dim), dtype=np.float32)
        x[..., dims:] = 0.0
        if split in QUERY_SHIFTS:
            return self._with_one_query(rng, split, step, x)
        if split in INPUT_SHIFTS:
            x = x @ self._stretch(rng, split, size)
        of, scale = SCALES.get(split, ("x", 1.0))
        if of == "x":
            x *= np.float32(scale)
        noise = 1.0 if split == "noisy" else self.noise
        y = self._values(rng, x, dims, noise)
        if of == "y":
            y *= scale
        if split == "noisy":
            y *= math.sqrt(self.dim / (self.dim + 1))
        return prompts_of(x, y)

    def _values(
        self, rng: np.random.Generator, x: np.ndarray, dims: int, noise: float
    ) -> np.ndarray:
        """(size, points) f(x) with noise, and with a function for each sequence."""
        size, dim = len(x), self.dim
        if self.function == "net":
            first = rng.standard_normal((size, dim, self.hidden), dtype=np.float32)
            second = rng.standard_normal((size, self.hidden), dtype=np.float32)
            y = net_values(x, first, second)
        elif self.function == "tree":
            coordinates = rng.integers(0, dim, (size, 2**self.depth - 1))
            y = tree_values(x, coordinates, rng.standard_normal((size, 2**self.depth)))
        else:
            w = rng.standard_normal((size, dim))
            if self.function == "sparse":
                order = rng.random((size, dims)).argsort(axis=1)
                np.put_along_axis(w, order[:, self.sparsity :], 0.0, axis=1)
                w[:, dims:] = 0.0
            y = (x @ w[..., None])[..., 0]
        return y + noise * rng.standard_normal(y.shape) if noise else y

    def _stretch(self, rng: np.random.Generator, split: Split, size: int) -> np.ndarray:
        """(size, dim, dim) symmetric matrices that a normal x is multiplied by."""
        lengths = 1 / np.arange(1.0, self.dim + 1)
        if split == "half_subspace":
            lengths = (np.arange(self.dim) < max(1, self.dim // 2)).astype(float)
        lengths *= math.sqrt(self.dim / (lengths**2).sum())
        axes = np.linalg.qr(rng.standard_normal((size, self.dim, self.dim)))[0]
        return (axes * lengths) @ axes.swapaxes(1, 2)

    def _with_one_query(
        self, rng: np.random.Generator, split: Split, step: int, x: np.ndarray
    ) -> Batch:
        """Sequences that end with a query of another kind; one after the other they have 0, 1, 2,
        ... examples before it."""
        size, points, dim = x.shape
        most = min(points, dim) if split == "orthogonal" else points
        rows, examples = np.arange(size), (step * size + np.arange(size)) % most
        query = x[rows, examples]
        if split == "quadrants":
            x = np.abs(x) * rng.choice(np.array([-1.0, 1.0], np.float32), (size, 1, dim))
        else:
            query = orthogonal_to(x, examples, query)
        x[rows, examples] = query
        whole = prompts_of(x, self._values(rng, x, dim, self.noise))
        at = np.arange(2 * points - 1)
        return Batch(
            np.where((at <= 2 * examples[:, None])[..., None], whole.x, 0.0),
            np.where(at == 2 * examples[:, None], whole.y, IGNORE),
            lengths=2 * examples + 1,
        )

    def reordered(self, batch: Batch, rng: np.random.Generator) -> list[Batch]:
        """The queries after a quarter, half, three quarters and all of the examples."""
        return [permuted(batch, rng, examples) for examples in self.asked_again()]

    def asked_again(self) -> list[int]:
        """Numbers of examples before the queries that are asked in another order."""
        return sorted({max(1, (self.points - 1) * quarter // 4) for quarter in QUARTERS})

    def prompts(self, seed: int, size: int) -> list[list[int]]:
        raise self._no_tokens()

    def from_text(self, text: str) -> list[int]:
        raise self._no_tokens()

    def _no_tokens(self) -> InputError:
        return InputError(
            f"{self.name} reads vectors and answers with numbers: it has no tokens to generate. "
            "Measure it with entp evaluate RUN --by examples."
        )

    def draw(self, seed: int = 0) -> str:
        """One sequence, a line for each point: the first coordinates of x, and f(x)."""
        one = self.batch(seed, "train", 0, 1)
        shown, count = min(6, self.dim), one.x.shape[1] // 2 + 1
        of = f"({shown} of {self.dim} coordinates)" if shown < self.dim else ""
        lines = [f"input x {of}".ljust(9 * shown) + "target f(x), also the next input"]
        for n, (x, y) in enumerate(zip(one.x[0, ::2], one.y[0, ::2], strict=True)):
            if n < 6 or n == count - 1:
                numbers = "".join(f"{v:7.2f}" for v in x[:shown])
                lines.append(numbers.ljust(9 * shown) + f"{y:.2f}")
            elif n == 6:
                lines.append("    ...")
        return "\n".join(lines)


def prompts_of(x: np.ndarray, y: np.ndarray) -> Batch:
    """Inputs (size, points, dim) and values (size, points) as sequences x_1 y_1 x_2 ... x_N."""
    size, points, dim = x.shape
    tokens = np.zeros((size, 2 * points - 1, dim), np.float32)
    tokens[:, ::2], tokens[:, 1::2, 0] = x, y[:, :-1]
    targets = np.full(tokens.shape[:2], IGNORE, np.float32)
    targets[:, ::2] = y
    return Batch(tokens, targets)


def examples_of(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (size, points, dim) and values (size, points) as the sequences show them, in float64.

    The last value is not shown: it is NaN.
    """
    x, shown = batch.x[:, ::2].astype(float), batch.x[:, 1::2, 0]
    y = np.full(x.shape[:2], np.nan)
    y[:, :-1] = shown
    return x, y


def permuted(batch: Batch, rng: np.random.Generator, examples: int | None = None) -> Batch:
    """The same prompts up to the query after so many examples, these in a random order.

    That query alone has a target. Default: the last query, after all examples.
    """
    last = batch.x.shape[1] // 2
    count = last if examples is None else examples
    if batch.lengths is not None or not 0 <= count <= last:
        raise InputError(
            f"examples is {count}: sequences without padding are needed, and of these 0 to {last} "
            "examples."
        )
    size, dim = len(batch.x), batch.x.shape[2]
    order = rng.permuted(np.tile(np.arange(count), (size, 1)), axis=1)
    pairs = batch.x[:, : 2 * count].reshape(size, count, 2, dim)
    pairs = np.take_along_axis(pairs, order[..., None, None], axis=1)
    x = np.concatenate([pairs.reshape(size, 2 * count, dim), batch.x[:, 2 * count, None]], axis=1)
    y = np.full(x.shape[:2], IGNORE, batch.y.dtype)
    y[:, -1] = batch.y[:, 2 * count]
    return Batch(x, y)


def net_values(x: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two-layer ReLU nets at x: weights (size, dim, hidden) and (size, hidden), times
    sqrt(2 / hidden)."""
    hidden = x @ first
    np.maximum(hidden, 0, out=hidden)
    return (hidden @ second[..., None])[..., 0] * math.sqrt(2 / second.shape[1])


def tree_values(x: np.ndarray, coordinates: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    """Decision trees at x: right where the coordinate of a node is above 0, else left.

    coordinates (size, 2^depth - 1) are of the inner nodes, level by level; leaves (size, 2^depth).
    """
    rows = np.arange(len(x))[:, None]
    node = np.zeros(x.shape[:2], np.int64)
    inner = coordinates.shape[1]
    for _ in range(inner.bit_length()):
        coordinate = coordinates[rows, node]
        right = np.take_along_axis(x, coordinate[..., None], axis=2)[..., 0] > 0
        node = 2 * node + 1 + right
    return leaves[rows, node - inner]


def orthogonal_to(x: np.ndarray, examples: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The queries (size, dim) without what lies in the span of their first examples, at their old
    length."""
    count = min(x.shape[1:])
    basis = np.linalg.qr(x[:, :count].swapaxes(1, 2).astype(float))[0]  # column by column
    basis *= np.arange(count) < examples[:, None, None]
    inside = basis @ (basis.swapaxes(1, 2) @ query[..., None])
    rest = query - inside[..., 0]
    lengths = [np.linalg.norm(one, axis=1, keepdims=True) for one in (query, rest)]
    return rest * lengths[0] / lengths[1]


def _at_every_query(predict: regression.Predict) -> Baseline:
    """A fast method as a baseline: it answers every query."""

    def answers(batch: Batch) -> Predicted:
        found = predict(*examples_of(batch))
        return Predicted(found[batch.row, batch.position // 2], None)

    return answers


def _in_float32(fit: regression.Fit) -> regression.Fit:
    """The same method in half the time, where float64 is not needed."""
    return lambda x, y, query: fit(*(one.astype(np.float32) for one in (x, y, query)))
