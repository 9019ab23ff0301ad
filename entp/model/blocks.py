"""A Transformer block and the modules it is made of.

To add a norm or an activation: a line in entp/config/model.py, and one here. The kernels decline
what they were not taught.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from entp.config import ModelConfig
from entp.engine.masks import attend
from entp.model.positions import Rotary


class SwiGLU(nn.Module):
    """silu(gate) * up, for x = (gate, up) (Shazeer 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of a ModelConfig."""
    if config.norm == "layer":
        return nn.LayerNorm(config.width)
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=1e-5)
    return nn.Identity()


def make_activation(config: ModelConfig) -> nn.Module:
    """The non-linearity of a ModelConfig's MLP."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "gelu": lambda: nn.GELU(approximate="tanh"),
        "gelu-exact": nn.GELU,
        "relu": nn.ReLU,
        "silu": nn.SiLU,
        "swiglu": SwiGLU,
    }
    return kinds[config.activation]()


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream.

    Pre-LN: h + attention(norm(h)), then h + MLP(norm(h)).
    Post-LN: norm(h + attention(h)), then norm(h + MLP(h)).

    `project` and `finish` are what stands before and after attention. They work on any rows
    (..., D), so the engine can run a block on packed prefixes; `forward` is the block on whole
    sequences, and defines what it computes.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, size = config.width, config.width // config.heads
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.scale = 1.0 if config.attention_scale == "one" else 1.0 / math.sqrt(size)
        self.pre_norm = config.norm_placement == "pre"
        self.activation = make_activation(config)
        self.rotary = Rotary() if config.position_embedding == "rotary" else None
        self.norm_1 = make_norm(config)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * size, bias=config.bias)
        self.proj = nn.Linear(width, width, bias=config.bias)
        self.norm_2 = make_norm(config)
        gates = 2 if config.activation == "swiglu" else 1
        self.fc = nn.Linear(width, gates * config.hidden, bias=config.bias)
        self.out = nn.Linear(config.hidden, width, bias=config.bias)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., (H + 2 KV) d) from self.qkv to q (..., H, d), k and v (..., KV, d)."""
        groups = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = qkv.unflatten(-1, (sum(groups), -1)).split(groups, dim=-2)
        return q, k, v

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (..., H, d), k and v (..., KV, d) of rows h (..., D) at these positions (...)."""
        if self.pre_norm:
            h = self.norm_1(h)
        q, k, v = self.split_heads(self.qkv(h))
        if self.rotary is not None:
            q, k = self.rotary(q, position_ids), self.rotary(k, position_ids)
        return q, k, v

    def finish(self, h: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP with their residuals, on rows h and attended (..., D)."""
        if self.pre_norm:
            h = h + self.proj(attended)
            return h + self.out(self.activation(self.fc(self.norm_2(h))))
        h = self.norm_1(h + self.proj(attended))
        return self.norm_2(h + self.out(self.activation(self.fc(h))))

    def forward(
        self,
        h_BTD: Tensor,
        position_ids: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The block on sequences (B, T, D).

        mask: bool, True where a key is seen. bias: (B or 1, H, T, T), added to the scores.
        """
        q, k, v = (x.transpose(1, 2) for x in self.project(h_BTD, position_ids))
        attended = attend(q, k, v, scale=self.scale, mask=mask, causal=causal, bias=bias)
        return self.finish(h_BTD, attended.transpose(1, 2).flatten(2))
