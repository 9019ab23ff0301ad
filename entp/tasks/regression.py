"""Methods of regression that learn from the examples of a prompt, to compare models with.

A prompt has inputs x (prompts, points, dim) and values y (prompts, points). The fast methods
predict at every point from the points before it, for all prompts at once; with none before it they
predict 0. The slow ones are fitted to one number of examples at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from entp.errors import InputError

Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""x and y of prompts to predictions (prompts, points); the value at a point itself is not used."""
Fit = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Examples x (prompts, n, dim), y (prompts, n) and queries (prompts, dim) to answers (prompts,)."""

AT_ONCE = 2**23
"""Numbers in the matrices that are solved at once."""
RANK = 1e-13
"""Directions with a smaller part of the largest sum of squares were not seen: float32 inputs in a
subspace stay below it."""

ENOUGH = 16
"""Slow fits for which it pays to start processes."""


def thinned(points: int) -> list[int]:
    """Numbers of examples that slow methods answer for: every tenth of the points, and the most."""
    return sorted({*range(max(1, points // 10), points, max(1, points // 10)), points - 1} - {0})


def least_squares(x: np.ndarray, y: np.ndarray, alpha: float = 0.0) -> np.ndarray:
    """Linear, without intercept: of the weights that fit best those of least norm, or with alpha
    those of ridge regression."""
    size, points, dim = x.shape
    found = np.empty((size, points))
    step = max(1, AT_ONCE // (points * dim * dim))
    for start in range(0, size, step):
        some, values = x[start : start + step], y[start : start + step]
        squares = _before(some[..., None] * some[..., None, :])
        products = _before(some * values[..., None])[..., None]
        if alpha:
            w = np.linalg.solve(squares + alpha * np.eye(dim), products)
        else:
            w = np.linalg.pinv(squares, rcond=RANK, hermitian=True) @ products
        found[start : start + step] = (some * w[..., 0]).sum(axis=2)
    return found


def averaging(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Linear, with the mean of x y over the examples as weights."""
    count = np.maximum(1, np.arange(x.shape[1]))[:, None]
    return (x * _before(x * y[..., None]) / count).sum(axis=2)


def nearest_neighbours(x: np.ndarray, y: np.ndarray, neighbours: int = 3) -> np.ndarray:
    """The mean value of the nearest examples; of all, if there are fewer."""
    points = x.shape[1]
    norms = (x * x).sum(axis=2)
    distances = norms[:, :, None] + norms[:, None] - 2 * x @ x.swapaxes(1, 2)
    distances[:, ~np.tri(points, k=-1, dtype=bool)] = np.inf
    nearest = distances.argsort(axis=2)[..., :neighbours]
    known = np.arange(nearest.shape[2]) < np.arange(points)[:, None]
    values = y[np.arange(len(y))[:, None, None], nearest]
    return np.where(known, values, 0.0).sum(axis=2) / np.maximum(1, known.sum(axis=1))


def _before(values: np.ndarray) -> np.ndarray:
    """For each point the sum over the points before it."""
    sums = np.zeros_like(values)
    np.cumsum(values[:, :-1], axis=1, out=sums[:, 1:])
    return sums


def train_nets(
    x: np.ndarray,
    y: np.ndarray,
    query: np.ndarray,
    *,
    hidden: int = 100,
    steps: int = 100,
    lr: float = 5e-3,
    seed: int = 0,
) -> np.ndarray:
    """A two-layer ReLU net for each prompt, trained on all of its examples in every step of Adam.

    Width, steps and learning rate are Garg et al.'s, and so are the first weights: uniform within
    1 / sqrt(inputs of the layer), biases too.
    """
    drawn = first_weights(np.random.default_rng(seed), len(x), x.shape[2], hidden)
    weights = [w.astype(x.dtype) for w in drawn]
    means = [np.zeros_like(w) for w in weights]
    squares = [np.zeros_like(w) for w in weights]
    for step in range(1, steps + 1):
        for w, g, m, v in zip(weights, _gradients(weights, x, y), means, squares, strict=True):
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            scale = np.sqrt(v / (1 - 0.999**step)) + 1e-8
            w -= lr / (1 - 0.9**step) * m / scale
    return _net(weights, query[:, None])[1][:, 0]


Weights = list[np.ndarray]
"""Of nets, one for each prompt: (prompts, dim, hidden), (prompts, 1, hidden), (prompts, hidden, 1),
(prompts, 1, 1)."""


def first_weights(rng: np.random.Generator, size: int, dim: int, hidden: int) -> Weights:
    """Weights and biases before training."""
    shapes = [(dim, hidden), (1, hidden), (hidden, 1), (1, 1)]
    limits = [dim**-0.5] * 2 + [hidden**-0.5] * 2
    return [
        rng.uniform(-limit, limit, (size, *shape))
        for shape, limit in zip(shapes, limits, strict=True)
    ]


def _net(weights: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden units and the values of nets at x (prompts, n, dim)."""
    first, first_bias, second, second_bias = weights
    active = np.maximum(x @ first + first_bias, 0)
    return active, (active @ second + second_bias)[..., 0]


def _gradients(weights: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    """Of each net's mean squared error on its examples."""
    active, values = _net(weights, x)
    error = (2 / x.shape[1] * (values - y))[..., None]
    inner = np.where(active > 0, error * weights[2].swapaxes(1, 2), 0)
    return [
        x.swapaxes(1, 2) @ inner,
        inner.sum(axis=1, keepdims=True),
        active.swapaxes(1, 2) @ error,
        error.sum(axis=1, keepdims=True),
    ]


def lasso(alpha: float) -> Fit:
    """Linear, without intercept: least squares over 2n plus alpha times the sum of |weights|."""
    return _each("Lasso", alpha=alpha, fit_intercept=False, max_iter=100_000)


def tree(depth: int | None) -> Fit:
    """A regression tree, grown greedily; of any depth where it is None."""
    return _each("DecisionTreeRegressor", max_depth=depth, random_state=0)


def gradient_boosting() -> Fit:
    """100 boosted trees of depth 3, scikit-learn's default; Garg et al. have XGBoost's.

    A fit takes about 0.1 s, so that many are made by as many processes as there are cores.
    """
    return _each("GradientBoostingRegressor", in_processes=True, random_state=0)


def _each(name: str, in_processes: bool = False, **options: Any) -> Fit:
    """A method of scikit-learn, fitted to one prompt after the other, or to several at a time."""

    def fit(x: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
        method = getattr(_scikit_learn(), name)
        prompts = [(method(**options), *one) for one in zip(x, y, query, strict=True)]
        if not in_processes or len(prompts) < ENOUGH:
            return np.array([_answer(*one) for one in prompts])
        jobs = (_scikit_learn().delayed(_answer)(*one) for one in prompts)
        return np.array(_scikit_learn().Parallel(n_jobs=-1)(jobs))

    return fit


def _answer(method: Any, x: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
    """What a method of scikit-learn answers to one query after it read the examples."""
    return float(method.fit(x, y).predict(query[None])[0])


def _scikit_learn() -> Any:
    """What is used of scikit-learn; an InputError where it is not installed."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
        from sklearn.linear_model import Lasso
        from sklearn.tree import DecisionTreeRegressor
        from sklearn.utils.parallel import Parallel, delayed
    except ImportError as error:
        raise InputError(
            f"this baseline needs scikit-learn, which is not installed ({error}): "
            "pip install 'entp[baselines]'."
        ) from None
    return SimpleNamespace(
        GradientBoostingRegressor=GradientBoostingRegressor,
        Lasso=Lasso,
        DecisionTreeRegressor=DecisionTreeRegressor,
        Parallel=Parallel,
        delayed=delayed,
    )
