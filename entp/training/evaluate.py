"""A task's metrics on batches: of a model, of generated answers, and of baselines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from entp.engine.budget import BUSY, default_token_budget
from entp.engine.protocol import depth
from entp.engine.refreshed import computed_rows
from entp.errors import InputError, one_of
from entp.tasks.base import IGNORE, Batch, Split, Task
from entp.tasks.metrics import Predicted, Totals
from entp.training.cover import (
    joinable,
    joined,
    padding_is_nothing,
    real_tokens,
    skips_targets,
    without_lengths,
)
from entp.training.distributed import World
from entp.training.forward import Forward

AT_ONCE = 4
"""Forward passes whose answers wait on the device before they are measured."""
MOST_OUTPUTS = 2**26
"""Numbers in the outputs of batches that are joined."""


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
    world, totals, where = world or World(), Totals(task.metrics), torch.device(device)
    mine = (b.part(world.rank, world.size) if world.size > 1 else b for b in batches)
    waiting: deque[_Answers] = deque()
    for group in _groups(model, how, mine, where):
        waiting.append(_predict(model, how, joined(group), where))
        if len(waiting) == AT_ONCE:
            totals += waiting.popleft().measured(task)
    for answers in waiting:
        totals += answers.measured(task)
    everyone = [Totals.from_json(task.metrics, one) for one in world.gather(totals.to_json())]
    return _sum(task, everyone)


def _groups(
    model: Any, how: Forward, batches: Iterable[Batch], device: torch.device
) -> Iterator[list[Batch]]:
    """Batches for one forward pass each: as many as keep a GPU busy and fit into memory, or one."""
    most = min(BUSY // (model.width * depth(model)), default_token_budget(model, device))
    most_targets = MOST_OUTPUTS // _outputs(model, how, device)
    group: list[Batch] = []
    size, width = np.zeros(3, int), 0
    for batch in batches:
        own, own_width = _size(batch, how.mode), batch.y.shape[1]
        size, width = size + own, max(width, own_width)
        sequences, rows, targets = size.tolist()
        computed = rows or sequences * width
        fits = computed <= most and targets <= most_targets
        if group and not (fits and joinable(group[0], batch)):
            yield group
            group, size, width = [], own, own_width
        group.append(batch)
    if group:
        yield group


def _size(batch: Batch, mode: str) -> np.ndarray:
    """Its sequences, the rows of its prefixes where the mode has such, and its targets."""
    rows = computed_rows(batch.target_mask, mode) if skips_targets(mode) else 0
    return np.array([len(batch.x), rows, len(batch.targets)])


def _outputs(model: Any, how: Forward, device: torch.device) -> int:
    """The number of outputs of a prediction."""
    row = torch.zeros(1, model.width, device=device, dtype=next(model.parameters()).dtype)
    with how.autocast(device):
        return int(model.readout(row).shape[-1])


class _Answers(NamedTuple):
    """What a forward pass answered to each target, on the device."""

    batch: Batch
    answer: Tensor
    loss: Tensor

    def measured(self, task: Task) -> Totals:
        """Waits for the device."""
        got = Predicted(self.answer.cpu().numpy(), self.loss.cpu().numpy())
        return _measure(task, self.batch, got)


def _predict(model: Any, how: Forward, batch: Batch, device: torch.device) -> _Answers:
    """The answer to each target and its loss."""
    one = without_lengths(batch) if padding_is_nothing(how.mode) else batch
    names = ("lengths", "position_ids", "prefix_lengths")
    arrays = {name: getattr(one, name) for name in names}
    more = {k: torch.from_numpy(v).to(device) for k, v in arrays.items() if v is not None}
    x = torch.from_numpy(one.x).to(device, non_blocking=True)
    outputs = how(model, x, torch.from_numpy(batch.target_mask), **more)
    targets = torch.from_numpy(batch.targets).to(device)
    return _Answers(batch, how.answers(outputs), how.loss_rows(outputs, targets))


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
    task: Task, split: Split, count: int | None, batch_size: int, seed: int
) -> Iterator[Batch]:
    """The first batches of a split, or all with count None; never more than it has."""
    if count is not None and count < 1:
        raise InputError(f"batches is {count}: at least 1 is needed to measure anything.")
    there = task.split_batches(split, batch_size)
    if there is None and count is None:
        raise InputError(
            f"split {split} of {task.name} has no end: give a number of batches instead of all."
        )
    for step in range(min(count for count in (count, there) if count is not None)):
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


def first_batch(task: Task, seed: int, size: int) -> Batch:
    """The batch of the first step; InputError if it is none, of another size or another one when
    drawn again, or has targets at padding."""
    batch, again = (task.batch(seed, "train", 0, size) for _ in range(2))
    if not isinstance(batch, Batch):
        raise InputError(
            f"batch of {task.name} returned a {type(batch).__name__}: it must be an "
            "entp.tasks.Batch."
        )
    if len(batch.x) != size:
        raise InputError(
            f"batch of {task.name} returned {len(batch.x)} sequences where {size} were asked for: "
            "what was read would be counted wrongly."
        )
    for name in ("x", "y", "lengths", "position_ids", "loss_weights", "prefix_lengths"):
        if _bytes(getattr(batch, name)) != _bytes(getattr(again, name)):
            raise InputError(
                f"batch of {task.name} gave other values of {name} when it was asked for the "
                "same step again: take random numbers from self.rng(seed, split, step) alone, and "
                "keep no state."
            )
    if (batch.target_mask & ~real_tokens(batch)).any():
        raise InputError(
            f"{task.name} has targets at padding: let y be {IGNORE} from lengths on in every "
            "sequence."
        )
    return batch


def _bytes(array: np.ndarray | None) -> bytes | None:
    """NaN is itself here."""
    return None if array is None else array.tobytes()


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


def check_tokens(task: Task, batch: Batch, vocab: int | None) -> None:
    """InputError for tokens that the model does not know, padding aside."""
    if vocab is None or batch.x.ndim != 2:
        return
    tokens = batch.x[real_tokens(batch)]
    wrong = tokens[(tokens < 0) | (tokens >= vocab)]
    if len(wrong):
        raise InputError(
            f"{task.name} has the token {wrong[0]}: the model has the tokens 0 to {vocab - 1}. "
            'Let "vocab" of its model_needs be as many as there are.'
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
    most = default_token_budget(model, torch.device(device))
    groups = (joined(group) for group in _generation_groups(task, batches, most))
    if task.writes:
        return _sum(task, (_written(model, task, batch, how, device) for batch in groups))
    return _sum(
        task,
        (
            _measure(task, batch, Predicted(_generated(model, task, batch, how, device), None))
            for batch in groups
        ),
    )


def _generation_groups(task: Task, batches: Iterable[Batch], most: int) -> Iterator[list[Batch]]:
    """Batches that are generated together: a step takes about as long for one as for many."""
    group: list[Batch] = []
    for batch in batches:
        check_generation(task, batch)
        width = max(one.y.shape[1] for one in [*group, batch])
        fits = width * sum(len(one.x) for one in [*group, batch]) <= most
        if group and not (fits and joinable(group[0], batch)):
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def _written(
    model: Any, task: Task, batch: Batch, how: Forward, device: torch.device | str
) -> Totals:
    """The metrics of what the model writes after each prompt, up to the task's stop token."""
    from entp.engine.generation.generate import generate

    ends = (batch.target_mask.argmax(1) + 1).tolist()
    prompts = [row[:end].tolist() for row, end in zip(batch.x, ends, strict=True)]
    with how.autocast(torch.device(device)):
        rows = generate(model, prompts, task.most_new_tokens, how.mode, stop=task.stop)
    new = [row[end:] for row, end in zip(rows, ends, strict=True)]
    return Totals.of(task.metrics, batch, task.measure_texts(batch, new))


def _generated(
    model: Any, task: Task, batch: Batch, how: Forward, device: torch.device | str
) -> np.ndarray:
    """The generated answer to each target."""
    from entp.engine.generation.generate import generate

    more: dict[str, Any] = {}
    if batch.position_ids is not None:
        more["position_ids"] = position_function(task)
        if more["position_ids"] is None:
            raise InputError(
                f"{task.name} has position ids and does not say which generated tokens have: give "
                "it a method position_ids."
            )
    answers = np.full(batch.y.shape, IGNORE, dtype=np.int64)
    begins, width = batch.target_mask.argmax(1), batch.y.shape[1]
    for first in np.unique(begins):  # prompts of one length at a time
        rows = np.flatnonzero(begins == first)
        prompts = torch.from_numpy(batch.x[rows, : first + 1]).to(device)
        with how.autocast(torch.device(device)):
            out = generate(model, prompts, width - int(first), how.mode, **more)
        answers[rows, first:] = out[:, first + 1 :].cpu().numpy()
    return answers[batch.target_mask]


def position_function(task: Task) -> Callable[[Tensor], Tensor] | None:
    """The task's position ids as generation asks for them: tokens (B, T) to ids (B, T)."""
    if task.position_ids(np.zeros((1, 1), dtype=np.int64)) is None:
        return None

    def ids(tokens: Tensor) -> Tensor:
        found = task.position_ids(tokens.cpu().numpy())
        return torch.from_numpy(np.array(found, dtype=np.int64)).to(tokens.device)

    return ids


def check_generation(task: Task, batch: Batch) -> None:
    """InputError unless every target is the token that follows, from a sequence's first on."""
    mask, tokens = batch.target_mask, batch.x[:, 1:]
    if task.loss == "cross_entropy" and batch.x.ndim == 2:
        read = mask[:, :-1]
        if batch.lengths is not None:  # after the last token there is none to follow
            read = read & (np.arange(1, batch.x.shape[1]) < batch.lengths[:, None])
        if ((batch.y[:, :-1] == tokens) | ~read).all():
            return
    if task.streams:
        raise InputError(
            f"{task.name} is measured by its loss: leave --generate out, and print what a model "
            "writes with `entp generate`."
        )
    raise InputError(
        f"{task.name} has nothing to generate: its targets are not the tokens that follow."
    )
