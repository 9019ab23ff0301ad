"""Pointer chasing: a table of pointers, then queries that follow ever more of them.

A node of the table can look ahead only with full attention, so that pointers double in every layer;
under a causal mask they cannot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems
from entp.tasks.base import IGNORE, Baseline, Batch, Split, Task, few_sequences
from entp.tasks.metrics import EXACT_MATCH, LOSS, TOKEN_ACCURACY, Metric, Predicted


@dataclass(frozen=True)
class Chase(Task):
    """A table f(0..N-1), then K queries; the answer to the k-th query q is f applied k times to q.

    input    2 3 1 0 | 1 0          N = 4, K = 2
    target   . . . . | 3 1          f(1) = 3, f(f(0)) = 1
    """

    name: ClassVar[str] = "chase"
    about: ClassVar[str] = (
        "follow 1, 2, ... K pointers of a table (full attention doubles hops per layer)"
    )

    nodes: int = 32
    """Entries of the table, N."""
    hops: int = 16
    """Queries after the table, K; the k-th follows k pointers."""
    table: Literal["cycle", "function"] = "cycle"
    """cycle: one random cycle through all nodes. function: any function, uniformly."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        raise_problems(choice_problems(self, "task."))
        if self.nodes < 2 or self.hops < 1:
            raise InputError(
                f"task.nodes {self.nodes} must be at least 2 and task.hops {self.hops} at least 1."
            )
        if self.table == "cycle" and self.hops > self.nodes // 2:
            raise InputError(
                f"task.hops is {self.hops}: on a cycle of {self.nodes} nodes at most "
                f"{self.nodes // 2}, because k hops on are {self.nodes} - k hops back."
            )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return EXACT_MATCH, replace(TOKEN_ACCURACY, slices=("hops",)), LOSS

    def token_slices(self, batch: Batch) -> dict[str, np.ndarray]:
        return {"hops": batch.position - self.nodes + 1}

    def baselines(self) -> dict[str, Baseline]:
        return {"one hop": self._one_hop}

    def _one_hop(self, batch: Batch) -> Predicted:
        """Follow a single pointer from each query, whatever its number."""
        queries = batch.x[batch.row, batch.position]
        return Predicted(batch.x[batch.row, queries], None)

    def caveats(self, sequences_read: int) -> list[str]:
        tables = self.nodes**self.nodes
        if self.table == "cycle":
            tables = math.factorial(self.nodes - 1)
        there = tables * self.nodes**self.hops
        return few_sequences(there, sequences_read, f"{self.nodes + self.hops} nodes")

    @property
    def prefix(self) -> int:
        """The table is the prefix of mode `prefix-lm`."""
        return self.nodes

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": self.nodes, "context_length": self.nodes + self.hops}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        table = self._tables(rng, size)
        queries = rng.integers(0, self.nodes, (size, self.hops))
        x = np.concatenate([table, queries], axis=1)
        y = np.full_like(x, IGNORE)
        y[:, self.nodes :] = self.answers(table, queries)
        return Batch(x, y)

    def _tables(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """(size, nodes) what each node points to."""
        if self.table == "function":
            return rng.integers(0, self.nodes, (size, self.nodes))
        order = rng.permuted(np.tile(np.arange(self.nodes), (size, 1)), axis=1)
        table = np.empty_like(order)
        np.put_along_axis(table, order, np.roll(order, -1, axis=1), axis=1)
        return table

    def answers(self, table: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """(size, hops) the node that the k-th query reaches after k hops."""
        reached = queries
        answers = np.empty_like(queries)
        for k in range(self.hops):
            reached = np.take_along_axis(table, reached, axis=1)
            answers[:, k] = reached[:, k]
        return answers
