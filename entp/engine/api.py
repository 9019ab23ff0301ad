"""`all_prefixes` and `predict`: what they mean, what they check, and which implementation computes them."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from entp.attention import as_prefix, visible
from entp.config import IMPLS, MODES
from entp.engine import packed, reference
from entp.engine.arguments import as_at, as_budget, check_inputs, check_mask, positions
from entp.engine.budget import default_token_budget
from entp.engine.layout import positions_of, split, trim
from entp.engine.protocol import ModelProtocol
from entp.engine.support import Compute, Support, compare_once, support_of
from entp.errors import EngineWarning, InputError, one_of

LARGEST_HEAD, LARGEST_QUERIES = 128, {2: 2**14, 4: 2**14, 8: 2**12}
"""Limits of the Triton kernels, whose shared memory is 227 KiB: numbers in a head, and in the queries of all heads, each as
wide as a row, by the bytes of a number."""


class Choice(NamedTuple):
    """Which implementation runs, and why."""

    impl: str
    reason: str


def choose(impl: str = "auto", device: torch.device | str = "cpu", model: ModelProtocol | None = None) -> Choice:
    """What `impl` means on a device, for a model as it is now: the fastest that is exact.

    A name asked for that is not exact is an InputError. `auto` warns, once for each state of a model, where the usual
    implementation (the kernels on CUDA, packed elsewhere) is not exact.
    """
    if impl not in IMPLS:
        raise one_of("impl", impl, IMPLS)
    where = torch.device(device)
    support = None if model is None else support_of(model)
    no_kernels = triton_missing(where) or _no_kernels(model, support, where)
    if impl == "triton" and no_kernels:
        other = "reference" if support is not None and support.rows else "packed"
        raise InputError(f"impl 'triton' cannot run here: {no_kernels}. Use impl='{other}', which gives the same numbers.")
    if impl == "packed" and support is not None and support.rows:
        raise _not_exact(support.rows)
    if impl != "auto":
        return Choice(impl, "asked for by name")
    if where.type == "cuda" and not no_kernels:
        return Choice("triton", "exact, and the fastest on CUDA")
    if support is not None and support.rows:
        return _slower("reference", support, support.rows)
    if where.type == "cuda" and support is not None and no_kernels:
        return _slower("packed", support, no_kernels)
    return Choice("packed", f"exact and faster than the reference loop; no kernels: {no_kernels or 'the device is a CPU'}")


def _no_kernels(model: Any, support: Support | None, device: torch.device) -> str | None:
    return None if support is None else support.kernels or _too_much_for_kernels(model, device)


def _not_exact(reason: str) -> InputError:
    return InputError(f"impl 'packed' is not exact for this model: {reason}. Use impl='reference', or 'auto'.")


def _slower(impl: str, support: Support, reason: str) -> Choice:
    """The choice of a slower implementation, with a warning the first time."""
    if reason not in support.told:
        support.told.add(reason)
        text = f"this model runs by the {impl} implementation, because a faster one would not be exact: {reason}."
        warnings.warn(text, EngineWarning, stacklevel=4)
    return Choice(impl, f"exact; faster ones would not be: {reason}")


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on this device, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device.type}, and kernels need CUDA (TRITON_INTERPRET=1 runs them slowly on a CPU)"
    return None


def _too_much_for_kernels(model: Any, device: torch.device) -> str | None:
    """Why a model that kernels implement is too large for them, or None."""
    heads, width, weight = model.stack()[0].heads, model.width, next(model.parameters())
    if weight.dtype not in (torch.float32, torch.float64):
        return f"the weights are {weight.dtype}: keep them in float32 and use torch.autocast for half precision"
    if width // heads > LARGEST_HEAD:
        return f"head size {width // heads} is above {LARGEST_HEAD}"
    size = 2 if torch.is_autocast_enabled(device.type) else weight.element_size()
    widest = LARGEST_QUERIES[size] // max(16, 1 << (heads - 1).bit_length())
    if width > widest:
        return f"width {width} is above {widest}, the most for {heads} heads in {8 * size} bits"
    return None


def resolve(impl: str, model: ModelProtocol, x: Tensor, position_ids: Tensor | None) -> Choice:
    """The implementation for these inputs: `choose`, and packed only after a comparison if the model has unknown modules."""
    choice = choose(impl, x.device, model)
    support = support_of(model)
    if choice.impl != "packed" or support.unknown is None:
        return choice
    wrong = compare_once(model, x, position_ids, packed.prefix_hidden, reference.prefix_hidden)
    if wrong is None:
        return choice
    reason = f"{support.unknown}, and {wrong}"
    if impl == "packed":
        raise _not_exact(reason)
    return _slower("reference", support, reason)


def _implementation(name: str, generous: bool) -> Compute:
    """The function of an implementation; generous: with memory, where that saves time."""
    if name == "reference":
        return reference.prefix_hidden
    if name == "packed":
        return packed.prefix_hidden
    from entp.engine.triton import stack

    return functools.partial(stack.prefix_hidden, generous=generous)


def all_prefixes(
    model: ModelProtocol,
    x: Tensor | np.ndarray | Sequence,
    at: Tensor | np.ndarray | Sequence[int] | None = None,
    impl: str = "auto",
    *,
    lengths: Tensor | np.ndarray | Sequence[int] | None = None,
    position_ids: Tensor | np.ndarray | Sequence | None = None,
    token_budget: int | None = None,
) -> Tensor:
    """ENTP: for each wanted position t the model's output with only tokens 0..t visible, and full attention among them.

    x: token ids (B, T), or vectors (B, T, input_dim).
    at: None for all positions -> (B, T, outputs); a list of K positions -> (B, K, outputs);
        a bool mask (B, T) -> (number of True, outputs), sequence by sequence.
    impl: auto, the fastest that is exact for this model; or reference, packed, triton.
    lengths: (B,) true lengths of rows padded on the right; outputs at padding are 0 and nothing depends on it.
    position_ids: (B, T) or (T,), instead of 0, 1, 2, ...; a token's may depend on earlier tokens only.
    token_budget: most rows computed at once. Chunks are recomputed in the backward pass, so that only one is in memory. Without
        one the kernels also make activations of large inputs again instead of keeping them; with one, memory is the caller's.
    """
    at = as_at(at)
    x, lengths, ids = check_inputs(model, x, lengths, position_ids)
    compute = _implementation(resolve(impl, model, x, ids).impl, token_budget is not None)
    wanted = wanted_prefixes(x, at, lengths)
    budget = as_budget(token_budget) or default_token_budget(model, x.device)
    rows = _in_chunks(compute, model, x, wanted, budget, ids)
    if isinstance(at, Tensor) and at.dtype == torch.bool:
        return model.readout(rows) if lengths is None else _spread(model.readout(rows), wanted)[at]
    return select(model, _spread(rows, wanted), at, lengths)


def predict(
    model: ModelProtocol,
    x: Tensor | np.ndarray | Sequence,
    mode: str = "entp",
    *,
    at: Tensor | np.ndarray | Sequence[int] | None = None,
    lengths: Tensor | np.ndarray | Sequence[int] | None = None,
    prefix: Tensor | np.ndarray | Sequence[int] | int | None = None,
    position_ids: Tensor | np.ndarray | Sequence | None = None,
    impl: str = "auto",
    token_budget: int | None = None,
) -> Tensor:
    """Predictions of every position (or those in `at`) in one of the modes entp, decoder and prefix.

    x: token ids (B, T), or vectors (B, T, input_dim). lengths: (B,) true lengths of rows padded on the right; outputs
    at padding are 0 and nothing depends on it. prefix: for mode prefix, an int or (B,). at, position_ids, impl, token_budget:
    see `entp.all_prefixes`; in the other modes `at` only selects, and impl is "triton" or the model's own forward pass.
    """
    if mode == "entp":
        return all_prefixes(model, x, at=at, impl=impl, lengths=lengths, position_ids=position_ids, token_budget=token_budget)
    if mode not in MODES:
        raise one_of("mode", mode, MODES)
    at = as_at(at)
    x, lengths, ids = check_inputs(model, x, lengths, position_ids)
    hidden = causal_hidden(model, x, mode, lengths=lengths, prefix=as_prefix(prefix, x.device), position_ids=ids, impl=impl)
    return select(model, hidden, at, lengths)


def causal_hidden(
    model: ModelProtocol,
    x: Tensor,
    mode: str,
    *,
    lengths: Tensor | None = None,
    prefix: Tensor | int | None = None,
    position_ids: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """The last block's output (B, T, D) in mode decoder or prefix: by the model, or by the kernels; `auto` as in mode entp."""
    free = prefix if mode == "prefix" else 0
    if isinstance(free, Tensor):
        takes = lengths is None and free.shape == x.shape[:1] and free.device == x.device
    else:
        takes = lengths is None and free is not None and (mode == "decoder" or free >= 1)
    if impl == "triton" and not takes:
        choose(impl, x.device, model)  # works or says why not
        raise InputError(
            f"impl 'triton' in mode {mode} takes no padding, and in mode prefix one number from 1 on, or a tensor with one for "
            f"each sequence, on their device (got {prefix}): use impl='auto' for anything else."
        )
    if not takes or not _by_kernels(impl, model, x.device):
        return masked_hidden(model, x, mode, lengths=lengths, prefix=prefix, position_ids=position_ids)
    from entp.engine.triton import stack

    assert free is not None
    return stack.causal_hidden(model, x, free, position_ids)


def _by_kernels(impl: str, model: ModelProtocol, device: torch.device) -> bool:
    """Do the kernels run modes decoder and prefix? Whatever else runs them is the model's own forward pass: always exact."""
    if impl not in IMPLS:
        raise one_of("impl", impl, IMPLS)
    if impl in ("reference", "packed") or (impl == "auto" and device.type != "cuda"):
        return False
    return choose(impl, device, model).impl == "triton"


def masked_hidden(
    model: ModelProtocol,
    x: Tensor,
    mode: str,
    *,
    lengths: Tensor | None = None,
    prefix: Tensor | int | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """The model's own forward pass (B, T, D) under the mask of mode decoder or prefix."""
    if isinstance(prefix, Tensor) and prefix.numel() not in (1, x.shape[0]):
        raise InputError(f"prefix has {prefix.numel()} numbers for {x.shape[0]} sequences: give one number, or one each.")
    encode: Callable[..., Tensor] = model.encode
    if mode == "prefix" and isinstance(prefix, int) and prefix >= x.shape[1] and lengths is None:
        return encode(x, position_ids)
    if not _takes_masks(getattr(encode, "__func__", encode)):
        raise InputError(
            f"mode {mode} needs a model whose encode takes mask= and causal=, and {type(model).__name__}'s does not."
        )
    if mode == "decoder":  # keys at padding lie after every real query: the causal mask hides them too
        return encode(x, position_ids, causal=True)
    return encode(x, position_ids, mask=visible(mode, x.shape[1], prefix=prefix, lengths=lengths, device=x.device))


def _takes_masks(encode: Any) -> bool:
    """Does a function take mask= and causal=, by name or by **?"""
    code = getattr(encode, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
        return True
    return {"mask", "causal"} <= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def wanted_prefixes(x: Tensor, at: Tensor | Sequence[int] | None, lengths: Tensor | None) -> Tensor:
    """`at` as a bool mask (B, T) on the CPU, without padding: laying prefixes out must not wait for the device."""
    batch, time = x.shape[:2]
    if isinstance(at, Tensor) and at.dtype == torch.bool:
        check_mask(at, batch, time)
        wanted = at.cpu()
    else:
        wanted = torch.zeros(batch, time, dtype=torch.bool)
        wanted[:, positions(at, time)] = True
    if lengths is not None:
        wanted = wanted & (torch.arange(time) < lengths.cpu()[:, None])
    return wanted


def select(
    model: ModelProtocol, hidden_BTD: Tensor, at: Tensor | np.ndarray | Sequence[int] | None, lengths: Tensor | None
) -> Tensor:
    """Outputs at the positions `at` (see all_prefixes) of hidden states (B, T, D); 0 at padding."""
    time, at = hidden_BTD.shape[1], as_at(at)
    padding = None
    if lengths is not None:
        padding = torch.arange(time, device=hidden_BTD.device) >= lengths[:, None]
    if isinstance(at, Tensor) and at.dtype == torch.bool:
        check_mask(at, *hidden_BTD.shape[:2])
        rows = positions_of(at, hidden_BTD.device)
        out = model.readout(hidden_BTD.flatten(0, 1).index_select(0, rows))
        padding = None if padding is None else padding.flatten()[rows]
    else:
        index = torch.as_tensor(positions(at, time), dtype=torch.long, device=hidden_BTD.device)
        every = at is None
        out = model.readout(hidden_BTD if every else hidden_BTD[:, index])
        padding = padding if padding is None or every else padding[:, index]
    return out if padding is None else out.masked_fill(padding[..., None], 0)


def _in_chunks(
    compute: Compute, model: ModelProtocol, x: Tensor, wanted: Tensor, budget: int, position_ids: Tensor | None
) -> Tensor:
    """compute(model, x, wanted, position_ids), at most `budget` rows at a time."""
    time = x.shape[1]
    at_most = x.shape[0] * time * (time + 1) // 2
    chunks = [wanted] if at_most <= budget else list(split(wanted, budget))
    used = [(x[rows], c[rows], None if position_ids is None else position_ids[rows]) for c in chunks for rows in [trim(c)]]
    if len(chunks) == 1:
        return compute(model, *used[0])
    if not chunks:
        return compute(model, x, wanted, position_ids)
    keep = torch.is_grad_enabled()
    parts = [checkpoint(compute, model, *u, use_reentrant=False) if keep else compute(model, *u) for u in used]
    where = torch.cat([c.flatten().nonzero()[:, 0] for c in chunks])
    return torch.cat(parts)[torch.argsort(where)]


def _spread(rows: Tensor, wanted: Tensor) -> Tensor:
    """Rows (M, ...) back to (B, T, ...), 0 elsewhere."""
    out = rows.new_zeros(wanted.numel(), *rows.shape[1:])
    return out.index_copy(0, positions_of(wanted, rows.device), rows).view(*wanted.shape, *rows.shape[1:])
