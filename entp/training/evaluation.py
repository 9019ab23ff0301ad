"""Loss and accuracies of a model on a stream of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from entp.config import Run
from entp.engine.api import triton_missing
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.base import IGNORE, Batch, Split, Task
from entp.training.distributed import World


def rounding(run: Run, device: torch.device) -> torch.autocast:
    """The precision in which a run's matrix products are done on a device: a context."""
    half = run.train.precision == "bf16" or (run.train.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=half)


def forward(
    model: Transformer, run: Run, x: Tensor, at: Tensor, lengths: Tensor | None, prefix: Tensor | None = None
) -> Tensor:
    """Outputs (number of True in at, outputs) of the run's mode, in bf16 autocast where the run asks for it.

    prefix: (B,) for mode prefix instead, with one for each sequence.
    """
    fixed = run.task.prefix if run.mode == "prefix" else None
    with rounding(run, x.device):
        return model(
            x,
            run.mode if prefix is None else "prefix",
            at=at,
            lengths=lengths,
            prefix=fixed if prefix is None else prefix,
            impl=run.train.impl,
            token_budget=run.train.token_budget,
        )


def loss_sum(task: Task, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The task's loss summed over rows, each times its weight if there are weights: outputs (M, k), targets (M,)."""
    if outputs.is_cuda and task.loss == "cross_entropy" and triton_missing(outputs.device) is None:
        from entp.engine.triton.loss import cross_entropy

        return cross_entropy(outputs, targets, weights)
    rows = loss_rows(task, outputs, targets)
    return rows.sum() if weights is None else rows @ weights.to(rows.dtype)


def loss_rows(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """The task's loss of each row, in fp32 or float64."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if task.loss == "squared_error":
        return F.mse_loss(wide.squeeze(-1), targets.to(wide.dtype), reduction="none")
    return F.cross_entropy(wide, targets, reduction="none")


@torch.no_grad()
def evaluate(
    model: Transformer,
    run: Run,
    *,
    split: Split = "valid",
    batches: int | Iterable[Batch] | None = None,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    world: World | None = None,
) -> dict[str, float]:
    """Mean loss per target and the task's accuracies over `batches` batches of `split`, and n, the number of sequences.

    batches: how many, or the batches themselves (split and seed then do not matter).
    """
    world = world or World()
    device = torch.device(device)
    totals = torch.zeros(5, dtype=torch.float64, device=device)
    if batches is None or isinstance(batches, int):
        batches = some_batches(run, split, run.train.eval_batches if batches is None else batches, seed)
    for batch in batches:
        totals += _batch_totals(model, run, batch.part(world.rank, world.size), device)
    loss, right, asked, right_sequences, sequences = world.add_up(totals).tolist()
    if not asked:
        raise InputError(f"no sequence of these batches of {run.task.name} has a target: there is nothing to measure.")
    values = {"loss": loss / asked}
    if run.task.loss == "cross_entropy":
        values |= {"token_accuracy": right / asked, "sequence_accuracy": right_sequences / sequences}
    return {**values, "n": int(sequences)}


def some_batches(run: Run, split: Split, count: int, seed: int | None = None) -> Iterator[Batch]:
    """The first batches of a split, by the run's seed or another."""
    if count < 1:
        raise InputError(f"batches is {count}: at least 1 is needed to measure anything.")
    for step in range(count):
        yield run.task.batch(run.seed if seed is None else seed, split, step, run.batch)


def check_targets(run: Run, batch: Batch) -> None:
    """InputError for targets that the model has no output for: a GPU would say so less clearly."""
    if run.task.loss == "cross_entropy":
        asked, outputs = batch.y[batch.y != IGNORE], run.model.outputs or run.model.vocab or 0
        wrong = asked[(asked < 0) | (asked >= outputs)] if asked.dtype.kind == "i" else asked
        if len(wrong):
            raise InputError(
                f"{run.task.name} asks for {wrong[0]}: targets are 0 to {outputs - 1}, or {IGNORE} where nothing is asked."
            )


def fresh_batches(run: Run, sequences: int) -> Iterator[Batch]:
    """Test batches in no other use: their seeds count back from 2^32, where seeds of data end.

    Training may have drawn the same sequences by chance, and has where a task has few: Count3 of 16 integers, 4 of them random.
    """
    return some_batches(run, "test", -(-sequences // run.batch), 2**32 - 1 - run.seed)


@torch.no_grad()
def accuracy_by_length(
    model: Transformer, run: Run, batches: Iterable[Batch], device: str | torch.device = "cpu"
) -> dict[int, float]:
    """The share of right targets after each number of tokens that one is asked for."""
    time = run.task.model_needs()["positions"]
    right, asked = torch.zeros(time + 1), torch.zeros(time + 1)
    for batch in batches:
        at = torch.from_numpy(batch.y != IGNORE)
        x = torch.from_numpy(batch.x).to(device)
        lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths).to(device)
        guess = forward(model, run, x, at, lengths).argmax(-1).cpu()
        read = at.nonzero()[:, 1] + 1
        right.index_add_(0, read, (guess == torch.from_numpy(batch.y)[at]).float())
        asked.index_add_(0, read, torch.ones(len(read)))
    return {n: float(right[n] / asked[n]) for n in range(time + 1) if asked[n]}


def generated_right(
    model: Transformer, run: Run, batches: Iterable[Batch], device: str | torch.device = "cpu"
) -> tuple[int, int]:
    """How many sequences the model continues without any error, reading what it wrote itself; and how many were tried."""
    from entp.engine.generate import generate

    right = tried = 0
    for batch in batches:
        first = _first_target(run.task, batch)
        prompts = torch.from_numpy(batch.x[:, : first + 1]).to(device)
        want = torch.from_numpy(batch.y[:, first:])
        with rounding(run, torch.device(device)):
            got = generate(model, prompts, want.shape[1], run.mode)[:, first + 1 :].cpu()
        right += int(((got == want) | (want == IGNORE)).all(1).sum())
        tried += len(want)
    return right, tried


def _first_target(task: Task, batch: Batch) -> int:
    """The position of the first target, from where the model is to go on alone."""
    asked = batch.y != IGNORE
    first = asked.argmax(1)
    follows = (batch.y[:, :-1] == batch.x[:, 1:]) | ~asked[:, :-1]
    if task.loss != "cross_entropy" or (first != first[0]).any() or not follows.all():
        raise InputError(
            f"{task.name} has nothing to continue: its targets are not the tokens that follow, or do not begin together."
        )
    return int(first[0])


def _batch_totals(model: Transformer, run: Run, batch: Batch, device: torch.device) -> Tensor:
    """Summed loss, right targets, targets, wholly right sequences, sequences."""
    at = torch.from_numpy(batch.y != IGNORE)
    targets = torch.from_numpy(batch.y)[at].to(device)
    x = torch.from_numpy(batch.x).to(device, non_blocking=True)
    lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths).to(device)
    outputs = forward(model, run, x, at, lengths)
    right = torch.ones(at.shape, dtype=torch.bool, device=device)
    if run.task.loss == "cross_entropy":
        right[at.to(device)] = outputs.argmax(-1) == targets
    asked, loss = len(targets), loss_sum(run.task, outputs, targets)
    wrong, some = (~right).sum(), at.any(1).to(device)  # a sequence of which nothing is asked is neither right nor wrong
    whole = (right.all(1) & some).sum()
    return torch.stack([loss, asked - wrong, wrong.new_tensor(asked), whole, some.sum()]).double()
