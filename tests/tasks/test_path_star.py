"""The path-star task against a walk along the listed edges."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import entp
from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.errors import InputError
from entp.tasks.base import IGNORE, SPLITS
from entp.tasks.metrics import Predicted, Totals
from entp.tasks.path_star import PathStar
from entp.training.evaluate import evaluate_baseline

orders = {
    "edges": st.sampled_from(["shuffled", "arms"]),
    "query": st.sampled_from(["last", "first"]),
    "path": st.sampled_from(["forward", "backward"]),
}


def parts(task: PathStar, x: list[int]) -> tuple[list[tuple[int, int]], int, int, list[int]]:
    """Edges, centre, end and what follows."""
    prompt, rest = x[: task.prefix], x[task.prefix :]
    query, flat = (prompt[-2:], prompt[:-2])
    if task.query == "first":
        query, flat = prompt[:2], prompt[2:]
    edges = list(zip(flat[::2], flat[1::2], strict=True))
    return edges, query[0], query[1], rest


@given(st.integers(2, 4), st.integers(2, 5), st.integers(0, 3), st.integers(0, 99), st.data())
def test_answer_is_the_path(arms: int, length: int, spare: int, seed: int, data: Any) -> None:
    used = arms * (length - 1) + 1
    chosen = {name: data.draw(values) for name, values in orders.items()}
    task = PathStar(arms, length, used + spare, **chosen)
    batch = task.batch(seed, "train", 3, 4)
    assert task.model_needs() == {"vocab": used + spare, "context_length": batch.x.shape[1]}
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        edges, centre, end, rest = parts(task, x)
        before = {outer: inner for inner, outer in edges}
        assert len(before) == len(edges) == used - 1
        assert Counter(inner for inner, _ in edges)[centre] == arms
        back = [end]
        while back[-1] != centre:
            back.append(before[back[-1]])
        assert len(back) == length
        answer = back[1:] if task.path == "backward" else back[-2::-1]
        assert y == [IGNORE] * (task.prefix - 1) + answer
        assert rest == answer[:-1]


def test_docstrings_example_is_right() -> None:
    x = [6, 2, 0, 4, 4, 5, 0, 6, 0, 2, 6]
    task = PathStar(2, 3, 7)
    edges, centre, end, rest = parts(task, x)
    assert (centre, end, rest) == (0, 2, [6])
    assert set(edges) == {(0, 6), (6, 2), (0, 4), (4, 5)}


def test_edges_by_arms_go_from_the_centre_outwards() -> None:
    task = PathStar(3, 4, 12, edges="arms")
    for x in task.batch(0, "train", 0, 20).x.tolist():
        edges, centre, _, _ = parts(task, x)
        for at in range(0, 9, 3):
            assert edges[at][0] == centre
            assert [inner for inner, _ in edges[at + 1 : at + 3]] == [
                outer for _, outer in edges[at : at + 2]
            ]


def test_every_arm_and_edge_order_is_equally_likely() -> None:
    task = PathStar(3, 2, 4)
    x = task.batch(0, "train", 0, 6000).x
    listed = x[:, 1:6:2]
    place = np.argmax(listed == x[:, [7]], axis=1)
    counts = np.bincount(place, minlength=3) / 6000
    assert (np.abs(counts - 1 / 3) < 5 * math.sqrt(1 / 3 / 6000)).all()


def test_splits_differ() -> None:
    found = [PathStar().batch(0, split, 0, 64).x for split in SPLITS]  # type: ignore[arg-type]
    assert len({row.tobytes() for x in found for row in x}) == 3 * 64


def test_one_edge_guesses_the_arm_and_knows_the_rest() -> None:
    task = PathStar(4, 4, 20)
    batches = [task.batch(0, "test", n, 500) for n in range(4)]
    totals = evaluate_baseline(task, "one edge", batches)
    steps = totals.sliced("token_accuracy", "step")
    assert (steps["2"], steps["3"]) == (1.0, 1.0)
    assert abs(steps["1"] - 1 / 4) < 5 * math.sqrt(1 / 4 * 3 / 4 / 2000)
    assert totals.value("exact_match") == steps["1"]


@pytest.mark.parametrize("query", ["last", "first"])
def test_one_edge_is_right_on_the_way_back(query: Any) -> None:
    task = PathStar(4, 4, 20, query=query, path="backward")
    totals = evaluate_baseline(task, "one edge", [task.batch(0, "test", 0, 50)])
    assert totals.value("exact_match") == 1.0


def test_token_accuracy_is_sliced_by_steps() -> None:
    task = PathStar(2, 4, 10)
    batch = task.batch(0, "test", 0, 10)
    answer = batch.y.copy()
    answer[:4, task.prefix - 1] = 10  # the first step of four sequences is wrong
    got = Predicted(answer[batch.target_mask], np.zeros(30))
    totals = Totals.of(task.metrics, batch, task.measure(batch, got))
    assert totals.sliced("token_accuracy", "step") == {"1": 0.6, "2": 1.0, "3": 1.0}
    assert totals.value("exact_match") == 0.6


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"arms": 1}, r"task\.arms is 1 and task\.length 5: both must be at least 2"),
        ({"length": 1}, r"task\.length 1: both must be at least 2"),
        ({"nodes": 8}, r"task\.nodes is 8: a star of 2 arms with paths of 5 nodes has 9"),
        ({"edges": "sorted"}, r"unknown task\.edges 'sorted': allowed are shuffled, arms"),
        ({"path": "up"}, r"unknown task\.path 'up': allowed are forward, backward"),
    ],
)
def test_path_star_refuses(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        PathStar(**sizes)


def test_caveat_is_given_once_sequences_repeat() -> None:
    """Two arms of one node each: three labels in order, two orders of the edges, two ends, of which
    swapping the arms gives each twice."""
    task = PathStar(2, 2, 3)
    seen = {row.tobytes() for n in range(20) for row in task.batch(0, "train", n, 100).x}
    assert len(seen) == 12
    assert task.caveats(12) == []
    assert "only 12 different sequences" in task.caveats(13)[0]


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
def test_way_back_is_learned(mode: Any, tmp_path: Path) -> None:
    """On stars of two arms of one node the way back is the centre."""
    task = PathStar(2, 2, 3, path="backward")
    run = Run(
        task,
        model_for(task, "small", layers=1, heads=2, width=16),
        mode,
        steps=60,
        batch_size=32,
        optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=5, decay_steps=60),
        train=TrainConfig(eval_every=60, eval_batches=2, checkpoint_every=60),
    )
    result = entp.train(run, tmp_path, device="cpu", quiet=True)
    assert result.metrics["exact_match"] > 0.9
