"""ModernBERT: rotary positions, and layers that see the tokens nearby alone.

Layers are global or local. A local one sees the tokens at most `config.sliding_window` positions
away, in both directions: half of `config.local_attention`. Each kind has rotary angles of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from entp.hf.adapters import Layer, PretrainedModel, rotated

LOCAL = "sliding_attention"
"""HuggingFace's type of a local layer."""
HIDDEN = -1e30
"""Added to the score of a key that is not seen."""
ROTATE = "apply_rotary_pos_emb"
"""HuggingFace's function that rotates queries and keys."""


class ModernBertLayer(Layer):
    """attn_norm (none in the first layer), Wqkv with rotary positions, Wo, mlp_norm, mlp."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.attn
        return attention.config.num_attention_heads, attention.head_dim**-0.5

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attn
        qkv = attention.Wqkv(self.layer.attn_norm(h))
        q, k, v = qkv.unflatten(-1, (3, -1, attention.head_dim)).unbind(-3)
        # HuggingFace's own angles, which are float32 in every model.
        cos, sin = self.rotary(h, position_ids.reshape(1, -1), self.layer.attention_type)
        cos, sin = (x.reshape(*position_ids.shape, x.shape[-1]) for x in (cos, sin))
        rotate = type(attention).forward.__globals__[ROTATE]
        return *rotate(q, k, cos, sin, unsqueeze_dim=-2), v

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        attention = self.layer.attn
        h = h + attention.out_drop(attention.Wo(attended))
        return h + self.layer.mlp(self.layer.mlp_norm(h))


class ModernBert(PretrainedModel):
    """ModernBERT.

    HuggingFace counts a local layer's distances in tokens. Here they are those of the position ids:
    the same, unless other ids are given.
    """

    layer_class: type[Layer] = ModernBertLayer
    head_name = "decoder"
    has_local_layers = True
    compiles_whole = False  # its attention's forward has a closure that torch cannot guard

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        for layer in self.layers():
            attention: Any = layer.attn
            kind: Any = type(attention)
            attention.__class__ = _with_wide_gradient(kind)

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.base.embeddings(input_ids=x)

    def layers(self) -> Sequence[nn.Module]:
        return list(self.base.layers)

    def final_norm(self) -> nn.Module | None:
        return self.base.final_norm

    def nearby(self, query_ids: Tensor, key_ids: Tensor) -> Tensor:
        """Which keys a local layer's queries see, bool (B or 1, 1, Q, K)."""
        distance = (key_ids[..., None, :] - query_ids[..., :, None]).abs()
        near = distance <= self.config.sliding_window
        return near.reshape(-1, 1, *near.shape[-2:])

    def attention_bias(self, query_ids: Tensor, key_ids: Tensor) -> list[Tensor | None]:
        """For each layer (B or 1, 1, Q, K), or None where it is global."""
        far = ~self.nearby(query_ids, key_ids)
        bias = torch.zeros(far.shape, device=far.device).masked_fill(far, HIDDEN)
        kinds = [layer.attention_type for layer in self.base.layers]
        return [bias if kind == LOCAL else None for kind in kinds]

    def hidden(self, x: Tensor, position_ids: Tensor | None, attention_mask: Tensor) -> Tensor:
        """HuggingFace's forward pass, with a mask for each kind of layer."""
        ids = self.position_numbers(x, position_ids)
        near = self.nearby(ids, ids)
        if attention_mask.dtype == torch.bool:
            local = attention_mask & near
        else:
            local = attention_mask.masked_fill(~near, float("-inf"))
        masks = {"full_attention": attention_mask, LOCAL: local}
        return self.base(input_ids=x, attention_mask=masks, position_ids=ids).last_hidden_state

    def readout(self, h: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(h)
        return self.network.decoder(self.network.head(h))

    def keep_tokens(self, tokens: Sequence[int], new: int = 0) -> None:
        super().keep_tokens(tokens, new)
        # HuggingFace builds no embedding whose padding token is not in the vocabulary.
        padding, kept = self.config.pad_token_id, list(tokens)
        self.config.pad_token_id = kept.index(padding) if padding in kept else None


@functools.cache
def _with_wide_gradient(kind: Any) -> type[nn.Module]:
    """A class of attention with the same outputs, and gradients in float64 in a float64 model.

    HuggingFace rotates queries and keys in float32 in every model. Their gradients in a float64
    model are then rounded to float32 once for every forward pass, so that sums over prefixes depend
    on their order. In other types nothing changes. The class runs HuggingFace's own code, with
    another function in place of its rotation.
    """
    if getattr(kind, "wide_gradient", False):
        return kind
    plain = kind.forward
    names = {**plain.__globals__, ROTATE: _wide_rotation(plain.__globals__[ROTATE])}
    forward = FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    return type(kind.__name__, (kind,), {"forward": forward, "wide_gradient": True})


def _wide_rotation(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """HuggingFace's rotation of q and k with gradients in float64 in a float64 model."""

    def wide_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Any:
        if q.dtype != torch.float64 or not torch.is_grad_enabled():
            return rotate(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        with torch.no_grad():
            rounded = rotate(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        wide = (rotated(x, cos, sin) for x in (q, k))
        return tuple(x + (y - x).detach() for x, y in zip(wide, rounded, strict=True))

    return wide_rotation
