"""`all_prefixes` and `predict`: their checks, and what they compute by which implementation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from entp.config import IMPLS, check_mode, refresh_of
from entp.engine import refreshed
from entp.engine.arguments import as_at, as_budget, check_inputs, check_mask, positions
from entp.engine.budget import default_token_budget
from entp.engine.choice import choose, implementation, resolve
from entp.engine.layout import positions_of, split, trim
from entp.engine.masks import as_prefix, visible
from entp.engine.protocol import ModelProtocol
from entp.engine.support import Compute
from entp.errors import InputError, one_of


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
    """ENTP's outputs: at position t, those of the encoder that reads tokens 0..t and no others.

    x: token ids (B, T), or vectors (B, T, input_dim).
    at: None for all positions -> (B, T, outputs); a list of K positions -> (B, K, outputs);
        a bool mask (B, T) -> (number of True, outputs), sequence by sequence.
    impl: auto, the fastest that is exact for this model; or reference, packed, triton.
    lengths: (B,) true lengths of rows padded on the right; outputs at padding are 0 and nothing
        depends on it.
    position_ids: (B, T) or (T,), instead of 0, 1, 2, ...; a token's may depend on earlier tokens
        only.
    token_budget: most rows computed at once. Chunks are recomputed in the backward pass, so that
        only one is in memory. Without a budget the kernels also recompute activations of large
        inputs; with one, memory is the caller's.
    """
    at = as_at(at)
    x, lengths, ids = check_inputs(model, x, lengths, position_ids)
    compute = implementation(resolve(impl, model, x, ids).impl, recompute=token_budget is None)
    target_mask = as_target_mask(x, at, lengths)
    budget = as_budget(token_budget) or default_token_budget(model, x.device)
    rows = _in_chunks(compute, model, x, target_mask, budget, ids)
    return _read_out(model, rows, at, target_mask, lengths)


def _refreshed(
    model: ModelProtocol,
    x: Tensor | np.ndarray | Sequence,
    every: int,
    *,
    at: Tensor | np.ndarray | Sequence[int] | None,
    impl: str,
    lengths: Tensor | np.ndarray | Sequence[int] | None,
    position_ids: Tensor | np.ndarray | Sequence | None,
    token_budget: int | None,
) -> Tensor:
    """Predictions in mode refresh-N, with N = every. Rows are shared where `packed` is exact: not
    in models that mix the tokens of a row elsewhere than in attention."""
    at = as_at(at)
    x, lengths, ids = check_inputs(model, x, lengths, position_ids)
    chosen = resolve(impl, model, x, ids).impl
    one_by_one = chosen == "reference"
    hidden = refreshed.reference_hidden if one_by_one else refreshed.refreshed_hidden
    causal = functools.partial(causal_hidden, impl=chosen)
    compute = functools.partial(hidden, every=every, causal=causal)
    target_mask = as_target_mask(x, at, lengths)
    budget = as_budget(token_budget) or default_token_budget(model, x.device)
    cut = functools.partial(refreshed.split, every=every)
    rows = _in_chunks(compute, model, x, target_mask, budget, ids, cut)
    return _read_out(model, rows, at, target_mask, lengths)


def _read_out(
    model: ModelProtocol,
    rows: Tensor,
    at: Tensor | Sequence[int] | None,
    target_mask: Tensor,
    lengths: Tensor | None,
) -> Tensor:
    """Outputs at the positions `at` (see all_prefixes) of the rows at the targets."""
    if not _is_mask(at):
        return select(model, _spread(rows, target_mask), at, lengths)
    outputs = model.readout(rows)
    if lengths is None:
        return outputs
    return _spread(outputs, target_mask)[at]


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
    """Predictions at every position, or those in `at`, in mode entp, decoder, prefix-lm, or
    refresh-N: entp that is computed anew every N tokens only (engine/refreshed.py).

    x: token ids (B, T), or vectors (B, T, input_dim).
    lengths: (B,) true lengths of rows padded on the right; outputs at padding are 0 and nothing
        depends on it.
    prefix: for mode prefix-lm, an int or (B,).
    at, position_ids, impl, token_budget: see `entp.all_prefixes`. In modes decoder and prefix-lm
        `at` only selects, and impl is "triton" or the model's own forward pass.
    """
    check_mode(mode)
    every = refresh_of(mode)
    if every is not None:
        return _refreshed(
            *(model, x, every),
            at=at,
            impl=impl,
            lengths=lengths,
            position_ids=position_ids,
            token_budget=token_budget,
        )
    if mode == "entp":
        return all_prefixes(
            model,
            x,
            at=at,
            impl=impl,
            lengths=lengths,
            position_ids=position_ids,
            token_budget=token_budget,
        )
    at = as_at(at)
    x, lengths, ids = check_inputs(model, x, lengths, position_ids)
    hidden = causal_hidden(
        model,
        x,
        mode,
        lengths=lengths,
        prefix=as_prefix(prefix, x.device),
        position_ids=ids,
        impl=impl,
    )
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
    """The last block's output (B, T, D) in mode decoder or prefix-lm."""
    prefix_length = prefix if mode == "prefix-lm" else 0
    takes = lengths is None and _kernels_take(mode, prefix_length, x)
    if impl == "triton" and not takes:
        choose(impl, x.device, model)  # works or says why not
        raise InputError(
            f"impl 'triton' in mode {mode} takes no padding, and in mode prefix-lm one number from "
            "1 on, or a tensor with one for each sequence, on their device (got "
            f"{prefix}): use impl='auto' for anything else."
        )
    if not takes or not _by_kernels(impl, model, x.device):
        return masked_hidden(
            model, x, mode, lengths=lengths, prefix=prefix, position_ids=position_ids
        )
    from entp.engine.triton import stack

    assert prefix_length is not None
    return stack.causal_hidden(model, x, prefix_length, position_ids)


def _kernels_take(mode: str, prefix_length: Tensor | int | None, x: Tensor) -> bool:
    """Whether the kernels' mask can have this prefix; they check no values on the device."""
    if isinstance(prefix_length, Tensor):
        return prefix_length.shape == x.shape[:1] and prefix_length.device == x.device
    if prefix_length is None:
        return False
    return mode == "decoder" or prefix_length >= 1


def _by_kernels(impl: str, model: ModelProtocol, device: torch.device) -> bool:
    """Whether the kernels, not the model's own forward pass, run modes decoder and prefix-lm."""
    if impl not in IMPLS:
        raise one_of("impl", impl, IMPLS)
    if impl in ("reference", "packed"):
        return False
    if impl == "auto" and device.type != "cuda":
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
    """The model's own forward pass (B, T, D) under the mask of mode decoder or prefix-lm."""
    if isinstance(prefix, Tensor) and prefix.numel() not in (1, x.shape[0]):
        raise InputError(
            f"prefix has {prefix.numel()} numbers for {x.shape[0]} sequences: give one number, or "
            "one each."
        )
    encode: Callable[..., Tensor] = model.encode
    whole = isinstance(prefix, int) and prefix >= x.shape[1] and lengths is None
    if mode == "prefix-lm" and whole:
        return encode(x, position_ids)
    if not _takes_masks(getattr(encode, "__func__", encode)):
        raise InputError(
            f"mode {mode} needs a model whose encode takes mask= and causal=, and "
            f"{type(model).__name__}'s does not."
        )
    if mode == "decoder":
        # Keys at padding lie after every real query: the causal mask hides them too.
        return encode(x, position_ids, causal=True)
    mask = visible(mode, x.shape[1], prefix=prefix, lengths=lengths, device=x.device)
    return encode(x, position_ids, mask=mask)


def _takes_masks(encode: Any) -> bool:
    """Whether a function takes mask= and causal=, by name or by **."""
    code = getattr(encode, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
        return True
    return {"mask", "causal"} <= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _is_mask(at: Tensor | Sequence[int] | None) -> TypeGuard[Tensor]:
    return isinstance(at, Tensor) and at.dtype == torch.bool


def as_target_mask(x: Tensor, at: Tensor | Sequence[int] | None, lengths: Tensor | None) -> Tensor:
    """`at` as a bool mask (B, T), without padding.

    On the CPU: laying prefixes out must not wait for the device.
    """
    batch, time = x.shape[:2]
    if _is_mask(at):
        check_mask(at, batch, time)
        target_mask = at.cpu()
    else:
        target_mask = torch.zeros(batch, time, dtype=torch.bool)
        target_mask[:, positions(at, time)] = True
    if lengths is not None:
        target_mask = target_mask & (torch.arange(time) < lengths.cpu()[:, None])
    return target_mask


def select(
    model: ModelProtocol,
    hidden_BTD: Tensor,
    at: Tensor | np.ndarray | Sequence[int] | None,
    lengths: Tensor | None,
) -> Tensor:
    """Outputs at the positions `at` (see all_prefixes) of hidden states (B, T, D); 0 at padding."""
    at, device = as_at(at), hidden_BTD.device
    batch, time = hidden_BTD.shape[:2]
    chosen, padding = hidden_BTD, None
    if lengths is not None:
        padding = torch.arange(time, device=device) >= lengths[:, None]
    if _is_mask(at):
        check_mask(at, batch, time)
        rows = positions_of(at, device)
        chosen = hidden_BTD.flatten(0, 1).index_select(0, rows)
        if padding is not None:
            padding = padding.flatten()[rows]
    elif at is not None:
        index = torch.as_tensor(positions(at, time), dtype=torch.long, device=device)
        chosen = hidden_BTD[:, index]
        if padding is not None:
            padding = padding[:, index]
    out = model.readout(chosen)
    if padding is None:
        return out
    return out.masked_fill(padding[..., None], 0)


def _in_chunks(
    compute: Compute,
    model: ModelProtocol,
    x: Tensor,
    target_mask: Tensor,
    budget: int,
    position_ids: Tensor | None,
    cut: Callable[..., Iterable[Tensor]] = split,
) -> Tensor:
    """compute(model, x, target_mask, position_ids), at most `budget` rows at a time; cut: into
    masks of so many rows."""
    time = x.shape[1]
    most_rows = x.shape[0] * time * (time + 1) // 2
    fits = most_rows <= budget
    chunks = [target_mask] if fits else list(cut(target_mask, token_budget=budget))
    if not chunks:
        return compute(model, x, target_mask, position_ids)
    inputs = [_chunk_inputs(x, chunk, position_ids) for chunk in chunks]
    if len(chunks) == 1:
        return compute(model, *inputs[0])
    run: Callable[..., Tensor] = compute
    if torch.is_grad_enabled():
        run = functools.partial(checkpoint, compute, use_reentrant=False)
    outputs = torch.cat([run(model, *one) for one in inputs])
    where = torch.cat([chunk.flatten().nonzero()[:, 0] for chunk in chunks])
    return outputs[torch.argsort(where)]


def _chunk_inputs(
    x: Tensor, chunk: Tensor, position_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, target mask and position ids of the sequences that a chunk needs."""
    rows = trim(chunk)
    ids = None if position_ids is None else position_ids[rows]
    return x[rows], chunk[rows], ids


def _spread(rows: Tensor, target_mask: Tensor) -> Tensor:
    """Rows (M, ...) back to (B, T, ...), 0 elsewhere."""
    out = rows.new_zeros(target_mask.numel(), *rows.shape[1:])
    out = out.index_copy(0, positions_of(target_mask, rows.device), rows)
    return out.view(*target_mask.shape, *rows.shape[1:])
