"""Several processes, started by torchrun: each takes its share of the batch, gradients are added
up.

Every process makes the whole batch (a pure function of the step) and keeps its part, so the loss is
normalised over the global batch without communication. Gradients, loss and a stop flag travel in
one vector per step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from entp.errors import InputError


@dataclass(frozen=True)
class World:
    """This process among all."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks to the person."""
        return self.rank == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """What each process gave, in order, for all of them."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()


class Stop(NamedTuple):
    """Why training stops or saves after this step; each process tells the others."""

    late: bool = False
    signal: bool = False
    save: bool = False
    """A checkpoint is due; training goes on."""


def pick_device(name: str, world: World) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `cuda:1`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{world.local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"unknown device {name!r}: allowed are auto, cpu, cuda and cuda:NUMBER."
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(
            f"device {name!r} is not supported: allowed are auto, cpu, cuda and cuda:NUMBER."
        )
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise InputError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use --device cpu."
        )
    return device


@contextmanager
def join(device_name: str) -> Iterator[tuple[World, torch.device]]:
    """This process's place and device; joins the group if torchrun started us, and leaves it at the
    end."""
    world = World(
        *(int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    )
    device = pick_device(device_name, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield world, device
        world.barrier()  # leave together: gloo aborts a process whose peer is still talking to it
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def reduce_gradients(
    parameters: list[torch.nn.Parameter], loss: Tensor, stop: Stop, world: World
) -> tuple[Tensor, Stop]:
    """Sum gradients over the processes in place; returns the summed loss and who wants to stop."""
    if world.size == 1:
        return loss, stop
    with_grad = [p for p in parameters if p.requires_grad]
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in with_grad]
    like = grads[0]
    wishes = torch.tensor([float(wish) for wish in stop], device=like.device, dtype=like.dtype)
    extra = torch.cat([loss.detach().to(like.dtype).reshape(1), wishes])
    flat = world.all_reduce(torch.cat([*(g.flatten() for g in grads), extra]))
    start = 0
    for p, g in zip(with_grad, grads, strict=True):
        p.grad = flat[start : start + g.numel()].view_as(g).clone()
        start += g.numel()
    found = (flat[-len(stop) :] > 0).tolist()
    return flat[-len(stop) - 1], Stop(*found)
