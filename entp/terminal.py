"""Tables and a progress bar for terminals."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
SILENCE = 60.0
"""Seconds after which there is a line without an evaluation, where there is no bar."""


def format_table(head: list[str], rows: list[list[str]], *, left: bool = False) -> str:
    """Columns aligned by their widest cell, a rule under the head; the first column, or all if
    `left`, to the left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: list[str]) -> str:
        cells = [
            cell.ljust(w) if left or i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])


class Progress:
    """A bar on a terminal; elsewhere a line per evaluation, and per minute of slow steps. Nothing
    when quiet or not the first process."""

    def __init__(
        self,
        label: str,
        total: int,
        start: int,
        show: bool,
        most_seconds: float | None = None,
        unit: str = "step",
    ) -> None:
        self.unit = unit
        self.show, self.label, self.total, self.most_seconds = show, label, total, most_seconds
        self.expected = total
        self.told = time.monotonic()
        """When the last line was printed."""
        self.bar = None
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=start, desc=label, unit=unit, dynamic_ncols=True)

    def step(self, step: int, notes: dict[str, float] | None = None) -> None:
        """One step is done; `notes` are shown beside the bar."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            if notes:
                self.bar.set_postfix({k: f"{v:.4g}" for k, v in notes.items()})
        elif time.monotonic() - self.told > SILENCE:
            self.line(step, notes or {})

    def clock(self, step: int, seconds: float) -> None:
        """So many steps took so long: how many there will be, where the clock ends them first."""
        if self.most_seconds is not None and seconds > 0:
            self.expected = min(self.total, max(step, round(step * self.most_seconds / seconds)))
            if self.bar is not None:
                self.bar.total = self.expected

    def line(self, step: int, values: dict[str, float]) -> None:
        """An evaluation, for people without a bar."""
        if self.show and self.bar is None:
            self.told = time.monotonic()
            text = "".join(f"  {k} {v:.4g}" for k, v in values.items())
            about = "" if self.expected == self.total else "about "
            place = f"{self.label}: {self.unit} {step}/{about}{self.expected}"
            print(f"{place}{text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def counted(label: str, items: Iterable[Item], total: int, unit: str = "step") -> Iterator[Item]:
    """The items, while a bar says how many of them are done, or without one a line a minute."""
    progress = Progress(label, total, 0, True, unit=unit)
    try:
        for done, item in enumerate(items, 1):
            yield item
            progress.step(done)
    finally:
        progress.close()
