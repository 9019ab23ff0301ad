"""The run folder: what may be started or continued in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from entp.config import Run
from entp.config.json import config_hash, free_to_change, read_run, run_to_json
from entp.errors import InputError
from entp.files import write_file
from entp.results.environment import environment, read_environment
from entp.training import checkpoint
from entp.training.distributed import World
from entp.training.loggers import read_metrics
from entp.training.state import upgrade_trainer
from entp.training.techniques.base import make_techniques


def check_folder(run: Run, out: Path, resume: bool) -> None:
    """Refuse to mix runs: a used folder needs resume, and resuming needs the same run."""
    saved = out / "config.json"
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: give --out a folder.")
    if not resume:
        if not saved.exists() and any((out / "checkpoints").glob("*")):
            raise InputError(
                f"{out} holds checkpoints without config.json, as a killed fork leaves them: "
                "delete it first."
            )
        if saved.exists():
            raise InputError(
                f"{out} already holds a run: continue it with --resume, or choose another --out."
            )
        return
    if not saved.exists():
        raise InputError(f"{out} holds no run to resume: leave --resume out to start one.")
    old = run_to_json(read_run(saved))
    differences = [
        d for d in _differences(old, run_to_json(run)) if d.split(" ")[0] not in free_to_change(run)
    ]
    if differences:
        raise InputError(
            f"{out} holds another run: {'; '.join(differences)}. Use its settings, or another "
            "--out."
        )


class Fork(NamedTuple):
    """What a run takes over from another."""

    weights: dict[str, Tensor]
    trainer: dict[str, Any]
    metrics: bytes
    environment: dict[str, Any]


def read_fork(run: Run, source: Path) -> Fork:
    """The last checkpoint of the run in `source`, for `run` to begin with."""
    folder = checkpoint.newest(source)
    if folder is None:
        raise InputError(
            f"{source} holds no checkpoint to fork: give the --out of an `entp train` that has "
            "saved one."
        )
    old = checkpoint.load_run(folder)
    same = [(run_to_json(r)["model"], {"optimizer": r.optim.name}) for r in (old, run)]
    differences = [d for a, b in zip(*same, strict=True) for d in _differences(a, b)]
    if differences:
        raise InputError(
            f"{source} cannot be forked: {'; '.join(differences)}. Its model and optimizer have to "
            "stay."
        )
    weights = checkpoint.load(folder).state_dict()
    trainer = upgrade_trainer(checkpoint.read_trainer(folder))
    step = trainer["measured_at"] = trainer["step"]  # evaluations up to it are the source's
    kept = {t.name for t in make_techniques(run) if t.survives_fork(old, run, step)}
    states = trainer["techniques"]
    trainer["techniques"] = {name: saved for name, saved in states.items() if name in kept}
    forked = {"run": source.name, "step": step, "config": config_hash(old)}
    return Fork(
        weights, trainer, _training_rows(source), {**read_environment(source), "forked": forked}
    )


def _training_rows(source: Path) -> bytes:
    """The metrics of training steps: evaluations are of the source, and no result of the fork."""
    rows = [row for row in read_metrics(source) if row["kind"] == "train"]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_fork(run: Run, fork: Fork, out: Path) -> None:
    """A folder that resuming goes on from; config.json, without which it is no run, is written by
    whoever resumes it."""
    checkpoint.save_checkpoint(out, fork.trainer["step"], fork.weights, run, fork.trainer)
    write_file(out / "metrics.jsonl", fork.metrics)
    write_file(out / "environment.json", json.dumps(fork.environment, indent=1).encode())


def _differences(old: dict[str, Any], new: dict[str, Any], where: str = "") -> list[str]:
    found = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{where}{key}.")
        elif a != b:
            found.append(f"{where}{key} was {a!r} and is now {b!r}")
    return found


def prepare_folder(
    run: Run,
    out: Path,
    device: torch.device,
    world: World,
    origin: dict[str, Any] | None = None,
) -> None:
    """Write what a run folder says of its run; origin: of the weights that it begins with."""
    checkpoint.remove_leftovers(out)
    began = {} if origin is None else {"init": origin}
    _add_environment(out, {**environment(device, world.size), **began})
    for name, data in run.task.files().items():
        write_file(out / name, data)
    write_file(out / "config.json", json.dumps(run_to_json(run), indent=1).encode())


def _add_environment(out: Path, now: dict[str, Any]) -> None:
    """Where the run was started, and each place where it was resumed.

    What a process left that ended before config.json was there is of no run, unless it is a fork's.
    """
    before = read_environment(out)
    if "forked" not in before and not (out / "config.json").exists():
        before = {}
    data = {**before, "resumed": [*before.get("resumed", []), now]} if before else now
    write_file(out / "environment.json", json.dumps(data, indent=1).encode())
