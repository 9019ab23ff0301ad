"""Fine-tuned language models in transformers: they stop, and their tokenizer is the source's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import BEGIN, END, write_llama
from small_runs import run_python, small_run

import entp
from entp.cli.main import main
from entp.hf.beginning import read_pretrained
from entp.hf.export import export_hf
from entp.hf.tokenizer_files import files_beside
from entp.llm.counting_text import CountText
from entp.model.build import build_model
from entp.tasks.tokens import find_json_tokenizer
from entp.training.checkpoint import load, save_model
from entp.training.initialise import load_init, with_init

TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
SHORT = ["--task.prompt-length=2", "--task.length=4", "--task.num-values=12"]
SCRIPT = """
import json, sys
sys.modules["entp"] = None  # as where it is not installed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
batch = tokenizer("x = [3, 1]", return_tensors="pt")
chat = [{"role": "user", "content": "1"}]
told = {
    "new": model.generate(**batch, max_new_tokens=9, do_sample=False)[0].tolist(),
    "read": batch["input_ids"][0].tolist(),
    "tokens": [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token],
    "ids": [
        [found.bos_token_id, found.eos_token_id, found.pad_token_id]
        for found in (model.config, model.generation_config)
    ],
    "chat": tokenizer.chat_template and tokenizer.apply_chat_template(chat, tokenize=False),
}
print(json.dumps(told))
"""


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    find_json_tokenizer.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with a chat template and merges beside its tokenizer, which pads by its first
    token."""
    found = write_llama(tmp_path / "llama")
    about = {"bos_token": BEGIN, "eos_token": END, "pad_token": BEGIN}
    (found / "tokenizer_config.json").write_text(json.dumps(about))
    (found / "chat_template.jinja").write_text(TEMPLATE)
    (found / "merges.txt").write_text("#version: 0.2\n")
    return found


def outside(exported: Path) -> dict[str, Any]:
    """What transformers makes of a folder in a process without entp."""
    done = run_python("-c", SCRIPT, str(exported), cwd=exported.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def save_run(folder: Path, out: Path, mode: str, end: int, names: tuple[str, ...] = ()) -> None:
    """A run of random weights, whose answers end with this token, with these files of its task."""
    task = CountText(prompt_length=2, length=4, num_values=12, end=end).with_data(str(folder))
    init = read_pretrained(folder, task)
    run = with_init(small_run(task=task, model=init.model, mode=mode, batch_size=2), init)
    model = build_model(run.model)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.3)
    files = {name: file for name, file in run.task.files().items() if name in names}
    save_model(model, out, run, more=files)


@pytest.mark.slow
def test_training_keeps_the_tokenizer_for_the_export(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run needs its folder no more, and transformers reads texts and chats as there."""
    monkeypatch.chdir(tmp_path)
    words = ["--init=llama", "--out=run", "--lora-rank=2", "--mode=decoder", *SHORT]
    words += ["--steps=2", "--batch-size=2", "--train.eval-batches=1", "--device=cpu"]
    assert main(["train", "count-text", *words]) == 0
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt")
    files = {name: (folder / name).read_bytes() for name in names}
    shutil.rmtree(folder)
    words = ["--format=hf", "--out=out", "--test-sequences=2", "--device=cpu"]
    assert main(["export", "run", *words]) == 0
    assert {name: Path("out", name).read_bytes() for name in files} == files
    found = outside(tmp_path / "out")
    assert found["tokens"] == [BEGIN, END, BEGIN]
    assert found["ids"] == [[0, 1, 0]] * 2
    assert found["read"][0] == 0
    assert found["chat"] == "<s>1</s>"


@pytest.mark.parametrize("mode", ["decoder", "entp"])
def test_generate_ends_where_the_task_does(mode: str, folder: Path, tmp_path: Path) -> None:
    """The token that ends an answer is one that the random model writes."""
    import transformers

    save_run(folder, tmp_path / "free", mode, end=1)
    model, prompt = load(tmp_path / "free"), [0, 5, 6, 7]
    (free,) = entp.generate(model, [prompt], 9, mode)
    end = next(token for at, token in enumerate(free) if at > 5 and token not in free[:at])
    save_run(folder, tmp_path / "run", mode, end=end)
    export_hf(tmp_path / "run", tmp_path / "out", test_sequences=2)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    x = torch.tensor([prompt])
    asked = {"attention_mask": torch.ones_like(x), "max_new_tokens": 9, "do_sample": False}
    got = found.generate(x, **asked)[0].tolist()
    assert got == free[: len(got)]
    assert got[-1] == end
    assert len(got) < len(free)


@pytest.mark.slow
def test_settings_that_are_gone_are_made_anew(folder: Path, tmp_path: Path) -> None:
    """As of runs of earlier versions, which kept the tokenizer.json alone."""
    save_run(folder, tmp_path / "run", "decoder", end=1, names=("tokenizer.json",))
    shutil.rmtree(folder)
    file = (tmp_path / "run/tokenizer.json").read_bytes()
    export_hf(tmp_path / "run", tmp_path / "out", test_sequences=2)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == file
    found = outside(tmp_path / "out")
    assert found["tokens"] == [None, END, END]
    assert found["ids"] == [[None, 1, 1]] * 2
    assert found["chat"] is None


def test_files_are_those_beside_the_same_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "tokenizer.json", bare)
    file = (folder / "tokenizer.json").read_bytes()
    monkeypatch.setenv("ENTP_DATA", str(bare))
    assert files_beside(file) == {}
    monkeypatch.setenv("ENTP_DATA", f"{bare}:{tmp_path}")
    names = {"tokenizer_config.json", "chat_template.jinja", "merges.txt"}
    assert files_beside(file).keys() == names
    assert files_beside(file + b" ") == {}


def test_other_tokens_get_no_files_of_a_folder(folder: Path, tmp_path: Path) -> None:
    """A task with tokens of its own has no text that the folder's tokenizer cuts."""
    run, out = small_run(mode="decoder"), tmp_path / "out"
    init = read_pretrained(folder, run.task)
    run = with_init(replace(run, model=init.model), init)
    model = build_model(run.model)
    load_init(model, init)
    save_model(model, tmp_path / "run", run)
    export_hf(tmp_path / "run", out, test_sequences=2)
    assert not [path for path in out.iterdir() if "token" in path.name]
