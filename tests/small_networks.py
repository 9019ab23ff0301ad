"""Small networks of HuggingFace's with random weights, as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_runs import TASK, small_run
from torch import Tensor, nn

from entp.config import Run
from entp.training.initialise import Init, with_init

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 18,
}
GPT2 = {"n_positions": 18, "n_embd": 32, "n_layer": 2, "n_head": 4}
SHARED = {**SIZES, "num_key_value_heads": 2}
DISTILBERT = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": 18,
    "pad_token_id": 0,
}
NEARBY = {**SIZES, "local_attention": 4, "pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
"""The second of two layers sees two tokens in each direction."""
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "bert": ("BertConfig", "BertForMaskedLM", SIZES),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", SIZES),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", SIZES),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", SIZES),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", NEARBY),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SHARED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**SHARED, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SHARED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**SHARED, "head_dim": 16}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", SHARED),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", DISTILBERT),
}
FAMILIES = (
    *("gpt2", "bert", "roberta", "distilbert", "mpnet", "modernbert", "llama", "qwen3", "olmo2"),
    "gpt_neox",
)
"""One for each adapter."""
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "olmo2", "gpt_neox")
SHIFTED = ("roberta", "xlm-roberta", "mpnet")
"""Types of models whose positions start at 2, and whose padding token 1 has none."""
ROUNDS = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "modernbert")
"""Types of models that compute in float32 in every model somewhere, gradients included."""
DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "distilbert": ("dropout", "attention_dropout"),
    **dict.fromkeys(("bert", *SHIFTED), ("hidden_dropout_prob", "attention_probs_dropout_prob")),
}


def config_of(family: str, **changes: Any) -> Any:
    """HuggingFace's configuration: ten tokens, no dropout."""
    import transformers

    name, _, fields = CLASSES[family]
    ids = {"bos_token_id": None, "eos_token_id": None}
    still = dict.fromkeys(DROPOUT.get(family, ()), 0.0)
    return getattr(transformers, name)(**{"vocab_size": 10, **fields, **ids, **still, **changes})


def network_of(family: str, **changes: Any) -> Any:
    """A network with random weights that are large enough to matter."""
    import transformers

    torch.manual_seed(0)
    network = getattr(transformers, CLASSES[family][1])(config_of(family, **changes))
    for p in network.parameters():
        nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    return network.eval()


def full_attention(family: str, network: Any, x: Tensor) -> Tensor:
    """HuggingFace's logits with full attention: a decoder needs a mask for it."""
    if family in DECODERS:
        mask = torch.ones(len(x), 1, x.shape[1], x.shape[1], dtype=torch.bool)
        return network(input_ids=x, attention_mask=mask, use_cache=False).logits
    if family in SHIFTED and (x == 1).any():  # theirs would leave out the padding token
        return network(input_ids=x, position_ids=torch.arange(x.shape[1])[None] + 2).logits
    return network(input_ids=x).logits


def one_forward_per_prefix(family: str, network: Any, x: Tensor) -> Tensor:
    """HuggingFace's logits at the end of each prefix, with full attention over it alone."""
    ends = [full_attention(family, network, x[:, : t + 1])[:, -1] for t in range(x.shape[1])]
    return torch.stack(ends, dim=1)


def gradients(network: Any, outputs: Tensor) -> dict[str, Tensor]:
    """Of all trained weights, of a loss that weighs each output differently."""
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    weights = torch.sin(torch.arange(outputs.numel())).view_as(outputs).to(outputs)
    found = torch.autograd.grad((weights * outputs).sum(), list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max() / want.abs().max())


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of gradients, relative to the largest gradient."""
    assert got.keys() == want.keys()
    largest = max(float(g.abs().max()) for g in want.values())
    return max(float((got[name] - want[name]).abs().max()) for name in want) / largest


def folder_of(family: str, folder: Path, *, head: bool = True, **changes: Any) -> Path:
    """The same as a folder; head: with its head for tokens."""
    network = network_of(family, **changes)
    (network if head else network.base_model).save_pretrained(folder)
    return folder


def begin(folder: Path, **changes: Any) -> tuple[Run, Init]:
    """A small run with the model of a folder, and its weights."""
    from entp.hf.beginning import read_pretrained

    lora = {name: changes.pop(name) for name in ("lora_rank", "lora_alpha") if name in changes}
    init = read_pretrained(folder, changes.get("task", TASK), **lora)
    return with_init(small_run(model=init.model, **changes), init), init


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
