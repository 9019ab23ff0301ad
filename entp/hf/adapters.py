"""HuggingFace's models as models of the engine's protocol, around HuggingFace's own modules.

`encode` calls HuggingFace's forward pass with the mask of the mode. `project` and `finish` call the
modules inside each layer, so that whatever replaces one of them (LoRA) counts. The engine knows
none of these modules: it compares packed with `encode` before it uses it (entp/engine/support.py).

The last layer's `finish` includes the final norm, as HuggingFace's last hidden state does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from entp.engine.api import predict
from entp.engine.fingerprint import register_replayable
from entp.engine.masks import visible
from entp.errors import InputError

register_replayable("transformers", "peft", "entp.hf")
# cuDNN's attention returns NaN gradients with some masks and for single queries.
SAFE_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Layer:
    """One layer of a HuggingFace model: what stands before and after its attention."""

    def __init__(self, layer: Any, rotary: Any = None) -> None:
        """rotary: what makes the angles of rotary positions."""
        self.layer, self.rotary = layer, rotary
        self.norm: nn.Module | None = None  # what follows the last layer
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
    compiled = False
    """Whether layers are compiled (entp/hf/compiling.py)."""
    compiles_whole = True
    """Whether torch.compile can read HuggingFace's forward pass of a layer."""
    has_local_layers = False
    """Whether layers may see the tokens nearby alone (HuggingFace's sliding attention)."""

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
        rotary = getattr(self.base, "rotary_emb", None)
        layers = [self.layer_class(layer, rotary) for layer in self.layers()]
        layers[-1].norm = self.final_norm()
        if self.compiled:
            from entp.hf.compiling import as_compiled

            for layer in layers:
                as_compiled(layer)
        return layers

    def compile_layers(self) -> None:
        """Let torch compile each layer from now on, in every mode: at the first step that needs it.

        ModernBERT's in mode entp alone, where the engine calls what is inside a layer.
        """
        from entp.hf.compiling import compile_layers

        compile_layers(self)

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


def by_heads(x: Tensor, size: int) -> Tensor:
    """(..., H d) as (..., H, d)."""
    return x.unflatten(-1, (-1, size))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, of halves: the form of HuggingFace's weights."""
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin
