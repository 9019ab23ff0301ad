"""What generation keeps between tokens: nothing, keys and values, or ENTP's first layer.

    cache = EntpCache(model, capacity=20)
    # tokens (B, T), 0 at padding; lengths (B,), the longest T; logits (B, vocab)
    logits = cache.prefill(tokens, lengths)
    # new (B,): one more token per sequence, each at its own position
    logits = cache.append(new)

Both take position ids, (B, T) and (B,), where those are not 0, 1, 2, ...

Names: B sequences, T tokens, D width, H heads, d head size; `capacity`: most tokens per sequence
that will be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from entp.engine.api import predict
from entp.engine.layout import Packing, pack
from entp.engine.masks import attend, visible
from entp.engine.packed import Positions, upper_layers
from entp.engine.protocol import ModelProtocol, attention_biases


class Cache(Protocol):
    """Logits (B, vocab) after the prompts, then after each new token."""

    def prefill(
        self, tokens_BT: Tensor, lengths_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor: ...

    def append(self, new_B: Tensor, position_ids: Tensor | None = None) -> Tensor: ...


class NoCache:
    """Nothing is kept: each step reads all tokens. The other caches are compared with this."""

    def __init__(self, model: ModelProtocol, mode: str, prefix_B: Tensor | None = None) -> None:
        self.model, self.mode, self.prefix = model, mode, prefix_B

    def prefill(
        self, tokens_BT: Tensor, lengths_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        self.tokens, self.lengths, self.ids = tokens_BT, lengths_B, position_ids
        return self._predict()

    def append(self, new_B: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.tokens = _with_one_more(self.tokens, self.lengths, new_B)
        if self.ids is not None and position_ids is not None:
            self.ids = _with_one_more(self.ids, self.lengths, position_ids)
        self.lengths = self.lengths + 1
        return self._predict()

    def _predict(self) -> Tensor:
        last = _one_hot(self.lengths, self.tokens.shape[1])
        return predict(
            self.model,
            self.tokens,
            self.mode,
            at=last,
            lengths=self.lengths,
            prefix=self.prefix,
            position_ids=self.ids,
            impl="reference",
        )


class SlidingCache:
    """Another cache until a sequence fills the model's context. From then on the last `limit`
    tokens are read again for each token, the first of them at position 0."""

    def __init__(
        self, model: ModelProtocol, mode: str, limit: int, inner: Cache, prefix_B: Tensor | None
    ) -> None:
        self.model, self.mode, self.limit, self.inner = model, mode, limit, inner
        self.prefix = prefix_B

    def prefill(
        self, tokens_BT: Tensor, lengths_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        self.tokens, self.lengths = tokens_BT, lengths_B
        if tokens_BT.shape[1] <= self.limit:
            return self.inner.prefill(tokens_BT, lengths_B)
        return self._predict()

    def append(self, new_B: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.tokens = _with_one_more(self.tokens, self.lengths, new_B)
        self.lengths = self.lengths + 1
        if self.tokens.shape[1] <= self.limit:
            return self.inner.append(new_B)
        return self._predict()

    def _predict(self) -> Tensor:
        """Logits after the last tokens of each sequence; earlier ones are forgotten."""
        dropped = (self.lengths - self.limit).clamp(min=0)
        kept = dropped[:, None] + torch.arange(self.limit, device=dropped.device)
        self.tokens = self.tokens.gather(1, kept)
        self.lengths = self.lengths - dropped
        if self.prefix is not None:
            self.prefix = (self.prefix - dropped).clamp(min=1)
        last = _one_hot(self.lengths, self.limit)
        return predict(
            self.model, self.tokens, self.mode, at=last, lengths=self.lengths, prefix=self.prefix
        )


class DecoderCache:
    """Keys and values of every layer, (B, KV, capacity, d); prefix_B makes the mode prefix-lm."""

    def __init__(self, model: ModelProtocol, capacity: int, prefix_B: Tensor | None = None) -> None:
        self.model, self.capacity, self.prefix = model, capacity, prefix_B
        self.blocks = list(model.stack())

    def prefill(
        self, tokens_BT: Tensor, lengths_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        batch, time = tokens_BT.shape
        room = self.capacity - time
        mask = None
        if self.prefix is not None:
            # Padding lies after every real query and every prefix: this mask hides it too.
            mask = visible("prefix-lm", time, prefix=self.prefix)[:, None]
        h = self.model.embed(tokens_BT, position_ids)
        ids = torch.arange(time, device=h.device) if position_ids is None else position_ids
        biases = attention_biases(self.model, ids, ids)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for block, bias in zip(self.blocks, biases, strict=True):
            q, k, v = (x.transpose(1, 2) for x in block.project(h, ids))
            self.keys.append(F.pad(k, (0, 0, 0, room)))
            self.values.append(F.pad(v, (0, 0, 0, room)))
            attended = attend(q, k, v, scale=block.scale, mask=mask, causal=mask is None, bias=bias)
            h = block.finish(h, attended.transpose(1, 2).flatten(2))
        self.ids: Tensor | None = None
        if any(bias is not None for bias in biases):
            self.ids = F.pad(ids.expand(batch, time), (0, room))
        self.lengths, self.longest = lengths_B, time
        return self.model.readout(h[torch.arange(batch, device=h.device), lengths_B - 1])

    def append(self, new_B: Tensor, position_ids: Tensor | None = None) -> Tensor:
        at, self.lengths, self.longest = self.lengths, self.lengths + 1, self.longest + 1
        ids = at if position_ids is None else position_ids
        own = ids[:, None]
        sequence = torch.arange(len(at), device=at.device)
        seen = (torch.arange(self.longest, device=at.device) < self.lengths[:, None])[:, None, None]
        biases: Sequence[Tensor | None] = [None] * len(self.blocks)
        if self.ids is not None:
            self.ids[sequence, at] = own[:, 0]
            biases = attention_biases(self.model, own, self.ids[:, : self.longest])
        h = self.model.embed(new_B[:, None], own)
        layers = zip(self.blocks, biases, self.keys, self.values, strict=True)
        for block, bias, keys, values in layers:
            q, k, v = block.project(h, own)  # (B, 1, H or KV, d) each
            keys[sequence, :, at], values[sequence, :, at] = k[:, 0], v[:, 0]
            known = (keys[:, :, : self.longest], values[:, :, : self.longest])
            attended = attend(q.transpose(1, 2), *known, scale=block.scale, mask=seen, bias=bias)
            h = block.finish(h, attended.transpose(1, 2).flatten(2))
        return self.model.readout(h[:, 0])


class EntpCache:
    """What a new token leaves valid in ENTP: embeddings, layer 1's q, k, v and online softmax.

    Row i of layer 1 keeps z_i = log sum_j exp s_ij and o_i = sum_j exp(s_ij - z_i) v_j over the
    keys so far. A new key m gives z' = log(exp z + exp s_im) and o' = o + exp(s_im - z') (v_m - o).
    Layers 2..L depend on all of it and run again. Needs at least two layers: with one, ENTP is the
    decoder. State is (B, capacity, ...), in fp32 or wider.
    """

    def __init__(self, model: ModelProtocol, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        self.block = model.stack()[0]

    def prefill(
        self, tokens_BT: Tensor, lengths_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        batch, time = tokens_BT.shape
        h = self.model.embed(tokens_BT, position_ids)
        ids = torch.arange(time, device=h.device) if position_ids is None else position_ids
        q, k, v = first_qkv(self.model, h, ids)
        biases = attention_biases(self.model, ids, ids)
        z, o = first_state(q, k, v, biases[0], lengths_B)
        room = self.capacity - time
        self.h, self.z = F.pad(h, (0, 0, 0, room)), F.pad(z, (0, 0, 0, room))
        self.q, self.k, self.v, self.o = (F.pad(x, (0, 0, 0, 0, 0, room)) for x in (q, k, v, o))
        self.ids: Tensor | None = None
        if position_ids is not None or any(bias is not None for bias in biases):
            self.ids = F.pad(ids.expand(batch, time), (0, room))
        self.packing = pack(_one_hot(lengths_B, time))
        self.lengths, self.longest = lengths_B, time
        self.caller_order = torch.argsort(self.packing.sequence)
        return self._predict()

    def append(self, new_B: Tensor, position_ids: Tensor | None = None) -> Tensor:
        at, self.lengths, self.longest = self.lengths, self.lengths + 1, self.longest + 1
        ids = at if position_ids is None else position_ids
        own = ids[:, None]
        sequence = torch.arange(len(at), device=at.device)
        h = self.model.embed(new_B[:, None], own)
        q, k, v = first_qkv(self.model, h, own)
        for kept, new in ((self.h, h), (self.q, q), (self.k, k), (self.v, v)):
            kept[sequence, at] = new[:, 0]
        if self.ids is not None:
            self.ids[sequence, at] = own[:, 0]
        self._add_key(k, v, own)
        self.z[sequence, at], self.o[sequence, at] = self._new_row(q, own)
        self.packing = _one_longer(self.packing)
        return self._predict()

    def _add_key(self, k_B1Hd: Tensor, v_B1Hd: Tensor, own_B1: Tensor) -> None:
        """Let every row see one more key; rows past the end are set when their token comes."""
        q, z, o = (state[:, : self.longest] for state in (self.q, self.z, self.o))
        score = (q * k_B1Hd).sum(-1)
        bias = self._biases(self._known_ids(), own_B1)[0]
        if bias is not None:
            score = score + bias[..., 0].mT
        z.copy_(torch.logaddexp(z, score))
        o += torch.exp(score - z)[..., None] * (v_B1Hd - o)

    def _new_row(self, q_B1Hd: Tensor, own_B1: Tensor) -> tuple[Tensor, Tensor]:
        """z (B, H) and o (B, H, d) of the newest token over all keys of its sequence."""
        k, v = self.k[:, : self.longest], self.v[:, : self.longest]
        padding = torch.arange(self.longest, device=k.device) >= self.lengths[:, None]
        scores = (q_B1Hd * k).sum(-1)
        bias = self._biases(own_B1, self._known_ids())[0]
        if bias is not None:
            scores = scores + bias[:, :, 0].mT
        scores = scores.masked_fill(padding[..., None], float("-inf"))
        z = scores.logsumexp(1)
        return z, (torch.exp(scores - z[:, None])[..., None] * v).sum(1)

    def _known_ids(self) -> Tensor:
        """Position ids of the tokens so far, (B, longest) or (longest,)."""
        if self.ids is None:
            return torch.arange(self.longest, device=self.h.device)
        return self.ids[:, : self.longest]

    def _biases(self, query_ids: Tensor, key_ids: Tensor) -> Sequence[Tensor | None]:
        """Each layer's bias on scores; none without ids, which are kept wherever there is one."""
        if self.ids is None:
            return [None] * len(self.model.stack())
        return attention_biases(self.model, query_ids, key_ids)

    def _predict(self) -> Tensor:
        """The rest of layer 1 on each row and the layers above it: logits (B, vocab)."""
        packing = self.packing
        row = packing.sequence[packing.row_prefix] * self.capacity + packing.row_token
        h_ND = self.h.flatten(0, 1)[row]
        attended_ND = self.o.flatten(2).flatten(0, 1)[row].to(h_ND.dtype)
        ids, row_ids = self._known_ids(), packing.row_token
        if self.ids is not None:
            row_ids = self.ids.flatten()[row]
        positions = Positions(ids, row_ids, self._biases(ids, ids))
        out = upper_layers(self.model, self.block.finish(h_ND, attended_ND), packing, positions)
        return self.model.readout(out[self.caller_order])


def first_qkv(
    model: ModelProtocol, h_BTD: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer 1's scaled q, and k and v, (B, T, H, d) each, in fp32 or wider."""
    block = model.stack()[0]
    q, k, v = (
        x.to(torch.promote_types(x.dtype, torch.float32))
        for x in block.project(h_BTD, position_ids)
    )
    if k.shape[2] != q.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return q * block.scale, k, v


def first_state(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lengths_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Layer 1's z (B, T, H) and o (B, T, H, d) over each sequence's keys; 0 if it has none."""
    padding = (torch.arange(q.shape[1], device=q.device) >= lengths_B[:, None])[:, None, None]
    with torch.autocast(q.device.type, enabled=False):  # it would round the state to half precision
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(padding, float("-inf"))
        z = scores.logsumexp(-1)
        # A sequence of no tokens has no state yet.
        weight = torch.exp(scores - z[..., None]).nan_to_num(0.0)
        return z.transpose(1, 2), torch.einsum("bhij,bjhd->bihd", weight, v)


def _one_longer(packing: Packing) -> Packing:
    """The packing after one more token in every sequence: the order by length stays."""
    groups = tuple((m + 1, count) for m, count in packing.groups)
    return replace(packing, length=packing.length + 1, groups=groups)


def _one_hot(lengths_B: Tensor, time: int) -> Tensor:
    """Bool (B, time): True at the last token of each sequence."""
    return torch.arange(time, device=lengths_B.device) == lengths_B[:, None] - 1


def _with_one_more(rows_BT: Tensor, lengths_B: Tensor, new_B: Tensor) -> Tensor:
    """(B, T + 1): each row with one more number at its length."""
    return F.pad(rows_BT, (0, 1)).scatter(1, lengths_B[:, None], new_B[:, None])
