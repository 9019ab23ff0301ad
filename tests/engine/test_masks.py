"""Masks against their definition, the drawings of the modes, and attention against softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entp import InputError
from entp.engine.masks import attend, draw, visible

batches = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 9)), min_size=1, max_size=3)


def sees(mode: str, query: int, key: int, prefix: int, length: int) -> bool:
    """Whether `query` may read `key`: not padding, and not later, unless both are in the prefix."""
    both_in_prefix = mode == "prefix-lm" and query < prefix and key < prefix
    return key < length and (key <= query or both_in_prefix)


@given(st.sampled_from(["decoder", "prefix-lm"]), st.integers(1, 9), batches, st.booleans())
def test_visible_by_brute_force(
    mode: str, time: int, rows: list[tuple[int, int]], padded: bool
) -> None:
    prefix = torch.tensor([p for p, _ in rows])
    lengths = torch.tensor([min(n, time) for _, n in rows])
    mask = visible(mode, time, prefix=prefix, lengths=lengths if padded else None)
    mask = mask.expand(len(rows), -1, -1)
    assert mask.dtype == torch.bool
    for b in range(len(rows)):
        for query in range(time):
            for key in range(time):
                expected = sees(
                    mode, query, key, int(prefix[b]), int(lengths[b]) if padded else time
                )
                assert bool(mask[b, query, key]) == expected


@pytest.mark.parametrize("prefix", [1, 3, 5, 9])
def test_prefix_as_one_number(prefix: int) -> None:
    mask = visible("prefix-lm", 5, prefix=prefix)
    assert mask.shape == (1, 5, 5)
    assert mask[0].tolist() == [
        [sees("prefix-lm", q, k, prefix, 5) for k in range(5)] for q in range(5)
    ]


def test_mode_prefix_needs_a_prefix() -> None:
    with pytest.raises(InputError, match="mode prefix-lm needs prefix="):
        visible("prefix-lm", 4)
    for prefix in (0, -1, torch.tensor([2, 0])):
        with pytest.raises(InputError, match="prefix must be at least 1 token"):
            visible("prefix-lm", 4, prefix=prefix)


def test_unknown_mode() -> None:
    with pytest.raises(InputError, match=r"unknown mode 'decodr'.*Did you mean decoder"):
        visible("decodr", 4)
    with pytest.raises(InputError, match=r"unknown mode 'enpt'.*Did you mean entp"):
        draw("enpt")


def test_draw_decoder() -> None:
    assert draw("decoder", 3) == "# . .\n# # .\n# # #"


def test_draw_prefix() -> None:
    assert draw("prefix-lm", 4, prefix=2) == "# # . .\n# # . .\n# # # .\n# # # #"


def test_draw_entp_one_square_per_prediction() -> None:
    assert draw("entp", 4).splitlines() == [
        "# # . .   # # # .   # # # #",
        "# # . .   # # # .   # # # #",
        ". . . .   # # # .   # # # #",
        ". . . .   . . . .   # # # #",
    ]
    assert draw("entp", 1) == "#"


@pytest.mark.parametrize("mode", ["decoder", "prefix-lm", "entp"])
def test_draw_has_one_line_per_query(mode: str) -> None:
    assert len(draw(mode).splitlines()) == 8


def explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor
) -> torch.Tensor:
    """softmax(scale q k^T) v, written out."""
    weights = torch.exp(torch.einsum("bhqd,bhkd->bhqk", q, k) * scale) * mask
    return torch.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdim=True), v)


@given(
    st.integers(0, 1000),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from([1.0, 0.25, 2.0]),
)
def test_attend_is_softmax(seed: int, heads: int, queries: int, keys: int, scale: float) -> None:
    torch.manual_seed(seed)
    q = torch.randn(2, heads, queries, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, heads, keys, 4, dtype=torch.float64)
    full = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    some = torch.rand(2, 1, queries, keys) < 0.5
    some[..., 0] = True  # every query sees something
    torch.testing.assert_close(
        attend(q, k, v, scale=scale), explicit(q, k, v, scale, full), rtol=1e-11, atol=1e-13
    )
    torch.testing.assert_close(
        attend(q, k, v, scale=scale, mask=some),
        explicit(q, k, v, scale, some),
        rtol=1e-11,
        atol=1e-13,
    )


@pytest.mark.parametrize("time", [1, 2, 7])
def test_attend_causal_is_the_decoder_mask(time: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, time, 4, dtype=torch.float64)
    expected = explicit(q, k, v, 0.5, visible("decoder", time)[:, None])
    torch.testing.assert_close(
        attend(q, k, v, scale=0.5, causal=True), expected, rtol=1e-11, atol=1e-13
    )
