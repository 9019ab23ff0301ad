"""What a step asks of the host that a CUDA graph cannot hold, seen without a GPU.

Torch's meta device stands in for a GPU: its tensors have no values. Reading one is an error there,
and so is computing with one from the CPU. Copies from the CPU are not, so a mode counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostCopies(TorchDispatchMode):
    """Inside, copies from the CPU to the meta device are noted in `found`, and tensors that are
    made of a list of values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.made = _MadeOfValues(self.found)

    def __enter__(self) -> HostCopies:
        self.made.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.made.__exit__(*error)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if "cpu" in given and isinstance(out, Tensor) and out.is_meta:
            self.found.append(str(func))
        return out


class _MadeOfValues(TorchFunctionMode):
    """torch.tensor(list, device=...) copies too, which the other mode does not see."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            self.found.append(f"{func.__name__}({args[0]!r})")
        return func(*args, **(kwargs or {}))


def to_meta(thing: Any) -> Any:
    """A tensor, or a dictionary of tensors, on the meta device."""
    if isinstance(thing, dict):
        return {name: to_meta(one) for name, one in thing.items()}
    return thing.to("meta") if isinstance(thing, Tensor) else thing
