"""A trained model as a folder that transformers loads.

entp export runs/first --format hf --out first-hf       # with its source: any mode
entp export runs/first --format gpt2 --out first-gpt2   # a decoder as a plain GPT-2

AutoModelForCausalLM.from_pretrained("first-hf", trust_remote_code=True)
GPT2LMHeadModel.from_pretrained("first-gpt2")
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from entp.config import MODES, ModelConfig, PretrainedConfig, Run, refresh_of
from entp.data.tokenizer import TOKENIZER
from entp.data.tokenizers import ByteTokenizer
from entp.data.vocabulary import BYTE_OF, END
from entp.errors import InputError
from entp.files import json_bytes, write_folder
from entp.hf import export_pretrained
from entp.hf.tokenizer_files import files_beside
from entp.model import Transformer
from entp.training.checkpoint import load_run
from entp.training.export import DTYPES, check_new, measure

ACTIVATIONS = {"gelu": "gelu_new", "gelu-exact": "gelu", "relu": "relu", "silu": "silu"}
"""Activations that plain GPT-2 has, by their names there."""


def export_hf(
    source: Path,
    out: Path,
    *,
    format: Literal["hf", "gpt2"] = "hf",
    checkpoint: Literal["best", "last"] = "best",
    dtype: str = "fp32",
    shard_mib: float | None = None,
    test_sequences: int = 10_000,
    data: str | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Write a run as a folder for transformers, with what it does on test sequences.

    format: hf, with the source of the model; or gpt2, without.
    shard_mib: no file of weights is larger than so many MiB, if no tensor is; None: one file.
    data: where the task's files are, if it needs some. Returns made.json.
    """
    needs_transformers()
    check_new(out)
    refuse(load_run(source, checkpoint), format)
    model, run, made = measure(source, checkpoint, dtype, test_sequences, data, device)
    more = {"made.json": json_bytes(made)}
    if isinstance(run.model, PretrainedConfig):
        text = tokenizer_files(run)
        network = export_pretrained.network_of(model, run, text).to(DTYPES[dtype])
        files = {**saved_files(network, None, shard_mib), **text}
        name = export_pretrained.auto_name(run, run.model)
    else:
        convert = to_hf if format == "hf" else to_gpt2
        files = saved_files(convert(model, run).to(DTYPES[dtype]), make_tokenizer(run), shard_mib)
        name = "GPT2LMHeadModel" if format == "gpt2" else "AutoModelForCausalLM"
    flag = ", trust_remote_code=True" if any(name.endswith(".py") for name in files) else ""
    readme = _readme([name, *(["AutoTokenizer"] if TOKENIZER in files else [])], flag, format, run)
    write_folder(out, {**files, **more, "README.md": readme.encode()})
    return made


def needs_transformers() -> None:
    """InputError where transformers is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise InputError("this needs the transformers library: `pip install 'entp[hf]'`.") from None


def register() -> None:
    """Let AutoConfig and AutoModelForCausalLM find our classes: in this process, folders of format
    hf then load without trust_remote_code."""
    needs_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    from entp.hf.modeling_entp import EntpConfig, EntpForCausalLM

    AutoConfig.register(EntpConfig.model_type, EntpConfig, exist_ok=True)
    AutoModelForCausalLM.register(EntpConfig, EntpForCausalLM, exist_ok=True)


def refuse(run: Run, format: Literal["hf", "gpt2"]) -> None:
    """InputError if the run is no language model, or the format cannot hold it."""
    problems = _problems(run) + (_gpt2_problems(run) if format == "gpt2" else [])
    if problems:
        raise InputError(
            f"this run cannot be exported as --format {format}: {'; '.join(problems)}. --format "
            "entp takes every run."
        )


def _problems(run: Run) -> list[str]:
    """Why a run is no causal language model of HuggingFace."""
    model = run.model
    if model.vocab is None:
        return ["it reads vectors, not tokens"]
    if run.task.position_ids(np.zeros((1, 2), dtype=np.int64)) is not None:
        return [f"{run.task.name} gives its tokens positions that generate does not know of"]
    if isinstance(model, PretrainedConfig):
        return export_pretrained.problems(run, model)
    if refresh_of(run.mode) is not None:
        return [f"its mode is {run.mode}, and our class for HuggingFace knows {', '.join(MODES)}"]
    if model.causal_layers:
        return [f"its first layers are causal in every mode (causal_layers {model.causal_layers})"]
    if model.outputs is not None:
        return [f"it has {model.outputs} outputs of its own instead of the vocabulary's"]
    return []


def _gpt2_problems(run: Run) -> list[str]:
    """Why GPT-2 cannot compute what the run's model does."""
    model = run.model
    if isinstance(model, PretrainedConfig):
        return [f"it trained a model of type {model.model_type}, which --format hf writes"]
    wrong = {
        f"its mode is {run.mode}, and GPT-2 is a decoder": run.mode != "decoder",
        f"model.norm is {model.norm}": model.norm != "layer",
        "model.norm_placement is post": model.norm_placement != "pre",
        f"model.activation is {model.activation}": model.activation not in ACTIVATIONS,
        f"model.position_embedding is {model.position_embedding}": not model.has_limit,
        "its key and value heads are shared": model.kv_heads not in (None, model.heads),
        "its blocks run several times": model.loops > 1,
    }
    return [problem for problem, holds in wrong.items() if holds]


def to_hf(model: Transformer, run: Run | None = None) -> Any:
    """EntpForCausalLM with the model's weights, in the mode of the run."""
    from entp.hf.modeling_entp import EntpConfig, EntpForCausalLM

    EntpConfig.register_for_auto_class()
    EntpForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    fields = {**_sizes(model.config), **_special(run)}
    if run is not None:
        fields |= {"mode": run.mode, "prefix_length": run.task.prefix}
    found = EntpForCausalLM(EntpConfig(**fields))
    weights = {name.replace("head.", "lm_head."): t for name, t in _weights(model).items()}
    weights.setdefault("lm_head.weight", weights["tokens.weight"])
    return _with_weights(found, weights)


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """The fields of EntpConfig that follow from the model."""
    same = ("norm", "activation", "position_embedding", "attention_scale", "norm_placement")
    return {
        **{name: getattr(model, name) for name in (*same, "bias", "loops")},
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context_length,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "intermediate_size": model.hidden,
        "tie_word_embeddings": model.tied_head,
    }


def _special(run: Run | None) -> dict[str, Any]:
    """The token that ends a sequence; it also pads, behind an attention mask."""
    stop = None if run is None else run.task.stop
    return {"bos_token_id": None, "eos_token_id": stop, "pad_token_id": stop}


def to_gpt2(model: Transformer, run: Run | None = None) -> Any:
    """GPT2LMHeadModel with the model's weights: what it computes in mode decoder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = model.config
    assert config.vocab is not None
    found = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab,
            n_positions=config.context_length,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.hidden,
            activation_function=ACTIVATIONS[config.activation],
            scale_attn_weights=config.attention_scale == "sqrt",
            tie_word_embeddings=config.tied_head,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **_special(run),
        )
    )
    return _with_weights(found, _gpt2_weights(_weights(model), config))


def _gpt2_weights(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The weights by GPT-2's names; its matrices are transposed, and all have biases."""
    found = {
        "transformer.wte.weight": weights["tokens.weight"],
        "transformer.wpe.weight": weights["positions"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "transformer.ln_f.bias": weights["norm.bias"],
        "lm_head.weight": weights.get("head.weight", weights["tokens.weight"]),
    }
    linear = {"qkv": "attn.c_attn", "proj": "attn.c_proj", "fc": "mlp.c_fc", "out": "mlp.c_proj"}
    for i in range(config.layers):
        here, there = f"blocks.{i}", f"transformer.h.{i}"
        for name, other in linear.items():
            matrix = weights[f"{here}.{name}.weight"]
            found[f"{there}.{other}.weight"] = matrix.T.contiguous()
            zero = matrix.new_zeros(len(matrix))
            found[f"{there}.{other}.bias"] = weights.get(f"{here}.{name}.bias", zero)
        for name, other in {"norm_1": "ln_1", "norm_2": "ln_2"}.items():
            for part in ("weight", "bias"):
                found[f"{there}.{other}.{part}"] = weights[f"{here}.{name}.{part}"]
    return found


def _weights(model: Transformer) -> dict[str, Tensor]:
    return {name: t.detach().cpu() for name, t in model.state_dict().items()}


def _with_weights(found: Any, weights: dict[str, Tensor]) -> Any:
    """The model of transformers in the weights' type, with these weights and no others."""
    found = found.to(weights["lm_head.weight"].dtype)
    found.load_state_dict(weights)
    return found.eval()


def saved_files(found: Any, tokenizer: Any, shard_mib: float | None) -> dict[str, bytes]:
    """The files that transformers writes for a model and its tokenizer, if there is one."""
    with tempfile.TemporaryDirectory() as folder, _no_progress_bars():
        size = {} if shard_mib is None else {"max_shard_size": int(shard_mib * 2**20)}
        found.save_pretrained(folder, **size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tokenizer_files(run: Run) -> dict[str, bytes]:
    """A pretrained model's tokenizer, as it was beside the weights where its files are found; made
    anew where they are not, and empty for tasks without text."""
    file = run.task.files().get(TOKENIZER)
    if file is not None and (beside := files_beside(file)):
        return {TOKENIZER: file, **beside}
    made = make_tokenizer(run)
    if made is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return found if file is None else {**found, TOKENIZER: file}


def make_tokenizer(run: Run) -> Any:
    """PreTrainedTokenizerFast that cuts text as the task does; None for tasks without text."""
    file = run.task.files().get(TOKENIZER)
    if file is None and _reads_bytes(run):
        file = _byte_tokenizer()
    if file is None:
        return None
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    found, stop = Tokenizer.from_str(file.decode()), run.task.stop
    end = END if stop is None else found.id_to_token(stop)
    return PreTrainedTokenizerFast(
        tokenizer_object=found,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        split_special_tokens=end == END,
        clean_up_tokenization_spaces=False,
        model_max_length=run.model.context_length,
        model_input_names=["input_ids", "attention_mask"],
    )


def _reads_bytes(run: Run) -> bool:
    tokenizer = getattr(run.task, "tokenizer", None)
    return tokenizer == "bytes" or isinstance(tokenizer, ByteTokenizer)


def _byte_tokenizer() -> bytes:
    """A tokenizer.json with a token for each byte and the end token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    found = Tokenizer(models.BPE(vocab=BYTE_OF, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(END, special=True)])
    return found.to_str().encode()


def _readme(names: list[str], flag: str, format: str, run: Run) -> str:
    """What the folder is and how it is loaded: by these classes, that of the model first, with the
    argument `flag`, without which AutoTokenizer asks whether to run the model's code, too."""
    notes = ""
    if isinstance(run.model, PretrainedConfig):
        told = export_pretrained.notes(run, run.model)
        notes = f"\n{told}\n" if told else ""
    lines = [
        f'{what} = {name}.from_pretrained("this folder"{flag})'
        for what, name in zip(("model", "tokenizer"), names, strict=False)
    ]
    return f"""# {run.task.name}, mode {run.mode}

```python
from transformers import {", ".join(names)}

{chr(10).join(lines)}
```
{notes}
Written by `entp export --format {format}`. `made.json` says how the model was trained and what it
does on test sequences.
"""
