"""Classes that the engine knows, and the fingerprint that tells when a model has changed."""

from __future__ import annotations

import functools
import operator
from itertools import chain
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import _DropoutNd

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CHILDREN = ("_parameters", "_buffers", "_modules")

registered: dict[type, dict[str, FunctionType]] = {}
"""Classes of models and blocks, with methods that agree with each other."""
calls: dict[FunctionType, dict[str, object]] = {}
"""The functions that each of these methods calls by name, such as the attention of its module."""
ATTENTION = F.scaled_dot_product_attention
"""Torch's own."""
readable: set[type] = set()
"""Those of them whose weights the kernels can read."""
_LAYERS = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Embedding,
    nn.Identity,
    nn.Dropout,
    nn.Sequential,
)
_ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.ELU)
rowwise: dict[type[nn.Module], Any] = {kind: kind.forward for kind in (*_LAYERS, *_ACTIVATIONS)}
"""Modules that treat each row by itself, with their forward."""
replayable: set[str] = {"torch.nn"}
"""Packages whose modules compute from tensors and fixed settings alone."""


def register(kind: type, *methods: str, kernels: bool = False) -> None:
    """Declare a class of models or blocks whose `methods` agree with each other, as they are now.

    kernels: its modules and their names are those of entp.model, so that the kernels can read its
        weights.
    """
    registered[kind] = {name: getattr(kind, name) for name in methods}
    calls.update((method, _called(method)) for method in registered[kind].values())
    if kernels:
        readable.add(kind)


def _called(method: Any) -> dict[str, object]:
    """The functions of its module that a method calls by name, as they are now."""
    code, space = getattr(method, "__code__", None), getattr(method, "__globals__", {})
    found = {name: space.get(name) for name in (code.co_names if code else ())}
    return {name: value for name, value in found.items() if isinstance(value, FunctionType)}


def replaced(method: FunctionType) -> str | None:
    """The name of a function that another was put in place of, of those that a method calls."""
    known = calls.get(method, {})
    return next((name for name, own in known.items() if method.__globals__[name] is not own), None)


def register_rowwise(*kinds: type[nn.Module]) -> None:
    """Declare modules that treat each row (..., D) by itself."""
    rowwise.update((kind, kind.forward) for kind in kinds)


def register_replayable(*packages: str) -> None:
    """Declare packages whose modules compute from tensors and fixed settings alone, so that a step
    of theirs may be captured and replayed."""
    replayable.update(packages)


class Fingerprint:
    """What a model consists of besides its weights' values: modules, attributes, hooks, methods.

    Comparing is a few passes over lists in C, where the same object is found equal by its identity.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(dict.fromkeys(model.modules()))
        self.kind = type(model)
        # Not the model itself, which is to be forgotten when nobody else holds it.
        self.modules = modules[1:]
        self.kinds = list(map(type, self.modules))
        self.attributes = [m.__dict__ for m in modules]
        self.sizes = list(map(len, self.attributes))
        named = [(m.__dict__, _names(m)) for m in modules]
        self.read = [
            functools.partial(operator.itemgetter(*names), d) for d, names in named if names
        ]
        self.values = [read() for read in self.read]
        children = [m.__dict__[name] for m in modules for name in CHILDREN]
        self.empty = [d for d in children if not d]
        self.views = [d.values() for d in children if d]
        self.held = list(chain.from_iterable(self.views))
        self.tensors = [held for held in self.held if isinstance(held, Tensor)]
        self.hooks = [m.__dict__[name] for m in modules for name in HOOKS]
        self.hook_keys = list(chain.from_iterable(self.hooks))
        self.methods = _methods_now()

    def fits(self, model: nn.Module) -> bool:
        """Whether the model, the same one, is still what it was."""
        if type(model) is not self.kind or list(map(type, self.modules)) != self.kinds:
            return False
        if any(self.empty) or list(map(len, self.attributes)) != self.sizes:
            return False
        if _methods_now() != self.methods:
            return False
        hooked = self.hook_keys or any(self.hooks)
        if hooked and list(chain.from_iterable(self.hooks)) != self.hook_keys:
            return False
        held = list(chain.from_iterable(self.views))
        if len(held) != len(self.held) or not all(map(operator.is_, held, self.held)):
            return False
        try:
            return [read() for read in self.read] == self.values
        except (KeyError, RuntimeError, ValueError, TypeError):
            return False  # gone, or tensors, which do not compare to one truth value

    def weights(self) -> list[tuple[int, bool]]:
        """Address of each weight and whether it is trained: a captured step depends on them too."""
        return [(t.data_ptr(), t.requires_grad) for t in self.tensors]


SETTINGS = (bool, int, float, str, list, tuple)
IRRELEVANT: dict[type, set[str]] = {
    nn.Linear: {"in_features", "out_features"},
    nn.ReLU: {"inplace"},
    nn.SiLU: {"inplace"},
    nn.ModuleList: {"training"},
}
"""Attributes of known modules that change nothing: weights have their own shapes."""


def _names(module: nn.Module) -> list[str]:
    """The attributes that say what a module computes; `training` where that may matter."""
    kind = type(module)
    skip = set(IRRELEVANT.get(kind, ()))
    rows_only = kind in rowwise and not isinstance(module, _DropoutNd)
    if kind in registered or rows_only:
        skip.add("training")
    names = [name for name in module.__dict__ if not name.startswith("_") and name not in skip]
    if kind in registered or kind in rowwise:
        return names
    # Settings of modules that are not known, such as whether a LoRA is active.
    private = (name for name in module.__dict__ if name.startswith("_"))
    return names + [name for name in private if isinstance(module.__dict__[name], SETTINGS)]


def _methods_now() -> list[object]:
    """Global hooks, the methods of all known classes, and what these call."""
    found: list[object] = list(chain.from_iterable(GLOBAL_HOOKS))
    found += [getattr(kind, name, None) for kind, methods in registered.items() for name in methods]
    found += [kind.forward for kind in rowwise]
    found += [method.__globals__[name] for method, names in calls.items() for name in names]
    found.append(F.scaled_dot_product_attention)
    return found


GLOBAL_HOOKS = [getattr(torch_module, f"_global{name}") for name in HOOKS]
