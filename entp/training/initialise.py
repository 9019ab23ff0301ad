"""A run that begins with the weights of another: `entp train TASK --init RUN`.

    init = read_init(Path("runs/text-entp"))
    train(run, "runs/clutrr", init=init)     # step 0, a new optimizer, these weights

The output head is the one part that may differ: where it does, it is new. Weights in HuggingFace's
format are read by entp/hf/beginning.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from entp.config import AnyModelConfig, PretrainedConfig, Run
from entp.config.json import config_hash
from entp.errors import InputError
from entp.training import checkpoint

DIGITS = 16
"""Characters of the weights' sha256 in `Run.init`."""
HEAD = ("outputs", "tied_head", "head")
"""Fields of the model that only its output head follows from."""


class Init(NamedTuple):
    """The weights that a run begins with, and where they are from."""

    weights: dict[str, Tensor]
    model: AnyModelConfig
    origin: dict[str, Any]
    """Name of the run's folder, step, hash of its configuration, sha256 of the weights; of weights
    in HuggingFace's format also which tokens were kept."""

    @property
    def name(self) -> str:
        """What `Run.init` says of it."""
        return str(self.origin["weights"])[:DIGITS]


def read_init(source: Path, which: Literal["best", "last"] = "best") -> Init:
    """The weights of a run's best or last checkpoint, or of an exported model."""
    folder = checkpoint.find(source, which)
    model = checkpoint.load(folder)
    config = checkpoint.read_model(folder)
    return init_from(model.state_dict(), config, **_about(source, folder))


def init_from(weights: dict[str, Tensor], model: AnyModelConfig, **origin: Any) -> Init:
    """Weights from anywhere, with what is known of their origin."""
    return Init(weights, model, {**origin, "weights": weights_hash(weights)})


def _about(source: Path, folder: Path) -> dict[str, Any]:
    """Name, step and configuration of a run; None for what a folder does not say."""
    digits = folder.name.rpartition("-")[2]
    step = int(digits) if folder.parent.name == "checkpoints" and digits.isdecimal() else None
    try:
        config = config_hash(checkpoint.load_run(folder))
    except InputError:  # a model without a run, or of a task that is not at hand
        config = None
    return {"run": source.resolve().name, "step": step, "config": config}


def weights_hash(weights: dict[str, Tensor]) -> str:
    """The sha256 of all names, shapes, types and numbers, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def with_init(run: Run, init: Init) -> Run:
    """The run as it begins with these weights."""
    if run.init not in ("", init.name):
        raise InputError(
            f"the run begins with the weights {run.init}, and those given are {init.name}: give "
            "the weights that it began with, or train another run."
        )
    differences = _differences(init.model, run.model)
    if differences:
        raise InputError(
            f"the run cannot begin with the weights of {init.origin.get('run', 'that model')}: "
            f"{'; '.join(differences)}. Only the output head may differ."
        )
    return replace(run, init=init.name)


def _differences(there: AnyModelConfig, here: AnyModelConfig) -> list[str]:
    """Fields of the models that other weights than the head's depend on."""
    if type(there) is not type(here):
        kinds = [
            "HuggingFace's" if isinstance(m, PretrainedConfig) else "entp's" for m in (there, here)
        ]
        return [f"the model is one of {kinds[0]} there and of {kinds[1]} here"]
    same = {*HEAD, *(() if here.has_limit or there.has_limit else ("context_length",))}
    if isinstance(there, PretrainedConfig) and not there.lora_rank:
        same |= {"lora_rank", "lora_alpha"}
    pairs = {
        f.name: (getattr(there, f.name), getattr(here, f.name))
        for f in dataclasses.fields(here)
        if f.name not in same
    }
    return [f"model.{name} is {a} there and {b} here" for name, (a, b) in pairs.items() if a != b]


def load_init(model: Any, init: Init) -> str:
    """What a person should know, after the model has these weights: its tokens and its head."""
    own = model.state_dict()
    heads = [
        {name: tuple(tensor.shape) for name, tensor in weights.items() if name.startswith("head.")}
        for weights in (init.weights, own)
    ]
    new = heads[0] != heads[1]
    kept = {
        _name_in(own, name): tensor
        for name, tensor in init.weights.items()
        if not (new and name.startswith("head."))
    }
    strangers = [name for name in kept if name not in own]
    if strangers:
        raise InputError(
            f"the weights to begin with have {strangers[0]}, which the model does not have: its "
            "head is of another kind. Begin with the folder of the pretrained model instead."
        )
    missing = [name for name in own if name not in kept and not _is_new(name)]
    if missing:
        raise InputError(f"the weights to begin with have no {missing[0]}: they are incomplete.")
    model.load_state_dict({**own, **kept})
    told = [str(init.origin.get("tokens", "")), _about_head(heads[1]) if new else ""]
    return " ".join(text for text in told if text)


def _name_in(own: dict[str, Tensor], name: str) -> str:
    """The name that a weight has in a model, which may have a LoRA adapter around its layer."""
    layer, _, last = name.rpartition(".")
    adapted = f"{layer}.base_layer.{last}"
    return adapted if adapted in own else name


def _is_new(name: str) -> bool:
    """Whether a weight may begin at random: a head's, or a LoRA adapter's."""
    return name.startswith("head.") or ".lora_" in name


def _about_head(head: dict[str, tuple[int, ...]]) -> str:
    if not head:
        return "The output head is the token embedding: the head of these weights is left out."
    return f"The output head is new: {head['head.weight'][0]} outputs, from random weights."


def check_beginning(run: Run, out: Path) -> None:
    """InputError for a run that begins with weights which nobody gave, and that has no checkpoint
    to go on from."""
    if run.init and checkpoint.newest(out) is None:
        raise InputError(
            f"{out} begins with the weights {run.init}, and there is no checkpoint of it yet: "
            "give --init with the run, or the folder of HuggingFace's, that they are from."
        )
