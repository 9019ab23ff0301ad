"""One optimizer step: gradients over chunks, clipping, update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from entp.engine.layout import positions_of
from entp.training.distributed import Stop, World, reduce_gradients
from entp.training.forward import Forward
from entp.training.inputs import Inputs, loss_type

if TYPE_CHECKING:
    from entp.training.state import State
    from entp.training.techniques.base import Technique


class Updated(NamedTuple):
    """What a step returns: the global loss, the gradient's norm, and who wants to stop."""

    loss: Tensor
    norm: Tensor
    stop: Stop


def update(
    state: State, inputs: Inputs, how: Forward, grad_clip: float, world: World, stop: Stop
) -> Updated:
    """Gradients of every chunk, added up over chunks and processes, and the optimizers' step."""
    model = state.model
    loss, sums = gradients(model, inputs, how, state.techniques)
    for p, gradient in sums.items():
        p.grad = gradient
    loss, stop = reduce_gradients(list(model.parameters()), loss, stop, world)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or float("inf"))
    for optimizer in state.optimizers:
        optimizer.step()
    for technique in state.techniques:
        technique.updated(state)
    return Updated(loss, norm, stop)


def gradients(
    model: Any, inputs: Inputs, how: Forward, techniques: Sequence[Technique] = ()
) -> tuple[Tensor, dict[Tensor, Tensor | None]]:
    """The loss, a weighted sum over predictions, and its gradient by every parameter."""
    for technique in techniques:
        inputs = technique.choose(model, how, inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums: list[Tensor | None] = [None] * len(parameters)
    total = torch.zeros((), device=inputs["x"].device, dtype=loss_type(model))
    for chunk in inputs.chunks:
        loss = chunk_loss(model, inputs, how, chunk)
        sums = _added(sums, torch.autograd.grad(loss, parameters, allow_unused=True))
        total += loss.detach()
    loss = total if inputs.loss is None else inputs.loss
    return loss, dict(zip(parameters, sums, strict=True))


def chunk_loss(model: Any, inputs: Inputs, how: Forward, chunk: Tensor) -> Tensor:
    """The part of the loss that the predictions of a chunk have."""
    names = ("lengths", "position_ids", "prefix", "prefix_lengths")
    more = {name: inputs.get(name) for name in names}
    outputs = how(model, inputs["x"], chunk, **more)
    at = positions_of(chunk, inputs["y"].device)
    weights = inputs.get("weights")
    if weights is not None:
        where = at if weights.ndim == 2 else at // chunk.shape[1]
        weights = weights.flatten().index_select(0, where)
    targets = inputs["y"].flatten().index_select(0, at)
    return how.loss_sum(outputs, targets, weights) / max(1, inputs.num_targets)


def _added(sums: list[Tensor | None], more: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """sums + more in a few launches; a chunk that does not use a parameter has no gradient for it.

    New tensors, not in place: autograd may give two parameters the same tensor.
    """
    pairs = list(enumerate(zip(sums, more, strict=True)))
    both = [(n, a, b) for n, (a, b) in pairs if a is not None and b is not None]
    out = [b if a is None else a for _, (a, b) in pairs]
    if both:
        added = torch._foreach_add([a for _, a, _ in both], [b for _, _, b in both])
        for (n, _, _), one in zip(both, added, strict=True):
            out[n] = one
    return out
