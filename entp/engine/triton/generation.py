"""ENTP's generation on a GPU: what EntpCache keeps, at fixed shapes, so that a token is one replay of a CUDA graph.

Sequences stand `size` rows apart, with room for new tokens; rows past a sequence's end are computed and never seen. A graph is
recorded the second time its shapes come and kept for later calls, as long as the model's weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from entp.engine.layout import Strided
from entp.engine.triton.linear import linear
from entp.engine.triton.rows import add_norm
from entp.engine.triton.stack import mlp, norm_of, upper_layers

if TYPE_CHECKING:
    from entp.model import Block, Transformer

SMALLEST = 64
"""Rows per sequence of the smallest graph; beyond it they double, up to what is asked for."""
MOST_KEPT = 4
"""Graphs kept per model: each holds its state and the memory of a step."""


class _Key(NamedTuple):
    """What a recorded step depends on, besides the values of the weights."""

    batch: int
    size: int
    half: torch.dtype | None
    weights: tuple[int, ...]


_kept: WeakKeyDictionary[Transformer, dict[_Key, _Step]] = WeakKeyDictionary()


class FixedEntpCache:
    """EntpCache (entp/engine/caches.py) on CUDA."""

    def __init__(self, model: Transformer, capacity: int) -> None:
        self.model, self.capacity = model, capacity

    def prefill(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """All but the last token of each prompt become state; the last is appended."""
        self.longest = tokens_BT.shape[1]
        self.step = self._step_for(len(tokens_BT))
        self.step.read(self.model, tokens_BT, lengths_B - 1)
        return self.step.append(self.model, tokens_BT.gather(1, lengths_B[:, None] - 1)[:, 0])

    def append(self, new_B: Tensor) -> Tensor:
        """Logits (B, vocab) after one more token per sequence."""
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
        device = next(model.parameters()).device
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        key = _Key(batch, size, half, tuple(p.data_ptr() for p in model.parameters()))
        steps = _kept.setdefault(model, {})
        step = steps.get(key)
        if step is None or step.owner() is not None:
            step = _Step(model, batch, size, half)
            while len(steps) >= MOST_KEPT:
                steps.pop(next(iter(steps)))
            steps[key] = step
        step.owner = ref(self)
        return step


class _Step:
    """Layer 1's state of B sequences of up to `size` tokens, and the step that adds a token to each."""

    def __init__(self, model: Transformer, batch: int, size: int, half: torch.dtype | None) -> None:
        self.batch, self.size, self.half = batch, size, half
        width, heads, weight = model.config.width, model.config.heads, next(model.parameters())
        self.h = weight.new_zeros(batch, size, width)
        self.q, self.k, self.v, self.o = (weight.new_zeros(batch, size, heads, width // heads) for _ in range(4))
        self.z = weight.new_zeros(batch, size, heads)
        self.packing = Strided(torch.zeros(batch, dtype=torch.long, device=weight.device), size)
        self.new = torch.zeros_like(self.packing.length)
        self.sequence = torch.arange(batch, device=weight.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self.used = 0
        self.owner: ReferenceType[FixedEntpCache] | Callable[[], None] = lambda: None

    def read(self, model: Transformer, tokens_BT: Tensor, lengths_B: Tensor) -> None:
        """Forget everything and start with the first lengths (B,) tokens of each row."""
        self.packing.length.copy_(lengths_B)
        time = tokens_BT.shape[1] - 1
        if time < 1:
            return
        h = model.embed(tokens_BT[:, :time])
        q, k, v = self._qkv(model, h)
        padding = (torch.arange(time, device=h.device) >= lengths_B[:, None])[:, None, None]
        with torch.autocast(h.device.type, enabled=False):
            scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(padding, float("-inf"))
            z = scores.logsumexp(-1)
            weight = torch.exp(scores - z[..., None]).nan_to_num(0.0)  # a prompt of one token has no state yet
            o = torch.einsum("bhij,bjhd->bihd", weight, v)
        for kept, value in ((self.h, h), (self.q, q), (self.k, k), (self.v, v), (self.o, o), (self.z, z.transpose(1, 2))):
            kept[:, :time] = value

    def take(self, smaller: _Step) -> None:
        """Continue where a smaller one has no more room."""
        self.packing.length.copy_(smaller.packing.length)
        for name in ("h", "q", "k", "v", "o", "z"):
            getattr(self, name)[:, : smaller.size] = getattr(smaller, name)

    def append(self, model: Transformer, new_B: Tensor) -> Tensor:
        """Logits after one more token per sequence: eager the first time, then recorded, then replayed."""
        self.new.copy_(new_B)
        self.used += 1
        if self.graph is None and self.used > 1 and self.h.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._advance(model)
            self.graph = graph
        if self.graph is None:
            return self._advance(model)
        self.graph.replay()
        assert self.logits is not None
        return self.logits.clone()

    def _advance(self, model: Transformer) -> Tensor:
        """Logits after the tokens in `new`. Autocast's rounded weights belong to the caller: a graph must not keep them."""
        with torch.autocast(self.h.device.type, dtype=self.half, enabled=self.half is not None, cache_enabled=False):
            self._add_token(model)
            return self._predict(model)

    def _add_token(self, model: Transformer) -> None:
        """Layer 1 for one more token per sequence: its row, and its key for every other row."""
        at, sequence = self.packing.length, self.sequence
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

    def _predict(self, model: Transformer) -> Tensor:
        """The rest of layer 1 on all rows, and the layers above it."""
        blocks = cast("list[Block]", list(model.blocks))
        first = blocks[0]
        h, attended = self.h.flatten(0, 1), self.o.flatten(2).flatten(0, 1)
        with torch.autocast(h.device.type, enabled=False):
            y = linear(attended.to(self.half or h.dtype), first.proj.weight)
            h, x = add_norm(h, y, first.proj.bias, norm_of(first.norm_2))
            out = upper_layers(blocks, h, mlp(first, x), self.packing)
        return model.readout(out)

    def _qkv(self, model: Transformer, h_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer 1's scaled q, and k and v, (B, T, H, d) each, in the state's precision."""
        block = cast("Block", model.blocks[0])
        q, k, v = block.split_heads(block.qkv(block.norm_1(h_BTD)).to(self.h.dtype))
        return q * block.scale, k, v
