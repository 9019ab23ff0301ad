"""Folders with the tokens of a task alone begin the same runs as the whole ones."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import add_tokenizer, folder_of
from small_runs import TASK

pytest.importorskip("transformers", reason="needs the transformers library")

import entp.hf
from entp.cli.main import main
from entp.errors import InputError
from entp.experiments.recipes.count3_bert import RECIPE
from entp.hf.beginning import read_pretrained
from entp.hf.trimming import trim
from entp.tasks.addition import Addition
from entp.tasks.counting import Count3
from entp.training.initialise import Init

pytestmark = pytest.mark.usefixtures("quiet")
FAMILIES = ("gpt2", "bert", "roberta", "mpnet", "modernbert", "llama")
SMALLER = Count3(prompt_length=2, length=6, num_values=6)
WORDS = ["[PAD]", "[CLS]", "the", *(str(n) for n in reversed(range(64))), "a"]
SPECIAL = {"eos_token_id": 67, "bos_token_id": 1}


def same(one: Init, other: Init) -> bool:
    """Whether runs that begin with the two are the same."""
    return (one.model, one.name) == (other.model, other.name)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_runs_are_the_same(family: str, text: bool, head: bool, tmp_path: Path) -> None:
    padding = {"pad_token_id": 60} if family in ("gpt2", "llama", "bert") else {}
    special = {} if family in ("roberta", "mpnet", "modernbert") else {**SPECIAL, **padding}
    folder = folder_of(family, tmp_path / "whole", head=head, vocab_size=68)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **special}))
    if text:
        add_tokenizer(folder, WORDS)
    found = trim(folder, TASK, tmp_path / "small")
    assert (len(found.rows.ids), found.vocab) == (10, 68)
    for task in (TASK, SMALLER):
        whole, small = (read_pretrained(path, task) for path in (folder, tmp_path / "small"))
        assert same(whole, small)
        assert whole.origin["tokens"] == small.origin["tokens"]
    assert not same(whole, read_pretrained(folder_of("bert", tmp_path / "b"), SMALLER))
    x = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    theirs = entp.hf.load(folder)(torch.tensor(found.rows.ids)[x])[..., found.rows.ids]
    torch.testing.assert_close(entp.hf.load(tmp_path / "small")(x), theirs, rtol=1e-4, atol=1e-5)


def test_recipe_takes_the_folder_for_all_its_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, small = tmp_path / "whole", tmp_path / "small"
    add_tokenizer(folder_of("bert", whole, vocab_size=68, max_position_embeddings=64), WORDS)
    words = ["llm", "trim", str(whole), "--task", "count3", "--out", str(small)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "64 of 68 tokens" in printed
    assert "All 64 tokens are the model's own tokens of the same text." in printed
    assert f"next: entp train count3 --init {small}" in printed
    assert RECIPE.with_init(small).runs() == RECIPE.with_init(whole).runs()
    assert RECIPE.with_init(small).runs() != RECIPE.runs()


def test_weights_are_float32_in_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("llama", tmp_path / "whole", vocab_size=68)
    half = entp.hf.load(folder, dtype=torch.bfloat16).network
    half.save_pretrained(folder)
    words = ["llm", "trim", str(folder), "--task=count3", "--task.prompt-length=4"]
    words += ["--task.length=10", "--task.num-values=10", "--shard-mib=0.02"]
    assert main([*words, f"--out={tmp_path / 'small'}"]) == 0
    train = "entp train count3 --task.prompt-length=4 --task.length=10 --task.num-values=10"
    assert f"next: {train} --init {tmp_path / 'small'}\n" in capsys.readouterr().out
    files = list((tmp_path / "small").glob("model-*.safetensors"))
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) < 0.03 * 2**20
    assert json.loads((tmp_path / "small/config.json").read_text())["dtype"] == "float32"
    assert same(read_pretrained(tmp_path / "small", TASK), read_pretrained(folder, TASK))


def test_what_cannot_be_trimmed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    folder = add_tokenizer(folder_of("bert", tmp_path / "whole", vocab_size=80), WORDS)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[PAD]"}))
    out = ["--out", str(tmp_path / "small")]
    trimmed = trim(folder, TASK, tmp_path / "first")
    assert trimmed.size == (tmp_path / "first/model.safetensors").stat().st_size
    told: dict[str, list[Any]] = {
        "needs --task with the task whose tokens": [folder],
        "unknown task 'count33'": [folder, "--task", "count33"],
        "count3 needs all 10 tokens of the model in": [
            *(tmp_path / "first", "--task", "count3", "--task.num-values", "10"),
            *("--task.length", "10", "--task.prompt-length", "4"),
        ],
        "count-text needs all 80 tokens": [folder, "--task", "count-text"],
        "is a GGUF file": [tmp_path / "x.gguf", "--task", "count3"],
        "is no folder": [tmp_path / "nothing", "--task", "count3"],
        "needs a folder": [],
    }
    for message, words in told.items():
        assert main(["llm", "trim", *map(str, words), *out]) == 2
        error = capsys.readouterr().err
        assert message in error, error
        assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "small").exists()
    with pytest.raises(InputError, match="exists: give --out a new folder"):
        trim(folder, TASK, tmp_path / "first")


def test_other_tasks_tokens_are_no_words_of_it(tmp_path: Path) -> None:
    """A text that was dropped is not taken for another."""
    folder = add_tokenizer(folder_of("bert", tmp_path / "whole", vocab_size=80), WORDS)
    trim(folder, replace(TASK, num_values=20, length=16), tmp_path / "small")
    init = read_pretrained(tmp_path / "small", Addition(digits=2))
    assert init.origin["tokens"].startswith("10 of ")


def test_command_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "pretrained.md").read_text()
    (line,) = re.findall(r"^entp (llm trim small-bert .*)$", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    folder_of("bert", Path("small-bert"), vocab_size=64)
    assert main(shlex.split(line)) == 0
    assert entp.hf.load("smaller-bert").vocab == 10
