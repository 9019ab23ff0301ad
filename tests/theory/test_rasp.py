"""RASP's operations by hand, against loops over their definitions, and what a mask promises."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entp import InputError
from entp.theory.rasp import MASKS, Rasp, equals, exact, true

X = [7, 7, 5, 7]
masks = pytest.mark.parametrize("mask", MASKS)
sequences = st.lists(st.integers(-5, 5), min_size=1, max_size=12)


def x() -> np.ndarray:
    return exact(X)


def at_most(key: int, query: int) -> bool:
    return key <= query


@pytest.mark.parametrize("mask", ["decoder", "", "Causal", None])
def test_unknown_mask(mask: Any) -> None:
    with pytest.raises(InputError, match=r"unknown mask .*: allowed are encoder, causal"):
        Rasp(mask)


@masks
def test_operations_without_attention(mask: str) -> None:
    r = Rasp(mask)
    assert r.full(x(), 3).tolist() == [3, 3, 3, 3]
    assert r.indices(x()).tolist() == [0, 1, 2, 3]
    assert r.tok_map(x(), lambda a: 2 * a).tolist() == [14, 14, 10, 14]
    assert r.seq_map(x(), r.indices(x()), lambda a, b: a - b).tolist() == [7, 6, 3, 4]


def test_select_is_query_by_key() -> None:
    whole = [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 1]]
    causal = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]]
    for mask, expected in [("encoder", whole), ("causal", causal)]:
        selector = Rasp(mask).select(k=x(), q=x(), pred=equals)
        assert selector.dtype == bool
        assert selector.astype(int).tolist() == expected
        assert Rasp(mask).sel_width(selector).tolist() == np.sum(expected, axis=1).tolist()
    assert (
        Rasp("encoder").select(k=exact([0, 9]), q=exact([5, 5]), pred=at_most).tolist()
        == [[True, False]] * 2
    )


def test_means_are_exact() -> None:
    r = Rasp("causal")
    mean = r.kqv(k=x(), q=x(), v=x(), pred=true)
    assert mean.tolist() == [7, 7, Fraction(19, 3), Fraction(13, 2)]
    assert [type(v) for v in mean] == [int, int, Fraction, Fraction]
    assert (
        r.kqv(k=x(), q=x(), v=mean, pred=true)[3] == (7 + 7 + Fraction(19, 3) + Fraction(13, 2)) / 4
    )


def test_large_values_do_not_overflow() -> None:
    r, big = Rasp("encoder"), np.array([2**62, 2**62 + 2])
    assert r.kqv(k=big, q=big, v=big, pred=true).tolist() == [2**62 + 1] * 2
    assert (exact(big) * 4).tolist() == [2**64, 2**64 + 8]


@masks
def test_default_where_nothing_is_selected(mask: str) -> None:
    r = Rasp(mask)
    for reduction in ("mean", "max", "min"):
        arguments = {
            "k": x(),
            "q": r.full(x(), 5),
            "v": x() - 9,
            "pred": equals,
            "reduction": reduction,
        }
        none = 0 if mask == "encoder" else 2  # before the 5 itself
        assert r.kqv(**arguments).tolist() == [0] * none + [-4] * (4 - none)
        assert r.kqv(**arguments, default=-2).tolist() == [-2] * none + [-4] * (4 - none)
        assert r.aggr(np.zeros((4, 4), dtype=bool), x(), reduction, default=6).tolist() == [6] * 4


@masks
@given(
    sequences,
    st.sampled_from([equals, true, at_most]),
    st.sampled_from(["mean", "max", "min"]),
    st.data(),
)
def test_attention_is_its_definition(
    mask: str, keys: list[int], pred: Any, reduction: str, data: st.DataObject
) -> None:
    same = st.lists(st.integers(-5, 5), min_size=len(keys), max_size=len(keys))
    queries, values = data.draw(same), data.draw(same)
    r = Rasp(mask)
    out = r.kqv(np.array(keys), np.array(queries), np.array(values), pred, reduction, default=-100)
    width = r.sel_width(r.select(np.array(keys), np.array(queries), pred))
    for i, query in enumerate(queries):
        seen = range(i + 1 if mask == "causal" else len(keys))
        chosen = [values[j] for j in seen if pred(keys[j], query)]
        by_hand = {"mean": lambda v: Fraction(sum(v), len(v)), "max": max, "min": min}[reduction]
        assert out[i] == (by_hand(chosen) if chosen else -100)
        assert width[i] == len(chosen)


@given(sequences)
def test_exact_keeps_values_and_makes_them_python_s(values: list[int]) -> None:
    for given_as in (
        values,
        np.array(values),
        [np.int32(v) for v in values],
        [Fraction(v) for v in values],
    ):
        out = exact(given_as)
        assert out.tolist() == values
        assert all(type(v) is int for v in out)
    assert [type(v) for v in exact([True, np.bool_(False)])] == [int, int]


@pytest.mark.parametrize("values", [[1.5], [1, 2.0], ["a"], [None], [[1], [2, 3]]])
def test_only_exact_values(values: list[Any]) -> None:
    with pytest.raises(InputError, match="holds whole numbers or fractions: got"):
        exact(values)


@pytest.mark.parametrize(("values", "dimensions"), [(3, 0), ([[1, 2], [3, 4]], 2)])
def test_sequences_have_one_dimension(values: Any, dimensions: int) -> None:
    with pytest.raises(InputError, match=f"has one dimension: got {dimensions}"):
        exact(values)


def test_steps_that_round_are_refused() -> None:
    r = Rasp("encoder")
    for step in (
        lambda: r.tok_map(x(), lambda a: a / 2),
        lambda: r.kqv(k=x(), q=x(), v=x() * 0.5, pred=true),
    ):
        with pytest.raises(InputError, match="whole numbers or fractions"):
            step()


def test_unknown_reduction_and_unequal_lengths() -> None:
    r = Rasp("causal")
    with pytest.raises(InputError, match=r"unknown reduction 'sum': allowed are mean, max, min"):
        r.kqv(k=x(), q=x(), v=x(), pred=true, reduction="sum")
    with pytest.raises(InputError, match=r"of one sequence: got 4 and 3"):
        r.select(k=x(), q=x()[:3], pred=true)


def test_note_keeps_values_in_order_and_gives_them_back() -> None:
    r = Rasp("encoder")
    assert r.named == {}
    assert r.note("width", r.full(x(), 4)).tolist() == [4] * 4
    is_seven = x() == 7
    assert r.note("is_seven", is_seven) is is_seven
    assert list(r.named) == ["width", "is_seven"]
    assert r.named["is_seven"].tolist() == [1, 1, 0, 1]
    assert Rasp("encoder").named == {}
