"""Generation in the three modes, for prompts of different lengths in one batch.

entp.generate(model, [[3, 1, 4], [1, 5]], max_new_tokens=8)                       # lists: prompts with continuations
entp.generate(model, tokens, 8, "decoder", temperature=0.8, top_p=0.9, seed=0)    # (B, T) to (B, T + 8)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from entp.attention import as_prefix
from entp.config import MODES, ModelConfig
from entp.engine.api import choose
from entp.engine.caches import Cache, DecoderCache, EntpCache, NoCache
from entp.errors import InputError, one_of

if TYPE_CHECKING:
    from entp.model import Transformer

Prompts = TypeVar("Prompts", Tensor, list[list[int]])


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits; checks itself."""

    temperature: float = 0.0
    """0 takes the best token; otherwise logits are divided by it."""
    top_k: int | None = None
    """Only the k best tokens can be drawn."""
    top_p: float | None = None
    """Only the fewest best tokens whose probabilities (after temperature and top_k) reach p together can be drawn."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}: allowed are 0 (the best token) and positive numbers.")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}: it must be at least 1; leave it out to draw from all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}: it must be above 0 and at most 1; leave it out to draw from all tokens.")


@torch.no_grad()  # not inference_mode: the caller may train on the tokens
def generate(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    mode: str = "entp",
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | None = None,
    prefix: Tensor | np.ndarray | Sequence[int] | int | None = None,
    cache: bool = True,
) -> Prompts:
    """Continue each prompt by max_new_tokens tokens.

    prompts: token ids (B, T) -> (B, T + max_new_tokens), with `stop` repeated to the end after a stop token; or lists of ids,
        of any lengths -> lists of ids, each ending with its stop token if it drew one.
    temperature, top_k, top_p: see Sampling. seed: makes drawing repeatable; None draws from torch's global generator.
    prefix: in mode prefix, how many first tokens see each other (an int, or one per prompt); None: the whole prompt.
    cache: False reads everything again for each token: slower, and the same tokens.
    """
    sampling = Sampling(temperature, top_k, top_p)
    vocab = _vocabulary(model.config)
    rows = _as_lists(prompts)
    _check(model.config, vocab, rows, max_new_tokens, mode, stop)
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    first = _prefix_lengths(prefix, rows).to(device) if mode == "prefix" else None
    kept = make_cache(model, mode, max(map(len, rows)) + max_new_tokens - 1, first, cache)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    new = _continue(kept, _padded(rows).to(device), lengths, max_new_tokens, sampling, generator, stop)
    if isinstance(prompts, Tensor):
        return torch.cat([prompts.long(), new.to(prompts.device)], dim=1)
    return [row + _cut(more, stop) for row, more in zip(rows, new.tolist(), strict=True)]


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """One token per row (B,) from logits (B, vocab)."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    wide = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    scores = wide / max(sampling.temperature, 1e-30)  # a smaller one would become 0 in fp32
    ranked, token = scores.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ranked[:, sampling.top_k :] = float("-inf")
    if sampling.top_p is not None:
        probability = ranked.softmax(-1)
        ranked = ranked.masked_fill(probability.cumsum(-1) - probability >= sampling.top_p, float("-inf"))
    probability = torch.zeros_like(scores).scatter(1, token, ranked.softmax(-1))
    return torch.multinomial(probability, 1, generator=generator)[:, 0]


def make_cache(model: Transformer, mode: str, capacity: int, prefix_B: Tensor | None = None, cache: bool = True) -> Cache:
    """What generation in a mode keeps between tokens, on the model's device, for up to `capacity` tokens read."""
    if not cache:
        return NoCache(model, mode, prefix_B)
    device = next(model.parameters()).device
    decoder = mode != "entp" or model.config.layers == 1  # one layer: ENTP and decoder are the same function
    if device.type == "cuda" and (decoder or choose("auto", device, model).impl == "triton"):
        from entp.engine.recorded import DecoderStep, EntpStep, RecordedCache

        return RecordedCache(DecoderStep if decoder else EntpStep, model, capacity, prefix_B)
    return DecoderCache(model, capacity, prefix_B) if decoder else EntpCache(model, capacity)


def _continue(
    cache: Cache,
    tokens_BT: Tensor,
    lengths_B: Tensor,
    steps: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    stop: int | None,
) -> Tensor:
    """New tokens (B, steps); after a stop token only stop tokens. The last token drawn is never read."""
    new = tokens_BT.new_full((len(tokens_BT), steps), 0 if stop is None else stop)
    stopped = torch.zeros_like(lengths_B, dtype=torch.bool)
    for step in range(steps):
        logits = cache.append(new[:, step - 1]) if step else cache.prefill(tokens_BT, lengths_B)
        token = pick(logits, sampling, generator)
        new[:, step] = token if stop is None else token.masked_fill(stopped, stop)
        if stop is not None:
            stopped = stopped | (token == stop)
            if bool(stopped.all()):
                break
    return new


def _cut(tokens: list[int], stop: int | None) -> list[int]:
    """Tokens up to and including the first stop."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def _as_lists(prompts: Tensor | list[list[int]]) -> list[list[int]]:
    """The prompts as lists of ints, whatever integer type they came in."""
    if isinstance(prompts, Tensor) and (prompts.ndim != 2 or prompts.is_floating_point()):
        raise InputError(f"prompts must be token ids (batch, time), got shape {tuple(prompts.shape)} of {prompts.dtype}.")
    try:
        rows = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        return [[operator.index(token) for token in row] for row in rows]
    except TypeError:
        raise InputError("prompts must be a list of lists of token ids, such as [[3, 1, 4], [1, 5]], or a tensor.") from None


def _vocabulary(config: ModelConfig) -> int:
    """How many tokens the model reads and predicts."""
    if config.vocab is None or config.outputs is not None:
        raise InputError(
            f"generation needs a model that reads tokens and predicts them: this one has vocab={config.vocab} and "
            f"outputs={config.outputs}, allowed are a vocab and outputs=None."
        )
    return config.vocab


def _check(config: ModelConfig, vocab: int, rows: list[list[int]], max_new_tokens: int, mode: str, stop: int | None) -> None:
    """Raise InputError for what cannot be generated."""
    if mode not in MODES:
        raise one_of("mode", mode, MODES)
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}: it must be at least 1.")
    empty = [number for number, row in enumerate(rows) if not row]
    if empty or not rows:
        got = f"prompt {empty[0]} is empty" if empty else "there are no prompts"
        raise InputError(f"{got}: at least one token is needed to predict the next; begin with a start token.")
    outside = [token for row in [*rows, [] if stop is None else [stop]] for token in row if not 0 <= token < vocab]
    if outside:
        raise InputError(f"token {outside[0]} (in a prompt, or stop) is not in the vocabulary: allowed are 0 to {vocab - 1}.")
    reads = max(map(len, rows)) + max_new_tokens - 1
    if config.position != "none" and reads > config.positions:
        raise InputError(
            f"{max_new_tokens} new tokens after a prompt of {max(map(len, rows))} need {reads} positions and the model has "
            f"{config.positions}: shorten the prompts, ask for fewer tokens, or build the model with more positions."
        )


def _prefix_lengths(prefix: Tensor | np.ndarray | Sequence[int] | int | None, rows: list[list[int]]) -> Tensor:
    """The prefix of each prompt, (B,)."""
    lengths = [len(row) for row in rows]
    given = as_prefix(prefix)
    first = lengths if given is None else [given] * len(rows) if isinstance(given, int) else given.flatten().tolist()
    if len(first) != len(rows):
        raise InputError(f"prefix has {len(first)} numbers for {len(rows)} prompts: give one number, or one per prompt.")
    for number, (p, length) in enumerate(zip(first, lengths, strict=True)):
        if not 1 <= p <= length:
            raise InputError(
                f"prefix {p} does not fit prompt {number}, which has {length} tokens: allowed are 1 to {length}; "
                "give one prefix per prompt, or leave it out for the whole prompt."
            )
    return torch.tensor(first)


def _padded(rows: list[list[int]]) -> Tensor:
    """(B, longest) with 0 after each row's end."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])
