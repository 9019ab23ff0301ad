"""Generation in mode refresh-N: a decoder's cache, made anew every N tokens with full attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from entp.engine.generation.caches import DecoderCache
from entp.engine.protocol import ModelProtocol
from entp.engine.refreshed import first_tokens


class RefreshCache(DecoderCache):
    """Keys and values of every layer; those of a sequence are computed anew when its length is a
    multiple of `every`, with all of it as the prefix."""

    def __init__(self, model: ModelProtocol, capacity: int, every: int) -> None:
        super().__init__(model, capacity)
        self.every = every

    def prefill(
        self, tokens_BT: Tensor, lengths_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        room = self.capacity - tokens_BT.shape[1]
        self.tokens = F.pad(tokens_BT, (0, room))
        self.own_ids = None if position_ids is None else F.pad(position_ids, (0, room))
        self.counts = lengths_B.tolist()  # what is due is known without asking the device
        self.prefix = first_tokens(lengths_B, self.every)
        return super().prefill(tokens_BT, lengths_B, position_ids)

    def append(self, new_B: Tensor, position_ids: Tensor | None = None) -> Tensor:
        sequence = torch.arange(len(new_B), device=new_B.device)
        self.tokens[sequence, self.lengths] = new_B
        if self.own_ids is not None and position_ids is not None:
            self.own_ids[sequence, self.lengths] = position_ids
        self.counts = [count + 1 for count in self.counts]
        due = [n for n, count in enumerate(self.counts) if count % self.every == 0]
        if len(due) == len(self.counts):
            self.prefix = self.lengths + 1
            return super().prefill(*self._all_of(sequence, self.lengths + 1))
        logits = super().append(new_B, position_ids)
        if due:
            rows = torch.tensor(due, device=new_B.device)
            anew = DecoderCache(self.model, self.capacity, self.lengths[rows])
            logits[rows] = anew.prefill(*self._all_of(rows, self.lengths[rows])).to(logits.dtype)
            for kept, new in ((self.keys, anew.keys), (self.values, anew.values)):
                for one, other in zip(kept, new, strict=True):
                    one[rows] = other
        return logits

    def _all_of(self, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What these sequences have read, their lengths, and position ids."""
        longest = max(self.counts)
        ids = None if self.own_ids is None else self.own_ids[rows, :longest]
        return self.tokens[rows, :longest], lengths, ids
