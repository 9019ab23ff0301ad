"""The one training loop.

    # on a CPU, one GPU, or several processes under torchrun
    result = train(run, out="runs/first")
    result = train(run, out="runs/first", resume=True)

A step is a pure function of the weights, the optimizer state and the step number, so a run that was
stopped or killed continues as if nothing had happened: bit for bit on a CPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entp.config import Run
from entp.engine.cold_start import warm_math
from entp.errors import DeviceFailed, InputError, TrainingStopped
from entp.files import FULL, REFUSED, lock_folder, make_folder
from entp.model.build import build_model
from entp.tasks.base import Batch, Task
from entp.tasks.metrics import Totals
from entp.tasks.tokens import look_into
from entp.terminal import Progress
from entp.training import checkpoint
from entp.training.compiling import compile_layers, explained
from entp.training.cuda_graph import Stepper
from entp.training.distributed import Stop, World, join
from entp.training.evaluate import (
    check_targets,
    check_tokens,
    evaluate,
    first_batch,
    split_batches,
)
from entp.training.forward import Forward
from entp.training.frozen import Frozen
from entp.training.initialise import Init, check_beginning, load_init, with_init
from entp.training.loggers import MetricsFile, Tracker, read_own_metrics
from entp.training.loss_meter import LossMeter, check_finite
from entp.training.plan import Plan
from entp.training.prefetch import batches_ahead, processes_for
from entp.training.run_folder import check_folder, prepare_folder, read_fork, write_fork
from entp.training.signals import StopSignals
from entp.training.state import State, new_state
from entp.training.stopping import is_better, monitored, stop_reason

MOST_SAVING = 0.05
"""The part of the time that checkpoints by the clock may take."""


@dataclass
class Result:
    """How a run ended."""

    out: Path
    step: int
    seconds: float
    reason: str
    metrics: dict[str, float]
    best: dict[str, float]
    stopped_by: int | None = None


def train(
    run: Run,
    out: str | Path,
    *,
    device: str = "auto",
    resume: bool = False,
    fork: str | Path | None = None,
    init: Init | None = None,
    tracker: Tracker | None = None,
    quiet: bool = False,
) -> Result:
    """Train `run` in the folder `out`; `resume` continues what is there. Only the first process
    writes.

    fork: the folder of another run, whose last checkpoint this one begins with.
    init: the weights that it begins with, at step 0; resumed, before its first checkpoint only.
    tracker: gets every line of metrics.jsonl, in the first process: log(values, step), close().
    """
    warm_math()
    out = Path(out)
    if resume and fork is not None:
        raise InputError(
            f"resume continues {out}, fork begins it with a copy of {fork}: give one of them."
        )
    if init is not None and fork is not None:
        raise InputError(
            f"init and fork both say what {out} begins with: give --init for weights alone, or "
            "--fork for the optimizer's state as well."
        )
    run = run if init is None else with_init(run, init)
    if resume:
        look_into(out)
    with join(device) as (world, where):
        _check(run, world)
        check_folder(run, out, resume)
        if init is None and fork is None:
            check_beginning(run, out)
        copied = read_fork(run, Path(fork)) if fork is not None else None
        world.barrier()  # nobody creates the folder before all have looked at it
        try:
            make_folder(out)
            taken = (
                f"{out} is being trained by another process: wait for it, or give another --out."
            )
            with lock_folder(out, refuse=taken) if world.first else nullcontext():
                if copied is not None and world.first:
                    write_fork(run, copied, out)
                world.barrier()
                return _train(
                    run,
                    out,
                    where,
                    world,
                    resume or fork is not None,
                    init,
                    tracker,
                    quiet or not world.first,
                )
        except OSError as error:
            if error.errno not in (*FULL, *REFUSED):
                raise
            raise _not_written(error, out) from None


def _not_written(error: OSError, out: Path) -> InputError:
    """What happened to the disk, what is there, and how to go on."""
    last = checkpoint.newest(out)
    kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written yet"
    begun = os.path.exists(out / "config.json")  # False where the disk does not say
    again = "use --resume" if begun else "start it again"
    if error.errno in FULL:
        fault, remedy = "no space to write to", f"Free space, then {again}."
    else:
        fault = f"{error.filename or out} cannot be used, while writing to"
        remedy = f"See to the disk and to who may write, then {again}."
    return InputError(f"{fault} {out} ({error.strerror}): {kept}. {remedy}")


def _check(run: Run, world: World) -> None:
    """InputError for what cannot be trained, or not by so many processes."""
    plan = Plan(run)
    fewest = min(plan.batch_size(part[0]) for part in plan.segments(0, run.steps))
    if min(fewest, run.batch_size) < world.size:
        raise InputError(
            f"a batch of {min(fewest, run.batch_size)} is smaller than the {world.size} processes: "
            "raise --batch-size."
        )
    if run.optim.decay_by == "seconds" and world.size > 1:
        raise InputError(
            "optim.decay_by seconds is for one process: several clocks would give several learning "
            "rates. Use steps."
        )
    if run.model.position_embedding == "given":
        raise InputError(
            "model.position_embedding given is for tables set by hand, and training has none: use "
            "learned or none."
        )
    one = first_batch(run.task, run.seed, run.batch_size)
    check_tokens(run.task, one, run.model.vocab)
    check_targets(run.task, one, run.model.outputs or run.model.vocab or 0)
    for technique in plan.techniques:
        technique.check(run, one, world)


def _train(
    run: Run,
    out: Path,
    device: torch.device,
    world: World,
    resume: bool,
    init: Init | None,
    tracker: Tracker | None,
    quiet: bool,
) -> Result:
    plan = Plan(run)
    torch.manual_seed(run.seed)
    state = new_state(_model(run, init, quiet).to(device), run.optim, plan.techniques)
    if resume:
        _restore(state, out, world)
        if state.step > run.steps:
            raise InputError(
                f"{out} is at step {state.step} already, and steps is {run.steps}: give --steps of "
                f"{state.step} or more."
            )
    if run.train.compile_layers:
        compile_layers(state.model)
    if world.first:
        prepare_folder(run, out, device, world, None if init is None else init.origin)
    metrics = None
    if world.first:
        metrics = MetricsFile(out, run, state.step, state.measured_at, tracker)
    mode: str = run.mode
    if run.curriculum is not None:
        mode = f"{run.curriculum.mode}, then {run.mode}"
    progress = Progress(
        f"{run.task.name} {mode}", run.steps, state.step, not quiet, run.train.max_seconds
    )
    try:
        with StopSignals() as signals, explained():
            loop = Loop(run, out, state, plan, device, world, signals, metrics, progress)
            try:
                return loop.fit()
            except TrainingStopped:
                loop.save_best()  # from before the loss went bad
                raise
            except RuntimeError as error:
                if not is_device_failure(error):
                    raise
                raise DeviceFailed(_device_failed(error, out, state.step)) from error
    finally:
        progress.close()
        if metrics is not None:
            metrics.close()


def _model(run: Run, init: Init | None, quiet: bool) -> Any:
    """The model before its first step; what a person should know of its weights is on stderr."""
    model = build_model(run.model)
    told = "" if init is None else load_init(model, init)
    if told and not quiet:
        print(told, file=sys.stderr)
    return model


def _restore(state: State, out: Path, world: World) -> None:
    """Continue from the newest checkpoint; before the first one there is nothing to restore."""
    folder = checkpoint.newest(out)
    damaged = sorted((out / "checkpoints").glob("step-*"))
    if folder is None and damaged:
        raise InputError(
            f"no checkpoint of {out} is whole any more ({damaged[-1].name} is not): `entp evaluate`"
            " may still find its best weights; to train again give --out a new folder."
        )
    if folder is not None:
        state.restore(folder)
    there = False
    if world.first:
        checkpoint.keep_last(out, state.step)
        step = state.best.get("step")
        there = checkpoint.keep_best(out, None if step is None else int(step))
    if not world.gather(there)[0]:
        state.best = {}  # the next evaluation is the best that has weights


def is_device_failure(error: RuntimeError) -> bool:
    """Whether the GPU failed; that it has too little memory is no failure."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    failed = isinstance(error, getattr(torch, "AcceleratorError", ()))  # torch from 2.8 on
    return failed or any(
        sign in str(error)
        for sign in ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "cuBLASLt failed")
    )


def _device_failed(error: RuntimeError, out: Path, step: int) -> str:
    """What happened, and how to go on."""
    what = str(error).strip().splitlines()[0]
    last = checkpoint.newest(out)
    if last is None:
        left = "no checkpoint had been written. Train again with another --out."
    else:
        left = f"continue from {last.name} with --resume --out {out}."
    return f"the GPU failed at about step {step} ({what}); {left}"


class Loop:
    """Steps from state.step to run.steps, with logging, measuring and saving between them."""

    def __init__(
        self,
        run: Run,
        out: Path,
        state: State,
        plan: Plan,
        device: torch.device,
        world: World,
        signals: StopSignals,
        metrics: MetricsFile | None,
        progress: Progress,
    ) -> None:
        self.run, self.out, self.state, self.plan = run, out, state, plan
        self.device, self.world = device, world
        self.signals, self.metrics, self.progress = signals, metrics, progress
        modes = {plan.mode(part[0]) for part in plan.segments(0, run.steps)} | {run.mode}
        how = {mode: Forward.of(run, mode) for mode in modes}
        graphs = run.train.cuda_graph
        self.how = how[run.mode]
        self.step = Stepper(state, plan, how, run.optim, graphs, device, world)
        self.meter = LossMeter(run.seed, run.train.log_every, device)
        self.meter.total, self.meter.steps = state.unlogged
        self.evaluations = _evaluations(out, state.measured_at)
        self.monitor = monitored(run)
        self.batches: dict[str, list[Batch]] = {}
        self.best: dict[str, Tensor] | None = None
        self.frozen = Frozen(state.model)
        self.mark, self.timed = time.perf_counter(), state.step
        self.saved, self.saving = time.monotonic(), 0.0
        """When the last checkpoint was there, and how long writing it took."""

    def fit(self) -> Result:
        """Train to the end, or until the goal, the patience, the time limit or a signal."""
        run, state = self.run, self.state
        late = self.is_over(state.seconds)  # the same in every process
        if not late and state.step < run.steps:
            self.step.warm_up(run.task, run.seed, run.steps)  # no part of the training's time
        self.mark, self.saved = time.perf_counter(), time.monotonic()
        if state.measured_at < state.step and state.step % run.train.eval_every == 0:
            self.measure()  # what a signal left out
            self.save()
        if reason := stop_reason(run, self.evaluations, had=True):
            return self.result(reason)
        batches = _batches(run.task, run.seed, self.plan, run.steps, state.step, self.device)
        # Closed here, not by the garbage collector: that may run in a thread that is just
        # starting, where waiting for the batches' own thread would never end.
        with closing(batches):
            for batch in () if late else batches:
                late, signal, save = self.one_step(batch)
                last = state.step == run.steps or late
                if last and signal:
                    last = False  # resuming measures what is left
                self.report_step(last or signal)
                if not signal and (last or state.step % run.train.eval_every == 0):
                    self.measure()
                    reason = stop_reason(run, self.evaluations)
                    last = last or bool(reason)
                if last or signal or save or state.step % run.train.checkpoint_every == 0:
                    self.save()
                if signal:
                    name = self.signals.name()
                    return self.result(f"stopped by {name} and saved; continue with --resume")
                if last:
                    break
        if self.measured_at < state.step:  # a signal came with the last step
            self.measure()
            self.save()
        if not reason:
            reason = "all steps done"
            if late and state.step < run.steps:
                reason = f"{run.train.max_seconds:g} seconds are over"
        return self.result(reason)

    def one_step(self, batch: Batch) -> Stop:
        """Train on a batch; who wants to stop.

        Several processes stop together: the first is late, or one has caught a signal. The first
        one's clock is that of the checkpoints, which all of them save at one step.
        """
        state, alone = self.state, self.world.size == 1
        first = self.world.first
        stop = Stop(
            first and self.late(), self.signals.caught is not None, first and self.is_unsaved()
        )
        self.rate = self.plan.learning_rate(state.step, state.seconds)
        loss, self.norm, stop = self.step(batch, stop)
        self.meter.update(loss, state.step)
        state.step += 1
        if alone:
            stop = stop._replace(signal=self.signals.caught is not None)
        return stop

    def report_step(self, last: bool) -> None:
        """The bar, and a line of metrics every log_every steps and at the end."""
        state = self.state
        self.progress.step(state.step)
        if last or state.step % self.run.train.log_every == 0:
            loss = self.meter.mean()
            self.tick()
            self.progress.clock(state.step, state.seconds)
            self.log(loss, self.norm)

    def tick(self) -> None:
        """Bring the run's seconds up to this step; what comes after it counts with the next."""
        state = self.state
        if self.timed < state.step:
            now = time.perf_counter()
            state.seconds, self.mark = state.seconds + now - self.mark, now
            self.timed = state.step

    def late(self) -> bool:
        """Whether the run has had its time by now."""
        return self.is_over(self.state.seconds + time.perf_counter() - self.mark)

    def is_over(self, seconds: float) -> bool:
        limit = self.run.train.max_seconds
        return limit is not None and seconds >= limit

    def is_unsaved(self) -> bool:
        """Whether the last checkpoint is so long ago that another is due. Saving takes a part of
        the time at most, however large the model is."""
        limit = self.run.train.checkpoint_seconds
        if limit is None:
            return False
        return time.monotonic() - self.saved >= max(limit, self.saving / MOST_SAVING)

    def log(self, loss: float, norm: Tensor) -> None:
        """One line of training metrics."""
        step = self.state.step
        line = {"loss": loss, "lr": self.rate, "grad_norm": float(norm)}
        check_finite(line, step)
        self.progress.step(step, line)
        if self.metrics:
            self.metrics.write("train", step, {**line, "seconds": round(self.state.seconds, 3)})

    def measure(self) -> None:
        """Evaluate, and keep the best weights for the next save."""
        self.meter.check()
        self.tick()
        run, state = self.run, self.state
        totals = self.evaluate("valid")
        values = totals.values()
        check_finite(values, state.step)
        if run.monitor not in values:
            raise InputError(
                f"train.monitor {run.monitor} was not measured on validation data: measured were "
                f"{', '.join(totals.all)}."
            )
        self.evaluations.append({"step": state.step, **values})
        state.measured_at = state.step
        if is_better(run.task, self.monitor, values, state.best):
            state.best = {**values, "step": state.step}
            weights = state.measured.state_dict()
            kept = self.frozen.trained(weights)
            self.best = {name: t.detach().clone() for name, t in kept.items()}
        self.progress.line(state.step, values)
        if self.metrics:
            row = {**values, "seconds": round(state.seconds, 3)}
            self.metrics.write("eval", state.step, row)
        for split in run.train.eval_splits:
            self.measure_split(split)

    def measure_split(self, split: str) -> None:
        """Evaluate on a further split, for the record only."""
        totals, state = self.evaluate(split), self.state
        some = {f"{split} {name}": totals.value(name) for name in totals.all if totals.all[name].w}
        check_finite(some, state.step)
        self.progress.line(state.step, some)
        if self.metrics:
            self.metrics.write_split(split, state.step, round(state.seconds, 3), totals)

    def evaluate(self, split: str) -> Totals:
        """The metrics on the first batches of a split, which are made once."""
        run, state = self.run, self.state
        if split not in self.batches:
            count = run.train.eval_batches
            made = split_batches(run.task, split, count, run.batch_size, run.seed)
            self.batches[split] = list(made)
        return evaluate(
            state.measured,
            run.task,
            self.batches[split],
            self.how,
            device=self.device,
            world=self.world,
        )

    @property
    def measured_at(self) -> int:
        """The step of the last evaluation; -1 before the first."""
        return int(self.evaluations[-1]["step"]) if self.evaluations else -1

    @property
    def values(self) -> dict[str, float]:
        """What the last evaluation measured."""
        last = self.evaluations[-1] if self.evaluations else {}
        return {k: v for k, v in last.items() if k not in ("kind", "step", "seconds")}

    def save(self) -> None:
        """A checkpoint to continue from, and one of the best weights since the last, unless the
        weights have gone bad."""
        self.meter.check()
        self.tick()
        start = time.monotonic()
        if self.metrics:
            self.metrics.flush()
        self.save_best()
        self.state.unlogged = self.meter.total, self.meter.steps
        if self.world.first:
            state, frozen = self.state, self.write_frozen()
            weights = self.frozen.trained(state.model.state_dict())
            checkpoint.save_checkpoint(
                self.out, state.step, weights, self.run, state.save(), frozen
            )
            if state.best:
                checkpoint.keep_best(self.out, int(state.best["step"]))
        self.saved = time.monotonic()
        self.saving = self.saved - start

    def save_best(self) -> None:
        """The best weights, if they are not on disk yet: not at every evaluation, which may be
        quicker than the disk."""
        if self.best is not None and self.world.first:
            step = int(self.state.best["step"])
            frozen = self.write_frozen()
            checkpoint.save_checkpoint(self.out, step, self.best, self.run, None, frozen)
        self.best = None

    def write_frozen(self) -> dict[str, bytes]:
        """What checkpoints say of the weights that are not trained, which the run's folder has."""
        return self.frozen.write(self.out, self.state.model.state_dict())

    def result(self, reason: str) -> Result:
        state = self.state
        return Result(
            self.out,
            state.step,
            state.seconds,
            reason,
            self.values,
            state.best,
            self.signals.caught,
        )


def _batches(
    task: Task, seed: int, plan: Plan, steps: int, start: int, device: torch.device
) -> Generator[Batch, None, None]:
    """The batches of steps start, start + 1, ..., made ahead of them."""
    for part in plan.segments(start, steps):
        size = plan.batch_size(part[0])
        processes = processes_for(task, seed, size, part[-1]) if device.type == "cuda" else 0
        yield from batches_ahead(task, seed, size, part, processes)


def _evaluations(out: Path, step: int) -> list[dict[str, Any]]:
    """The run's evaluations on validation data up to that of `step`."""
    return [r for r in read_own_metrics(out) if r["kind"] == "eval" and r["step"] <= step]


def announce(result: Result) -> str:
    """One line for a person about how a run ended."""
    measured = "  ".join(f"{k} {v:.4g}" for k, v in result.metrics.items() if k != "n")
    return (
        f"{result.reason}: step {result.step}, {result.seconds:.1f} s of training. {measured}  "
        f"({result.out})"
    )
