"""GPT-NeoX: Pythia and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from entp.hf.adapters import Layer, PretrainedModel, by_heads, rotated


class GptNeoxLayer(Layer):
    """q, k and v of each head from one product; rotary positions in a part of it; attention and MLP
    may read the same input."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.attention
        return attention.config.num_attention_heads, attention.scaling

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attention
        qkv = by_heads(
            attention.query_key_value(self.layer.input_layernorm(h)), 3 * attention.head_size
        )
        q, k, v = qkv.chunk(3, -1)
        cos, sin = self.rotary(h, position_ids.reshape(1, -1))
        cos, sin = (x.reshape(*position_ids.shape, 1, x.shape[-1]) for x in (cos, sin))
        return _partly(q, cos, sin).to(v.dtype), _partly(k, cos, sin).to(v.dtype), v

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        layer = self.layer
        middle = layer.post_attention_dropout(layer.attention.dense(attended)) + h
        read = h if layer.use_parallel_residual else middle
        return layer.post_mlp_dropout(layer.mlp(layer.post_attention_layernorm(read))) + middle


class GptNeox(PretrainedModel):
    """GPT-NeoX."""

    layer_class: type[Layer] = GptNeoxLayer

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        # Its attention draws its dropout in a function; a module lets the engine see it.
        self.attention_dropout = nn.Dropout(getattr(self.config, "attention_dropout", 0.0) or 0.0)

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.base.emb_dropout(self.base.embed_in(x))

    def layers(self) -> Sequence[nn.Module]:
        return list(self.base.layers)

    def final_norm(self) -> nn.Module | None:
        return self.base.final_layer_norm


def _partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the first dimensions of a head, as many as have angles."""
    size = cos.shape[-1]
    return torch.cat((rotated(x[..., :size], cos, sin), x[..., size:]), -1)
