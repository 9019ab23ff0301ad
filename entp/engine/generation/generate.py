"""Generation in all modes, for prompts of different lengths in one batch.

# lists: prompts with continuations
entp.generate(model, [[3, 1, 4], [1, 5]], max_new_tokens=8)
# (B, T) to (B, T + 8)
entp.generate(model, tokens, 8, "decoder", temperature=0.8, top_p=0.9, seed=0)
# new tokens one by one, as they are drawn
for token in stream(model, [3, 1, 4], max_new_tokens=8): ...
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from entp.config import check_mode, refresh_of
from entp.engine.choice import choose, resolve
from entp.engine.cold_start import warm_math
from entp.engine.generation.caches import (
    Cache,
    DecoderCache,
    EntpCache,
    NoCache,
    SlidingCache,
)
from entp.engine.generation.refresh_cache import RefreshCache
from entp.engine.masks import as_prefix
from entp.engine.protocol import ModelProtocol, causal_stack, depth
from entp.engine.support import support_of
from entp.errors import InputError
from entp.fields import as_int

Prompts = TypeVar("Prompts", Tensor, list[list[int]])
PositionIds = Callable[[Tensor], Tensor]
"""Tokens (B, T) to their position ids (B, T); a token's depends on itself and earlier ones."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits; checks itself."""

    temperature: float = 0.0
    """0 takes the best token; otherwise logits are divided by it."""
    top_k: int | None = None
    """Only the k best tokens can be drawn."""
    top_p: float | None = None
    """Only the fewest best tokens can be drawn whose probabilities, after top_k, sum to p."""

    def __post_init__(self) -> None:
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        if not _is_number(temperature) or not math.isfinite(temperature) or temperature < 0:
            raise InputError(
                f"temperature is {temperature!r}: allowed are 0 (the best token) and positive "
                "numbers."
            )
        if top_k is not None and (as_int(top_k) or 0) < 1:
            raise InputError(
                f"top_k is {top_k!r}: it must be at least 1, and whole; leave it out to draw from "
                "all tokens."
            )
        if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
            raise InputError(
                f"top_p is {top_p!r}: it must be above 0 and at most 1; leave it out to draw from "
                "all tokens."
            )


def _is_number(value: Any) -> bool:
    """A real number of any type, but not True or False."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


@torch.no_grad()  # not inference_mode: the caller may train on the tokens
def generate(
    model: ModelProtocol,
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
    position_ids: PositionIds | None = None,
    cache: bool = True,
    slide: bool = False,
) -> Prompts:
    """The prompts, each continued by max_new_tokens tokens.

    prompts: token ids (B, T) -> (B, T + max_new_tokens), with `stop` repeated to the end after a
        stop token; or lists of ids, of any lengths -> lists of ids, each ending with its stop token
        if it drew one. Arrays are taken as tensors.
    temperature, top_k, top_p: see Sampling.
    seed: makes drawing repeatable; None draws from torch's global generator.
    prefix: in mode prefix-lm, how many first tokens see each other (an int, or one per prompt);
        None: the whole prompt.
    position_ids: a function from tokens (B, T) to their position ids (B, T), each of its token and
        earlier ones only.
    cache: False reads everything again for each token: slower, and the same tokens.
    slide: beyond the model's context, read the last context_length tokens again for each token,
        the first of them at position 0; otherwise an InputError.
    """
    source = _Source(Sampling(temperature, top_k, top_p), seed, stop)
    _vocabulary(model)
    if isinstance(prompts, np.ndarray):
        prompts = torch.from_numpy(prompts)
    rows = _as_lists(prompts)
    how = _How(mode, prefix, position_ids, cache, slide)
    new = _whole(list(_tokens(model, rows, max_new_tokens, source, how)), max_new_tokens, stop)
    if isinstance(prompts, Tensor):
        return torch.cat([prompts.long(), new.to(prompts.device)], dim=1)
    return [row + _cut(more, stop) for row, more in zip(rows, new.tolist(), strict=True)]


def stream(
    model: ModelProtocol,
    prompt: Sequence[int],
    max_new_tokens: int,
    mode: str = "entp",
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | None = None,
    prefix: int | None = None,
    position_ids: PositionIds | None = None,
    cache: bool = True,
    slide: bool = False,
) -> Iterator[int]:
    """The tokens that `generate` adds to one prompt, each as soon as it is drawn, the stop token
    included."""
    source = _Source(Sampling(temperature, top_k, top_p), seed, stop)
    how = _How(mode, prefix, position_ids, cache, slide)
    for token in _tokens(model, _as_lists([list(prompt)]), max_new_tokens, source, how):
        yield int(token)


@dataclass(frozen=True)
class _Source:
    """Where new tokens come from."""

    sampling: Sampling
    seed: Any
    stop: int | None

    def generator(self, device: torch.device) -> torch.Generator | None:
        """What random numbers come from; None: torch's own."""
        if self.seed is None:
            return None
        number = as_int(self.seed)
        if number is None or not 0 <= number < 2**63:
            raise InputError(
                f"seed is {self.seed!r}: it must be a whole number from 0 to 2^63 - 1, or None."
            )
        return torch.Generator(device).manual_seed(number)


@dataclass(frozen=True)
class _How:
    """How tokens are read; see `generate`."""

    mode: str
    prefix: Tensor | np.ndarray | Sequence[int] | int | None
    position_ids: PositionIds | None
    cache: bool
    slide: bool


@torch.no_grad()
def _tokens(
    model: ModelProtocol, rows: list[list[int]], steps: int, source: _Source, how: _How
) -> Iterator[Tensor]:
    """New tokens (B,), one per prompt, `steps` times or until every prompt has drawn its stop
    token. After it only stop tokens come."""
    warm_math()
    _check(_vocabulary(model), rows, steps, how.mode, source.stop)
    _check_length(model, rows, steps, how)
    device = next(model.parameters()).device  # type: ignore[attr-defined]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    tokens = _padded(rows).to(device)
    cache = _cache_for(model, rows, steps, how, tokens)
    generator, stop = source.generator(device), source.stop
    known = _Known(tokens, lengths, steps, how.position_ids)
    stopped = torch.zeros_like(lengths, dtype=torch.bool)
    logits = known.read(cache)
    for step in range(steps):
        token = pick(logits, source.sampling, generator)
        if stop is not None:
            token = token.masked_fill(stopped, stop)
            stopped = stopped | (token == stop)
        yield token
        if step == steps - 1 or (stop is not None and bool(stopped.all())):
            return  # the last token is never read
        logits = known.append(cache, token)


def _cache_for(
    model: ModelProtocol, rows: list[list[int]], steps: int, how: _How, tokens_BT: Tensor
) -> Cache:
    """The cache of these prompts, for as many tokens as will be read."""
    reads, limit = tokens_BT.shape[1] + steps - 1, getattr(model, "context_length", None)
    first = None
    if how.mode == "prefix-lm":
        first = _prefix_lengths(how.prefix, rows).to(tokens_BT.device)
    ids = None if how.position_ids is None else how.position_ids(tokens_BT)
    if not how.slide or limit is None or reads <= limit:
        return make_cache(model, how.mode, reads, first, how.cache, tokens_BT, ids)
    window = tokens_BT[:, :limit]
    inner = make_cache(model, how.mode, limit, first, how.cache, window)
    return SlidingCache(model, how.mode, limit, inner, first)


def _whole(tokens: list[Tensor], steps: int, stop: int | None) -> Tensor:
    """(B, steps) the tokens of each step, and stop tokens after the last."""
    new = torch.stack(tokens, dim=1)
    return torch.nn.functional.pad(new, (0, steps - len(tokens)), value=0 if stop is None else stop)


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """One token per row (B,) from logits (B, vocab)."""
    if not bool(torch.isfinite(logits_BV).any(-1).all()) or bool(logits_BV.isnan().any()):
        raise InputError(
            "the model's outputs are not finite: there is no best token. Are its weights those of "
            "a good run?"
        )
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    wide = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    scores = wide / max(sampling.temperature, 1e-30)  # a smaller one would become 0 in fp32
    ranked, token = scores.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ranked[:, sampling.top_k :] = float("-inf")
    if sampling.top_p is not None:
        probability = ranked.softmax(-1)
        better = probability.cumsum(-1) - probability
        ranked = ranked.masked_fill(better >= sampling.top_p, float("-inf"))
    probability = torch.zeros_like(scores).scatter(1, token, ranked.softmax(-1))
    return torch.multinomial(probability, 1, generator=generator)[:, 0]


def make_cache(
    model: ModelProtocol,
    mode: str,
    capacity: int,
    prefix_B: Tensor | None = None,
    cache: bool = True,
    tokens_BT: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Cache:
    """The cache of a mode, on the model's device, for up to `capacity` tokens that are read.

    A model for which no cache is exact gets none, with a warning. tokens_BT, position_ids: the
    prompts, on which a model with unknown modules is compared with the reference first; without
    them it gets no cache.
    """
    if not cache or not _can_cache(model, tokens_BT, position_ids):
        return NoCache(model, mode, prefix_B)
    device = next(model.parameters()).device  # type: ignore[attr-defined]
    every = refresh_of(mode)
    # With one layer, ENTP and decoder are the same function.
    decoder = mode in ("decoder", "prefix-lm") or depth(model) == 1
    if every is not None and not decoder:
        return RefreshCache(model, capacity, every)
    support = support_of(model)
    graphs = device.type == "cuda" and support.graphs and support.unknown is None
    if graphs and (decoder or choose("auto", device, model).impl == "triton"):
        from entp.engine.generation.cuda_graph import CapturedCache, DecoderStep, EntpStep

        kind = DecoderStep if decoder else EntpStep
        return CapturedCache(kind, model, capacity, prefix_B)
    if decoder:
        return DecoderCache(model, capacity, prefix_B)
    return EntpCache(model, capacity)


def _can_cache(model: ModelProtocol, tokens_BT: Tensor | None, position_ids: Tensor | None) -> bool:
    """Whether `project` and `finish`, of which caches are made, are exact for this model; caches
    have no place for layers inside `embed`."""
    if causal_stack(model):
        return False
    support = support_of(model)
    if support.unknown is None:
        return support.rows is None or choose("auto", "cpu", model).impl != "reference"
    if tokens_BT is None:
        return False
    return resolve("auto", model, tokens_BT, position_ids).impl != "reference"


class _Known:
    """The tokens so far, for position ids that depend on them."""

    def __init__(
        self, tokens_BT: Tensor, lengths_B: Tensor, steps: int, position_ids: PositionIds | None
    ) -> None:
        self.tokens, self.lengths, self.position_ids = tokens_BT, lengths_B, position_ids
        if position_ids is not None:
            self.tokens = torch.nn.functional.pad(tokens_BT, (0, steps))
        self.time = tokens_BT.shape[1]

    def read(self, cache: Cache) -> Tensor:
        """Logits after the prompts."""
        prompts = self.tokens[:, : self.time]
        return cache.prefill(prompts, self.lengths, self._ids())

    def append(self, cache: Cache, new_B: Tensor) -> Tensor:
        """Logits after one more token each."""
        if self.position_ids is None:
            return cache.append(new_B)
        self.tokens.scatter_(1, self.lengths[:, None], new_B[:, None])
        self.time, at, self.lengths = self.time + 1, self.lengths, self.lengths + 1
        ids = self._ids()
        assert ids is not None
        return cache.append(new_B, ids.gather(1, at[:, None])[:, 0])

    def _ids(self) -> Tensor | None:
        if self.position_ids is None:
            return None
        known = self.tokens[:, : self.time]
        ids = self.position_ids(known)
        if not isinstance(ids, Tensor) or ids.shape != known.shape or ids.is_floating_point():
            got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise InputError(
                f"position_ids must give whole numbers of shape {tuple(known.shape)}, got {got}."
            )
        return ids.to(known)


def _cut(tokens: list[int], stop: int | None) -> list[int]:
    """Tokens up to and including the first stop."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def _as_lists(prompts: Tensor | list[list[int]]) -> list[list[int]]:
    """The prompts as lists of ints, whatever integer type they came in."""
    rows = prompts
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.is_floating_point() or prompts.dtype == torch.bool:
            raise InputError(
                f"prompts must be token ids (batch, time), got shape {tuple(prompts.shape)} of "
                f"{prompts.dtype}."
            )
        rows = prompts.tolist()
    try:
        if any(isinstance(token, bool) for row in rows for token in row):
            raise TypeError
        return [[operator.index(token) for token in row] for row in rows]
    except TypeError:
        raise InputError(
            "prompts must be a list of lists of token ids, such as [[3, 1, 4], [1, 5]], or a "
            "tensor."
        ) from None


def _vocabulary(model: ModelProtocol) -> int:
    """How many tokens the model reads and predicts."""
    vocab = getattr(model, "vocab", None)
    outputs = getattr(getattr(model, "config", None), "outputs", None)
    if vocab is None or outputs is not None:
        raise InputError(
            "generation needs a model that reads tokens and predicts them: this one has "
            f"vocab={vocab} and outputs={outputs}, allowed are a vocab and outputs=None."
        )
    return vocab


def _check(
    vocab: int, rows: list[list[int]], max_new_tokens: int, mode: str, stop: int | None
) -> None:
    """Raise InputError for what cannot be generated."""
    check_mode(mode)
    if (as_int(max_new_tokens) or 0) < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}: it must be at least 1, and whole.")
    if stop is not None and as_int(stop) is None:
        raise InputError(f"stop is {stop!r}: it must be a token, or None.")
    empty = [number for number, row in enumerate(rows) if not row]
    if empty or not rows:
        got = f"prompt {empty[0]} is empty" if empty else "there are no prompts"
        raise InputError(
            f"{got}: at least one token is needed to predict the next; begin with a start token."
        )
    last = [] if stop is None else [stop]
    outside = [token for row in [*rows, last] for token in row if not 0 <= token < vocab]
    if outside:
        raise InputError(
            f"token {outside[0]} (in a prompt, or stop) is not in the vocabulary: allowed are 0 to "
            f"{vocab - 1}."
        )


def _check_length(
    model: ModelProtocol, rows: list[list[int]], max_new_tokens: int, how: _How
) -> None:
    """InputError for more tokens than the model has positions; the last token is never read."""
    longest, limit = max(map(len, rows)), getattr(model, "context_length", None)
    reads = longest + max_new_tokens - 1
    if how.slide and how.position_ids is not None:
        raise InputError("slide is for position ids 0, 1, 2, ...: leave it out, or position_ids.")
    if how.position_ids is None and not how.slide and limit is not None and reads > limit:
        raise InputError(
            f"{max_new_tokens} new tokens after a prompt of {longest} need {reads} positions and "
            f"the model has {limit}: shorten the prompts, ask for fewer tokens, or build the model "
            "with more positions."
        )


def _prefix_lengths(
    prefix: Tensor | np.ndarray | Sequence[int] | int | None, rows: list[list[int]]
) -> Tensor:
    """The prefix of each prompt, (B,)."""
    lengths = [len(row) for row in rows]
    given = as_prefix(prefix)
    if given is None:
        first = lengths
    elif isinstance(given, int):
        first = [given] * len(rows)
    else:
        first = given.flatten().tolist()
    if len(first) != len(rows):
        raise InputError(
            f"prefix has {len(first)} numbers for {len(rows)} prompts: give one number, or one per "
            "prompt."
        )
    for number, (p, length) in enumerate(zip(first, lengths, strict=True)):
        if not 1 <= p <= length:
            raise InputError(
                f"prefix {p} does not fit prompt {number}, which has {length} tokens: allowed are "
                f"1 to {length}; give one prefix per prompt, or leave it out for the whole prompt."
            )
    return torch.tensor(first)


def _padded(rows: list[list[int]]) -> Tensor:
    """(B, longest) with 0 after each row's end."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])
