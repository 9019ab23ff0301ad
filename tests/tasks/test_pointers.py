"""Pointer chasing against a walk along the pointers, one by one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import entp
from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.config.json import run_from_json, run_to_json
from entp.errors import InputError
from entp.tasks.base import IGNORE, SPLITS
from entp.tasks.metrics import Predicted, Totals
from entp.tasks.pointers import Chase
from entp.training.evaluate import evaluate_baseline


def walk(table: list[int], node: int, hops: int) -> int:
    """f applied `hops` times."""
    for _ in range(hops):
        node = table[node]
    return node


def is_cycle(table: list[int]) -> bool:
    """Whether the pointers go once through all nodes and back."""
    seen = {walk(table, 0, hops) for hops in range(len(table))}
    return seen == set(range(len(table))) and walk(table, 0, len(table)) == 0


@given(st.integers(2, 9), st.data(), st.sampled_from(["cycle", "function"]), st.integers(0, 99))
def test_answers_follow_the_pointers(nodes: int, data: Any, table: Any, seed: int) -> None:
    hops = data.draw(st.integers(1, nodes // 2 if table == "cycle" else 6))
    task = Chase(nodes, hops, table)
    batch = task.batch(seed, "train", 3, 4)
    assert batch.x.shape == batch.y.shape == (4, nodes + hops)
    assert task.model_needs() == {"vocab": nodes, "context_length": nodes + hops}
    assert 0 <= batch.x.min() <= batch.x.max() < nodes
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        assert y[:nodes] == [IGNORE] * nodes
        asked = enumerate(x[nodes:], 1)
        assert y[nodes:] == [walk(x[:nodes], query, hop) for hop, query in asked]


def test_docstrings_example_is_right() -> None:
    task = Chase(4, 2)
    assert task.answers(np.array([[2, 3, 1, 0]]), np.array([[1, 0]])).tolist() == [[3, 1]]


@given(st.integers(2, 12), st.integers(0, 99))
def test_cycle_goes_once_through_all_nodes(nodes: int, seed: int) -> None:
    for x in Chase(nodes, 1).batch(seed, "train", 0, 5).x.tolist():
        assert is_cycle(x[:nodes])


def test_all_cycles_are_equally_likely() -> None:
    tables, counts = np.unique(
        Chase(4, 1).batch(0, "train", 0, 6000).x[:, :4], axis=0, return_counts=True
    )
    assert len(tables) == 6
    assert (np.abs(counts / 6000 - 1 / 6) < 5 * np.sqrt(1 / 6 / 6000)).all()


def test_all_functions_are_equally_likely() -> None:
    tables, counts = np.unique(
        Chase(3, 2, "function").batch(0, "train", 0, 27_000).x[:, :3], axis=0, return_counts=True
    )
    assert tables.tolist() == [list(table) for table in itertools.product(range(3), repeat=3)]
    assert (np.abs(counts / 27_000 - 1 / 27) < 5 * np.sqrt(1 / 27 / 27_000)).all()


def test_splits_differ() -> None:
    task = Chase()
    found = [task.batch(0, split, 0, 64).x for split in SPLITS]  # type: ignore[arg-type]
    rows = {row.tobytes() for x in found for row in x}
    assert len(rows) == 3 * 64


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"nodes": 1}, r"task\.nodes 1 must be at least 2"),
        ({"hops": 0}, r"task\.hops 0 at least 1"),
        ({"hops": 17}, r"task\.hops is 17: on a cycle of 32 nodes at most 16"),
        ({"nodes": 5, "hops": 3}, r"task\.hops is 3: on a cycle of 5 nodes at most 2"),
        ({"table": "tree"}, r"unknown task\.table 'tree': allowed are cycle, function"),
        ({"nodes": 2.5}, r"task\.nodes is 2\.5: it must be a whole number"),
    ],
)
def test_chase_refuses(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Chase(**sizes)


def test_function_may_be_followed_further_than_a_cycle() -> None:
    assert Chase(4, 9, "function").hops == 9


@pytest.mark.parametrize(
    ("task", "there"), [(Chase(4, 2), 6 * 16), (Chase(3, 2, "function"), 27 * 9)]
)
def test_caveat_is_given_once_sequences_repeat(task: Chase, there: int) -> None:
    """There are as many as tables and queries together."""
    tables = [[*t] for t in itertools.product(range(task.nodes), repeat=task.nodes)]
    if task.table == "cycle":
        tables = [t for t in tables if is_cycle(t)]
    assert len(tables) * task.nodes**task.hops == there
    assert task.caveats(there) == []
    (caveat,) = task.caveats(there + 1)
    assert f"only {there:,} different sequences of {task.nodes + task.hops} nodes" in caveat


def test_one_hop_baseline_answers_the_first_query_only() -> None:
    """On a cycle, one pointer is right after one hop and wrong after 2 to N/2."""
    task = Chase(8, 4)
    totals = evaluate_baseline(task, "one hop", [task.batch(0, "test", n, 32) for n in range(2)])
    assert totals.sliced("token_accuracy", "hops") == {"1": 1.0, "2": 0.0, "3": 0.0, "4": 0.0}
    assert totals.values() == {"exact_match": 0.0, "token_accuracy": 0.25, "n": 64}
    one = Chase(8, 1)
    totals = evaluate_baseline(one, "one hop", [one.batch(0, "test", 0, 16)])
    assert totals.value("exact_match") == 1.0
    with pytest.raises(InputError, match="unknown baseline of chase 'two hops'"):
        evaluate_baseline(task, "two hops", [])


def test_token_accuracy_is_sliced_by_hops() -> None:
    task = Chase(8, 3)
    batch = task.batch(0, "test", 0, 10)
    answer = batch.y.copy()
    answer[:4, -1] = 8  # the third answer of four sequences is wrong
    got = Predicted(answer[batch.target_mask], np.zeros(30))
    totals = Totals.of(task.metrics, batch, task.measure(batch, got))
    assert totals.sliced("token_accuracy", "hops") == {"1": 1.0, "2": 1.0, "3": 0.6}
    assert totals.values() == {
        "exact_match": 0.6,
        "token_accuracy": pytest.approx(26 / 30),
        "loss": 0.0,
        "n": 10,
    }


def chase_run(**changes: Any) -> Run:
    task = Chase(2, 2, "function")
    config: dict[str, Any] = {
        "task": task,
        "model": model_for(task, "small", layers=2, heads=2, width=16),
        "steps": 40,
        "batch_size": 16,
        "optim": OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=5, decay_steps=80),
        "train": TrainConfig(eval_every=40, eval_batches=1, checkpoint_every=40),
    }
    return Run(**{**config, **changes})


def test_prefix_is_the_table() -> None:
    """In mode prefix-lm the nodes of the table see each other, and queries only what is before."""
    task = Chase(4, 2)
    assert task.prefix == 4
    torch.manual_seed(0)
    model = entp.Transformer(model_for(task, "small", layers=1, heads=2, width=16)).double()
    x = torch.from_numpy(task.batch(0, "train", 0, 1).x)

    @torch.no_grad()
    def moved(position: int) -> list[bool]:
        """Which outputs change with the token at a position."""
        other = x.clone()
        other[0, position] = (x[0, position] + 1) % 4
        outputs = (model(tokens, "prefix-lm", prefix=task.prefix)[0] for tokens in (x, other))
        return [not torch.equal(a, b) for a, b in zip(*outputs, strict=True)]

    assert moved(3) == [True] * 6  # the last entry of the table
    assert moved(4) == [False] * 4 + [True] * 2
    assert moved(5) == [False] * 5 + [True]


def test_run_of_chase_survives_json() -> None:
    run = chase_run(mode="prefix-lm")
    assert run_from_json(run_to_json(run)) == run


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
def test_training_lowers_the_loss(mode: Any, tmp_path: Path) -> None:
    """Below that of a guess between two nodes."""
    result = entp.train(chase_run(mode=mode), tmp_path, device="cpu", quiet=True)
    assert result.metrics["loss"] < 0.8 * np.log(2)
