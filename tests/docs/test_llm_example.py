"""The example of fine-tuning in docs/llm.md runs as written; tests/llm has those of GPT-4o."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from documents import DOCS, code_blocks

from entp.cli.main import main
from entp.tasks.tokens import find_json_tokenizer

PAGE = DOCS / "llm.md"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    find_json_tokenizer.cache_clear()


def test_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    exec(code_blocks(PAGE, "python")[1], {})
    commands = code_blocks(PAGE, "sh")[0].replace("\\\n", " ").splitlines()
    assert len(commands) == 5
    for line in commands:
        program, *words = shlex.split(line)
        assert program == "entp"
        capsys.readouterr()
        assert main([*words, "--device", "cpu"]) == 0
        told = capsys.readouterr().out
        if words[0] == "train":
            assert "all steps done: step 10" in told
        elif words[0] == "evaluate":
            assert re.search(r"^well_formed +0\.\d+", told, re.MULTILINE)
            assert re.search(r"^7 +0\.\d+", told, re.MULTILINE)
        else:
            assert "x = [52, 14, 22, 48]" in told
