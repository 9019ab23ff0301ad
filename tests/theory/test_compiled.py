"""Count3 as weights set by hand: right in every engine, saved and loaded; wrong if causal."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import entp
from entp.config import Run
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.base import IGNORE
from entp.tasks.counting import Count3, count3_next
from entp.theory import compiled
from entp.theory.compiled import BLOCKS, answers, count3, numbers
from entp.training.checkpoint import load_run, save_model
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward


@pytest.fixture(scope="module")
def model() -> Transformer:
    return count3(64)


@pytest.fixture(scope="module")
def experiments() -> Transformer:
    """For the paper's task: values up to 63, from n = 16 on."""
    return count3(64, ratio=4)


def brute_force(x: tuple[int, ...]) -> int:
    n = len(x)
    return sum((a + b + x[-1]) % n == 0 for a in x for b in x) % n


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_every_short_sequence(model: Transformer, n: int) -> None:
    """3,413 sequences in all, with n <= 5 and x < n."""
    x = list(itertools.product(range(n), repeat=n))
    assert answers(model, np.array(x)).tolist() == [brute_force(row) for row in x]


@pytest.mark.parametrize("ratio", [1, 4])
def test_a_fifth_block_writes_the_number_itself(ratio: int) -> None:
    model = count3(64, ratio, number=True)
    assert (model.config.layers, model.config.width) == (BLOCKS + 1, {1: 16, 4: 20}[ratio])
    rng = np.random.default_rng(9)
    for n in range(1, 65):
        x = rng.integers(0, min(64, ratio * n), (20, n))
        x[0] = 0
        assert np.abs(numbers(model, x) - count3_next(x)).max() < 1e-9
        assert np.array_equal(answers(model, x), count3_next(x))


def test_ten_thousand_random_sequences(model: Transformer) -> None:
    rng = np.random.default_rng(0)
    counts = np.bincount(rng.integers(1, 65, 10_000), minlength=65)
    for n, count in enumerate(counts):
        if count:
            x = rng.integers(0, n, (count, n))
            assert np.array_equal(answers(model, x), count3_next(x)), n


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 63, 64])
def test_sequences_made_to_break_it(model: Transformer, n: int) -> None:
    """All equal (all zero: count = n², the largest), two values, one odd one out, each once."""
    rows = [[value] * n for value in range(n)]
    rows += [[0] * (n - 1) + [value] for value in range(n)] + [
        [value] + [0] * (n - 1) for value in range(n)
    ]
    rows += [[n // 2] * (n // 2) + [0] * (n - n // 2), list(range(n)), list(range(n))[::-1]]
    x = np.array(rows)
    assert count3_next(x)[0] == 0
    assert np.array_equal(answers(model, x), count3_next(x))


@pytest.mark.parametrize("n_max", [1, 7, 256])
def test_size_does_not_depend_on_the_length(n_max: int) -> None:
    model = count3(n_max)
    assert (model.config.layers, model.config.width) == (BLOCKS, 16) == (4, 16)
    rng = np.random.default_rng(n_max)
    for n in (n_max, max(1, n_max - 1), max(1, n_max // 2)):
        x = rng.integers(0, n, (8, n))
        x[0], x[1], x[2] = 0, n // 2, n - 1
        assert np.array_equal(answers(model, x), count3_next(x))


@pytest.mark.parametrize("n", [64, 256, 512])
def test_the_margin_grows_as_it_must(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 ln n and a little is enough, and less is not; the least margin is for longer sequences."""
    # Every row has n - 1 equal partners: the largest error there is.
    x = np.zeros((1, n), dtype=int)
    monkeypatch.setattr(compiled, "LEAST_MARGIN", 0)
    assert compiled.margin(n) < 30
    assert answers(count3(n), x).tolist() == [0]
    monkeypatch.setattr(
        compiled, "margin", lambda n_max: float(math.floor(3 * math.log(n_max)) - 2)
    )
    assert answers(count3(n), x).tolist() != [0]


@pytest.mark.parametrize("impl", ["reference", "packed"])
def test_every_prefix_by_every_engine(model: Transformer, impl: str) -> None:
    """Mode entp on a sequence that is a legal input at each length: x_i <= i."""
    x = np.minimum(np.random.default_rng(2).integers(0, 24, (6, 24)), np.arange(24))
    with torch.no_grad():
        got = model(torch.from_numpy(x), mode="entp", impl=impl).argmax(-1).numpy()
    assert all(np.array_equal(got[:, n - 1], count3_next(x[:, :n])) for n in range(1, 25))


def test_the_papers_experiments(experiments: Transformer) -> None:
    """Every target of the task: seeds of 16 integers from 0 to 63, then 48 that follow the rule."""
    batch = Count3().batch(0, "test", 0, 64)
    with torch.no_grad():
        got = experiments(
            torch.from_numpy(batch.x), mode="entp", at=torch.from_numpy(batch.y != IGNORE)
        ).argmax(-1)
    assert np.array_equal(got.numpy(), batch.y[batch.y != IGNORE])
    assert experiments.config.width == 20
    rng = np.random.default_rng(3)
    for n in (16, 17, 21, 22, 32, 33, 63, 64):  # free inputs, not only those that follow the rule
        x = rng.integers(0, 64, (100, n))
        assert np.array_equal(answers(experiments, x), count3_next(x))


def test_a_ratio_whose_width_would_be_odd() -> None:
    """Of ratio 5 the MLP needs 23 times 4 units: two heads share a width of 24."""
    model = count3(20, ratio=5)
    assert model.config.width == 24
    x = np.random.default_rng(8).integers(0, 20, (50, 4))
    assert np.array_equal(answers(model, x), count3_next(x))


def test_without_the_ratio_larger_values_are_wrong(model: Transformer) -> None:
    x = np.random.default_rng(4).integers(0, 64, (200, 16))
    assert (answers(model, x) != count3_next(x)).mean() > 0.5


def test_it_continues_sequences(experiments: Transformer) -> None:
    task = Count3()
    seeds = np.random.default_rng(5).integers(0, 64, (12, 16))
    want = task.extend(seeds)
    assert np.array_equal(entp.generate(experiments, torch.from_numpy(seeds), 48).numpy(), want)
    assert np.array_equal(
        entp.generate(experiments, torch.from_numpy(seeds[:2]), 48, cache=False).numpy(), want[:2]
    )


def test_under_a_causal_mask_the_same_weights_fail(
    model: Transformer, experiments: Transformer
) -> None:
    """Rows before the last know neither n nor x_n: that is the encoder's advantage, taken away."""
    rng = np.random.default_rng(6)
    for n in (8, 16, 64):
        x = rng.integers(0, n, (300, n))
        assert (answers(model, x, "decoder") == count3_next(x)).mean() < 0.3
    seeds = rng.integers(0, 64, (8, 16))
    got = entp.generate(experiments, torch.from_numpy(seeds), 48, "decoder").numpy()
    assert not (got == Count3().extend(seeds)).all(1).any()


def test_saved_and_loaded_like_any_checkpoint(experiments: Transformer, tmp_path: Path) -> None:
    task = Count3()
    run = Run(task, experiments.config, "entp", batch_size=16)
    folder = save_model(experiments, tmp_path / "compiled", run)
    again = entp.load(folder)
    assert all(
        torch.equal(a, b)
        for a, b in zip(experiments.state_dict().values(), again.state_dict().values(), strict=True)
    )
    loaded = load_run(folder)
    batches = split_batches(loaded.task, "test", 2, loaded.batch_size, loaded.seed)
    totals = evaluate(again, loaded.task, batches, Forward.of(loaded))
    assert (totals.value("exact_match"), totals.value("token_accuracy")) == (1.0, 1.0)
    assert totals.sequences == 32
    assert totals.value("loss") < 1e-6


@pytest.mark.parametrize(("n_max", "ratio"), [(0, 1), (4, 0)])
def test_wrong_sizes_are_refused(n_max: int, ratio: int) -> None:
    with pytest.raises(
        InputError, match=f"n_max is {n_max} and ratio {ratio}: both must be at least 1"
    ):
        count3(n_max, ratio)


@pytest.mark.parametrize("ratio", [1, 4])
def test_float32_is_enough_for_64(ratio: int) -> None:
    """Scores are whole multiples of 30 below 2^24, which float32 holds exactly: O(log n) bits."""
    model = count3(64, ratio).float()
    rng = np.random.default_rng(7)
    for n in (16, 47, 64):
        x = rng.integers(0, 64 if ratio > 1 else n, (300, n))
        x[: n // 2] = np.arange(n // 2)[:, None]  # all equal: counts up to n²
        assert np.array_equal(answers(model, x), count3_next(x))


def test_answers_that_are_no_numbers_are_no_answers() -> None:
    """float16 ends at 65,504, which the weights go beyond."""
    x = np.random.default_rng(0).integers(0, 32, (64, 32))
    model = count3(32, 1)
    short = copy.deepcopy(model).to(torch.float16)
    logits = short(torch.from_numpy(x), mode="entp", at=[31])[:, 0]
    bad = ~logits.isfinite().all(-1)
    assert bad.any()
    assert (answers(short, x) == -1)[bad.numpy()].all()
    assert (answers(model, x) >= 0).all()
