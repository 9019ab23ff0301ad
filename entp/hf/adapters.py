"""HuggingFace's models as models of the engine's protocol, around HuggingFace's own modules.

`encode` calls HuggingFace's forward pass with the mask of the mode. `project` and `finish` call the
modules inside each layer, so that whatever replaces one of them (LoRA) counts. The engine knows
none of these modules: it compares packed with `encode` before it uses it (entp/engine/support.py).

The last layer's `finish` includes the final norm, as HuggingFace's last hidden state does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from entp.engine.api import predict
from entp.engine.masks import visible
from entp.errors import InputError

# cuDNN's attention returns NaN gradients with some masks and for single queries.
SAFE_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose angles depend on the position alone."""


class Layer:
    """One layer of a HuggingFace model: what stands before and after its attention."""

    def __init__(self, layer: Any, norm: nn.Module | None = None) -> None:
        """norm: what follows the last layer."""
        self.layer, self.norm = layer, norm
        self.heads, self.scale = self.shape()

    def shape(self) -> tuple[int, float]:
        """Query heads, and what scores are multiplied by."""
        raise NotImplementedError

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (..., H, d), k and v (..., KV, d) of rows h (..., D) at these positions (...)."""
        raise NotImplementedError

    def finish(self, h: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (..., D), after the last one normed."""
        h = self.after_attention(h, attended)
        return h if self.norm is None else self.norm(h)

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP with their residuals, on rows (..., D)."""
        raise NotImplementedError


class PretrainedModel(nn.Module):
    """A HuggingFace model in the three modes of `entp.predict`; a subclass for each family.

    network: HuggingFace's model, on which peft and `save_pretrained` work.
    """

    layer_class: type[Layer]
    head_name = "lm_head"
    first_position = 0
    """HuggingFace's position id of the first token."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.width: int = network.config.hidden_size
        self.head = None if self._has_head() else _tied_head(network)

    @property
    def config(self) -> Any:
        """HuggingFace's configuration."""
        return self.network.config

    @property
    def base(self) -> Any:
        """HuggingFace's model without its head."""
        return self.network.base_model

    @property
    def vocab(self) -> int:
        """Token ids that the model reads: 0 to vocab - 1."""
        return self.network.get_input_embeddings().weight.shape[0]

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        return self.config.max_position_embeddings - self.first_position

    def forward(self, x: Tensor, mode: str = "entp", **options: Any) -> Tensor:
        """Predictions at every position: see `entp.predict`, which takes the same options."""
        return predict(self, x, mode, **options)

    def encode(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """HuggingFace's last hidden state (B, T, D): with full attention, causal, or with a mask.

        mask: bool, (B or 1, T, T), True where a key is seen.
        """
        seen = _seen(x, mask, causal)
        with _safe_attention(x):
            return self.hidden(x, position_ids, self._as_attention_mask(seen))

    def hidden(self, x: Tensor, position_ids: Tensor | None, attention_mask: Tensor) -> Tensor:
        """The last hidden state of HuggingFace's forward pass under this mask."""
        found = self.base(
            input_ids=x,
            attention_mask=attention_mask,
            position_ids=self.position_numbers(x, position_ids),
            use_cache=False,
        )
        return found.last_hidden_state

    def _as_attention_mask(self, seen: Tensor) -> Tensor:
        """A mask as HuggingFace's attention takes it, (B or 1, 1, T, T)."""
        kind = self.config._attn_implementation
        if kind == "sdpa":
            return seen[:, None]
        if kind == "eager":
            zeros = torch.zeros(seen.shape, dtype=self._dtype(), device=seen.device)
            return zeros.masked_fill(~seen, float("-inf"))[:, None]
        raise InputError(
            f"the model's attention is {kind!r}, which takes no mask of full attention: call "
            "model.network.set_attn_implementation('sdpa')."
        )

    def _dtype(self) -> torch.dtype:
        return self.network.get_input_embeddings().weight.dtype

    def position_numbers(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        """HuggingFace's position ids, (B or 1, T)."""
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)
        if position_ids.ndim == 1:
            position_ids = position_ids[None]
        return position_ids + self.first_position

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The first layer's input (B, T, D); position_ids: (B, T) or (T,), or None for 0, 1, …"""
        return self.base.embeddings(
            input_ids=x, position_ids=self.position_numbers(x, position_ids)
        )

    def layers(self) -> Sequence[nn.Module]:
        """HuggingFace's layers, in the order in which they run."""
        return list(self.base.encoder.layer)

    def final_norm(self) -> nn.Module | None:
        """What follows the last layer, or None."""
        return None

    def stack(self) -> list[Layer]:
        """The layers as the engine runs them; made anew, since any may have been replaced."""
        layers = [self.layer_class(layer) for layer in self.layers()]
        layers[-1].norm = self.final_norm()
        return layers

    def _has_head(self) -> bool:
        return hasattr(self.network, self.head_name)

    def readout(self, h: Tensor) -> Tensor:
        """Logits (..., vocab) by HuggingFace's head, or by the token embedding if it has none."""
        if self.head is not None:
            return self.head(h)
        return getattr(self.network, self.head_name)(h)

    @torch.no_grad()
    def keep_tokens(self, tokens: Sequence[int], new: int = 0) -> None:
        """Drop all other tokens. Token i of the model is then what was tokens[i].

        new: further tokens, each with the mean of those that are kept.
        """
        kept = torch.as_tensor(list(tokens))
        outputs, inputs = self.network.get_output_embeddings(), self.network.get_input_embeddings()
        table = nn.Embedding.from_pretrained(_some(inputs.weight, kept, new), freeze=False)
        self.network.set_input_embeddings(table)
        self.config.vocab_size = len(kept) + new
        if self.head is not None:
            self.head = _tied_head(self.network)
        else:
            tied = outputs.weight is inputs.weight
            fewer = _rows_of(outputs, kept, new, table if tied else None)
            self.network.set_output_embeddings(fewer)
            _share_bias(self.network, outputs, fewer)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Every weight once: one that is tied has its first name alone."""
        found = super().state_dict(*args, **options)
        for name in self._tied():
            found.pop(f"{options.get('prefix', '')}{name}", None)
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Tied weights are found under their first name too."""
        for name, first in self._tied().items():
            if f"{prefix}{first}" in state_dict:
                state_dict.setdefault(f"{prefix}{name}", state_dict[f"{prefix}{first}"])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _tied(self) -> dict[str, str]:
        """Further names of weights, and the first name of each."""
        first: dict[Tensor, str] = {}
        named = self.named_parameters(remove_duplicate=False)
        found = {name: first.setdefault(p, name) for name, p in named}
        return {name: one for name, one in found.items() if name != one}


def _some(rows: Tensor, kept: Tensor, new: int) -> Tensor:
    """Some rows, and so many times their mean."""
    some = rows[kept]
    return torch.cat([some, some.mean(0, keepdim=True).expand(new, *some.shape[1:])])


def _rows_of(layer: nn.Linear, kept: Tensor, new: int, tied: nn.Embedding | None) -> nn.Linear:
    """Some rows of an output layer, or those of the embedding that it is tied to."""
    count = len(kept) + new
    fewer = nn.Linear(layer.in_features, count, bias=layer.bias is not None, device="meta")
    fewer.weight = nn.Parameter(_some(layer.weight, kept, new)) if tied is None else tied.weight
    if layer.bias is not None:
        fewer.bias = nn.Parameter(_some(layer.bias, kept, new))
    return fewer


def _share_bias(network: Any, old: nn.Linear, new: nn.Linear) -> None:
    """Give the new layer's bias to modules that had the old one's: some heads have it twice."""
    for module in network.modules():
        if old.bias is not None and module._parameters.get("bias") is old.bias:
            module.bias = new.bias


def _tied_head(network: Any) -> nn.Linear:
    """An output layer whose weights are the token embedding's."""
    weight = network.get_input_embeddings().weight
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = weight
    return head


def _seen(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Which keys each query sees, bool (B or 1, T, T)."""
    time = x.shape[1]
    if causal:
        own = visible("decoder", time, device=x.device)
        return own if mask is None else own & mask
    if mask is not None:
        return mask
    return torch.ones(1, time, time, dtype=torch.bool, device=x.device)


def _safe_attention(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return sdpa_kernel(SAFE_BACKENDS) if x.is_cuda else contextlib.nullcontext()


def _by_heads(x: Tensor, size: int) -> Tensor:
    """(..., H d) as (..., H, d)."""
    return x.unflatten(-1, (-1, size))


# GPT-2


class Gpt2Layer(Layer):
    """ln_1, attn, ln_2, mlp; q, k and v come from one product."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.attn
        return attention.num_heads, attention.scaling

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attn
        q, k, v = attention.c_attn(self.layer.ln_1(h)).chunk(3, -1)
        size = attention.head_dim
        return _by_heads(q, size), _by_heads(k, size), _by_heads(v, size)

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


# BERT family


class BertLayer(Layer):
    """query, key and value; norms come after the residuals."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.attention.self
        return attention.num_attention_heads, attention.attention_head_size**-0.5

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attention.self
        size = attention.attention_head_size
        products = (attention.query, attention.key, attention.value)
        q, k, v = (_by_heads(product(h), size) for product in products)
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


class MPNetLayer(Layer):
    """As BERT's, under other names."""

    def shape(self) -> tuple[int, float]:
        attention = self.layer.attention.attn
        return attention.num_attention_heads, attention.attention_head_size**-0.5

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attention.attn
        size = attention.attention_head_size
        q, k, v = (_by_heads(part(h), size) for part in (attention.q, attention.k, attention.v))
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


# Llama family


class LlamaLayer(Layer):
    """q_proj, k_proj, v_proj with rotary positions, o_proj, and a gated MLP."""

    rotary: nn.Module

    def shape(self) -> tuple[int, float]:
        attention = self.layer.self_attn
        return attention.config.num_attention_heads, attention.scaling

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.self_attn
        normed = self.layer.input_layernorm(h)
        products = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (_by_heads(product(normed), attention.head_dim) for product in products)
        # HuggingFace's own angles, which are float32 in every model.
        cos, sin = self.rotary(h, position_ids.reshape(1, -1))
        cos, sin = (x.reshape(*position_ids.shape, 1, x.shape[-1]) for x in (cos, sin))
        # Under autocast angles are wider than q and k, and attention takes one type.
        return _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype), v

    def after_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        h = h + self.layer.self_attn.o_proj(attended)
        return h + self.layer.mlp(self.layer.post_attention_layernorm(h))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, of halves: the form of HuggingFace's weights."""
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin


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

    def stack(self) -> list[Layer]:
        layers = super().stack()
        for layer in layers:
            assert isinstance(layer, LlamaLayer)
            layer.rotary = self.base.rotary_emb
        return layers


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


# What can be wrapped

FAMILIES: dict[str, type[PretrainedModel]] = {
    "gpt2": Gpt2,
    "bert": Bert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
    "mpnet": MPNet,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
}
"""HuggingFace's `model_type`, and its adapter."""


def wrap(network: Any) -> PretrainedModel:
    """A HuggingFace model, or peft's model around one, as a model of the engine's protocol.

    The weights are shared, not copied.
    """
    network = _without_peft(network)
    config: Any = getattr(network, "config", None)
    if not isinstance(network, nn.Module) or not hasattr(config, "model_type"):
        raise InputError(
            f"a {type(network).__name__} is no HuggingFace model: give a model of transformers, or "
            "of peft around one."
        )
    check_config(config)
    return FAMILIES[config.model_type](network)


def _without_peft(network: Any) -> Any:
    """The model inside peft's, whose layers have the adapters; refuses what acts outside of it."""
    if not hasattr(network, "get_base_model") or not hasattr(network, "peft_config"):
        return network
    for config in network.peft_config.values():
        if getattr(config, "is_prompt_learning", False):
            raise InputError(
                f"peft's {config.peft_type.value} adds tokens or keys outside of the model's "
                "layers: LoRA and other adapters inside of layers can be used."
            )
    return network.get_base_model()


def check_config(config: Any) -> None:
    """InputError for a configuration that no adapter computes, with the reason."""
    kind = config.model_type
    reason = _REFUSED.get(kind) or _why_not(config)
    if kind not in FAMILIES and kind not in _REFUSED:
        reason = "no adapter knows its layers"
    if reason:
        raise InputError(
            f"a model of type {kind!r} cannot be used: {reason}. Allowed are "
            f"{', '.join(FAMILIES)}, with attention over all tokens."
        )


_REFUSED = {
    "modernbert": "two of three layers have sliding attention, which is no full attention",
}


def _why_not(config: Any) -> str | None:
    """What in a configuration is not attention over all tokens by position alone, or None."""
    if getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None) is not None:
        return "its layers have sliding attention"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"its positions are {config.position_embedding_type}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        return f"its rotary angles ({rope['rope_type']}) depend on the length of the sequence"
    return None
