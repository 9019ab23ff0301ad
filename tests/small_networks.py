"""Small networks of HuggingFace's with random weights, as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 18,
}
GPT2 = {"n_positions": 18, "n_embd": 32, "n_layer": 2, "n_head": 4}
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "bert": ("BertConfig", "BertForMaskedLM", SIZES),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", SIZES),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", SIZES),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}),
}


def network_of(family: str, **changes: Any) -> Any:
    """A network with random weights that are large enough to matter, without dropout."""
    import transformers

    config, kind, fields = CLASSES[family]
    ids = {"bos_token_id": None, "eos_token_id": None}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    if family == "gpt2":
        still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    fields = {"vocab_size": 10, **fields, **ids, **({} if family == "llama" else still), **changes}
    torch.manual_seed(0)
    network = getattr(transformers, kind)(getattr(transformers, config)(**fields))
    for p in network.parameters():
        nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    return network.eval()


def folder_of(family: str, folder: Path, *, head: bool = True, **changes: Any) -> Path:
    """The same as a folder; head: with its head for tokens."""
    network = network_of(family, **changes)
    (network if head else network.base_model).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, words: list[str]) -> Path:
    """A tokenizer.json that knows these words, with padding and special tokens as BERT's has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokens = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(tokens, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_padding(length=8, pad_token=words[0])
    made.post_processor = processors.TemplateProcessing(
        single=f"{words[1]} $A", special_tokens=[(words[1], 1)]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder
