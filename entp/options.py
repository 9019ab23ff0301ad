"""The options of the commands: each field's docstring is its help text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from entp.bench.shapes import CONTENDERS, named_shapes, split_list
from entp.config import SIZES, Impl, Mode, OptimConfig, Run, StartConfig, TrainConfig, model_for
from entp.errors import InputError
from entp.tasks.base import Split, Task

TaskType = TypeVar("TaskType", bound=Task)
Size = Literal["small", "medium", "large", "small-deep"]


@dataclass(frozen=True)
class ModelOptions:
    """Changes to the model of the chosen size."""

    layers: int | None = None
    """Transformer blocks."""
    heads: int | None = None
    """Attention heads."""
    width: int | None = None
    """Embedding dimension."""
    norm: Literal["layer", "rms", "none"] | None = None
    """LayerNorm, RMSNorm or none."""
    norm_placement: Literal["pre", "post"] | None = None
    """Norms before attention and MLP, or after their residuals."""
    activation: Literal["gelu", "gelu-exact", "relu", "silu", "swiglu"] | None = None
    """The MLP's non-linearity."""
    position: Literal["learned", "sinusoidal", "rotary", "relative", "none"] | None = None
    """How positions enter: a learned table, sinusoids, rotated queries and keys, a bias by distance, or not at all."""
    scale: Literal["sqrt", "one"] | None = None
    """Scores multiplied by 1/sqrt(head size) or by 1."""
    kv_heads: int | None = None
    """Key and value heads, each shared by a group of queries."""
    loops: int | None = None
    """How many times the blocks run, with the same weights."""
    bias: bool | None = None
    """Biases in the blocks' linear layers."""
    tied_head: bool | None = None
    """Vocabulary logits from the embedding's own weights."""

    def changes(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True)
class TrainOptions(Generic[TaskType]):
    """Train a model on a task. With --resume or --fork, settings that are not given are those of that run."""

    task: TaskType
    """Sizes of the task."""
    mode: Mode = "entp"
    """How predictions attend: entp, decoder or prefix."""
    size: Size | None = None
    """One of the paper's sizes (small if not given)."""
    steps: int = 1000
    """Optimizer steps."""
    batch: int = 64
    """Sequences per step."""
    seed: int = 0
    """Decides the initial weights and the data."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Folder of the run (default: runs/TASK-MODE)."""
    resume: bool = False
    """Continue the run in --out."""
    fork: Path | None = None
    """Begin with the last checkpoint of the run in this folder, the optimizer's state included; that run stays as it is."""
    model: ModelOptions = field(default_factory=ModelOptions)
    """Changes to the model."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Measuring, saving, budgets."""
    start: StartConfig = field(default_factory=StartConfig)
    """Steps in another mode that come first, such as those of a decoder, which cost less."""

    def run(self, saved: Run | None) -> Run:
        """The run these options ask for."""
        if saved is None:
            model = model_for(self.task, self.size or "small", **self.model.changes())
        else:
            sized: dict[str, Any] = dict(SIZES[self.size]) if self.size else {}
            model = dataclasses.replace(saved.model, **self.task.model_needs(), **{**sized, **self.model.changes()})
        return Run(self.task, model, self.mode, self.steps, self.batch, self.seed, self.optim, self.train, self.start)


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure a trained run on fresh sequences."""

    split: Split = "test"
    """Stream of sequences: train, valid or test."""
    batches: int = 16
    """Batches of the run's size."""
    seed: int | None = None
    """Seed of the sequences (default: the run's)."""
    which: Literal["best", "last"] = "best"
    """Weights of the best validation, or the last."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    impl: Impl = "auto"
    """Engine for mode entp."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""
    by_length: bool = False
    """Also measure the accuracy after each number of tokens."""
    by_generation: bool = False
    """Also let the model continue sequences alone, and count those that are right to the end."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class GenerateOptions:
    """Let a trained run continue prompts."""

    prompt: list[str] = field(default_factory=list)
    """One or more prompts, such as "3 1 4 1 5" (default: three from the task's test stream)."""
    max_new_tokens: int | None = None
    """Tokens to add (default: up to the last one that the task asks for)."""
    mode: Mode | None = None
    """Mode of attention (default: the run's)."""
    temperature: float = 0.0
    """0 takes the likeliest token; above 0 samples."""
    top_k: int | None = None
    """Sample among the k likeliest tokens only."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of the sampling."""
    which: Literal["best", "last"] = "best"
    """Weights of the best validation, or the last."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""


@dataclass(frozen=True)
class ExportOptions:
    """Save a trained model as a small folder that `entp.load` reads, with how it was made and what it does."""

    out: Path
    """New folder for the model."""
    which: Literal["best", "last"] = "best"
    """Which checkpoint of a run folder."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """What the weights are rounded to, before they are measured."""
    fresh: int = 10_000
    """Sequences to measure it on, drawn anew."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""


@dataclass(frozen=True)
class ReproduceOptions:
    """Train what a figure or table of the paper needs and print paper | ours. Run again to continue."""

    tiny: bool = False
    """A version for a CPU minute: shows that everything works, not the result."""
    only: tuple[str, ...] = ("all",)
    """Train these arms only, each in quotes."""
    seed: int | None = None
    """Train with this seed only, of those that the recipe has: one machine per seed."""
    jobs: int = 1
    """Runs at a time, each in a process of its own: for small models, which do not fill a GPU."""
    minutes: float | None = None
    """Most training time of an arm whose schedule follows steps. What it has by then is tested; run again to go on."""
    out: Path = Path("runs")
    """Folder for all recipes' runs."""
    record: Path | None = None
    """Add what came out to this file, which may hold arms from other machines; table and pictures are then of all of them."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""

    def __post_init__(self) -> None:
        if not self.only:
            raise InputError("--only names no arm: give one or more, each in quotes, or leave it out to train all of them.")
        check_out(self.record, "--record")


@dataclass(frozen=True)
class ReportOptions:
    """Write the page of all recorded results."""

    results: Path = Path("results")
    """Folder of the files that `entp reproduce --record` writes."""
    out: Path = Path("docs/results.md")
    """The page."""

    def __post_init__(self) -> None:
        if not self.out.parent.is_dir():
            raise InputError(f"--out {self.out} is in a folder that does not exist: make {self.out.parent} first.")
        if self.out.suffix != ".md":
            raise InputError(f"--out {self.out} is to be a page of Markdown: give a name that ends with .md.")


@dataclass(frozen=True)
class DemoOptions:
    """Train ENTP and a decoder side by side on a CPU."""

    out: Path = Path("demo")
    """Folder for the two runs and the picture."""
    steps: int = 1500
    """Optimizer steps of each."""
    seed: int = 0
    """Seed of both."""


@dataclass(frozen=True)
class BenchStepOptions:
    """Measure one training step by the reference loop, by each engine and by the decoder of the same size."""

    size: Size | None = None
    """One of the paper's sizes (small if not given)."""
    length: int | None = None
    """Tokens per sequence, a target at each (64 if not given)."""
    batch: int | None = None
    """Sequences (8 if not given)."""
    shapes: str | None = None
    """Named shapes instead of --size, --length and --batch: paper for all, or a list such as count3,small."""
    contenders: str | None = None
    """Who takes part, of reference, packed, triton, decoder and decoder-triton, with commas (default: all that can run)."""
    repeats: int = 5
    """Rounds in which every contender is timed."""
    warmup: int | None = None
    """Steps of each contender before that (default: 5 on CUDA, 1 on a CPU)."""
    profile: bool = False
    """Name the ten most expensive kernels of each contender but the reference (on a CPU: operators)."""
    note: str | None = None
    """A remark to keep with the numbers."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Write the numbers to the section `step` of this JSON file as well, and draw its picture."""

    def __post_init__(self) -> None:
        at_least(self, 1, "length", "batch", "repeats")
        at_least(self, 0, "warmup")
        check_out(self.out)
        if self.contenders is not None:
            split_list(self.contenders, "contender", list(CONTENDERS))
        if self.shapes is not None:
            named_shapes(self.shapes)
            given = [f"--{name}" for name in ("size", "length", "batch") if getattr(self, name) is not None]
            if given:
                raise InputError(
                    f"--shapes {self.shapes} decides what {' and '.join(given)} would: leave out one or the other."
                )


@dataclass(frozen=True)
class BenchGenerateOptions:
    """Measure generation with and without a cache, by ENTP and by the decoder of the same size."""

    size: Size = "medium"
    """One of the paper's sizes."""
    batch: int | None = None
    """Sequences (64 on CUDA, 4 on a CPU, if not given)."""
    prompt: int = 16
    """Tokens of each prompt."""
    total: int = 64
    """Tokens of each sequence in the end."""
    vocab: int = 64
    """Number of token ids."""
    repeats: int = 5
    """Timed generations of each contender."""
    warmup: int | None = None
    """Generations before that (default: 5 on CUDA, 1 on a CPU)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Write the numbers to the section `generate` of this JSON file as well, and draw its picture."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch", "prompt", "vocab", "repeats")
        at_least(self, 0, "warmup")
        check_out(self.out)
        if self.total <= self.prompt:
            raise InputError(
                f"--total is {self.total}: it must be above --prompt {self.prompt}, so that something is generated."
            )


@dataclass(frozen=True)
class BenchScalingOptions:
    """Measure how time and memory of ENTP and of the decoder grow with the length of the sequence."""

    lengths: str = "32,64,128,256,512,1024"
    """Numbers of tokens, with commas; exponents are fitted to the upper half of them."""
    size: Size = "small"
    """One of the paper's sizes."""
    batch: int | None = None
    """Sequences (default: 16 on CUDA, so that short ones keep it busy, 1 on a CPU)."""
    repeats: int = 5
    """Timed steps, and timed new tokens, of each."""
    warmup: int | None = None
    """Steps before that (default: 5 on CUDA, 1 on a CPU)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Write the numbers to the section `scaling` of this JSON file as well, and draw its picture."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch", "repeats")
        at_least(self, 0, "warmup")
        check_out(self.out)
        self.numbers()

    def numbers(self) -> list[int]:
        """The lengths, ascending."""
        try:
            found = sorted({int(word) for word in self.lengths.split(",")})
        except ValueError:
            raise InputError(f"--lengths {self.lengths!r} is not a list of whole numbers such as 32,64,128.") from None
        if len(found) < 3 or found[0] < 2:
            raise InputError(f"--lengths {self.lengths}: at least three different lengths of at least 2 are needed for a fit.")
        return found


def at_least(options: Any, least: int, *names: str) -> None:
    """InputError for the first named option that is given and too small."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}: it must be at least {least}.")


def check_out(out: Path | None, option: str = "--out") -> None:
    if out is None:
        return
    if not out.parent.is_dir():
        raise InputError(f"{option} {out} is in a folder that does not exist: make {out.parent} first.")
    if out.suffix != ".json":
        raise InputError(f"{option} {out} must end in .json: the picture beside it takes the same name with .png.")
