"""A task's metrics on batches: of a model, of generated answers, and of baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entp.errors import InputError, one_of
from entp.tasks.base import IGNORE, Batch, Split, Task
from entp.tasks.metrics import Predicted, Totals
from entp.training.distributed import World
from entp.training.forward import Forward

AT_ONCE = 16
"""Batches whose answers wait on the device before they are measured."""


@torch.no_grad()
def evaluate(
    model: Any,
    task: Task,
    batches: Iterable[Batch],
    how: Forward,
    *,
    device: torch.device | str = "cpu",
    world: World | None = None,
) -> Totals:
    """The task's metrics over these batches, of all processes together."""
    world, totals = world or World(), Totals(task.metrics)
    mine = iter(batch.part(world.rank, world.size) for batch in batches)
    while some := list(islice(mine, AT_ONCE)):
        answers = [_predict(model, how, batch, torch.device(device)) for batch in some]
        for batch, (answer, loss) in zip(some, answers, strict=True):
            totals += _measure(task, batch, Predicted(answer.cpu().numpy(), loss.cpu().numpy()))
    everyone = [Totals.from_json(task.metrics, one) for one in world.gather(totals.to_json())]
    return _sum(task, everyone)


def _predict(model: Any, how: Forward, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """The answer to each target and its loss, on the device."""
    at = torch.from_numpy(batch.target_mask)
    arrays = {"lengths": batch.lengths, "position_ids": batch.position_ids}
    more = {k: torch.from_numpy(v).to(device) for k, v in arrays.items() if v is not None}
    x = torch.from_numpy(batch.x).to(device, non_blocking=True)
    outputs = how(model, x, at, **more)
    targets = torch.from_numpy(batch.targets).to(device)
    return how.answers(outputs), how.loss_rows(outputs, targets)


def _measure(task: Task, batch: Batch, got: Predicted) -> Totals:
    return Totals.of(task.metrics, batch, task.measure(batch, got))


def _sum(task: Task, parts: Iterable[Totals]) -> Totals:
    totals = Totals(task.metrics)
    for part in parts:
        totals += part
    if not totals.sequences:
        raise InputError(
            f"no sequence of these batches of {task.name} has a target: there is nothing to "
            "measure."
        )
    return totals


def split_batches(
    task: Task, split: Split, count: int, batch_size: int, seed: int
) -> Iterator[Batch]:
    """The first batches of a split."""
    if count < 1:
        raise InputError(f"batches is {count}: at least 1 is needed to measure anything.")
    for step in range(count):
        yield task.batch(seed, split, step, batch_size)


TEST_SEED = 2**31
"""Seeds of the test stream for what is claimed begin here; nothing else uses them. Up to the move,
what was claimed and what settings were compared by came from the seeds that count back from
2^32."""


def untouched_batches(task: Task, sequences: int, batch_size: int, seed: int) -> Iterator[Batch]:
    """Test batches for what is claimed, for the run of this seed; used for nothing else.

    Training may have drawn the same sequences by chance, and has where a task has few: see
    `Task.caveats`.
    """
    count = -(-sequences // batch_size)
    return split_batches(task, "test", count, batch_size, (TEST_SEED + seed) % 2**32)


def check_targets(task: Task, batch: Batch, outputs: int) -> None:
    """InputError for targets that the model has no output for: a GPU would say so less clearly."""
    if task.loss != "cross_entropy":
        return
    targets = batch.targets
    wrong = targets
    if targets.dtype.kind == "i":
        wrong = targets[(targets < 0) | (targets >= outputs)]
    if len(wrong):
        raise InputError(
            f"{task.name} has the target {wrong[0]}: targets are 0 to {outputs - 1}, or {IGNORE} "
            "where there is none."
        )


def evaluate_baseline(task: Task, name: str, batches: Iterable[Batch]) -> Totals:
    """The task's metrics of answers without a model."""
    known = task.baselines()
    if name not in known:
        raise one_of(f"baseline of {task.name}", name, known)
    return _sum(task, (_measure(task, batch, known[name](batch)) for batch in batches))


def evaluate_generated(
    model: Any,
    task: Task,
    batches: Iterable[Batch],
    how: Forward,
    *,
    device: torch.device | str = "cpu",
) -> Totals:
    """The task's metrics of answers that the model generates, reading what it wrote itself."""
    return _sum(
        task,
        (
            _measure(task, batch, Predicted(_generated(model, task, batch, how, device), None))
            for batch in batches
        ),
    )


def _generated(
    model: Any, task: Task, batch: Batch, how: Forward, device: torch.device | str
) -> np.ndarray:
    """The generated answer to each target."""
    from entp.engine.generation.generate import generate

    first = _first_target(task, batch)
    prompts = torch.from_numpy(batch.x[:, : first + 1]).to(device)
    new = batch.y.shape[1] - first
    more: dict[str, Any] = {}
    if batch.position_ids is not None:
        more["position_ids"] = position_function(task)
        if more["position_ids"] is None:
            raise InputError(
                f"{task.name} has position ids and does not say which generated tokens have: give "
                "it a method position_ids."
            )
    with how.autocast(torch.device(device)):
        out = generate(model, prompts, new, how.mode, **more)
    answers = np.full(batch.y.shape, IGNORE, dtype=np.int64)
    answers[:, first:] = out[:, first + 1 :].cpu().numpy()
    return answers[batch.target_mask]


def position_function(task: Task) -> Callable[[Tensor], Tensor] | None:
    """The task's position ids as generation asks for them: tokens (B, T) to ids (B, T)."""
    if task.position_ids(np.zeros((1, 1), dtype=np.int64)) is None:
        return None

    def ids(tokens: Tensor) -> Tensor:
        found = task.position_ids(tokens.cpu().numpy())
        return torch.from_numpy(np.array(found, dtype=np.int64)).to(tokens.device)

    return ids


def _first_target(task: Task, batch: Batch) -> int:
    """The position of the first target, from where the model generates."""
    mask = batch.target_mask
    first = mask.argmax(1)
    follows = (batch.y[:, :-1] == batch.x[:, 1:]) | ~mask[:, :-1]
    together = bool((first == first[0]).all())
    if task.loss != "cross_entropy" or not together or not follows.all():
        raise InputError(
            f"{task.name} has nothing to generate: its targets are not the tokens that follow, or "
            "do not begin together."
        )
    return int(first[0])
