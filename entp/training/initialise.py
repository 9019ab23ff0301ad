"""A run that begins with the weights of another: `entp train TASK --init RUN`.

    init = read_init(Path("runs/text-entp"))
    train(run, "runs/clutrr", init=init)     # step 0, a new optimizer, these weights

The output head is the one part that may differ: where it does, it is new.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from entp.config import ModelConfig, Run
from entp.config.json import config_hash
from entp.errors import InputError
from entp.model import Transformer
from entp.training import checkpoint

DIGITS = 16
"""Characters of the weights' sha256 in `Run.init`."""
HEAD = ("outputs", "tied_head")
"""Fields of the model that only its output head follows from."""


class Init(NamedTuple):
    """The weights that a run begins with, and where they are from."""

    weights: dict[str, Tensor]
    model: ModelConfig
    origin: dict[str, Any]
    """Name of the run's folder, step, hash of its configuration, sha256 of the weights."""

    @property
    def name(self) -> str:
        """What `Run.init` says of it."""
        return str(self.origin["weights"])[:DIGITS]


def read_init(source: Path, which: Literal["best", "last"] = "best") -> Init:
    """The weights of a run's best or last checkpoint, or of an exported model."""
    folder = checkpoint.find(source, which)
    model = checkpoint.load(folder)
    return init_from(model.state_dict(), model.config, **_about(source, folder))


def init_from(weights: dict[str, Tensor], model: ModelConfig, **origin: Any) -> Init:
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


def _differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Fields of the models that other weights than the head's depend on."""
    same = {*HEAD, *(() if here.has_limit or there.has_limit else ("context_length",))}
    pairs = {
        f.name: (getattr(there, f.name), getattr(here, f.name))
        for f in dataclasses.fields(ModelConfig)
        if f.name not in same
    }
    return [f"model.{name} is {a} there and {b} here" for name, (a, b) in pairs.items() if a != b]


def load_init(model: Transformer, init: Init) -> str:
    """What a person should know, after the model has these weights: which head it has."""
    own = model.state_dict()
    heads = [
        {name: tuple(tensor.shape) for name, tensor in weights.items() if name.startswith("head.")}
        for weights in (init.weights, own)
    ]
    new = heads[0] != heads[1]
    kept = {
        name: tensor
        for name, tensor in init.weights.items()
        if not (new and name.startswith("head."))
    }
    missing = [name for name in own if name not in kept and not name.startswith("head.")]
    if missing:
        raise InputError(f"the weights to begin with have no {missing[0]}: they are incomplete.")
    model.load_state_dict({**own, **kept})
    return _about_head(heads[1]) if new else ""


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
            "give --init with the run that they are from."
        )
