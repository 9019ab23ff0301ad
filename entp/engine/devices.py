"""Where Triton's kernels run."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

LARGEST_HEAD = 128
"""Largest head size of the Triton kernels, which have 227 KiB of shared memory."""


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on this device, or None if they can."""
    if not _triton_installed():
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"the device is {device.type}, and kernels need CUDA (TRITON_INTERPRET=1 runs them "
            "slowly on a CPU)"
        )
    return None


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def attention_kernels(device: torch.device, size: int) -> bool:
    """Whether attention of any model is computed by kernels here, for heads of this size."""
    return device.type == "cuda" and size <= LARGEST_HEAD and triton_missing(device) is None
