"""The paper's two theorems: its formulas exactly, its steps on random models, and T_D = D."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import random_inputs, random_model
from torch import Tensor

from entp import InputError, Transformer
from entp.theory.constructions import (
    causal_model,
    collapses_for_any_encoder,
    decoder_beyond_encoders,
    decoder_is_causal,
    encoder_beta,
    encoder_beyond_decoders,
    equals_a_wider_encoder,
    exact_decoder,
    exact_outputs,
    one_layer_is_one_function,
    order_matters,
    random_transformer,
    repeats_for_any_decoder,
    wider_encoder,
)

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SIZES = [(layers, width) for layers in (2, 3, 4, 5) for width in (1, 2, 3, 4)]
every_size = pytest.mark.parametrize(("layers", "width"), SIZES)
ANY = [
    {"layers": 1, "heads": 1, "width": 1},
    {"layers": 2, "heads": 1, "width": 3},
    {"layers": 2, "heads": 2, "width": 8, "norm": "layer"},
    {"layers": 3, "heads": 4, "width": 8, "activation": "relu", "attention_scale": "sqrt"},
    {"layers": 5, "heads": 2, "width": 6, "norm": "layer", "position_embedding": "learned"},
]
any_model = pytest.mark.parametrize(
    "config", ANY, ids=lambda c: f"L{c['layers']}D{c['width']}{c.get('norm', '')}"
)
seeds = pytest.mark.parametrize("seed", [0, 1])

fractions = st.fractions(min_value=-50, max_value=50, max_denominator=1000)


@st.composite
def vectors(draw: st.DrawFn, count: int) -> list[list[Fraction]]:
    """`count` vectors of one size from 1 to 4."""
    width = draw(st.integers(1, 4))
    return [draw(st.lists(fractions, min_size=width, max_size=width)) for _ in range(count)]


def combine(*terms: tuple[Fraction, list[Fraction]]) -> list[Fraction]:
    """The sum of c x over the pairs (c, x)."""
    columns = zip(*([c * value for value in x] for c, x in terms), strict=True)
    return [sum(column, Fraction(0)) for column in columns]


def assert_exact(model: Transformer, x: Tensor, mode: str) -> None:
    """The model's float64 outputs are its exact ones."""
    exact = exact_outputs(model, [[Fraction(v) for v in row] for row in x[0].tolist()], mode)
    expected = torch.tensor([[float(v) for v in row] for row in exact], dtype=torch.float64)
    torch.testing.assert_close(model(x, mode)[0], expected, **CLOSE)


# Exact values


@given(vectors(3), st.integers(2, 5))
def test_the_papers_three_outputs_of_the_decoder(x: list[list[Fraction]], layers: int) -> None:
    one, two, three = x
    expected = [
        combine((Fraction(4), one)),
        combine((Fraction(7, 4), one), (Fraction(9, 4), two)),
        combine((Fraction(23, 18), one), (Fraction(17, 18), two), (Fraction(32, 18), three)),
    ]
    assert exact_decoder(x, layers) == expected


@given(vectors(3))
def test_the_same_weights_as_an_encoder_do_not_know_the_order(x: list[list[Fraction]]) -> None:
    """Two uniform averages over everything: T_E(x)_n = x_n + 3 times the mean of x_1..x_n."""
    model = decoder_beyond_encoders(width=len(x[0]))
    for n, out in enumerate(exact_outputs(model, x, "entp"), start=1):
        assert out == combine((Fraction(1), x[n - 1]), *((Fraction(3, n), row) for row in x[:n]))
    assert exact_outputs(model, [x[1], x[0], x[2]], "entp")[2] == exact_outputs(model, x, "entp")[2]


@every_size
@pytest.mark.parametrize("mode", ["decoder", "entp"])
def test_the_transformer_computes_the_exact_values(layers: int, width: int, mode: str) -> None:
    model = decoder_beyond_encoders(layers, width)
    assert_exact(model, random_inputs(model, 1, 7, seed=layers * 10 + width), mode)


def uniform_attention(heads: int, zero: str) -> Transformer:
    """A random model whose scores are equal because W_K is zero, or W_Q and its bias."""
    model = random_model(
        input_dim=3,
        outputs=2,
        width=6,
        heads=heads,
        norm="none",
        activation="relu",
        position_embedding="none",
        layers=3,
    )
    with torch.no_grad():
        for block in model.blocks:
            query, key, _ = block.qkv.weight.unflatten(0, (3, -1)).unbind(0)
            if zero == "key":
                key.zero_()
            else:
                query.zero_()
                block.qkv.bias[:6] = 0
    return model


@pytest.mark.parametrize("zero", ["query", "key"])
@pytest.mark.parametrize("mode", ["decoder", "entp"])
@pytest.mark.parametrize("heads", [1, 3])
def test_exact_evaluation_reads_all_weights(zero: str, mode: str, heads: int) -> None:
    """Also random values, projections, MLPs, biases and heads with equal scores."""
    model = uniform_attention(heads, zero)
    assert_exact(model, random_inputs(model, 1, 5), mode)


def test_scores_that_are_not_equal_are_refused() -> None:
    xs = [[Fraction(1)], [Fraction(2)]]
    with pytest.raises(InputError, match="scores of layer 1 are not all equal"):
        exact_outputs(encoder_beyond_decoders(), xs)
    model = uniform_attention(1, "query")
    with torch.no_grad():
        model.blocks[1].qkv.bias[0] = 1.0  # a constant query still tells keys apart
    with pytest.raises(InputError, match="scores of layer 2 are not all equal"):
        exact_outputs(model, [[Fraction(1)] * 3])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm": "layer"}, "norm='none', and this model has 'layer'"),
        ({"activation": "gelu"}, "activation='relu'"),
        ({"position_embedding": "given"}, "position_embedding='none'"),
    ],
)
def test_what_exact_evaluation_cannot_do(config: dict[str, str], message: str) -> None:
    plain = {"norm": "none", "activation": "relu", "position_embedding": "none"}
    with pytest.raises(InputError, match=message):
        exact_outputs(
            random_transformer(0, width=2, **{**plain, **config}), [[Fraction(1), Fraction(2)]]
        )


def test_bad_exact_inputs() -> None:
    model = decoder_beyond_encoders(width=2)
    for xs in ([], [[Fraction(1)]], [[Fraction(1), Fraction(2)], [Fraction(1)]]):
        with pytest.raises(InputError, match="at least one vector of 2 numbers"):
            exact_outputs(model, xs)
    with pytest.raises(InputError, match="at least one vector of 1 numbers"):
        exact_decoder([])
    with pytest.raises(InputError, match="unknown mode 'prefix-lm'"):
        exact_outputs(model, [[Fraction(1), Fraction(2)]], "prefix-lm")
    with pytest.raises(InputError, match="reads and returns vectors"):
        exact_outputs(random_model(), [[Fraction(1)]])


# The constructions


@pytest.mark.parametrize("make", [decoder_beyond_encoders, encoder_beyond_decoders])
@pytest.mark.parametrize(
    ("size", "message"), [((1, 1), "layers is 1"), ((0, 3), "layers is 0"), ((2, 0), "width is 0")]
)
def test_sizes_the_theorems_do_not_cover(make: Any, size: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=f"{message}: the theorem's construction needs at least"):
        make(*size)


@every_size
def test_the_weights_are_the_papers(layers: int, width: int) -> None:
    for make, query_key in ((decoder_beyond_encoders, 0.0), (encoder_beyond_decoders, 1.0)):
        model = make(layers, width)
        config, eye = model.config, torch.eye(width, dtype=torch.float64)
        assert (
            config.layers,
            config.heads,
            config.norm,
            config.position_embedding,
            config.attention_scale,
        ) == (
            layers,
            1,
            "none",
            "none",
            "one",
        )
        for number, block in enumerate(model.blocks):
            q, k, v = block.qkv.weight.split(width)
            used = float(number < 2)
            assert torch.equal(q, used * query_key * eye)
            assert torch.equal(k, used * query_key * eye)
            assert torch.equal(v, used * eye)
            assert not any(
                p.any()
                for name, p in block.named_parameters()
                if name.startswith(("fc", "out")) or "bias" in name
            )


def test_making_models_leaves_the_callers_draws_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    decoder_beyond_encoders()
    random_transformer(0)
    assert torch.equal(torch.rand(3), expected)


def test_a_seed_chooses_the_model_and_the_vectors_that_are_tried() -> None:
    same, other = random_transformer(0), random_transformer(1)
    assert torch.equal(random_transformer(0).head.weight, same.head.weight)
    assert not torch.equal(other.head.weight, same.head.weight)
    assert not torch.equal(other.positions, same.positions)
    plain = random_transformer(0, position_embedding="none")
    assert order_matters(plain, 0) == order_matters(plain, 0)
    assert order_matters(plain, 0).numbers["decoder"] != pytest.approx(
        order_matters(plain, 1).numbers["decoder"]
    )


# A decoder that is no encoder


@any_model
@seeds
def test_encoders_cannot_tell_what_the_decoder_tells(config: dict[str, Any], seed: int) -> None:
    model = random_transformer(seed, **config)
    found = collapses_for_any_encoder(model, seed)
    assert found.holds, found
    assert found.numbers["encoder"] <= 1e-12
    assert found.numbers["decoder"] > 1e-3
    one, two = causal_model(model, random_inputs(model, 1, 2))[0]
    assert (one - two).abs().max() > 1e-3  # another pair does not collapse


@given(vectors(2))
def test_the_decoder_tells_any_two_vectors_apart(x: list[list[Fraction]]) -> None:
    """4 x1 = (7 x1 + 9 x2) / 4 if and only if x1 = x2."""
    assert exact_decoder([x[0], x[0]])[1] == exact_decoder(x[:1])[0]
    assert (exact_decoder(x)[1] == exact_decoder(x[:1])[0]) == (x[0] == x[1])


@any_model
@seeds
@pytest.mark.parametrize("position", ["none", "equal"])
def test_order_is_lost_on_encoders_without_different_positions(
    config: dict[str, Any], seed: int, position: str
) -> None:
    if position == "none":
        model = random_transformer(seed, **{**config, "position_embedding": "none"})
    else:
        model = random_transformer(seed, **config)
        with torch.no_grad():
            model.positions[1] = model.positions[0]  # p3 differs: the claim needs p1 = p2 only
    found = order_matters(model, seed)
    assert found.holds, found
    assert found.numbers["decoder"] > 1e-3


def test_order_matters_to_encoders_with_different_positions() -> None:
    model = random_transformer(0)
    x = random_inputs(model, 1, 3)
    one, two = causal_model(model, x)[0, 2], causal_model(model, x[:, [1, 0, 2]])[0, 2]
    assert (one - two).abs().max() > 1e-2
    with pytest.raises(InputError, match="this encoder has p1 != p2"):
        order_matters(model)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 8, 32, 64])
def test_a_wider_encoder_of_one_layer_equals_the_decoder(length: int, width: int) -> None:
    model = wider_encoder(length, width)
    assert (model.config.layers, model.config.width) == (1, width + length)
    found = equals_a_wider_encoder(length, width, seed=width)
    assert found.holds
    assert found.numbers["difference"] <= 5e-15
    x = random_inputs(model, 1, length, seed=length)
    torch.testing.assert_close(
        causal_model(model, x, "entp"), model(x, "decoder"), **CLOSE
    )  # one layer
    twice = decoder_beyond_encoders(5, width)(x, "decoder")
    torch.testing.assert_close(model(x, "entp"), twice, rtol=1e-14, atol=1e-14)


def test_the_theorems_step_does_not_reach_a_wider_encoder() -> None:
    """Its positions are not in the space of its inputs: nothing makes up for p1 - p2."""
    with pytest.raises(InputError, match="no two inputs of this model make up for p1 - p2"):
        collapses_for_any_encoder(wider_encoder(4, 2))
    with pytest.raises(InputError, match="sequences of 5 tokens do not fit"):
        wider_encoder(4, 2)(torch.zeros(1, 5, 2, dtype=torch.float64))
    for sizes, message in (((0, 1), "length is 0"), ((3, 0), "width is 0")):
        with pytest.raises(InputError, match=message):
            wider_encoder(*sizes)


# An encoder that is no decoder


@any_model
@seeds
def test_decoders_repeat_themselves_where_the_encoder_does_not(
    config: dict[str, Any], seed: int
) -> None:
    found = repeats_for_any_decoder(random_transformer(seed, **config))
    assert found.holds, found
    assert 2.5 < found.numbers["beta"] <= 4  # 4 only by rounding
    assert found.numbers["encoder"] > 1e-3


@every_size
def test_the_encoder_after_zero(layers: int, width: int) -> None:
    model = encoder_beyond_decoders(layers, width)
    for size in (0.01, 0.3, 1.0, 3.0, 30.0):
        x_2 = size * random_inputs(model, 1, 1, seed=width)[0, 0]
        outputs = causal_model(model, torch.stack([torch.zeros_like(x_2), x_2])[None])[0]
        assert not outputs[0].any()
        torch.testing.assert_close(outputs[1], encoder_beta(x_2) * x_2, **CLOSE)
        torch.testing.assert_close(causal_model(model, x_2[None, None])[0, 0], 4 * x_2, **CLOSE)


def test_beta_goes_from_five_halves_to_four() -> None:
    betas = [encoder_beta(torch.tensor([r])) for r in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)]
    assert betas == sorted(betas)
    assert betas[0] == 2.5
    assert betas[-1] == pytest.approx(4, abs=1e-6)
    assert all(2.5 < beta < 4 for beta in betas[1:])
    # Strictly between for every x2 != 0, but not in floats.
    assert [encoder_beta(torch.tensor([r])) for r in (1e-8, 6.5)] == [2.5, 4.0]


@seeds
def test_both_coefficients_of_the_encoder_are_positive(seed: int) -> None:
    """T_E~(x1, x2)_2 = alpha x1 + beta x2 with alpha, beta > 0, read off for independent x1, x2."""
    x = random_inputs(encoder_beyond_decoders(width=2), 1, 2, seed=seed)
    out = causal_model(encoder_beyond_decoders(width=2), x)[0, 1]
    assert (torch.linalg.solve(x[0].T, out) > 0).all()


@pytest.mark.parametrize("check", [collapses_for_any_encoder, repeats_for_any_decoder])
def test_models_the_theorems_say_nothing_about(check: Any) -> None:
    same = random_transformer(0)
    same.set_positions(same.positions[:1].expand(16, -1).clone())
    for model, message in [
        (same, "this model has p1 = p2"),
        (random_transformer(0, position_embedding="none"), "this model has p1 = p2"),
        (random_model(input_dim=3), "no two inputs of this model make up for p1 - p2"),
        (random_model(), "read vectors"),
        (random_transformer(0).float(), "float64"),
    ]:
        with pytest.raises(InputError, match=message):
            check(model)


def test_models_of_too_few_positions_are_refused_not_stretched() -> None:
    """A table of one position would be added to all vectors alike, as if p1 = p2."""
    alone, two = random_transformer(0, context_length=1), random_transformer(0, context_length=2)
    two.set_positions(two.positions[:1].expand(2, -1).clone())
    for check, model, reads in [
        (collapses_for_any_encoder, alone, 2),
        (repeats_for_any_decoder, alone, 2),
        (order_matters, alone, 3),
        (order_matters, two, 3),
    ]:
        with pytest.raises(
            InputError,
            match=f"about {reads} vectors in a row: .* has {model.config.context_length}",
        ):
            check(model)
    x = random_inputs(alone, 1, 2)
    for mode in ("entp", "decoder", "prefix-lm"):
        with pytest.raises(
            InputError, match="sequences of 2 tokens do not fit the model's 1 positions"
        ):
            causal_model(alone, x, mode, prefix=1)
    torch.testing.assert_close(causal_model(alone, x[:, :1]), alone(x[:, :1], "entp"), **CLOSE)
    # Without positions there is no limit.
    assert order_matters(random_transformer(0, context_length=1, position_embedding="none")).holds


# Causal models


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"layers": 1},
        {"layers": 4, "norm": "none"},
        {"input_dim": 3, "position_embedding": "none"},
    ],
)
@seeds
def test_a_decoder_is_its_causal_model(kind: dict[str, Any], seed: int) -> None:
    model = random_model(seed, **kind)
    x = random_inputs(model, 2, 9, seed)
    assert decoder_is_causal(model, x).holds
    once = model.encode(x)  # an encoder that reads everything once is not its causal model
    assert (model.readout(once) - causal_model(model, x, "entp"))[:, :-1].abs().max() > 1e-3


def test_outputs_that_are_all_zero_do_not_differ() -> None:
    found = decoder_is_causal(decoder_beyond_encoders(), torch.zeros(1, 3, 1, dtype=torch.float64))
    assert found.numbers == {"difference": 0.0}


def test_mode_entp_is_the_encoders_causal_model() -> None:
    model = random_model(layers=3)
    x = random_inputs(model, 2, 9)
    torch.testing.assert_close(model(x, "entp"), causal_model(model, x, "entp"), **CLOSE)


def test_a_prefix_decoder_is_its_causal_model_from_the_end_of_the_prefix_on() -> None:
    model = random_model(layers=3)
    x = random_inputs(model, 2, 9)
    once, causal = model(x, "prefix-lm", prefix=4), causal_model(model, x, "prefix-lm", 4)
    torch.testing.assert_close(once[:, 3:], causal[:, 3:], **CLOSE)
    assert ((once - causal)[:, :3].abs().amax(-1) > 1e-4).all()
    encoder = causal_model(model, x, "entp")
    torch.testing.assert_close(causal[:, :4], encoder[:, :4], **CLOSE)
    assert ((causal - causal_model(model, x, "decoder"))[:, 1:].abs().amax(-1) > 1e-5).all()


@pytest.mark.parametrize("kind", [{}, {"norm": "none", "heads": 1}, {"input_dim": 3}])
@pytest.mark.parametrize("prefix", [1, 2, 5, 9])
def test_one_layer_is_one_function(kind: dict[str, Any], prefix: int) -> None:
    model = random_model(layers=1, **kind)
    x = random_inputs(model, 2, 9)
    found = one_layer_is_one_function(model, x, prefix)
    assert found.holds, found
    before = (model(x, "prefix-lm", prefix=prefix) - model(x, "decoder"))[:, : prefix - 1]
    # Read once, a position inside the prefix sees what comes after it.
    assert (before.abs().amax(-1) > 1e-5).all()


def test_two_layers_are_not_one_function() -> None:
    model = random_model(layers=2)
    x = random_inputs(model, 1, 5)
    difference = causal_model(model, x, "entp") - causal_model(model, x, "decoder")
    assert difference[:, 1:].abs().max() > 1e-3
    with pytest.raises(InputError, match="this model has 2 layers"):
        one_layer_is_one_function(model, x, 2)
    for prefix in (0, 6):
        with pytest.raises(InputError, match=f"prefix {prefix} does not fit 5 tokens"):
            one_layer_is_one_function(random_model(layers=1), x, prefix)
    with pytest.raises(InputError, match="unknown mode"):
        causal_model(model, x, "encoder")


def test_findings_fail_where_the_statement_does() -> None:
    broken = random_transformer(0)
    # NaN queries would not do: on some CPUs torch's attention makes zeros of them.
    broken.head.weight[0, 0] = float("nan")
    assert not collapses_for_any_encoder(broken).holds
    assert not repeats_for_any_decoder(broken).holds
    broken = random_transformer(0, position_embedding="none")
    broken.head.weight[0, 0] = float("nan")
    assert not order_matters(broken).holds
    leaky = random_model(layers=2)
    leaky.encode = lambda x, *ids, **masks: Transformer.encode(leaky, x)  # type: ignore[method-assign]
    assert not decoder_is_causal(leaky, random_inputs(leaky, 1, 4)).holds
