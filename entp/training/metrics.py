"""What a run says: metrics.jsonl (the truth), a progress bar or plain lines for a person, and an optional tracker."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import torch

from entp import __version__
from entp.config import Run
from entp.config_json import parse_json, run_to_json
from entp.errors import InputError
from entp.record_shapes import ENVIRONMENT, check_shape
from entp.training.checkpoint import write_file


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line torn by a kill is left out, any other damage is an InputError."""
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            if not (isinstance(row, dict) and isinstance(row.get("kind"), str) and isinstance(row.get("step"), int)):
                raise ValueError
            rows.append(row)
        except ValueError:
            if number < len(lines):
                raise InputError(f"{path} is damaged: line {number} is no line of metrics. Repair or remove it.") from None
    return rows


class Tracker(Protocol):
    """Somewhere else that metrics are copied to."""

    def log(self, values: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl of a run, with its optional mirror. On resume, lines after the checkpoint's step are dropped."""

    def __init__(self, out: Path, run: Run, from_step: int) -> None:
        kept = [row for row in read_metrics(out) if row["step"] <= from_step] if from_step else []
        write_file(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept).encode())
        self.file = open(out / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115 (closed by close)
        self.tracker = make_tracker(run, out)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """One line, on disk at once."""
        self.file.write(json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n")
        if self.tracker is not None:
            self.tracker.log({f"{kind}/{name}": v for name, v in values.items()}, step)

    def close(self) -> None:
        self.file.close()
        if self.tracker is not None:
            self.tracker.close()


def make_tracker(run: Run, out: Path) -> Tracker | None:
    """The tracker that train.mirror asks for."""
    name = run.train.mirror
    try:
        if name == "tensorboard":
            return _TensorBoard(out)
        if name == "wandb":
            import wandb

            return _Tracked(wandb, wandb.init(project="entp", name=out.name, dir=str(out), config=run_to_json(run)))
        if name == "trackio":
            import trackio

            return _Tracked(trackio, trackio.init(project="entp", name=out.name, config=run_to_json(run)))
    except ImportError as error:
        raise InputError(f"train.mirror {name} is not installed ({error}): pip install 'entp[{name}]'.") from None
    return None


class _TensorBoard:
    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(out / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Tracked:
    """wandb and trackio, which share these calls."""

    def __init__(self, module: Any, _run: Any) -> None:
        self.module = module

    def log(self, values: dict[str, float], step: int) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        self.module.finish()


class Progress:
    """A bar on a terminal, a line per evaluation elsewhere, nothing when quiet or not the first process."""

    def __init__(self, label: str, total: int, start: int, show: bool, most_seconds: float | None = None) -> None:
        self.show, self.label, self.total, self.most_seconds = show, label, total, most_seconds
        self.expected = total
        self.bar = None
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=start, desc=label, unit="step", dynamic_ncols=True)

    def step(self, step: int, notes: dict[str, float] | None = None) -> None:
        """One step is done; `notes` are shown beside the bar."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            if notes:
                self.bar.set_postfix({k: f"{v:.4g}" for k, v in notes.items()})

    def clock(self, step: int, seconds: float) -> None:
        """So many steps took so long: how many there will be, where the clock ends them first."""
        if self.most_seconds is not None and seconds > 0:
            self.expected = min(self.total, max(step, round(step * self.most_seconds / seconds)))
            if self.bar is not None:
                self.bar.total = self.expected

    def line(self, step: int, values: dict[str, float]) -> None:
        """An evaluation, for people without a bar."""
        if self.show and self.bar is None:
            text = "  ".join(f"{k} {v:.4g}" for k, v in values.items())
            about = "" if self.expected == self.total else "about "
            print(f"{self.label}: step {step}/{about}{self.expected}  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def read_environment(out: Path) -> dict[str, Any]:
    """environment.json of a run, empty where there is none; damage is an InputError."""
    path = out / "environment.json"
    try:
        found = parse_json(path.read_text()) if path.exists() else {}
        check_shape(found, {**{f"{key}?": kind for key, kind in ENVIRONMENT.items()}, "resumed?": [{}]})
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): repair or remove it. It says where the run was trained.") from None
    return found


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Where a run was made: versions, device, commit, date."""
    return {
        "entp": __version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processes": world_size,
    }


def _commit() -> str | None:
    """What ENTP_COMMIT says, for a copy of the source; else its git commit, '+' appended if it has changes, or None."""
    if "ENTP_COMMIT" in os.environ:
        return os.environ["ENTP_COMMIT"]
    where = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=where, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
