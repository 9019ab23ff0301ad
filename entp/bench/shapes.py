"""What is measured: named shapes of a training step, its variants, and their targets. Nothing here
imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from entp.config import Impl, Mode, Run, TrainConfig, model_for
from entp.errors import InputError, one_of
from entp.tasks.base import Batch, Split, Task
from entp.tasks.counting import Count3, Match3

VARIANTS: dict[str, tuple[Mode, Impl]] = {
    "reference": ("entp", "reference"),
    "packed": ("entp", "packed"),
    "triton": ("entp", "triton"),
    "decoder": ("decoder", "reference"),
    "decoder-triton": ("decoder", "triton"),
}
"""What `entp bench step` measures, by the short names of --variants: mode and implementation."""

LABELS = {name: f"entp {name}" if mode == "entp" else name for name, (mode, _) in VARIANTS.items()}
"""The names in tables and files."""


@dataclass(frozen=True)
class RandomTokens(Task):
    """Random tokens with a random target after each: nothing to learn, only something to time."""

    name: ClassVar[str] = "random-tokens"
    about: ClassVar[str] = "random tokens, a random target after each"

    length: int = 128
    """Tokens per sequence."""
    vocab: int = 50_304
    """Number of token ids."""

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": self.vocab, "context_length": self.length}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        sequences = self.rng(seed, split, step).integers(0, self.vocab, (size, self.length + 1))
        return Batch(sequences[:, :-1].copy(), sequences[:, 1:].copy())


@dataclass(frozen=True)
class Shape:
    """A training step to measure."""

    name: str
    task: Task
    size: str
    batch_size: int

    def run(self, variant: str) -> Run:
        """The run whose step a variant does. The reference takes the whole batch at once, as in
        the paper: in chunks it is slower."""
        mode, impl = VARIANTS[variant]
        budget = 10**9 if impl == "reference" else None
        model = model_for(self.task, self.size)
        train = TrainConfig(impl=impl, token_budget=budget)
        return Run(self.task, model, mode, batch_size=self.batch_size, train=train)


PAPER = {
    shape.name: shape
    for shape in (
        Shape("count3", Count3(prompt_length=17, length=65), "medium", 64),
        Shape("text", RandomTokens(128, 50_304), "medium", 32),
        Shape("small-deep", Match3(length=64), "small-deep", 64),
        Shape("small", Match3(length=64), "small", 64),
    )
}
"""The named shapes. Count3 has the prefixes of 17 to 64 integers, as the authors' code; the others
have a target everywhere."""


@dataclass(frozen=True)
class Target:
    """What a ratio should reach on one H200: `wanted` must be shown, `aim` is hoped for."""

    shape: str
    """One of PAPER, or `generate`."""
    measure: Literal["time", "memory", "tokens/s"]
    """time and memory: the reference's over the variant's; tokens/s: the variant's over that of
    generation without a cache."""
    variant: str
    wanted: float
    aim: float


TARGETS = (
    Target("count3", "time", "entp triton", 32, 45),
    Target("text", "time", "entp triton", 50, 65),
    Target("small-deep", "time", "entp triton", 100, 150),
    Target("small", "time", "entp triton", 100, 150),
    Target("count3", "memory", "entp triton", 3, 5),
    Target("text", "memory", "entp triton", 3, 5),
    Target("generate", "tokens/s", "entp", 3, 6),
)
"""`entp bench` on CUDA prints these beside what it reached."""


def named_shapes(names: str) -> list[Shape]:
    """The shapes of a comma-separated list, in which `paper` stands for all."""
    wanted = split_list(names, "shape", [*PAPER, "paper"])
    return [shape for name, shape in PAPER.items() if name in wanted or "paper" in wanted]


def split_list(names: str, what: str, allowed: list[str]) -> list[str]:
    """The names of a comma-separated list; one that is not allowed is an error."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in allowed:
            raise one_of(what, name, allowed)
    if not found:
        raise InputError(f"the list of {what}s is empty: allowed are {', '.join(allowed)}.")
    return found


def reached(shape: str, ratios: dict[str, dict[str, float | None]]) -> list[dict[str, Any]]:
    """The targets of a shape beside what was reached; ratios[measure][variant], None where it was
    not measured."""
    rows = []
    for target in TARGETS:
        got = ratios.get(target.measure, {}).get(target.variant)
        if target.shape == shape and got is not None:
            what = {"shape": shape, "measure": target.measure, "variant": target.variant}
            numbers = {"wanted": target.wanted, "aim": target.aim, "reached": got}
            rows.append({**what, **numbers, "met": _met(target, got)})
    return rows


def _met(target: Target, got: float) -> str:
    if got >= target.aim:
        return "aim"
    return "wanted" if got >= target.wanted else "no"
