"""Examples run as a reader's would on a CPU, without Triton's interpreter."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
