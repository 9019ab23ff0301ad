"""Generation on CUDA: a cache of fixed shapes, so that a token is one replay of a CUDA graph.

Sequences have room for `size` tokens; what stands past a sequence's end is computed or masked and
never seen. A graph is captured the second time its shapes come and kept for later calls, as long as
the model stays what it is and its weights where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from entp.engine.generation.caches import DecoderCache, first_qkv, first_state
from entp.engine.layout import Strided
from entp.engine.masks import attend
from entp.engine.protocol import ModelProtocol, attention_biases
from entp.engine.streams import side_stream
from entp.engine.support import Support, support_of

SMALLEST = 64
"""Tokens per sequence of the smallest graph; beyond it they double, up to what is asked for."""
MOST_KEPT, LARGEST_KEPT = 4, 65_536
"""Graphs kept per model for later calls, and the most rows of one.

Each holds its state and the memory of a step. Larger ones are captured in every call, which costs
them little.
"""


class Prompts(NamedTuple):
    """What a cache reads first."""

    tokens: Tensor
    """(B, T), 0 at padding."""
    lengths: Tensor
    """(B,), the longest T."""
    position_ids: Tensor | None
    """(B, T), or None for 0, 1, 2, ..."""
    prefix: Tensor | None
    """(B,) in mode prefix-lm."""


class _Key(NamedTuple):
    """What a captured step depends on, besides the values of the weights."""

    kind: type
    batch: int
    size: int
    half: torch.dtype | None
    support: Support
    """The state of the model."""
    weights: tuple[tuple[int, bool], ...]


class _Step:
    """Fixed state of B sequences of up to `size` tokens, and the step that adds a token to each."""

    state: ClassVar[tuple[str, ...]]
    """Names of the tensors that a larger step takes over, each (..., tokens at `axis`, ...)."""
    axis: ClassVar[int]

    def __init__(
        self, model: ModelProtocol, batch: int, size: int, half: torch.dtype | None
    ) -> None:
        self.batch, self.size, self.half = batch, size, half
        self.device = _weight(model).device
        self.length = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.new, self.own = torch.zeros_like(self.length), torch.zeros_like(self.length)
        self.ids = torch.zeros(batch, size, dtype=torch.long, device=self.device)
        self.sequence = torch.arange(batch, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        # One stream each: with a graph, torch (2.12 and later) drops the cuBLAS workspaces of the
        # stream it was captured on.
        self.stream = side_stream(self.device) if self.device.type == "cuda" else None
        self.logits: Tensor | None = None
        self.used = 0
        self.owner: ReferenceType[Any] | Callable[[], None] = lambda: None

    def append(
        self, model: ModelProtocol, new_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits after one more token per sequence: eager first, then captured, then replayed."""
        self.new.copy_(new_B)
        own = self.length if position_ids is None else position_ids
        self.own.copy_(own)
        self.used += 1
        if self.graph is None and self.used > 1 and self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self.logits = self._advance(model)
            self.graph = graph
        if self.graph is None:
            return self._advance(model)
        self.graph.replay()
        assert self.logits is not None
        return self.logits.clone()

    def take(self, smaller: _Step) -> None:
        """Continue where a smaller one has no more room."""
        self.length.copy_(smaller.length)
        self.ids[:, : smaller.size].copy_(smaller.ids)
        for name in self.state:
            getattr(self, name).narrow(self.axis, 0, smaller.size).copy_(getattr(smaller, name))

    def _advance(self, model: ModelProtocol) -> Tensor:
        """Logits after the tokens in `new`; a graph must not keep autocast's rounded weights."""
        with torch.autocast(
            self.device.type, dtype=self.half, enabled=self.half is not None, cache_enabled=False
        ):
            return self.add_token(model)

    def read(self, model: ModelProtocol, prompts: Prompts) -> Tensor:
        """Forget everything, read the prompts, and return the logits after them."""
        raise NotImplementedError

    def add_token(self, model: ModelProtocol) -> Tensor:
        """Change the state by the tokens in `new`, one more per sequence; the logits after them."""
        raise NotImplementedError


class CapturedCache:
    """A cache (entp/engine/generation/caches.py) whose steps are captured."""

    kept: ClassVar[WeakKeyDictionary[ModelProtocol, dict[_Key, _Step]]] = WeakKeyDictionary()

    def __init__(
        self, kind: type[_Step], model: ModelProtocol, capacity: int, prefix_B: Tensor | None = None
    ) -> None:
        self.kind, self.model, self.capacity, self.prefix = kind, model, capacity, prefix_B

    def prefill(
        self, tokens_BT: Tensor, lengths_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        self.longest = tokens_BT.shape[1]
        self.step = self._step_for(len(tokens_BT))
        return self.step.read(self.model, Prompts(tokens_BT, lengths_B, position_ids, self.prefix))

    def append(self, new_B: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.longest += 1
        if self.longest > self.step.size:
            larger = self._step_for(self.step.batch)
            larger.take(self.step)
            self.step = larger
        return self.step.append(self.model, new_B, position_ids)

    def _step_for(self, batch: int) -> _Step:
        """A step with room for the longest sequence: one that is kept and not in use, or new."""
        model, size = self.model, SMALLEST
        while size < self.longest:
            size *= 2
        size = min(size, max(self.capacity, self.longest))
        device = _weight(model).device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        support = support_of(model)
        key = _Key(self.kind, batch, size, half, support, tuple(support.fingerprint.weights()))
        steps = self.kept.setdefault(model, {})
        outdated = [old for old in steps if old.support is not support]
        for old in outdated:  # the model has changed since
            del steps[old]
        step = steps.get(key)
        if step is None or step.owner() is not None:
            step = self.kind(model, batch, size, half)
            if batch * size <= LARGEST_KEPT:
                steps.pop(key, None)
                while len(steps) >= MOST_KEPT:
                    steps.pop(next(iter(steps)))
                steps[key] = step
        step.owner = ref(self)
        return step


def _weight(model: Any) -> Tensor:
    """Any of the weights: its type and device are those of all."""
    return next(model.parameters())


class DecoderStep(_Step):
    """Keys and values of every layer, (L, B, KV, size, d) each, as DecoderCache keeps them."""

    state, axis = ("keys", "values"), 3

    def read(self, model: ModelProtocol, prompts: Prompts) -> Tensor:
        plain = DecoderCache(model, self.size, prompts.prefix)
        logits = plain.prefill(prompts.tokens, prompts.lengths, prompts.position_ids)
        self.length.copy_(prompts.lengths)
        if plain.ids is not None:
            self.ids.copy_(plain.ids)
        if not hasattr(self, "keys"):
            self.make_room(plain.keys)
        for layer, (k, v) in enumerate(zip(plain.keys, plain.values, strict=True)):
            self.keys[layer].copy_(k)
            self.values[layer].copy_(v)
        return logits

    def make_room(self, like: list[Tensor]) -> None:
        """Memory for keys and values of every layer, for heads as in these keys (B, KV, any, d)."""
        batch, heads, _, size = like[0].shape
        shape = (len(like), batch, heads, self.size, size)
        self.keys = torch.zeros(shape, dtype=like[0].dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)

    def take(self, smaller: _Step) -> None:
        assert isinstance(smaller, DecoderStep)
        if not hasattr(self, "keys"):
            self.make_room(list(smaller.keys))
        super().take(smaller)

    def add_token(self, model: ModelProtocol) -> Tensor:
        at, own = self.length, self.own[:, None]
        self.ids[self.sequence, at] = self.own
        seen = (torch.arange(self.size, device=self.device) <= at[:, None])[:, None, None]
        biases = attention_biases(model, own, self.ids)
        h = model.embed(self.new[:, None], own)
        layers = zip(model.stack(), biases, self.keys, self.values, strict=True)
        for block, bias, keys, values in layers:
            q, k, v = block.project(h, own)  # (B, 1, H or KV, d) each
            keys[self.sequence, :, at], values[self.sequence, :, at] = k[:, 0], v[:, 0]
            attended = attend(
                q.transpose(1, 2), keys, values, scale=block.scale, mask=seen, bias=bias
            )
            h = block.finish(h, attended.transpose(1, 2).flatten(2))
        at += 1
        return model.readout(h[:, 0])


class EntpStep(_Step):
    """Layer 1's embeddings, q, k, v and online softmax, as EntpCache; Triton kernels above.

    A prompt's last token is appended after the others are read, so that only one kind of step has
    to be captured.
    """

    state, axis = ("h", "q", "k", "v", "o", "z"), 1

    def __init__(
        self, model: ModelProtocol, batch: int, size: int, half: torch.dtype | None
    ) -> None:
        super().__init__(model, batch, size, half)
        width, heads, weight = model.width, model.stack()[0].heads, _weight(model)
        self.h = weight.new_zeros(batch, size, width)
        self.q, self.k, self.v, self.o = (
            weight.new_zeros(batch, size, heads, width // heads) for _ in range(4)
        )
        self.z = weight.new_zeros(batch, size, heads)
        self.packing = Strided(self.length, size)

    def read(self, model: ModelProtocol, prompts: Prompts) -> Tensor:
        before = prompts.lengths - 1
        self.length.copy_(before)
        time = prompts.tokens.shape[1] - 1
        last = prompts.position_ids
        if time:
            ids = None if last is None else last[:, :time]
            h = model.embed(prompts.tokens[:, :time], ids)
            if ids is None:
                ids = torch.arange(time, device=h.device)
            q, k, v = first_qkv(model, h, ids)
            z, o = first_state(q, k, v, None, before)
            self.ids[:, :time] = ids
            for name, value in zip(self.state, (h, q, k, v, o, z), strict=True):
                getattr(self, name)[:, :time] = value
        own = None if last is None else last.gather(1, before[:, None])[:, 0]
        return self.append(model, prompts.tokens.gather(1, before[:, None])[:, 0], own)

    def add_token(self, model: ModelProtocol) -> Tensor:
        from entp.engine.triton.stack import from_first_layer

        at, sequence, own = self.length, self.sequence, self.own[:, None]
        h = model.embed(self.new[:, None], own)
        q, k, v = (x.to(self.h.dtype) for x in first_qkv(model, h, own))
        for kept, value in ((self.h, h), (self.q, q), (self.k, k), (self.v, v)):
            kept[sequence, at] = value[:, 0].to(kept.dtype)
        self.ids[sequence, at] = self.own
        # Autocast would round the state to half precision.
        with torch.autocast(h.device.type, enabled=False):
            score = (self.q * k).sum(-1)
            self.z.copy_(torch.logaddexp(self.z, score))
            self.o += torch.exp(score - self.z)[..., None] * (v - self.o)
            seen = torch.arange(self.size, device=at.device) <= at[:, None]
            scores = (q * self.k).sum(-1).masked_fill(~seen[..., None], float("-inf"))
            z = scores.logsumexp(1)
            self.z[sequence, at] = z
            self.o[sequence, at] = (torch.exp(scores - z[:, None])[..., None] * self.v).sum(1)
        at += 1
        self.packing.moved()
        rows, attended = self.h.flatten(0, 1), self.o.flatten(2).flatten(0, 1)
        out = from_first_layer(model, rows, attended, self.packing, self.ids.flatten())
        return model.readout(out)
