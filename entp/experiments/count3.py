"""Figure "Training loss and sequence accuracy curve for Count3": can each architecture learn it, and how fast?

Arms without a remark have the paper's settings. The fast ones keep the architecture, the data and the exact objective, and
choose optimizer, batch and schedule freely; decoders get the wall-clock that ENTP takes on an H200. "Decoder first" begins with
a decoder, in which ever more tokens see later ones, for the first minutes of the run: ENTP's steps cost several times as much.
"""

from __future__ import annotations

from dataclasses import replace

from entp.config import Mode, OptimConfig, Run, StartConfig, TrainConfig, model_for
from entp.experiments.paper_curves import COUNT3
from entp.experiments.recipe import PaperValue, Recipe
from entp.tasks.counting import Count3

TASK = Count3()
PAPER_ARMS: dict[str, tuple[Mode, str]] = {
    "ENTP medium": ("entp", "medium"),
    "decoder small": ("decoder", "small"),
    "decoder medium": ("decoder", "medium"),
    "decoder large": ("decoder", "large"),
    "prefix decoder medium": ("prefix", "medium"),
}
CURVES = "authors' published Count3 curves, 150k steps"
AT_ONCE = 600_000
"""Prefix tokens: more than a batch has. The step is then 5 % faster than in two parts, and takes twice the memory."""
FAST_STEPS = 43_000
"""25,000 of 64 sequences, then 256 each: 78 % of sequences; 57,000 of 64 each gave 50 % (docs/LOG.md)."""
FAST_TARGET = 0.99
"""ENTP stops when so many of 1,024 held-out sequences are wholly right."""
FAST_SECONDS = 1500.0
"""No less than the recorded run of ENTP took on one H200."""
FAST_RATES: dict[Mode, float] = {"entp": 8e-4, "decoder": 8e-4, "prefix": 8e-4}
"""Of the four rates of `count3-rates` 1e-3 is best for every mode after 45 seconds; these runs are longer."""
MANY = 256
"""Sequences a step for decoders: after 85 seconds the loss is .24, with 64 a step .92 (docs/LOG.md)."""
START = StartConfig(steps=60_000, mode="prefixes", batch=MANY, max_lr=8e-4)
"""A decoder alone has nine in ten sequences right after 45,000 steps, 260 seconds; its weights as they are serve ENTP badly,
hence the prefixes (docs/LOG.md)."""
AFTER_STEPS = 12_000
"""Steps of ENTP after that."""


def paper_run(mode: Mode, size: str) -> Run:
    """AdamW, 5e-4 to 5e-5, batch 64, 150,000 steps."""
    train = TrainConfig(eval_every=500, eval_batches=16, checkpoint_every=5000, token_budget=AT_ONCE)
    if mode != "entp":
        train = replace(train, log_every=100, checkpoint_every=10_000, token_budget=None)  # about as many seconds apart
    return Run(TASK, model_for(TASK, size), mode, steps=150_000, batch=64, train=train)


def fast_run(mode: Mode) -> Run:
    """Whitened Muon inside the blocks, no weight decay, a rate that falls on a line, the mean of the last weights.

    By steps for ENTP, which takes more sequences per step late and chooses among their predictions; by time otherwise.
    """
    rate = FAST_RATES[mode]
    optim = OptimConfig(
        "muon", rate, rate / 50, decay_steps=FAST_STEPS, shape="linear", weight_decay=0.0, whiten=300, average=1000
    )
    train = TrainConfig(eval_every=1000, eval_batches=16, log_every=100, checkpoint_every=5000, token_budget=AT_ONCE)
    run = Run(TASK, model_for(TASK, "medium"), mode, steps=FAST_STEPS, batch=64, optim=optim, train=train)
    if mode == "entp":
        late = replace(optim, select=True, late_batch=256, late_at=25_000)
        return replace(run, optim=late, train=replace(train, target=FAST_TARGET))
    timed = replace(train, max_seconds=FAST_SECONDS, eval_every=2000, eval_batches=4, checkpoint_every=10_000)
    return replace(run, steps=10**7, batch=MANY, optim=replace(optim, decay="seconds"), train=timed)


def decoder_first() -> Run:
    """A decoder as `fast_run` trains it, then random prefixes; then ENTP, with gradients of chosen predictions."""
    run = fast_run("entp")
    optim = replace(run.optim, max_lr=8e-5, min_lr=2e-6, decay_steps=AFTER_STEPS, late_batch=0, late_at=0)
    train = replace(run.train, eval_every=2000, checkpoint_every=15_000)
    return replace(run, steps=START.steps + AFTER_STEPS, optim=optim, train=train, start=START)


def tiny(run: Run) -> Run:
    """Count3 of 12 integers for a model of 2 layers."""
    task = Count3(seed_length=6, length=12, values=12)
    return replace(
        run,
        task=task,
        model=model_for(task, "small", layers=2, heads=2, width=32),
        steps=60,
        batch=32,
        optim=OptimConfig(run.optim.name, max_lr=3e-3, min_lr=3e-4, warmup=10, decay_steps=60),
        train=TrainConfig(eval_every=20, eval_batches=4, checkpoint_every=20),
        start=replace(run.start, steps=30, batch=0, max_lr=0) if run.start.steps else run.start,
    )


RECIPE = Recipe(
    name="count3",
    title='Figure "Training loss and sequence accuracy curve for Count3"',
    question="Which architectures learn Count3 on sequences of 64 integers?",
    runs={
        **{label: paper_run(mode, size) for label, (mode, size) in PAPER_ARMS.items()},
        "ENTP medium, decoder first": decoder_first(),
        "ENTP medium, fast": fast_run("entp"),
        "decoder medium, fast": fast_run("decoder"),
        "prefix decoder medium, fast": fast_run("prefix"),
    },
    metrics=("sequence_accuracy", "token_accuracy", "loss"),
    paper={
        "ENTP medium": {"sequence_accuracy": PaperValue(0.991, CURVES)},
        "decoder small": {"sequence_accuracy": PaperValue(0.0, CURVES), "token_accuracy": PaperValue(0.247, CURVES)},
        "decoder medium": {"sequence_accuracy": PaperValue(0.0, CURVES), "token_accuracy": PaperValue(0.706, CURVES)},
        "decoder large": {"sequence_accuracy": PaperValue(0.0, CURVES), "token_accuracy": PaperValue(0.755, CURVES)},
    },
    shrink=tiny,
    seeds={"ENTP medium, decoder first": (0, 1, 2)},
    curves=COUNT3,
    alone=1024,
    few=("ENTP medium", "prefix decoder medium", "ENTP medium, decoder first"),
    missing={
        "BERT as ENTP": "needs pretrained weights; not part of this recipe yet",
        "Llama-3-8B, GPT-4o": "the paper's fine-tuned language models; not part of this recipe yet",
    },
)
