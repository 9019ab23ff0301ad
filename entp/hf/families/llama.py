"""Llama, and what has its layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from entp.hf.adapters import Layer, PretrainedModel, by_heads, rotated


class LlamaLayer(Layer):
    """q_proj, k_proj, v_proj with rotary positions, o_proj, and a gated MLP."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.self_attn
        return attention.config.num_attention_heads, attention.scaling

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.products(h)
        # HuggingFace's own angles, which are float32 in most models.
        cos, sin = self.rotary(h, position_ids.reshape(1, -1))
        cos, sin = (x.reshape(*position_ids.shape, 1, x.shape[-1]) for x in (cos, sin))
        # Under autocast angles are wider than q and k, and attention takes one type.
        return rotated(q, cos, sin).to(v.dtype), rotated(k, cos, sin).to(v.dtype), v

    def products(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by heads, before their rotation."""
        attention = self.layer.self_attn
        normed = self.layer.input_layernorm(h)
        size = attention.head_dim
        q = by_heads(attention.q_proj(normed), size)
        return q, by_heads(attention.k_proj(normed), size), by_heads(attention.v_proj(normed), size)

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        h = h + self.layer.self_attn.o_proj(attended)
        return h + self.layer.mlp(self.layer.post_attention_layernorm(h))


class Qwen3Layer(LlamaLayer):
    """Llama's with norms of q and k, head by head."""

    def products(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().products(h)
        return self.layer.self_attn.q_norm(q), self.layer.self_attn.k_norm(k), v


class Olmo2Layer(LlamaLayer):
    """Llama's with norms of q and k, all heads together, and norms after attention and MLP."""

    def products(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.self_attn
        q, k = attention.q_norm(attention.q_proj(h)), attention.k_norm(attention.k_proj(h))
        size = attention.head_dim
        return by_heads(q, size), by_heads(k, size), by_heads(attention.v_proj(h), size)

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        h = h + self.layer.post_attention_layernorm(self.layer.self_attn.o_proj(attended))
        return h + self.layer.post_feedforward_layernorm(self.layer.mlp(h))


class Llama(PretrainedModel):
    """Llama, and Mistral and Qwen2 without sliding attention."""

    layer_class: type[Layer] = LlamaLayer

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        # Llama's attention draws its dropout in a function; a module lets the engine see it.
        self.attention_dropout = nn.Dropout(getattr(self.config, "attention_dropout", 0.0) or 0.0)
        for norm in _rms_norms(self.base):
            kind: Any = type(norm)
            norm.__class__ = _with_wide_gradient(kind)

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.base.embed_tokens(x)

    def layers(self) -> Sequence[nn.Module]:
        return list(self.base.layers)

    def final_norm(self) -> nn.Module | None:
        return self.base.norm


class Qwen3(Llama):
    """Qwen3 without sliding attention."""

    layer_class: type[Layer] = Qwen3Layer


class Olmo2(Llama):
    """OLMo 2."""

    layer_class: type[Layer] = Olmo2Layer


def _rms_norms(base: Any) -> Iterator[nn.Module]:
    """The norms of a Llama that are HuggingFace's own, not changed before."""
    for module in base.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            yield module


@functools.cache
def _with_wide_gradient(kind: Any) -> type[nn.Module]:
    """A class of norms with the same outputs, and gradients in float64 in a float64 model.

    HuggingFace's norm computes in float32 in every model. Its gradient in a float64 model is then
    rounded to float32 once for every use of a row, so that sums over prefixes depend on their
    order. In other types nothing changes.
    """
    if getattr(kind, "wide_gradient", False):
        return kind

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype != torch.float64 or not torch.is_grad_enabled():
            return kind.forward(self, x)
        wide = (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )
        with torch.no_grad():
            rounding = kind.forward(self, x) - wide
        return wide + rounding

    return type(kind.__name__, (kind,), {"forward": forward, "wide_gradient": True})
