"""Encoder-only next-token prediction for transformers, in one file.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(tokens, max_new_tokens=20)

Three modes with the same weights (`config.mode`):
    entp        an encoder reads each prefix from scratch with full attention, and its last position
                predicts the next token. T tokens are T passes, and there is no cache.
    decoder     causal attention.
    prefix-lm   causal, and the first `prefix_lengths` tokens see each other.

This file needs torch and transformers only: a copy of it lies in every exported folder.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput

MODES = ("entp", "decoder", "prefix-lm")
PREFIXES_AT_ONCE = 8
"""Prefixes of neighbouring lengths that are padded and read together in mode entp."""
BASE = 10_000.0
"""Wavelengths of sinusoidal and rotary positions go from 2 pi to 2 pi times this."""

# cuDNN's attention returns NaN gradients with some masks and for single queries.
_SAFE_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class EntpConfig(PreTrainedConfig):
    """The shape of a model, and its mode."""

    model_type = "entp"

    def __init__(
        self,
        vocab_size: int = 64,
        max_position_embeddings: int = 64,
        hidden_size: int = 192,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 3,
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        norm: str = "layer",
        activation: str = "gelu",
        position_embedding: str = "learned",
        attention_scale: str = "sqrt",
        norm_placement: str = "pre",
        bias: bool = True,
        loops: int = 1,
        mode: str = "entp",
        prefix_length: int | None = None,
        tie_word_embeddings: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.norm = norm
        self.activation = activation
        self.position_embedding = position_embedding
        self.attention_scale = attention_scale
        self.norm_placement = norm_placement
        self.bias = bias
        self.loops = loops
        self.mode = mode
        self.prefix_length = prefix_length
        self.tie_word_embeddings = tie_word_embeddings
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.initializer_range = initializer_range
        super().__init__(**{k: v for k, v in kwargs.items() if k != "use_cache"})
        self.use_cache = False


def _angles(position_ids: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(..., count) angles at frequencies from 1 down to about 1 / BASE, in fp32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = BASE ** (-torch.arange(count, device=position_ids.device, dtype=wide) / count)
    return position_ids[..., None].to(wide) * frequencies


def _sinusoids(position_ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(..., width) sines, then cosines, of every position."""
    found = _angles(position_ids, -(-width // 2), dtype)
    return torch.cat([found.sin(), found.cos()], -1)[..., :width].to(dtype)


def _rotate(x: Tensor, position_ids: Tensor) -> Tensor:
    """x (..., H, d) turned by its positions (...), feature e together with e + d / 2."""
    angles = _angles(position_ids, x.shape[-1] // 2, x.dtype)[..., None, :]
    cos, sin = angles.cos(), angles.sin()
    one, two = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)


class EntpRelativeBias(nn.Module):
    """A learned number per head and bucket of distances, added to all scores, as in T5."""

    BUCKETS = 32
    FARTHEST = 128

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self.BUCKETS, heads))

    def forward(self, position_ids: Tensor) -> Tensor:
        """(B, H, T, T) from position ids (B, T)."""
        apart = position_ids[:, None, :] - position_ids[:, :, None]
        return self.weight[self._bucket(apart)].movedim(-1, -3)

    def _bucket(self, apart: Tensor) -> Tensor:
        half = self.BUCKETS // 2
        single = half // 2
        distance = apart.abs()
        growth = torch.log(distance.clamp(min=1) / single) / math.log(self.FARTHEST / single)
        far = (single + growth * (half - single)).long().clamp(max=half - 1)
        return torch.where(distance < single, distance, far) + half * (apart > 0)


class EntpSwiGLU(nn.Module):
    """silu(gate) * up, for x = (gate, up)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: nn.GELU(approximate="tanh"),
    "gelu-exact": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swiglu": EntpSwiGLU,
}


def _make_norm(config: EntpConfig) -> nn.Module:
    kinds: dict[str, Callable[[], nn.Module]] = {
        "layer": lambda: nn.LayerNorm(config.hidden_size),
        "rms": lambda: nn.RMSNorm(config.hidden_size, eps=1e-5),
        "none": nn.Identity,
    }
    return kinds[config.norm]()


class EntpBlock(GradientCheckpointingLayer):
    """Attention, then an MLP, each added to the residual stream."""

    def __init__(self, config: EntpConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = 1.0 if config.attention_scale == "one" else 1.0 / math.sqrt(size)
        self.pre_norm = config.norm_placement == "pre"
        self.rotary = config.position_embedding == "rotary"
        self.activation = _ACTIVATIONS[config.activation]()
        self.norm_1 = _make_norm(config)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * size, bias=config.bias)
        self.proj = nn.Linear(width, width, bias=config.bias)
        self.norm_2 = _make_norm(config)
        gates = 2 if config.activation == "swiglu" else 1
        self.fc = nn.Linear(width, gates * config.intermediate_size, bias=config.bias)
        self.out = nn.Linear(config.intermediate_size, width, bias=config.bias)
        self.proj.adds_to_residual = self.out.adds_to_residual = True  # type: ignore[assignment]

    def forward(self, h: Tensor, position_ids: Tensor, seen: Tensor | None, bias: Any) -> Tensor:
        """The block on sequences (B, T, D).

        seen: bool, what broadcasts to (B, heads, query, key); None: all. bias: added to the scores.
        """
        if self.pre_norm:
            h = h + self.proj(self._attend(self.norm_1(h), position_ids, seen, bias))
            return h + self.out(self.activation(self.fc(self.norm_2(h))))
        h = self.norm_1(h + self.proj(self._attend(h, position_ids, seen, bias)))
        return self.norm_2(h + self.out(self.activation(self.fc(h))))

    def _attend(self, h: Tensor, position_ids: Tensor, seen: Tensor | None, bias: Any) -> Tensor:
        groups = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(h).unflatten(-1, (sum(groups), -1)).split(groups, dim=-2)
        if self.rotary:
            q, k = _rotate(q, position_ids), _rotate(k, position_ids)
        if self.kv_heads != self.heads:
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=-2) for x in (k, v))
        mask = seen
        if bias is not None:
            bias = bias.to(q.dtype)
            mask = bias if seen is None else bias.masked_fill(~seen, float("-inf"))
        guarded = q.is_cuda and (mask is not None or q.shape[1] == 1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(_SAFE_BACKENDS) if guarded else contextlib.nullcontext():
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return attended.transpose(1, 2).flatten(2)


class EntpForCausalLM(PreTrainedModel, GenerationMixin):
    """A Transformer that predicts the next token in the mode of its config."""

    config_class = EntpConfig
    config: EntpConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["EntpBlock"]
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "tokens.weight"}

    def __init__(self, config: EntpConfig) -> None:
        super().__init__(config)
        width, table = config.hidden_size, (config.max_position_embeddings, config.hidden_size)
        self.tokens = nn.Embedding(config.vocab_size, width)
        if config.position_embedding == "learned":
            self.positions = nn.Parameter(torch.empty(table))
        elif config.position_embedding == "given":
            self.register_buffer("positions", torch.zeros(table))
        relative = config.position_embedding == "relative"
        self.relative = EntpRelativeBias(config.num_attention_heads) if relative else None
        self.blocks = nn.ModuleList(EntpBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = _make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2: normal(0, 0.02), residual projections divided by sqrt(2 layers), biases zero."""
        std = self.config.initializer_range
        if getattr(module, "adds_to_residual", False):
            std /= math.sqrt(2 * self.config.num_hidden_layers * self.config.loops)
        if isinstance(module, nn.Linear | nn.Embedding | EntpRelativeBias):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.bias)
        if module is self and self.config.position_embedding == "learned":
            nn.init.normal_(self.positions, std=std)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        prefix_lengths: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits (B, T, vocab) at every position, and the mean loss if there are labels.

        attention_mask: (B, T), 0 at padding, which may be on either side.
        position_ids: (B, T); None: 0, 1, 2, ... over the tokens that are not padding.
        labels: (B, T), the tokens themselves, -100 where there is no loss.
        prefix_lengths: in mode prefix-lm, the first tokens of each sequence that see each other;
            None: config.prefix_length.
        logits_to_keep: so many last positions, or these positions; 0: all.
        """
        _refuse_embeddings(input_ids, inputs_embeds)
        assert input_ids is not None
        if use_cache or past_key_values is not None:
            raise ValueError(
                f"there is no cache in mode {self.config.mode}: in mode entp every step reads its "
                "prefix from scratch. Leave use_cache and past_key_values out."
            )
        if output_attentions or output_hidden_states:
            raise ValueError(
                "EntpForCausalLM returns logits only: leave output_attentions and "
                "output_hidden_states out."
            )
        real = self._real_tokens(input_ids, attention_mask)
        if position_ids is None:
            position_ids = _order(input_ids, real).clamp(min=0)
        position_ids = self._checked(position_ids.expand(input_ids.shape))
        at = _positions(input_ids.shape[1], logits_to_keep)
        if self.config.mode == "entp":
            h = self._read_prefixes(input_ids, position_ids, real, at)
        else:
            seen = self._visible(input_ids, real, prefix_lengths, labels)
            h = self._encode(input_ids, position_ids, seen)[:, at]
        logits = self.lm_head(self.norm(h))
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, num_items_in_batch)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutput(loss=loss, logits=logits)

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """The mean cross-entropy over labels, or their sum divided by `count`."""
        if logits.shape[1] != labels.shape[1]:
            raise ValueError("a loss needs all logits: leave logits_to_keep out.")
        return self.loss_function(
            logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=count
        )

    def _real_tokens(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """(B, T) bool, False at padding; None if there is none."""
        if attention_mask is None:
            return None
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: it must have that of "
                f"input_ids, {tuple(input_ids.shape)}. config.mode decides who sees whom."
            )
        real = attention_mask.bool()
        return None if bool(real.all()) else real

    def _checked(self, position_ids: Tensor) -> Tensor:
        """The position ids, if the model has them all."""
        most = self.config.max_position_embeddings
        limited = self.config.position_embedding in ("learned", "given")
        if limited and position_ids.numel() and int(position_ids.max()) >= most:
            raise ValueError(
                f"position {int(position_ids.max())} does not exist: the model reads {most} tokens "
                f"at most, its position_embedding being {self.config.position_embedding}."
            )
        return position_ids

    def _read_prefixes(self, x: Tensor, ids: Tensor, real: Tensor | None, at: list[int]) -> Tensor:
        """The last block's output at the end of each prefix x[:, : t + 1], (B, len(at), D)."""
        found = []
        for first in range(0, len(at), PREFIXES_AT_ONCE):
            ends = at[first : first + PREFIXES_AT_ONCE]
            found.append(self._read_together(x, ids, real, ends))
        return torch.cat(found, dim=1) if found else self._encode(x, ids, None)[:, :0]

    def _read_together(
        self, x: Tensor, ids: Tensor, real: Tensor | None, ends: list[int]
    ) -> Tensor:
        """(B, len(ends), D): each prefix is a row, masked behind its end."""
        time = max(ends) + 1
        x, ids = x[:, :time], ids[:, :time]
        if len(ends) == 1 and real is None:
            return self._encode(x, ids, None)[:, -1:]
        last = torch.tensor(ends, device=x.device)
        seen = torch.arange(time, device=x.device) <= last[:, None, None]  # (prefixes, 1, T)
        seen = seen.expand(-1, len(x), -1) if real is None else seen & real[:, :time]
        seen = seen | ~seen.any(-1, keepdim=True)  # for prefixes of padding alone
        many = [t.expand(len(ends), *t.shape).flatten(0, 1) for t in (x, ids)]
        h = self._encode(many[0], many[1], seen.flatten(0, 1)[:, None, None])
        h = h.unflatten(0, (len(ends), len(x)))
        return torch.stack([h[i, :, end] for i, end in enumerate(ends)], dim=1)

    def _visible(
        self,
        x: Tensor,
        real: Tensor | None,
        prefix: Tensor | int | None,
        labels: Tensor | None,
    ) -> Tensor:
        """(B or 1, 1, query, key) which keys each query sees, never the token it predicts."""
        steps = torch.arange(x.shape[1], device=x.device)
        seen = (steps <= steps[:, None])[None]
        if self.config.mode == "prefix-lm":
            first = self._prefix(prefix, x)
            inside = _order(x, real) < first
            if labels is not None and bool((labels != -100).logical_and(inside).any()):
                raise ValueError(
                    "tokens of the prefix see each other, so they cannot be predicted: set their "
                    "labels to -100."
                )
            seen = seen | inside[:, None, :] & inside[:, :, None]
        elif self.config.mode != "decoder":
            raise ValueError(f"config.mode is {self.config.mode!r}: allowed are {MODES}.")
        if real is not None:
            seen = seen & real[:, None, :] | (steps == steps[:, None])  # padding sees itself
        return seen[:, None]

    def _prefix(self, prefix: Tensor | int | None, x: Tensor) -> Tensor:
        """(B or 1, 1) how many first tokens see each other."""
        found = self.config.prefix_length if prefix is None else prefix
        if found is None:
            raise ValueError(
                "mode prefix-lm needs prefix_lengths or config.prefix_length: how many first "
                "tokens see each other."
            )
        return torch.as_tensor(found, device=x.device).reshape(-1, 1)

    def _encode(self, x: Tensor, position_ids: Tensor, seen: Tensor | None) -> Tensor:
        """The last block's output (B, T, D)."""
        h, kind = self.tokens(x), self.config.position_embedding
        if kind == "sinusoidal":
            h = h + _sinusoids(position_ids, h.shape[-1], h.dtype)
        elif kind in ("learned", "given"):
            h = h + self.positions[position_ids]
        bias = None if self.relative is None else self.relative(position_ids)
        for block in list(self.blocks) * self.config.loops:
            h = block(h, position_ids, seen, bias)
        return h

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; in mode prefix-lm the prefix is the prompt, if no other is given."""
        tokens: Any = kwargs.get("input_ids") if inputs is None else inputs
        _refuse_embeddings(tokens, kwargs.get("inputs_embeds"))
        if self.config.mode == "prefix-lm" and kwargs.get("prefix_lengths") is None:
            kwargs["prefix_lengths"] = self._prompt_lengths(tokens, kwargs.get("attention_mask"))
        return super().generate(inputs, *args, **kwargs)

    def _prompt_lengths(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """(B,) the tokens of each prompt that are not padding."""
        if mask is not None:
            return mask.sum(-1)
        if bool((tokens == self._pad_token()).any()):
            raise ValueError("prompts with padding need an attention_mask in mode prefix-lm.")
        return torch.ones_like(tokens).sum(-1)

    def _pad_token(self) -> int:
        pad = self.generation_config.pad_token_id
        return -1 if pad is None or pad == self.generation_config.eos_token_id else pad


def _refuse_embeddings(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    if input_ids is None or inputs_embeds is not None:
        raise ValueError("EntpForCausalLM reads input_ids only: inputs_embeds are not taken.")


def _order(x: Tensor, real: Tensor | None) -> Tensor:
    """(B or 1, T) the place of each token among those that are not padding."""
    if real is None:
        return torch.arange(x.shape[1], device=x.device)[None]
    return real.long().cumsum(-1) - 1


def _positions(time: int, logits_to_keep: int | Tensor) -> list[int]:
    """The positions whose logits are asked for."""
    if isinstance(logits_to_keep, int):
        return list(range(time))[-logits_to_keep if logits_to_keep else 0 :]
    return [int(t) % time for t in logits_to_keep.reshape(-1)]
