"""`entp.check`: every implementation against the reference, for one model, on small inputs.

print(entp.check(model))

mode     implementation  outputs  gradients  verdict
entp     attention             -          -  full: tokens see later ones
entp     packed          2.4e-07    6.0e-07  exact
entp     triton                -          -  not used: norm_1 is a BatchNorm1d
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from entp.config import MODES
from entp.engine.api import masked_hidden, predict
from entp.engine.arguments import check_inputs
from entp.engine.choice import resolve
from entp.engine.generation.caches import DecoderCache, EntpCache, NoCache
from entp.engine.generation.generate import make_cache
from entp.engine.protocol import ModelProtocol, depth
from entp.engine.support import IN_FLOAT64, TOLERANCE, float64_copy, weighted_gradients
from entp.errors import EngineWarning, InputError
from entp.terminal import format_table

WRONG = "WRONG"
"""How the verdict on an implementation that is not exact begins."""
UNLIKE = "UNLIKE ITS MODE"
"""How the verdict on attention begins that is not what the mode's name says."""
SAME = 1e-6
"""A state that changes by less, of the largest number, has not seen the token that was changed."""


@dataclass(frozen=True)
class Row:
    """One implementation in one mode."""

    mode: str
    implementation: str
    outputs: float | None
    """Largest difference of outputs, relative to the largest output; None if it was not run."""
    gradients: float | None
    """The same, the worst of all parameters' gradients, each relative to its own largest number."""
    verdict: str


@dataclass(frozen=True)
class Report:
    """What `entp.check` found. Print it for a table."""

    model: str
    rows: tuple[Row, ...]
    auto: str

    @property
    def exact(self) -> bool:
        """Whether every implementation that can be used is exact."""
        return not any(row.verdict.startswith(WRONG) for row in self.rows)

    @property
    def attention(self) -> bool:
        """Whether tokens see in each mode what its name says: a causal mask of the model's own that
        stays on, or a module that mixes tokens, is found here alone."""
        return not any(row.verdict.startswith(UNLIKE) for row in self.rows)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """What a notebook shows of it."""
        printer.text(str(self))

    def __str__(self) -> str:
        cells = [
            [r.mode, r.implementation, _number(r.outputs), _number(r.gradients), r.verdict]
            for r in self.rows
        ]
        table = format_table(
            ["mode", "implementation", "outputs", "gradients", "verdict"], cells, left=True
        )
        return f"{self.model}\n{table}\nauto takes {self.auto}."


def check(
    model: ModelProtocol,
    *,
    length: int = 9,
    batch: int = 3,
    x: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Report:
    """A comparison of every implementation and cache with the reference, in every mode.

    Outputs and all gradients are compared. The model's weights and gradients stay as they are.
    length, batch: of random inputs; x: inputs of your own instead.
    """
    if x is None:
        x = random_inputs(model, batch, length)
    x, _, ids = check_inputs(model, x, None, position_ids)
    devices = [x.device] if x.is_cuda else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
        warnings.simplefilter("ignore", EngineWarning)
        rows = _compare(model, x, ids)
        if any(row.verdict.startswith(WRONG) for row in rows):
            rows = _told_by_float64(model, x, ids, rows)
        auto = resolve("auto", model, x, ids)
    return Report(_describe(model, x), tuple(rows), f"{auto.impl}: {auto.reason}")


def _compare(model: Any, x: Tensor, ids: Tensor | None) -> list[Row]:
    """Every implementation and cache in every mode."""
    rows: list[Row] = []
    modes = (*MODES, REFRESH)
    for mode in modes:
        rows += _attention(model, x, ids, mode) if mode in SEES else []
        rows += _compare_mode(model, x, ids, mode)
    if getattr(model, "vocab", None) is not None:
        declined = {row.mode for row in rows if row.implementation == "reference"}
        runs = [mode for mode in modes if mode not in declined]
        rows += [_compare_cache(model, x, ids, mode) for mode in runs]
    return rows


def _told_by_float64(model: Any, x: Tensor, ids: Tensor | None, rows: list[Row]) -> list[Row]:
    """The same rows; those that are wrong by rounding alone, which a copy in float64 tells, are
    exact."""
    wide = float64_copy(model)
    if wide is None:
        return rows
    try:
        wide_rows = _compare(wide, x.double() if x.is_floating_point() else x, ids)
    except Exception:  # a module that computes in float32 alone, such as a quantised one
        return rows
    same = {
        (row.mode, row.implementation): max(row.outputs, row.gradients or 0.0)
        for row in wide_rows
        if row.outputs is not None
    }
    told = []
    for row in rows:
        off = same.get((row.mode, row.implementation), math.inf)
        if row.verdict.startswith(WRONG) and off <= IN_FLOAT64:
            row = replace(row, verdict=f"exact ({off:.1e} in float64: float32 rounds)")
        told.append(row)
    return told


def random_inputs(model: Any, batch: int, length: int) -> Tensor:
    """Random tokens or vectors, whichever the model reads, the same in every call."""
    weight, generator = next(model.parameters()), torch.Generator().manual_seed(0)
    limit = getattr(model, "context_length", None)
    time = length if limit is None else min(length, limit)
    if getattr(model, "input_dim", None) is not None:
        return torch.randn(batch, time, model.input_dim, generator=generator).to(weight)
    vocab = getattr(model, "vocab", None)
    if vocab is None:
        raise InputError(
            "this model has neither vocab nor input_dim: give check(model, x=...) inputs that it "
            "reads."
        )
    return torch.randint(vocab, (batch, time), generator=generator).to(weight.device)


def _describe(model: Any, x: Tensor) -> str:
    """One line about what was compared."""
    weights = sum(p.numel() for p in model.parameters())
    kind = next(model.parameters()).dtype
    shape = " x ".join(map(str, x.shape))
    name = f"{type(model).__name__}: {depth(model)} layers, {weights:,} weights"
    return f"{name}, {kind}, {x.device}; inputs {shape}"


def _compare_mode(model: Any, x: Tensor, ids: Tensor | None, mode: str) -> list[Row]:
    """All implementations of one mode but the reference."""
    prefix = max(1, x.shape[1] // 2) if mode == "prefix-lm" else None

    def run(impl: str) -> list[Tensor]:
        return _outputs_and_gradients(
            model, lambda: predict(model, x, mode, prefix=prefix, position_ids=ids, impl=impl)
        )

    try:
        want = run("reference")
    except InputError as error:
        return [Row(mode, "reference", None, None, f"not used: {_short(error)}")]
    rows = []
    impls = ("packed", "triton") if mode in ("entp", REFRESH) else ("triton",)
    for impl in impls:
        try:
            rows.append(_row(model, mode, impl, run(impl), want))
        except InputError as error:
            rows.append(Row(mode, impl, None, None, f"not used: {_short(error)}"))
    return rows


REFRESH = "refresh-3"
"""Stands for all modes refresh-N: their implementations differ in nothing but N."""
SEES = {
    "entp": "full: tokens see later ones",
    "decoder": "causal: no token sees a later one",
    "prefix-lm": "full in the prefix, causal after it",
}
"""What the model's own forward pass does in each mode, as it should be."""


@torch.no_grad()
def _attention(model: Any, x: Tensor, ids: Tensor | None, mode: str) -> list[Row]:
    """Which tokens see which in the model's own forward pass, by changing one of them: a causal
    mask that stays on, or one that is off, shows here and in no comparison of outputs."""
    time = x.shape[1]
    prefix = max(2, time // 2)
    if time < 4:
        return []

    def hidden(x: Tensor) -> Tensor:
        if mode == "entp":
            return model.encode(x, ids)
        first = prefix if mode == "prefix-lm" else None
        return masked_hidden(model, x, mode, prefix=first, position_ids=ids)

    def seen_by(token: int) -> list[bool]:
        """Which tokens' states change with this one."""
        other = x.clone()
        other[:, token] = x[:, token] + 1
        if getattr(model, "vocab", None) is not None:
            other[:, token] %= model.vocab
        off = (hidden(other) - plain).abs().amax((0, 2))
        return (off > SAME * plain.abs().max()).tolist()

    try:
        plain = hidden(x)
    except InputError:  # as the mode's own row says
        return []
    if not torch.equal(plain, hidden(x)):
        return [Row(mode, "attention", None, None, "not told: it draws numbers, as dropout does")]
    by_last, by_first, by_prefix = seen_by(time - 1), seen_by(0), seen_by(prefix - 1)
    ahead, ahead_in_prefix = any(by_last[:-1]), any(by_prefix[: prefix - 1])
    wrong = {
        "entp": "" if ahead else "no token sees a later one, as under a causal mask",
        "decoder": "tokens see later ones" if ahead or ahead_in_prefix else "",
        "prefix-lm": "tokens see later ones" if ahead else "" if ahead_in_prefix else "causal",
    }[mode]
    verdict = f"{UNLIKE}: {wrong}" if wrong else SEES[mode]
    if not any(by_first[1:]):
        verdict = "not told: attention adds nothing to a token yet"
    return [Row(mode, "attention", None, None, verdict)]


def _outputs_and_gradients(model: Any, run: Callable[[], Tensor]) -> list[Tensor]:
    """Outputs, and all gradients of a loss that weighs each output differently."""
    with torch.enable_grad():
        out = run()
        return [out.detach(), *weighted_gradients(model, out)]


def _row(model: Any, mode: str, name: str, got: list[Tensor], want: list[Tensor]) -> Row:
    outputs = _apart(got[0], want[0], float(want[0].abs().max()))
    sizes = [float(g.abs().max()) for g in want[1:]]
    dtype = next(model.parameters()).dtype
    bound = TOLERANCE.get(dtype, 1e-4)
    smallest = _floor(dtype, bound) * max(sizes, default=0.0)
    differences = [
        _apart(a, b, max(size, smallest))
        for a, b, size in zip(got[1:], want[1:], sizes, strict=True)
    ]
    gradients = max(differences, default=0.0)
    verdict = f"{WRONG} (rounding is up to {bound:g})"
    if max(outputs, gradients) <= bound:
        verdict = "exact"
    return Row(mode, name, outputs, gradients, verdict)


def _floor(dtype: torch.dtype, bound: float) -> float:
    """Gradients below this fraction of the largest are measured by it: one that is truly 0, such as
    that of a bias on keys, is rounding alone, a few epsilons of the largest."""
    return max(1e-4, min(1e-2, 8 * torch.finfo(dtype).eps / bound))


def _apart(got: Tensor, want: Tensor, size: float) -> float:
    """The largest difference as a fraction of `size`; infinite if anything is not finite."""
    if not got.numel():
        return 0.0
    off = float((got - want).abs().max())
    if math.isnan(off):
        return math.inf
    return off / max(size, 1e-30)


@torch.no_grad()
def _compare_cache(model: Any, x: Tensor, ids: Tensor | None, mode: str) -> Row:
    """Logits with a cache against those without, over the second half of x."""
    batch, time = x.shape
    first = max(1, time // 2)
    lengths = torch.full((batch,), first, device=x.device)
    prefix = lengths if mode == "prefix-lm" else None
    cache = make_cache(model, mode, time, prefix, tokens_BT=x, position_ids=ids)
    name = "generation, cached"
    if isinstance(cache, NoCache):
        return Row(mode, name, None, None, "not used: no cache is exact for this model")
    plain = NoCache(model, mode, prefix)
    start = None if ids is None else ids[:, :first]
    prompts = x[:, :first]
    got = [cache.prefill(prompts, lengths, start)]
    want = [plain.prefill(prompts, lengths, start)]
    for t in range(first, time):
        own = None if ids is None else ids[:, t]
        got.append(cache.append(x[:, t], own))
        want.append(plain.append(x[:, t], own))
    row = _row(model, mode, name, [torch.stack(got)], [torch.stack(want)])
    kind = "" if isinstance(cache, DecoderCache | EntpCache) else " by graph"
    return Row(mode, f"{name}{kind}", row.outputs, None, row.verdict)


def _short(error: InputError) -> str:
    """The reason in an error of `choose`."""
    text = str(error).partition(": ")[2] or str(error)
    return text.partition(". Use ")[0].rstrip(".")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
