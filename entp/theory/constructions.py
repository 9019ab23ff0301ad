"""The models that separate encoders from decoders, and what the proofs say about them, as numbers.

    model = decoder_beyond_encoders(layers=2, width=1)
    # [[4], [25/4]]: 4 x1 and (7 x1 + 9 x2) / 4
    exact_outputs(model, [[Fraction(1)], [Fraction(2)]])
    collapses_for_any_encoder(random_transformer(seed=0), seed=0)   # Finding(holds=True, ...)

Names follow the paper: E and D are an encoder and a decoder with positions p1, p2, ...; E~ and D~
have none. T_f is the causal model of f: T_f(x)_n = f(x_1..x_n)_n. A theorem's inputs are vectors
that the positions are added to, so its models read vectors, and reading in may be any linear map as
long as some pair of inputs makes up for p1 - p2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor, nn

from entp.config import MODES, ModelConfig
from entp.engine.api import masked_hidden
from entp.engine.arguments import check_inputs
from entp.errors import InputError, one_of
from entp.model import Block, Transformer

Vector = list[Fraction]

TOLERANCE = 1e-12
"""Largest relative difference of two float64 results that are equal by a proof."""


@dataclass(frozen=True)
class Finding:
    """Whether a statement came out, and the numbers that say so."""

    statement: str
    holds: bool
    numbers: dict[str, float]


def decoder_beyond_encoders(layers: int = 2, width: int = 1) -> Transformer:
    """The decoder D~ that no encoder equals: W_Q = W_K = 0 and W_V = I in two layers, then zero."""
    return _two_attentions(layers, width, query_key=0.0)


def encoder_beyond_decoders(layers: int = 2, width: int = 1) -> Transformer:
    """The encoder E~ that no decoder with p1 != p2 equals: W_Q = W_K = W_V = I, then zero."""
    return _two_attentions(layers, width, query_key=1.0)


@torch.no_grad()
def _two_attentions(layers: int, width: int, query_key: float) -> Transformer:
    """Two residual attention layers with W_Q = W_K = query_key I and W_V = I; nothing else adds."""
    for name, got, least in (("layers", layers, 2), ("width", width, 1)):
        if got < least:
            raise InputError(f"{name} is {got}: the theorem's construction needs at least {least}.")
    config = _theorem_config(
        width, layers=layers, heads=1, activation="relu", norm="none", position_embedding="none"
    )
    model, eye = _zero(config), torch.eye(width, dtype=torch.float64)
    for linear in (model.read_in, model.head):
        assert linear is not None
        linear.weight.copy_(eye)
    for block in _blocks(model)[:2]:
        block.qkv.weight.copy_(torch.cat([query_key * eye, query_key * eye, eye]))
        block.proj.weight.copy_(eye)
    return model


def _zero(config: ModelConfig) -> Transformer:
    """A float64 model whose weights are all 0, to be set; the caller's draws do not move."""
    with torch.random.fork_rng(devices=[]):
        model = Transformer(config).double().requires_grad_(False)
    for p in model.parameters():
        p.zero_()
    return model


@torch.no_grad()
def wider_encoder(length: int, width: int = 1) -> Transformer:
    """The encoder of one layer and width D + N that equals D~ on sequences of at most N vectors.

    D~ is x -> C x with C = (I + M)², M the mean of x_1..x_n. Row n of (C - I) / 3 is positive and
    sums to 1, so it is a softmax of its logarithms: an output is x_n plus attention to the values
    3 x_i. Positions are one-hot in N dimensions of their own, where no input makes up for p1 - p2.
    """
    for name, got in (("length", length), ("width", width)):
        if got < 1:
            raise InputError(f"{name} is {got}: it must be at least 1.")
    sizes = {"layers": 1, "heads": 1, "input_dim": width, "outputs": width}
    config = _theorem_config(
        width + length,
        activation="relu",
        norm="none",
        position_embedding="given",
        context_length=length,
        **sizes,
    )
    model = _zero(config)
    assert model.read_in is not None
    assert model.head is not None
    model.read_in.weight[:width] = torch.eye(width)
    model.head.weight[:, :width] = torch.eye(width)
    model.set_positions(torch.eye(length, width + length).roll(width, 1))
    (block,) = _blocks(model)
    query, key, value = block.qkv.weight.unflatten(0, (3, -1)).unbind(0)
    query[width:, width:] = _scores_of_the_decoder(length).T
    key[width:, width:] = torch.eye(length)
    value[:width, :width] = 3 * torch.eye(width)
    block.proj.weight.copy_(torch.eye(width + length))
    return model


def _scores_of_the_decoder(length: int) -> Tensor:
    """ln((C - I) / 3), (N, N); 0 for the keys after a query, which it never meets."""
    numbers = torch.arange(1, length + 1, dtype=torch.float64)
    layer = torch.eye(length) + (torch.ones(length, length) / numbers[:, None]).tril()
    others = (layer @ layer - torch.eye(length)) / 3
    return torch.where(others > 0, others, 1.0).log()


def random_transformer(seed: int, *, width: int = 8, **config: Any) -> Transformer:
    """A theorem's "any" model: float64, reads and returns vectors of its width, no weight zero.

    Unless told, 2 layers, 2 heads, no normalisation and random positions.
    config: fields of ModelConfig.
    """
    defaults = {
        "layers": 2,
        "heads": 2,
        "norm": "none",
        "position_embedding": "given",
        "context_length": 16,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(_theorem_config(width, **{**defaults, **config})).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
            assert model.read_in is not None
            model.read_in.weight.add_(torch.eye(*model.read_in.weight.shape))
            if model.config.has_limit:
                model.set_positions(torch.randn(model.config.context_length, width))
    return model.requires_grad_(False)


def _theorem_config(width: int, **config: Any) -> ModelConfig:
    sizes = {"input_dim": width, "outputs": width, "width": width}
    return ModelConfig(**{**sizes, "attention_scale": "one", **config})


# Exact evaluation


def exact_decoder(xs: Sequence[Sequence[Fraction]], layers: int = 2) -> list[Vector]:
    """D~(x_1, x_2, ...) without rounding, of the theorem's decoder of the width of the x."""
    width = len(xs[0]) if xs else 1
    return exact_outputs(decoder_beyond_encoders(layers, width), xs)


def exact_outputs(
    model: Transformer, xs: Sequence[Sequence[Fraction]], mode: str = "decoder"
) -> list[Vector]:
    """A model's outputs in mode decoder or entp, in fractions: no rounding anywhere.

    Softmax is a fraction only where all scores of a query are equal. That must follow from the
    weights: W_K = 0, or both W_Q and its bias. Then neither heads nor scale matter. Normalisation,
    GELU and positions are refused too.
    """
    if mode not in ("decoder", "entp"):
        raise one_of("mode", mode, ("decoder", "entp"))
    _check_exact(model, xs)
    rows = [[Fraction(value) for value in x] for x in xs]
    if mode == "decoder":
        return _exact(model, rows, causal=True)
    return [_exact(model, rows[:n], causal=False)[-1] for n in range(1, len(rows) + 1)]


def _check_exact(model: Transformer, xs: Sequence[Sequence[Fraction]]) -> None:
    """Raise InputError for what cannot be evaluated in fractions."""
    config = model.config
    if config.input_dim is None or config.outputs is None:
        raise InputError(
            "exact evaluation needs a model that reads and returns vectors (input_dim and outputs)."
        )
    for name, needed in (("norm", "none"), ("activation", "relu"), ("position_embedding", "none")):
        got = getattr(config, name)
        if got != needed:
            raise InputError(
                f"exact evaluation needs {name}={needed!r}, and this model has {got!r}."
            )
    if not xs or any(len(x) != config.input_dim for x in xs):
        sizes = sorted({len(x) for x in xs})
        raise InputError(
            f"exact evaluation needs at least one vector of {config.input_dim} numbers, got sizes "
            f"{sizes}."
        )
    for number, block in enumerate(_blocks(model), start=1):
        query, key, _ = block.qkv.weight.unflatten(0, (3, -1)).unbind(0)
        if key.any() and (query.any() or block.qkv.bias[: config.width].any()):
            raise InputError(
                f"the attention scores of layer {number} are not all equal (neither its W_K nor "
                "its W_Q with bias is zero): their softmax has no exact fractions."
            )


def _exact(model: Transformer, rows: list[Vector], causal: bool) -> list[Vector]:
    assert model.read_in is not None
    assert model.head is not None
    rows = _exact_linear(model.read_in, rows)
    for block in _blocks(model):
        values = _exact_linear(block.qkv, rows)
        sums = [[Fraction(0)] * model.config.width]
        for value in values:
            sums.append(_add(sums[-1], value[-model.config.width :]))
        seen = [n if causal else len(rows) for n in range(1, len(rows) + 1)]
        means = [[total / n for total in sums[n]] for n in seen]
        rows = _add_rows(rows, _exact_linear(block.proj, means))
        hidden = _exact_linear(block.fc, rows)
        inner = [[max(value, Fraction(0)) for value in row] for row in hidden]
        rows = _add_rows(rows, _exact_linear(block.out, inner))
    return _exact_linear(model.head, rows)


def _exact_linear(linear: nn.Linear, rows: list[Vector]) -> list[Vector]:
    weight = [[Fraction(w) for w in row] for row in linear.weight.tolist()]  # a float is a fraction
    bias = [Fraction(b) for b in linear.bias.tolist()]

    def dot(ws: Vector, row: Vector, start: Fraction) -> Fraction:
        return sum((w * x for w, x in zip(ws, row, strict=True)), start=start)

    return [[dot(ws, row, b) for ws, b in zip(weight, bias, strict=True)] for row in rows]


def _add_rows(rows: list[Vector], more: list[Vector]) -> list[Vector]:
    return [_add(row, added) for row, added in zip(rows, more, strict=True)]


def _add(one: Vector, other: Vector) -> Vector:
    return [a + b for a, b in zip(one, other, strict=True)]


# A decoder that is no encoder


@torch.no_grad()
def order_matters(model: Transformer, seed: int = 0) -> Finding:
    """D~ depends on the order of x1, x2 when it reads x3; an encoder can do so only if p1 != p2.

    model: any encoder with p1 = p2, or without positions. D~(x1, x2, x3)_3 - D~(x2, x1, x3)_3 is
        exactly (x1 - x2) / 3.
    """
    size = _vector_size(model, reads=3)
    if model.config.has_limit and not torch.equal(model.positions[0], model.positions[1]):
        raise InputError(
            "this encoder has p1 != p2, so order may matter to it: give one with p1 = p2 or "
            "position_embedding='none'."
        )
    x = _draw(seed, 3, size)
    swapped = x[[1, 0, 2]]
    encoder = _apart(_encode(model, x), _encode(model, swapped))
    one, two = (exact_decoder(_fractions(rows))[2] for rows in (x, swapped))
    difference = [a - b for a, b in zip(one, two, strict=True)]
    predicted = [(a - b) / 3 for a, b in zip(*_fractions(x[:2]), strict=True)]
    return Finding(
        "the third output of D~ changes when x1 and x2 are swapped, and that of an encoder with "
        "p1 = p2 does not",
        encoder <= TOLERANCE and difference == predicted and any(difference),
        {"encoder": encoder, "decoder": float(max(map(abs, difference)))},
    )


@torch.no_grad()
def collapses_for_any_encoder(model: Transformer, seed: int = 0) -> Finding:
    """With p1 != p2 and y1 + p1 = y2 + p2, E(y1)_1 = E(y1, y2)_2 although y1 != y2; not so D~.

    model: any encoder with positions. D~(y1)_1 - D~(y1, y2)_2 is exactly
        4 y1 - (7 y1 + 9 y2) / 4 = 9 (y1 - y2) / 4.
    """
    y_1 = _draw(seed, 1, _vector_size(model, reads=2))[0]
    y_2 = y_1 + _made_up(model)
    pair = torch.stack([y_1, y_2])
    encoder = _apart(_encode(model, pair[:1]), _encode(model, pair))
    (first,), (_, second) = exact_decoder(_fractions(pair[:1])), exact_decoder(_fractions(pair))
    difference = [a - b for a, b in zip(first, second, strict=True)]
    predicted = [Fraction(9, 4) * (a - b) for a, b in zip(*_fractions(pair), strict=True)]
    return Finding(
        "y1 + p1 = y2 + p2 forces E(y1)_1 = E(y1, y2)_2, and D~ gives 4 y1 and (7 y1 + 9 y2) / 4, "
        "which differ",
        encoder <= TOLERANCE and difference == predicted and any(difference),
        {"encoder": encoder, "decoder": float(max(map(abs, difference)))},
    )


@torch.no_grad()
def equals_a_wider_encoder(length: int, width: int = 1, seed: int = 0) -> Finding:
    """D~ is an encoder of one layer if the width may be D + N: equal at every n <= N."""
    x = _draw(seed, length, width)[None]
    decoder = decoder_beyond_encoders(2, width)(x, "decoder")
    difference = _apart(wider_encoder(length, width)(x, "entp"), decoder)
    return Finding(
        f"a one-layer encoder of width {width} + {length} says what D~ says",
        difference <= TOLERANCE,
        {"difference": difference},
    )


# An encoder that is no decoder


def encoder_beta(x_2: Tensor) -> float:
    """The β of T_E~(0, x2) = (0, β x2), by formula; it lies in (5/2, 4) for x2 != 0.

    Rounding reaches both ends: 5/2 for |x2| of 1e-8, 4 from |x2| = 6.5 on.

    With s = |x2|², layer 1 gives x2 / 2 and (1 + u) x2 for u = sigmoid(s). In layer 2 the second
    position's scores of these two are (1 + u) s / 2 and (1 + u)² s, so it gives the second the
    weight w = sigmoid((1 + u)(1/2 + u) s), and β = (1 + u) + (1 - w) / 2 + w (1 + u).
    """
    s = x_2.double().square().sum()
    u = torch.sigmoid(s)
    w = torch.sigmoid((1 + u) * (0.5 + u) * s)
    return float((1 + u) + (1 - w) / 2 + w * (1 + u))


@torch.no_grad()
def repeats_for_any_decoder(model: Transformer) -> Finding:
    """With p1 != p2, x1 = 0 and x2 = p1 - p2, any decoder repeats itself; E~ says 0 and then β x2.

    model: any decoder with positions.
    """
    x_1 = torch.zeros(_vector_size(model, reads=2), dtype=torch.float64)
    x = torch.stack([x_1, _made_up(model)])
    first, second = model(x[None], "decoder")[0]
    decoder = _apart(first, second)
    zero, told = causal_model(encoder_beyond_decoders(width=x.shape[1]), x[None], "entp")[0]
    beta = encoder_beta(x[1])
    formula = _apart(told, beta * x[1])
    equal = decoder <= TOLERANCE and formula <= TOLERANCE
    differs = not zero.any() and bool(told.any()) and beta > 0
    encoder = float((told - zero).abs().max())
    return Finding(
        "x1 = 0 and x2 = p1 - p2 make any decoder say (c, c), and E~ says (0, beta x2) with beta > "
        "0",
        equal and differs,
        {"decoder": decoder, "encoder": encoder, "beta": beta, "formula": formula},
    )


# Causal models


@torch.no_grad()
def causal_model(
    model: Transformer, x: Tensor, mode: str = "entp", prefix: int | None = None
) -> Tensor:
    """T_f(x)_n = f(x_1..x_n)_n by its definition, (B, T, outputs); the mode says what f is.

    x: inputs (B, T) or (B, T, input_dim).
    """
    if mode not in MODES:
        raise one_of("mode", mode, MODES)
    x, *_ = check_inputs(model, x)
    ends = []
    for n in range(1, x.shape[1] + 1):
        start = x[:, :n]
        if mode == "entp":
            hidden = model.encode(start)
        else:
            hidden = masked_hidden(model, start, mode, prefix=prefix)
        ends.append(hidden[:, -1])
    return model.readout(torch.stack(ends, 1))


@torch.no_grad()
def decoder_is_causal(model: Transformer, x: Tensor) -> Finding:
    """T_D = D: a decoder that reads each prefix from scratch says what it says in one pass."""
    difference = _apart(causal_model(model, x, "decoder"), model(x, "decoder"))
    return Finding("T_D = D", difference <= TOLERANCE, {"difference": difference})


@torch.no_grad()
def one_layer_is_one_function(model: Transformer, x: Tensor, prefix: int) -> Finding:
    """With one layer T_E = T_D = T_P: only the last query is read, and it sees every token.

    P, the model with a prefix of p tokens read once, is D from position p on (the p-th included).
    Before it, position i is the encoder's over the whole prefix, E(x_1..x_p)_i, which sees tokens
    after i: P is neither causal nor D there.
    """
    if model.config.layers != 1:
        raise InputError(
            f"this model has {model.config.layers} layers: encoder and decoder are the same "
            "function for one."
        )
    if not 1 <= prefix <= x.shape[1]:
        raise InputError(
            f"prefix {prefix} does not fit {x.shape[1]} tokens: allowed are 1 to {x.shape[1]}."
        )
    decoder = causal_model(model, x, "decoder")
    once = model(x, "prefix-lm", prefix=prefix)
    encoder = model(x[:, :prefix], "prefix-lm", prefix=prefix)
    numbers = {
        "encoder": _apart(causal_model(model, x, "entp"), decoder),
        "prefix-lm": _apart(causal_model(model, x, "prefix-lm", prefix), decoder),
        "prefix read once": _apart(once[:, prefix - 1 :], decoder[:, prefix - 1 :]),
        "inside the prefix": _apart(once[:, :prefix], encoder),
    }
    return Finding("one layer: T_E = T_D = T_P", max(numbers.values()) <= TOLERANCE, numbers)


# What the statements share


def _vector_size(model: Transformer, reads: int) -> int:
    """The size of the model's inputs; InputError unless it can read so many float64 vectors."""
    if model.config.input_dim is None or next(model.parameters()).dtype != torch.float64:
        raise InputError(
            "the theorems are about models that read vectors, compared in float64: set input_dim, "
            "use double()."
        )
    if model.config.has_limit and model.config.context_length < reads:
        told = f"the model needs as many positions, and has {model.config.context_length}"
        raise InputError(f"the statement is about {reads} vectors in a row: {told}.")
    return model.config.input_dim


def _made_up(model: Transformer) -> Tensor:
    """The step from an input at position 1 to the one at position 2 with the same embedding."""
    if not model.config.has_limit or torch.equal(model.positions[0], model.positions[1]):
        raise InputError("this model has p1 = p2: the statement is about models with p1 != p2.")
    assert model.read_in is not None
    weight, gap = model.read_in.weight, model.positions[0] - model.positions[1]
    step = torch.zeros(weight.shape[1], dtype=torch.float64)
    for _ in range(2):  # the second time makes up for the rounding of the first
        step += torch.linalg.lstsq(weight, (gap - weight @ step)[:, None]).solution[:, 0]
    if (gap - weight @ step).norm() > 1e-9 * gap.norm():
        raise InputError(
            "no two inputs of this model make up for p1 - p2, so the theorem says nothing about "
            "it: it is about inputs that positions are added to directly (input_dim = width and an "
            "invertible read_in)."
        )
    return step


def _encode(model: Transformer, x_TD: Tensor) -> Tensor:
    """E(x_1..x_T)_T."""
    return model.readout(model.encode(x_TD[None])[0, -1])


def _draw(seed: int, count: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, dtype=torch.float64, generator=generator)


def _fractions(x_TD: Tensor) -> list[Vector]:
    return [[Fraction(value) for value in row] for row in x_TD.tolist()]


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    largest = torch.maximum(one.abs().max(), other.abs().max())
    if largest == 0:
        return 0.0
    return float((one - other).abs().max() / largest)


def _blocks(model: Transformer) -> list[Block]:
    return cast(list[Block], list(model.blocks))
