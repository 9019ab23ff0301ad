"""The definition of ENTP: the paper's loop. Everything faster is compared with this.

T_E(x)_n = E(x_1..x_n)_n: an encoder reads each prefix from scratch, and its last position is the prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from entp.model import Transformer


def prefix_hidden(model: Transformer, x: Tensor, wanted: Tensor) -> Tensor:
    """Last block's output at the end of each wanted prefix.

    x: (B, T) ids or (B, T, input_dim) vectors. wanted: bool (B, T), True at (b, t) for the prefix x[b, :t+1].
    Returns (number wanted, D), sequence by sequence.
    """
    outputs, order = [], []
    for t in range(x.shape[1]):
        asked = wanted[:, t].nonzero()[:, 0]
        if len(asked):
            encoded = model.hidden(x[asked, : t + 1], "prefix", prefix=t + 1)
            outputs.append(encoded[:, -1])
            order.append(asked * x.shape[1] + t)
    if not outputs:
        return model.embed(x)[wanted]
    return torch.cat(outputs)[torch.argsort(torch.cat(order))]
