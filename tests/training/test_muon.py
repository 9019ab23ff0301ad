"""Muon in full precision on a CPU, and its preconditioner."""

from __future__ import annotations

import math

import pytest
import torch

import entp
from entp.config import OptimConfig
from entp.training.muon import (
    DAMPING,
    REMEMBERED,
    SMALLEST,
    Muon,
    inverse_fourth_root,
    newton_steps,
    orthogonalise,
)
from entp.training.optimizers import make_optimizers


def model() -> entp.Transformer:
    torch.manual_seed(0)
    return entp.Transformer(entp.ModelConfig(vocab=7, context_length=5, layers=2, heads=2, width=8))


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 32)])
def test_orthogonalise_flattens_singular_values(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    out = orthogonalise(torch.randn(shape))
    assert out.dtype == torch.float32  # never bfloat16 on a CPU
    values = torch.linalg.svdvals(out)
    assert values.min() > 0.4
    assert values.max() < 1.6


def test_muon_takes_q_k_and_v_as_three_matrices() -> None:
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


@pytest.mark.parametrize("every", [0, 1])
def test_muon_decays_by_its_learning_rate_and_moves_nothing_without_a_gradient(every: int) -> None:
    m = model()
    _, muon = make_optimizers(
        m, OptimConfig(name="muon", lr=0.5, weight_decay=0.3, precondition_every=every)
    )
    before = [p.detach().clone() for p in muon.param_groups[0]["params"]]
    for p in m.parameters():
        p.grad = torch.zeros_like(p)
    muon.step()
    assert all(
        torch.allclose(p, 0.85 * b)
        for p, b in zip(muon.param_groups[0]["params"], before, strict=True)
    )


def fourth_root_by_eigenvalues(a: torch.Tensor) -> torch.Tensor:
    """What inverse_fourth_root approximates, in float64."""
    a = a.double()
    a = a + DAMPING * a.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(a.shape[-1])
    values, vectors = torch.linalg.eigh(a)
    root = (vectors * values[:, None] ** -0.25) @ vectors.mT
    return root / root.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]


def test_inverse_fourth_root_holds_for_badly_conditioned_products() -> None:
    """Rows of sizes 1 to 1/1000, fewer columns than rows: eigenvalues from 0 up, where only the
    damping holds."""
    torch.manual_seed(0)
    g = torch.randn(3, 96, 40) * torch.logspace(0, -3, 96)[:, None]
    wanted = fourth_root_by_eigenvalues(g @ g.mT)
    sizes = wanted.diagonal(dim1=1, dim2=2)
    assert (sizes.amax(1) > 4 * sizes.amin(1)).all()  # far from doing nothing
    assert (inverse_fourth_root(g @ g.mT) - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_newton_steps_bring_every_eigenvalue_to_one() -> None:
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
def test_inverse_fourth_root_holds_with_quick_products() -> None:
    """Medium's hidden units, eigenvalues over four orders of magnitude: a hundredth off at most,
    and all of them preconditioned.

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


def test_inverse_fourth_root_of_nothing_is_the_identity() -> None:
    """Products of gradients that were all 0 give the identity, not a division by 0."""
    assert torch.allclose(
        inverse_fourth_root(torch.zeros(2, 5, 5)), torch.eye(5).expand(2, 5, 5), atol=1e-5
    )


@pytest.mark.parametrize("shape", [(12, 4), (4, 12)], ids=["rows", "columns"])
def test_preconditioned_step_is_the_formula(shape: tuple[int, int]) -> None:
    """C: running mean of GG' on the long side, W = C^(-1/4); the update is W orthogonal(W
    direction), as long as without W."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(shape))
    muon = Muon([p], lr=0.02, weight_decay=0.0)
    muon.param_groups[0]["precondition"] = [True]
    products, average = torch.zeros(12, 12), torch.zeros(shape)

    def long(g: torch.Tensor) -> torch.Tensor:
        """With the long side first."""
        return g if shape[0] > shape[1] else g.mT

    for step in range(4):
        before = p.detach().clone()
        p.grad = torch.randn(shape) * torch.logspace(0, -2, shape[0])[:, None]
        if step == 3:
            muon.precondition()
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
    difference = straight / straight.norm() - plain / plain.norm()
    assert difference.abs().max() > 0.02
