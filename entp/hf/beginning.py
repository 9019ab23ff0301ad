"""The weights of a HuggingFace folder for a run to begin with: `entp train TASK --init FOLDER`.

init = read_pretrained("folder-of-bert", Count3(), lora_rank=8)
train(Run(Count3(), init.model, ...), "runs/bert", init=init)
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entp.config import PretrainedConfig
from entp.errors import InputError
from entp.hf import load, refuse_gguf
from entp.hf.adapters import PretrainedModel
from entp.hf.building import describe, train_every_token
from entp.hf.vocabulary import Rows, rows_for
from entp.tasks.base import Task
from entp.training.initialise import Init, init_from


def is_pretrained(folder: Path) -> bool:
    """Whether a folder holds a model in HuggingFace's format."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "model_type" in found


def read_pretrained(
    folder: str | Path, task: Task, *, lora_rank: int = 0, lora_alpha: float = 8.0
) -> Init:
    """The weights of a folder, with the tokens that the task needs and no others.

    `init.model` is the model's configuration. A task with outputs of its own gets a new head.
    """
    init = _read(Path(folder).expanduser().resolve(), task)
    assert isinstance(init.model, PretrainedConfig)
    return init._replace(model=replace(init.model, lora_rank=lora_rank, lora_alpha=lora_alpha))


def like(init: PretrainedConfig) -> dict[str, Any]:
    """The options of `read_pretrained` that give this model again."""
    return {"lora_rank": init.lora_rank, "lora_alpha": init.lora_alpha}


@lru_cache(maxsize=1)  # what a command asks for twice is read once
def _read(folder: Path, task: Task) -> Init:
    refuse_gguf(folder)
    if not is_pretrained(folder):
        raise InputError(
            f"{folder} is no folder in HuggingFace's format: it needs config.json with a "
            "model_type, and the weights in model.safetensors."
        )
    model = load(folder)
    rows = rows_for(task, folder, model.vocab)
    _keep(model, rows)
    outputs = task.model_needs().get("outputs")
    config = PretrainedConfig(describe(model.config), _head(model, outputs), outputs)
    about = {"run": folder.name, "step": None, "config": None}
    told = {"model_type": config.model_type, "tokens": rows.told}
    return init_from(_weights(model, config), config, **about, **told)


def _keep(model: PretrainedModel, rows: Rows) -> None:
    """The model with these tokens alone."""
    if rows.new or rows.ids != list(range(model.vocab)):
        model.keep_tokens(rows.ids, rows.new)
    train_every_token(model)


def _head(model: PretrainedModel, outputs: int | None) -> Any:
    if outputs is not None:
        return "linear"
    return "own" if model.head is None else "embedding"


def _weights(model: PretrainedModel, config: PretrainedConfig) -> dict[str, Tensor]:
    """The weights under the names that the built model has."""
    found = model.state_dict()
    if config.head == "linear":
        base = model.base.state_dict()
        found = {f"network.{name}": tensor for name, tensor in base.items()}
    return {name: tensor.to(torch.float32) for name, tensor in found.items()}
