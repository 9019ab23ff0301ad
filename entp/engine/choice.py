"""Which implementation runs: the fastest that is exact for a model on a device."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from entp.config import IMPLS
from entp.engine import packed, reference
from entp.engine.devices import LARGEST_HEAD, triton_missing
from entp.engine.protocol import ModelProtocol
from entp.engine.support import Compute, Support, compare_once, support_of
from entp.errors import EngineWarning, InputError, one_of

LARGEST_QUERIES = {2: 2**14, 4: 2**14, 8: 2**12}
"""Most numbers in the queries of all heads, each as wide as a row, by the bytes of a number."""


class Choice(NamedTuple):
    """Which implementation runs, and why."""

    impl: str
    reason: str


def choose(
    impl: str = "auto", device: torch.device | str = "cpu", model: ModelProtocol | None = None
) -> Choice:
    """The implementation that `impl` means for a model on a device: the fastest that is exact.

    A name asked for that is not exact is an InputError. `auto` warns, once for each state of a
    model, where the usual implementation (the kernels on CUDA, packed elsewhere) is not exact.
    """
    if impl not in IMPLS:
        raise one_of("impl", impl, IMPLS)
    where = torch.device(device)
    support = None if model is None else support_of(model)
    no_packed = None if support is None else support.rows
    no_kernels = triton_missing(where) or _no_kernels(model, support, where)
    if impl == "triton" and no_kernels:
        other = "reference" if no_packed else "packed"
        raise InputError(
            f"impl 'triton' cannot run here: {no_kernels}. Use impl='{other}', which gives the "
            "same numbers."
        )
    if impl == "packed" and no_packed:
        raise _not_exact(no_packed)
    if impl != "auto":
        return Choice(impl, "asked for by name")
    if where.type == "cuda" and not no_kernels:
        return Choice("triton", "exact, and the fastest on CUDA")
    if support is not None and no_packed:
        return _slower("reference", support, no_packed)
    if where.type == "cuda" and support is not None and no_kernels:
        return _slower("packed", support, no_kernels)
    why = no_kernels or "the device is a CPU"
    return Choice("packed", f"exact and faster than the reference loop; no kernels: {why}")


def _no_kernels(model: Any, support: Support | None, device: torch.device) -> str | None:
    """Why the kernels do not run this model, or None."""
    if support is None:
        return None
    return support.kernels or _too_much_for_kernels(model, device)


def _not_exact(reason: str) -> InputError:
    return InputError(
        f"impl 'packed' is not exact for this model: {reason}. Use impl='reference', or 'auto'."
    )


def _slower(impl: str, support: Support, reason: str) -> Choice:
    """The choice of a slower implementation, with a warning the first time."""
    if reason not in support.told:
        support.told.add(reason)
        text = (
            f"this model runs by the {impl} implementation, because a faster one would not be "
            f"exact: {reason}."
        )
        warnings.warn(text, EngineWarning, stacklevel=4)
    return Choice(impl, f"exact; faster ones would not be: {reason}")


def _too_much_for_kernels(model: Any, device: torch.device) -> str | None:
    """Why a model that kernels implement is too large for them, or None."""
    heads, width, weight = model.stack()[0].heads, model.width, next(model.parameters())
    if weight.dtype not in (torch.float32, torch.float64):
        return (
            f"the weights are {weight.dtype}: keep them in float32 and use torch.autocast for half "
            "precision"
        )
    if width // heads > LARGEST_HEAD:
        return f"head size {width // heads} is above {LARGEST_HEAD}"
    size = 2 if torch.is_autocast_enabled(device.type) else weight.element_size()
    widest = LARGEST_QUERIES[size] // max(16, 1 << (heads - 1).bit_length())
    if width > widest:
        return f"width {width} is above {widest}, the most for {heads} heads in {8 * size} bits"
    return None


def resolve(impl: str, model: ModelProtocol, x: Tensor, position_ids: Tensor | None) -> Choice:
    """The implementation for these inputs; a model with unknown modules is compared first."""
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


def implementation(name: str, recompute: bool) -> Compute:
    """The function of an implementation; recompute: see triton/stack.py."""
    if name == "reference":
        return reference.prefix_hidden
    if name == "packed":
        return packed.prefix_hidden
    from entp.engine.triton import stack

    return functools.partial(stack.prefix_hidden, recompute=recompute)
