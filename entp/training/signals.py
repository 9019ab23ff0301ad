"""Signals that ask training to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

ONE_SIGNAL = 0.5
"""Seconds within which signals are one: `timeout`, say, sends its own to a process and then to the
group that it is in."""


def _tell() -> None:
    with contextlib.suppress(OSError):  # Ctrl-C ends a `tee` that reads it too
        os.write(2, b"\nstopping after this step; interrupt again to stop at once\n")


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a wish to stop; a later SIGINT interrupts at once.
    Each is told to others."""

    def __init__(
        self, tell: Callable[[], None] = _tell, tell_again: Callable[[], None] = lambda: None
    ) -> None:
        self.caught: int | None = None
        self.tell, self.tell_again, self.since = tell, tell_again, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.before = {
                s: signal.signal(s, self._caught) for s in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        if self.caught is None:
            self.caught, self.since = number, time.monotonic()
            self.tell()
        elif number == signal.SIGINT and time.monotonic() - self.since > ONE_SIGNAL:
            self.tell_again()
            raise KeyboardInterrupt

    def name(self) -> str:
        return signal.Signals(self.caught).name if self.caught else "another process"
