"""The shape of a HuggingFace model that is trained here.

PretrainedConfig({"model_type": "bert", "vocab_size": 32, "hidden_size": 384, ...}, lora_rank=8)

`entp.hf.beginning` makes one from a folder of weights and a task, `entp.hf.building` a model of it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from entp.config.model import ModelConfig
from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems

NAMES: dict[str, tuple[str, ...]] = {
    "vocab": ("vocab_size",),
    "width": ("hidden_size", "n_embd", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "positions": ("max_position_embeddings", "n_positions"),
}
"""What HuggingFace's families call the sizes of a model."""
GATED = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "modernbert")
"""Types of models with a gate in the MLP."""
ROTARY = (*GATED, "gpt_neox")
"""Types of models with rotary positions."""
SHIFTED = ("roberta", "xlm-roberta", "mpnet")
"""Types of models whose positions start behind the padding token's id."""


@dataclass(frozen=True)
class PretrainedConfig:
    """A HuggingFace model, and which of its weights are trained."""

    builder: ClassVar[str] = "entp.hf.building:build"
    """What makes the model."""
    causal_layers: ClassVar[int] = 0
    """None is causal in every mode."""

    huggingface: dict[str, Any]
    """HuggingFace's configuration: model_type, sizes, and the vocabulary after unused tokens were
    dropped. No dropout."""
    head: Literal["own", "embedding", "linear"] = "own"
    """own: HuggingFace's head for tokens; embedding: the token embedding, for models without one;
    linear: a new layer."""
    outputs: int | None = None
    """Outputs of a linear head that are not the vocabulary's."""
    lora_rank: int = 0
    """Rank of the LoRA adapters on all linear layers of the blocks; only they and a linear head are
    trained. 0: no adapters, all weights are trained."""
    lora_alpha: float = 8.0
    """Adapters count lora_alpha / lora_rank times."""

    def __post_init__(self) -> None:
        check_numbers(self, "model.")
        problems = choice_problems(self, "model.")
        named = self.huggingface
        if not isinstance(named, dict) or not isinstance(named.get("model_type"), str):
            raise InputError(
                f"model.huggingface is {named!r}: it must be HuggingFace's configuration of a "
                "model, with a model_type."
            )
        for name, keys in NAMES.items():
            found = next((named[key] for key in keys if key in named), None)
            if not isinstance(found, int) or isinstance(found, bool) or found < 1:
                problems.append(
                    f"model.huggingface has {found!r} as {' or '.join(keys)} ({name}): it must be "
                    "a whole number from 1 on"
                )
        if self.outputs is not None and (self.outputs < 1 or self.head != "linear"):
            problems.append(
                f"model.outputs is {self.outputs} with model.head {self.head}: outputs are at "
                "least 1, and need the head linear"
            )
        if self.lora_rank < 0 or self.lora_alpha <= 0:
            problems.append(
                f"model.lora_rank is {self.lora_rank} and model.lora_alpha {self.lora_alpha:g}: "
                "give a rank from 0 on and an alpha above 0"
            )
        raise_problems(problems)
        # As JSON gives it back, so that equal configurations compare equal.
        object.__setattr__(self, "huggingface", json.loads(json.dumps(named, sort_keys=True)))

    def __hash__(self) -> int:
        rest = (self.head, self.outputs, self.lora_rank, self.lora_alpha)
        return hash((json.dumps(self.huggingface, sort_keys=True), *rest))

    def _size(self, name: str) -> int:
        return next(self.huggingface[key] for key in NAMES[name] if key in self.huggingface)

    def with_vocab(self, vocab: int) -> PretrainedConfig:
        """The same model of another vocabulary."""
        return dataclasses.replace(self, huggingface={**self.huggingface, "vocab_size": vocab})

    @property
    def model_type(self) -> str:
        """HuggingFace's name of the family."""
        return self.huggingface["model_type"]

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self._size("vocab")

    @property
    def width(self) -> int:
        """Embedding dimension."""
        return self._size("width")

    @property
    def layers(self) -> int:
        """Transformer blocks."""
        return self._size("layers")

    @property
    def depth(self) -> int:
        """Blocks that an input goes through."""
        return self.layers

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self._size("heads")

    @property
    def kv_heads(self) -> int | None:
        """Key and value heads, where they are fewer."""
        return self.huggingface.get("num_key_value_heads")

    @property
    def attention_width(self) -> int:
        """Of all query heads together."""
        return self.heads * (self.huggingface.get("head_dim") or self.width // self.heads)

    @property
    def hidden(self) -> int:
        """Units of the MLP's hidden layer."""
        named = self.huggingface
        sizes = (named.get(name) for name in ("intermediate_size", "n_inner", "hidden_dim"))
        return next(filter(None, sizes), 4 * self.width)

    @property
    def activation(self) -> str:
        """swiglu where the MLP has a gate."""
        return "swiglu" if self.model_type in GATED else "gelu"

    @property
    def position_embedding(self) -> str:
        return "rotary" if self.model_type in ROTARY else "learned"

    @property
    def input_dim(self) -> None:
        """It reads tokens, no vectors."""

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        first = 0
        if self.model_type in SHIFTED:
            first = int(self.huggingface.get("pad_token_id", 1)) + 1
        return self._size("positions") - first

    @property
    def has_limit(self) -> bool:
        """Sequences beyond context_length tokens cannot be read."""
        return True


AnyModelConfig = ModelConfig | PretrainedConfig
"""The model of a run."""


def refit(model: AnyModelConfig, needs: dict[str, Any]) -> AnyModelConfig:
    """The model with what a task needs (`Task.model_needs`)."""
    if isinstance(model, PretrainedConfig):
        return dataclasses.replace(model.with_vocab(needs["vocab"]), outputs=needs.get("outputs"))
    return dataclasses.replace(model, **needs)
