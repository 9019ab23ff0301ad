"""Generation on CUDA: the state of a cache at fixed shapes, so that a token is one replay of a CUDA graph.

Sequences have room for `size` tokens; what stands past a sequence's end is computed or masked and never seen. A graph is
recorded the second time its shapes come and kept for later calls, as long as the model's weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from entp.attention import attend
from entp.engine.caches import DecoderCache
from entp.engine.layout import Strided

if TYPE_CHECKING:
    from entp.model import Block, Transformer

SMALLEST = 64
"""Tokens per sequence of the smallest graph; beyond it they double, up to what is asked for."""
MOST_KEPT, LARGEST_KEPT = 4, 65_536
"""Graphs kept per model for later calls, and the most rows of one: each holds its state and the memory of a step. Larger ones
are recorded in every call, which costs them little."""


class _Key(NamedTuple):
    """What a recorded step depends on, besides the values of the weights."""

    kind: type
    batch: int
    size: int
    half: torch.dtype | None
    weights: tuple[int, ...]


class _Step:
    """Fixed state of B sequences of up to `size` tokens, and the step that adds a token to each."""

    state: ClassVar[tuple[str, ...]]
    """Names of the tensors that a larger step takes over, each (..., tokens at `axis`, ...)."""
    axis: ClassVar[int]

    def __init__(self, model: Transformer, batch: int, size: int, half: torch.dtype | None) -> None:
        self.batch, self.size, self.half = batch, size, half
        self.device = next(model.parameters()).device
        self.length = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.new = torch.zeros_like(self.length)
        self.sequence = torch.arange(batch, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self.used = 0
        self.owner: ReferenceType[Any] | Callable[[], None] = lambda: None

    def append(self, model: Transformer, new_B: Tensor) -> Tensor:
        """Logits after one more token per sequence: eager the first time, then recorded, then replayed."""
        self.new.copy_(new_B)
        self.used += 1
        if self.graph is None and self.used > 1 and self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
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
        for name in self.state:
            getattr(self, name).narrow(self.axis, 0, smaller.size).copy_(getattr(smaller, name))

    def _advance(self, model: Transformer) -> Tensor:
        """Logits after the tokens in `new`. Autocast's rounded weights belong to the caller: a graph must not keep them."""
        with torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None, cache_enabled=False):
            return self.add_token(model)

    def read(self, model: Transformer, tokens_BT: Tensor, lengths_B: Tensor, prefix_B: Tensor | None) -> Tensor:
        """Forget everything, read the prompts, and return the logits after them."""
        raise NotImplementedError

    def add_token(self, model: Transformer) -> Tensor:
        """Change the state by the tokens in `new`, one more per sequence; the logits after them."""
        raise NotImplementedError


class RecordedCache:
    """A cache (entp/engine/caches.py) whose steps are recorded."""

    kept: ClassVar[WeakKeyDictionary[Transformer, dict[_Key, _Step]]] = WeakKeyDictionary()

    def __init__(self, kind: type[_Step], model: Transformer, capacity: int, prefix_B: Tensor | None = None) -> None:
        self.kind, self.model, self.capacity, self.prefix = kind, model, capacity, prefix_B

    def prefill(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        self.longest = tokens_BT.shape[1]
        self.step = self._step_for(len(tokens_BT))
        return self.step.read(self.model, tokens_BT, lengths_B, self.prefix)

    def append(self, new_B: Tensor) -> Tensor:
        self.longest += 1
        if self.longest > self.step.size:
            larger = self._step_for(self.step.batch)
            larger.take(self.step)
            self.step = larger
        return self.step.append(self.model, new_B)

    def _step_for(self, batch: int) -> _Step:
        """A step with room for the longest sequence: one that was recorded before and is not in use, or a new one."""
        model, size = self.model, SMALLEST
        while size < self.longest:
            size *= 2
        size = min(size, max(self.capacity, self.longest))
        device = next(model.parameters()).device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = _Key(self.kind, batch, size, half, tuple(p.data_ptr() for p in model.parameters()))
        steps = self.kept.setdefault(model, {})
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


class DecoderStep(_Step):
    """Keys and values of every layer, (L, B, H, size, d) each, as DecoderCache keeps them."""

    state, axis = ("keys", "values"), 3

    def __init__(self, model: Transformer, batch: int, size: int, half: torch.dtype | None) -> None:
        super().__init__(model, batch, size, half)
        config, weight = model.config, next(model.parameters())
        shape = (config.layers, batch, config.heads, size, config.width // config.heads)
        self.keys, self.values = (torch.zeros(shape, dtype=half or weight.dtype, device=self.device) for _ in range(2))

    def read(self, model: Transformer, tokens_BT: Tensor, lengths_B: Tensor, prefix_B: Tensor | None) -> Tensor:
        plain = DecoderCache(model, self.size, prefix_B)
        logits = plain.prefill(tokens_BT, lengths_B)
        self.length.copy_(lengths_B)
        for layer, (k, v) in enumerate(zip(plain.keys, plain.values, strict=True)):
            self.keys[layer].copy_(k)
            self.values[layer].copy_(v)
        return logits

    def add_token(self, model: Transformer) -> Tensor:
        at = self.length
        seen = (torch.arange(self.size, device=self.device) <= at[:, None])[:, None, None]
        h = model.embed(self.new[:, None], start=at)
        for block, keys, values in zip(cast("list[Block]", list(model.blocks)), self.keys, self.values, strict=True):
            q, k, v = block.split_heads(block.qkv(block.norm_1(h)))  # (B, 1, H, d) each
            keys[self.sequence, :, at], values[self.sequence, :, at] = k[:, 0], v[:, 0]
            attended = attend(q.transpose(1, 2), keys, values, scale=block.scale, mask=seen)
            h = block.finish(h, attended.transpose(1, 2).flatten(2))
        at += 1
        return model.readout(h[:, 0])


class EntpStep(_Step):
    """Layer 1's embeddings, q, k, v and running softmax, as EntpCache keeps them; the layers above by Triton kernels.

    A prompt's last token is appended after the others are read, so that only one kind of step has to be recorded.
    """

    state, axis = ("h", "q", "k", "v", "o", "z"), 1

    def __init__(self, model: Transformer, batch: int, size: int, half: torch.dtype | None) -> None:
        super().__init__(model, batch, size, half)
        width, heads, weight = model.config.width, model.config.heads, next(model.parameters())
        self.h = weight.new_zeros(batch, size, width)
        self.q, self.k, self.v, self.o = (weight.new_zeros(batch, size, heads, width // heads) for _ in range(4))
        self.z = weight.new_zeros(batch, size, heads)
        self.packing = Strided(self.length, size)

    def read(self, model: Transformer, tokens_BT: Tensor, lengths_B: Tensor, prefix_B: Tensor | None) -> Tensor:
        before = lengths_B - 1
        self.length.copy_(before)
        time = tokens_BT.shape[1] - 1
        if time:
            h = model.embed(tokens_BT[:, :time])
            q, k, v = self._qkv(model, h)
            padding = (torch.arange(time, device=h.device) >= before[:, None])[:, None, None]
            with torch.autocast(h.device.type, enabled=False):
                scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(padding, float("-inf"))
                z = scores.logsumexp(-1)
                weight = torch.exp(scores - z[..., None]).nan_to_num(0.0)  # a prompt of one token has no state yet
                o = torch.einsum("bhij,bjhd->bihd", weight, v)
            for kept, value in ((self.h, h), (self.q, q), (self.k, k), (self.v, v), (self.o, o), (self.z, z.transpose(1, 2))):
                kept[:, :time] = value
        return self.append(model, tokens_BT.gather(1, before[:, None])[:, 0])

    def add_token(self, model: Transformer) -> Tensor:
        from entp.engine.triton.stack import from_first_layer

        at, sequence = self.length, self.sequence
        h = model.embed(self.new[:, None], start=at)
        q, k, v = self._qkv(model, h)
        for kept, value in ((self.h, h), (self.q, q), (self.k, k), (self.v, v)):
            kept[sequence, at] = value[:, 0].to(kept.dtype)
        with torch.autocast(h.device.type, enabled=False):  # it would round the state to half precision
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
        return model.readout(from_first_layer(model, self.h.flatten(0, 1), self.o.flatten(2).flatten(0, 1), self.packing))

    def _qkv(self, model: Transformer, h_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer 1's scaled q, and k and v, (B, T, H, d) each, in the state's precision."""
        block = cast("Block", model.blocks[0])
        q, k, v = block.split_heads(block.qkv(block.norm_1(h_BTD)).to(self.h.dtype))
        return q * block.scale, k, v
