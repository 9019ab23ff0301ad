"""Which implementation is exact for a model, as it is now, and why not.

The reference runs the model's own forward pass, so it is exact for any model. The others replace it:

- packed calls `embed`, `project`, `finish` and `readout`, and the modules inside them, on packed rows. That is exact if
  these methods are what the forward pass does, and if every module treats each row by itself. Known modules do. Others
  (LoRA, a hook, a layer of one's own) are compared with the reference once, on the first tokens that come.
- The kernels, and packed where it moves the last layer's key and value matrices to the query's side, read weights. That is
  exact only for modules of exactly the types they were written for, without hooks, and without changed methods.

A model can change between two calls. `support_of` compares a fingerprint each time: 0.24 microseconds a module on a server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from entp.engine.fingerprint import GLOBAL_HOOKS, HOOKS, Fingerprint, readable, registered, rowwise
from entp.engine.protocol import ModelProtocol

MOST_KNOWN = 4
"""States of one model that are remembered: in training and in evaluation, with and without a hook."""


@dataclass(eq=False)
class Support:
    """What the engine may do with a model in one state."""

    rows: str | None
    """Why `project` and `finish` on packed rows are not exact; None: they are, if `unknown` is None too."""
    unknown: str | None
    """A module that may treat rows together: packed has to be compared with the reference. None: all are known."""
    kernels: str | None
    """Why the kernels are not exact; None: they are."""
    fingerprint: Fingerprint
    compared: dict[object, str | None] = field(default_factory=dict)
    """By type of numbers and length: what a comparison of packed with the reference found wrong, None for nothing."""
    told: set[str] = field(default_factory=set)
    """Warnings that were given."""

    @property
    def graphs(self) -> bool:
        """May a step be captured? A graph replays no Python, so nothing may depend on it."""
        return self.rows is None and self.unknown is None


_known: WeakKeyDictionary[Any, list[Support]] = WeakKeyDictionary()


def support_of(model: ModelProtocol) -> Support:
    """What the engine may do with the model as it is now. The same object as long as it does not change."""
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
    return Support(rows, unknown, kernels, Fingerprint(model))


def _why_not_rows(model: Any) -> str | None:
    """Why the model's methods may not be what its forward pass computes, or None."""
    changed = _changed(model, "the model", skip=("embed", "readout", "attention_bias"))
    if changed:
        return f"{changed}, which only its own forward pass calls"
    for number, block in enumerate(model.stack()):
        name = f"block {number}"
        if isinstance(block, nn.Module) and _hooked(block):
            return f"{name} has a hook, which only its own forward pass runs"
        changed = _changed(block, name, skip=("project", "finish"))
        if changed:
            return f"{changed}, which only its own forward pass calls"
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            return f"{name} is active dropout, and each implementation would draw its own numbers: call model.eval()"
    return None


def _changed(thing: Any, name: str, skip: tuple[str, ...] = ()) -> str | None:
    """Which method of a registered class was overridden, in a subclass, on the class or on the object, or None.

    skip: methods that packed calls itself, so that a change in them counts. Unregistered classes have nothing to change.
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
    return None


def _hooked(module: nn.Module) -> bool:
    return any(module.__dict__[name] for name in HOOKS)


def _unknown_module(model: Any) -> str | None:
    """A module that may treat rows together, with what is unusual about it, or None."""
    if any(not _only_watches(hook) for hooks in GLOBAL_HOOKS for hook in hooks.values()):
        return "a global module hook is registered"
    blocks = list(model.stack())
    for number, block in enumerate([model, *blocks]):
        if type(block) not in registered:
            return f"{'the model' if number == 0 else f'block {number - 1}'} is a {type(block).__name__}"
        found = _changed(block, "the model" if number == 0 else f"block {number - 1}")
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


def _only_watches(hook: Any) -> bool:
    """Is this a hook of torch's own counters of operations, which change nothing?"""
    return type(getattr(hook, "__self__", None)).__module__ == "torch.utils.module_tracker"


def _unusual(module: nn.Module, kinds: dict[type, Any]) -> str | None:
    """What makes a module another than a plain one of these types, or None."""
    kind = type(module)
    if kind not in kinds:
        alike = any(known.__name__ == kind.__name__ for known in kinds)
        return f"is a {f'{kind.__module__}.{kind.__name__}' if alike else kind.__name__}"
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
    """Why the kernels do not compute what this model does, or None. All its modules are known and have no hooks."""
    blocks = list(dict.fromkeys(model.stack()))
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
    """Are the model and its blocks of classes whose weights the kernels know how to read?"""
    return all(type(part) in readable for part in (model, *model.stack()))


def _why_not_block(block: Any, width: int) -> str | None:
    """Why the kernels do not compute what a block does, or None."""
    if not block.pre_norm:
        return "its norms come after the residuals"
    if block.kv_heads != block.heads:
        return f"it has {block.kv_heads} key and value heads for {block.heads} queries"
    why = _why_not_activation(block.activation)
    if why:
        return why
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "fc": (4 * width, width), "out": (width, 4 * width)}
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
    if not _plain_tensor(layer.weight) or (layer.bias is not None and not _plain_tensor(layer.bias)):
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
    if type(activation) is nn.GELU:
        return None if activation.approximate == "tanh" else "its activation is the exact GELU"
    return f"its activation is {type(activation).__name__}"


def _plain_tensor(value: Tensor) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def absorbs(model: ModelProtocol) -> bool:
    """May packed move the last layer's key and value matrices to the query's side? Only if it can read them."""
    support = support_of(model)
    block: Any = model.stack()[-1]
    if support.rows or support.unknown or not _is_readable(model) or getattr(model, "relative", None) is not None:
        return False
    size = model.width // block.heads
    return block.rotary is None and _why_not_linear(block.qkv, ((block.heads + 2 * block.kv_heads) * size, model.width)) is None


def plain_embedding(model: Any) -> bool:
    """Is the model's embedding a plain table of tokens, without positions or with a learned table of them?"""
    tokens = getattr(model, "tokens", None)
    if type(tokens) is not nn.Embedding or support_of(model).kernels is not None:
        return False
    plain = tokens.padding_idx is None and not (tokens.scale_grad_by_freq or tokens.sparse)
    return plain and _plain_tensor(tokens.weight)


# Comparison


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference that is rounding, relative to the largest number compared."""
FEW = (2, 5)
"""Sequences and tokens of them that are compared."""
Compute = Callable[[ModelProtocol, Tensor, Tensor, Tensor | None], Tensor]
"""(model, x, wanted, position_ids) -> the last block's rows at the end of each wanted prefix."""


def compare_once(model: ModelProtocol, x: Tensor, position_ids: Tensor | None, run: Compute, reference: Compute) -> str | None:
    """What is wrong with `run` for a model with unknown modules: compared with the reference on the first tokens of x.

    Outputs, and gradients where they are recorded. The answer is kept as long as the model does not change.
    """
    support = support_of(model)
    kind = next((p.dtype for p in model.parameters()), torch.float32)  # type: ignore[attr-defined]
    key = kind, min(x.shape[1], FEW[1]), torch.is_grad_enabled()  # what a single token shows says little about several
    if key not in support.compared:
        few = x[: FEW[0], : FEW[1]].detach()
        ids = None if position_ids is None else position_ids[: FEW[0], : FEW[1]]
        support.compared[key] = _difference(model, few, ids, run, reference, TOLERANCE.get(kind, 1e-4))
    return support.compared[key]


def _difference(
    model: ModelProtocol, x: Tensor, ids: Tensor | None, run: Compute, reference: Compute, tolerance: float
) -> str | None:
    """A sentence about how far two functions are apart, or None."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.autocast(x.device.type, enabled=False):
        want = _rows_and_gradients(model, x, ids, reference)
        try:
            got = _rows_and_gradients(model, x, ids, run)
        except Exception as error:
            return f"it fails on packed rows ({type(error).__name__}: {error})"
    for what, one, two in (("packed is", got[:1], want[:1]), ("packed's gradients are", got[1:], want[1:])):
        size = max((float(t.abs().max()) for t in two if t.numel()), default=0.0)
        off = max((float((a - b).abs().max()) for a, b in zip(one, two, strict=True) if b.numel()), default=0.0)
        if not off <= tolerance * max(size, 1e-30):
            return f"{what} off by {off:.2g} where the largest number is {size:.2g}"
    return None


def _rows_and_gradients(model: Any, x: Tensor, ids: Tensor | None, run: Compute) -> list[Tensor]:
    """Rows, and if gradients are recorded those of the trained parameters, of a sum that weighs each number differently."""
    rows = run(model, x, torch.ones(x.shape[:2], dtype=torch.bool), ids)
    if not rows.requires_grad:
        return [rows]
    trained = [p for p in model.parameters() if p.requires_grad]
    weight = torch.cos(torch.arange(rows.numel(), device=rows.device)).view_as(rows).to(rows.dtype)
    found = torch.autograd.grad((weight * rows).sum(), trained, allow_unused=True)
    return [rows.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True))]
