"""GPT-2."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from entp.hf.adapters import Layer, PretrainedModel, by_heads


class Gpt2Layer(Layer):
    """ln_1, attn, ln_2, mlp; q, k and v come from one product."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.attn
        return attention.num_heads, attention.scaling

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attn
        q, k, v = attention.c_attn(self.layer.ln_1(h)).chunk(3, -1)
        size = attention.head_dim
        return by_heads(q, size), by_heads(k, size), by_heads(v, size)

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        attention = self.layer.attn
        h = h + attention.resid_dropout(attention.c_proj(attended))
        return h + self.layer.mlp(self.layer.ln_2(h))


class Gpt2(PretrainedModel):
    """GPT-2."""

    layer_class: type[Layer] = Gpt2Layer

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        ids = self.position_numbers(x, position_ids)
        return self.base.drop(self.base.wte(x) + self.base.wpe(ids))

    def layers(self) -> Sequence[nn.Module]:
        return list(self.base.h)

    def final_norm(self) -> nn.Module | None:
        return self.base.ln_f
