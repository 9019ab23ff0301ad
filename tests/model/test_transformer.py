"""The Transformer: sizes, initialisation, options, and what outputs depend on in each mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import random_inputs, random_model
from torch import Tensor

from entp import SIZES, InputError, ModelConfig, Transformer
from entp.engine.api import masked_hidden

MODES = ["entp", "decoder", "prefix-lm"]
every_mode = pytest.mark.parametrize("mode", MODES)
IMPLS = [("entp", "packed"), ("entp", "reference"), ("decoder", "auto"), ("prefix-lm", "auto")]
every_impl = pytest.mark.parametrize(("mode", "impl"), IMPLS)
VECTORS = {"input_dim": 3, "outputs": 2, "layers": 3}


def run(model: Transformer, x: Tensor, mode: str, prefix: Any = 3, **options: Any) -> Tensor:
    """model(x, mode), with a prefix of 3 in mode prefix-lm unless told."""
    return model(x, mode, prefix=prefix if mode == "prefix-lm" else None, **options)


@every_mode
@pytest.mark.parametrize(("batch", "time"), [(1, 1), (2, 7), (3, 40)])
def test_shapes(mode: str, batch: int, time: int) -> None:
    tokens, vectors = random_model(), random_model(**VECTORS)
    assert run(tokens, random_inputs(tokens, batch, time), mode).shape == (batch, time, 11)
    assert run(vectors, random_inputs(vectors, batch, time), mode).shape == (batch, time, 2)


@every_mode
def test_tokens_with_real_outputs(mode: str) -> None:
    model = random_model(outputs=5)
    assert run(model, random_inputs(model, 2, 4), mode).shape == (2, 4, 5)


def test_the_default_mode_is_entp() -> None:
    model = random_model()
    x = random_inputs(model, 2, 6)
    assert torch.equal(model(x), model(x, "entp"))
    assert not torch.allclose(model(x), model(x, "decoder"))


def test_one_layer_makes_entp_and_decoder_the_same_function() -> None:
    model = random_model(layers=1)
    x = random_inputs(model, 2, 9)
    torch.testing.assert_close(model(x, "entp"), model(x, "decoder"), rtol=1e-12, atol=1e-13)


def test_all_modes_agree_on_the_last_position_with_the_whole_prefix() -> None:
    model = random_model(layers=3)
    x = random_inputs(model, 2, 9)
    torch.testing.assert_close(
        model(x, "entp")[:, -1], model(x, "prefix-lm", prefix=9)[:, -1], rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(
        model(x, "decoder"), model(x, "prefix-lm", prefix=1), rtol=1e-12, atol=1e-13
    )


# Sizes and initialisation


@pytest.mark.parametrize(
    ("size", "millions"),
    [("small", 1.36), ("medium", 10.70), ("large", 85.15), ("small-deep", 1.60)],
)
def test_parameter_counts_of_the_papers_sizes(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig(vocab=64, context_length=64, **SIZES[size]))
    width, layers = SIZES[size]["width"], SIZES[size]["layers"]
    attention = (width + 1) * 3 * width + (width + 1) * width
    mlp = (width + 1) * 4 * width + (4 * width + 1) * width
    norms = 2 * 2 * width
    last_norm, tokens, positions = 2 * width, 64 * width, 64 * width
    expected = layers * (attention + mlp + norms) + last_norm + tokens + positions
    assert sum(p.numel() for p in model.parameters()) == expected
    assert round(expected / 1e6, 2) == millions


def test_gpt2_initialisation() -> None:
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab=500, context_length=300, layers=8, heads=2, width=64, outputs=50)
    )
    for name, p in model.named_parameters():
        if p.ndim == 2:
            residual = name.endswith(("proj.weight", "out.weight"))
            std = 0.02 / math.sqrt(16) if residual else 0.02
            # Five standard errors of a sample's standard deviation.
            within = 5 / math.sqrt(2 * p.numel())
            assert p.std().item() == pytest.approx(std, rel=within), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
        else:
            assert torch.equal(
                p, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)
            ), name
    assert (
        sum(name.endswith(("proj.weight", "out.weight")) for name, _ in model.named_parameters())
        == 16
    )


def test_the_head_is_tied_to_the_embedding() -> None:
    model = random_model()
    assert model.head is None
    assert model.tokens is not None
    h = torch.randn(5, 8, dtype=torch.float64)
    expected = (
        torch.nn.functional.layer_norm(h, (8,), model.norm.weight, model.norm.bias)
        @ model.tokens.weight.T
    )  # type: ignore[arg-type]
    torch.testing.assert_close(model.readout(h), expected, rtol=1e-12, atol=1e-13)
    model(torch.tensor([[1, 2]]), "decoder").sum().backward()
    assert (model.tokens.weight.grad[5] != 0).any()  # type: ignore[index]  # token 5 is in no input: through the head


# Options


@every_mode
@pytest.mark.parametrize(
    "option",
    [
        {"norm": "none"},
        {"activation": "relu"},
        {"position_embedding": "none"},
        {"attention_scale": "one"},
    ],
)
def test_each_option_changes_the_output(mode: str, option: dict[str, str]) -> None:
    plain, other = random_model(**VECTORS), random_model(**VECTORS, **option)
    same = {k: v for k, v in plain.state_dict().items() if k in other.state_dict()}
    other.load_state_dict(same)
    x = random_inputs(plain, 2, 7)
    one, two = run(plain, x, mode), run(other, x, mode)
    assert two.isfinite().all()
    assert (one - two).abs().max() > 1e-3


def test_options_do_what_they_say() -> None:
    names = dict(random_model(norm="none").named_parameters())
    assert not any("norm" in name for name in names)
    assert "positions" not in dict(random_model(position_embedding="none").named_parameters())
    assert random_model(attention_scale="one").blocks[0].scale == 1.0
    assert random_model(width=12, heads=3).blocks[0].scale == 0.5
    assert isinstance(random_model(activation="relu").blocks[0].activation, torch.nn.ReLU)


def test_position_free_models_read_any_length_and_ignore_order() -> None:
    model = random_model(position_embedding="none", context_length=2)
    x = random_inputs(model, 1, 9)
    shuffled = x[:, [4, 2, 0, 7, 1, 3, 6, 5, 8]]
    torch.testing.assert_close(model(x, at=[8]), model(shuffled, at=[8]), rtol=1e-11, atol=1e-12)
    assert not torch.allclose(model(x, at=[3]), model(shuffled, at=[3]))


@every_mode
def test_given_positions_count_are_saved_and_are_not_trained(mode: str) -> None:
    model, table = random_model(position_embedding="given"), torch.randn(40, 8, dtype=torch.float64)
    x = random_inputs(model, 2, 6)
    before = run(model, x, mode)
    model.set_positions(table)
    after = run(model, x, mode)
    assert (before - after).abs().max() > 1e-3
    assert "positions" not in dict(model.named_parameters())
    after.sum().backward()
    assert not model.positions.requires_grad
    fresh = random_model(seed=1, position_embedding="given")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.positions, table)
    assert torch.equal(run(fresh, x, mode), after)


def test_set_positions_on_learned_and_position_free_models() -> None:
    model, table = random_model(), torch.randn(40, 8, dtype=torch.float64)
    model.set_positions(table)
    assert torch.equal(model.positions, table)
    assert model.positions.requires_grad
    with pytest.raises(InputError, match="position_embedding='none'"):
        random_model(position_embedding="none").set_positions(table)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (39, 8), (40, 7)])
def test_set_positions_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="position vectors have shape"):
        random_model(position_embedding="given").set_positions(torch.zeros(shape))


@pytest.mark.parametrize(
    "position", ["learned", "sinusoidal", "given", "rotary", "none", "relative"]
)
def test_embed_at_given_positions(position: str) -> None:
    model = random_model(position_embedding=position)
    x = random_inputs(model, 2, 9)
    assert torch.equal(model.embed(x)[:, 4:], model.embed(x[:, 4:], torch.arange(4, 9)))
    ids = torch.tensor([[2, 3, 4], [5, 6, 7]])
    each = model.embed(x[:, :3], ids)
    assert torch.equal(each[0], model.embed(x[:1, :3], ids[0])[0])
    assert torch.equal(each[1], model.embed(x[1:, :3], ids[1])[0])
    moves = position in ("learned", "sinusoidal", "given")
    assert torch.equal(each, model.embed(x[:, :3])) != moves


# Padding


LENGTHS = torch.tensor([5, 2, 8, 1])


def outputs_and_gradients(
    model: Transformer, x: Tensor, mode: str, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and all gradients of a loss that weighs each output, padding too, differently."""
    model.zero_grad()
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    out = run(model, x, mode, **options)
    weight = torch.linspace(0.5, 2, out.numel(), dtype=torch.float64).reshape(out.shape)
    (weight * out**2).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if x.grad is not None:
        grads["x"] = x.grad
    return out.detach(), grads


@every_impl
@pytest.mark.parametrize("kind", ["tokens", "vectors"])
@pytest.mark.parametrize("prefix", [3, torch.tensor([3, 2, 8, 5])], ids=["one prefix", "prefixes"])
def test_padding_never_matters(mode: str, impl: str, kind: str, prefix: Any) -> None:
    model = random_model(layers=3) if kind == "tokens" else random_model(**VECTORS)
    x = random_inputs(model, 4, 8)
    padding = torch.arange(8) >= LENGTHS[:, None]
    fillings = [random_inputs(model, 4, 8, seed=s) for s in (1, 2)]
    if kind == "vectors":
        fillings += [torch.full_like(x, v) for v in (float("nan"), float("inf"))]
    out, grads = outputs_and_gradients(model, x, mode, prefix=prefix, lengths=LENGTHS, impl=impl)
    assert (out[padding] == 0).all()
    assert (out[~padding] != 0).all()
    if kind == "vectors":
        assert (grads["x"][padding] == 0).all()
    for filling in fillings:
        other = torch.where(padding if kind == "tokens" else padding[..., None], filling, x)
        out_2, grads_2 = outputs_and_gradients(
            model, other, mode, prefix=prefix, lengths=LENGTHS, impl=impl
        )
        assert torch.equal(out, out_2)
        assert grads.keys() == grads_2.keys()
        assert all(torch.equal(grads[name], grads_2[name]) for name in grads)


@every_impl
def test_a_padded_sequence_is_computed_as_it_is_alone(mode: str, impl: str) -> None:
    model = random_model(layers=3)
    x, prefix = random_inputs(model, 4, 8), torch.tensor([3, 2, 8, 5])
    out = run(model, x, mode, prefix=prefix, lengths=LENGTHS, impl=impl)
    for b, length in enumerate(LENGTHS.tolist()):
        alone = run(model, x[b : b + 1, :length], mode, prefix=int(prefix[b]), impl=impl)
        torch.testing.assert_close(out[b, :length], alone[0], rtol=1e-11, atol=1e-12)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=4), st.integers(1, 9))
def test_each_sequence_has_its_own_prefix(prefixes: list[int], time: int) -> None:
    model = random_model(layers=3)
    x = random_inputs(model, len(prefixes), time)
    out = model(x, "prefix-lm", prefix=torch.tensor(prefixes))
    for b, prefix in enumerate(prefixes):
        alone = model(x[b : b + 1], "prefix-lm", prefix=prefix)
        torch.testing.assert_close(out[b], alone[0], rtol=1e-11, atol=1e-12)


# What an output depends on


def dependence(model: Transformer, x: Tensor, mode: str, t: int, **options: Any) -> Tensor:
    """How much the output at t depends on each position, (T,): its largest gradient."""
    x = x.clone().requires_grad_()
    out = run(model, x, mode, **options)[0, t]
    grads = [torch.autograd.grad(value, x, retain_graph=True)[0][0] for value in out]
    return torch.stack(grads).abs().amax((0, 2))


@every_impl
@pytest.mark.parametrize("time", [7, 19])
def test_no_output_sees_the_future_and_every_output_sees_its_past(
    mode: str, impl: str, time: int
) -> None:
    model = random_model(**VECTORS)
    x = random_inputs(model, 1, time)
    prefix = 3
    for t in range(time):
        seen = dependence(model, x, mode, t, prefix=prefix, impl=impl)
        visible = max(t + 1, prefix) if mode == "prefix-lm" and t < prefix else t + 1
        assert (seen[visible:] == 0).all()
        assert (seen[:visible] > 0).all()


def inner_dependence(model: Transformer, x: Tensor, mode: str, query: int, key: int) -> float:
    """The largest gradient of the hidden state at `query` by the last input read, at `key`."""
    x = x[:, : key + 1].clone().requires_grad_()
    hidden = masked_hidden(model, x, mode, prefix=key + 1 if mode == "prefix-lm" else None)[
        0, query
    ]
    return max(
        torch.autograd.grad(v, x, retain_graph=True)[0][0, key].abs().max().item() for v in hidden
    )


def test_inner_positions_know_the_last_token_in_entp_and_not_in_a_decoder() -> None:
    model = random_model(**VECTORS)
    x = random_inputs(model, 1, 6)
    for key in range(1, 6):
        for query in range(key):
            assert inner_dependence(model, x, "prefix-lm", query, key) > 0
            assert inner_dependence(model, x, "decoder", query, key) == 0


@pytest.mark.parametrize("impl", ["packed", "reference"])
def test_entp_reads_inner_positions_that_know_the_last_token(impl: str) -> None:
    """Keys and values that layer 2 reads at i < t change with token t; in a decoder they do not."""
    model = random_model(**{**VECTORS, "layers": 2})
    x = random_inputs(model, 1, 5)
    t = 4

    def values_read(last: Tensor, mode: str) -> Tensor:
        rows = torch.cat([x[:, :t], last[None, None]], 1)
        h = model.blocks[0](model.embed(rows), torch.arange(t + 1), causal=mode == "decoder")
        keys_and_values = model.blocks[1].qkv(model.blocks[1].norm_1(h))
        return keys_and_values[0, :t]

    full = torch.autograd.functional.jacobian(lambda v: values_read(v, "entp"), x[0, t])
    causal = torch.autograd.functional.jacobian(lambda v: values_read(v, "decoder"), x[0, t])
    assert (full.abs().amax((1, 2)) > 0).all()
    assert (causal == 0).all()
    # and the engine computes just that: layer 1 in full over the prefix, then layer 2
    h = model.embed(x)
    for block in model.blocks:
        h = block(h, torch.arange(5))
    torch.testing.assert_close(
        model(x, impl=impl)[0, t], model.readout(h)[0, t], rtol=1e-12, atol=1e-13
    )


# Which positions are asked for


def masks(batch: int, time: int) -> list[Tensor]:
    torch.manual_seed(0)
    none = torch.zeros(batch, time, dtype=torch.bool)
    return [none, ~none, torch.rand(batch, time) < 0.3, torch.rand(batch, time) < 0.7]


@every_impl
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
def test_at_selects(mode: str, impl: str, lengths: Tensor | None) -> None:
    model = random_model(layers=3)
    x = random_inputs(model, 4, 8)
    full = run(model, x, mode, lengths=lengths, impl=impl)
    assert torch.equal(run(model, x, mode, lengths=lengths, impl=impl, at=None), full)
    for at in ([0], [7], [7, 0, 3], [2, 2], list(range(8)), torch.tensor([4, 1])):
        some = run(model, x, mode, lengths=lengths, impl=impl, at=at)
        torch.testing.assert_close(some, full[:, torch.as_tensor(at)], rtol=1e-11, atol=1e-12)
    for mask in masks(4, 8):
        some = run(model, x, mode, lengths=lengths, impl=impl, at=mask)
        assert some.shape == (int(mask.sum()), 11)
        torch.testing.assert_close(some, full[mask], rtol=1e-11, atol=1e-12)


@every_impl
def test_at_no_positions(mode: str, impl: str) -> None:
    model = random_model()
    assert run(model, random_inputs(model, 2, 4), mode, impl=impl, at=[]).shape == (2, 0, 11)


@every_impl
def test_empty_batch(mode: str, impl: str) -> None:
    model = random_model()
    assert run(model, torch.zeros(0, 4, dtype=torch.long), mode, impl=impl).shape == (0, 4, 11)


# Errors


@every_mode
@pytest.mark.parametrize("at", [[5], [-1], [0, 9], torch.tensor([5])])
def test_positions_that_are_not_there(mode: str, at: Any) -> None:
    model = random_model()
    with pytest.raises(InputError, match=r"at asks for position .*: allowed are 0 to 4"):
        run(model, random_inputs(model, 2, 5), mode, at=at)


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
@pytest.mark.parametrize("shape", [(2,), (3, 5), (2, 4), (2, 5, 1)])
def test_masks_of_the_wrong_shape(mode: str, shape: tuple[int, ...]) -> None:
    model = random_model()
    with pytest.raises(InputError, match=r"mask of shape .* the shape of the batch, \(2, 5\)"):
        run(model, random_inputs(model, 2, 5), mode, at=torch.ones(shape, dtype=torch.bool))


@every_mode
def test_inputs_the_model_cannot_read(mode: str) -> None:
    tokens, vectors = random_model(context_length=6), random_model(**VECTORS)
    ids, points = random_inputs(tokens, 2, 5), random_inputs(vectors, 2, 5)
    for model, x, message in [
        (
            tokens,
            random_inputs(tokens, 1, 7),
            "sequences of 7 tokens do not fit the model's 6 positions",
        ),
        (tokens, ids.double(), "token ids .* of an integer type"),
        (tokens, ids[0], "token ids"),
        (tokens, ids[..., None], "token ids"),
        (tokens, ids[:, :0], "empty"),
        (vectors, points[..., :2], r"vectors \(batch, time, 3\), got \(2, 5, 2\)"),
        (vectors, points[0], "vectors"),
        (vectors, ids, "vectors"),
        (vectors, points.long(), r"vectors \(batch, time, 3\), got \(2, 5, 3\) of torch\.int64"),
    ]:
        with pytest.raises(InputError, match=message):
            run(model, x, mode)


@every_mode
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.tensor([[3, 11]]), "token ids go from 3 to 11: the vocabulary is 0 to 10"),
        (torch.tensor([[3, -1]]), "token ids go from -1 to 3"),
    ],
)
def test_tokens_the_model_cannot_read(mode: str, x: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(random_model(), x, mode)


@every_mode
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_any_integer_type_will_do(mode: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0, 1]])
    assert torch.equal(run(random_model(), x.to(dtype), mode), run(random_model(), x, mode))


@every_mode
def test_ids_outside_the_vocabulary_are_fine_in_padding(mode: str) -> None:
    model = random_model()
    x = torch.tensor([[3, 4, 99], [1, -100, -100]])
    lengths = torch.tensor([2, 1])
    assert torch.equal(
        run(model, x, mode, lengths=lengths), run(model, x.clamp(0, 10), mode, lengths=lengths)
    )


@every_mode
@pytest.mark.parametrize("lengths", [[0, 3], [3, 6], [3], [3, 3, 3], [[3, 3]], [-1, 3]])
def test_bad_lengths(mode: str, lengths: Any) -> None:
    model = random_model()
    with pytest.raises(InputError, match="lengths must be 2 numbers from 1 to 5"):
        run(model, random_inputs(model, 2, 5), mode, lengths=torch.tensor(lengths))


def test_unknown_modes_and_missing_prefix() -> None:
    model = random_model()
    x = random_inputs(model, 2, 5)
    with pytest.raises(InputError, match=r"unknown mode 'enpt'.*Did you mean entp"):
        model(x, "enpt")
    with pytest.raises(InputError, match="mode prefix-lm needs prefix="):
        model(x, "prefix-lm")


@pytest.mark.parametrize("lengths", [None, torch.tensor([5, 3])], ids=["whole", "padded"])
@pytest.mark.parametrize("prefix", [1, 3, 4, 5, 6])
def test_one_prefix_for_all_is_the_same_one_for_each(prefix: int, lengths: Tensor | None) -> None:
    """Next to the whole sequence, too, where no mask would be needed."""
    model = random_model()
    x = random_inputs(model, 2, 5)
    for_all, for_each = (
        model(x, "prefix-lm", prefix=p, lengths=lengths) for p in (prefix, [prefix, prefix])
    )
    torch.testing.assert_close(for_all, for_each, rtol=1e-11, atol=1e-12)


def test_a_prefix_per_sequence_must_fit_the_batch() -> None:
    model = random_model()
    with pytest.raises(InputError, match="prefix"):
        model(random_inputs(model, 2, 5), "prefix-lm", prefix=torch.tensor([1, 2, 3]))
