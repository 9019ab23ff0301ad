"""Batches on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS_AHEAD = 4
"""Steps that may wait for the device at a time."""


class Feed:
    """New values for tensors on the device, copied from pinned memory, so that the host can be a few steps ahead.

    A copy from ordinary memory first waits until the device has done all it was given; the device then waits for the host.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.turn = tensors, 0
        pinned = [[torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors] for _ in range(STEPS_AHEAD)]
        self.pinned = [(memory, torch.cuda.Event()) for memory in pinned]

    def __call__(self, values: list[Tensor]) -> None:
        """These values from the next step on. Waits only if the device has not read what was given STEPS_AHEAD calls ago."""
        memory, read = self.pinned[self.turn % STEPS_AHEAD]
        self.turn += 1
        read.synchronize()
        for tensor, via, value in zip(self.tensors, memory, values, strict=True):
            via.copy_(value)
            tensor.copy_(via, non_blocking=True)
        read.record()
