"""Every test has a cache of its own and searches nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, empty."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ENTP_CACHE", str(folder))
    monkeypatch.delenv("ENTP_DATA", raising=False)
    return folder
