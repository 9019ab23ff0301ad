"""The CUDA stream on which work is captured."""

from __future__ import annotations

import functools

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A device's one stream beside the default one.

    Torch keeps the workspace of matrix products, 64 MiB on an H200, for each stream that ever had
    one: a stream for every run would add up.
    """
    return torch.cuda.Stream(device)
