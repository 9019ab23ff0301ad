"""The families of HuggingFace's models that can be used, and why others cannot."""

from __future__ import annotations

from typing import Any

from torch import nn

from entp.errors import InputError
from entp.hf.adapters import PretrainedModel
from entp.hf.families.bert import Bert, Roberta
from entp.hf.families.distilbert import DistilBert
from entp.hf.families.gpt2 import Gpt2
from entp.hf.families.gpt_neox import GptNeox
from entp.hf.families.llama import Llama, Olmo2, Qwen3
from entp.hf.families.modernbert import ModernBert
from entp.hf.families.mpnet import MPNet

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose angles depend on the position alone."""
FAMILIES: dict[str, type[PretrainedModel]] = {
    "gpt2": Gpt2,
    "bert": Bert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
    "distilbert": DistilBert,
    "mpnet": MPNet,
    "modernbert": ModernBert,
    "gpt_neox": GptNeox,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Qwen3,
    "olmo2": Olmo2,
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
    reason = _why_not(config) if kind in FAMILIES else "no adapter knows its layers"
    if reason:
        local = ", ".join(name for name, family in FAMILIES.items() if family.has_local_layers)
        raise InputError(
            f"a model of type {kind!r} cannot be used: {reason}. Allowed are "
            f"{', '.join(FAMILIES)}, with attention over all tokens (of {local}, local layers too)."
        )


def _why_not(config: Any) -> str | None:
    """What in a configuration the family's adapter does not compute, or None."""
    if getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    if not FAMILIES[config.model_type].has_local_layers and _has_window(config):
        return "its layers have sliding attention"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"its positions are {config.position_embedding_type}"
    for rope in _rotary_kinds(config):
        if rope not in STATIC_ROPE:
            return f"its rotary angles ({rope}) depend on the length of the sequence"
    return None


def _has_window(config: Any) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return bool(kinds) or getattr(config, "sliding_window", None) is not None


def _rotary_kinds(config: Any) -> list[str]:
    """How rotary angles are made: in all layers alike, or in each type of layers."""
    found = getattr(config, "rope_parameters", None) or {}
    each = [part for part in found.values() if isinstance(part, dict)] or [found]
    return [part.get("rope_type", "default") for part in each]
