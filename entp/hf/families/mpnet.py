"""MPNet."""

from __future__ import annotations

from torch import Tensor

from entp.hf.adapters import Layer, by_heads
from entp.hf.families.bert import Roberta


class MPNetLayer(Layer):
    """As BERT's, under other names."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.attention.attn
        return attention.num_attention_heads, attention.attention_head_size**-0.5

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attention.attn
        size = attention.attention_head_size
        q, k, v = (by_heads(part(h), size) for part in (attention.q, attention.k, attention.v))
        return q, k, v

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        attention = self.layer.attention
        h = attention.LayerNorm(attention.dropout(attention.attn.o(attended)) + h)
        return self.layer.output(self.layer.intermediate(h), h)


class MPNet(Roberta):
    """MPNet: RoBERTa's positions, and a bias on attention scores, the same in every layer.

    HuggingFace counts the bias's distances in tokens. Here they are those of the position ids: the
    same, unless other ids are given.
    """

    layer_class: type[Layer] = MPNetLayer

    def attention_bias(self, query_ids: Tensor, key_ids: Tensor) -> Tensor:
        """(B or 1, H, Q, K) from position ids (Q,) and (K,), or (B, Q) and (B, K)."""
        encoder = self.base.encoder
        distance = key_ids[..., None, :] - query_ids[..., :, None]
        bias = encoder.relative_attention_bias(encoder.relative_position_bucket(distance))
        return bias.movedim(-1, -3).reshape(-1, bias.shape[-1], *distance.shape[-2:])

    def hidden(self, x: Tensor, position_ids: Tensor | None, attention_mask: Tensor) -> Tensor:
        """HuggingFace's forward pass; with ids of one's own, which its encoder does not take, its
        layers one after the other."""
        if position_ids is None:
            return super().hidden(x, None, attention_mask)
        h, bias = self.embed(x, position_ids), self.attention_bias(position_ids, position_ids)
        for layer in self.layers():
            h = layer(h, attention_mask, bias)[0]
        return h
