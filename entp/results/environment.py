"""Where a run was made: versions, device, commit, date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from entp import __version__
from entp.errors import InputError
from entp.files import parse_json
from entp.results.schema import Environment, parse


def read_environment(out: Path) -> dict[str, Any]:
    """environment.json of a run, empty where there is none; damage is an InputError."""
    path = out / "environment.json"
    if not path.exists():
        return {}
    try:
        found = parse_json(path.read_text())
        parse(Environment, found)
    except ValueError as error:
        raise InputError(
            f"{path} is damaged ({error}): repair or remove it. It says where the run was trained."
        ) from None
    return found


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Where a run was made: versions, device, commit, date."""
    return {
        "entp": __version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processes": world_size,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"


def _commit() -> str | None:
    """What ENTP_COMMIT says, for a copy of the source; else its git commit, '+' appended if it has
    changes, or None."""
    told = os.environ.get("ENTP_COMMIT")
    if told:
        return told
    where = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"],
            cwd=where,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
