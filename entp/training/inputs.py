"""A batch on the device: what a step reads, and how its predictions are split into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from entp.config import refresh_of
from entp.engine import refreshed
from entp.engine.budget import step_token_budget
from entp.engine.layout import pack, positions_of, split, trim, whole_sequences
from entp.engine.refreshed import computed_rows
from entp.tasks.base import Batch
from entp.training.cover import skips_targets
from entp.training.distributed import World
from entp.training.forward import Forward

if TYPE_CHECKING:
    from entp.training.techniques.base import Technique


@dataclass
class Inputs:
    """What the loss of a step is a weighted sum over."""

    arrays: dict[str, Tensor]
    """What differs from step to step: x, y, and where there are any lengths, position_ids, weights
    (of targets (B, T) or rows (B,)), prefix and prefix_lengths (B,), and what techniques read."""
    chunks: list[Tensor]
    """Masks (B, T) on the CPU: the predictions computed together."""
    num_targets: int
    """Targets in the whole batch, over all processes: what the loss is divided by."""
    loss: Tensor | None = None
    """The batch's loss, where a technique knows it better than the chunks tell."""
    tables: list[object] = field(default_factory=list)
    """What the engine looks up for the chunks, held while a captured step may read it."""

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def get(self, name: str) -> Tensor | None:
        return self.arrays.get(name)

    def with_arrays(self, chunks: list[Tensor], loss: Tensor | None, **arrays: Tensor) -> Inputs:
        """The same step over other rows."""
        return replace(self, arrays={**self.arrays, **arrays}, chunks=chunks, loss=loss)


def step_arrays(
    batch: Batch, step: int, techniques: Sequence[Technique], world: World
) -> dict[str, Tensor]:
    """The arrays of a step on the CPU: this process's share of the batch, and the techniques'
    own."""
    for technique in techniques:
        batch = technique.arrange(step, batch)
    mine = batch.part(world.rank, world.size) if world.size > 1 else batch
    arrays = {"x": mine.x, "y": mine.y}
    for name in ("lengths", "position_ids", "prefix_lengths"):
        if getattr(mine, name) is not None:
            arrays[name] = getattr(mine, name)
    found = {name: torch.from_numpy(value) for name, value in arrays.items()}
    if mine.loss_weights is not None:  # scaled so that the loss divides by the number of targets
        scale = batch.target_mask.sum() / max(batch.weight_sum, 1e-30)
        found["weights"] = torch.from_numpy(mine.loss_weights).double() * float(scale)
    for technique in techniques:
        for name, value in technique.arrays(step, batch, world).items():
            both = name == "weights" and name in found
            found[name] = found[name] * value if both else value
    return found


def token_budget(how: Forward, model: Any, rows: int) -> int:
    """Most rows of a chunk, of so many."""
    device = next(model.parameters()).device
    return how.token_budget or step_token_budget(model, device, rows)


def make_inputs(
    arrays: dict[str, Tensor], batch: Batch, how: Forward, model: Any, device: torch.device
) -> Inputs:
    """The arrays on the device, with the predictions in chunks of at most the token budget."""
    targets = arrays["y"] != -100
    chunks, every = [targets], refresh_of(how.mode)
    if skips_targets(how.mode):
        budget = token_budget(how, model, computed_rows(targets, how.mode))
        cut = split if every is None else partial(refreshed.split, every=every)
        chunks = list(cut(targets, token_budget=budget))
    if "weights" in arrays:
        arrays = {**arrays, "weights": arrays["weights"].to(loss_type(model))}
    there = {name: value.to(device, non_blocking=True) for name, value in arrays.items()}
    return Inputs(there, chunks, int(batch.target_mask.sum()))


def loss_type(model: Any) -> torch.dtype:
    """The type of a model's losses: fp32, or float64."""
    return torch.promote_types(next(model.parameters()).dtype, torch.float32)


def chunk_tables(layouts: list[tuple[Tensor, bool]], device: torch.device) -> list[object]:
    """The engine's tables of these masks, made before a step is captured; True: whole sequences,
    as in modes other than entp."""
    tables: list[object] = [positions_of(mask, device) for mask, _ in layouts]
    for mask, whole in layouts:
        if whole:
            packing = whole_sequences(mask.shape[0], mask.shape[1], device)
        else:
            packing = pack(mask[trim(mask)], device)
        tables += [packing, packing.tables()]
    return tables
