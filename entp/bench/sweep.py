"""`entp bench sweep`: steps per second of many small runs on one device, together.

One run at a time, several processes that take turns on the GPU, and the same under NVIDIA's
Multi-Process Service. Processes do what training does between evaluations: batches made ahead, the
captured step, the loss kept. Several models stacked into one step lost to that (docs/LOG.md).
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from entp.bench.measure import release, wait
from entp.bench.options import BenchSweepOptions
from entp.config import Mode, Run, model_for
from entp.engine.layout import rows_of
from entp.errors import InputError
from entp.model.build import build_model
from entp.results.environment import environment
from entp.tasks.addition import Addition
from entp.tasks.base import Task
from entp.terminal import format_table
from entp.training.cuda_graph import EAGER_STEPS, Stepper
from entp.training.distributed import World, pick_device
from entp.training.forward import Forward
from entp.training.loss_meter import LossMeter
from entp.training.mps import shared_gpu
from entp.training.plan import Plan
from entp.training.prefetch import batches_ahead, processes_for
from entp.training.state import new_state

MODES: tuple[Mode, ...] = ("entp", "decoder")
WARM_STEPS = {"cuda": EAGER_STEPS + 7, "cpu": 1}
"""Steps that are not timed: on CUDA a graph is captured in them."""
LONG = 10**9
"""More steps than any measurement does."""
PROCESSES, MPS = "processes", "processes, MPS"
"""How runs share the device."""
WANTED = 2.0
"""Steps per second of all runs together over those of one at a time, on a GPU."""


WINDOW = {"cuda": 64, "cpu": 16}
"""Characters of a window: as in the recipe, and few enough for a CPU."""


def sweep_task(device: str = "cuda") -> Task:
    """The task of the runs: addition as in the recipe."""
    window = WINDOW[device]
    return Addition(
        digits=3, train_examples=5000, layout="windows", sampling="paper", window=window
    )


def sweep_run(mode: Mode, batch_size: int, seed: int = 0, device: str = "cuda") -> Run:
    """One of the runs."""
    task = sweep_task(device)
    return Run(task, model_for(task, "small"), mode, steps=LONG, batch_size=batch_size, seed=seed)


def bench(options: BenchSweepOptions) -> dict[str, Any]:
    """What a results file keeps and `report` prints: every way to share the device, measured."""
    device = pick_device(options.device, World())
    cuda = device.type == "cuda"
    size = options.batch_size or (64 if cuda else 2)
    counts = options.numbers() or ([1, 2, 4, 8, 16] if cuda else [1, 2])
    if options.quick:
        counts = counts[:2]
    timing = (0.3, 1) if options.quick else (options.seconds, options.repeats)
    rows = _by_processes(PROCESSES, counts, device, size, timing, {})
    with shared_gpu(str(device)) as shared:
        if shared.told:
            _say(shared.told)
        if shared.environment:
            several = [count for count in counts if count > 1]
            rows += _by_processes(MPS, several, device, size, timing, shared.environment)
    targets = torch.from_numpy(sweep_task(device.type).batch(0, "train", 0, size).target_mask)
    runs = _with_ratios(rows)
    return {
        "environment": environment(device, 1),
        "config": {
            "task": sweep_task(device.type).name,
            "size": "small",
            "batch_size": size,
            "tokens": targets.shape[1],
            "rows": sum(rows_of(targets)),
            "counts": counts,
            "seconds": timing[0],
            "repeats": timing[1],
        },
        "mps": shared.told,
        "note": options.note,
        "runs": runs,
        "targets": _targets(runs) if cuda else [],
    }


def report(section: dict[str, Any]) -> str:
    """The table for a person."""
    where, config = section["environment"], section["config"]
    title = (
        f"runs that share a device: {config['task']}, {config['size']}, {config['batch_size']} "
        f"sequences of {config['tokens']} tokens; {where['device']}, {where['cores']} cores, torch "
        f"{where['torch']}; n = {config['repeats']} x {config['seconds']:g} s"
    )
    head = ["", "runs at a time", "steps/s together", "spread", "over one at a time", "ms a step"]
    rows = []
    for row in section["runs"]:
        name, count = f"{row['mode']}, {row['how']}", str(row["runs"])
        if row["error"]:
            rows.append([name, count, "-", "-", "-", "-"])
            continue
        rates = row["steps_per_s"]
        rows.append(
            [
                name,
                count,
                f"{row['median']:.0f}" if row["median"] >= 10 else f"{row['median']:.3g}",
                f"{min(rates):.3g}..{max(rates):.3g}",
                "-" if row["ratio"] is None else f"{row['ratio']:.2f}x",
                f"{1e3 * row['runs'] / row['median']:.2f}",
            ]
        )
    parts = [f"{title}\n{format_table(head, rows)}"]
    failed = [row for row in section["runs"] if row["error"]]
    parts += [f"{r['mode']}, {r['how']}, {r['runs']} runs: {r['error']}" for r in failed]
    if section["mps"]:
        parts.append(section["mps"])
    for target in section["targets"]:
        met = "met" if target["met"] else "not met"
        parts.append(
            f"{target['mode']}: {target['reached']:.2f}x the steps of one at a time by "
            f"{target['how']}, {target['runs']} runs; wanted {target['wanted']:g}x: {met}"
        )
    if section["note"]:
        parts.append(f"note: {section['note']}")
    return "\n\n".join(parts)


def _row(
    mode: Mode, how: str, runs: int, rates: Sequence[float], error: str = ""
) -> dict[str, Any]:
    median = statistics.median(rates) if rates else None
    if median is not None:
        _say(f"{mode}, {how}, {runs} at a time: {median:.4g} steps/s")
    else:
        _say(f"{mode}, {how}, {runs} at a time: {error}")
    return {
        "mode": mode,
        "how": how,
        "runs": runs,
        "steps_per_s": list(rates),
        "median": median,
        "error": error,
    }


def _say(text: str) -> None:
    print(text, flush=True)


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its steps per second over those of one run at a time; None where unknown."""
    alone = {
        row["mode"]: row["median"]
        for row in rows
        if (row["how"], row["runs"]) == (PROCESSES, 1) and row["median"]
    }
    return [
        {
            **row,
            "ratio": row["median"] / alone[row["mode"]]
            if row["median"] and row["mode"] in alone
            else None,
        }
        for row in rows
    ]


def _targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best way of each mode beside what is wanted."""
    found = []
    for mode in MODES:
        known = [row for row in rows if row["mode"] == mode and row["ratio"] is not None]
        if known:
            best = max(known, key=lambda row: row["ratio"])
            reached = {name: best[name] for name in ("mode", "how", "runs")}
            reached |= {"wanted": WANTED, "reached": best["ratio"], "met": best["ratio"] >= WANTED}
            found.append(reached)
    return found


Timing = tuple[float, int]
"""Seconds of a measurement, and how often it is made."""


def _by_processes(
    how: str,
    counts: Sequence[int],
    device: torch.device,
    batch_size: int,
    timing: Timing,
    variables: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Rows of runs in as many processes as each count says; the processes are started once."""
    rows: list[dict[str, Any]] = []
    if not counts:
        return rows
    with _started(max(counts), variables) as processes:
        for mode in MODES:
            for count in counts:
                some = processes[:count]
                try:
                    rates = _rates(some, device, mode, batch_size, timing)
                    rows.append(_row(mode, how, count, rates))
                except InputError as error:
                    rows.append(_row(mode, how, count, [], str(error)))
            with contextlib.suppress(InputError):  # a process that died has nothing to close
                _all_answers(processes, "close")
    return rows


def _rates(
    processes: Sequence[Process],
    device: torch.device,
    mode: Mode,
    batch_size: int,
    timing: Timing,
) -> list[float]:
    """Steps per second of all processes together, in each measurement."""
    seconds, repeats = timing
    for seed, process in enumerate(processes):
        process.ask("prepare", str(device), sweep_run(mode, batch_size, seed, device.type))
    _answers(processes)
    return [_together(processes, seconds) for _ in range(repeats)]


def _together(processes: Sequence[Process], seconds: float) -> float:
    return sum(_all_answers(processes, "measure", seconds))


def _all_answers(processes: Sequence[Process], what: str, *arguments: Any) -> list[Any]:
    for process in processes:
        process.ask(what, *arguments)
    return _answers(processes)


def _answers(processes: Sequence[Process]) -> list[Any]:
    """What each process found, once all have answered; the first error of one that failed."""
    found, errors = [], []
    for process in processes:
        try:
            found.append(process.answer())
        except InputError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


class Process:
    """A process that trains for measurements, and this side of its pipe."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        context = get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, dict(variables)), daemon=False)
        self.process.start()
        there.close()

    def ask(self, what: str, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it died: the answer says so
            self.pipe.send((what, arguments))

    def answer(self) -> Any:
        """What it found; an InputError with what went wrong."""
        try:
            found, error = self.pipe.recv()
        except (EOFError, OSError):
            raise InputError("a process died, perhaps because memory ran out.") from None
        if error:
            raise InputError(error)
        return found

    def close(self) -> None:
        self.pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


@contextlib.contextmanager
def _started(count: int, variables: Mapping[str, str]) -> Iterator[list[Process]]:
    """So many processes, which end with the context."""
    processes: list[Process] = []
    try:
        for _ in range(count):
            processes.append(Process(variables))
        yield processes
    finally:
        for process in processes:
            process.close()


def _serve(pipe: Connection, variables: dict[str, str]) -> None:
    """Do what is asked for until the other side is gone."""
    os.environ.update(variables)  # before anything asks for a GPU
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the parent decides
    desk = Desk()
    try:
        while True:
            what, arguments = pipe.recv()
            result, error = None, ""
            try:
                result = getattr(desk, what)(*arguments)
            except Exception as problem:
                told = str(problem).strip() or "nothing more is known"
                error = f"{type(problem).__name__}: {told.splitlines()[0]}"
            if error:
                desk.close()
            pipe.send((result, error))
    except (EOFError, OSError):
        desk.close()


class Desk:
    """What a process can be asked for."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.made_of: tuple[Any, ...] = ()

    def prepare(self, *arguments: Any) -> None:
        """Have Trainer(*arguments), a new one or the one that is there."""
        if self.trainer is None or self.made_of != arguments:
            self.close()
            self.trainer, self.made_of = Trainer(*arguments), arguments

    def measure(self, seconds: float) -> float:
        """Its steps per second."""
        assert self.trainer is not None
        return self.trainer.steps_per_second(seconds)

    def close(self) -> None:
        """Give its memory back."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None
        release(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


class Trainer:
    """Training steps of a run, after its warm-up."""

    def __init__(self, device: str, run: Run) -> None:
        self.device = torch.device(device)
        ahead = 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            ahead = processes_for(run.task, run.seed, run.batch_size)
        self.batches = batches_ahead(run.task, run.seed, run.batch_size, range(run.steps), ahead)
        self.meter, self.done = LossMeter(run.seed, run.train.log_every, self.device), 0
        self.stepper: Stepper | None = new_stepper(run, self.device)
        for _ in range(WARM_STEPS[self.device.type]):
            self.step()
        wait(self.device)

    def step(self) -> None:
        """One step, as training does it."""
        assert self.stepper is not None
        loss = self.stepper(next(self.batches)).loss
        self.stepper.state.step += 1
        self.meter.update(loss, self.done)
        self.done += 1

    def steps_per_second(self, seconds: float) -> float:
        """Over at least so many seconds."""
        wait(self.device)
        start, first = time.perf_counter(), self.done
        while True:
            self.step()
            if time.perf_counter() - start >= seconds:
                break
        wait(self.device)
        return (self.done - first) / (time.perf_counter() - start)

    def close(self) -> None:
        """End what makes batches, and let the model go."""
        self.batches.close()  # type: ignore[attr-defined]
        self.stepper = None


def new_stepper(run: Run, device: torch.device) -> Stepper:
    """The steps of a run, as training makes them."""
    torch.manual_seed(run.seed)
    plan = Plan(run)
    state = new_state(build_model(run.model).to(device), run.optim, plan.techniques)
    how = {run.mode: Forward.of(run)}
    graphs = run.train.cuda_graph
    return Stepper(state, plan, how, run.optim, graphs, device, World())
