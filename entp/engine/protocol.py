"""What the engine needs of a model, and nothing more.

Any `torch.nn.Module` with these members can be run by `entp.all_prefixes`, `entp.predict` and
`entp.generate` (docs/change-the-model.md has one in 40 lines). `encode` defines what the model
computes. The other methods let the engine compute the same with less work; support.py says when
that is exact.

Position ids are whole numbers, one per token. They may depend on the token and on earlier ones,
never on later ones. Shapes in names: B batch, T time, D width, H heads, KV key and value heads,
d head size, ... any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class BlockProtocol(Protocol):
    """One layer: q, k, v of each row by itself, attention, and what follows, again by row."""

    heads: int
    """Query heads, H."""
    scale: float
    """What scores are multiplied by."""

    def project(self, h: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (..., H, d), k, v (..., KV, d) from rows (..., D) at positions (...); KV divides H."""

    def finish(self, h: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (..., D) from its input and its attention's output, both (..., D)."""


@runtime_checkable
class ModelProtocol(Protocol):
    """A model. Inputs are checked against vocab, input_dim and context_length, if it has them."""

    width: int
    """D."""

    def encode(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The last layer's output (B, T, D) with full attention: the model's own forward pass.

        For modes decoder and prefix-lm it also takes mask (bool, (B or 1, T, T), True where a key
        is seen) and causal (bool).
        """

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The first layer's input (B, T, D), of each token by itself; with causal layers that run
        in every mode (`causal_stack`), of each token and earlier ones.

        position_ids: (B, T) or (T,), or None for 0, 1, 2, ...
        """

    def stack(self) -> Sequence[BlockProtocol]:
        """The layers in the order in which they run; one may come several times."""

    def readout(self, h: Tensor) -> Tensor:
        """Outputs (..., K) from the last layer's rows (..., D)."""


class HasBias(Protocol):
    """A model that adds a bias to attention scores, which depends on positions only."""

    def attention_bias(
        self, query_ids: Tensor, key_ids: Tensor
    ) -> Tensor | Sequence[Tensor | None] | None:
        """(B or 1, H or 1, Q, K) from position ids (Q,) and (K,), or (B, Q) and (B, K): the same
        in every layer, or a list with one for each layer of the stack, None where it has none.
        Whether there is one may not depend on the ids.

        A finite number, such as -1e30, hides a key: with -inf, layer 1's online softmax is NaN.
        """


def attention_biases(
    model: ModelProtocol, query_ids: Tensor, key_ids: Tensor
) -> Sequence[Tensor | None]:
    """The bias on attention scores of each layer of the stack, None where it has none."""
    make = getattr(model, "attention_bias", None)
    found = None if make is None else make(query_ids, key_ids)
    if found is None or isinstance(found, Tensor):
        return [found] * len(model.stack())
    return found


def causal_stack(model: ModelProtocol) -> Sequence[BlockProtocol]:
    """Layers inside `embed` that are causal in every mode, if the model has such."""
    make = getattr(model, "causal_stack", None)
    return () if make is None else make()


def all_layers(model: ModelProtocol) -> list[BlockProtocol]:
    """Those inside `embed` and the stack, in the order in which they run."""
    return [*causal_stack(model), *model.stack()]


def depth(model: ModelProtocol) -> int:
    """Layers that an input goes through."""
    return len(all_layers(model))
