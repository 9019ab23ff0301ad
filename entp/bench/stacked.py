"""Several small models trained in one step: their weights stand one above the other, (K, ...), and
every product is a batched one.

    stack = Stack(run, seeds=[0, 1, 2], device=device)
    loss = stack(batches)        # one batch for each model; all with targets at the same places

Each model learns what it would learn alone: the step is that of training with AdamW, gradient
clipping for each model by itself included. On CUDA attention and norms are the engine's kernels,
over the rows of all models, and the step is one graph.

Names: K models, B sequences each, T tokens, M prefixes and N rows of each model, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from entp.config import ModelConfig, Run
from entp.engine.api import triton_missing
from entp.engine.layout import Packing, pack, whole_sequences
from entp.engine.masks import attend
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.base import Batch
from entp.training.cuda_graph import EAGER_STEPS, Feed
from entp.training.forward import Forward
from entp.training.optimizers import set_learning_rate
from entp.training.plan import Plan

EPS = 1e-5
"""Of the norms."""
SMALL_VOCAB = 64
"""Tokens up to which embedding is a product."""


@dataclass(frozen=True, eq=False)
class StackedRows:
    """Where the rows of all models' prefixes stand: model by model, each as in `one`.

    Prefixes are numbered by length, so that one launch has equal ones, or model by model.
    """

    one: Packing
    """The packing of one model."""
    models: int

    @property
    def batch(self) -> int:
        return self.models * self.one.batch

    @property
    def longest(self) -> int:
        return self.one.longest

    @property
    def rows(self) -> int:
        return self.models * self.one.rows

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        return tuple((m, self.models * count) for m, count in self.one.groups)

    @cached_property
    def starts(self) -> Tensor:
        """(K M,) int32 first rows, by length."""
        return self._by_length(self.one.starts)

    @cached_property
    def ends(self) -> Tensor:
        """(K M,) int32 one past the last rows, by length."""
        return self._by_length(self.one.ends)

    def _by_length(self, bounds: Tensor) -> Tensor:
        counts = [count for _, count in self.one.groups]
        groups = self.above(bounds, self.one.rows).split(counts, dim=1)
        return torch.cat([group.flatten() for group in groups])

    @cached_property
    def row_index(self) -> Tensor:
        """(K N,) int32 each row's token among all sequences."""
        return self.above(self.one.row_index, self.one.batch * self.longest).flatten()

    @cached_property
    def row_of(self) -> Tensor:
        """(K B, longest) int32 the first row of the prefix that ends there, -1 where none does."""
        first = self.above(self.one.row_of, self.one.rows)
        return torch.where(self.one.row_of < 0, self.one.row_of, first).flatten(0, 1)

    @cached_property
    def last_slot(self) -> Tensor:
        """(K N,) int32 the number of a row's prefix, model by model, if the row is its last."""
        slots = self.above(self.one.last_slot, len(self.one.length))
        return torch.where(self.one.last_slot < 0, self.one.last_slot, slots).flatten()

    @cached_property
    def length(self) -> Tensor:
        """(K M,) the length of each prefix, model by model."""
        return self.one.length.repeat(self.models)

    @cached_property
    def by_model(self) -> Bounds:
        """The prefixes numbered model by model."""
        rows = self.one.rows
        return Bounds(*(self.above(b, rows).flatten() for b in (self.one.starts, self.one.ends)))

    def above(self, table: Tensor, step: int) -> Tensor:
        """(K, ...) the table of each model: its numbers are `step` above the last one's."""
        first = torch.arange(self.models, device=table.device, dtype=table.dtype) * step
        return first.view(-1, *[1] * table.ndim) + table

    def tables(self) -> None:
        """All tables, made now: a step that is being captured must find them."""
        _ = self.starts, self.ends, self.row_index, self.row_of, self.last_slot, self.by_model


@dataclass(frozen=True)
class Bounds:
    """First rows of prefixes, and one past their last."""

    starts: Tensor
    ends: Tensor


class Operations(Protocol):
    """What stands between the products, on the rows of all models (K, R, ...).

    A stream is what the blocks add to; only these functions look into it.
    """

    def start(self, h: Tensor) -> tuple[Any, Tensor]:
        """A stream that begins with the rows h, and these normed."""

    def add(self, stream: Any, y: Tensor) -> tuple[Any, Tensor]:
        """The stream after adding y, and its normed rows."""

    def add_first(self, h: Tensor, y: Tensor, rows: StackedRows) -> tuple[Any, Tensor]:
        """The same where h is still that of tokens (K, B T, D), and y has the rows of prefixes."""

    def add_last(self, stream: Any, y: Tensor, rows: StackedRows) -> tuple[Any, Tensor, Tensor]:
        """The stream at the end of each prefix (K, M, D), and the normed rows, all and there."""

    def end(self, stream: Any, y: Tensor) -> Tensor:
        """The stream's rows after adding y."""

    def normed(self, h: Tensor) -> Tensor:
        """Rows of mean 0 and variance 1."""

    def first_attention(self, qkv: Tensor, rows: StackedRows) -> Tensor:
        """Tokens (K, B T, 3 D) over the prefixes that they stand in: (K, N, D)."""

    def attention(self, qkv: Tensor, rows: StackedRows) -> Tensor:
        """Inside each prefix: (K, N, 3 D) to (K, N, D)."""

    def causal(self, qkv: Tensor, time: int) -> Tensor:
        """Inside each sequence of so many tokens: (K, B T, 3 D) to (K, B T, D)."""

    def query(self, x: Tensor, q: Tensor, rows: StackedRows) -> Tensor:
        """Contexts (K, H, M, D): a query per prefix and head over the rows x (K, N, D)."""


class PlainOperations:
    """In plain torch, on any device: what the kernels are compared with."""

    def __init__(self, heads: int, width: int, half: torch.dtype) -> None:
        self.heads, self.scale, self.half = heads, (width // heads) ** -0.5, half

    def start(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.normed(h)

    def add(self, stream: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = stream + y
        return h, self.normed(h)

    def add_first(self, h: Tensor, y: Tensor, rows: StackedRows) -> tuple[Tensor, Tensor]:
        return self.add(h.index_select(1, rows.one.row_index), y)

    def add_last(
        self, stream: Tensor, y: Tensor, rows: StackedRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        h, x = self.add(stream, y)
        last = rows.one.last_row
        return h.index_select(1, last), x, x.index_select(1, last)

    def end(self, stream: Tensor, y: Tensor) -> Tensor:
        return stream + y

    def normed(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:], eps=EPS).to(self.half)

    def first_attention(self, qkv: Tensor, rows: StackedRows) -> Tensor:
        return self.attention(qkv.index_select(1, rows.one.row_index), rows)

    def attention(self, qkv: Tensor, rows: StackedRows) -> Tensor:
        found = []
        parts = qkv.split(rows.one.row_counts, dim=1)
        for (m, count), part in zip(rows.one.groups, parts, strict=True):
            found.append(self._inside(part.unflatten(1, (count, m)), False).flatten(1, 2))
        return torch.cat(found, 1)

    def causal(self, qkv: Tensor, time: int) -> Tensor:
        return self._inside(qkv.unflatten(1, (-1, time)), True).flatten(1, 2)

    def _inside(self, qkv: Tensor, causal: bool) -> Tensor:
        """Attention over the tokens of (K, sequences, tokens, 3 D)."""
        q, k, v = qkv.flatten(0, 1).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, scale=self.scale, causal=causal)
        return out.transpose(1, 2).flatten(2).unflatten(0, qkv.shape[:2])

    def query(self, x: Tensor, q: Tensor, rows: StackedRows) -> Tensor:
        found, counts = [], [count for _, count in rows.one.groups]
        parts = zip(
            rows.one.groups,
            x.split(rows.one.row_counts, dim=1),
            q.transpose(1, 2).split(counts, dim=1),
            strict=True,
        )
        for (m, count), keys, queries in parts:
            own = keys.unflatten(1, (count, m))  # (K, count, m, D)
            weight = torch.softmax(self.scale * queries @ own.mT, dim=-1)
            found.append(weight @ own)
        return torch.cat(found, 1).transpose(1, 2)


class KernelOperations:
    """By the engine's kernels. Biases are added by the products, so the kernels get zeros."""

    def __init__(self, heads: int, width: int, half: torch.dtype, like: Tensor) -> None:
        from entp.engine.triton import attention, last, online_softmax, rows

        self.heads, self.scale, self.half = heads, (width // heads) ** -0.5, half
        self.rows, self.norm = rows, rows.Norm(rows.LAYER, EPS)
        self.inside, self.scan = attention.prefix_attention, online_softmax.running_attention
        self.last = last
        self.zeros, self.no_bias = like.new_zeros(width), like.new_zeros(3 * width)

    def start(self, h: Tensor) -> tuple[Any, Tensor]:
        flat = h.flatten(0, 1)
        x = self.rows.normed(flat, self.norm, self.half)
        return self.rows.stream_start(flat, self.half), x.view(h.shape)

    def add(self, stream: Any, y: Tensor) -> tuple[Any, Tensor]:
        h, x = self.rows.add_norm(stream, y.flatten(0, 1), self.zeros, self.norm)
        return h, x.view(y.shape)

    def add_first(self, h: Tensor, y: Tensor, rows: StackedRows) -> tuple[Any, Tensor]:
        tokens = h.reshape(rows.batch, rows.longest, -1)
        packing: Any = rows
        out, x = self.rows.first_add_norm(tokens, y.flatten(0, 1), self.zeros, self.norm, packing)
        return out, x.view(y.shape)

    def add_last(self, stream: Any, y: Tensor, rows: StackedRows) -> tuple[Any, Tensor, Tensor]:
        packing: Any = rows
        h, x, last = self.rows.last_add_norm(
            stream, y.flatten(0, 1), self.zeros, self.norm, packing
        )
        return h, x.view(y.shape), last.view(len(y), -1, y.shape[2])

    def end(self, stream: Any, y: Tensor) -> Tensor:
        return self.rows.stream_end(stream, y.flatten(0, 1), self.zeros).view(y.shape)

    def normed(self, h: Tensor) -> Tensor:
        return self.rows.normed(h.flatten(0, 1), self.norm, self.half).view(h.shape)

    def first_attention(self, qkv: Tensor, rows: StackedRows) -> Tensor:
        packing: Any = rows
        out = self.scan(qkv.flatten(0, 1), self.no_bias, packing, self.heads, self.scale)
        return out.view(len(qkv), rows.one.rows, -1)

    def attention(self, qkv: Tensor, rows: StackedRows) -> Tensor:
        packing: Any = rows
        out = self.inside(qkv.flatten(0, 1), self.no_bias, packing, self.heads, self.scale)
        return out.view(*qkv.shape[:2], -1)

    def causal(self, qkv: Tensor, time: int) -> Tensor:
        packing = whole_sequences(qkv.shape[0] * qkv.shape[1] // time, time, qkv.device)
        out = self.inside(qkv.flatten(0, 1), self.no_bias, packing, self.heads, self.scale, 0)
        return out.view(*qkv.shape[:2], -1)

    def query(self, x: Tensor, q: Tensor, rows: StackedRows) -> Tensor:
        models, heads, count, width = q.shape
        flat = q.transpose(0, 1).reshape(heads, models * count, width).contiguous()
        out = _Query.apply(
            x.flatten(0, 1), flat, rows.by_model, self.scale, self.zeros.dtype, self.last
        )
        return out.view(heads, models, count, width).transpose(0, 1)


class _Query(torch.autograd.Function):
    """The last layer's attention by its kernels, between products that are batched here."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, q: Tensor, bounds: Any, scale: float, wide: torch.dtype, kernels: Any
    ) -> Tensor:
        context, lse = kernels.query_forward(x, q, bounds, scale, wide)
        ctx.save_for_backward(x, q, lse, context)
        ctx.more = bounds, scale, kernels
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, q, lse, context = ctx.saved_tensors
        bounds, scale, kernels = ctx.more
        dx, dq = kernels.query_backward(x, q, bounds, scale, lse, context, grad.contiguous())
        return dx, dq, None, None, None, None


class Weights:
    """The weights of K models of one shape in two tensors: matrices, and vectors, which are not
    decayed."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        named = [dict(model.named_parameters()) for model in models]
        self.shapes = {name: p.shape for name, p in named[0].items()}
        self.names = {
            wide: [n for n, shape in self.shapes.items() if (len(shape) >= 2) == wide]
            for wide in (True, False)
        }
        self.matrices, self.vectors = (
            torch.stack(
                [torch.cat([own[n].detach().flatten() for n in self.names[wide]]) for own in named]
            ).requires_grad_()
            for wide in (True, False)
        )

    @property
    def parameters(self) -> list[Tensor]:
        return [self.matrices, self.vectors]

    def views(self, matrices: Tensor, vectors: Tensor) -> dict[str, Tensor]:
        """Each weight (K, ...) by its name: of these tensors, or of gradients like them."""
        found: dict[str, Tensor] = {}
        for wide, both in ((True, matrices), (False, vectors)):
            names = self.names[wide]
            parts = both.split([self.shapes[n].numel() for n in names], dim=1)
            found |= {n: p.unflatten(1, self.shapes[n]) for n, p in zip(names, parts, strict=True)}
        return found

    def __call__(self) -> dict[str, Tensor]:
        return self.views(self.matrices, self.vectors)


def check_config(config: ModelConfig) -> None:
    """InputError for a model that cannot be stacked."""
    wanted = {
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "position_embedding": "learned",
        "attention_scale": "sqrt",
        "bias": True,
        "tied_head": True,
        "outputs": None,
        "kv_heads": None,
        "input_dim": None,
        "loops": 1,
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise InputError(
                f"model.{name} is {getattr(config, name)}: models that are stacked must have "
                f"{value}, as the paper's."
            )
    if config.layers < 2:
        raise InputError(
            f"model.layers is {config.layers}: models that are stacked need 2 or more."
        )


def logits(
    w: dict[str, Tensor], config: ModelConfig, x: Tensor, rows: StackedRows | None, ops: Operations
) -> Tensor:
    """Outputs (K, R, vocab) of tokens (K, B, T).

    rows: the prefixes, whose outputs come as in its packing; None for a decoder: of every token.
    """
    time = x.shape[2]
    h = _embed(w["tokens.weight"], x)
    h = (h + w["positions"][:, None, :time]).flatten(1, 2)
    last = config.layers - 1
    if rows is None:
        stream, n = ops.start(h)
        for layer in range(config.layers):
            stream, n, y = _block(w, layer, stream, n, ops, lambda qkv: ops.causal(qkv, time))
            if layer < last:
                stream, n = ops.add(stream, y)
        out = ops.end(stream, y)
    else:
        y = _attended(w, 0, ops.first_attention(_qkv(w, 0, ops.normed(h)), rows))
        stream, n = ops.add_first(h, y, rows)
        y = _mlp(w, 0, n)
        for layer in range(1, last):
            stream, n = ops.add(stream, y)
            stream, n, y = _block(w, layer, stream, n, ops, lambda qkv: ops.attention(qkv, rows))
        stream, n, ends = ops.add_last(stream, y, rows)
        y = _attended(w, last, _last_attention(w, last, n, ends, rows, config.heads, ops))
        stream, n = ops.add(stream, y)
        out = ops.end(stream, _mlp(w, last, n))
    return _norm_linear(ops.normed(out), w["tokens.weight"], None, w["norm.weight"], w["norm.bias"])


def _embed(tokens: Tensor, x: Tensor) -> Tensor:
    """Rows (K, B, T, D) of tokens (K, vocab, D). Of few tokens by a product, whose backward pass
    adds up in a fixed order and does not sort."""
    models, vocab, _ = tokens.shape
    if vocab <= SMALL_VOCAB:
        chosen = x.flatten(1)[..., None] == torch.arange(vocab, device=x.device)
        return torch.bmm(chosen.to(tokens.dtype), tokens).unflatten(1, x.shape[1:])
    first = vocab * torch.arange(models, device=x.device)[:, None, None]
    return F.embedding(x + first, tokens.flatten(0, 1))


def _block(
    w: dict[str, Tensor], layer: int, stream: Any, n: Tensor, ops: Operations, attention: Any
) -> tuple[Any, Tensor, Tensor]:
    """A block from its normed rows: the stream, and the product that has yet to be added to it."""
    stream, n = ops.add(stream, _attended(w, layer, attention(_qkv(w, layer, n))))
    return stream, n, _mlp(w, layer, n)


def _qkv(w: dict[str, Tensor], layer: int, n: Tensor) -> Tensor:
    return _norm_linear(n, *_linear_of(w, layer, "qkv"), *_norm_of(w, layer, "norm_1"))


def _mlp(w: dict[str, Tensor], layer: int, n: Tensor) -> Tensor:
    u = _norm_linear(n, *_linear_of(w, layer, "fc"), *_norm_of(w, layer, "norm_2"))
    return _linear(F.gelu(u, approximate="tanh"), *_linear_of(w, layer, "out"))


def _attended(w: dict[str, Tensor], layer: int, attended: Tensor) -> Tensor:
    return _linear(attended, *_linear_of(w, layer, "proj"))


def _linear_of(w: dict[str, Tensor], layer: int, name: str) -> tuple[Tensor, Tensor]:
    return w[f"blocks.{layer}.{name}.weight"], w[f"blocks.{layer}.{name}.bias"]


def _norm_of(w: dict[str, Tensor], layer: int, name: str) -> tuple[Tensor, Tensor]:
    return w[f"blocks.{layer}.{name}.weight"], w[f"blocks.{layer}.{name}.bias"]


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (K, R, I) times weight (K, O, I) transposed, plus bias (K, O)."""
    return torch.baddbmm(bias[:, None].to(x.dtype), x, weight.to(x.dtype).mT)


def _folded(
    weight: Tensor, bias: Tensor | None, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Gain and shift (K, I) of a norm folded into the product that follows (rows.py)."""
    moved = torch.bmm(weight, shift[..., None])[..., 0]
    return weight * gain[:, None], moved if bias is None else bias + moved


def _norm_linear(
    n: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor, shift: Tensor
) -> Tensor:
    return _linear(n, *_folded(weight, bias, gain, shift))


def _last_attention(
    w: dict[str, Tensor],
    layer: int,
    n: Tensor,
    ends: Tensor,
    rows: StackedRows,
    heads: int,
    ops: Operations,
) -> Tensor:
    """One query per prefix (K, M, D); key and value matrices on its side, as in packed.py."""
    models, count, width = ends.shape
    weight, bias = _folded(*_linear_of(w, layer, "qkv"), *_norm_of(w, layer, "norm_1"))
    weight, bias = weight.to(n.dtype), bias.to(n.dtype)
    w_k, w_v = weight[:, width:].unflatten(1, (2 * heads, -1)).split(heads, dim=1)
    q = torch.baddbmm(bias[:, None, :width], ends, weight[:, :width].mT)
    by_head = q.view(models, count, heads, -1).transpose(1, 2)  # (K, H, M, d)
    context = ops.query(n, by_head @ w_k, rows)
    attended = (context @ w_v.mT).transpose(1, 2).flatten(2)
    return attended + bias[:, None, 2 * width :]


class Stack:
    """The training steps of one run with several seeds, all models in each."""

    def __init__(
        self,
        run: Run,
        seeds: Sequence[int],
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        kernels: bool | None = None,
    ) -> None:
        """kernels: None for those of the engine where they can run."""
        check_config(run.model)
        if run.mode not in ("entp", "decoder"):
            raise InputError(f"mode is {run.mode}: models that are stacked run entp or decoder.")
        self.run, self.device, self.plan = run, device, Plan(run)
        self.how, self.step = Forward.of(run), 0
        models = []
        for seed in seeds:
            torch.manual_seed(seed)
            models.append(Transformer(run.model).to(device, dtype))
        self.weights = Weights(models)
        with self.how.autocast(device):
            half = torch.bfloat16 if torch.is_autocast_enabled(device.type) else dtype
        if kernels is None:
            kernels = device.type == "cuda" and triton_missing(device) is None
        shape = run.model.heads, run.model.width, half
        self.ops: Operations = (
            KernelOperations(*shape, self.weights.vectors) if kernels else PlainOperations(*shape)
        )
        self.optimizer = self._optimizer()
        self.mask: np.ndarray | None = None
        self.rows: StackedRows | None = None
        self.whole: Packing | None = None
        """Of a decoder: held, because a captured step reads its tables."""
        self.at: Tensor | None = None
        self.captured: tuple[torch.cuda.CUDAGraph, Feed, Tensor] | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _optimizer(self) -> torch.optim.AdamW:
        """AdamW as training has it; vectors are not decayed."""
        optim, cuda = self.run.optim, self.device.type == "cuda"
        if optim.name != "adamw":
            raise InputError(f"optim.name is {optim.name}: models that are stacked train by adamw.")
        groups = [
            {"params": [self.weights.matrices], "weight_decay": optim.weight_decay},
            {"params": [self.weights.vectors], "weight_decay": 0.0},
        ]
        rate = torch.tensor(optim.lr, device=self.device) if cuda else optim.lr
        betas = (optim.beta1, optim.beta2)
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=cuda, capturable=cuda)

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """One step on a batch for each model; the mean of their losses."""
        self._lay_out(batches)
        set_learning_rate([self.optimizer], self.plan.learning_rate(self.step, 0.0))
        arrays = {
            name: torch.from_numpy(np.stack([getattr(batch, name) for batch in batches]))
            for name in ("x", "y")
        }
        self.step += 1
        if self.captured is not None:
            graph, feed, loss = self.captured
            feed(arrays)
            graph.replay()
            return loss
        there = {name: value.to(self.device) for name, value in arrays.items()}
        if self.stream is None or not self.run.train.cuda_graph:
            return self.update(**there)
        if self.step <= EAGER_STEPS:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                loss = self.update(**there)
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            return loss
        return self._capture(there)

    def _capture(self, there: dict[str, Tensor]) -> Tensor:
        """Capture the step on these arrays, and do it."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            loss = self.update(**there)
        self.captured = graph, Feed(there), loss
        graph.replay()
        return loss

    def _lay_out(self, batches: Sequence[Batch]) -> None:
        """Tables for the targets, which must be those of every other batch."""
        for batch in batches:
            if batch.lengths is not None or batch.position_ids is not None:
                raise InputError("batches that are stacked have no padding and no position ids.")
            if self.mask is None:
                self.mask = batch.target_mask
                self._tables(torch.from_numpy(self.mask), len(batches))
            elif not np.array_equal(self.mask, batch.target_mask):
                raise InputError("batches that are stacked must have targets at the same places.")

    def _tables(self, targets: Tensor, models: int) -> None:
        size, time = targets.shape
        if self.run.mode == "decoder":
            flat = targets.flatten().nonzero()[:, 0].to(self.device)
            self.whole = whole_sequences(models * size, time, self.device)
            self.whole.tables()
        else:
            one = pack(targets, self.device)
            self.rows = StackedRows(one, models)
            self.rows.tables()
            flat = one.sequence * time + one.length - 1
        self.at = flat

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of the models' losses, each a mean over its targets."""
        assert self.at is not None
        time = x.shape[2] if self.rows is None else self.rows.longest
        w = self.weights()
        outputs = logits(w, self.run.model, x[:, :, :time], self.rows, self.ops)
        if self.rows is None and len(self.at) < outputs.shape[1]:
            outputs = outputs.index_select(1, self.at)
        targets = y.flatten(1).index_select(1, self.at)
        return self.how.loss_sum(outputs.flatten(0, 1), targets.flatten()) / len(self.at)

    def update(self, x: Tensor, y: Tensor) -> Tensor:
        """Gradients, clipping for each model by itself, AdamW; the mean of the losses."""
        loss = self.losses(x, y)
        found = torch.autograd.grad(loss, self.weights.parameters)
        squares = torch.stack([g.square().sum(1) for g in found]).sum(0)
        most = self.run.optim.grad_clip or float("inf")
        factor = (most / (squares.sqrt() + 1e-6)).clamp(max=1.0)[:, None]
        for p, g in zip(self.weights.parameters, found, strict=True):
            p.grad = g * factor
        self.optimizer.step()
        return loss.detach() / len(x)
