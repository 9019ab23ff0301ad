"""The schedule, AdamW's groups, and Muon in full precision on a CPU."""

from __future__ import annotations

import io
import itertools
import math

import pytest
import torch

import entp
from entp.config import OptimConfig
from entp.training.optimizers import (
    DAMPING,
    REMEMBERED,
    SMALLEST,
    Muon,
    inverse_fourth_root,
    learning_rate,
    make_optimizers,
    newton_steps,
    orthogonalise,
    renew_whiteners,
    restore_optimizer,
    save_optimizer,
    set_learning_rate,
)


def test_schedule_is_the_papers() -> None:
    config = OptimConfig()  # 5e-4 to 5e-5, cosine over 100k steps, warm-up 500
    assert learning_rate(config, 0) == pytest.approx(5e-4 / 500)
    assert learning_rate(config, 499) == pytest.approx(5e-4)
    assert learning_rate(config, 500) == pytest.approx(5e-4)
    half = 500 + (100_000 - 500) // 2
    assert learning_rate(config, half) == pytest.approx((5e-4 + 5e-5) / 2)
    assert learning_rate(config, 100_000) == pytest.approx(5e-5)
    assert learning_rate(config, 150_000) == pytest.approx(5e-5)


def test_schedule_falls_after_warmup() -> None:
    config = OptimConfig(warmup_steps=5, decay_steps=50)
    rates = [learning_rate(config, s) for s in range(60)]
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_schedule_may_fall_on_a_line() -> None:
    config = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10, decay_steps=110, schedule="linear")
    assert [learning_rate(config, s) for s in (10, 35, 60, 110, 500)] == pytest.approx(
        [1e-3, 7.75e-4, 5.5e-4, 1e-4, 1e-4]
    )
    by_clock = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10, decay_by="seconds", schedule="linear")
    assert [learning_rate(by_clock, 50, spent) for spent in (0.0, 0.5, 1.0, 1.2)] == pytest.approx(
        [1e-3, 5.5e-4, 1e-4, 1e-4]
    )


def model() -> entp.Transformer:
    torch.manual_seed(0)
    return entp.Transformer(entp.ModelConfig(vocab=7, context_length=5, layers=2, heads=2, width=8))


def test_vectors_are_not_decayed() -> None:
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


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 32)])
def test_orthogonalise_flattens_singular_values(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    out = orthogonalise(torch.randn(shape))
    assert out.dtype == torch.float32  # never bfloat16 on a CPU
    values = torch.linalg.svdvals(out)
    assert values.min() > 0.4
    assert values.max() < 1.6


def test_q_k_and_v_are_three_matrices_to_muon() -> None:
    """The update of the stacked matrix is that of its parts, each alone."""
    m = model()
    _, muon = make_optimizers(m, OptimConfig(name="muon", lr=0.02, weight_decay=0.1))
    block = m.blocks[0]
    parts = [
        torch.nn.Parameter(part.detach().clone())
        for part in (*block.qkv.weight.chunk(3), block.proj.weight)
    ]
    alone = Muon(parts, lr=0.02, weight_decay=0.1)
    for step in range(3):
        torch.manual_seed(step)
        for p in muon.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        for part, grad in zip(
            parts, (*block.qkv.weight.grad.chunk(3), block.proj.weight.grad), strict=True
        ):
            part.grad = grad.clone()
        muon.step()
        alone.step()
    assert torch.allclose(block.qkv.weight, torch.cat([p.detach() for p in parts[:3]]), atol=1e-6)
    assert torch.allclose(block.proj.weight, parts[3], atol=1e-6)


def test_muon_follows_torchs_own() -> None:
    """Same update as torch.optim.Muon up to the bfloat16 that torch works in."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    options = {"lr": 0.02, "weight_decay": 0.1}
    mine, reference = (
        Muon([ours], **options),
        torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options),
    )
    for _ in range(3):
        grad = torch.randn(6, 4)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        reference.step()
    step = 0.02 * 0.2 * math.sqrt(6)
    assert (ours - theirs).abs().max() < 0.05 * 3 * step
    assert (ours - 1).abs().max() > 0.2 * step


@pytest.mark.parametrize("whiten", [0, 1])
def test_muon_decays_by_its_own_rate_and_moves_nothing_without_a_gradient(whiten: int) -> None:
    m = model()
    _, muon = make_optimizers(
        m, OptimConfig(name="muon", lr=0.5, weight_decay=0.3, precondition_every=whiten)
    )
    before = [p.detach().clone() for p in muon.param_groups[0]["params"]]
    for p in m.parameters():
        p.grad = torch.zeros_like(p)
    muon.step()
    assert all(
        torch.allclose(p, 0.85 * b)
        for p, b in zip(muon.param_groups[0]["params"], before, strict=True)
    )


# Whitening


def fourth_root_by_eigenvalues(a: torch.Tensor) -> torch.Tensor:
    """What inverse_fourth_root approximates, in float64."""
    a = a.double()
    a = a + DAMPING * a.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(a.shape[-1])
    values, vectors = torch.linalg.eigh(a)
    root = (vectors * values[:, None] ** -0.25) @ vectors.mT
    return root / root.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]


def test_inverse_fourth_root_of_badly_conditioned_products() -> None:
    """Rows of sizes 1 to 1/1000, fewer columns than rows: eigenvalues from 0 up, where only the
    damping holds."""
    torch.manual_seed(0)
    g = torch.randn(3, 96, 40) * torch.logspace(0, -3, 96)[:, None]
    wanted = fourth_root_by_eigenvalues(g @ g.mT)
    sizes = wanted.diagonal(dim1=1, dim2=2)
    assert (sizes.amax(1) > 4 * sizes.amin(1)).all()  # far from doing nothing
    assert (inverse_fourth_root(g @ g.mT) - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_newtons_steps_bring_every_eigenvalue_to_one() -> None:
    """From the smallest one that is promised up to 1, in a third of the steps that equally long
    ones take."""
    m = torch.logspace(math.log10(SMALLEST), 0, 1000, dtype=torch.float64)
    for low, scale, slope in newton_steps():
        assert m.min() > low * (1 - 1e-9)
        assert m.max() < 1 + 1e-9
        m = m * (scale * (1 - slope * m)) ** 4
    assert m.min() > 0.99
    assert m.max() < 1 + 1e-9
    assert len(newton_steps()) == 7


@pytest.mark.gpu
def test_inverse_fourth_root_with_quick_products() -> None:
    """Medium's hidden units, eigenvalues over four orders of magnitude: a hundredth off at most,
    and all of them whitened.

    What the program has chosen for its own matrix products is neither used nor changed.
    """
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2, 1536, 1536, dtype=torch.float64))[0]
    a = (basis * torch.logspace(1.6, -2.4, 1536, dtype=torch.float64)) @ basis.mT
    torch.set_float32_matmul_precision("medium")
    try:
        found, wanted = (
            inverse_fourth_root(a.float().cuda()).cpu().double(),
            fourth_root_by_eigenvalues(a),
        )
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (found - wanted).norm() < 1e-2 * wanted.norm()
    damped = a + DAMPING * a.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(1536)
    left = torch.linalg.eigvalsh(found @ found @ damped @ found @ found)
    assert left.amin() > 0.7 * left.median()
    assert left.amax() < 1.4 * left.median()


def test_nothing_seen_whitens_nothing() -> None:
    """Products of gradients that were all 0 give the identity, not a division by 0."""
    assert torch.allclose(
        inverse_fourth_root(torch.zeros(2, 5, 5)), torch.eye(5).expand(2, 5, 5), atol=1e-5
    )


def test_only_hidden_units_are_whitened() -> None:
    m = model()
    _, muon = make_optimizers(m, OptimConfig(name="muon", precondition_every=2))
    steps(m, [muon], range(1))
    names = {id(p): n for n, p in m.named_parameters()}
    whitened = {
        names[id(p)]: state["whitener"].shape
        for p, state in muon.state.items()
        if "whitener" in state
    }
    assert whitened == {
        f"blocks.{i}.{part}.weight": (32, 32) for i in range(2) for part in ("fc", "out")
    }


@pytest.mark.parametrize("shape", [(12, 4), (4, 12)], ids=["rows", "columns"])
def test_a_whitened_step_is_the_formula(shape: tuple[int, int]) -> None:
    """C: running mean of GG' on the long side, W = C^(-1/4); the update is W orthogonal(W
    direction), as long as without W."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(shape))
    muon = Muon([p], lr=0.02, weight_decay=0.0)
    muon.param_groups[0]["whiten"] = [True]
    long, products, average = (
        (lambda g: g if shape[0] > shape[1] else g.mT),
        torch.zeros(12, 12),
        torch.zeros(shape),
    )
    for step in range(4):
        before = p.detach().clone()
        p.grad = torch.randn(shape) * torch.logspace(0, -2, shape[0])[:, None]
        if step == 3:
            muon.whiten()
        white = (
            fourth_root_by_eigenvalues(products[None])[0].float() if step == 3 else torch.eye(12)
        )
        muon.step()
        average = average.lerp(p.grad, 0.05)
        straight = orthogonalise((white @ long(p.grad.lerp(average, 0.95)))[None])[0]
        wanted = white @ straight
        wanted = wanted * (straight.norm() / wanted.norm()) * 0.02 * 0.2 * math.sqrt(12)
        assert torch.allclose(
            long(before - p.detach()), wanted, atol=1e-2 * wanted.abs().max().item()
        )
        products = products.lerp(long(p.grad) @ long(p.grad).mT, 1 - REMEMBERED)
    plain = orthogonalise(long(p.grad.lerp(average, 0.95))[None])[0]
    assert (
        straight / straight.norm() - plain / plain.norm()
    ).abs().max() > 0.02  # whitening made a difference


def test_whiteners_are_renewed_every_so_many_steps() -> None:
    m, config = model(), OptimConfig(name="muon", precondition_every=3)
    optimizers = make_optimizers(m, config)
    seen = []
    for step in range(8):
        renew_whiteners(optimizers, config, step)
        steps(m, optimizers, range(step, step + 1))
        seen.append(optimizers[1].state[m.blocks[0].fc.weight]["whitener"].clone())
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [step % 3 == 0 for step in range(1, 8)]
    assert torch.equal(seen[0], torch.eye(32))


# Saving and restoring


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
def test_a_restored_optimizer_continues_bit_for_bit(config: OptimConfig) -> None:
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
        renew_whiteners(own, config, 3)
        steps(m, own, range(3, 6))
    for a, b in zip(whole.parameters(), continued.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saved_rates_are_plain_numbers(name: str) -> None:
    """Also where the optimizer keeps its rate in a tensor, as it does on CUDA for steps that are
    recorded."""
    m = model()
    optimizers = make_optimizers(m, OptimConfig(name=name))
    steps(m, optimizers, range(1))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.25)
        saved = save_optimizer(optimizer)
        assert saved.keys() == {"state", "param_groups"}
        assert [(type(g["lr"]), g["lr"]) for g in saved["param_groups"]] == [(float, 0.25)] * len(
            optimizer.param_groups
        )
        assert isinstance(
            optimizer.param_groups[0]["lr"], torch.Tensor
        )  # the optimizer itself is left alone


def test_restoring_keeps_what_belongs_to_the_device_and_to_the_run() -> None:
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
        assert group["betas"] == (
            0.9,
            0.99,
        )  # a fork's settings are its own; a run that is resumed has them from its config
    rate = torch.tensor(0.125)
    for group in plain.param_groups:
        group["lr"] = rate
    restore_optimizer(plain, saved)
    assert all(
        group["lr"] is rate for group in plain.param_groups
    )  # a recorded step reads this very tensor
