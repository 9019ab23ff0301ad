"""AdamW as the paper uses it, or Muon for the matrices inside the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from entp.config import OptimConfig
from entp.training.muon import Muon


def make_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW over everything, or Muon over the blocks' matrices and AdamW over the rest; vectors are
    not decayed."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    muon = {
        n: p for n, p in named if config.name == "muon" and n.startswith("blocks.") and p.ndim == 2
    }
    taken = {id(p) for p in muon.values()}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    cuda = named[0][1].is_cuda

    def rate() -> Tensor | float:  # on CUDA a captured step reads it
        return torch.tensor(config.lr, device=named[0][1].device) if cuda else config.lr

    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=rate(), betas=betas, fused=cuda, capturable=cuda)
    ]
    if muon:
        optimizers.append(Muon(list(muon.values()), lr=config.lr, weight_decay=config.weight_decay))
        optimizers[1].param_groups[0]["parts"] = [_stacked(n, p) for n, p in muon.items()]
        optimizers[1].param_groups[0]["precondition"] = [
            config.precondition_every > 0 and n.endswith(("fc.weight", "out.weight")) for n in muon
        ]
        optimizers[1].param_groups[0]["lr"] = rate()
    return optimizers


def _stacked(name: str, p: Tensor) -> int:
    """How many square matrices stand in a parameter: q, k and v, unless keys and values have fewer
    heads."""
    return 3 if name.endswith("qkv.weight") and p.shape[0] == 3 * p.shape[1] else 1


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """The same rate for every group of every optimizer."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # on CUDA, where a captured step reads it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def renew_preconditioners(
    optimizers: list[torch.optim.Optimizer], config: OptimConfig, step: int
) -> None:
    """Renew Muon's preconditioners from the gradients so far, every precondition_every steps."""
    if config.precondition_every and step % config.precondition_every == 0:
        for optimizer in optimizers:
            if isinstance(optimizer, Muon):
                optimizer.precondition()


def save_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state for a file: on whatever device it continues, it is the same."""
    saved = optimizer.state_dict()
    groups = [{**g, "lr": float(g["lr"])} for g in saved["param_groups"]]
    return {"state": saved["state"], "param_groups": groups}


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the state that save_optimizer gave; settings stay the run's own, and what belongs to the
    device as it is."""
    own = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    groups = [
        {**kept, "params": group["params"]}
        for group, kept in zip(saved["param_groups"], own, strict=True)
    ]
    optimizer.load_state_dict({"state": _upgraded(saved["state"]), "param_groups": groups})
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group.update(kept)


def _upgraded(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The optimizer's tensors under today's names."""
    names = {"whitener": "preconditioner"}  # before 2026-11-18
    return {
        key: {names.get(name, name): value for name, value in tensors.items()}
        for key, tensors in state.items()
    }
