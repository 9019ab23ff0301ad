"""Loss and accuracies of a model on a stream of batches."""

from __future__ import annotations

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


def forward(model: Transformer, run: Run, x: Tensor, at: Tensor, lengths: Tensor | None) -> Tensor:
    """Outputs (number of True in at, outputs) of the run's mode, in bf16 autocast where the run asks for it."""
    with rounding(run, x.device):
        return model(
            x,
            run.mode,
            at=at,
            lengths=lengths,
            prefix=run.task.prefix if run.mode == "prefix" else None,
            impl=run.train.impl,
            token_budget=run.train.token_budget,
        )


def loss_sum(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """The task's loss summed over rows: outputs (M, k), targets (M,)."""
    if task.loss == "squared_error":
        return F.mse_loss(outputs.float().squeeze(-1), targets.float(), reduction="sum")
    if outputs.is_cuda and triton_missing(outputs.device) is None:
        from entp.engine.triton.loss import cross_entropy

        return cross_entropy(outputs, targets)
    return F.cross_entropy(outputs.float(), targets, reduction="sum")


@torch.no_grad()
def evaluate(
    model: Transformer,
    run: Run,
    *,
    split: Split = "valid",
    batches: int | None = None,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    world: World | None = None,
) -> dict[str, float]:
    """Mean loss per target and the task's accuracies over `batches` batches of `split`, and n, the number of sequences."""
    world = world or World()
    device = torch.device(device)
    batches = run.train.eval_batches if batches is None else batches
    if batches < 1:
        raise InputError(f"batches is {batches}: at least 1 is needed to measure anything.")
    totals = torch.zeros(5, dtype=torch.float64, device=device)
    for step in range(batches):
        batch = run.task.batch(run.seed if seed is None else seed, split, step, run.batch).part(world.rank, world.size)
        totals += _batch_totals(model, run, batch, device)
    loss, right, asked, right_sequences, sequences = world.add_up(totals).tolist()
    values = {"loss": loss / asked}
    if run.task.loss == "cross_entropy":
        values |= {"token_accuracy": right / asked, "sequence_accuracy": right_sequences / sequences}
    return {**values, "n": int(sequences)}


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
    wrong = (~right).sum()
    return torch.stack([loss, asked - wrong, wrong.new_tensor(asked), right.all(1).sum(), wrong.new_tensor(len(at))]).double()
