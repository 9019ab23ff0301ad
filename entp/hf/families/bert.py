"""BERT and RoBERTa."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from entp.hf.adapters import Layer, PretrainedModel, by_heads


class BertLayer(Layer):
    """query, key and value; norms come after the residuals."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.attention.self
        return attention.num_attention_heads, attention.attention_head_size**-0.5

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attention.self
        size = attention.attention_head_size
        products = (attention.query, attention.key, attention.value)
        q, k, v = (by_heads(product(h), size) for product in products)
        return q, k, v

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        h = self.layer.attention.output(attended, h)
        return self.layer.output(self.layer.intermediate(h), h)


class Bert(PretrainedModel):
    """BERT and MiniLM: every token is of type 0."""

    layer_class: type[Layer] = BertLayer
    head_name = "cls"

    def readout(self, h: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(h)
        return self.network.cls.predictions(h)


class Roberta(PretrainedModel):
    """RoBERTa: positions start behind the padding's. Unlike in HuggingFace's default, a padding
    token among the inputs takes a position like any other."""

    layer_class: type[Layer] = BertLayer

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self.first_position = self.base.embeddings.padding_idx + 1
