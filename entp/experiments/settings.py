"""Settings that learn fast: architecture, data and exact objective stay, optimizer, batch and
schedule are chosen freely.

Whitened Muon inside the blocks, no weight decay, a rate that falls on a line, the mean of the last
weights. What each of these brought is in docs/LOG.md.
"""

from __future__ import annotations

from dataclasses import replace

from entp.config import Mode, OptimConfig, Run, StartConfig, TrainConfig, model_for
from entp.tasks.base import Task

RATE = 8e-4
"""Of the four rates of `count3-rates` 1e-3 is best for every mode after 45 seconds; these runs are
longer."""
MANY = 256
"""Sequences a step for decoders: on Count3 the loss is .24 after 85 seconds, with 64 a step .92."""
AFTER_RATE = 4e-5
"""ENTP's rate after a start, a twentieth: a small model ends with a loss of .0004 then, at a tenth
with .0011."""
AFTER_BATCH = 512
"""Sequences of one step of ENTP after a start; of their predictions it takes as many, those where a
decoder's pass errs."""
AT_ONCE = 600_000
"""Prefix tokens: more than a batch has. The step is then 5 % faster than in two parts, and takes
twice the memory."""


def fast_optim(steps: int, rate: float = RATE) -> OptimConfig:
    """The optimizer, for a line of so many steps to a fiftieth of the rate."""
    return OptimConfig(
        "muon",
        rate,
        rate / 50,
        decay_steps=steps,
        shape="linear",
        weight_decay=0.0,
        whiten=300,
        average=1000,
    )


def fast_decoder(task: Task, steps: int, mode: Mode = "decoder") -> Run:
    """A medium decoder, or prefix decoder."""
    train = TrainConfig(eval_every=2000, eval_batches=4, log_every=100, checkpoint_every=10_000)
    return Run(
        task,
        model_for(task, "medium"),
        mode,
        steps=steps,
        batch=MANY,
        optim=fast_optim(steps),
        train=train,
    )


def decoder_first(task: Task, start: int, steps: int, rate: float = RATE) -> Run:
    """Medium ENTP: steps that begin as those of a decoder, in which ever more tokens see later
    ones; then so many of ENTP.

    ENTP's steps cost several times as much as a decoder's. They take gradients of predictions that
    a decoder's pass chooses.
    """
    train = TrainConfig(
        eval_every=4000,
        eval_batches=2,
        log_every=100,
        checkpoint_every=25_000,
        token_budget=AT_ONCE,
    )
    return Run(
        task,
        model_for(task, "medium"),
        "entp",
        steps=start + steps,
        batch=AFTER_BATCH,
        optim=replace(fast_optim(steps, AFTER_RATE), take=AFTER_BATCH),
        train=train,
        start=StartConfig(steps=start, mode="random-prefix", batch=MANY, max_lr=rate),
    )


def tiny_start(run: Run) -> StartConfig:
    """Thirty steps, where the run has a start at all."""
    return replace(run.start, steps=30, batch=0, max_lr=0) if run.start.steps else run.start
