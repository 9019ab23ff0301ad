"""The path-star task: a star of several arms as a list of edges, a node at an arm's end, and the
question which way leads there.

Only the first step needs looking ahead: the others follow one edge each from the node before, which
teacher forcing shows. Decoders that learn by it are said to stay at guessing the arm (Bachmann and
Nagarajan 2024, arXiv:2403.06963), and some encoders to learn it (Frydenlund 2024,
arXiv:2410.13779); so do decoders with other supervision (arXiv:2503.10542).
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
class PathStar(Task):
    """Edges of a star, its centre and an arm's end; the answer is the way from one to the other.

    input    6 2  0 4  4 5  0 6 | 0 2 | 6      two arms, 0 6 2 and 0 4 5; from 0 to 2
    target   .  .  .  .  .  .  .  . . 6   2
    """

    name: ClassVar[str] = "path-star"
    about: ClassVar[str] = (
        "find the arm of a star that ends in a node (only the first step is hard)"
    )

    arms: int = 2
    """Arms of the star."""
    length: int = 5
    """Nodes of a path, the centre included."""
    nodes: int = 20
    """Labels of nodes, from which those of a star are drawn."""
    edges: Literal["shuffled", "arms"] = "shuffled"
    """shuffled: in random order. arms: from the centre outwards, arm by arm."""
    query: Literal["last", "first"] = "last"
    """Whether centre and end stand after the edges or before them."""
    path: Literal["forward", "backward"] = "forward"
    """forward: from the centre to the end. backward: from the end to the centre, where every step
    follows one edge: the control."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        raise_problems(choice_problems(self, "task."))
        if self.arms < 2 or self.length < 2:
            raise InputError(
                f"task.arms is {self.arms} and task.length {self.length}: both must be at least 2."
            )
        if self.nodes < self._used:
            raise InputError(
                f"task.nodes is {self.nodes}: a star of {self.arms} arms with paths of "
                f"{self.length} nodes has {self._used}."
            )

    @property
    def _used(self) -> int:
        """Nodes of a star."""
        return self.arms * (self.length - 1) + 1

    @property
    def prefix(self) -> int:
        """Edges and query: the prefix of mode `prefix-lm`."""
        return 2 * self.arms * (self.length - 1) + 2

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return EXACT_MATCH, replace(TOKEN_ACCURACY, slices=("step",)), LOSS

    def token_slices(self, batch: Batch) -> dict[str, np.ndarray]:
        return {"step": batch.position - self.prefix + 2}

    def baselines(self) -> dict[str, Baseline]:
        return {"one edge": self._one_edge}

    def _one_edge(self, batch: Batch) -> Predicted:
        """Follow an edge from each node before, the first that is listed: right wherever there is
        but one."""
        start = 2 if self.query == "first" else 0
        edges = batch.x[:, start : start + self.prefix - 2].reshape(len(batch.x), -1, 2)
        came, went = (0, 1) if self.path == "forward" else (1, 0)
        here = np.where(
            batch.position == self.prefix - 1,
            self._asked(batch.x)[batch.row],
            batch.x[batch.row, batch.position],
        )
        at = np.argmax(edges[batch.row, :, came] == here[:, None], axis=1)
        return Predicted(edges[batch.row, at, went], None)

    def _asked(self, x: np.ndarray) -> np.ndarray:
        """(size,) where the path begins."""
        first = 0 if self.query == "first" else self.prefix - 2
        return x[:, first if self.path == "forward" else first + 1]

    def caveats(self, sequences_read: int) -> list[str]:
        stars = math.perm(self.nodes, self._used) // math.factorial(self.arms - 1)
        if self.edges == "shuffled":
            stars *= math.factorial(self.arms * (self.length - 1))
        return few_sequences(stars, sequences_read, f"{self.arms} arms and {self.nodes} labels")

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": self.nodes, "context_length": self.prefix + self.length - 2}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        centre, arms = self._stars(rng, size)
        chosen = arms[np.arange(size), rng.integers(0, self.arms, size)]
        query = np.stack([centre, chosen[:, -1]], axis=1)
        parts = [self._edges(rng, centre, arms), query]
        answer = chosen
        if self.path == "backward":
            answer = np.concatenate([chosen[:, -2::-1], centre[:, None]], axis=1)
        ordered = parts if self.query == "last" else parts[::-1]
        x = np.concatenate([*ordered, answer[:, :-1]], axis=1)
        y = np.full_like(x, IGNORE)
        y[:, self.prefix - 1 :] = answer
        return Batch(x, y)

    def _stars(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(size,) the centres, and (size, arms, length - 1) the other nodes of each arm."""
        labels = rng.permuted(np.tile(np.arange(self.nodes), (size, 1)), axis=1)[:, : self._used]
        return labels[:, 0], labels[:, 1:].reshape(size, self.arms, self.length - 1)

    def _edges(self, rng: np.random.Generator, centre: np.ndarray, arms: np.ndarray) -> np.ndarray:
        """(size, 2 x edges) both ends of every edge, the inner one first."""
        size = len(centre)
        inner = np.broadcast_to(centre[:, None, None], (size, self.arms, 1))
        inner = np.concatenate([inner, arms[:, :, :-1]], axis=2)
        edges = np.stack([inner, arms], axis=-1).reshape(size, -1, 2)
        if self.edges == "shuffled":
            order = rng.permuted(np.tile(np.arange(edges.shape[1]), (size, 1)), axis=1)
            edges = np.take_along_axis(edges, order[:, :, None], axis=1)
        return edges.reshape(size, -1)
