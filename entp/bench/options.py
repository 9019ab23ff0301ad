"""The options of `entp bench ...`: each field's docstring is its help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from entp.bench.shapes import VARIANTS, named_shapes, split_list
from entp.errors import InputError

Size = Literal["small", "medium", "large", "small-deep"]
MOST_SECONDS = 600
MOST_RUNS = 48
"""Processes that one daemon of NVIDIA's Multi-Process Service takes."""


@dataclass(frozen=True)
class BenchStepOptions:
    """Measure one training step by the reference loop, by each engine and by the decoder of the
    same size."""

    size: Size | None = None
    """One of the paper's sizes. None: small."""
    length: int | None = None
    """Tokens per sequence, a target at each. None: 64."""
    batch_size: int | None = None
    """Sequences. None: 8."""
    shapes: str | None = None
    """Named shapes instead of --size, --length and --batch-size: paper for all, or a list such as
    count3,small."""
    variants: str | None = None
    """What is measured, of reference, packed, triton, decoder and decoder-triton, with commas.
    None: all that can run."""
    repeats: int = 5
    """Rounds in which every variant is timed."""
    warmup: int | None = None
    """Steps of each variant before that. None: 5 on CUDA, 1 on a CPU."""
    profile: bool = False
    """Name the ten most expensive kernels of each variant but the reference (on a CPU:
    operators)."""
    note: str | None = None
    """A remark to keep with the numbers."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Write the numbers to the section `step` of this JSON file as well, and draw its figure."""

    def __post_init__(self) -> None:
        at_least(self, 1, "length", "batch_size", "repeats")
        at_least(self, 0, "warmup")
        check_out(self.out)
        if self.variants is not None:
            split_list(self.variants, "variant", list(VARIANTS))
        if self.shapes is not None:
            named_shapes(self.shapes)
            self._check_one_shape()

    def _check_one_shape(self) -> None:
        """Named shapes leave nothing for the options of a shape to decide."""
        names = ("size", "length", "batch_size")
        given = [option_name(name) for name in names if getattr(self, name) is not None]
        if given:
            raise InputError(
                f"--shapes {self.shapes} decides what {' and '.join(given)} would: leave out one "
                "or the other."
            )


@dataclass(frozen=True)
class BenchGenerateOptions:
    """Measure generation with and without a cache, by ENTP and by the decoder of the same size."""

    size: Size = "medium"
    """One of the paper's sizes."""
    batch_size: int | None = None
    """Sequences. None: 64 on CUDA, 4 on a CPU."""
    prompt_length: int = 16
    """Tokens of each prompt."""
    length: int = 64
    """Tokens of each sequence in the end, the prompt included."""
    vocab: int = 64
    """Number of token ids."""
    repeats: int = 5
    """Timed generations of each variant."""
    warmup: int | None = None
    """Generations before that. None: 5 on CUDA, 1 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Write the numbers to the section `generate` of this JSON file as well, and draw its
    figure."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "prompt_length", "vocab", "repeats")
        at_least(self, 0, "warmup")
        check_out(self.out)
        if self.length <= self.prompt_length:
            raise InputError(
                f"--length is {self.length}: it must be above --prompt-length "
                f"{self.prompt_length}, so that something is generated."
            )


@dataclass(frozen=True)
class BenchScalingOptions:
    """Measure how time and memory of ENTP and of the decoder grow with the sequence length."""

    lengths: str = "32,64,128,256,512,1024"
    """Numbers of tokens, with commas; exponents are fitted to the upper half of them."""
    size: Size = "small"
    """One of the paper's sizes."""
    batch_size: int | None = None
    """Sequences. None: 16 on CUDA, so that short ones keep it busy, 1 on a CPU."""
    repeats: int = 5
    """Timed steps, and timed new tokens, of each."""
    warmup: int | None = None
    """Steps before that. None: 5 on CUDA, 1 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Write the numbers to the section `scaling` of this JSON file as well, and draw its
    figure."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "repeats")
        at_least(self, 0, "warmup")
        check_out(self.out)
        self.numbers()

    def numbers(self) -> list[int]:
        """The lengths, ascending."""
        try:
            found = sorted({int(word) for word in self.lengths.split(",")})
        except ValueError:
            raise InputError(
                f"--lengths {self.lengths!r} is not a list of whole numbers such as 32,64,128."
            ) from None
        if len(found) < 3 or found[0] < 2:
            raise InputError(
                f"--lengths {self.lengths}: at least three different lengths of at least 2 are "
                "needed for a fit."
            )
        return found


@dataclass(frozen=True)
class BenchSweepOptions:
    """Measure small runs that share a device: in turns, and under MPS."""

    counts: str | None = None
    """Numbers of runs at a time, with commas. None: 1,2,4,8,16 on CUDA, 1,2 on a CPU."""
    batch_size: int | None = None
    """Sequences of each run. None: 64 on CUDA, 2 on a CPU."""
    seconds: float = 1.5
    """Length of a measurement."""
    repeats: int = 2
    """Measurements of each."""
    quick: bool = False
    """The first two counts, 0.3 s each: shows that everything works."""
    note: str | None = None
    """A remark to keep with the numbers."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Write the numbers to the section `sweep` of this JSON file as well, and draw its figure."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "repeats")
        if not 0 < self.seconds <= MOST_SECONDS:
            raise InputError(
                f"--seconds is {self.seconds:g}: it must be above 0 and at most {MOST_SECONDS}."
            )
        check_out(self.out)
        self.numbers()

    def numbers(self) -> list[int] | None:
        """The counts, ascending; None for those of the device."""
        if self.counts is None:
            return None
        try:
            found = sorted({int(word) for word in self.counts.split(",")})
        except ValueError:
            raise InputError(
                f"--counts {self.counts!r} is not a list of whole numbers such as 1,2,4."
            ) from None
        if not 1 <= found[0] <= found[-1] <= MOST_RUNS:
            raise InputError(f"--counts {self.counts}: allowed are 1 to {MOST_RUNS}.")
        return found


@dataclass(frozen=True)
class BenchArmsOptions:
    """Time a few steps of each arm of a recipe on its own batches, with random weights."""

    only: tuple[str, ...] = ()
    """Arms with these labels only, each in quotes."""
    steps: int = 20
    """Steps that are timed, after those in which kernels are compiled and the step is captured."""
    first: int = 0
    """The training step at which they begin: a curriculum may have other ones later."""
    compile_layers: bool = False
    """Compile HuggingFace's layers, as --train.compile-layers does."""
    data: str | None = None
    """Other data for tasks that read files."""
    init: Path | None = None
    """Folder of pretrained weights, whose tokenizer and sizes are taken; the weights are not."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""

    def __post_init__(self) -> None:
        at_least(self, 1, "steps")
        at_least(self, 0, "first")


BENCHES: dict[str, type] = {
    "step": BenchStepOptions,
    "generate": BenchGenerateOptions,
    "scaling": BenchScalingOptions,
    "sweep": BenchSweepOptions,
}
"""The benchmarks: each is the module entp.bench.NAME with `bench(options)` and `report(section)`.
"""
ARMS = "arms"
"""The benchmark of a recipe's arms (entp/experiments/arm_times.py), which keeps no section."""


def option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def at_least(options: Any, least: int, *names: str) -> None:
    """InputError for the first named option that is given and too small."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"{option_name(name)} is {value}: it must be at least {least}.")


def check_out(out: Path | None, option: str = "--out") -> None:
    """InputError for a file that could not be written, or is not to be JSON."""
    if out is None:
        return
    if not out.parent.is_dir():
        raise InputError(
            f"{option} {out} is in a folder that does not exist: make {out.parent} first."
        )
    if out.suffix != ".json":
        raise InputError(
            f"{option} {out} must end in .json: the figure beside it takes the same name with .png."
        )
