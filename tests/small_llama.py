"""A tiny Llama with random weights and a tokenizer, as a folder in HuggingFace's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGIN, END = "<s>", "</s>"


def write_tokenizer(folder: Path) -> Path:
    """Byte-level BPE with a token that every text begins with, and one that ends it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(["def f(x): return count % n", "[1, 2, 30, 41]"], trainer)
    begin = (BEGIN, found.token_to_id(BEGIN))
    found.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[begin]
    )
    folder.mkdir(parents=True, exist_ok=True)
    found.save(str(folder / "tokenizer.json"))
    about = {"bos_token": BEGIN, "eos_token": {"content": END}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def llama_config(vocab: int, **more: Any) -> Any:
    """2 layers, width 32, 4 heads that share 2 keys."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab}
    sizes |= {"max_position_embeddings": 1024, "tie_word_embeddings": True}
    return LlamaConfig(**{**sizes, **more})


def write_llama(folder: Path, vocab: int = 320) -> Path:
    """The weights and the tokenizer; the model has a few tokens more than the tokenizer."""
    import torch
    from transformers import LlamaForCausalLM

    write_tokenizer(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(vocab)).save_pretrained(folder)
    return folder
