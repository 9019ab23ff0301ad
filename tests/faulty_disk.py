"""A disk that fails where a test says: every call that changes what is below a folder is counted,
and any of them may fail, or be the last one that a process makes.

    with Disk(folder) as disk:                      # counts
        work()
    with Disk(folder, Fails(7, errno.EIO)):         # the seventh call fails
        work()
    with Disk(folder, Copies(store)):               # what a death before each call leaves
        work()
    ends_at(7, folder, work)                        # a real one

The first write of a piece of data takes half of it, as the system's may: what comes between the
halves is a point like others. Nothing is flushed for real: no power is lost here.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

GROWING = frozenset({"open", "write", "flush", "mkdir", "touch"})
"""Calls that a full disk refuses; it still renames and removes."""
SHM = Path("/dev/shm")
ENDED = 9
"""The exit code of a process that ends at a call."""


@dataclass(frozen=True)
class Call:
    """A call that is about to be made: the number counts from 1."""

    number: int
    kind: str
    path: Path

    def fail(self, code: int) -> None:
        """As the system does: only calls that are given a path tell it."""
        told = () if self.kind in ("write", "flush", "truncate") else (str(self.path),)
        raise OSError(code, os.strerror(code), *told)


class Disk:
    """Inside, calls that change what is below `root` are counted, and `before` hears of each."""

    def __init__(self, root: Path, before: Callable[[Disk, Call], object] | None = None) -> None:
        self.root, self.before = root.resolve(), before
        self.calls: list[Call] = []
        self.flushed: dict[int, int] = {}
        """The size of each file by its inode when it was last flushed."""
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Disk:
        self._wrap("mkdir", "mkdir")
        self._wrap("utime", "touch")
        self._wrap("truncate", "truncate")
        for name in ("unlink", "remove", "rmdir"):
            self._wrap(name, "remove")
        for name in ("rename", "replace"):
            self._wrap(name, "rename")
        self._wrap("open", "open", lambda _, flags=0, *rest, **options: bool(flags & os.O_CREAT))
        self.patch.setattr(os, "fsync", self._fsync)
        self._wrap_files()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.patch.undo()

    def call(self, kind: str, path: Any, dir_fd: int | None = None) -> None:
        """Count a call that is about to be made, unless it is about something else."""
        where = _absolute(path, dir_fd)
        if not where.is_relative_to(self.root):
            return
        call = Call(len(self.calls) + 1, kind, where)
        self.calls.append(call)
        if self.before is not None:
            self.before(self, call)

    def _wrap(
        self, name: str, kind: str, counts: Callable[..., bool] = lambda *_, **__: True
    ) -> None:
        real = getattr(os, name)

        def called(path: Any, *rest: Any, **options: Any) -> Any:
            if counts(path, *rest, **options):
                self.call(kind, path, options.get("dir_fd"))
            return real(path, *rest, **options)

        self.patch.setattr(os, name, called)

    def _fsync(self, handle: int) -> None:
        self.call("flush", handle)
        told = os.fstat(handle)
        self.flushed[told.st_ino] = told.st_size

    def _wrap_files(self) -> None:
        disk, real = self, builtins.open

        class File(io.FileIO):
            """A file whose writes are counted."""

            half = False

            def __init__(self, path: Any, mode: str = "r", *rest: Any, **options: Any) -> None:
                if mode.strip("b") != "r" and not isinstance(path, int):
                    disk.call("open", path)
                super().__init__(path, mode, *rest, **options)

            def write(self, data: Any) -> int:
                disk.call("write", self.fileno())
                self.half = not self.half and len(data) > 1
                return super().write(data[: len(data) // 2] if self.half else data)

            def truncate(self, size: int | None = None) -> int:
                disk.call("truncate", self.fileno())
                return super().truncate(size)

        def opened(path: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
            if set(mode) <= set("rbt"):
                return real(path, mode, buffering, *rest, **more)
            plain = mode.replace("b", "").replace("t", "")
            raw = io.BufferedWriter(File(path, plain))
            if "b" in mode:
                return raw
            return io.TextIOWrapper(raw, *rest, line_buffering=buffering == 1, **more)

        self.patch.setattr(io, "FileIO", File)
        for module in (builtins, io):
            self.patch.setattr(module, "open", opened)


def _absolute(path: Any, dir_fd: int | None) -> Path:
    """Where a path is that a call was given: a number stands for what is open there."""
    if isinstance(path, int):
        return Path(os.readlink(f"/proc/self/fd/{path}"))
    base = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
    return Path(os.path.normpath(base / path))


@contextmanager
def in_memory() -> Iterator[Path]:
    """An empty folder, in memory where the system has that: for what is written hundreds of
    times."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Fails:
    """The call of this number fails; lasting: those after it do as well, as on a full disk."""

    number: int
    code: int
    lasting: bool = False

    def __call__(self, _: Disk, call: Call) -> None:
        later = self.lasting and call.number > self.number and call.kind in GROWING
        if call.number == self.number or later:
            call.fail(self.code)


def read_only(_: Disk, call: Call) -> None:
    """Every call fails."""
    call.fail(errno.EROFS)


@dataclass(frozen=True)
class Ends:
    """The process ends before the call of this number."""

    number: int

    def __call__(self, _: Disk, call: Call) -> None:
        if call.number == self.number:
            os._exit(ENDED)


def ends_at(number: int, root: Path, work: Callable[[], object]) -> bool:
    """Whether a process of its own that does the work comes to the call of this number, which it
    ends before."""
    child = os.fork()
    if child == 0:
        try:
            with Disk(root, Ends(number)):
                work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ENDED


def damages(path: Path, flips: int = 8) -> Iterator[str]:
    """What each damage to a file is, while it has it: cut to nothing, to a half and by a byte, and
    one bit flipped here and there. The file is whole again at the end."""
    data = path.read_bytes()
    for size in (0, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        yield f"{path.name} of {size} bytes"
    for number in range(flips):
        at = (len(data) - 1) * number // (flips - 1)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << number % 8]) + data[at + 1 :])
        yield f"{path.name} with another bit in byte {at}"
    path.write_bytes(data)


@dataclass
class Copies:
    """A copy of the folder as it is before each call: what a process that ends there leaves.

    lost: as a power failure leaves it, where what was written and not flushed is gone.
    about: the calls that count; all of them, unless it is given.
    """

    store: Path
    lost: bool = False
    about: Callable[[Call], bool] = lambda _: True
    found: dict[str, tuple[Call, Path]] = field(default_factory=dict)
    """Every state once, with the first call that it was seen before."""

    def __call__(self, disk: Disk, call: Call) -> None:
        if not self.about(call):
            return
        sizes = _flushed(disk) if self.lost else {}
        name = fingerprint(disk.root, sizes)
        if name in self.found:
            return
        copy = self.store / str(len(self.found))
        if disk.root.exists():
            shutil.copytree(disk.root, copy)
        for path, size in sizes.items():
            os.truncate(copy / path, size)
        self.found[name] = call, copy

    def __iter__(self) -> Iterator[tuple[Call, Path]]:
        return iter(self.found.values())


def _flushed(disk: Disk) -> dict[Path, int]:
    """Of each file the bytes that survive a power failure."""
    files = [path for path in disk.root.rglob("*") if path.is_file()]
    return {path.relative_to(disk.root): _safe(disk, path) for path in files}


def _safe(disk: Disk, path: Path) -> int:
    told = path.stat()
    return min(told.st_size, disk.flushed.get(told.st_ino, 0))


def contents(folder: Path) -> dict[str, bytes | None]:
    """All files below a folder, and None for the folders."""
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in found}


def fingerprint(folder: Path, sizes: dict[Path, int] | None = None) -> str:
    """A hash of all that is in a folder."""
    sizes = sizes or {}
    sums = hashlib.sha256()
    for name, data in contents(folder).items():
        kept = data if data is None else data[: sizes.get(Path(name), len(data))]
        sums.update(repr((name, kept)).encode())
    return sums.hexdigest()
