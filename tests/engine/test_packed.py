"""The packed engine against the reference: outputs, gradients, budgets, extreme scores, bf16."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import random_inputs, random_model
from torch import Tensor

from entp import InputError, Transformer, all_prefixes
from entp.engine import choose, packed, reference
from entp.engine.layout import BLOCK, pack, split
from entp.engine.online_softmax import running_attention

CLOSE = 1e-9
"""Largest difference allowed in float64, relative to the largest number of the tensor compared."""

Results = dict[str, Tensor]


def results(model: Transformer, x: Tensor, **options: Any) -> Results:
    """Outputs, and all gradients of a loss that weighs each output differently."""
    model.zero_grad()
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    out = all_prefixes(model, x, **options)
    weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64, device=out.device))
    (weight.reshape(out.shape) * out).sum().backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    if x.is_floating_point():
        grads["x"] = torch.zeros_like(x) if x.grad is None else x.grad
    return {"output": out.detach(), **grads}


def assert_same(got: Results, expected: Results, close: float = CLOSE) -> None:
    """Each tensor to `close` of its largest number, or to rounding of the largest gradient."""
    assert got.keys() == expected.keys()
    rounding = 1e-13 * max(g.abs().max().item() for name, g in expected.items() if name != "output")
    for name, e in expected.items():
        assert got[name].shape == e.shape, name
        assert got[name].isfinite().all(), name
        if e.numel():
            difference = (got[name] - e).abs().max().item()
            assert difference <= max(close * e.abs().max().item(), rounding), (
                f"{name}: {difference:g}"
            )


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    config: dict[str, Any] = {
        "layers": draw(st.integers(1, 4)),
        "heads": draw(st.sampled_from([1, 2, 4])),
        "norm": draw(st.sampled_from(["layer", "rms", "none"])),
        "norm_placement": draw(st.sampled_from(["pre", "pre", "post"])),
        "activation": draw(st.sampled_from(["gelu", "gelu-exact", "relu", "silu", "swiglu"])),
        "position_embedding": draw(
            st.sampled_from(["learned", "sinusoidal", "rotary", "relative", "none", "given"])
        ),
        "attention_scale": draw(st.sampled_from(["sqrt", "one"])),
        "bias": draw(st.booleans()),
        "tied_head": draw(st.booleans()),
        "loops": draw(st.sampled_from([1, 1, 2])),
    }
    if config["loops"] == 1:
        config["causal_layers"] = draw(st.integers(0, config["layers"] - 1))
    config["kv_heads"] = draw(
        st.sampled_from([None, *(n for n in (1, 2, 4) if config["heads"] % n == 0)])
    )
    if draw(st.booleans()):
        config["input_dim"] = 3
    elif draw(st.booleans()):
        config["outputs"] = 2
    return config


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a batch, its lengths, and the target positions."""
    batch = draw(st.integers(1, 3))
    time = draw(st.sampled_from([1, 2, 3, 5, 9, 15, 16, 17, 33]))
    lengths = None
    if draw(st.booleans()):
        lengths = torch.tensor(draw(st.lists(st.integers(1, time), min_size=batch, max_size=batch)))
    kind = draw(st.sampled_from(["all", "list", "empty mask", "sparse mask", "mask"]))
    at: Any = None
    if kind == "list":
        at = draw(st.lists(st.integers(0, time - 1), min_size=1, max_size=6))
    elif kind != "all":
        probability = {"empty mask": 0.0, "sparse mask": 0.1, "mask": 0.6}[kind]
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        at = torch.rand(batch, time, generator=generator) < probability
    ids = None
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        ids = torch.randint(40, (batch, time), generator=generator)
    return {"batch": batch, "time": time, "lengths": lengths, "at": at, "position_ids": ids}


@given(configs(), questions(), st.integers(0, 1000))
@settings(max_examples=70)
def test_packed_is_the_reference(
    config: dict[str, Any], question: dict[str, Any], seed: int
) -> None:
    model = random_model(seed, **config)
    x = random_inputs(model, question["batch"], question["time"], seed)
    options = {name: question[name] for name in ("at", "lengths", "position_ids")}
    assert_same(
        results(model, x, impl="packed", **options), results(model, x, impl="reference", **options)
    )


@pytest.mark.parametrize(
    ("layers", "time"),
    [
        (1, BLOCK + 1),
        (2, BLOCK - 1),
        (2, BLOCK),
        (2, BLOCK + 1),
        (3, 2 * BLOCK + 1),
        (4, 2 * BLOCK),
        (3, 40),
    ],
)
def test_across_the_blocks_of_layer_one(layers: int, time: int) -> None:
    model = random_model(layers=layers)
    x = random_inputs(model, 2, time)
    assert_same(results(model, x, impl="packed"), results(model, x, impl="reference"))


@pytest.mark.parametrize("at", [[38], [16], [15, 33, 33, 2], [39, 0]])
def test_few_positions_far_apart(at: list[int]) -> None:
    """Whole blocks without a target still have to carry the state on."""
    model = random_model(layers=3, input_dim=3)
    x = random_inputs(model, 2, 40)
    assert_same(results(model, x, impl="packed", at=at), results(model, x, impl="reference", at=at))


def test_no_targets_give_no_rows_and_no_gradient() -> None:
    model = random_model(layers=3)
    x = random_inputs(model, 2, 9)
    nothing = results(model, x, impl="packed", at=torch.zeros(2, 9, dtype=torch.bool))
    assert nothing.pop("output").shape == (0, 11)
    assert all((g == 0).all() for g in nothing.values())


# Budgets


@settings(max_examples=15)
@given(
    st.integers(1, 400), questions(), st.sampled_from(["packed", "reference"]), st.integers(2, 3)
)
def test_budgets_change_nothing(
    budget: int, question: dict[str, Any], impl: str, layers: int
) -> None:
    model = random_model(layers=layers, input_dim=3)
    x = random_inputs(model, question["batch"], question["time"])
    options = {"at": question["at"], "lengths": question["lengths"], "impl": impl}
    assert_same(results(model, x, token_budget=budget, **options), results(model, x, **options))


@pytest.mark.parametrize("budget", [1, 2, 17, 100])
def test_budgets_without_gradients(budget: int) -> None:
    model = random_model(layers=3)
    x = random_inputs(model, 2, 18)
    with torch.no_grad():
        torch.testing.assert_close(
            all_prefixes(model, x, token_budget=budget),
            all_prefixes(model, x),
            rtol=1e-10,
            atol=1e-12,
        )


def rows_of(mask: Tensor) -> list[int]:
    return (mask * torch.arange(1, mask.shape[1] + 1)).sum(1).tolist()


@settings(max_examples=100)
@given(
    st.integers(1, 9), st.integers(1, 20), st.floats(0, 1), st.integers(0, 99), st.integers(1, 600)
)
def test_split(batch: int, time: int, probability: float, seed: int, budget: int) -> None:
    """Disjoint, complete, within the budget; sequences that fit are whole, in few even chunks."""
    target_mask = (
        torch.rand(batch, time, generator=torch.Generator().manual_seed(seed)) < probability
    )
    chunks, rows = list(split(target_mask, budget)), rows_of(target_mask)
    together = torch.stack([torch.zeros_like(target_mask), *chunks]).sum(0)
    assert torch.equal(together, target_mask.long())
    assert all(0 < sum(rows_of(chunk)) <= budget or int(chunk.sum()) == 1 for chunk in chunks)
    whole = [
        sum(r)
        for r in map(rows_of, chunks)
        if sum(r) <= budget and all(a in (0, b) for a, b in zip(r, rows, strict=True))
    ]
    fitting = [n for n in rows if 0 < n <= budget]
    assert sum(whole) == sum(fitting)
    least = -(-sum(fitting) // budget)
    if least:  # two neighbours have more than an even part together, or k pairs had it all
        assert least <= len(whole) <= 2 * least - 1
        assert max(whole) < sum(fitting) / least + max(fitting)
    for b, n in enumerate(rows):
        if n > budget:  # cut between lengths: shortest first, as many as go in
            lengths = [(c[b].nonzero()[:, 0] + 1).tolist() for c in chunks if c[b].any()]
            joined = [m for chunk in lengths for m in chunk]
            assert joined == (target_mask[b].nonzero()[:, 0] + 1).tolist()
            assert all(sum(now) + later[0] > budget for now, later in itertools.pairwise(lengths))


def test_split_by_example() -> None:
    target_mask = torch.ones(4, 4, dtype=torch.bool)  # 4 sequences of 1 + 2 + 3 + 4 = 10 rows
    all_rows, even, cut = (
        [rows_of(chunk) for chunk in split(target_mask, budget)] for budget in (40, 39, 9)
    )
    assert all_rows == [[10, 10, 10, 10]]
    assert even == [[10, 10, 0, 0], [0, 0, 10, 10]]  # not three sequences and one
    assert cut[:3] == [[6, 0, 0, 0], [4, 0, 0, 0], [0, 6, 0, 0]]  # 1 + 2 + 3, then 4


# Extreme scores


def with_extreme_scores(pattern: str, size: float, layers: int = 3) -> tuple[Transformer, Tensor]:
    """A model whose first layer's scores are of about `size`, random or with a slope over keys."""
    model = random_model(
        layers=layers,
        input_dim=3,
        outputs=2,
        position_embedding="given",
        norm="none",
        attention_scale="one",
    )
    x = random_inputs(model, 2, 36)
    ramp = torch.linspace(0, 1, 36, dtype=torch.float64)
    if pattern == "shrinking":
        ramp = ramp.flip(0)
    with torch.no_grad():
        first = model.blocks[0].qkv
        if pattern == "any":
            largest = largest_score(model, x)
            first.weight[:16] *= math.sqrt(size / largest)
            first.bias[:16] *= math.sqrt(size / largest)
        else:
            model.read_in.weight.zero_()  # type: ignore[union-attr]
            model.read_in.weight[1:].normal_(std=0.3)  # type: ignore[union-attr]
            model.read_in.bias.zero_()  # type: ignore[union-attr]
            table = torch.zeros(40, 8, dtype=torch.float64)
            table[:36, 0] = ramp
            model.set_positions(table)
            first.weight[8:16] = 0  # keys: the ramp alone, in both heads
            first.weight[8, 0] = first.weight[12, 0] = 1
            first.bias[8:16] = 0
            first.bias[0], first.bias[4] = size, -size
            first.weight[0], first.weight[4] = 0, 0
    return model, x


def first_scores(model: Transformer, x: Tensor) -> Tensor:
    block = model.blocks[0]
    q, k, _ = block.split_heads(block.qkv(block.norm_1(model.embed(x))))  # type: ignore[operator]
    return block.scale * torch.einsum("bihd,bjhd->bhij", q, k).detach()


def largest_score(model: Transformer, x: Tensor) -> float:
    return first_scores(model, x).abs().max().item()


@pytest.mark.parametrize("pattern", ["any", "growing", "shrinking"])
@pytest.mark.parametrize("size", [300.0, 900.0])
def test_extreme_scores(pattern: str, size: float) -> None:
    model, x = with_extreme_scores(pattern, size)
    scores = first_scores(model, x)
    assert scores.abs().max().item() == pytest.approx(size, rel=1e-6)
    assert scores.max() > size / 3
    assert scores.min() < -size / 3
    assert_same(results(model, x, impl="packed"), results(model, x, impl="reference"))


@pytest.mark.parametrize("pattern", ["any", "growing", "shrinking"])
def test_extreme_scores_stay_finite_in_single_precision(pattern: str) -> None:
    model, x = with_extreme_scores(pattern, 900.0)
    got = results(model.float(), x.float(), impl="packed")
    assert all(tensor.isfinite().all() for tensor in got.values())


# bfloat16


def bf16_errors(seed: int, **config: Any) -> list[float]:
    """Mean absolute errors of packed and the reference under bfloat16 autocast, against float64."""
    model = random_model(seed, **config)
    x = random_inputs(model, 1, 12, seed)
    with torch.no_grad():
        exact = all_prefixes(model, x, impl="reference")
        model.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = [all_prefixes(model, x, impl=impl) for impl in ("packed", "reference")]
    return [(one.double() - exact).abs().mean().item() for one in rounded]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_weights_in_bfloat16_give_outputs_and_gradients_in_bfloat16(layers: int) -> None:
    model = random_model(layers=layers, width=16)
    x = random_inputs(model, 2, 18)
    exact = all_prefixes(model, x, impl="reference")
    rounded = all_prefixes(model.bfloat16(), x, impl="packed")
    rounded.sum().backward()
    assert {rounded.dtype, *(p.grad.dtype for p in model.parameters() if p.grad is not None)} == {
        torch.bfloat16
    }
    assert (rounded - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_is_no_worse_than_the_reference() -> None:
    """The mean log ratio of the errors is not above 0 by more than three standard errors."""
    shapes: list[dict[str, Any]] = [
        {"width": 16},
        {"width": 32, "heads": 4},
        {"width": 16, "attention_scale": "one"},
    ]
    found = []
    for shape in shapes:
        for seed in range(8):
            packed_error, reference_error = bf16_errors(seed, layers=3 + seed % 2, **shape)
            found.append(math.log(packed_error / reference_error))
    ratios = torch.tensor(found)
    mean, error = ratios.mean().item(), ratios.std().item() / math.sqrt(len(ratios))
    assert error < 0.04  # else the test could not tell
    assert mean <= 3 * error, f"packed has {math.exp(mean):.3f} times the reference's error"


# Functions of the engine


@given(st.integers(1, 3), st.integers(1, 36), st.floats(0.05, 1), st.integers(0, 99))
def test_pack_layout(batch: int, time: int, probability: float, seed: int) -> None:
    target_mask = (
        torch.rand(batch, time, generator=torch.Generator().manual_seed(seed)) < probability
    )
    packing = pack(target_mask)
    # By length, then by sequence.
    expected = [(t + 1, b) for t in range(time) for b in range(batch) if target_mask[b, t]]
    assert list(zip(packing.length.tolist(), packing.sequence.tolist(), strict=True)) == expected
    lengths = [m for m, _ in expected]
    assert packing.groups == tuple((m, lengths.count(m)) for m in sorted(set(lengths)))
    assert packing.rows == sum(lengths) == sum(packing.row_counts)
    assert packing.row_token.tolist() == [i for m in lengths for i in range(m)]
    assert packing.row_prefix.tolist() == [p for p, m in enumerate(lengths) for _ in range(m)]
    assert packing.last_row.tolist() == [sum(lengths[: p + 1]) - 1 for p in range(len(lengths))]
    assert packing.bounds.tolist() == [sum(lengths[:p]) for p in range(len(lengths) + 1)]
    assert packing.bounds.dtype == torch.int32


def test_batches_of_other_shapes_do_not_share_a_layout() -> None:
    """All of 16 tokens are targets each time: only the shape tells these masks apart."""
    model = random_model(layers=3)
    for batch, time in ((2, 8), (4, 4), (1, 16)):
        x = random_inputs(model, batch, time)
        torch.testing.assert_close(
            all_prefixes(model, x), all_prefixes(model, x, impl="reference"), rtol=1e-10, atol=1e-12
        )


@given(
    st.integers(1, 3),
    st.integers(1, 36),
    st.floats(0.05, 1),
    st.integers(0, 99),
    st.sampled_from([0.3, 1.0, 30.0]),
)
def test_running_attention_row_by_row(
    batch: int, time: int, probability: float, seed: int, scale: float
) -> None:
    torch.manual_seed(seed)
    target_mask = torch.rand(batch, time) < probability
    target_mask[0, -1] = True
    q, k, v = torch.randn(3, batch, 2, time, 4, dtype=torch.float64)
    packing = pack(target_mask)
    got = running_attention(q, k, v, packing, scale)
    rows = [
        (torch.softmax(scale * q[b, :, i, None] @ k[b, :, :m].mT, -1) @ v[b, :, :m]).flatten()
        for b, m in zip(packing.sequence.tolist(), packing.length.tolist(), strict=True)
        for i in range(m)
    ]
    torch.testing.assert_close(got, torch.stack(rows), rtol=1e-9, atol=1e-11)


def test_running_attention_has_the_right_gradient() -> None:
    torch.manual_seed(0)
    target_mask = torch.rand(2, 19) < 0.2
    target_mask[1, -1] = True
    q, k, v = (torch.randn(2, 1, 19, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(
        lambda *qkv: running_attention(*qkv, pack(target_mask), 0.7), (q, k, v), fast_mode=True
    )


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_last_layer_is_the_block_at_the_end_of_each_prefix(heads: int) -> None:
    block = random_model(heads=heads).blocks[0]
    target_mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    packing = pack(target_mask)
    rows = torch.randn(packing.rows, 8, dtype=torch.float64)
    model = random_model(heads=heads)
    prefixes = rows.split(packing.length.tolist())
    expected = torch.stack(
        [block(prefix[None], torch.arange(len(prefix)))[0, -1] for prefix in prefixes]
    )
    for absorbed in (True, False):
        got = packed.last_layer(
            block, rows, packing, packed.make_positions(model, packing, None), absorbed
        )  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_first_layer_is_the_block_on_each_prefix() -> None:
    model = random_model()
    block = model.blocks[0]
    target_mask = torch.rand(2, 19, generator=torch.Generator().manual_seed(1)) < 0.5
    packing, h = pack(target_mask), torch.randn(2, 19, 8, dtype=torch.float64)
    got = packed.first_layer(block, h, packing, packed.make_positions(model, packing, None))  # type: ignore[arg-type]
    ends = zip(packing.sequence.tolist(), packing.length.tolist(), strict=True)
    expected = torch.cat([block(h[b : b + 1, :m], torch.arange(m))[0] for b, m in ends])
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_prefixes_come_back_sequence_by_sequence() -> None:
    model = random_model(layers=3)
    x = random_inputs(model, 3, 7)
    target_mask = torch.rand(3, 7, generator=torch.Generator().manual_seed(2)) < 0.5
    expected = torch.stack(
        [model.encode(x[b : b + 1, : t + 1])[0, -1] for b, t in target_mask.nonzero()]
    )
    for engine in (packed, reference):
        torch.testing.assert_close(
            engine.prefix_hidden(model, x, target_mask), expected, rtol=1e-11, atol=1e-12
        )


# Choosing


def test_choose_tells_the_implementation_and_the_reason() -> None:
    assert choose().impl == "packed"
    assert choose().reason
    for name in ("packed", "reference"):
        assert choose(name) == (name, "asked for by name")


def test_unknown_implementation() -> None:
    model = random_model()
    with pytest.raises(
        InputError,
        match=r"unknown impl 'pakced': allowed are auto, reference, packed.*Did you mean packed",
    ):
        model(random_inputs(model, 1, 3), impl="pakced")
    with pytest.raises(InputError, match="unknown impl"):
        choose("fast")


@pytest.mark.parametrize(
    "at", [None, [5], torch.arange(12).view(2, 6) % 3 == 0], ids=["all", "a list", "a mask"]
)
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_gradients_after_a_look_in_inference_mode(mode: str, at: Any) -> None:
    model = random_model(layers=3, vocab=5)
    x = torch.randint(0, 5, (2, 6))
    with torch.inference_mode():
        model(x, mode, at=at)
    model(x, mode, at=at).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_second_derivatives_are_refused_not_wrong() -> None:
    model = random_model(layers=2, vocab=5)
    out = all_prefixes(model, torch.randint(0, 5, (2, 6)), impl="packed")
    weight = model.blocks[0].qkv.weight
    (gradient,) = torch.autograd.grad(out.logsumexp(-1).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (gradient**2).sum().backward()
