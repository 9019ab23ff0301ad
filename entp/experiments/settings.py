"""Settings that learn fast: architecture, data and exact objective stay, optimizer, batch size and
schedule are tuned.

Muon with a preconditioner inside the blocks, no weight decay, linear decay, EMA of the weights.
docs/LOG.md says what each of these brought.
"""

from __future__ import annotations

from dataclasses import replace

from entp.config import (
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    Mode,
    OptimConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.tasks.base import Task

LR = 8e-4
"""Of the four learning rates of `count3-rates` 1e-3 is best for every mode after 45 seconds; these
runs are longer."""
MANY = 256
"""Sequences per step for decoders: on Count3 the loss is .24 after 85 s, with 64 a step .92."""
ENTP_LR = 4e-5
"""ENTP's learning rate after a curriculum, a twentieth: a small model ends with a loss of .0004
then, at a tenth with .0011."""
ENTP_BATCH = 512
"""Sequences per step of ENTP after a curriculum; as many of their targets are sampled."""
AT_ONCE = 600_000
"""Prefix tokens: more than a batch has. The step is then 5 % faster than in two chunks, and takes
twice the memory."""


def tuned_optim(steps: int, lr: float = LR) -> OptimConfig:
    """The optimizer, with linear decay over so many steps to a fiftieth of the learning rate."""
    return OptimConfig(
        "muon",
        lr,
        lr / 50,
        decay_steps=steps,
        schedule="linear",
        weight_decay=0.0,
        precondition_every=300,
    )


def tuned_decoder(task: Task, steps: int, mode: Mode = "decoder") -> Run:
    """A medium decoder, or prefix-lm decoder."""
    return Run(
        task,
        model_for(task, "medium"),
        mode,
        steps=steps,
        batch_size=MANY,
        optim=tuned_optim(steps),
        train=TrainConfig(eval_every=2000, eval_batches=4, log_every=100, checkpoint_every=10_000),
        ema=EmaConfig(1000),
    )


def entp_after_curriculum(task: Task, first: int, steps: int, lr: float = LR) -> Run:
    """Medium ENTP: first steps of a decoder, in which ever more tokens see later ones; then so many
    of ENTP, with targets sampled by a decoder's error.

    ENTP's steps cost several times as much as a decoder's.
    """
    return Run(
        task,
        model_for(task, "medium"),
        "entp",
        steps=first + steps,
        batch_size=ENTP_BATCH,
        optim=tuned_optim(steps, ENTP_LR),
        train=TrainConfig(
            eval_every=4000,
            eval_batches=2,
            log_every=100,
            checkpoint_every=25_000,
            token_budget=AT_ONCE,
        ),
        ema=EmaConfig(1000),
        importance=ImportanceConfig(samples=ENTP_BATCH, proposal="decoder"),
        curriculum=CurriculumConfig(first, mode="random-prefix", batch_size=MANY, lr=lr),
    )


def tiny_curriculum(run: Run, steps: int) -> CurriculumConfig | None:
    """So many first steps, where the run has a curriculum at all."""
    if run.curriculum is None:
        return None
    return replace(run.curriculum, steps=steps, batch_size=None, lr=None)
