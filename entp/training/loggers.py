"""metrics.jsonl, which is the truth, and an optional tracker."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Protocol

from entp.config import Run
from entp.config.json import run_to_json
from entp.config.upgrade import upgrade_values
from entp.errors import InputError
from entp.files import parse_json, write_file
from entp.results.environment import read_environment
from entp.tasks.metrics import Totals


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line torn by a kill is left out, any other damage is an
    InputError."""
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            if not (
                isinstance(row, dict)
                and isinstance(row.get("kind"), str)
                and isinstance(row.get("step"), int)
            ):
                raise ValueError
            rows.append(upgrade_values(row))
        except ValueError:
            if number < len(lines):
                raise InputError(
                    f"{path} is damaged: line {number} is no line of metrics. Repair or remove it."
                ) from None
    return rows


def read_own_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without evaluations of the run that this one was forked from."""
    forked = read_environment(out).get("forked")
    first = forked["step"] if forked else -1
    return [row for row in read_metrics(out) if row["kind"] == "train" or row["step"] > first]


class Tracker(Protocol):
    """Somewhere else that metrics are copied to, under names such as train/loss and eval/loss."""

    def log(self, values: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl of a run, with its optional trackers. On resume, lines after the checkpoint's
    step are dropped, and evaluations that the checkpoint does not know of."""

    def __init__(
        self,
        out: Path,
        run: Run,
        from_step: int,
        measured_at: int,
        tracker: Tracker | None = None,
    ) -> None:
        last = {"train": from_step}
        rows = read_metrics(out) if from_step else []
        kept = [row for row in rows if row["step"] <= last.get(row["kind"], measured_at)]
        write_file(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept).encode())
        self.file = open(out / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115 (closed by close)
        both = (make_tracker(run, out), tracker)
        self.trackers = [one for one in both if one is not None]

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """One line, in the file at once."""
        self._line({"kind": kind, "step": step, **values})
        self._track(kind, step, values)

    def write_split(self, split: str, step: int, seconds: float, totals: Totals) -> None:
        """What an evaluation found on a further split, with its bins."""
        row = {"kind": "split", "step": step, "split": split, "seconds": seconds}
        self._line({**row, "totals": totals.to_json()})
        self._track(split, step, {k: v for k, v in totals.values().items() if math.isfinite(v)})

    def flush(self) -> None:
        """Every line is on disk for good, as it has to be before a checkpoint says that its step
        was taken."""
        os.fsync(self.file.fileno())

    def _line(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row, allow_nan=False) + "\n")

    def _track(self, kind: str, step: int, values: dict[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log({f"{kind}/{name}": v for name, v in values.items()}, step)

    def close(self) -> None:
        self.file.close()
        for tracker in self.trackers:
            tracker.close()


def make_tracker(run: Run, out: Path) -> Tracker | None:
    """The tracker that train.logger asks for."""
    name = run.train.logger
    try:
        if name == "tensorboard":
            return _TensorBoard(out)
        if name == "wandb":
            import wandb

            return _Tracked(
                wandb,
                wandb.init(project="entp", name=out.name, dir=str(out), config=run_to_json(run)),
            )
        if name == "trackio":
            import trackio

            return _Tracked(
                trackio, trackio.init(project="entp", name=out.name, config=run_to_json(run))
            )
    except ImportError as error:
        raise InputError(
            f"train.logger {name} is not installed ({error}): pip install 'entp[{name}]'."
        ) from None
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
