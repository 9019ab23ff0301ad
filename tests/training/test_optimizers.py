"""AdamW's groups, what Muon takes, and that optimizers continue as they were saved."""

from __future__ import annotations

import io
import itertools

import pytest
import torch

import entp
from entp.config import OptimConfig
from entp.training.optimizers import (
    make_optimizers,
    renew_preconditioners,
    restore_optimizer,
    save_optimizer,
    set_learning_rate,
)


def model() -> entp.Transformer:
    torch.manual_seed(0)
    return entp.Transformer(entp.ModelConfig(vocab=7, context_length=5, layers=2, heads=2, width=8))


def test_adamw_does_not_decay_vectors() -> None:
    (adamw,) = make_optimizers(model(), OptimConfig(weight_decay=0.3))
    for group in adamw.param_groups:
        assert group["weight_decay"] == (0.3 if all(p.ndim >= 2 for p in group["params"]) else 0.0)
    assert sum(len(g["params"]) for g in adamw.param_groups) == len(list(model().parameters()))


def test_muon_takes_the_blocks_matrices_only() -> None:
    m = model()
    adamw, muon = make_optimizers(m, OptimConfig(name="muon"))
    names = {id(p): n for n, p in m.named_parameters()}
    taken = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    assert taken == {
        f"blocks.{i}.{part}.weight" for i in range(2) for part in ("qkv", "proj", "fc", "out")
    }
    rest = {names[id(p)] for g in adamw.param_groups for p in g["params"]}
    assert not taken & rest
    assert taken | rest == set(names.values())
    set_learning_rate([adamw, muon], 0.125)
    assert {g["lr"] for o in (adamw, muon) for g in o.param_groups} == {0.125}


def test_preconditioners_are_for_hidden_units_only() -> None:
    m = model()
    _, muon = make_optimizers(m, OptimConfig(name="muon", precondition_every=2))
    steps(m, [muon], range(1))
    names = {id(p): n for n, p in m.named_parameters()}
    preconditioned = {
        names[id(p)]: state["preconditioner"].shape
        for p, state in muon.state.items()
        if "preconditioner" in state
    }
    assert preconditioned == {
        f"blocks.{i}.{part}.weight": (32, 32) for i in range(2) for part in ("fc", "out")
    }


def test_preconditioners_are_renewed_every_so_many_steps() -> None:
    m, config = model(), OptimConfig(name="muon", precondition_every=3)
    optimizers = make_optimizers(m, config)
    seen = []
    for step in range(8):
        renew_preconditioners(optimizers, config, step)
        steps(m, optimizers, range(step, step + 1))
        seen.append(optimizers[1].state[m.blocks[0].fc.weight]["preconditioner"].clone())
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [step % 3 == 0 for step in range(1, 8)]
    assert torch.equal(seen[0], torch.eye(32))


def steps(m: entp.Transformer, optimizers: list[torch.optim.Optimizer], numbers: range) -> None:
    """Steps with gradients and rates that depend on their number only."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for p in m.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        set_learning_rate(optimizers, 0.01 / (1 + number))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    "config", [OptimConfig("adamw"), OptimConfig("muon"), OptimConfig("muon", precondition_every=1)]
)
def test_restored_optimizer_continues_bit_for_bit(config: OptimConfig) -> None:
    """Through a file that is read without unpickling code."""
    whole = model()
    optimizers = make_optimizers(whole, config)
    steps(whole, optimizers, range(3))
    file = io.BytesIO()
    torch.save([save_optimizer(o) for o in optimizers], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    continued = model()
    continued.load_state_dict(whole.state_dict())
    fresh = make_optimizers(continued, config)
    for optimizer, state in zip(fresh, saved, strict=True):
        restore_optimizer(optimizer, state)
    for m, own in ((whole, optimizers), (continued, fresh)):
        renew_preconditioners(own, config, 3)
        steps(m, own, range(3, 6))
    for a, b in zip(whole.parameters(), continued.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saved_learning_rates_are_plain_numbers(name: str) -> None:
    """Also where the optimizer keeps its rate in a tensor, as it does on CUDA for steps that are
    captured."""
    m = model()
    optimizers = make_optimizers(m, OptimConfig(name=name))
    steps(m, optimizers, range(1))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.25)
        saved = save_optimizer(optimizer)
        assert saved.keys() == {"state", "param_groups"}
        for group in saved["param_groups"]:
            assert (type(group["lr"]), group["lr"]) == (float, 0.25)
        # the optimizer itself is left alone
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def test_restored_optimizer_keeps_settings_of_its_device_and_run() -> None:
    """A state from a GPU (fused, capturable) does not make a CPU's optimizer fused, nor move its
    rate into a tensor or back."""
    m = model()
    (adamw,) = make_optimizers(m, OptimConfig(beta2=0.95))
    steps(m, [adamw], range(1))
    saved = save_optimizer(adamw)
    for group in saved["param_groups"]:
        group.update(fused=True, capturable=True, lr=0.5)
    (plain,) = make_optimizers(m, OptimConfig())
    restore_optimizer(plain, saved)
    for group, before in zip(
        plain.param_groups, make_optimizers(m, OptimConfig())[0].param_groups, strict=True
    ):
        assert {k: group[k] for k in ("lr", "fused", "capturable", "foreach")} == {
            k: before[k] for k in ("lr", "fused", "capturable", "foreach")
        }
        # a fork's settings are its own; a run that is resumed has them from its config
        assert group["betas"] == (0.9, 0.99)
    rate = torch.tensor(0.125)
    for group in plain.param_groups:
        group["lr"] = rate
    restore_optimizer(plain, saved)
    # a captured step reads this very tensor
    assert all(group["lr"] is rate for group in plain.param_groups)


def test_optimizer_is_restored_from_the_names_of_earlier_versions() -> None:
    m, config = model(), OptimConfig("muon", precondition_every=1)
    _, muon = make_optimizers(m, config)
    for number in range(2):
        renew_preconditioners([muon], config, number)
        steps(m, [muon], range(number, number + 1))
    saved = save_optimizer(muon)
    old = {
        key: {("whitener" if n == "preconditioner" else n): t for n, t in tensors.items()}
        for key, tensors in saved["state"].items()
    }
    assert any("whitener" in tensors for tensors in old.values())
    other = model()
    _, restored = make_optimizers(other, config)
    restore_optimizer(restored, {**saved, "state": old})
    for p, q in zip(m.blocks.parameters(), other.blocks.parameters(), strict=True):
        assert muon.state[p].keys() == restored.state[q].keys()
        for name, tensor in muon.state[p].items():
            assert torch.equal(tensor, restored.state[q][name])
