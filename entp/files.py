"""Files that survive a kill and a full disk: atomic writes, folder locks, checksums, JSON."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from entp.errors import InputError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

CHECKSUMS = "checksums.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a spent quota, and a limit on files."""
REFUSED = (errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE)
"""Errors of a disk that fails, or that may not be written."""
LOST = (*FULL, errno.EIO)
"""Errors of a flush after which what was written may be gone."""


class Damaged(Exception):
    """A folder whose files are missing or not what was written."""


def write_file(path: Path, data: bytes) -> None:
    """Write `data` so that `path` holds either all of it or what it held before."""
    path = Path(os.path.realpath(path))  # a link stays one
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_folder(folder: Path, files: dict[str, bytes] | Iterable[tuple[str, bytes]]) -> Path:
    """Write a folder with these files and their checksums, renamed into place when all of it is on
    disk. Files of an iterator are made and written one at a time."""
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old.tmp"))
    pairs = files.items() if isinstance(files, dict) else files
    sums: dict[str, str] = {}
    for left in (temporary, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        make_folder(folder.parent)
        temporary.mkdir()
        for name, data in pairs:
            sums[name] = hashlib.sha256(data).hexdigest()
            write_file(temporary / name, data)
        write_file(temporary / CHECKSUMS, json.dumps(sums).encode())
        _put_into_place(temporary, folder, old)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def _put_into_place(new: Path, folder: Path, old: Path) -> None:
    """Rename a folder; what has its name is `old` from then on, or keeps its name if that fails."""
    there = folder.exists()
    if there:
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if there:
            os.rename(old, folder)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that they survive a power failure."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        _sync_folder(path.parent)


def verify_folder(folder: Path, needed: tuple[str, ...], extra: tuple[str, ...] = ()) -> None:
    """Raise Damaged unless every file is what was written: those needed, and of the extra ones
    those that are there."""
    try:
        sums = _read_sums(folder)
        there = [name for name in extra if (folder / name).exists()]
        for name in (*needed, *there):
            if name not in sums:
                raise Damaged(f"{CHECKSUMS} has no {name}")
        for name, want in sums.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != want:
                raise Damaged(f"{name} does not match its checksum")
    except (OSError, ValueError, TypeError) as error:
        raise Damaged(f"{error}") from None


def _read_sums(folder: Path) -> dict[str, str]:
    """The checksum of each file of a folder."""
    try:
        found = parse_json((folder / CHECKSUMS).read_bytes())
    except ValueError as error:
        raise Damaged(f"{CHECKSUMS} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Damaged(f"{CHECKSUMS} has no checksums")
    return found


@contextlib.contextmanager
def lock_folder(folder: Path, refuse: str = "") -> Iterator[None]:
    """Hold the folder's lock: wait for other processes that hold it, or raise `refuse`.

    Where the system has no locks, nothing is held.
    """
    handle = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        if fcntl and handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if refuse else 0))
            except BlockingIOError:
                raise InputError(refuse) from None
            except OSError:
                pass  # a file system without locks
        yield
    finally:
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def explain_failed_writes(folder: Path, by: str = "--out") -> Iterator[None]:
    """An InputError for a full disk and the like, which says that what is there is kept.

    by: what another folder is given by.
    """
    try:
        yield
    except OSError as error:
        fault = f"{error.filename or folder} cannot be written: {error.strerror}."
        if error.errno not in FULL:
            raise InputError(f"{fault} Give another folder by {by}.") from None
        raise InputError(
            f"{fault} Make room and run the same command again: it goes on with what is in "
            f"{folder}."
        ) from None


def parse_json(text: str | bytes) -> Any:
    """json.loads, with a ValueError also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_bytes(data: Any) -> bytes:
    """Indented JSON with a newline at its end."""
    return (json.dumps(data, indent=1) + "\n").encode()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; not every file system lets a folder be flushed."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in LOST:
            raise
