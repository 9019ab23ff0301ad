"""Floating-point operations of a step, by formula.

    # target_mask: bool (B, T), True at (b, t) for the prefix x[b, :t+1]
    step = engine_flops(config, target_mask)
    step.total / seconds / 1e12                 # achieved TFLOP/s

A multiply-add is two operations. Only matrix products and attention are counted, not norms,
activations, softmax or the optimizer. A backward pass is twice the forward: one product for the
inputs' gradient and one for the weights' (attention: four products for two). What is computed a
second time, by a kernel that keeps less or in a second chunk of prefixes, counts once, so the
same work in less time is always a higher rate. A decoder's attention is counted as the full square,
as torch counts it.

The exact engine is counted as docs/engine.md describes it. Layer 1's running softmax costs the
scores of all pairs of tokens up to the longest prefix and one multiply-add per pair and unit of
width for the state that every row reads from; what an implementation adds to that (blocks, for
example) is its own affair.

Names: B sequences, T tokens, M prefixes, N rows (the sum of prefix lengths), L layers, D width,
H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from entp.config import AnyModelConfig, ModelConfig, refresh_of
from entp.engine.refreshed import row_widths
from entp.errors import InputError

STEP = 3
"""A training step in forward passes: itself, and twice as much backward."""


@dataclass(frozen=True)
class Flops:
    """Operations by part."""

    linear: int
    """Products with the blocks' weights, and with those that read vectors in."""
    attention: int
    """Scores, and sums of values."""
    readout: int
    """From the last block to the outputs."""

    @property
    def total(self) -> int:
        return self.linear + self.attention + self.readout


def reference_flops(config: AnyModelConfig, target_mask: Tensor) -> Flops:
    """A training step of the paper's loop: every target's prefix through all layers."""
    lengths = _lengths(target_mask)
    rows, squares = sum(lengths), sum(m * m for m in lengths)
    linear = config.depth * sum(_block(config)) * rows
    attention = 2 * config.depth * config.attention_width * squares
    return _step(config, linear, attention, rows, len(lengths))


def decoder_flops(config: AnyModelConfig, target_mask: Tensor) -> Flops:
    """A training step of the decoder: every token through all layers, outputs at targets."""
    batch, time = target_mask.shape
    linear = config.depth * sum(_block(config)) * batch * time
    attention = 2 * config.depth * config.attention_width * batch * time**2
    return _step(config, linear, attention, batch * time, len(_lengths(target_mask)))


def engine_flops(config: AnyModelConfig, target_mask: Tensor) -> Flops:
    """A training step of the exact engine, `packed` or `triton` (docs/engine.md)."""
    causal = config.causal_layers
    if config.depth - causal == 1:  # ENTP is the decoder
        return decoder_flops(config, target_mask)
    lengths = _lengths(target_mask)
    width, middle = config.attention_width, config.depth - causal - 2
    rows, squares, prefixes = sum(lengths), sum(m * m for m in lengths), len(lengths)
    longest = max(lengths, default=0)
    tokens = target_mask.shape[0] * longest
    qkv, rest = _block(config)
    last_linear, last_attention = _last_layer(config, rows, prefixes)
    # Causal layers: all per token. Layer 1: q, k, v per token, the rest per row. Middle: all per
    # row.
    linear = qkv * tokens + rest * rows + middle * (qkv + rest) * rows + last_linear
    linear += causal * (qkv + rest) * tokens
    first = 2 * (1 + causal) * width * tokens * longest
    attention = first + 2 * middle * width * squares + last_attention
    return _step(config, linear, attention, tokens, prefixes)


def refresh_flops(config: AnyModelConfig, target_mask: Tensor, every: int) -> Flops:
    """A training step in mode refresh-N, N = every: each row like a decoder's, padding included."""
    widths = row_widths(target_mask, every)
    tokens, squares = sum(widths), sum(width * width for width in widths)
    linear = config.depth * sum(_block(config)) * tokens
    attention = 2 * config.depth * config.attention_width * squares
    return _step(config, linear, attention, tokens, len(_lengths(target_mask)))


def mode_flops(config: AnyModelConfig, target_mask: Tensor, mode: str) -> Flops:
    """A training step in this mode, of the exact engine where it is entp."""
    every = refresh_of(mode)
    if mode == "entp":
        return engine_flops(config, target_mask)
    if every is not None:
        return refresh_flops(config, target_mask, every)
    return decoder_flops(config, target_mask)


def token_flops(config: AnyModelConfig, length: int, mode: str) -> Flops:
    """Generation of token number `length` with the cache of its mode, entp or decoder."""
    width, layers = config.attention_width, config.depth
    if config.causal_layers:
        raise InputError(
            "a model with model.causal_layers has no cache: nothing is counted for one."
        )
    qkv, rest = _block(config)
    if mode == "decoder" or layers == 1:
        linear, attention = layers * (qkv + rest), 2 * layers * width * length
    else:
        middle = layers - 2
        last_linear, last_attention = _last_layer(config, length, 1)
        linear = qkv + rest * length + middle * (qkv + rest) * length + last_linear
        first = 4 * width * length  # the new key for every row, and the new row over every key
        attention = first + 2 * middle * width * length**2 + last_attention
    return Flops(2 * linear, 2 * attention, 2 * config.width * _outputs(config))


def _block(config: AnyModelConfig) -> tuple[int, int]:
    """Multiply-adds per row of a block's linear layers: q, k, v, and what follows attention."""
    width, inner = config.width, config.attention_width
    gates = 2 if config.activation == "swiglu" else 1
    qkv = width * (config.heads + 2 * (config.kv_heads or config.heads)) * (inner // config.heads)
    return qkv, width * inner + (gates + 1) * width * config.hidden


def _last_layer(config: AnyModelConfig, rows: int, prefixes: int) -> tuple[int, int]:
    """Multiply-adds of the last block's linear layers and attention.

    All but keys and values are computed for each prefix only.
    Key and value matrices are moved to the query's side, unless something stands between them and
    the scores.
    """
    qkv, rest = _block(config)
    moved = isinstance(config, ModelConfig)  # nothing reads the weights of HuggingFace's modules
    if not moved or config.position_embedding in ("rotary", "relative"):
        return qkv * rows + rest * prefixes, 2 * config.attention_width * rows
    return (3 * config.width**2 + rest) * prefixes, 2 * config.heads * config.width * rows


def _step(config: AnyModelConfig, linear: int, attention: int, read: int, prefixes: int) -> Flops:
    """A step's operations, from the multiply-adds of the blocks' forward pass.

    read: vectors that are read in; prefixes: rows that are read out.
    """
    # Forward and weights: inputs need no gradient.
    read_in = 2 * (config.input_dim or 0) * config.width * read
    readout = STEP * config.width * _outputs(config) * prefixes
    return Flops(2 * (STEP * linear + read_in), 2 * STEP * attention, 2 * readout)


def _outputs(config: AnyModelConfig) -> int:
    return config.outputs or config.vocab or 0


def _lengths(target_mask: Tensor) -> list[int]:
    """The length of every target's prefix."""
    return [int(t) + 1 for t in target_mask.nonzero()[:, 1].tolist()]
