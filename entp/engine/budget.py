"""How many rows are computed at once: memory against time."""

from __future__ import annotations

import torch

from entp.engine.protocol import ModelProtocol, depth

BUSY = 140_000_000
"""Rows x width x layers that keep a GPU busy.

What is larger can be halved, or recomputed, for a few percent of its time (docs/engine.md): there
memory counts for more.
"""


def memory_counts(width: int, layers: int, rows: int) -> bool:
    """Whether these rows are more than a GPU needs to be busy."""
    return rows * width * layers > BUSY


def default_token_budget(model: ModelProtocol, device: torch.device) -> int:
    """Rows that fit comfortably: 1 GiB of activations on a CPU, 0.4 of a GPU's memory."""
    per_row = max(1, depth(model)) * model.width  # a model of one's own may have no blocks
    if device.type != "cuda":
        return max(1024, int(2**30 / (4 * 24 * per_row)))  # 24: measured, see docs/engine.md
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1024, int(0.4 * memory / (3 * 24 * per_row)))


def step_token_budget(model: ModelProtocol, device: torch.device, rows: int) -> int:
    """Rows of a training step's chunk: all that fit, or half where halves keep a GPU busy."""
    fitting = default_token_budget(model, device)
    if device.type == "cuda" and memory_counts(model.width, depth(model), rows // 2):
        return min(fitting, -(-rows // 2))
    return fitting
