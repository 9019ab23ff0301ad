"""Triton's attention kernels, what holds for every kernel, and the engine made of them.

Attention is compared with the plain functions that define it, the engine with the reference.
Without a GPU kernels run through Triton's interpreter: the same code, one program after the other,
several ms each, so shapes are small. With a GPU they run there, as part of `make gpu-test`. Kernels
that go over rows have test_triton_rows.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_models import random_inputs, random_model
from torch import Tensor

import entp
from entp.engine import budget as budget_module
from entp.engine import packed
from entp.engine.layout import Packing, pack, whole_sequences
from entp.engine.masks import visible
from entp.errors import InputError

pytest.importorskip("triton")
from test_triton_rows import (
    CLOSE,
    DEVICE,
    EXAMPLES,
    NORMS,
    gain_and_shift,
    kernel_add_norm,
    kernel_first,
    kernel_last,
    layers,
    memory_full_of_nan,
    numbers,
    of_lengths,
    packing,
    plain_first,
    plain_last,
    results,
    targets_below,
    with_gradients,
    worst,
)

from entp.engine.triton import attention, last, loss, mlp, online_softmax, rows
from entp.engine.triton.linear import linear, norm_linear

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The interpreter multiplies the bits of bfloat16 matrices, not their values."""
HEADS = st.sampled_from([1, 3])
SIZES = st.sampled_from([1, 5, 16])


def plain_prefix(qkv: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    return attention.plain_prefix_attention(qkv + bias, *rest)


def kernel_prefix(qkv: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    """The kernel wants the bias in qkv already, and gives its gradient."""
    return attention.prefix_attention(qkv + bias.detach().to(qkv.dtype), bias, *rest)


def plain_running(qkv: Tensor, bias: Tensor, plan: Packing, heads: int, scale: float) -> Tensor:
    q, k, v = (qkv + bias).view(plan.batch, plan.longest, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return packed.running_attention(q, k, v, plan, scale)


def kernel_running(qkv: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    return online_softmax.running_attention(qkv + bias.detach().to(qkv.dtype), bias, *rest)


def plain_last_attention(
    x: Tensor,
    ends: Tensor,
    w: Tensor,
    bias: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    plan: Packing,
    *rest: Any,
) -> Tensor:
    """Attention of each prefix's last row to all its rows, prefix by prefix."""
    heads, scale = rest
    if gain is not None and shift is not None:
        x, ends = gain * x + shift, gain * ends + shift
    q, _, _ = (ends @ w.T + bias).view(len(ends), 3, heads, -1).unbind(1)
    _, k, v = (x @ w.T + bias).view(len(x), 3, heads, -1).unbind(1)
    found = []
    for query, keys, values in zip(
        q, k.split(plan.length.tolist()), v.split(plan.length.tolist()), strict=True
    ):
        weight = torch.softmax(scale * torch.einsum("hd,nhd->hn", query, keys), -1)
        found.append(torch.einsum("hn,nhd->hd", weight, values).flatten())
    return torch.stack(found)


# Attention


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 2), HEADS, st.integers(1, 8), SIZES, st.integers(0, 99))
@example(1, 1, 1, 4, 0)
@example(1, 2, 17, 8, 0)
def test_prefix_attention(batch: int, heads: int, time: int, size: int, seed: int) -> None:
    plan = packing(batch, time, seed)
    inputs = [
        numbers(plan.rows, 3 * heads * size, seed=seed, size=1.5),
        numbers(3 * heads * size, seed=seed + 1),
    ]
    want = with_gradients(plain_prefix, inputs, plan, heads, 0.6)
    assert worst(with_gradients(kernel_prefix, inputs, plan, heads, 0.6), want) < CLOSE


LONG = [(31, 33, 64), (65, 128), (20, 129)]
"""On both sides of every border, in float64: tiles of 16 to 64, then prefixes of several tiles."""


@pytest.mark.parametrize("lengths", LONG, ids=str)
def test_prefix_attention_of_long_prefixes(lengths: tuple[int, ...]) -> None:
    assert attention.whole(5, torch.float64) == 64
    plan = of_lengths(*lengths)
    inputs = [numbers(plan.rows, 3 * 5, seed=0, size=1.5), numbers(3 * 5, seed=1)]
    want = with_gradients(plain_prefix, inputs, plan, 1, 0.6)
    assert worst(with_gradients(kernel_prefix, inputs, plan, 1, 0.6), want) < CLOSE


CAUSAL = [
    ((1, 2, 5), 0),
    ((1, 2, 5), 1),
    ((1, 2, 5), 3),
    ((17,), 0),
    ((17,), 40),
    ((64,), 3),
    ((70, 130), 0),
    ((70, 130), 100),
]
"""One tile and several; a prefix below, at and beyond the length."""


@pytest.mark.parametrize(("lengths", "prefix_length"), CAUSAL, ids=str)
def test_causal_attention_with_and_without_a_prefix(
    lengths: tuple[int, ...], prefix_length: int
) -> None:
    plan = of_lengths(*lengths)
    inputs = [numbers(plan.rows, 3 * 6, seed=0, size=1.5), numbers(3 * 6, seed=1)]
    want = with_gradients(plain_prefix, inputs, plan, 2, 0.6, prefix_length)
    assert worst(with_gradients(kernel_prefix, inputs, plan, 2, 0.6, prefix_length), want) < CLOSE


EACH = [
    ((5, 5, 5), (0, 1, 2)),
    ((5, 5, 5), (5, 0, 3)),
    ((1, 2, 5), (1, 2, 5)),
    ((1, 2, 5), (9, 9, 9)),
    ((17, 18, 40), (5, 0, 3)),
    ((64, 70, 130), (1, 2, 5)),
]


@pytest.mark.parametrize(("lengths", "prefix_length"), EACH, ids=str)
def test_causal_attention_with_a_prefix_for_each(
    lengths: tuple[int, ...], prefix_length: tuple[int, ...]
) -> None:
    """Numbers below, at and beyond the lengths; the third by itself gives the same."""
    equal = len(set(lengths)) == 1
    plan = whole_sequences(3, 5, torch.device(DEVICE)) if equal else of_lengths(*lengths)
    each = torch.tensor(
        [n * max(1, plan.longest // 9) for n in prefix_length], dtype=torch.int32, device=DEVICE
    )
    inputs = [numbers(plan.rows, 3 * 6, seed=0, size=1.5), numbers(3 * 6, seed=1)]
    want = with_gradients(plain_prefix, inputs, plan, 2, 0.6, each)
    assert worst(with_gradients(kernel_prefix, inputs, plan, 2, 0.6, each), want) < CLOSE
    last = plain_prefix(
        inputs[0][-lengths[2] :], inputs[1], of_lengths(lengths[2]), 2, 0.6, int(each[2])
    )
    assert worst([last], [want[0][-lengths[2] :]]) < CLOSE


def test_causal_attention_is_the_mask_of_each_mode() -> None:
    plan = of_lengths(7)
    qkv = numbers(7, 3 * 4, seed=0)
    q, k, v = qkv.view(7, 3, 4).unbind(1)
    for prefix_length, mode, prefix in (
        (0, "decoder", None),
        (3, "prefix-lm", 3),
        (9, "prefix-lm", 7),
    ):
        seen = visible(mode, 7, prefix=prefix)[0].to(DEVICE)
        want = torch.softmax((q @ k.T).masked_fill(~seen, float("-inf")), -1) @ v
        assert (
            worst([attention.plain_prefix_attention(qkv, plan, 1, 1.0, prefix_length)], [want])
            < CLOSE
        )


def test_prefix_attention_in_the_largest_tile() -> None:
    """In half precision 65 to 128 rows are one tile, with queries in two halves going forward."""
    assert attention.whole(5, HALF) == 128
    plan = of_lengths(65, 128)
    mixed = [numbers(plan.rows, 3 * 5, seed=0).to(HALF), torch.zeros(3 * 5, device=DEVICE)]
    exact = with_gradients(plain_prefix, [t.double() for t in mixed], plan, 1, 0.6)
    got = with_gradients(kernel_prefix, mixed, plan, 1, 0.6)
    assert worst(got, exact) < 2 * torch.finfo(HALF).eps


@pytest.mark.skipif(
    DEVICE == "cpu", reason="the interpreter takes minutes for thousands of programs"
)
@pytest.mark.parametrize("time", [1, 20])
def test_prefix_attention_of_thousands_of_prefixes(time: int) -> None:
    """So many that one program goes through all heads of a prefix."""
    plan = pack(torch.ones(2048 // time + 1, time, dtype=torch.bool), torch.device(DEVICE))
    inputs = [numbers(plan.rows, 3 * 3 * 16, seed=0), numbers(3 * 3 * 16, seed=1)]
    want = with_gradients(plain_prefix, inputs, plan, 3, 0.6)
    assert worst(with_gradients(kernel_prefix, inputs, plan, 3, 0.6), want) < CLOSE


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 2), HEADS, st.integers(1, 8), SIZES, st.integers(0, 99))
@example(1, 1, 1, 4, 0)
@example(1, 1, 17, 5, 0)
def test_running_attention(batch: int, heads: int, time: int, size: int, seed: int) -> None:
    plan = packing(batch, time, seed)
    inputs = [
        numbers(batch * time, 3 * heads * size, seed=seed, size=1.5),
        numbers(3 * heads * size, seed=seed + 1),
    ]
    want = with_gradients(plain_running, inputs, plan, heads, 0.6)
    assert worst(with_gradients(kernel_running, inputs, plan, heads, 0.6), want) < CLOSE


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 2), HEADS, st.integers(1, 10), SIZES, st.booleans(), st.integers(0, 99))
@example(1, 5, 1, 4, True, 0)
@example(1, 2, 35, 3, True, 0)
@example(1, 3, 2, 1, False, 0)
@example(2, 3, 7, 1, True, 0)
def test_last_attention(
    batch: int, heads: int, time: int, size: int, normed: bool, seed: int
) -> None:
    plan, width = packing(batch, time, seed, 0.3), heads * size
    shapes = [(plan.rows, width), (len(plan.length), width), (3 * width, width), (3 * width,)] + [
        (width,)
    ] * (2 * normed)
    inputs = [numbers(*shape, seed=seed + n) for n, shape in enumerate(shapes)]
    rest = (*([] if normed else [None, None]), plan, heads, 0.6)
    want = with_gradients(plain_last_attention, inputs, *rest)
    assert worst(with_gradients(last.LastAttention.apply, inputs, *rest), want) < CLOSE


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("which", ["prefix", "running"])
def test_product_and_attention_together(which: str, normed: bool) -> None:
    """norm_linear leaves the bias's gradient to attention: together it is there once."""
    plan, heads, width = packing(2, 5, 0), 2, 12
    layer, norm = layers(width, 3 * width, 0, normed)
    kernel, plain = {
        "prefix": (attention.prefix_attention, plain_prefix),
        "running": (online_softmax.running_attention, plain_running),
    }[which]
    x = numbers(plan.rows if which == "prefix" else 2 * 5, width, seed=0).requires_grad_()
    leaves = [x, *layer.parameters(), *norm.parameters()]
    got = kernel(*norm_linear(x, layer, norm, add=True), plan, heads, 0.6)
    want = plain(layer(gain_and_shift(x, norm)), torch.zeros_like(layer.bias), plan, heads, 0.6)
    assert worst(results(got, leaves), results(want, leaves)) < CLOSE


# What holds for every kernel


class Case(NamedTuple):
    """A kernel, what defines it, and inputs in float64."""

    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: list[Tensor]
    half: tuple[int, ...]
    """Inputs that are in half precision where the others are fp32."""
    rest: tuple[Any, ...] = ()


ATTENTION = ["prefix_attention", "long prefix_attention", "running_attention", "last_attention"]
KERNELS = [
    "add_norm",
    "first_add_norm",
    "last_add_norm",
    "normed",
    "gelu",
    "gelu recompute",
    "relu",
    "linear",
    "cross_entropy",
    *ATTENTION,
]


def kernel_mlp(recompute: bool) -> Callable[..., Tensor]:
    return functools.partial(mlp.activated_linear, recompute=recompute)


def case(name: str) -> Case:
    """Small inputs for each of KERNELS."""
    plan, long = packing(2, 5, 3), of_lengths(129, 140)
    vectors, bias = numbers(plan.rows, 12, seed=0), numbers(36, seed=1)
    ends = numbers(len(plan.length), 12, seed=2)
    w, y = numbers(36, 12, seed=3, size=0.3), numbers(plan.rows, 12, seed=4)
    qkv, tokens = numbers(plan.rows, 36, seed=5), numbers(10, 36, seed=6)
    layer, three = NORMS[0], [vectors, y, bias[:12]]
    return {
        "add_norm": lambda: Case(kernel_add_norm, rows.plain_add_norm, three, (1,), (layer,)),
        "first_add_norm": lambda: Case(
            kernel_first,
            plain_first,
            [tokens.view(2, 5, 36), numbers(plan.rows, 36, seed=7), bias],
            (1,),
            (layer, plan),
        ),
        "last_add_norm": lambda: Case(kernel_last, plain_last, three, (1,), (layer, plan)),
        "normed": lambda: Case(
            lambda h: rows.normed(h, layer, h.dtype),
            lambda h: torch.nn.functional.layer_norm(h, h.shape[1:]),
            [vectors],
            (),
        ),
        "gelu": lambda: Case(
            kernel_mlp(recompute=False), mlp.plain_activated_linear, [qkv, bias, w.T], (0,), (True,)
        ),
        "gelu recompute": lambda: Case(
            kernel_mlp(recompute=True), mlp.plain_activated_linear, [qkv, bias, w.T], (0,), (True,)
        ),
        "relu": lambda: Case(
            kernel_mlp(recompute=True), mlp.plain_activated_linear, [qkv, bias, w.T], (0,), (False,)
        ),
        "linear": lambda: Case(linear, torch.nn.functional.linear, [vectors, w], (0,)),
        "cross_entropy": lambda: Case(
            loss.cross_entropy,
            loss.plain_cross_entropy,
            [qkv],
            (0,),
            (targets_below(plan.rows, 36, 8),),
        ),
        "prefix_attention": lambda: Case(
            kernel_prefix, plain_prefix, [qkv, bias], (0,), (plan, 2, 0.6)
        ),
        "long prefix_attention": lambda: Case(
            kernel_prefix,
            plain_prefix,
            [numbers(long.rows, 12, seed=9), bias[:12]],
            (0,),
            (long, 1, 0.6),
        ),
        "running_attention": lambda: Case(
            kernel_running, plain_running, [tokens, bias], (0,), (plan, 2, 0.6)
        ),
        "last_attention": lambda: Case(
            last.LastAttention.apply,
            plain_last_attention,
            [vectors, ends, w, bias, bias[:12] + 1, bias[12:24]],
            (0, 1),
            (plan, 2, 0.6),
        ),
    }[name]()


@pytest.mark.parametrize("name", KERNELS)
def test_float32_is_as_exact_as_plain_float32(name: str) -> None:
    kernel, plain, inputs, _, rest = case(name)
    single = [t.float() for t in inputs]
    exact = with_gradients(plain, [t.double() for t in single], *rest)
    errors = [worst(with_gradients(function, single, *rest), exact) for function in (plain, kernel)]
    assert errors[1] < 2 * errors[0] + 1e-6


@pytest.mark.parametrize("name", KERNELS)
def test_half_precision_rounds_a_few_times_only(name: str) -> None:
    """Attention weights and results are rounded to half precision, sums are not."""
    kernel, plain, inputs, half, rest = case(name)
    mixed = [t.to(HALF if n in half else torch.float32) for n, t in enumerate(inputs)]
    if kernel in (kernel_prefix, kernel_running):
        mixed[1].zero_()  # the bias is part of qkv: rounding their sum is not the kernel's
    exact = with_gradients(plain, [t.double() for t in mixed], *rest)
    assert worst(with_gradients(kernel, mixed, *rest), exact) < 2 * torch.finfo(HALF).eps


@pytest.mark.filterwarnings("ignore:.*CUBLAS_WORKSPACE_CONFIG")
@pytest.mark.parametrize("name", [*KERNELS, "fold", "fold_backward", "column_sums"])
def test_everything_is_written_and_the_same_bits_twice(name: str) -> None:
    """Nothing is read that was not written, and no sum depends on which program comes first."""
    w, bias, gain, shift = (
        numbers(40, 13, seed=0),
        numbers(40, seed=1),
        numbers(13, seed=2),
        numbers(13, seed=3),
    )
    others: dict[str, Callable[[], Any]] = {
        "fold": lambda: rows.fold(w, bias, gain, shift, torch.float64),
        "fold_backward": lambda: rows.fold_backward(w, bias, w, gain, shift),
        "column_sums": lambda: (rows.column_sums(w, torch.float64),),
    }
    with memory_full_of_nan():
        if name in others:
            first, second = others[name](), others[name]()
        else:
            kernel, _, inputs, _, rest = case(name)
            first, second = (with_gradients(kernel, inputs, *rest) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert bool(torch.isfinite(a).all())
        assert torch.equal(a, b)


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_extreme_scores_stay_finite_and_exact(name: str, growing: bool) -> None:
    """Scores in the hundreds, also with each key's far above those before it."""
    kernel, plain, inputs, _, rest = case(name)
    ramp = torch.linspace(1, 30, len(inputs[0]), device=DEVICE, dtype=torch.float64)[:, None]
    first = inputs[0].abs() * ramp if growing else inputs[0] * 15
    want = with_gradients(plain, [first, *inputs[1:]], *rest)
    got = with_gradients(kernel, [first, *inputs[1:]], *rest)
    assert all(bool(torch.isfinite(t).all()) for t in got)
    assert worst(got, want) < CLOSE


# The engine


MASK = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
ONE_EACH = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool)
IDS = torch.tensor([[0, 1, 0, 1, 2], [5, 5, 4, 9, 0], [3, 2, 8, 7, 6]])
LENGTHS = [5, 3, 1]
QUESTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one layer": ({"layers": 1}, {"lengths": LENGTHS}),
    "lengths": ({"layers": 3, "norm": "none", "activation": "relu"}, {"lengths": LENGTHS}),
    "lengths and budget": (
        {"layers": 2, "heads": 1, "input_dim": 3},
        {"lengths": LENGTHS, "token_budget": 12},
    ),
    "mask": ({"layers": 4, "attention_scale": "one"}, {"at": MASK}),
    "one prefix each": ({"layers": 3}, {"at": ONE_EACH}),
    "one prefix each, vectors": ({"layers": 2, "input_dim": 3, "norm": "none"}, {"at": ONE_EACH}),
    "positions": ({"layers": 3, "position_embedding": "none", "outputs": 2}, {"at": [4, 0]}),
    "rotary": ({"layers": 3, "position_embedding": "rotary"}, {"lengths": LENGTHS}),
    "rotary, one prefix each": ({"layers": 2, "position_embedding": "rotary"}, {"at": ONE_EACH}),
    "rotary and budget": (
        {"layers": 2, "position_embedding": "rotary", "bias": False},
        {"at": MASK, "token_budget": 7},
    ),
    "rms, silu, no biases": (
        {"layers": 3, "norm": "rms", "activation": "silu", "bias": False, "tied_head": False},
        {"lengths": LENGTHS},
    ),
    "loops": ({"layers": 2, "loops": 2, "position_embedding": "sinusoidal"}, {"at": MASK}),
    "one layer, two loops": (
        {"layers": 1, "loops": 2, "position_embedding": "rotary"},
        {"at": MASK},
    ),
    "causal layer": ({"layers": 3, "causal_layers": 1}, {"lengths": LENGTHS}),
    "causal layers, rotary": (
        {"layers": 4, "causal_layers": 2, "position_embedding": "rotary"},
        {"position_ids": IDS, "at": MASK},
    ),
    "causal layers and budget": (
        {"layers": 3, "causal_layers": 1, "input_dim": 3},
        {"at": MASK, "token_budget": 7},
    ),
    "all but one causal": ({"layers": 3, "causal_layers": 2}, {"at": MASK}),
    "position ids": ({"layers": 3}, {"position_ids": IDS, "lengths": LENGTHS}),
    "position ids, rotary": (
        {"layers": 3, "position_embedding": "rotary"},
        {"position_ids": IDS, "at": MASK},
    ),
}
"""Models and what they are asked for."""


@pytest.mark.parametrize(("config", "question"), QUESTIONS.values(), ids=QUESTIONS.keys())
def test_the_whole_engine_equals_the_reference(
    config: dict[str, Any], question: dict[str, Any]
) -> None:
    """Outputs and every parameter's gradient, also where chunks are computed twice."""
    model = random_model(**config).to(DEVICE)
    x = random_inputs(model, 3, 5).to(DEVICE)
    options = dict(question)
    if "lengths" in question:
        options["lengths"] = torch.tensor(question["lengths"], device=DEVICE)

    def run(impl: str) -> dict[str, Tensor]:
        out = entp.all_prefixes(model, x, impl=impl, **options)
        names, leaves = zip(*model.named_parameters(), strict=True)
        return dict(zip(["output", *names], results(out, list(leaves)), strict=True))

    want, got = run("reference"), run("triton")
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= CLOSE * value.abs().max(), name


DECODERS: list[tuple[dict[str, Any], str, Any]] = [
    ({"layers": 1}, "decoder", None),
    ({"layers": 1}, "prefix-lm", 20),
    ({"layers": 3}, "decoder", None),
    ({"layers": 3}, "prefix-lm", 3),
    ({"layers": 3}, "prefix-lm", [4, 2]),
    ({"norm": "none", "activation": "relu"}, "decoder", None),
    ({"input_dim": 3}, "prefix-lm", [4, 2]),
    ({"position_embedding": "none", "attention_scale": "one"}, "prefix-lm", 20),
    ({"position_embedding": "rotary", "norm": "rms", "bias": False}, "decoder", None),
    ({"position_embedding": "rotary", "activation": "silu"}, "prefix-lm", [4, 2]),
    ({"loops": 2, "tied_head": False}, "prefix-lm", 3),
    ({"layers": 3, "causal_layers": 1}, "decoder", None),
    (
        {"layers": 3, "causal_layers": 2, "position_embedding": "rotary"},
        "prefix-lm",
        [4, 2],
    ),
]


@pytest.mark.parametrize(("config", "mode", "prefix"), DECODERS, ids=str)
def test_a_decoder_by_the_kernels(config: dict[str, Any], mode: str, prefix: Any) -> None:
    """Outputs and every parameter's gradient; the mode is an argument of the same weights."""
    model = random_model(**config).to(DEVICE)
    prefix = torch.tensor(prefix, device=DEVICE) if isinstance(prefix, list) else prefix
    x = random_inputs(model, 2, 5).to(DEVICE)

    def run(impl: str) -> dict[str, Tensor]:
        out = model(x, mode, prefix=prefix, impl=impl)
        names, leaves = zip(*model.named_parameters(), strict=True)
        return dict(zip(["output", *names], results(out, list(leaves)), strict=True))

    want, got = run("reference"), run("triton")
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= CLOSE * value.abs().max(), name
    if DEVICE == "cuda":
        assert all(torch.equal(value, got[name]) for name, value in run("auto").items()), (
            "auto takes the kernels"
        )


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("prefix-lm", {"prefix": torch.tensor(2)}),
        ("prefix-lm", {}),
        ("prefix-lm", {"prefix": 0}),
        ("prefix-lm", {"prefix": [3, 1], "lengths": [2, 4]}),
        ("decoder", {"lengths": [2, 4]}),
    ],
)
def test_kernels_decline_padding_and_odd_prefixes_in_other_modes(
    mode: str, options: dict[str, Any]
) -> None:
    model = random_model().to(DEVICE)
    x = random_inputs(model, 2, 4).to(DEVICE)
    options = {
        k: torch.tensor(v, device=DEVICE) if isinstance(v, list) else v for k, v in options.items()
    }
    with pytest.raises(InputError, match=f"impl 'triton' in mode {mode} takes no padding"):
        model(x, mode, impl="triton", **options)


def test_activations_are_recomputed_where_memory_counts_unless_the_caller_has_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same gradients whether activations are kept or recomputed; a token budget keeps them."""
    model = random_model(layers=3).to(DEVICE)
    x = random_inputs(model, 1, 4).to(DEVICE)

    def kept_and_gradients(budget: int | None) -> tuple[int, list[Tensor]]:
        kept: dict[int, Tensor] = {}

        def keep(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t  # held, so that its address is not used again
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = entp.all_prefixes(model, x, impl="triton", token_budget=budget)
        return sum(t.numel() for t in kept.values()), results(out, list(model.parameters()))

    usual, want = kept_and_gradients(None)
    monkeypatch.setattr(budget_module, "BUSY", 0)
    recomputed, gradients = kept_and_gradients(None)
    with_budget, same = kept_and_gradients(1000)
    assert recomputed < usual == with_budget
    rows, hidden = 10, 4 * model.config.width
    assert usual - recomputed == 2 * rows * hidden  # GELU's output in layers 1 and 2
    assert worst(gradients, want) < CLOSE
    assert worst(same, want) < CLOSE


def test_no_targets_give_no_rows() -> None:
    model = random_model(layers=3).to(DEVICE)
    x = random_inputs(model, 2, 5).to(DEVICE)
    out = entp.all_prefixes(model, x, at=torch.zeros(2, 5, dtype=torch.bool), impl="triton")
    assert out.shape == (0, 11)
