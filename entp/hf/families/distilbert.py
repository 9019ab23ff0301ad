"""DistilBERT."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from entp.hf.adapters import Layer, PretrainedModel, by_heads


class DistilBertLayer(Layer):
    """As BERT's, under other names."""

    def shape(self) -> tuple[int, float]:
        return self.layer.attention.n_heads, self.layer.attention.scaling

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attention
        products = (attention.q_lin, attention.k_lin, attention.v_lin)
        q, k, v = (by_heads(product(h), attention.attention_head_size) for product in products)
        return q, k, v

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        h = self.layer.sa_layer_norm(self.layer.attention.out_lin(attended) + h)
        return self.layer.output_layer_norm(self.layer.ffn(h) + h)


class DistilBert(PretrainedModel):
    """DistilBERT."""

    layer_class: type[Layer] = DistilBertLayer
    head_name = "vocab_projector"

    def layers(self) -> Sequence[nn.Module]:
        return list(self.base.transformer.layer)

    def hidden(self, x: Tensor, position_ids: Tensor | None, attention_mask: Tensor) -> Tensor:
        found = self.base(
            input_ids=x,
            attention_mask=attention_mask,
            position_ids=self.position_numbers(x, position_ids),
        )
        return found.last_hidden_state

    def readout(self, h: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(h)
        network = self.network
        h = network.vocab_layer_norm(network.activation(network.vocab_transform(h)))
        return network.vocab_projector(h)
