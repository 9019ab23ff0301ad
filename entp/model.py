"""One Transformer, three modes.

    model = Transformer(ModelConfig(vocab=64, positions=64, **SIZES["small"]))
    logits = model(tokens, mode="entp")          # (batch, time, vocab); position t: the prediction after reading 0..t

The weights know nothing of the mode: it is an argument. Shapes in names: B batch, T time, D width, H heads, d head size,
N any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from entp.attention import as_prefix, attend, visible
from entp.config import MODES, ModelConfig
from entp.errors import InputError, one_of


class Block(nn.Module):
    """Pre-LN Transformer block: h + attention(norm(h)), then + MLP(norm(.)). Its parts work on any rows (..., D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.scale = 1.0 if config.scale == "one" else 1.0 / math.sqrt(width // config.heads)
        self.activation = nn.GELU(approximate="tanh") if config.activation == "gelu" else nn.ReLU()
        self.norm_1 = _norm(config)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = _norm(config)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., 3D) from self.qkv to q, k, v, each (..., H, d)."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return q, k, v

    def finish(self, h_ND: Tensor, attended_ND: Tensor) -> Tensor:
        """What follows attention: output projection, residual, MLP."""
        h_ND = h_ND + self.proj(attended_ND)
        return h_ND + self.out(self.activation(self.fc(self.norm_2(h_ND))))

    def forward(self, h_BTD: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.split_heads(self.qkv(self.norm_1(h_BTD))))
        attended = attend(q, k, v, scale=self.scale, mask=mask, causal=causal)
        return self.finish(h_BTD, attended.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """GPT-2 as the paper uses it, with the mode as an argument of `forward`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.tokens = nn.Embedding(config.vocab, width) if config.vocab else None
        self.read_in = nn.Linear(config.input_dim, width) if config.input_dim else None
        if config.position == "learned":
            self.positions = nn.Parameter(torch.empty(config.positions, width))
        elif config.position == "given":
            self.register_buffer("positions", torch.zeros(config.positions, width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(width, config.outputs) if config.outputs else None
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2: normal(0, 0.02), residual projections divided by sqrt(2 layers), biases zero."""
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("proj.weight", "out.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    @torch.no_grad()
    def set_positions(self, table: Tensor) -> None:
        """Set the position vectors (positions, width), for `position="given"` or "learned"."""
        if self.config.position == "none":
            raise InputError("this model has position='none': it has no position vectors to set.")
        if table.shape != self.positions.shape:
            raise InputError(f"position vectors have shape {tuple(table.shape)}: {tuple(self.positions.shape)} is needed.")
        self.positions.copy_(table)

    def forward(
        self,
        x: Tensor,
        mode: str = "entp",
        *,
        at: Tensor | np.ndarray | Sequence[int] | None = None,
        lengths: Tensor | None = None,
        prefix: Tensor | np.ndarray | Sequence[int] | int | None = None,
        impl: str = "auto",
        token_budget: int | None = None,
    ) -> Tensor:
        """Predictions of every position (or those in `at`) in one of the modes.

        x: token ids (B, T), or vectors (B, T, input_dim). lengths: (B,) true lengths of rows padded on the right; outputs
        at padding are 0 and nothing depends on it. prefix: for mode prefix, an int or (B,). at, impl, token_budget: see
        `entp.all_prefixes`; in the other modes `at` only selects, and impl is "triton" or torch's own.
        """
        from entp.engine.api import all_prefixes, causal_hidden, check_inputs, select

        if mode == "entp":
            return all_prefixes(self, x, at=at, impl=impl, lengths=lengths, token_budget=token_budget)
        if mode not in MODES:
            raise one_of("mode", mode, MODES)
        x, lengths = check_inputs(self, x, lengths)
        hidden = causal_hidden(self, x, mode, lengths=lengths, prefix=as_prefix(prefix, x.device), impl=impl)
        return select(self, hidden, at, lengths)

    def hidden(
        self,
        x: Tensor,
        mode: str,
        *,
        lengths: Tensor | None = None,
        prefix: Tensor | np.ndarray | Sequence[int] | int | None = None,
    ) -> Tensor:
        """The last block's output (B, T, D) in mode decoder or prefix; with prefix = T this is the plain encoder."""
        prefix = as_prefix(prefix, x.device)
        if isinstance(prefix, Tensor) and prefix.numel() not in (1, x.shape[0]):
            raise InputError(f"prefix has {prefix.numel()} numbers for {x.shape[0]} sequences: give one number, or one each.")
        h = self.embed(x)
        everything = mode == "prefix" and isinstance(prefix, int) and prefix >= x.shape[1] and lengths is None
        causal = mode == "decoder"  # keys at padding lie after every real query: the causal mask hides them too
        mask = None
        if not (everything or causal):
            mask = visible(mode, x.shape[1], prefix=prefix, lengths=lengths, device=x.device)[:, None]
        for block in self.blocks:
            h = block(h, mask, causal)
        return h

    def embed(self, x: Tensor, start: int | Tensor = 0) -> Tensor:
        """Inputs (B, T) or (B, T, input_dim) to (B, T, D), positions from `start` (an int, or (B,)) added."""
        if self.tokens is not None:
            h = self.tokens(x)
        else:
            assert self.read_in is not None
            h = self.read_in(x)
        if self.config.position == "none":
            return h
        if isinstance(start, int):
            return h + self.positions[start : start + x.shape[1]]
        return h + self.positions[start[:, None] + torch.arange(x.shape[1], device=x.device)]

    def readout(self, h_ND: Tensor) -> Tensor:
        """Last block's rows (..., D) to outputs (..., vocab or outputs)."""
        h_ND = self.norm(h_ND)
        if self.head is not None:
            return self.head(h_ND)
        assert self.tokens is not None
        return F.linear(h_ND, self.tokens.weight)


def _norm(config: ModelConfig) -> nn.Module:
    return nn.LayerNorm(config.width) if config.norm == "layer" else nn.Identity()
