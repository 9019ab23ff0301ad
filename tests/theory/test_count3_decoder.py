"""Count3 by decoders whose weights are set by hand: right after every row, at every size."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import entp
from entp.config import Run
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.counting import Count3, count3_next
from entp.theory.compiled import answers
from entp.theory.count3_decoder import BLOCKS, decoder, wrong_and_margin
from entp.theory.count3_narrow import narrow_decoder
from entp.training.checkpoint import load_run, save_model
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward


@pytest.fixture(scope="module")
def wide() -> Transformer:
    return decoder(64)


@pytest.fixture(scope="module")
def narrow() -> Transformer:
    return narrow_decoder(64)


def brute_force(x: tuple[int, ...]) -> int:
    n = len(x)
    return sum((a + b + x[-1]) % n == 0 for a in x for b in x) % n


def made_to_break_it(n: int) -> np.ndarray:
    """All equal (all zero: count = n², the largest), two in turn, rising, falling, one odd out."""
    row = np.arange(n)
    values = sorted({0, 1 % n, n // 2, n - 1})
    rows = [np.full(n, value) for value in values]
    rows += [np.where(row % 2, a, b) for a, b in itertools.permutations(values, 2)]
    rows += [row, row[::-1], np.sort(row * 7 % n), row // 2]
    rows += [np.where(row == odd, n - 1, 0) for odd in (0, n // 2, n - 1)]
    return np.array(rows)


def legal(x: np.ndarray) -> np.ndarray:
    """x with every prefix of n integers below n."""
    return np.minimum(x, np.arange(x.shape[1]))


def test_size_is_below_the_papers_medium_model(wide: Transformer) -> None:
    config, medium = wide.config, entp.SIZES["medium"]
    assert (config.layers, config.width, config.heads) == (BLOCKS, 384, 6) == (4, 384, 6)
    assert (medium["layers"], medium["width"]) == (6, 384)


def test_every_short_sequence() -> None:
    """All 3,905 sequences of at most 5 values below 5, so x >= n too."""
    model = decoder(5)
    for n in range(1, 6):
        x = list(itertools.product(range(5), repeat=n))
        assert answers(model, np.array(x), "decoder").tolist() == [brute_force(row) for row in x]


def test_random_sequences_of_every_length(wide: Transformer) -> None:
    """3,072 targets of values below 64, 1,024 of few values, 1,008 of the paper's own task."""
    rng = np.random.default_rng(0)
    free, few = rng.integers(0, 64, (48, 64)), rng.integers(0, 4, (16, 64))
    for x in (free, few, Count3().batch(0, "test", 0, 16).x):
        wrong, margin = wrong_and_margin(wide, x)
        assert wrong == 0
        assert margin > 58


def test_sequences_made_to_break_it(wide: Transformer) -> None:
    pairs = np.array(list(itertools.product(range(0, 64, 3), repeat=2)))
    for x in (made_to_break_it(64), pairs):
        assert wrong_and_margin(wide, x)[0] == 0


@pytest.mark.parametrize("n_max", [1, 2, 3, 7, 10, 16, 32])
def test_smaller_sizes(n_max: int) -> None:
    model = decoder(n_max)
    assert (model.config.layers, model.config.width) == (BLOCKS, max(12, 6 * n_max))
    x = np.random.default_rng(n_max).integers(0, n_max, (32, n_max))
    for rows in (x, made_to_break_it(n_max)):
        wrong, margin = wrong_and_margin(model, rows)
        assert wrong == 0
        assert margin > 58


def test_above_a_hundred_the_mlps_need_more_width() -> None:
    model = decoder(101)
    assert (model.config.layers, model.config.width) == (BLOCKS, 642)
    x = np.random.default_rng(1).integers(0, 101, (1, 101))
    assert wrong_and_margin(model, x)[0] == 0


def test_float32_is_enough(wide: Transformer) -> None:
    model = copy.deepcopy(wide).float()
    x = np.random.default_rng(2).integers(0, 64, (48, 64))
    for rows in (x, made_to_break_it(64)):
        wrong, margin = wrong_and_margin(model, rows)
        assert wrong == 0
        assert margin > 40


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_block_can_be_left_out(block: int) -> None:
    """The check sees errors, and every block is needed."""
    model = decoder(16)
    with torch.no_grad():
        for parameter in model.blocks[block].parameters():
            parameter.zero_()
    wrong, margin = wrong_and_margin(model, np.random.default_rng(3).integers(0, 16, (32, 16)))
    assert wrong > 200
    assert margin < 0


def test_it_continues_sequences(wide: Transformer) -> None:
    task = Count3()
    seeds = np.random.default_rng(4).integers(0, 64, (8, 16))
    want = task.extend(seeds)
    got = entp.generate(wide, torch.from_numpy(seeds), 48, "decoder")
    assert np.array_equal(got.numpy(), want)
    again = entp.generate(wide, torch.from_numpy(seeds[:1]), 48, "decoder", cache=False)
    assert np.array_equal(again.numpy(), want[:1])


def test_full_attention_is_another_function(wide: Transformer) -> None:
    """These weights are a decoder's: read as an encoder, rows count what comes after them."""
    x = np.random.default_rng(5).integers(0, 64, (32, 24))
    assert (answers(wide, x, "entp") == count3_next(x)).mean() < 0.5
    assert np.array_equal(answers(wide, x, "decoder"), count3_next(x))


def test_saved_and_loaded_like_any_checkpoint(tmp_path: Path) -> None:
    model = decoder(24)
    task = Count3(prompt_length=6, length=24, num_values=24)
    folder = save_model(model, tmp_path / "c", Run(task, model.config, "decoder", batch_size=16))
    loaded = load_run(folder)
    batches = split_batches(loaded.task, "test", 2, loaded.batch_size, loaded.seed)
    totals = evaluate(entp.load(folder), loaded.task, batches, Forward.of(loaded))
    assert (totals.value("exact_match"), totals.sequences) == (1.0, 32)
    assert totals.value("loss") < 1e-6


@pytest.mark.parametrize("values", [1, 2, 5])
def test_narrow_ones_on_every_short_sequence(values: int) -> None:
    """All 3,413 sequences with x < n <= 5."""
    model = narrow_decoder(5, values)
    for n in range(1, 6):
        x = list(itertools.product(range(n), repeat=n))
        assert answers(model, np.array(x), "decoder").tolist() == [brute_force(row) for row in x]


def test_narrow_ones_keep_their_width() -> None:
    """n + 3 blocks of width 18: L D = O(n) at a fixed D; also ceil(n / s) + 3 of about 7 s + 9."""
    for n_max in (1, 2, 16, 33):
        model = narrow_decoder(n_max)
        assert (model.config.layers, model.config.width) == (n_max + 3, 18)
        x = np.random.default_rng(n_max).integers(0, n_max, (16, n_max))
        assert wrong_and_margin(model, legal(x))[0] == 0
        assert np.array_equal(answers(model, x, "decoder"), count3_next(x))
    for values, layers, width in ((2, 35, 24), (4, 19, 39), (16, 7, 123)):
        model = narrow_decoder(64, values)
        assert (model.config.layers, model.config.width) == (layers, width)
        x = np.random.default_rng(values).integers(0, 64, (8, 64))
        assert wrong_and_margin(model, legal(x))[0] == 0


def test_the_narrow_one_of_67_blocks(narrow: Transformer) -> None:
    rng = np.random.default_rng(6)
    rows = np.concatenate([rng.integers(0, 64, (32, 64)), made_to_break_it(64)])
    wrong, margin = wrong_and_margin(narrow, legal(rows))
    assert wrong == 0
    assert margin > 59
    assert np.array_equal(answers(narrow, rows, "decoder"), count3_next(rows))
    seeds = np.zeros((2, 2), dtype=int)
    seeds[1, 1] = 1
    task = Count3(prompt_length=2, num_values=2)
    got = entp.generate(narrow, torch.from_numpy(seeds), 62, "decoder")
    assert np.array_equal(got.numpy(), task.extend(seeds))


def test_larger_values_are_not_for_the_narrow_ones(narrow: Transformer) -> None:
    x = np.random.default_rng(7).integers(16, 64, (64, 16))
    assert (answers(narrow, x, "decoder") == count3_next(x)).mean() < 0.5


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="n_max is 0: it must be at least 1"):
        decoder(0)
    for n_max, values in ((0, 1), (4, 0), (4, 5)):
        with pytest.raises(InputError, match=f"n_max is {n_max} and values {values}: n_max must"):
            narrow_decoder(n_max, values)
