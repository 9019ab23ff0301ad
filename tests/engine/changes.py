"""Ways in which people change a model after it was built."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from entp import Transformer
from entp.engine.masks import attend
from entp.model import Block
from entp.model.positions import Rotary


class RotaryInForward(Block):
    """Positions inside forward, which neither packed nor the kernels call."""

    def forward(
        self,
        h: Tensor,
        position_ids: Tensor,
        mask: Any = None,
        causal: bool = False,
        bias: Any = None,
    ) -> Tensor:
        q, k, v = self.project(h, position_ids)
        turn = Rotary()
        q, k = turn(q, position_ids), turn(k, position_ids)
        attended = attend(
            *(part.transpose(1, 2) for part in (q, k, v)),
            scale=self.scale,
            mask=mask,
            causal=causal,
        )
        return self.finish(h, attended.transpose(1, 2).flatten(2))


class Halved(Block):
    """Another end of the block, which packed calls and the kernels do not."""

    def finish(self, h: Tensor, attended: Tensor) -> Tensor:
        return 0.5 * super().finish(h, attended)


class Lora(nn.Module):
    """A frozen layer and a small product beside it; `weight` is the frozen one's, as in peft."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False, dtype=layer.weight.dtype)
        self.up = nn.Linear(2, layer.out_features, bias=False, dtype=layer.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Int8(nn.Module):
    """A layer whose weights are whole numbers with a scale for each row: it has no `weight`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(layer.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer(
            "whole", (layer.weight.detach() / self.scale.detach()).round().to(torch.int8)
        )
        self.shift = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.whole * self.scale).mT + self.shift


class Shifted(nn.Module):
    """Adds to each row the one before it: rows are not treated by themselves."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.roll(x, 1, dims=-2)[..., :1]


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def each_block(change: Callable[[Any], None]) -> Callable[[Transformer], None]:
    def apply(model: Transformer) -> None:
        for block in model.blocks:
            change(block)

    return apply


def norms(make: Callable[[int], nn.Module]) -> Callable[[Transformer], None]:
    def change(block: Any) -> None:
        weight = block.proj.weight
        block.norm_1, block.norm_2 = (make(len(weight)).to(weight) for _ in range(2))

    return each_block(change)


def put(name: str, make: Callable[[Any], Any]) -> Callable[[Transformer], None]:
    """Replace a module of every block."""
    return each_block(lambda block: setattr(block, name, make(getattr(block, name, None))))


def of_kind(kind: type[Block]) -> Callable[[Transformer], None]:
    """Blocks of another class with the same weights."""

    def change(model: Transformer) -> None:
        for number, block in enumerate(model.blocks):
            other = kind(model.config).to(next(block.parameters()))
            other.load_state_dict(block.state_dict())
            model.blocks[number] = other

    return change


def hooked(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Transformer], None]:
    """A forward hook on a part of block 1, or on the block itself."""

    def apply(model: Transformer) -> None:
        block = model.blocks[1]
        part = getattr(block, name) if name else block
        part.register_forward_hook(lambda _module, _inputs, out: change(out))

    return apply


def scaled_gradient(model: Transformer) -> None:
    """A backward hook that sees all rows together: outputs stay right, gradients would not."""
    layer = model.blocks[1].fc
    layer.register_full_backward_hook(lambda _m, grads, _o: (grads[0] / (1 + grads[0].norm()),))  # type: ignore[union-attr]


def own_finish(model: Transformer) -> None:
    block: Any = model.blocks[0]
    block.finish = types.MethodType(lambda self, h, attended: h + 0.3 * self.proj(attended), block)


def own_forward(model: Transformer) -> None:
    layer: Any = model.blocks[0].fc
    layer.forward = types.MethodType(
        lambda self, x: 0.5 * nn.functional.linear(x, self.weight), layer
    )


def function_for_activation(function: Callable[[Tensor], Tensor]) -> Callable[[Transformer], None]:
    """A plain function where a module was: it is none of the model's modules."""

    def change(block: Any) -> None:
        del block.activation
        block.activation = function

    return each_block(change)


def other_weights(model: Transformer) -> None:
    for block in model.blocks:
        block.qkv.weight = nn.Parameter(block.qkv.weight.detach().flip(0).clone())  # type: ignore[union-attr]


def shared(model: Transformer) -> None:
    model.blocks[-1] = model.blocks[-2]


def compiled(model: Transformer) -> None:
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # type: ignore[assignment]


class Change(NamedTuple):
    """A change of a model, and which implementations stay exact."""

    apply: Callable[[Transformer], Any]
    packed: bool
    triton: bool


GELUS = {"tanh": lambda _: nn.GELU("tanh"), "exact": lambda _: nn.GELU()}
CHANGES: dict[str, Change] = {
    "rms norm": Change(norms(lambda width: nn.RMSNorm(width, eps=1e-5)), True, True),
    "layer norm without weights": Change(
        norms(lambda width: nn.LayerNorm(width, elementwise_affine=False)), True, True
    ),
    "layer norm without bias": Change(
        norms(lambda width: nn.LayerNorm(width, bias=False)), True, True
    ),
    "layer norm with another eps": Change(
        norms(lambda width: nn.LayerNorm(width, eps=0.5)), True, True
    ),
    "silu": Change(put("activation", lambda _: nn.SiLU()), True, True),
    "relu": Change(put("activation", lambda _: nn.ReLU()), True, True),
    "exact gelu": Change(put("activation", GELUS["exact"]), True, False),
    "tanh": Change(put("activation", lambda _: nn.Tanh()), True, False),
    "rotary positions in forward": Change(of_kind(RotaryInForward), False, False),
    "another finish": Change(of_kind(Halved), True, False),
    "lora": Change(put("qkv", Lora), True, False),
    "qkv without a weight": Change(put("qkv", Int8), True, False),
    "int8 fc": Change(put("fc", Int8), True, False),
    "hook on a block": Change(hooked("", lambda out: 1.5 * out), False, False),
    "hook inside a block": Change(hooked("fc", lambda out: 1.5 * out), True, False),
    "hook that mixes rows": Change(
        hooked("fc", lambda out: out + torch.roll(out, 1, -2)), False, False
    ),
    "backward hook that mixes rows": Change(scaled_gradient, False, False),
    "module that mixes rows": Change(put("fc", Shifted), False, False),
    "parametrization": Change(
        each_block(
            lambda block: parametrize.register_parametrization(block.fc, "weight", Doubled())
        ),
        True,
        False,
    ),
    "a finish of its own": Change(own_finish, True, False),
    "a forward of its own": Change(own_forward, True, False),
    "compiled block": Change(compiled, True, False),
    "weights replaced": Change(other_weights, True, True),
    "weights shared between blocks": Change(shared, True, True),
    "frozen weights": Change(lambda model: model.blocks[0].requires_grad_(False), True, True),
    "eps changed in place": Change(
        each_block(lambda block: setattr(block.norm_1, "eps", 0.5)), True, True
    ),
    "scale changed in place": Change(
        each_block(lambda block: setattr(block, "scale", 0.1)), True, True
    ),
    "embedding with a largest norm": Change(
        lambda model: setattr(model.tokens, "max_norm", 1.0), True, False
    ),
    "gradient divided by frequency": Change(
        lambda model: setattr(model.tokens, "scale_grad_by_freq", True), False, False
    ),
    "activation is a function": Change(function_for_activation(torch.tanh), True, False),
    "function that mixes rows": Change(
        function_for_activation(lambda x: x + torch.roll(x, 1, -2)), False, False
    ),
}
