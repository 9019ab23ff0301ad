"""A run that began with a pretrained model, as HuggingFace's own class in the run's mode.

HuggingFace's classes attend in one way each, and config.json can change it for some:

| classes | attend | config.json | mode |
|---|---|---|---|
| BERT, RoBERTa | fully | | entp |
| BERT, RoBERTa | causally | is_decoder true | decoder |
| DistilBERT, MPNet, ModernBERT | fully | | entp |
| GPT-2, Llama and other decoders | causally | | decoder |
| GPT-2, Llama and other decoders | fully | is_causal false, use_cache false | entp |

A class that attends fully computes ENTP at the last position of what it is given.
"""

from __future__ import annotations

import copy
from typing import Any

from entp.config import PretrainedConfig, Run
from entp.config.pretrained import SHIFTED
from entp.hf.loading import MASKED
from entp.hf.tokenizer_files import special_token

MAY_BE_CAUSAL = ("bert", "roberta", "xlm-roberta")
"""Types of models that were trained to fill in masked tokens, and that is_decoder makes causal."""


def problems(run: Run, model: PretrainedConfig) -> list[str]:
    """Why no class of HuggingFace's computes what the run's model does."""
    kind = model.model_type
    if model.head == "linear":
        return [
            f"no class of HuggingFace's has its new head of {model.outputs or model.vocab} outputs"
        ]
    if run.mode not in ("entp", "decoder"):
        return [f"its mode is {run.mode}, and HuggingFace's classes compute entp and decoder alone"]
    if run.mode == "decoder" and kind in MASKED and kind not in MAY_BE_CAUSAL:
        return [
            f"its mode is decoder, and HuggingFace's {kind} always attends fully "
            f"({', '.join(MAY_BE_CAUSAL)} can be causal)"
        ]
    return []


def network_of(model: Any, run: Run, text: dict[str, bytes]) -> Any:
    """HuggingFace's model on its own: adapters merged into the weights, attention as in the run,
    and its special tokens; text: the tokenizer's files."""
    network = _merged(model.network)
    _set_tokens(network, run, text)
    if run.mode == "decoder" and network.config.model_type in MASKED:
        network.config.is_decoder = True
    if run.mode == "entp" and network.config.model_type not in MASKED:
        network.config.is_causal = network.config.use_cache = False
        if hasattr(network, "generation_config"):  # not where there is no head
            network.generation_config.use_cache = False
    return network


def _set_tokens(network: Any, run: Run, text: dict[str, bytes]) -> None:
    """Let `generate` end where the task does, and know what its text begins with."""
    if run.task.stop is None:
        return
    padding = special_token(text, "pad_token")
    if network.config.model_type in SHIFTED:  # positions depend on it
        padding = network.config.pad_token_id
    for config in (network.config, getattr(network, "generation_config", None)):
        if config is not None:
            config.bos_token_id = special_token(text, "bos_token")
            config.eos_token_id = run.task.stop
            config.pad_token_id = run.task.stop if padding is None else padding


def _merged(network: Any) -> Any:
    """A network of HuggingFace's with its LoRA adapters added to its weights."""
    found = copy.deepcopy(network).cpu()
    for name, module in list(found.named_modules()):
        if hasattr(module, "merge") and hasattr(module, "get_base_layer"):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(found.get_submodule(parent), last, module.get_base_layer())
    return found


def auto_name(run: Run, model: PretrainedConfig) -> str:
    """The class of transformers that loads what the run trained."""
    if model.head == "embedding":
        return "AutoModel"
    masked = model.model_type in MASKED and run.mode == "entp"
    return "AutoModelForMaskedLM" if masked else "AutoModelForCausalLM"


def notes(run: Run, model: PretrainedConfig) -> str:
    """What a reader of the folder should know of what it computes."""
    masked = model.model_type in MASKED
    if run.mode == "entp":
        found = [_LAST] if masked else [_LAST, _NO_CACHE]
    else:
        found = [_CAUSAL] if masked else []
    if model.head == "embedding":
        found.append(_NO_HEAD)
    if model.model_type in SHIFTED:
        padding = model.huggingface.get("pad_token_id", 1)
        found.append(_POSITIONS.format(padding=padding, first=padding + 1))
    return "\n".join(found)


_LAST = """\
- It attends to all tokens that it is given: its output at the last position is that of mode entp.
  Outputs at earlier positions have seen later tokens."""
_NO_CACHE = """\
- `is_causal` and `use_cache` are false in `config.json`, so that `generate` reads the whole
  sequence again for each token. With a cache it is another model."""
_CAUSAL = "- `is_decoder` in `config.json` makes it causal: outputs are those of mode decoder."
_NO_HEAD = """\
- It has no head. The logits are
  `model(tokens).last_hidden_state @ model.get_input_embeddings().weight.T`."""
_POSITIONS = """\
- Where token {padding} is among the inputs, give
  `position_ids=torch.arange(tokens.shape[1])[None] + {first}`: transformers takes that token for
  padding, and does not count its position."""
