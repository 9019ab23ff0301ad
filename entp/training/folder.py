"""The run folder: what may be started or continued in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from entp.config import Run
from entp.config_json import FREE_TO_CHANGE, run_from_json, run_to_json
from entp.errors import InputError
from entp.training import checkpoint
from entp.training.distributed import World
from entp.training.metrics import environment


def check_folder(run: Run, out: Path, resume: bool) -> None:
    """Refuse to mix runs: a used folder needs resume, and resuming needs the same run."""
    saved = out / "config.json"
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: give --out a folder.")
    if not resume:
        if saved.exists() or (out / "checkpoints").exists():
            raise InputError(f"{out} already holds a run: continue it with --resume, or choose another --out.")
        return
    if not saved.exists():
        raise InputError(f"{out} holds no run to resume: leave --resume out to start one.")
    try:
        old = run_to_json(run_from_json(json.loads(saved.read_text()), str(saved)))
    except ValueError as error:
        raise InputError(f"{saved} cannot be read: {error}") from None
    differences = [d for d in _differences(old, run_to_json(run)) if d.split(" ")[0] not in FREE_TO_CHANGE]
    if differences:
        raise InputError(f"{out} holds another run: {'; '.join(differences)}. Use its settings, or another --out.")


def _differences(old: dict[str, Any], new: dict[str, Any], where: str = "") -> list[str]:
    found = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{where}{key}.")
        elif a != b:
            found.append(f"{where}{key} was {a!r} and is now {b!r}")
    return found


def prepare_folder(run: Run, out: Path, device: torch.device, world: World) -> None:
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    checkpoint.remove_leftovers(out)
    _note_environment(out / "environment.json", environment(device, world.size))
    checkpoint.write_file(out / "config.json", json.dumps(run_to_json(run), indent=1).encode())


def _note_environment(path: Path, now: dict[str, Any]) -> None:
    """Where the run was started, and each place where it was resumed."""
    try:
        before = json.loads(path.read_text())
        data = {**before, "resumed": [*before.get("resumed", []), now]}
    except (OSError, ValueError):
        data = now
    checkpoint.write_file(path, json.dumps(data, indent=1).encode())
