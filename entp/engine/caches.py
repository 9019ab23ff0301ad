"""What generation keeps between tokens: nothing (the definition), keys and values, or ENTP's running first layer.

    cache = EntpCache(model, capacity=20)
    logits = cache.prefill(tokens, lengths)     # tokens (B, T), 0 at padding; lengths (B,), the longest T; logits (B, vocab)
    logits = cache.append(new)                  # new (B,): one more token per sequence, each at its own position

Names: B sequences, T tokens, D width, H heads, d head size; `capacity`: most tokens per sequence that will be read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from entp.attention import attend, visible
from entp.engine.layout import Packing, pack
from entp.engine.packed import upper_layers

if TYPE_CHECKING:
    from entp.model import Block, Transformer


class Cache(Protocol):
    """What `generate` needs: the logits (B, vocab) after the prompts, then after each new token."""

    def prefill(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor: ...

    def append(self, new_B: Tensor) -> Tensor: ...


class NoCache:
    """Nothing is kept: each step reads all tokens again. The definition that the other caches are compared with."""

    def __init__(self, model: Transformer, mode: str, prefix_B: Tensor | None = None) -> None:
        self.model, self.mode, self.prefix = model, mode, prefix_B

    def prefill(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        self.tokens, self.lengths = tokens_BT, lengths_B
        return self._predict()

    def append(self, new_B: Tensor) -> Tensor:
        self.tokens = F.pad(self.tokens, (0, 1)).scatter(1, self.lengths[:, None], new_B[:, None])
        self.lengths = self.lengths + 1
        return self._predict()

    def _predict(self) -> Tensor:
        last = _one_hot(self.lengths, self.tokens.shape[1])
        return self.model(self.tokens, mode=self.mode, at=last, lengths=self.lengths, prefix=self.prefix, impl="reference")


class DecoderCache:
    """Keys and values of every layer, each (B, H, capacity, d): modes decoder and, with a prefix (B,), prefix."""

    def __init__(self, model: Transformer, capacity: int, prefix_B: Tensor | None = None) -> None:
        self.model, self.capacity, self.prefix = model, capacity, prefix_B
        self.blocks = _blocks(model)

    def prefill(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        batch, time = tokens_BT.shape
        # Padding lies after every real query and every prefix, so either mask hides it.
        mask = None if self.prefix is None else visible("prefix", time, prefix=self.prefix)[:, None]
        h = self.model.embed(tokens_BT)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for block in self.blocks:
            q, k, v = (part.transpose(1, 2) for part in block.split_heads(block.qkv(block.norm_1(h))))
            self.keys.append(F.pad(k, (0, 0, 0, self.capacity - time)))
            self.values.append(F.pad(v, (0, 0, 0, self.capacity - time)))
            attended = attend(q, k, v, scale=block.scale, mask=mask, causal=mask is None)
            h = block.finish(h, attended.transpose(1, 2).flatten(2))
        self.lengths, self.longest = lengths_B, time
        return self.model.readout(h[torch.arange(batch, device=h.device), lengths_B - 1])

    def append(self, new_B: Tensor) -> Tensor:
        at, self.lengths, self.longest = self.lengths, self.lengths + 1, self.longest + 1
        sequence = torch.arange(len(at), device=at.device)
        seen = (torch.arange(self.longest, device=at.device) < self.lengths[:, None])[:, None, None]
        h = self.model.embed(new_B[:, None], start=at)
        for block, keys, values in zip(self.blocks, self.keys, self.values, strict=True):
            q, k, v = block.split_heads(block.qkv(block.norm_1(h)))  # (B, 1, H, d) each
            keys[sequence, :, at], values[sequence, :, at] = k[:, 0], v[:, 0]
            known = (keys[:, :, : self.longest], values[:, :, : self.longest])
            attended = attend(q.transpose(1, 2), *known, scale=block.scale, mask=seen)
            h = block.finish(h, attended.transpose(1, 2).flatten(2))
        return self.model.readout(h[:, 0])


class EntpCache:
    """What a new token leaves valid in ENTP: the embeddings and layer 1's q, k, v and running softmax.

    Row i of layer 1 keeps z_i = log sum_j exp s_ij and o_i = sum_j exp(s_ij - z_i) v_j over the keys so far. A new key m
    gives z' = log(exp z + exp s_im) and o' = o + exp(s_im - z') (v_m - o). Layers 2..L depend on all of it and run again.
    Needs at least two layers: with one, ENTP is the decoder. State is (B, capacity, ...), in fp32 or wider.
    """

    def __init__(self, model: Transformer, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        self.block = _blocks(model)[0]

    def prefill(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        time = tokens_BT.shape[1]
        h = self.model.embed(tokens_BT)
        q, k, v = self._first_qkv(h)
        padding = (torch.arange(time, device=h.device) >= lengths_B[:, None])[:, None, None]
        with torch.autocast(h.device.type, enabled=False):  # it would round the state to half precision
            scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(padding, float("-inf"))
            z = scores.logsumexp(-1)
            o = torch.einsum("bhij,bjhd->bihd", torch.exp(scores - z[..., None]), v)
        room = self.capacity - time
        self.h, self.z = F.pad(h, (0, 0, 0, room)), F.pad(z.transpose(1, 2), (0, 0, 0, room))
        self.q, self.k, self.v, self.o = (F.pad(part, (0, 0, 0, 0, 0, room)) for part in (q, k, v, o))
        self.packing = pack(_one_hot(lengths_B, time))
        self.lengths, self.longest = lengths_B, time
        self.caller_order = torch.argsort(self.packing.sequence)
        return self._predict()

    def append(self, new_B: Tensor) -> Tensor:
        at, self.lengths, self.longest = self.lengths, self.lengths + 1, self.longest + 1
        sequence = torch.arange(len(at), device=at.device)
        h = self.model.embed(new_B[:, None], start=at)
        q, k, v = self._first_qkv(h)
        for kept, new in ((self.h, h), (self.q, q), (self.k, k), (self.v, v)):
            kept[sequence, at] = new[:, 0]
        self._add_key(k, v)
        self.z[sequence, at], self.o[sequence, at] = self._new_row(q)
        self.packing = _one_longer(self.packing)
        return self._predict()

    def _first_qkv(self, h_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer 1's scaled q, and k and v, (B, T, H, d) each, in the state's precision."""
        qkv = self.block.qkv(self.block.norm_1(h_BTD))
        q, k, v = self.block.split_heads(qkv.to(torch.promote_types(qkv.dtype, torch.float32)))
        return q * self.block.scale, k, v

    def _add_key(self, k_B1Hd: Tensor, v_B1Hd: Tensor) -> None:
        """Let every row see one more key. Rows past a sequence's end change too: they are set when their token comes."""
        q, z, o = (state[:, : self.longest] for state in (self.q, self.z, self.o))
        score = (q * k_B1Hd).sum(-1)
        z.copy_(torch.logaddexp(z, score))
        o += torch.exp(score - z)[..., None] * (v_B1Hd - o)

    def _new_row(self, q_B1Hd: Tensor) -> tuple[Tensor, Tensor]:
        """z (B, H) and o (B, H, d) of the newest token over all keys of its sequence."""
        k, v = self.k[:, : self.longest], self.v[:, : self.longest]
        padding = torch.arange(self.longest, device=k.device) >= self.lengths[:, None]
        scores = (q_B1Hd * k).sum(-1).masked_fill(padding[..., None], float("-inf"))
        z = scores.logsumexp(1)
        return z, (torch.exp(scores - z[:, None])[..., None] * v).sum(1)

    def _predict(self) -> Tensor:
        """The rest of layer 1 on each row and the layers above it: logits (B, vocab)."""
        row = self.packing.sequence[self.packing.row_prefix] * self.capacity + self.packing.row_token
        h_ND = self.h.flatten(0, 1)[row]
        attended_ND = self.o.flatten(2).flatten(0, 1)[row].to(h_ND.dtype)
        out = upper_layers(self.model, self.block.finish(h_ND, attended_ND), self.packing)
        return self.model.readout(out[self.caller_order])


def _one_longer(packing: Packing) -> Packing:
    """The packing after one more token in every sequence: the order by length stays."""
    return replace(packing, length=packing.length + 1, groups=tuple((m + 1, count) for m, count in packing.groups))


def _one_hot(lengths_B: Tensor, time: int) -> Tensor:
    """Bool (B, time): True at the last token of each sequence."""
    return torch.arange(time, device=lengths_B.device) == lengths_B[:, None] - 1


def _blocks(model: Transformer) -> list[Block]:
    return cast("list[Block]", list(model.blocks))
