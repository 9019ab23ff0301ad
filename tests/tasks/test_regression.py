"""Methods of regression against scikit-learn, torch and fits to one prompt at a time."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from entp.errors import InputError
from entp.tasks import regression


def prompts(size: int = 5, points: int = 9, dim: int = 4, seed: int = 0) -> Any:
    """Inputs and values that no linear function fits, the last value unknown."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, points, dim))
    y = x @ rng.standard_normal(dim) + np.sin(3 * x[..., 0])
    y[:, -1] = np.nan
    return x, y


def one_by_one(method: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A method applied to each prompt and each number of examples; 0 without an example."""
    found = np.zeros(y.shape)
    for row, count in np.ndindex(*y.shape):
        if count:
            found[row, count] = method(x[row, :count], y[row, :count], x[row, count])
    return found


def test_least_squares_has_least_norm_and_then_least_error() -> None:
    x, y = prompts(size=20, points=12)
    expected = one_by_one(lambda a, b, at: at @ np.linalg.lstsq(a, b, rcond=None)[0], x, y)
    np.testing.assert_allclose(regression.least_squares(x, y), expected, rtol=1e-6, atol=1e-8)


def test_least_squares_finds_a_linear_function_from_as_many_examples_as_coordinates() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, 8, 5))
    y = (x @ rng.standard_normal((50, 5, 1)))[..., 0]
    error = np.abs(regression.least_squares(x, y) - y).max(axis=0)
    assert (error[5:] < 1e-6).all()
    assert (error[:5] > 0.1).all()


def test_least_squares_does_not_believe_in_directions_of_rounding() -> None:
    """Inputs in a plane, rounded to float32: after two examples every value in it is known."""
    rng = np.random.default_rng(2)
    plane = rng.standard_normal((30, 2, 6))
    x = (rng.standard_normal((30, 9, 2)) @ plane).astype(np.float32).astype(float)
    y = (x @ rng.standard_normal((30, 6, 1)))[..., 0]
    found = regression.least_squares(x, y)
    assert np.abs(found - y)[:, 3:].max() < 1e-3


def test_least_squares_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = prompts(size=7)
    whole = regression.least_squares(x, y)
    monkeypatch.setattr(regression, "AT_ONCE", 3 * 9 * 4 * 4)  # three prompts
    assert np.array_equal(regression.least_squares(x, y), whole)


def test_ridge_is_scikit_learns() -> None:
    from sklearn.linear_model import Ridge

    def ridge(a: np.ndarray, b: np.ndarray, at: np.ndarray) -> float:
        return Ridge(alpha=0.7, fit_intercept=False).fit(a, b).predict(at[None])[0]

    x, y = prompts()
    found = regression.least_squares(x, y, alpha=0.7)
    np.testing.assert_allclose(found, one_by_one(ridge, x, y), rtol=1e-8, atol=1e-10)


def test_nearest_neighbours_are_scikit_learns() -> None:
    from sklearn.neighbors import KNeighborsRegressor

    def nearest(a: np.ndarray, b: np.ndarray, at: np.ndarray) -> float:
        return KNeighborsRegressor(min(3, len(a))).fit(a, b).predict(at[None])[0]

    x, y = prompts()
    found = regression.nearest_neighbours(x, y)
    np.testing.assert_allclose(found, one_by_one(nearest, x, y), rtol=1e-12, atol=1e-12)


def test_averaging_weighs_inputs_by_their_values() -> None:
    x, y = prompts()
    expected = one_by_one(lambda a, b, at: at @ (a * b[:, None]).mean(axis=0), x, y)
    np.testing.assert_allclose(regression.averaging(x, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "predict", [regression.least_squares, regression.nearest_neighbours, regression.averaging]
)
def test_predictions_use_only_what_comes_before(predict: Any) -> None:
    x, y = prompts()
    before = predict(x, y)
    x[:, 5:], y[:, 4:] = 7.0, np.nan
    assert np.array_equal(predict(x, y)[:, :5], before[:, :5])


def test_trained_nets_are_torchs() -> None:
    """The same first weights, full batches and Adam, prompt by prompt."""
    x, y = prompts(size=3, points=7)
    x, y, query = x[:, :6], y[:, :6], x[:, 6]
    found = regression.train_nets(x, y, query, hidden=11, steps=30, lr=0.01, seed=4)
    drawn = regression.first_weights(np.random.default_rng(4), 3, 4, 11)
    for row in range(3):
        net = torch.nn.Sequential(torch.nn.Linear(4, 11), torch.nn.ReLU(), torch.nn.Linear(11, 1))
        net.double()
        with torch.no_grad():
            for own, one in zip(net.parameters(), drawn, strict=True):
                own.copy_(torch.from_numpy(one[row].T).reshape(own.shape))
        adam = torch.optim.Adam(net.parameters(), lr=0.01)
        inputs, values = torch.from_numpy(x[row]), torch.from_numpy(y[row])
        for _ in range(30):
            adam.zero_grad()
            torch.nn.functional.mse_loss(net(inputs)[:, 0], values).backward()
            adam.step()
        with torch.no_grad():
            assert found[row] == pytest.approx(net(torch.from_numpy(query[row])).item(), rel=1e-7)


def test_first_weights_lie_where_torch_draws_them() -> None:
    """Uniform within 1 / sqrt(inputs of the layer)."""
    drawn = regression.first_weights(np.random.default_rng(0), 200, 16, 25)
    for one, limit in zip(drawn, (1 / 4, 1 / 4, 1 / 5, 1 / 5), strict=True):
        assert 0.95 * limit < np.abs(one).max() <= limit
        assert one.std() == pytest.approx(limit / np.sqrt(3), rel=0.1)


def test_longer_training_fits_the_examples() -> None:
    x, y = prompts(size=4, points=9)
    x, y = x[:, :8], y[:, :8]
    error = [
        np.mean((regression.train_nets(x, y, x[:, 2], steps=steps) - y[:, 2]) ** 2)
        for steps in (1, 400)
    ]
    assert error[1] < 0.01 * error[0]


def test_lasso_meets_its_conditions() -> None:
    """At the minimum the slope is alpha where a weight is not 0, and at most alpha elsewhere."""
    x, y = prompts(size=6, points=31, dim=5)
    x, y, alpha = x[:, :30], y[:, :30], 0.2
    weights = np.stack(
        [regression.lasso(alpha)(x, y, np.tile(axis, (6, 1))) for axis in np.eye(5)], axis=1
    )
    slope = (x * (y - (x @ weights[..., None])[..., 0])[..., None]).mean(axis=1)
    kept = weights != 0
    assert 0 < kept.sum() < kept.size
    np.testing.assert_allclose(slope[kept], alpha * np.sign(weights[kept]), atol=2e-3)
    assert np.abs(slope[~kept]).max() < alpha + 2e-3


def test_trees_split_as_deep_as_they_may() -> None:
    x = np.array([[[-2.0], [-1.0], [1.0], [2.0]]])
    y = np.array([[1.0, 2.0, 7.0, 9.0]])
    query = np.array([[1.8]])
    assert regression.tree(1)(x, y, query).tolist() == [8.0]
    assert regression.tree(None)(x, y, query).tolist() == [9.0]


def test_gradient_boosting_learns_from_the_prompt() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 60, 3))
    y = np.where(x[..., 1] > 0, 2.0, -2.0)
    query = np.array([[0.0, 1.0, 0.0], [0.0, -1.0, 0.0]])
    found = regression.gradient_boosting()(x, y, query)
    assert found == pytest.approx([2.0, -2.0], abs=0.1)
    assert np.array_equal(regression.gradient_boosting()(x, y, query), found)


@pytest.mark.slow
def test_gradient_boosting_by_processes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "ENOUGH", 4)
    x, y = prompts(size=4, points=4)
    fit = regression.gradient_boosting()
    at_once = fit(x[:, :3], y[:, :3], x[:, 3])
    for part in (slice(0, 3), slice(3, None)):  # too few for processes
        assert np.array_equal(fit(x[part, :3], y[part, :3], x[part, 3]), at_once[part])


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (40, [4, 8, 12, 16, 20, 24, 28, 32, 36, 39]),
        (100, [10, 20, 30, 40, 50, 60, 70, 80, 90, 99]),
        (5, [1, 2, 3, 4]),
        (2, [1]),
        (1, []),
    ],
)
def test_slow_methods_answer_for_few_numbers_of_examples(points: int, expected: list[int]) -> None:
    assert regression.thinned(points) == expected


@pytest.mark.parametrize(
    "fit", [regression.lasso(0.1), regression.tree(2), regression.gradient_boosting()]
)
def test_missing_scikit_learn_is_named(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    x, y = prompts()
    with pytest.raises(InputError, match=r"needs scikit-learn.*pip install 'entp\[baselines\]'"):
        fit(x[:, :3], y[:, :3], x[:, 3])
