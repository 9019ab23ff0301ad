"""The examples of docs/pretrained.md run as written, training with fewer steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS, code_blocks

from entp.cli.main import main
from entp.training.checkpoint import load_run

pytest.importorskip("peft", reason="needs the peft library")
PAGE = DOCS / "pretrained.md"


def test_training_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in code_blocks(PAGE, "python"):
        exec(block, names)
    told = {}
    for line in code_blocks(PAGE, "sh")[0].splitlines():
        program, *words = shlex.split(line)
        assert program == "entp"
        few = ["--steps", "3", "--optim.warmup-steps", "1"] if words[0] == "train" else []
        capsys.readouterr()
        assert main([*words, *few, "--device", "cpu"]) == 0
        told[line] = capsys.readouterr().out
    full, lora, evaluated, generated = told.values()
    assert "step 3," in full
    assert "step 3," in lora
    assert re.search(r"^exact_match +0\.\d+", evaluated, re.MULTILINE)
    assert generated.startswith("3 1 4 1 ")
    runs = [load_run(name) for name in ("runs/bert", "runs/bert-lora", "runs/in-python")]
    assert [run.model.lora_rank for run in runs] == [0, 8, 8]  # type: ignore[union-attr]
    assert [run.mode for run in runs] == ["entp", "decoder", "entp"]


def test_text_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block about small-llama, after the one that writes it."""
    monkeypatch.chdir(tmp_path)
    first = next(block for block in code_blocks(PAGE, "python") if "small-llama" in block)
    exec("import transformers\n" + first, {})
    commands = next(block for block in code_blocks(PAGE, "sh") if "small-llama" in block)
    told = []
    for line in commands.splitlines():
        words = shlex.split(line)[1:]
        few = ["--steps", "3", "--optim.warmup-steps", "1"] if words[1] == "text" else []
        assert main([*words, *few, "--device", "cpu"]) == 0
        told.append(capsys.readouterr().out)
    generated, entp, trained, after, decoder = told
    assert generated.startswith("The statement")
    assert "step 3," in trained
    assert all("bits_per_byte" in text for text in (entp, after, decoder))
    assert "mode entp" in after
    assert "mode decoder" in decoder
