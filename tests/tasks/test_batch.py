"""A batch: its types and shapes, its targets one by one, and its parts for several processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entp.errors import InputError
from entp.tasks.base import IGNORE, Batch


@st.composite
def batches(draw: Any, most_rows: int = 6) -> Batch:
    """Any batch, with all that is optional or without."""
    rows, time = draw(st.integers(1, most_rows)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    y = rng.integers(0, 9, (rows, time))
    y[rng.random((rows, time)) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = IGNORE
    more: dict[str, np.ndarray] = {
        "lengths": rng.integers(1, time + 1, rows),
        "position_ids": rng.integers(0, 9, (rows, time)),
        "loss_weights": rng.random((rows, time)),
        "note": np.arange(rows) + 100,
    }
    kept = {name: value for name, value in more.items() if draw(st.booleans())}
    return Batch(np.arange(rows * time).reshape(rows, time), y, **kept)


@pytest.mark.parametrize("kind", [np.int16, np.uint8, np.int64, bool])
def test_whole_numbers_become_int64(kind: Any) -> None:
    ones = np.ones((2, 3), dtype=kind)
    batch = Batch(ones, ones, lengths=ones[:, 0], position_ids=ones)
    arrays = (batch.x, batch.y, batch.lengths, batch.position_ids)
    assert {array.dtype for array in arrays if array is not None} == {np.dtype(np.int64)}


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_other_numbers_become_float32(kind: Any) -> None:
    batch = Batch(
        np.ones((2, 3, 4), kind), np.ones((2, 3), kind), loss_weights=np.ones((2, 3), kind)
    )
    assert batch.loss_weights is not None
    assert {batch.x.dtype, batch.y.dtype, batch.loss_weights.dtype} == {np.dtype(np.float32)}


def test_whole_weights_become_float32() -> None:
    batch = Batch(np.ones((1, 2)), np.ones((1, 2)), loss_weights=np.array([[1, 2]]))
    assert batch.loss_weights is not None
    assert batch.loss_weights.dtype == np.float32


@pytest.mark.parametrize("value", [torch.ones(2, 3), [[1, 1, 1], [1, 1, 1]]])
def test_what_is_no_array_is_named(value: Any) -> None:
    ones = np.ones((2, 3))
    with pytest.raises(InputError, match=r"has y of type (Tensor|list): give numpy arrays"):
        Batch(ones, value)


def test_arrays_lie_in_memory_as_torch_reads_it() -> None:
    turned = np.arange(6).reshape(3, 2).T
    batch = Batch(turned, turned[:, ::-1])
    assert batch.x.flags.c_contiguous
    assert batch.y.flags.c_contiguous
    assert batch.y.tolist() == [[4, 2, 0], [5, 3, 1]]


@pytest.mark.parametrize("name", ["lengths", "position_ids"])
def test_positions_and_lengths_must_be_whole(name: str) -> None:
    value = np.ones((2, 3)) if name == "position_ids" else np.ones(2)
    with pytest.raises(InputError, match=f"{name} of type float64: they must be whole numbers"):
        Batch(np.ones((2, 3), int), np.ones((2, 3), int), **{name: value})


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"x": (3,), "y": (3,)}, r"x of shape \(3,\)"),
        ({"x": (2, 3, 4, 5), "y": (2, 3)}, r"x of shape \(2, 3, 4, 5\)"),
        ({"x": (2, 3), "y": (2, 4)}, r"y of \(2, 4\)"),
        ({"x": (2, 3, 4), "y": (2, 3, 4)}, r"y of \(2, 3, 4\)"),
        ({"x": (2, 3), "y": (2, 3), "lengths": (3,)}, r"lengths of shape \(3,\).* be \(2,\)"),
        ({"x": (2, 3), "y": (2, 3), "position_ids": (2,)}, "position_ids of shape"),
        ({"x": (2, 3, 4), "y": (2, 3), "loss_weights": (2, 3, 4)}, "loss_weights of shape"),
        ({"x": (2, 3), "y": (2, 3), "note": (2, 3)}, "note of shape"),
    ],
)
def test_wrong_shapes_are_refused(arrays: dict[str, tuple[int, ...]], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Batch(**{name: np.ones(shape, int) for name, shape in arrays.items()})


@given(batches())
def test_targets_are_listed_sequence_by_sequence(batch: Batch) -> None:
    places = [
        (row, position)
        for row, targets in enumerate(batch.y.tolist())
        for position, target in enumerate(targets)
        if target != IGNORE
    ]
    assert [*zip(batch.row.tolist(), batch.position.tolist(), strict=True)] == places
    assert batch.targets.tolist() == [int(batch.y[place]) for place in places]
    assert [*zip(*batch.target_mask.nonzero(), strict=True)] == places
    weights = np.ones_like(batch.y) if batch.loss_weights is None else batch.loss_weights
    assert batch.weight_sum == pytest.approx(sum(float(weights[place]) for place in places))


@given(batches(9), st.integers(1, 6))
def test_parts_partition_the_batch(batch: Batch, world: int) -> None:
    parts = [batch.part(rank, world) for rank in range(world)]
    sizes = [len(part.x) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for name in ("x", "y", "lengths", "position_ids", "loss_weights", "note"):
        whole = getattr(batch, name)
        for rank, part in enumerate(parts):
            mine = getattr(part, name)
            assert (mine is None) == (whole is None)
            if whole is not None:
                assert np.array_equal(mine, whole[rank::world])
    assert sum(len(part.targets) for part in parts) == len(batch.targets)
    assert sum(part.weight_sum for part in parts) == pytest.approx(batch.weight_sum)
