"""The forward pass and the loss, shared by training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from entp.config import Run
from entp.engine.devices import triton_missing


@dataclass(frozen=True)
class Forward:
    """How a model is run: mode, implementation and precision, and which loss its outputs have."""

    mode: str
    prefix_length: int | None
    """The first tokens that see each other in mode prefix-lm."""
    loss: str
    impl: str
    token_budget: int | None
    precision: str

    @classmethod
    def of(cls, run: Run, mode: str | None = None) -> Forward:
        """That of a run, or of its step in another mode."""
        how = run.train
        return cls(
            mode or run.mode,
            run.task.prefix,
            run.task.loss,
            how.impl,
            how.token_budget,
            how.precision,
        )

    def autocast(self, device: torch.device) -> torch.autocast:
        """The precision of matrix products on a device: a context."""
        half = self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=half)

    def __call__(
        self,
        model: Any,
        x: Tensor,
        at: Tensor,
        *,
        lengths: Tensor | None = None,
        position_ids: Tensor | None = None,
        prefix: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        """Outputs (number of True in at, outputs).

        prefix: (B,) runs mode prefix-lm instead, with a prefix for each sequence.
        prefix_lengths: (B,) those of mode prefix-lm, where sequences have their own.
        """
        mode, first = self.mode, prefix
        if prefix is not None:
            mode = "prefix-lm"
        elif mode == "prefix-lm":
            first = self.prefix_length if prefix_lengths is None else prefix_lengths  # type: ignore[assignment]
        more = {} if position_ids is None else {"position_ids": position_ids}
        with self.autocast(x.device):
            return model(
                x,
                mode,
                at=at,
                lengths=lengths,
                prefix=first,
                impl=self.impl,
                token_budget=self.token_budget,
                **more,
            )

    def loss_rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row, in fp32 or float64: outputs (M, k), targets (M,)."""
        wide = _wide(outputs)
        if self.loss == "squared_error":
            return F.mse_loss(wide.squeeze(-1), targets.to(wide.dtype), reduction="none")
        return F.cross_entropy(wide, targets, reduction="none")

    def loss_sum(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sum of the rows' losses, each times its weight if there are weights."""
        kernel = outputs.is_cuda and self.loss == "cross_entropy"
        if kernel and triton_missing(outputs.device) is None:
            from entp.engine.triton.loss import cross_entropy

            return cross_entropy(outputs, targets, weights)
        rows = self.loss_rows(outputs, targets)
        return rows.sum() if weights is None else rows @ weights.to(rows.dtype)

    def answers(self, outputs: Tensor) -> Tensor:
        """The likeliest token of each row, or its number in fp32 or float64."""
        return _wide(outputs).squeeze(-1) if self.loss == "squared_error" else outputs.argmax(-1)


def _wide(outputs: Tensor) -> Tensor:
    """In fp32 at least."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
