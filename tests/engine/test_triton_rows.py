"""Triton kernels over rows against the plain functions that define them: outputs and gradients.

Without a GPU they run through Triton's interpreter: the same code, one program after the other,
several ms each, so shapes are small. With a GPU they run there, as part of `make gpu-test`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_models import random_inputs, random_model
from torch import Tensor, nn

from entp.engine.layout import Packing, pack

pytest.importorskip("triton")
from entp.engine.triton import loss, mlp, rotary, rows
from entp.engine.triton.embed import embed
from entp.engine.triton.linear import linear, norm_linear
from entp.engine.triton.rows import Norm

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = 6 if DEVICE == "cpu" else 4
"""A GPU has to compile kernels for nearly every one of them."""
CLOSE = 1e-9
"""Largest deviation allowed in float64, see worst."""
NORMS = [Norm(rows.LAYER, 1e-5), Norm(rows.NONE, 0.0), Norm(rows.RMS, 1e-5)]
ACTIVATIONS = [mlp.RELU, mlp.GELU, mlp.SILU]
WIDTHS = [1, 5, 16, 33, 100]


def packing(batch: int, time: int, seed: int, probability: float = 0.5) -> Packing:
    """Random prefixes, among them one of length 1 and the longest."""
    target_mask = (
        torch.rand(batch, time, generator=torch.Generator().manual_seed(seed)) < probability
    )
    target_mask[0, 0] = target_mask[-1, -1] = True
    return pack(target_mask, torch.device(DEVICE))


def of_lengths(*lengths: int) -> Packing:
    """One sequence's prefixes of these lengths."""
    target_mask = torch.zeros(1, max(lengths), dtype=torch.bool)
    target_mask[0, [m - 1 for m in lengths]] = True
    return pack(target_mask, torch.device(DEVICE))


def numbers(
    *shape: int, seed: int, size: float = 1.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * size
    ).to(DEVICE, dtype)


def results(got: Any, leaves: list[Tensor]) -> list[Tensor]:
    """All outputs, and the gradient of each leaf for a fixed direction of each output."""
    outputs = got if isinstance(got, tuple) else (got,)
    directions = [
        torch.sin(torch.arange(o.numel(), device=o.device) + 0.7 * n) for n, o in enumerate(outputs)
    ]
    gradients = torch.autograd.grad(
        outputs, leaves, [d.to(o).view_as(o) for d, o in zip(directions, outputs, strict=True)]
    )
    return [*(o.detach() for o in outputs), *gradients]


def with_gradients(function: Callable[..., Any], inputs: list[Tensor], *rest: Any) -> list[Tensor]:
    """The results of function(*inputs, *rest)."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    return results(function(*leaves, *rest), leaves)


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest deviation, relative to the largest number of its tensor, and to at least 1."""
    assert [g.shape for g in got] == [w.shape for w in want]
    found = [torch.zeros((), dtype=torch.float64)]
    for one, two in zip(got, want, strict=True):
        g, w = one.detach().double().cpu(), two.detach().double().cpu()
        if w.numel():
            found.append((g - w).abs().max() / w.abs().max().clamp(min=1.0))
    return float(torch.stack(found).max())


@contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """Inside, torch.empty gives NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert bool(torch.empty(3, device=DEVICE).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


# Residual and norm


def stream(h: Tensor, half: torch.dtype) -> rows.Stream:
    """A stream of the rows h whose gradient arrives at h."""
    return rows.Stream(h.detach(), h.to(half))


def ended(h: rows.Stream, half: torch.dtype) -> Tensor:
    """The rows of a stream, as a tensor with a gradient."""
    return rows.stream_end(
        h, torch.zeros_like(h.rows, dtype=half), h.rows.new_zeros(h.rows.shape[1])
    )


def kernel_add_norm(h: Tensor, y: Tensor, bias: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    out, x = rows.add_norm(stream(h, y.dtype), y, bias, norm)
    return ended(out, y.dtype), x


def kernel_first(
    h_BTD: Tensor, y: Tensor, bias: Tensor, norm: Norm, plan: Packing
) -> tuple[Tensor, Tensor]:
    out, x = rows.first_add_norm(h_BTD, y, bias, norm, plan)
    return ended(out, y.dtype), x


def kernel_last(
    h: Tensor, y: Tensor, bias: Tensor, norm: Norm, plan: Packing
) -> tuple[Tensor, Tensor, Tensor]:
    out, x, last = rows.last_add_norm(stream(h, y.dtype), y, bias, norm, plan)
    return ended(out, y.dtype), x, last


def plain_first(
    h_BTD: Tensor, y: Tensor, bias: Tensor, norm: Norm, plan: Packing
) -> tuple[Tensor, Tensor]:
    return rows.plain_add_norm(h_BTD.flatten(0, 1)[plan.row_index], y, bias, norm)


def plain_last(
    h: Tensor, y: Tensor, bias: Tensor, norm: Norm, plan: Packing
) -> tuple[Tensor, Tensor, Tensor]:
    h, x = rows.plain_add_norm(h, y, bias, norm)
    return h[plan.last_row], x, x[plan.last_row]


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 70), st.sampled_from(WIDTHS), st.sampled_from(NORMS), st.integers(0, 99))
@example(200, 24, NORMS[0], 0)
def test_add_norm(count: int, width: int, norm: Norm, seed: int) -> None:
    inputs = [
        numbers(count, width, seed=seed),
        numbers(count, width, seed=seed + 1),
        numbers(width, seed=seed + 2),
    ]
    want = with_gradients(rows.plain_add_norm, inputs, norm)
    assert worst(with_gradients(kernel_add_norm, inputs, norm), want) < CLOSE


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_programs_that_take_several_tiles(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2 programs for 5 tiles of rows, one has 3 and one has 2: gradients of biases add up."""
    monkeypatch.setattr(rows, "PROGRAMS", 2)
    inputs = [numbers(73, 7, seed=0), numbers(73, 7, seed=1), numbers(7, seed=2)]
    want = with_gradients(rows.plain_add_norm, inputs, norm)
    assert worst(with_gradients(kernel_add_norm, inputs, norm), want) < CLOSE
    monkeypatch.setattr(mlp, "_programs", lambda _: 4)
    inputs = [numbers(73 * 2, 150, seed=3), numbers(150, seed=4), numbers(6, 150, seed=5)]
    want = with_gradients(mlp.plain_activated_linear, inputs, norm.kind)
    assert worst(with_gradients(kernel_activated, inputs, norm.kind, False), want) < CLOSE


@settings(max_examples=EXAMPLES)
@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.sampled_from(WIDTHS),
    st.sampled_from(NORMS),
    st.integers(0, 99),
)
@example(1, 1, 8, NORMS[0], 0)
def test_first_add_norm(batch: int, time: int, width: int, norm: Norm, seed: int) -> None:
    """The stream's rows come from tokens; a token in no prefix gets no gradient."""
    plan = packing(batch, time, seed)
    inputs = [
        numbers(batch, time, width, seed=seed),
        numbers(plan.rows, width, seed=seed + 1),
        numbers(width, seed=seed + 2),
    ]
    want = with_gradients(plain_first, inputs, norm, plan)
    assert worst(with_gradients(kernel_first, inputs, norm, plan), want) < CLOSE


@settings(max_examples=EXAMPLES)
@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from(WIDTHS),
    st.sampled_from(NORMS),
    st.integers(0, 99),
)
@example(2, 1, 8, NORMS[0], 0)
def test_last_add_norm(batch: int, time: int, width: int, norm: Norm, seed: int) -> None:
    plan = packing(batch, time, seed)
    inputs = [
        numbers(plan.rows, width, seed=seed),
        numbers(plan.rows, width, seed=seed + 1),
        numbers(width, seed=seed + 2),
    ]
    want = with_gradients(plain_last, inputs, norm, plan)
    assert worst(with_gradients(kernel_last, inputs, norm, plan), want) < CLOSE


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 70), st.sampled_from(WIDTHS), st.sampled_from(NORMS), st.integers(0, 99))
def test_normed(count: int, width: int, norm: Norm, seed: int) -> None:
    def plain(h: Tensor) -> Tensor:
        return rows.plain_norm(h, norm)

    inputs = [numbers(count, width, seed=seed, size=3.0)]
    assert (
        worst(
            with_gradients(rows.normed, inputs, norm, torch.float64), with_gradients(plain, inputs)
        )
        < CLOSE
    )


def test_norm_of_rows_far_from_zero() -> None:
    """Rows whose mean is a million times their spread: the variance is taken after the mean."""
    h, other = numbers(5, 24, seed=0) + 1e6, numbers(5, 24, seed=1)
    want = with_gradients(rows.plain_add_norm, [h, other, numbers(24, seed=2)], NORMS[0])
    assert (
        worst(with_gradients(kernel_add_norm, [h, other, numbers(24, seed=2)], NORMS[0]), want)
        < CLOSE
    )


# Activation


def kernel_activated(u: Tensor, bias: Tensor, w: Tensor, kind: int, recompute: bool) -> Tensor:
    return mlp.activated_linear(u, bias, w, kind, recompute=recompute)


@settings(max_examples=EXAMPLES)
@given(
    st.integers(1, 40),
    st.sampled_from([1, 20, 128, 129, 512]),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.integers(0, 99),
)
def test_activated_linear(count: int, width: int, kind: int, recompute: bool, seed: int) -> None:
    inputs = [
        numbers(count, width, seed=seed, size=2.0),
        numbers(width, seed=seed + 1),
        numbers(7, width, seed=seed + 2),
    ]
    want = with_gradients(mlp.plain_activated_linear, inputs, kind)
    assert worst(with_gradients(kernel_activated, inputs, kind, recompute), want) < CLOSE


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_of_extreme_numbers(kind: int) -> None:
    u = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4]], device=DEVICE, dtype=torch.float64)
    inputs = [u, numbers(5, seed=0, size=1e-3), numbers(3, 5, seed=1)]
    got = with_gradients(kernel_activated, inputs, kind, False)
    assert all(bool(t.isfinite().all()) for t in got)
    assert worst(got, with_gradients(mlp.plain_activated_linear, inputs, kind)) < CLOSE


# Folding of a norm into a matrix, and products


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 50), st.sampled_from(WIDTHS), st.integers(0, 99))
def test_fold_and_its_gradients(outputs: int, width: int, seed: int) -> None:
    w, bias = numbers(outputs, width, seed=seed), numbers(outputs, seed=seed + 1)
    gain, shift = numbers(width, seed=seed + 2), numbers(width, seed=seed + 3)
    want_w, want_b, *want = with_gradients(rows.plain_fold, [w, bias, gain, shift])
    assert worst(list(rows.fold(w, bias, gain, shift, torch.float64)), [want_w, want_b]) < CLOSE
    dw, db = (
        torch.sin(torch.arange(t.numel(), device=DEVICE) + 0.7 * n).to(t).view_as(t)
        for n, t in enumerate((w, bias))
    )
    d_w, d_gain, d_shift = rows.fold_backward(dw, db, w, gain, shift)
    assert worst([d_w, db, d_gain, d_shift], want) < CLOSE


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 600), st.integers(1, 20), st.integers(0, 99))
@example(256, 8, 0)
@example(257, 9, 0)
def test_column_sums(count: int, width: int, seed: int) -> None:
    part = numbers(count, width, seed=seed)
    assert worst([rows.column_sums(part, torch.float64)], [part.sum(0)]) < CLOSE
    single = part.float()
    got = rows.column_sums(single, torch.float64)
    assert got.dtype == torch.float64
    assert worst([got], [single.double().sum(0)]) < CLOSE


def layers(width: int, outputs: int, seed: int, normed: bool) -> tuple[nn.Linear, nn.Module]:
    """A linear layer, and a norm of random gain and shift before it, or none."""
    torch.manual_seed(seed)
    layer, norm = nn.Linear(width, outputs), nn.LayerNorm(width) if normed else nn.Identity()
    for p in norm.parameters():
        nn.init.normal_(p)
    return layer.to(DEVICE, torch.float64), norm.to(DEVICE, torch.float64)


def gain_and_shift(x: Tensor, norm: nn.Module) -> Tensor:
    """What is left to do for rows that are normed already."""
    return norm.weight * x + norm.bias if isinstance(norm, nn.LayerNorm) else x


@settings(max_examples=EXAMPLES)
@given(
    st.integers(1, 20),
    st.sampled_from(WIDTHS),
    st.integers(1, 30),
    st.booleans(),
    st.integers(0, 99),
)
def test_norm_linear(count: int, width: int, outputs: int, normed: bool, seed: int) -> None:
    """Product and bias add up to the plain layer with all its gradients."""
    layer, norm = layers(width, outputs, seed, normed)
    x = numbers(count, width, seed=seed).requires_grad_()
    leaves = [x, *layer.parameters(), *norm.parameters()]
    product, bias = norm_linear(x, layer, norm)
    assert (
        worst(results(product + bias, leaves), results(layer(gain_and_shift(x, norm)), leaves))
        < CLOSE
    )
    assert (
        worst([product], [x @ (layer.weight * norm.weight if normed else layer.weight).T]) < CLOSE
    )


@settings(max_examples=EXAMPLES)
@given(
    st.integers(1, 20),
    st.sampled_from([5, 24]),
    st.booleans(),
    st.sampled_from(ACTIVATIONS),
    st.integers(0, 99),
)
def test_norm_linear_and_activation(
    count: int, width: int, normed: bool, kind: int, seed: int
) -> None:
    """The two as in the MLP: the activation adds the bias, whose gradient reaches all weights."""
    layer, norm = layers(width, 4 * width, seed, normed)
    x = numbers(count, width, seed=seed).requires_grad_()
    leaves = [x, *layer.parameters(), *norm.parameters()]
    w = numbers(3, 4 * width, seed=seed + 1)
    got = mlp.activated_linear(*norm_linear(x, layer, norm), w, kind, recompute=False)
    want = mlp.plain_activated_linear(
        layer(gain_and_shift(x, norm)), torch.zeros_like(layer.bias), w, kind
    )
    assert worst(results(got, leaves), results(want, leaves)) < CLOSE


@pytest.mark.parametrize("normed", [True, False])
def test_norm_linear_with_the_bias_in_the_product(normed: bool) -> None:
    """With `add` the product has the bias, whose gradient the kernel that reads it makes."""
    layer, norm = layers(12, 7, 0, normed)
    x = numbers(5, 12, seed=0).requires_grad_()
    product, bias = norm_linear(x, layer, norm, add=True)
    of_zero = layer(gain_and_shift(torch.zeros_like(x), norm))[0]
    assert worst([product, bias], [layer(gain_and_shift(x, norm)), of_zero]) < CLOSE
    leaves = [x, *layer.parameters(), *norm.parameters()]
    through_the_product = x @ (layer.weight * norm.weight if normed else layer.weight).T
    _, *want = results(through_the_product + 0 * sum(p.sum() for p in leaves), leaves)
    _, *got = results(product + 0 * sum(p.sum() for p in leaves), leaves)
    assert worst(got, want) < CLOSE


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 20), st.integers(1, 33), st.integers(1, 30), st.integers(0, 99))
def test_linear(count: int, width: int, outputs: int, seed: int) -> None:
    inputs = [numbers(count, width, seed=seed), numbers(outputs, width, seed=seed + 1)]
    assert worst(with_gradients(linear, inputs), with_gradients(F.linear, inputs)) < CLOSE


# Token and position vectors


@settings(max_examples=EXAMPLES)
@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from([1, 24]),
    st.integers(0, 99),
)
@example(2, 64, 3, 5, 0)
@example(1, 2, 2, 65, 0)
@example(130, 64, 3, 5, 0)  # more tokens than one program looks through
def test_embed(batch: int, time: int, vocab: int, width: int, seed: int) -> None:
    """Tokens that come often or never, and positions past the end of the sequences."""
    model = random_model(seed, vocab=vocab, width=width, heads=1, layers=1, context_length=64).to(
        DEVICE
    )
    x = random_inputs(model, batch, time, seed).to(DEVICE)
    leaves = [model.tokens.weight, model.positions]
    assert worst(results(embed(model, x), leaves), results(model.embed(x), leaves)) < CLOSE


# The loss


def targets_below(count: int, vocab: int, seed: int) -> Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@settings(max_examples=EXAMPLES)
@given(
    st.integers(0, 9), st.sampled_from([1, 2, 3, 64, 100, 4095]), st.integers(0, 99), st.booleans()
)
@example(2, loss.BLOCK + 1, 0, True)
@example(1, 2 * loss.BLOCK, 0, False)
def test_cross_entropy(count: int, vocab: int, seed: int, weighted: bool) -> None:
    """Vocabularies of a block, less, or several; no rows are a loss of 0; rows may have weights."""
    inputs, targets = (
        [numbers(count, vocab, seed=seed, size=4.0)],
        targets_below(count, vocab, seed),
    )
    weights = numbers(count, seed=seed + 1).abs() if weighted else None
    want = with_gradients(loss.plain_cross_entropy, inputs, targets, weights)
    assert worst(with_gradients(loss.cross_entropy, inputs, targets, weights), want) < CLOSE


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_cross_entropy_of_extreme_logits(size: float) -> None:
    """Also where whole blocks of logits are negligible, and where the target is."""
    logits = numbers(6, loss.BLOCK + 5, seed=0, size=size)
    logits[0, : loss.BLOCK] = -size
    logits[1, loss.BLOCK :] = -size
    targets = targets_below(6, loss.BLOCK + 5, 1)
    targets[2], targets[3] = logits[2].argmax(), logits[3].argmin()
    got = with_gradients(loss.cross_entropy, [logits], targets)
    assert all(bool(t.isfinite().all()) for t in got)
    assert worst(got, with_gradients(loss.plain_cross_entropy, [logits], targets)) < CLOSE


def test_cross_entropy_of_half_precision_logits_is_summed_in_float32() -> None:
    logits, targets = numbers(8, 100, seed=0, dtype=torch.bfloat16), targets_below(8, 100, 1)
    got, gradient = with_gradients(loss.cross_entropy, [logits], targets)
    want, plain_gradient = with_gradients(loss.plain_cross_entropy, [logits.double()], targets)
    assert got.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    assert worst([got], [want]) < 1e-6
    assert worst([gradient], [plain_gradient]) < 2**-8


# Rotary positions


def rotation(size: int, count: int, seed: int) -> rotary.Rotation:
    """A table of random angles, and which of them each row takes."""
    angle = numbers(7, size // 2, seed=seed, size=3.0)
    index = torch.randint(7, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return rotary.Rotation(angle.cos(), angle.sin(), index)


@settings(max_examples=EXAMPLES)
@given(
    st.integers(1, 40), st.sampled_from([1, 2, 3]), st.sampled_from([2, 6, 32]), st.integers(0, 99)
)
@example(1100, 3, 2, 0)
def test_rotate(count: int, heads: int, size: int, seed: int) -> None:
    """Rows, and both gradients: that of the bias is of what was added before the turn."""
    turn = rotation(size, count, seed)

    def kernel(qkv: Tensor, bias: Tensor) -> Tensor:
        turned, passed = rotary.rotate(qkv + bias.detach(), bias, turn)
        return turned + (passed - passed.detach())  # attention gives the bias its gradient this way

    inputs = [numbers(count, 3 * heads * size, seed=seed), numbers(3 * heads * size, seed=seed + 1)]
    want = with_gradients(lambda qkv, bias: rotary.plain_rotate(qkv + bias, turn, heads), inputs)
    assert worst(with_gradients(kernel, inputs), want) < CLOSE


def test_rotate_rounds_half_precision_once() -> None:
    turn = rotation(16, 30, 0)
    # The interpreter cuts bfloat16 off instead of rounding it.
    half = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    qkv = numbers(30, 96, seed=0).to(half)
    exact = rotary.plain_rotate(qkv.double(), turn, 2)
    single = rotary.Rotation(turn.cos.float(), turn.sin.float(), turn.which)
    got, _ = rotary.rotate(qkv.clone(), torch.zeros(96, device=DEVICE), single)
    assert ((got.double() - exact).abs() <= torch.finfo(half).eps / 2 * exact.abs() + 1e-6).all()
