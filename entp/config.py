"""What a run is: frozen dataclasses that check themselves.

    run = Run(task=Count3(), model=model_for(Count3(), "small"), mode="entp", steps=200, batch=16)
    run == run_from_json(run_to_json(run))  # entp/config_json.py

Nothing here imports torch, so that the command line starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from entp.checks import check_numbers, choice_problems, complain, size_problems
from entp.errors import one_of
from entp.tasks.base import Task

Mode = Literal["entp", "decoder", "prefix"]
StartMode = Literal["entp", "decoder", "prefix", "prefixes"]
Impl = Literal["auto", "reference", "packed", "triton"]
MODES: tuple[str, ...] = get_args(Mode)
IMPLS: tuple[str, ...] = get_args(Impl)

SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 3, "heads": 3, "width": 192},
    "medium": {"layers": 6, "heads": 6, "width": 384},
    "large": {"layers": 12, "heads": 12, "width": 768},
    "small-deep": {"layers": 8, "heads": 2, "width": 128},
}
"""The paper's sizes (Table "Model specifications"): `ModelConfig(vocab=64, positions=64, **SIZES["medium"])`."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Transformer. The defaults are the paper's: GPT-2 with pre-LN, GELU and learned positions."""

    vocab: int | None = None
    """Number of token ids. None: the inputs are vectors (see input_dim)."""
    positions: int = 64
    """Longest sequence the model reads (without limit unless `position` is learned or given)."""
    layers: int = 3
    """Transformer blocks, L in the paper."""
    heads: int = 3
    """Attention heads; must divide width."""
    width: int = 192
    """Embedding dimension, D in the paper."""
    input_dim: int | None = None
    """Size of continuous input vectors, read in by one linear layer. None: the inputs are token ids."""
    outputs: int | None = None
    """Real outputs per position, from a linear head. None: vocabulary logits from the tied embedding."""
    norm: Literal["layer", "rms", "none"] = "layer"
    """layer: LayerNorm as GPT-2; rms: RMSNorm; none: no normalisation anywhere, as in the paper's theorems."""
    activation: Literal["gelu", "gelu-exact", "relu", "silu", "swiglu"] = "gelu"
    """The MLP's non-linearity; gelu is GPT-2's tanh form. swiglu has a gate, and a hidden layer of 8/3 width."""
    position: Literal["learned", "sinusoidal", "rotary", "relative", "none", "given"] = "learned"
    """learned: trained table; rotary: turned queries and keys; relative: a bias by distance as in T5; none: position-free;
    given: a fixed table, set with Transformer.set_positions."""
    scale: Literal["sqrt", "one"] = "sqrt"
    """Attention scores are multiplied by 1/sqrt(head size) or by 1."""
    norm_placement: Literal["pre", "post"] = "pre"
    """pre: before attention and MLP, as GPT-2; post: after each residual, as BERT."""
    bias: bool = True
    """Biases in the linear layers of the blocks."""
    tied_head: bool = True
    """Vocabulary logits from the embedding's own weights; off: from a matrix of their own."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads / kv_heads queries. None: as many as heads."""
    loops: int = 1
    """How many times the blocks run one after the other, with the same weights."""

    def __post_init__(self) -> None:
        check_numbers(self, "model.")
        problems = size_problems(self)
        problems += [
            f"model.{name} is {value}: it must be at least 1, or None"
            for name in ("vocab", "input_dim", "outputs")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.heads > 0 and self.width % self.heads:
            problems.append(
                f"model.heads {self.heads} does not divide model.width {self.width}: choose a width that is a "
                f"multiple of {self.heads}, such as {self.heads * max(1, round(self.width / self.heads))}"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            problems.append(f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}")
        if self.position == "rotary" and self.heads > 0 and self.width // self.heads % 2:
            problems.append(f"model.position rotary needs an even head size, and {self.width // self.heads} is odd")
        if not 1 <= self.loops <= 1000:
            problems.append(f"model.loops is {self.loops}: it must be at least 1, at most 1000")
        if (self.vocab is None) == (self.input_dim is None):
            problems.append("model needs exactly one of vocab (token ids) and input_dim (vectors)")
        if self.vocab is None and self.outputs is None:
            problems.append("model.outputs must be set when the inputs are vectors: there is no embedding to tie to")
        complain(problems + choice_problems(self, "model."))

    @property
    def hidden(self) -> int:
        """Units of the MLP's hidden layer: 4 width, or with a gate about 8/3 width, so that the weights are as many."""
        return -(-8 * self.width // 24) * 8 if self.activation == "swiglu" else 4 * self.width

    @property
    def depth(self) -> int:
        """Blocks that an input goes through, loops included."""
        return self.layers * self.loops

    @property
    def has_limit(self) -> bool:
        """Whether sequences beyond `positions` tokens cannot be read."""
        return self.position in ("learned", "given")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule. The defaults are those of the authors' Count3 runs, with gradient clipping added."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw as in the paper; muon for matrices inside the blocks, AdamW for the rest."""
    max_lr: float = 5e-4
    """Learning rate after the warm-up."""
    min_lr: float = 5e-5
    """Learning rate at the end of the decay and after it."""
    warmup: int = 500
    """Steps of linear warm-up."""
    decay_steps: int = 100_000
    """Step at which the decay reaches min_lr. It does not depend on --steps, so that a longer run only adds steps."""
    decay: Literal["steps", "seconds"] = "steps"
    """What the decay follows: decay_steps, or the clock, so that it ends with train.max_seconds on any machine."""
    shape: Literal["cosine", "linear"] = "cosine"
    """How the rate falls from max_lr to min_lr."""
    beta1: float = 0.9
    """AdamW's first decay."""
    beta2: float = 0.99
    """AdamW's second decay."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors get none."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    whiten: int = 0
    """For muon: whiten directions on the side of the MLPs' hidden units; what does it is renewed every so many steps. 0: no."""
    late_batch: int = 0
    """Sequences per step from step late_at on: late in training gradients are noisier. 0: as many as before."""
    late_at: int = 0
    """Step from which late_batch holds."""
    average: int = 0
    """Measure and keep as best the running mean of the weights over about so many steps. 0: the weights themselves."""
    select: bool = False
    """In mode entp: once most predictions are right, gradients of some only, drawn by their errors and weighted: unbiased."""
    take: int = 0
    """In mode entp: gradients of so many predictions of a batch, drawn by the errors of a decoder's pass. 0: of all."""

    def __post_init__(self) -> None:
        check_numbers(self, "optim.")
        problems = []
        if self.min_lr > self.max_lr:
            problems.append(f"optim.min_lr {self.min_lr:g} is above optim.max_lr {self.max_lr:g}: swapped?")
        if self.max_lr <= 0 or self.min_lr < 0:
            problems.append(f"optim.max_lr {self.max_lr:g} must be positive and optim.min_lr {self.min_lr:g} not negative")
        if self.warmup < 0 or self.decay_steps <= self.warmup:
            problems.append(
                f"optim.decay_steps {self.decay_steps} must be above optim.warmup {self.warmup}, which must not be negative"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"optim.{name} is {getattr(self, name)}: allowed is 0 up to, not including, 1")
        if self.weight_decay < 0 or self.clip < 0:
            problems.append("optim.weight_decay and optim.clip must not be negative")
        if self.take < 0 or (self.take and self.select):
            problems.append(
                f"optim.take is {self.take}{' with optim.select' if self.select else ''}: it must be a number of predictions "
                "without optim.select, or 0"
            )
        if self.average < 0:
            problems.append(f"optim.average is {self.average}: it must be a number of steps, or 0")
        if self.whiten < 0 or (self.whiten and self.name != "muon"):
            problems.append(
                f"optim.whiten is {self.whiten} with optim.name {self.name}: it must be 0, or a number of steps and muon"
            )
        late = (self.late_at, self.late_batch)
        if min(late) < 0 or (late[0] > 0) != (late[1] > 0):
            problems.append(
                f"optim.late_at is {self.late_at} and optim.late_batch {self.late_batch}: give both, a step and a number of "
                "sequences, or neither"
            )
        complain(problems + choice_problems(self, "optim."))


@dataclass(frozen=True)
class TrainConfig:
    """How a run is carried out: when it measures and saves, and on what budget."""

    eval_every: int = 100
    """Steps between evaluations on the held-out stream."""
    eval_batches: int = 4
    """Batches per evaluation."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last two are kept, and one of the best validation."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    target_metric: str | None = None
    """Validation metric that decides which checkpoint is best and when to stop. None: the task's last, or the loss."""
    target: float | None = None
    """Stop when target_metric reaches this value (for a loss: falls to it)."""
    max_seconds: float | None = None
    """Stop after so many seconds of training, evaluations included, compiling kernels before it not; resumed, it counts on."""
    impl: Impl = "auto"
    """Engine; auto is the fastest that can run here. In the other modes than entp, reference and packed are torch's own."""
    token_budget: int | None = None
    """Most prefix tokens computed at once in mode entp; gradients of the parts add up. None: little memory first."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 runs matrix products in bfloat16 under autocast; auto does that on CUDA only. Weights stay fp32."""
    graph: bool = True
    """On CUDA, replay steps whose shapes repeat as one CUDA graph."""
    compile: bool = False
    """Compile the model's blocks with torch.compile."""
    mirror: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Copy the metrics to a tracker as well; metrics.jsonl stays the truth."""

    def __post_init__(self) -> None:
        check_numbers(self, "train.")
        problems = [
            f"train.{name} is {getattr(self, name)}: it must be at least 1"
            for name in ("eval_every", "eval_batches", "checkpoint_every", "log_every")
            if getattr(self, name) < 1
        ]
        if self.token_budget is not None and self.token_budget < 1:
            problems.append(f"train.token_budget is {self.token_budget}: it must be at least 1, or None")
        if self.max_seconds is not None and self.max_seconds <= 0:
            problems.append(f"train.max_seconds is {self.max_seconds:g}: it must be above 0, or None")
        complain(problems + choice_problems(self, "train."))


@dataclass(frozen=True)
class StartConfig:
    """Steps that come first, in a mode that costs less, on a schedule of their own. Weights and optimizer go on from there."""

    steps: int = 0
    """How many of the run's steps, the warm-up among them; optim.decay_steps counts from their end. 0: none."""
    mode: StartMode = "decoder"
    """What is trained in them; evaluations measure the run's own mode. prefixes: a decoder for half of them, then ever more
    sequences in which tokens up to a random place see each other, and what comes from there on is predicted: at the end all."""
    batch: int = 0
    """Sequences per step in them. 0: as many as later."""
    max_lr: float = 0.0
    """Their learning rate after the warm-up, which falls to optim.max_lr at their end. 0: that all along."""
    even: bool = False
    """Mode prefixes: every length counts alike, in large batches. Without it the first of n counts 1/n of the last then."""

    def __post_init__(self) -> None:
        check_numbers(self, "start.")
        problems = [
            f"start.{name} is {getattr(self, name):g}: it must not be negative"
            for name in ("steps", "batch", "max_lr")
            if getattr(self, name) < 0
        ]
        complain(problems + choice_problems(self, "start."))


@dataclass(frozen=True)
class Run:
    """Everything that decides what a training run computes."""

    task: Task
    """What is learned."""
    model: ModelConfig
    """The network."""
    mode: Mode = "entp"
    """entp, decoder or prefix."""
    steps: int = 1000
    """Optimizer steps."""
    batch: int = 64
    """Sequences per step, over all processes together, and in a batch of an evaluation."""
    seed: int = 0
    """Decides the initial weights and the data."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Measuring, saving, budgets."""
    start: StartConfig = field(default_factory=StartConfig)
    """What comes first, if anything does."""

    def __post_init__(self) -> None:
        check_numbers(self, "")
        problems = choice_problems(self, "")
        for name, least in (("steps", 1), ("batch", 1), ("seed", 0)):
            if getattr(self, name) < least:
                problems.append(f"{name} is {getattr(self, name)}: it must be at least {least}")
        if self.seed >= 2**32:
            problems.append(f"seed is {self.seed}: it must be below 2^32, so that no two streams of data can meet")
        if self.optim.decay == "seconds" and self.train.max_seconds is None:
            problems.append("optim.decay seconds needs train.max_seconds: the time at whose end the rate is optim.min_lr")
        for name in ("select", "take"):
            if getattr(self.optim, name) and self.mode != "entp":
                problems.append(
                    f"optim.{name} is for mode entp, where each prediction has a cost of its own, not for {self.mode}"
                )
        needs = self.task.model_needs()
        if self.model.has_limit and self.model.positions < needs["positions"]:
            problems.append(
                f"model.positions {self.model.positions} is shorter than the sequences of {self.task.name}, "
                f"{needs['positions']}: raise model.positions or shorten the task"
            )
        for name in ("vocab", "input_dim", "outputs"):
            if getattr(self.model, name) != needs.get(name):
                problems.append(f"model.{name} is {getattr(self.model, name)} but {self.task.name} needs {needs.get(name)}")
        if self.task.loss == "squared_error" and self.model.outputs != 1:
            problems.append(f"model.outputs is {self.model.outputs}: squared_error is of one number, so it must be 1")
        problems += self._start_problems()
        if "prefix" in (self.mode, self.start.mode) and self.task.prefix is None:
            problems.append(f"mode prefix needs a task with a prefix, and {self.task.name} has none: use entp or decoder")
        metrics = (*self.task.metrics, "loss")
        if self.goal not in metrics:
            problems.append(
                f"train.target_metric {self.train.target_metric!r} is not measured: allowed are {', '.join(metrics)}"
            )
        complain(problems)

    def _start_problems(self) -> list[str]:
        start, optim, problems = self.start, self.optim, []
        if not start.steps:
            if start != StartConfig():
                problems.append("start.steps is 0, but other options of start are given: say how many steps come first")
            return problems
        if start.steps <= optim.warmup:
            problems.append(f"start.steps {start.steps} must be above optim.warmup {optim.warmup}, which is part of them")
        if 0 < start.max_lr < optim.max_lr:
            problems.append(f"optim.max_lr {optim.max_lr:g} is above start.max_lr {start.max_lr:g}: swapped?")
        if start.even and start.mode != "prefixes":
            problems.append(f"start.even is for start.mode prefixes, not {start.mode}, where every length counts alike anyway")
        if optim.decay == "seconds":
            problems.append("start.steps needs optim.decay steps: by the clock there is one schedule")
        return problems

    def at(self, step: int) -> Run:
        """What this step is a step of: the start, or this run itself."""
        return self.beginning if step < self.start.steps else self

    @cached_property
    def beginning(self) -> Run:
        """The start as a run of its own."""
        start, none = self.start, StartConfig()
        first, last = start.max_lr or self.optim.max_lr, self.optim.max_lr
        plain = replace(self.optim, select=False, take=0, late_batch=0, late_at=0)
        optim = replace(plain, max_lr=first, min_lr=last, decay_steps=start.steps)
        mode: Mode = "decoder" if start.mode == "prefixes" else start.mode
        return replace(self, mode=mode, steps=start.steps, batch=start.batch or self.batch, optim=optim, start=none)

    def prefix_chance(self, step: int) -> float | None:
        """How likely a sequence of this step has a prefix that ends at a random place; None if that cannot be."""
        drawn = step < self.start.steps and self.start.mode == "prefixes"
        return max(0.0, 2 * step / self.start.steps - 1) if drawn else None

    def batch_at(self, step: int) -> int:
        """Sequences in this training step."""
        if step < self.start.steps:
            return self.beginning.batch
        return self.optim.late_batch if self.optim.late_batch and step >= self.optim.late_at else self.batch

    def sequences_by(self, step: int) -> int:
        """Sequences read before this training step."""
        early = min(step, self.start.steps)
        late = max(0, step - max(self.start.steps, self.optim.late_at)) if self.optim.late_batch else 0
        return early * (self.start.batch or self.batch) + (step - early - late) * self.batch + late * self.optim.late_batch

    @property
    def goal(self) -> str:
        """The metric that decides which checkpoint is best."""
        return self.train.target_metric or ("loss", *self.task.metrics)[-1]


def model_for(task: Task, size: str = "small", **changes: Any) -> ModelConfig:
    """The model of one of the paper's sizes with the inputs and outputs that `task` needs."""
    if size not in SIZES:
        raise one_of("size", size, SIZES)
    return ModelConfig(**{**task.model_needs(), **SIZES[size], **changes})
