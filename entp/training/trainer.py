"""The one training loop.

    result = train(run, out="runs/first")            # on a CPU, one GPU, or several processes under torchrun
    result = train(run, out="runs/first", resume=True)

A step is a pure function of the weights, the optimizer state and the step number, so a run that was stopped or killed
continues as if nothing had happened: bit for bit on a CPU.
"""

from __future__ import annotations

import copy
import errno
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from entp.config import Run
from entp.engine.cold_start import warm_math
from entp.errors import DeviceFailed, InputError, TrainingStopped
from entp.model import Transformer
from entp.tasks.ahead import batches_ahead, processes_for
from entp.tasks.base import Batch
from entp.training import checkpoint
from entp.training.distributed import World, join
from entp.training.evaluation import check_targets, evaluate, some_batches
from entp.training.folder import check_folder, prepare_folder, read_fork, write_fork
from entp.training.metrics import MetricsFile, Progress, read_metrics
from entp.training.optim import make_optimizers
from entp.training.selection import check_take, places_of
from entp.training.step import State, Stepper, rate_of
from entp.training.watch import LossWatch, StopSignals, check_finite


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
    quiet: bool = False,
) -> Result:
    """Train `run` in the folder `out`; `resume` continues what is there. Only the first process writes.

    fork: the folder of another run, whose last checkpoint this one begins with.
    """
    warm_math()
    out = Path(out)
    if resume and fork is not None:
        raise InputError(f"resume continues {out}, fork begins it with a copy of {fork}: give one of them.")
    with join(device) as (world, where):
        _check(run, world)
        check_folder(run, out, resume)
        copied = read_fork(run, Path(fork)) if fork is not None else None
        world.barrier()  # nobody creates the folder before all have looked at it
        try:
            out.mkdir(parents=True, exist_ok=True)
            taken = f"{out} is being trained by another process: wait for it, or give another --out."
            with checkpoint.alone_in(out, refuse=taken) if world.first else nullcontext():
                if copied is not None and world.first:
                    write_fork(run, copied, out)
                world.barrier()
                return _train(run, out, where, world, resume or fork is not None, quiet or not world.first)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            last = checkpoint.newest(out)
            kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written yet"
            raise InputError(f"no space to write to {out} ({error.strerror}): {kept}. Free space, then use --resume.") from None


def _check(run: Run, world: World) -> None:
    """InputError for what cannot be trained, or not by so many processes."""
    fewest = min(run.batch, run.batch_at(0), run.batch_at(run.steps))
    if fewest < world.size:
        raise InputError(f"batch {fewest} is smaller than the {world.size} processes: raise --batch.")
    if run.optim.decay == "seconds" and world.size > 1:
        raise InputError("optim.decay seconds is for one process: several clocks would give several rates. Use steps.")
    for name in ("select", "take"):
        if getattr(run.optim, name) and world.size > 1:
            raise InputError(f"optim.{name} is for one process: each would have to choose from its own share. Leave it out.")
    if run.model.position == "given":
        raise InputError("model.position given is for tables set by hand, and training has none: use learned or none.")
    one = run.task.batch(run.seed, "train", 0, run.batch)
    check_targets(run, one)
    if run.optim.select or run.optim.take:
        places = places_of(one, run.task)
        if run.optim.take:
            check_take(run.optim.take, min(run.batch, run.batch_at(run.steps)), places)


def new_state(run: Run, device: torch.device) -> State:
    """A run before its first step."""
    torch.manual_seed(run.seed)
    model = Transformer(run.model).to(device)
    return State(model, make_optimizers(model, run.optim), mean=copy.deepcopy(model) if run.optim.average else None)


def _train(run: Run, out: Path, device: torch.device, world: World, resume: bool, quiet: bool) -> Result:
    state = new_state(run, device)
    folder = checkpoint.newest(out) if resume else None
    if folder is not None:
        state.restore(folder)
    elif resume and (damaged := sorted((out / "checkpoints").glob("step-*"))):
        raise InputError(
            f"no checkpoint of {out} is whole any more ({damaged[-1].name} is not): `entp evaluate` may still find its best "
            "weights; to train again give --out a new folder."
        )
    if world.first:
        prepare_folder(run, out, device, world)
    if run.train.compile:
        for block in state.model.blocks:
            block.finish = torch.compile(block.finish)  # type: ignore[assignment,arg-type]
    metrics = MetricsFile(out, run, state.step) if world.first else None
    mode = f"{run.start.mode}, then {run.mode}" if run.start.steps else run.mode
    progress = Progress(f"{run.task.name} {mode}", run.steps, state.step, not quiet, run.train.max_seconds)
    try:
        with StopSignals() as signals:
            loop = Loop(run, out, state, device, world, signals, metrics, progress)
            try:
                return loop.go()
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


def is_device_failure(error: RuntimeError) -> bool:
    """Whether the GPU failed; that it has too little memory is no failure."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    failed = isinstance(error, getattr(torch, "AcceleratorError", ()))  # torch from 2.8 on
    return failed or any(
        sign in str(error) for sign in ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "cuBLASLt failed")
    )


def _device_failed(error: RuntimeError, out: Path, step: int) -> str:
    """What happened, and how to go on."""
    what = str(error).strip().splitlines()[0]
    last = checkpoint.newest(out)
    if last is None:
        return f"the GPU failed at about step {step} ({what}); no checkpoint had been written. Train again with another --out."
    return f"the GPU failed at about step {step} ({what}); continue from {last.name} with --resume --out {out}."


class Loop:
    """Steps from state.step to run.steps, with logging, measuring and saving between them."""

    def __init__(
        self,
        run: Run,
        out: Path,
        state: State,
        device: torch.device,
        world: World,
        signals: StopSignals,
        metrics: MetricsFile | None,
        progress: Progress,
    ) -> None:
        self.run, self.out, self.state, self.device, self.world = run, out, state, device, world
        self.signals, self.metrics, self.progress = signals, metrics, progress
        self.step = Stepper(run, state, device, world)
        self.watch = LossWatch(run, device)
        self.values = _last_evaluation(out, state.step)
        self.valid: list[Batch] = []
        self.best: dict[str, Tensor] | None = None
        self.rate = 0.0

    def go(self) -> Result:
        run, state, every = self.run, self.state, self.run.train
        late = self.late(state.seconds)
        if not late and state.step < run.steps:
            self.step.warm_up()  # no part of the training's time
        reason, mark = "", time.perf_counter()
        if self.values and reached(run, self.values):
            over = f"{run.goal} had reached {every.target:g}"
            return Result(self.out, state.step, state.seconds, over, self.values, state.best)
        for batch in () if late else _batches(run, state.step, self.device):
            late = self.late(state.seconds + time.perf_counter() - mark)
            alone = self.world.size == 1  # several processes have to stop together: whoever is late tells the others
            self.rate = rate_of(run, state)
            loss, norm, stop = self.step(batch, self.signals.caught is not None or (late and not alone))
            self.watch.note(loss, state.step)
            state.step += 1
            stop = stop or (alone and self.signals.caught is not None)
            last = state.step == run.steps or (late and alone)
            self.progress.step(state.step)
            if state.step % every.log_every == 0 or last or stop:
                loss_so_far = self.watch.mean()
                state.seconds, mark = state.seconds + time.perf_counter() - mark, time.perf_counter()
                self.progress.clock(state.step, state.seconds)
                self.log(loss_so_far, norm)
            if (state.step % every.eval_every == 0 or last) and not stop and self.measure():
                last, reason = True, f"{run.goal} reached {every.target:g}"
            if state.step % every.checkpoint_every == 0 or last or stop:
                self.save()
            if stop and (self.signals.caught is not None or not late):
                reason = f"stopped by {self.signals.name()} and saved; continue with --resume"
            if last or stop:
                break
        over = f"{every.max_seconds:g} seconds are over" if late and state.step < run.steps else "all steps done"
        reason = reason or over
        return Result(self.out, state.step, state.seconds, reason, self.values, state.best, self.signals.caught)

    def late(self, seconds: float) -> bool:
        """Whether the run has had its time."""
        limit = self.run.train.max_seconds
        return limit is not None and seconds >= limit

    def log(self, loss: float, norm: Tensor) -> None:
        """One line of training metrics."""
        step = self.state.step
        line = {"loss": loss, "lr": self.rate, "grad_norm": float(norm)}
        check_finite(line, step)
        self.progress.step(step, line)
        if self.metrics:
            self.metrics.write("train", step, {**line, "seconds": round(self.state.seconds, 3)})

    def measure(self) -> bool:
        """Evaluate, keep the best weights for the next save, and say whether the target is reached."""
        self.watch.check()
        state = self.state
        self.valid = self.valid or list(some_batches(self.run, "valid", self.run.train.eval_batches))
        model = state.mean or state.model
        self.values = evaluate(model, self.run, batches=self.valid, device=self.device, world=self.world)
        check_finite(self.values, state.step)
        better = _is_better(self.run, self.values, state.best)
        if better:
            state.best = {**self.values, "step": state.step}
            self.best = {name: t.detach().clone() for name, t in model.state_dict().items()}
        self.progress.line(state.step, self.values)
        if self.metrics:
            self.metrics.write("eval", state.step, self.values)
        return reached(self.run, self.values)

    def save(self) -> None:
        """A checkpoint to continue from, and one of the best weights since the last, unless the weights have gone bad."""
        self.watch.check()
        self.save_best()
        if self.world.first:
            weights = self.state.model.state_dict()
            checkpoint.save_checkpoint(self.out, self.state.step, weights, self.run, self.state.save())

    def save_best(self) -> None:
        """The best weights, if they are not on disk yet: not at every evaluation, which may be quicker than the disk."""
        if self.best is not None and self.world.first:
            checkpoint.save_checkpoint(self.out, int(self.state.best["step"]), self.best, self.run, None)
        self.best = None


def _batches(run: Run, start: int, device: torch.device) -> Iterator[Batch]:
    """The batches of steps start, start + 1, ..., made ahead of them."""
    changes = sorted(min(max(start, step), run.steps) for step in (0, run.start.steps, run.optim.late_at, run.steps))
    for steps in map(range, changes, changes[1:]):
        if steps:
            size = run.batch_at(steps[0])
            processes = processes_for(run.task, run.seed, size) if device.type == "cuda" else 0
            yield from batches_ahead(run.task, run.seed, size, steps, processes)


def _last_evaluation(out: Path, step: int) -> dict[str, float]:
    """What the last evaluation up to `step` measured; empty before the first."""
    rows = [r for r in read_metrics(out) if r["kind"] == "eval" and r["step"] <= step]
    return {k: v for k, v in rows[-1].items() if k not in ("kind", "step")} if rows else {}


def _is_better(run: Run, values: dict[str, float], best: dict[str, float]) -> bool:
    """Higher accuracy or lower loss; ties in accuracy go to the lower loss."""

    def rank(v: dict[str, float]) -> tuple[float, float]:
        return (-v["loss"] if run.goal == "loss" else v[run.goal], -v["loss"])

    return not best or rank(values) > rank(best)


def reached(run: Run, values: dict[str, float]) -> bool:
    """Whether an evaluation is as good as the run is to become."""
    target = run.train.target
    if target is None:
        return False
    return values[run.goal] <= target if run.goal == "loss" else values[run.goal] >= target


def announce(result: Result) -> str:
    """One line for a person about how a run ended."""
    measured = "  ".join(f"{k} {v:.4g}" for k, v in result.metrics.items() if k != "n")
    return f"{result.reason}: step {result.step}, {result.seconds:.1f} s of training. {measured}  ({result.out})"
