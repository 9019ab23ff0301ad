"""A study that notes when it is written, for another process. Imports little."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from entp.files import lock_folder


@dataclass
class NotedStudy:
    """Adds a line, the process that wrote it, to a file."""

    path: Path

    def write_so_far(self) -> None:
        with self.locked(), open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        with lock_folder(self.path.parent):
            yield

    def writers(self) -> list[int]:
        """The process of each writing, in order."""
        return [int(line) for line in self.path.read_text().split()] if self.path.exists() else []


class DamagedStudy(NotedStudy):
    """Cannot be written the first two times."""

    def write_so_far(self) -> None:
        super().write_so_far()
        if len(self.writers()) < 3:
            raise ValueError("the disk is full")
