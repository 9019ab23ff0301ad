"""Count3 in one layer: the two players' question, what a row hears, and the bound's numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import random_inputs, random_model

from entp import InputError
from entp.tasks.counting import count3_next
from entp.theory.lower_bounds import (
    common_ones,
    excluded_from,
    heard,
    histogram_layer,
    least_message,
    players,
    said,
    sequence,
)


def count3(x: np.ndarray) -> int:
    return int(count3_next(x[None])[0])


@pytest.mark.parametrize("m", range(6))
@pytest.mark.parametrize("more", [0, 1])
def test_count3_tells_what_the_players_have_in_common(m: int, more: int) -> None:
    for alpha, beta in itertools.product(itertools.product((0, 1), repeat=m), repeat=2):
        x = sequence(alpha, beta, 2 * m + 1 + more)
        assert common_ones(count3(x), x) == sum(a and b for a, b in zip(alpha, beta, strict=True))


@given(st.integers(1, 200), st.integers(0, 9), st.integers(0, 2**32), st.floats(0, 1))
def test_longer_ones_of_any_density(m: int, more: int, seed: int, density: float) -> None:
    alpha, beta = np.random.default_rng(seed).random((2, m)) < density
    x = sequence(alpha, beta, 2 * m + 1 + more)
    assert common_ones(count3(x), x) == (alpha & beta).sum()


def test_the_tokens_of_a_sequence() -> None:
    assert sequence([1, 0, 1], [1, 1, 0]).tolist() == [1, 0, 3, 6, 5, 0, 0]
    assert sequence([1], [1], 5).tolist() == [1, 4, 0, 0, 0]
    x = sequence([1, 1], [1, 1])
    assert x[-1] == 0  # public: the last row's query depends on neither player
    assert (x < len(x)).all()


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_bob_reads_every_bit_of_alice(m: int) -> None:
    """With one bit of his own set, the count is that bit of hers: what tells it, tells alpha."""
    alphas = list(itertools.product((0, 1), repeat=m))
    read = set()
    for alpha in alphas:
        xs = [sequence(alpha, one) for one in np.eye(m, dtype=int)]
        read.add(tuple(common_ones(count3(x), x) for x in xs))
    assert read == set(alphas)


def test_the_bound() -> None:
    assert [players(n) for n in (1, 2, 3, 4, 5, 64)] == [0, 0, 1, 1, 2, 31]
    assert [least_message(n) for n in (1, 3, 64, 4097)] == [0, 0, 26, 2036]
    bounds = [least_message(n) for n in range(1, 3000)]
    assert bounds == sorted(bounds)
    for n, bound in enumerate(bounds, 1):
        assert 2 ** (players(n) - bound) > players(n)  # enough to tell |alpha|, from 0 to m


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 8, 32), (3, 5, 16), (6, 64, 8)])
def test_a_layer_is_excluded_from_the_first_length_on(sizes: tuple[int, int, int]) -> None:
    heads, size, bits = sizes
    n = excluded_from(heads, size, bits)
    assert least_message(n) > heads * (size + 1) * bits >= least_message(n - 1)


def test_the_lengths_of_the_document() -> None:
    assert [excluded_from(*sizes) for sizes in ((2, 8, 64), (6, 64, 16), (6, 64, 32))] == [
        *(2329, 12509, 24991),
    ]


CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ONE_LAYER: list[dict[str, Any]] = [
    {"heads": 1},
    {"heads": 4, "norm": "none", "activation": "relu"},
    {"norm": "rms", "activation": "swiglu", "position_embedding": "rotary"},
    {"norm_placement": "post", "attention_scale": "one", "tied_head": False},
    {"input_dim": 3, "outputs": 3, "position_embedding": "given"},
]


@pytest.mark.parametrize("config", ONE_LAYER)
@pytest.mark.parametrize("n", [2, 3, 8, 31])
def test_a_row_hears_a_sum_of_what_the_players_say(config: dict[str, Any], n: int) -> None:
    model = random_model(n, layers=1, **config)
    x, m = random_inputs(model, 1, n)[0], players(n)
    parts = [heard(model, x, rows) for rows in (range(m), range(m, 2 * m), range(2 * m, n))]
    assert all(part.shape == (model.config.heads, 8 // model.config.heads + 1) for part in parts)
    total = parts[0] + parts[1] + parts[2]
    for mode in ("entp", "decoder"):
        torch.testing.assert_close(said(model, x, total), model(x[None], mode)[0, -1], **CLOSE)
    if m:  # only the three together
        assert (said(model, x, total - parts[0]) - said(model, x, total)).abs().max() > 1e-6


def test_what_is_heard_from_a_player_depends_on_no_other() -> None:
    model = random_model(layers=1)
    x = torch.arange(9)
    other = x.clone()
    other[4:8] = torch.tensor([0, 2, 1, 3])
    assert torch.equal(heard(model, x, range(4)), heard(model, other, range(4)))
    assert not torch.equal(heard(model, x, range(4, 8)), heard(model, other, range(4, 8)))


@pytest.mark.parametrize("n", [1, 2, 5, 32])
def test_n_numbers_are_enough(n: int) -> None:
    model = histogram_layer(n)
    assert model.config.width == n
    for seed in range(20):
        x = np.random.default_rng(seed).integers(0, n, n)
        (numbers,) = heard(model, torch.from_numpy(x), range(n))
        assert numbers.tolist() == [n, *np.bincount(x, minlength=n)]
        counts = numbers[1:].long().numpy()
        pairs = sum(counts[v] * counts[-(v + x[-1]) % n] for v in range(n))
        assert pairs % n == count3(x)


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="alpha has 2 bits and beta 1"):
        sequence([1, 0], [1])
    with pytest.raises(InputError, match="beta has other numbers than 0 and 1"):
        sequence([1, 0], [1, 2])
    with pytest.raises(InputError, match="n is 4: for 2 bits each it must be at least 5"):
        sequence([1, 0], [1, 1], 4)
    x = sequence([1, 0], [1, 1])
    with pytest.raises(InputError, match="0 is not Count3 of such a sequence of 5 with 2 zeros"):
        common_ones(0, x)  # 4 pairs of zeros and 2 others make 1 modulo 5
    with pytest.raises(InputError, match="n is 0"):
        least_message(0)
    with pytest.raises(InputError, match="size is 0"):
        excluded_from(1, 0, 8)
    y = torch.arange(5)
    for config, message in [
        ({}, "'layers': 2"),
        ({"layers": 1, "loops": 2}, "'loops': 2"),
        ({"layers": 1, "position_embedding": "relative"}, "relative positions or shared keys"),
        ({"layers": 1, "kv_heads": 1}, "relative positions or shared keys"),
    ]:
        with pytest.raises(InputError, match=message):
            heard(random_model(**config), y, range(5))
