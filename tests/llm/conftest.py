"""A service on this machine, and a prepared folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_server import KEY, Service, serve

from entp.cli.main import main


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The service that the environment names, with its key."""
    found = Service()
    server = serve(found)
    host, port = server.server_address[:2]
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://{host}:{port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))  # no certificates: reading them takes 0.1 s
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield found
    found.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with short sequences: 10 to train on, 10 for validation, 6 to test."""
    folder = tmp_path / "count3"
    sizes = ["--train", "10", "--valid", "10", "--test", "6"]
    short = ["--prompt-length", "4", "--length", "8", "--num-values", "8"]
    assert main(["llm", "openai", "prepare", "--out", str(folder), *sizes, *short]) == 0
    capsys.readouterr()
    return folder
