"""Which process carries a run out, where several share a folder: on other GPUs or machines too.

    with claimed(folder, "3f2a91c0de"):     # UnderWay, if another process has it
        ...

A claim is a file in FOLDER/.claims that only one process can create. Its owner touches it while it
works. A claim that was not touched for long, or whose process is gone, is taken over.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entp.files import lock_folder, parse_json

FOLDER = ".claims"
BEAT = 20.0
"""Seconds between two touches."""
STALE = 180.0
"""Seconds without a touch after which the owner is taken to be gone."""


class UnderWay(Exception):
    """Another process carries the run out."""


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[None]:
    """Inside, no other process that asks has this claim."""
    path = folder / FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(path.parent):
        if path.exists() and _is_stale(path):
            path.unlink(missing_ok=True)
        if not _create(path):
            raise UnderWay(f"it is under way {_where(path)}")
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(path, over), daemon=True)
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join()
        path.unlink(missing_ok=True)


def owner_of(folder: Path, name: str) -> str:
    """Where a claim's owner is, in words; empty if nobody has it."""
    path = folder / FOLDER / f"{name}.json"
    return "" if not path.exists() or _is_stale(path) else _where(path)


def _create(path: Path) -> bool:
    """Whether the claim is ours now."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    pid = os.getpid()
    owner = {"host": platform.node(), "system": _system(), "pid": pid, "begun": _begun(pid)}
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(owner))
    except OSError:
        path.unlink(missing_ok=True)  # nobody would know whose it is
        raise
    return True


@functools.cache
def _system() -> str:
    """What tells systems apart on which a process number means another process: a host's start,
    and the container."""
    found = [platform.node()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(path)


def _is_stale(path: Path) -> bool:
    """Whether the owner is gone."""
    owner = _read(path)
    if owner.get("system") == _system() and not _is_alive(owner.get("pid"), owner.get("begun")):
        return True
    return _age(path) > STALE


def _read(path: Path) -> dict[str, Any]:
    """What a claim says; empty while it is being written, or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = parse_json(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _is_alive(pid: Any, begun: Any) -> bool:
    """Whether this process is there; a number that another has got since is not."""
    if not isinstance(pid, int) or pid < 1:
        return True  # nobody knows
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    now = _begun(pid)
    return now is None or now == begun


def _begun(pid: int) -> str | None:
    """When a process began, in the system's count; empty for one that is dead and not yet
    forgotten, None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _age(path: Path) -> float:
    """Seconds since the last touch, by the clock of the file system."""
    try:
        os.utime(path.parent)
        return path.parent.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return 0.0


def _where(path: Path) -> str:
    owner = _read(path)
    return f"on {owner.get('host', 'another machine')}, process {owner.get('pid', 'unknown')}"
