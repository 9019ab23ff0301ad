"""Which implementation is exact for a model, as it is now, and why not.

The reference runs the model's own forward pass, so it is exact for any model. The others replace
it:

- packed calls `embed`, `project`, `finish` and `readout`, and the modules inside them, on packed
  rows. That is exact if these methods are what the forward pass does, and if every module treats
  each row by itself. Known modules do. Others (LoRA, a hook, a layer of one's own) are compared
  with the reference once, on the first tokens that come.
- The kernels read weights, and packed does where it moves the last layer's key and value matrices
  to the query's side. That is exact only for modules of exactly the types they were written for,
  without hooks, and without changed methods.

A model can change between two calls. `support_of` compares a fingerprint each time: 0.24
microseconds a module on a server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from entp.engine.fingerprint import (
    ATTENTION,
    GLOBAL_HOOKS,
    HOOKS,
    Fingerprint,
    readable,
    registered,
    replaced,
    replayable,
    rowwise,
)
from entp.engine.protocol import ModelProtocol, all_layers

MOST_KNOWN = 4
"""States of a model that are remembered: training and evaluation, with and without a hook."""


@dataclass(eq=False)
class Support:
    """What the engine may do with a model in one state."""

    rows: str | None
    """Why `project` and `finish` on packed rows are not exact, or None."""
    unknown: str | None
    """A module that may treat rows together, so that packed has to be compared first, or None."""
    kernels: str | None
    """Why the kernels are not exact, or None."""
    python: str | None
    """What may depend on Python in each step, so that no step is captured, or None."""
    fingerprint: Fingerprint
    compared: dict[object, str | None] = field(default_factory=dict)
    """What a comparison of packed with the reference found wrong, by type and length."""
    told: set[str] = field(default_factory=set)
    """Warnings that were given."""

    @property
    def graphs(self) -> bool:
        """Whether a training step may be captured. A graph replays no Python: nothing may depend on
        it."""
        return self.rows is None and self.python is None


_known: WeakKeyDictionary[Any, list[Support]] = WeakKeyDictionary()


def support_of(model: ModelProtocol) -> Support:
    """What the engine may do with the model as it is now; the same object until it changes."""
    known = _known.get(model)
    if known is None:
        known = _known[model] = []
    for number, support in enumerate(known):
        if support.fingerprint.fits(model):  # type: ignore[arg-type]
            if number:
                known.insert(0, known.pop(number))
            return support
    support = _look(model)
    known.insert(0, support)
    del known[MOST_KNOWN:]
    return support


def _look(model: ModelProtocol) -> Support:
    """Look at every module of a model."""
    assert isinstance(model, nn.Module)
    rows = _why_not_rows(model)
    unknown = None if rows else _unknown_module(model)
    kernels = rows or unknown or _why_not_kernels(model)
    python = unknown and _depends_on_python(model)
    return Support(rows, unknown, kernels, python, Fingerprint(model))


def _why_not_rows(model: Any) -> str | None:
    """Why the model's methods may not be what its forward pass computes, or None."""
    changed = _changed(model, "the model", skip=("embed", "readout", "attention_bias"))
    if changed:
        return f"{changed}, which only its own forward pass calls"
    for number, block in enumerate(all_layers(model)):
        name = f"block {number}"
        if isinstance(block, nn.Module) and _hooked(block):
            return f"{name} has a hook, which only its own forward pass runs"
        changed = _changed(block, name, skip=("project", "finish"))
        if changed:
            return f"{changed}, which only its own forward pass calls"
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            return (
                f"{name} is active dropout, and each implementation would draw its own numbers: "
                "call model.eval()"
            )
        if getattr(module, "scale_grad_by_freq", False):
            return (
                f"{name} divides its gradient by how often a token is looked up "
                "(scale_grad_by_freq), which each implementation does another number of times"
            )
    return None


def _changed(thing: Any, name: str, skip: tuple[str, ...] = ()) -> str | None:
    """The method of a registered class that was overridden, on class, subclass or object, or None.

    skip: methods that packed calls itself, so that a change in them counts.
    """
    kind = next((cls for cls in type(thing).__mro__ if cls in registered), None)
    if kind is None:
        return None
    for method, original in registered[kind].items():
        if method in skip:
            continue
        if method in getattr(thing, "__dict__", {}):
            return f"{name} has a {method} of its own"
        if getattr(type(thing), method) is not original:
            return f"{name} is a {type(thing).__name__} with another {method}"
        if other := replaced(original):
            return f"{name}'s {method} calls another {other}"
    return None


def _own_function(thing: Any, name: str) -> str | None:
    """A function that stands where a module of a registered class was, such as its activation."""
    for attribute, value in thing.__dict__.items():
        if not attribute.startswith("_") and callable(value):
            return f"{name} has a function as its {attribute}"
    return None


def _hooked(module: nn.Module) -> bool:
    return any(module.__dict__[name] for name in HOOKS)


def _unknown_module(model: Any) -> str | None:
    """A module that may treat rows together, with what is unusual about it, or None."""
    if any(not _only_watches(hook) for hooks in GLOBAL_HOOKS for hook in hooks.values()):
        return "a global module hook is registered"
    if F.scaled_dot_product_attention is not ATTENTION:
        return "torch's scaled_dot_product_attention was replaced"
    blocks = all_layers(model)
    names = ["the model", *(f"block {number}" for number in range(len(blocks)))]
    for name, block in zip(names, [model, *blocks], strict=True):
        if type(block) not in registered:
            return f"{name} is a {type(block).__name__}"
        found = _changed(block, name) or _own_function(block, name)
        if found:
            return found
    known = {id(block) for block in [model, *blocks]}
    for name, module in model.named_modules():
        if id(module) in known or isinstance(module, nn.ModuleList):
            continue
        found = _unusual(module, rowwise)
        if found:
            return f"{name} {found}"
    return None


def _depends_on_python(model: Any) -> str | None:
    """A module that may compute something else in each step, with the reason, or None.

    Modules of known classes and of `replayable` packages do not, without hooks.
    """
    if any(not _only_watches(hook) for hooks in GLOBAL_HOOKS for hook in hooks.values()):
        return "a global module hook is registered"
    if F.scaled_dot_product_attention is not ATTENTION:
        return "torch's scaled_dot_product_attention was replaced"
    parts = [("a block", block) for block in all_layers(model) if not isinstance(block, nn.Module)]
    for name, part in [*model.named_modules(), *parts]:
        name, kind = name or "the model", type(part)
        known = kind in registered or kind in rowwise
        if not known and not _in_packages(kind.__module__, replayable):
            return f"{name} is a {kind.__name__}"
        if isinstance(part, nn.Module) and _hooked(part):
            return f"{name} has a hook"
        if kind in registered and (found := _changed(part, name) or _own_function(part, name)):
            return found
        if "forward" in part.__dict__:
            return f"{name} has a forward of its own"
    return None


def _in_packages(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _only_watches(hook: Any) -> bool:
    """Whether this is a hook of torch's own counters of operations, which change nothing."""
    return type(getattr(hook, "__self__", None)).__module__ == "torch.utils.module_tracker"


def _unusual(module: nn.Module, kinds: dict[type, Any]) -> str | None:
    """What makes a module another than a plain one of these types, or None."""
    kind = type(module)
    if kind not in kinds:
        name = kind.__name__
        if any(known.__name__ == name for known in kinds):
            name = f"{kind.__module__}.{name}"
        return f"is a {name}"
    if kind.forward is not kinds[kind]:
        return f"is a {kind.__name__} with another forward"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if _hooked(module):
        return "has a hook"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "changes its weights as it reads them (max_norm)"
    return None


# Kernels


def _why_not_kernels(model: Any) -> str | None:
    """Why the kernels do not compute what a model of known modules without hooks does, or None."""
    blocks: list[Any] = list(dict.fromkeys(all_layers(model)))
    if not _is_readable(model):
        return "the kernels read the weights of entp.Transformer only"
    if getattr(model, "relative", None) is not None:
        return "the model has a bias on attention scores"
    for number, block in enumerate(blocks):
        why = _why_not_block(block, model.width)
        if why:
            return f"block {number}: {why}"
    if len({block.rotary and block.rotary.base for block in blocks}) > 1:
        return "the blocks have different rotary positions"
    if len({(block.heads, block.scale) for block in blocks}) > 1:
        return "the blocks have different heads or scales"
    kinds = {p.dtype for p in model.parameters()}
    if len(kinds) > 1:
        return f"the weights are of several types, {', '.join(sorted(map(str, kinds)))}"
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        return f"the weights are on several devices, {', '.join(sorted(map(str, devices)))}"
    return None


def _is_readable(model: Any) -> bool:
    """Whether the kernels know how to read the weights of the model's and its blocks' classes."""
    return all(type(module) in readable for module in (model, *all_layers(model)))


def _why_not_block(block: Any, width: int) -> str | None:
    """Why the kernels do not compute what a block does, or None."""
    if not block.pre_norm:
        return "its norms come after the residuals"
    if block.kv_heads != block.heads:
        return f"it has {block.kv_heads} key and value heads for {block.heads} queries"
    why = _why_not_activation(block.activation)
    if why:
        return why
    shapes = {
        "qkv": (3 * width, width),
        "proj": (width, width),
        "fc": (4 * width, width),
        "out": (width, 4 * width),
    }
    for name, shape in shapes.items():
        why = _why_not_linear(getattr(block, name), shape)
        if why:
            return f"{name} {why}"
    for name in ("norm_1", "norm_2"):
        why = _why_not_norm(getattr(block, name), width)
        if why:
            return f"{name} {why}"
    if block.rotary is not None and not hasattr(block.rotary, "table"):
        return f"its rotary positions are a {type(block.rotary).__name__}"
    return None


def _why_not_linear(layer: nn.Module, shape: tuple[int, int]) -> str | None:
    """Why the kernels cannot read a layer's weights, or None."""
    if type(layer) is not nn.Linear:
        return f"is a {type(layer).__name__}, not a Linear"
    plain_bias = layer.bias is None or _plain_tensor(layer.bias)
    if not plain_bias or not _plain_tensor(layer.weight):
        return f"has weights of type {type(layer.weight).__name__}"
    if tuple(layer.weight.shape) != shape:
        return f"has weights of shape {tuple(layer.weight.shape)}, not {shape}"
    return None


def _why_not_norm(norm: Any, width: int) -> str | None:
    """Why the kernels do not compute this norm, or None."""
    if type(norm) is nn.Identity:
        return None
    if type(norm) not in (nn.LayerNorm, nn.RMSNorm):
        return f"is a {type(norm).__name__}"
    if tuple(norm.normalized_shape) != (width,):
        return f"is over {tuple(norm.normalized_shape)}, not over the width {width}"
    if any(p is not None and not _plain_tensor(p) for p in norm._parameters.values()):
        return "has weights of an unusual type"
    if norm.eps is None:
        return "has no eps of its own"
    return None


def _why_not_activation(activation: nn.Module) -> str | None:
    """Why the kernels do not compute this activation, or None."""
    if type(activation) in (nn.ReLU, nn.SiLU):
        return None
    if type(activation) is not nn.GELU:
        return f"its activation is {type(activation).__name__}"
    if activation.approximate != "tanh":
        return "its activation is the exact GELU"
    return None


def _plain_tensor(value: Tensor) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def absorbs(model: ModelProtocol) -> bool:
    """Whether packed may move the last layer's key and value matrices to the query's side.

    Only if it can read them, and nothing stands between them and the scores.
    """
    support = support_of(model)
    if support.rows or support.unknown or not _is_readable(model):
        return False
    block: Any = model.stack()[-1]
    if getattr(model, "relative", None) is not None or block.rotary is not None:
        return False
    rows = (block.heads + 2 * block.kv_heads) * (model.width // block.heads)
    return _why_not_linear(block.qkv, (rows, model.width)) is None


def plain_embedding(model: Any) -> bool:
    """Whether the model's embedding is a plain table of tokens, which kernels can read."""
    tokens = getattr(model, "tokens", None)
    if type(tokens) is not nn.Embedding or support_of(model).kernels is not None:
        return False
    plain = tokens.padding_idx is None and not (tokens.scale_grad_by_freq or tokens.sparse)
    return plain and _plain_tensor(tokens.weight)


# Comparison


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference that is rounding, relative to the largest number compared."""
IN_FLOAT64 = 1e-6
"""The same for a float64 copy of a float32 model; some of its modules may compute in float32."""
FEW = (2, 5)
"""Sequences and tokens of them that are compared."""
Compute = Callable[[ModelProtocol, Tensor, Tensor, Tensor | None], Tensor]
"""(model, x, target_mask, position_ids) -> the last block's output at the end of each prefix."""


def compare_once(
    model: ModelProtocol, x: Tensor, position_ids: Tensor | None, run: Compute, reference: Compute
) -> str | None:
    """What a comparison of `run` with the reference on the first tokens of x found wrong, or None.

    Outputs are compared, and gradients where they are enabled. The answer is kept until the model
    changes.
    """
    support = support_of(model)
    kind = next((p.dtype for p in model.parameters()), torch.float32)  # type: ignore[attr-defined]
    time = _time(model, x, position_ids)
    # A model may treat position ids of one's own in another way than its own 0, 1, 2, ...
    key = (kind, time, torch.is_grad_enabled(), position_ids is None)
    if key not in support.compared:
        few, ids = _few(model, x.detach(), position_ids, time)
        tolerance = TOLERANCE.get(kind, 1e-4)
        with not_compiled(model):
            wrong = _difference(model, few, ids, run, reference, tolerance)
            if wrong is not None and _agree_in_float64(model, few, ids, run, reference):
                wrong = None  # large numbers that cancel: it was rounding
        support.compared[key] = wrong
    return support.compared[key]


def _time(model: Any, x: Tensor, position_ids: Tensor | None) -> int:
    """How many tokens are compared: two at least, where the model has room for them. What a single
    token shows says little about several."""
    limit = getattr(model, "context_length", None)
    room = 2 if position_ids is not None or limit is None else min(2, limit)
    return max(room, min(x.shape[1], FEW[1]))


def _few(
    model: Any, x: Tensor, position_ids: Tensor | None, time: int
) -> tuple[Tensor, Tensor | None]:
    """The first `time` tokens of x and their position ids; a single token comes twice.

    Tokens that are all the same show nothing of a module that mixes rows: others take their place.
    """
    at = torch.arange(time, device=x.device) % x.shape[1]
    few = x[: FEW[0], at]
    ids = None if position_ids is None else position_ids[: FEW[0], at]
    if bool((few == few[:, :1]).all()):
        number = torch.arange(few.numel(), device=x.device).view_as(few)
        vocab = getattr(model, "vocab", None)
        if x.is_floating_point():
            few = torch.cos(number).to(x)
        elif vocab is not None:
            few = number % vocab
    return few, ids


def not_compiled(model: Any) -> AbstractContextManager[object]:
    """Inside, what torch.compile made of a model's layers runs as it was written: nothing is
    compiled for a comparison of a few tokens."""
    if not getattr(model, "compiled", False):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _agree_in_float64(
    model: Any, x: Tensor, ids: Tensor | None, run: Compute, reference: Compute
) -> bool:
    """Whether two functions agree for a copy of the model in float64, if it has one that runs."""
    wide = float64_copy(model)
    if wide is None:
        return False
    x = x.double() if x.is_floating_point() else x
    try:
        return _difference(wide, x, ids, run, reference, IN_FLOAT64) is None
    except Exception:  # a module that computes in float32 alone, such as a quantised one
        return False


def float64_copy(model: Any) -> Any:
    """A copy of a float32 model in float64, in which rounding can be told from errors; None of
    other models, and of one that cannot be copied or does not fit."""
    if any(p.dtype != torch.float32 for p in model.parameters()):
        return None
    try:
        return copy.deepcopy(model).double()
    except Exception:  # whatever a module of one's own says to being copied
        return None


def _difference(
    model: ModelProtocol,
    x: Tensor,
    ids: Tensor | None,
    run: Compute,
    reference: Compute,
    tolerance: float,
) -> str | None:
    """How far two functions are apart, or None if they agree."""
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.autocast(x.device.type, enabled=False):
        want = _rows_and_gradients(model, x, ids, reference)
        try:
            got = _rows_and_gradients(model, x, ids, run)
        except Exception as error:
            return f"it fails on packed rows ({type(error).__name__}: {error})"
    outputs = ("packed is", got[:1], want[:1])
    gradients = ("packed's gradients are", got[1:], want[1:])
    for what, one, two in (outputs, gradients):
        pairs = [(a, b) for a, b in zip(one, two, strict=True) if b.numel()]
        size = max((float(b.abs().max()) for _, b in pairs), default=0.0)
        off = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
        if not off <= tolerance * max(size, 1e-30):
            return f"{what} off by {off:.2g} where the largest number is {size:.2g}"
    return None


def _rows_and_gradients(model: Any, x: Tensor, ids: Tensor | None, run: Compute) -> list[Tensor]:
    """Outputs, and where they are enabled the gradients of all trained parameters."""
    rows = run(model, x, torch.ones(x.shape[:2], dtype=torch.bool), ids)
    if not rows.requires_grad:
        return [rows]
    return [rows.detach(), *weighted_gradients(model, rows)]


def weighted_gradients(model: Any, out: Tensor) -> list[Tensor]:
    """Gradients of all trained parameters, of a sum that weighs each output differently."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return []
    weight = torch.cos(torch.arange(out.numel(), device=out.device)).view_as(out).to(out.dtype)
    found = torch.autograd.grad((weight * out).sum(), trained, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
