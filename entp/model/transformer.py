"""One Transformer, three modes.

    model = Transformer(ModelConfig(vocab=64, context_length=64, **SIZES["small"]))
    # (batch, time, vocab); position t: the prediction after reading 0..t
    logits = model(tokens, mode="entp")

The weights know nothing of the mode: it is an argument. The methods `encode`, `embed`, `stack`,
`attention_bias` and `readout` are what the engine needs of a model (entp/engine/protocol.py); a
Transformer of your own may stand in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from entp.config import ModelConfig
from entp.engine import fingerprint
from entp.engine.api import predict
from entp.errors import InputError
from entp.model.blocks import Block, SwiGLU, make_norm
from entp.model.positions import RelativeBias, Rotary, sinusoids


class Transformer(nn.Module):
    """GPT-2 as in the paper unless the config says otherwise; `forward` takes the mode."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.width, self.vocab, self.input_dim = width, config.vocab, config.input_dim
        self.context_length = config.context_length if config.has_limit else None
        self.tokens = nn.Embedding(config.vocab, width) if config.vocab else None
        self.read_in = nn.Linear(config.input_dim, width) if config.input_dim else None
        if config.position_embedding == "learned":
            self.positions = nn.Parameter(torch.empty(config.context_length, width))
        elif config.position_embedding == "given":
            self.register_buffer("positions", torch.zeros(config.context_length, width))
        relative = config.position_embedding == "relative"
        self.relative = RelativeBias(config.heads) if relative else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.head = _make_head(config)
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2: normal(0, 0.02), residual projections divided by sqrt(2 layers), biases zero.

        What reads vectors keeps torch's own, as in Garg et al.: with 0.02 the residual stream
        begins so small that in-context learning does not leave the answer 0 at their learning rate.
        """
        layers = self.config.layers * self.config.loops
        for name, p in self.named_parameters():
            if name.startswith("read_in."):
                continue
            if p.ndim == 2:
                residual = name.endswith(("proj.weight", "out.weight"))
                std = 0.02 / math.sqrt(2 * layers) if residual else 0.02
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    @torch.no_grad()
    def set_positions(self, table: Tensor) -> None:
        """Set the position vectors (context_length, width) of a given or learned embedding."""
        if not self.config.has_limit:
            raise InputError(
                f"this model has position_embedding={self.config.position_embedding!r}: it has no "
                "position vectors to set."
            )
        if table.shape != self.positions.shape:
            raise InputError(
                f"position vectors have shape {tuple(table.shape)}: {tuple(self.positions.shape)} "
                "is needed."
            )
        self.positions.copy_(table)

    def forward(
        self,
        x: Tensor,
        mode: str = "entp",
        *,
        at: Tensor | np.ndarray | Sequence[int] | None = None,
        lengths: Tensor | None = None,
        prefix: Tensor | np.ndarray | Sequence[int] | int | None = None,
        position_ids: Tensor | None = None,
        impl: str = "auto",
        token_budget: int | None = None,
    ) -> Tensor:
        """Predictions at every position, or those in `at`: see `entp.predict`."""
        return predict(
            self,
            x,
            mode,
            at=at,
            lengths=lengths,
            prefix=prefix,
            position_ids=position_ids,
            impl=impl,
            token_budget=token_budget,
        )

    def encode(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """The last block's output (B, T, D): with full attention, causal, or with a mask."""
        h = self.embed(x, position_ids)
        ids = torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
        bias = self.attention_bias(ids, ids)
        seen = None if mask is None else mask[:, None]
        for block in self.stack():
            h = block(h, ids, seen, causal, bias)
        return h

    def stack(self) -> list[Block]:
        """The blocks after the causal ones, in the order in which they run; with loops, each
        several times."""
        upper = cast("list[Block]", list(self.blocks[self.config.causal_layers :]))
        return upper * self.config.loops

    def causal_stack(self) -> list[Block]:
        """The first blocks, if they are causal in every mode."""
        return cast("list[Block]", list(self.blocks[: self.config.causal_layers]))

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """What the stack reads (B, T, D): vectors of tokens and positions, after the causal blocks.

        position_ids: (B, T) or (T,), or None for 0, 1, 2, ...
        """
        h = self.vectors(x, position_ids)
        if not self.config.causal_layers:
            return h
        ids = torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
        bias = self.attention_bias(ids, ids)
        for block in self.causal_stack():
            h = block(h, ids, None, True, bias)
        return h

    def vectors(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Vectors (B, T, D) of inputs (B, T) or (B, T, input_dim) and of their positions."""
        if self.tokens is not None:
            h = self.tokens(x)
        else:
            assert self.read_in is not None
            h = self.read_in(x)
        if self.config.position_embedding == "sinusoidal":
            if position_ids is None:
                position_ids = torch.arange(x.shape[1], device=x.device)
            return h + sinusoids(position_ids, self.width, h.dtype)
        if self.context_length is None:
            return h
        if position_ids is None:
            return h + self.positions[: x.shape[1]]
        return h + self.positions[position_ids]

    def attention_bias(self, query_ids: Tensor, key_ids: Tensor) -> Tensor | None:
        """What is added to attention scores in every layer, (B or 1, H, Q, K), or None."""
        if self.relative is None:
            return None
        bias = self.relative(query_ids, key_ids)
        return bias if bias.ndim == 4 else bias[None]

    def readout(self, h: Tensor) -> Tensor:
        """Last block's rows (..., D) to outputs (..., vocab or outputs)."""
        h = self.norm(h)
        if self.head is not None:
            return self.head(h)
        assert self.tokens is not None
        return F.linear(h, self.tokens.weight)


def _make_head(config: ModelConfig) -> nn.Linear | None:
    """The outputs' layer; None where the embedding serves."""
    if config.outputs is not None:
        return nn.Linear(config.width, config.outputs)
    if config.tied_head or config.vocab is None:
        return None
    return nn.Linear(config.width, config.vocab, bias=False)


fingerprint.register(
    Transformer,
    *("encode", "embed", "vectors", "stack", "causal_stack", "attention_bias", "readout"),
    kernels=True,
)
fingerprint.register(Block, "forward", "project", "finish", "split_heads", kernels=True)
fingerprint.register_rowwise(Rotary, SwiGLU, RelativeBias)
