"""The definition of ENTP: the paper's loop. Everything faster is compared with this.

T_E(x)_n = E(x_1..x_n)_n: an encoder reads each prefix from scratch, and its last position is the
prediction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from entp.engine.protocol import ModelProtocol


def prefix_hidden(
    model: ModelProtocol, x: Tensor, target_mask: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """The last block's output at the end of each prefix, (number of targets, D), by sequence.

    x: (B, T) ids or (B, T, input_dim) vectors.
    target_mask: bool (B, T), True at (b, t) for the prefix x[b, :t+1].
    position_ids: (B, T), or None for 0, 1, 2, ...
    """
    outputs, order = [], []
    for t in range(x.shape[1]):
        rows = target_mask[:, t].nonzero()[:, 0].to(x.device)
        if len(rows):
            ids = None if position_ids is None else position_ids[rows, : t + 1]
            outputs.append(model.encode(x[rows, : t + 1], ids)[:, -1])
            order.append(rows * x.shape[1] + t)
    if not outputs:
        return model.embed(x, position_ids).flatten(0, 1)[:0]
    return torch.cat(outputs)[torch.argsort(torch.cat(order))]
