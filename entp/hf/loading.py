"""`entp.hf.load`: a folder of weights in HuggingFace's format, or a name on its hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from entp.errors import InputError
from entp.hf import need_transformers, refuse_exported
from entp.hf.adapters import PretrainedModel
from entp.hf.families import check_config, wrap

MASKED = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert")
"""Types of models that were trained to fill in masked tokens."""
NEEDS = "A folder needs config.json and the weights in model.safetensors."
DROPOUT = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "mlp_dropout",
    "resid_pdrop",
)
"""Probabilities of dropout in HuggingFace's configurations."""


def load(
    source: str | Path, *, download: bool, dropout: bool, dtype: torch.dtype
) -> PretrainedModel:
    """A pretrained model of the engine's protocol: see `entp.hf.load`."""
    transformers = need_transformers()
    place, local = _find(source, download)
    with quiet(transformers), readable_errors(place):
        config = transformers.AutoConfig.from_pretrained(
            place, local_files_only=local, trust_remote_code=False
        )
        check_config(config)
        if not dropout:
            turn_dropout_off(config)
        network, report = _auto_class(transformers, config).from_pretrained(
            place,
            config=config,
            dtype=dtype,
            attn_implementation="eager" if config.model_type == "mpnet" else "sdpa",
            trust_remote_code=False,
            use_safetensors=True,  # the other format is a pickle
            local_files_only=local,
            ignore_mismatched_sizes=True,  # reported, and refused below
            output_loading_info=True,
        )
    return wrap(_with_its_weights(network, report, place))


def _find(source: str | Path, download: bool) -> tuple[str, bool]:
    """The folder or name, and whether only files at hand may be read."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return _check_name(source, download), False
    if (folder / "config.json").exists():
        refuse_exported(folder)
        return str(folder), True
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"{source} holds an adapter of peft, without the model: load the model, then add the "
            "adapter with peft.PeftModel.from_pretrained(model.network, ...)."
        )
    raise InputError(f"{source} has no config.json: a folder in HuggingFace's format is needed.")


def _check_name(source: str | Path, download: bool) -> str:
    """The name of a model on the hub, if it may be downloaded."""
    if isinstance(source, Path) or str(source).startswith((".", "/", "~")):
        raise InputError(f"{source} is no folder: give one in HuggingFace's format.")
    if not download:
        raise InputError(
            f"{source!r} is no folder, and nothing is downloaded unasked: give a folder in "
            "HuggingFace's format, or download=True for a model of that name on its hub."
        )
    return source


def turn_dropout_off(config: Any) -> None:
    for name in DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)


def _auto_class(transformers: Any, config: Any) -> Any:
    if config.model_type in MASKED:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM


def _with_its_weights(network: Any, report: dict[str, Any], place: str) -> Any:
    """The network; without its head, if the files have nothing of it. InputError for other gaps."""
    missing = set(report["missing_keys"])
    misfits = {key[0] for key in report["mismatched_keys"]}
    prefix = f"{network.base_model_prefix}."
    head = {name for name, _ in network.named_parameters() if not name.startswith(prefix)}
    absent = {name for name in missing if not name.startswith(prefix)} if head <= missing else set()
    gaps = sorted((missing - absent) | misfits)
    if gaps:
        raise InputError(
            f"the weights in {place} have no {gaps[0]} of the shape in config.json ({len(gaps)} "
            "such): they are incomplete, or of another model."
        )
    return network.base_model if absent else network


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without the library's reports on heads, which load() makes itself."""
    logging = transformers.utils.logging
    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()


@contextlib.contextmanager
def readable_errors(place: str, needs: str = NEEDS) -> Iterator[None]:
    """The library's errors about files and names as InputErrors, which say what is needed."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        stop = "" if first.endswith((".", "!", "?")) else "."
        raise InputError(f"{place} cannot be loaded: {first}{stop} {needs}") from error
