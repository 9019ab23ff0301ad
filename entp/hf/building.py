"""HuggingFace models that are trained here, from their configuration.

    config = PretrainedConfig(huggingface={"model_type": "bert", ...}, lora_rank=8)
    model = build(config)          # HuggingFace's own random weights; adapters that do nothing yet

`describe` is the way back: the part of HuggingFace's configuration that a computation depends on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from entp.config import PretrainedConfig
from entp.config.pretrained import SHIFTED
from entp.errors import InputError
from entp.hf import need_transformers
from entp.hf.adapters import PretrainedModel
from entp.hf.families import FAMILIES, check_config, wrap
from entp.hf.loading import DROPOUT, MASKED, quiet, turn_dropout_off

SIZES = (
    *("model_type", "vocab_size", "tie_word_embeddings", "initializer_range"),
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps"),
    *("n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function"),
    *("layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"),
    *("attention_bias", "mlp_bias", "sliding_window", "relative_attention_num_buckets"),
    *("hidden_activation", "norm_eps", "norm_bias", "local_attention", "decoder_bias"),
    *("classifier_bias", "classifier_activation", "initializer_cutoff_factor"),
    *("dim", "n_layers", "n_heads", "hidden_dim", "activation", "use_parallel_residual"),
)
"""What is kept of a configuration even where it is the default, which may change."""
IRRELEVANT = (
    *DROPOUT,
    *("transformers_version", "architectures", "dtype", "torch_dtype", "auto_map", "name_or_path"),
    *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache", "is_decoder"),
    *("is_causal", "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward"),
    *("gradient_checkpointing", "classifier_dropout", "summary_type", "summary_use_proj"),
    *("summary_activation", "summary_proj_to_labels", "summary_first_dropout", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("unk_token_id", "mask_token_id"),
    *("position_embedding_type", "layer_types", "use_sliding_window", "max_window_layers"),
    *("quantization_config", "tokenizer_class", "n_ctx", "reorder_and_upcast_attn"),
    *("classifier_pooling", "deterministic_flash_attn", "reference_compile"),
    *("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"),
    *("sparse_prediction", "sparse_pred_ignore_index", "global_attn_every_n_layers"),
)
"""What no forward pass of a model that `check_config` takes depends on, without dropout; with
local layers, `layer_types` is kept."""


def describe(config: Any) -> dict[str, Any]:
    """What a computation depends on of a HuggingFace configuration, as plain JSON."""
    check_config(config)
    found, usual = config.to_dict(), type(config)().to_dict()
    kept = {
        name: value
        for name, value in found.items()
        if name in SIZES
        or not (name in IRRELEVANT or name.startswith("_") or value == usual.get(name))
    }
    if config.model_type in SHIFTED:
        kept["pad_token_id"] = config.pad_token_id
    if FAMILIES[config.model_type].has_local_layers:
        kept["layer_types"] = list(config.layer_types)
    return kept


def build(config: PretrainedConfig) -> PretrainedModel:
    """The model with HuggingFace's own random weights, in float32 and without dropout."""
    transformers = need_transformers()
    named = _configuration(transformers, config)
    auto = transformers.AutoModelForCausalLM
    if config.model_type in MASKED:
        auto = transformers.AutoModelForMaskedLM
    attention = "eager" if config.model_type == "mpnet" else "sdpa"
    with quiet(transformers):
        network = auto.from_config(named, attn_implementation=attention, dtype=torch.float32)
    model = wrap(network if config.head == "own" else network.base_model)
    train_every_token(model)
    if config.head == "linear":
        model.head = new_head(model, config.outputs or config.vocab)
    if config.lora_rank:
        add_adapters(model, config.lora_rank, config.lora_alpha)
    return model.eval()


def _configuration(transformers: Any, config: PretrainedConfig) -> Any:
    """HuggingFace's configuration, without the padding token of models that need none."""
    fields = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    fields |= config.huggingface
    kind = fields.pop("model_type")
    try:
        named = transformers.AutoConfig.for_model(kind, **fields)
    except (ValueError, TypeError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(
            f"model.huggingface is no configuration of transformers "
            f"{transformers.__version__}: {first}"
        ) from None
    turn_dropout_off(named)
    check_config(named)
    return named


def train_every_token(model: PretrainedModel) -> None:
    """Let the padding token's embedding have a gradient: it is a token like any other here."""
    model.network.get_input_embeddings().padding_idx = None


def new_head(model: PretrainedModel, outputs: int) -> nn.Linear:
    """A linear head with HuggingFace's initialisation."""
    head = nn.Linear(model.width, outputs)
    nn.init.normal_(head.weight, std=getattr(model.config, "initializer_range", 0.02))
    nn.init.zeros_(head.bias)
    return head


def add_adapters(model: PretrainedModel, rank: int, alpha: float) -> None:
    """LoRA on all linear layers of the blocks. Only the adapters and a new head are trained."""
    peft = _need_peft()
    own_head = None if model.head is None else id(model.head.weight)
    for p in model.parameters():
        p.requires_grad_(False)
    plan = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=linear_layers(model),
        fan_in_fan_out=model.config.model_type == "gpt2",  # Conv1D, whose weights are transposed
    )
    peft.inject_adapter_in_model(plan, model.network)
    table = model.network.get_input_embeddings().weight
    if model.head is not None and own_head != id(table):
        model.head.requires_grad_(True)


def linear_layers(model: PretrainedModel) -> list[str]:
    """The names in `model.network` of all linear layers inside the blocks."""
    from transformers.pytorch_utils import Conv1D

    blocks = {id(inner) for layer in model.layers() for inner in layer.modules()}
    return [
        name
        for name, module in model.network.named_modules()
        if id(module) in blocks and isinstance(module, nn.Linear | Conv1D)
    ]


def _need_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise InputError(
            "LoRA needs the peft library, which is not installed: pip install 'entp[hf]'."
        ) from None
    return peft
