"""A Llama of HuggingFace's that is trained on Count3 as text: steps, LoRA, generation, commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import write_llama
from torch import Tensor

import entp.hf
from entp.cli.main import main
from entp.config import PretrainedConfig, Run
from entp.data.tokenizers import train_bpe
from entp.hf.beginning import read_pretrained
from entp.llm.counting_text import CountText
from entp.tasks.base import Batch
from entp.tasks.metrics import Totals
from entp.tasks.tokens import find_json_tokenizer
from entp.training.distributed import World
from entp.training.evaluate import evaluate_generated
from entp.training.forward import Forward
from entp.training.gradients import gradients
from entp.training.inputs import make_inputs, step_arrays

SHORT = ["--task.prompt-length", "2", "--task.length", "4", "--task.num-values", "12"]
FEW = ["--steps", "4", "--batch-size", "4", "--train.eval-every", "2", "--train.eval-batches", "1"]
FEW += ["--device", "cpu"]


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    find_json_tokenizer.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama")


def llama(folder: Path) -> tuple[CountText, Any, Any]:
    """The task, our model with adapters that do something, and HuggingFace's with the same."""
    import peft
    import transformers

    from entp.model.build import build_model

    task = CountText(prompt_length=2, length=4, num_values=120).with_data(str(folder))
    init = read_pretrained(folder, task, lora_rank=2)
    assert isinstance(init.model, PretrainedConfig)
    model = build_model(init.model).double()
    network = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    linear = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    plan = peft.LoraConfig(r=2, lora_alpha=8, target_modules=linear)
    theirs = peft.get_peft_model(network, plan)
    entp.hf.wrap(theirs)  # its norms: without it their gradients are rounded to float32
    torch.manual_seed(1)
    own = dict(theirs.base_model.model.named_parameters())
    with torch.no_grad():
        for name, weight in model.network.named_parameters():
            if weight.requires_grad:
                own[name].copy_(torch.randn_like(weight) / 4)
            weight.copy_(own[name])
    return task, model, theirs


def losses(network: Any, batch: Batch, mode: str) -> Tensor:
    """The mean loss by HuggingFace's forward pass: of one row, or of one prefix, at a time."""
    assert batch.lengths is not None
    assert batch.prefix_lengths is not None
    found = []
    for row in range(len(batch.x)):
        end, first = int(batch.lengths[row]), int(batch.prefix_lengths[row])
        x, y = (torch.from_numpy(a[row, :end]) for a in (batch.x, batch.y))
        if mode == "entp":
            full = {at: torch.ones(1, 1, at, at, dtype=torch.bool) for at in range(first, end + 1)}
            logits = [
                network(x[None, :at], attention_mask=full[at]).logits[0, -1]
                for at in range(first, end + 1)
            ]
            rows = torch.stack(logits)
        else:
            seen = torch.ones(end, end, dtype=torch.bool).tril()
            if mode == "prefix-lm":
                seen[:first, :first] = True
            rows = network(x[None], attention_mask=seen[None, None]).logits[0, first - 1 :]
        found.append(torch.nn.functional.cross_entropy(rows, y[first - 1 :], reduction="none"))
    return torch.cat(found).mean()


@pytest.mark.parametrize("mode", ["decoder", "prefix-lm", "entp"])
def test_gradients_of_adapters_are_huggingfaces(folder: Path, mode: str) -> None:
    task, model, theirs = llama(folder)
    batch = task.batch(0, "train", 0, 3)
    how = replace(Forward.of(Run(task, model_config(folder, task), mode)), precision="fp32")  # type: ignore[arg-type]
    arrays = step_arrays(batch, 0, [], World())
    inputs = make_inputs(arrays, batch, how, model, torch.device("cpu"))
    loss, found = gradients(model, inputs, how)
    expected = losses(theirs.base_model.model, batch, mode)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    expected.backward()
    own = dict(theirs.base_model.model.named_parameters())
    trained = [name for name, weight in model.network.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 7 * 2  # layers, linear layers, and two matrices each
    for name in trained:
        gradient, right = found[model.network.get_parameter(name)], own[name].grad
        assert gradient is not None
        assert right is not None
        assert right.abs().max() > 0
        assert (gradient - right).abs().max() <= 1e-9 * right.abs().max(), name


def model_config(folder: Path, task: CountText) -> Any:
    return read_pretrained(folder, task, lora_rank=2).model


def test_generated_answers_are_those_of_transformers(folder: Path) -> None:
    task, model, theirs = llama(folder)
    batch = task.batch(0, "test", 0, 3)
    assert batch.prefix_lengths is not None
    how = Forward.of(Run(task, model_config(folder, task), "decoder"))
    found = evaluate_generated(model, task, [batch], how)
    rows = []
    for x, first in zip(batch.x, batch.prefix_lengths.tolist(), strict=True):
        prompt = torch.from_numpy(x[None, :first])
        more = {"max_new_tokens": task.most_new_tokens, "eos_token_id": task.stop}
        out = theirs.generate(input_ids=prompt, do_sample=False, pad_token_id=task.stop, **more)
        rows.append(out[0, first:].tolist())
    expected = Totals.of(task.metrics, batch, task.measure_texts(batch, rows))
    assert found.to_json() == expected.to_json()


@pytest.mark.parametrize("mode", ["decoder", "prefix-lm", "entp"])
def test_run_needs_the_folder_only_to_begin(
    folder: Path, tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--random-targets.count", "4"] if mode == "entp" else []
    out = tmp_path / "run"
    begin = ["train", "count-text", "--init", str(folder), "--lora-rank", "2", "--mode", mode]
    assert main([*begin, *SHORT, *FEW, *more, "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["task"]["end"], config["task"]["vocab"]) == (1, 320)
    assert str(tmp_path) not in json.dumps(config)
    shutil.rmtree(folder)
    find_json_tokenizer.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENTP_DATA", "")
        assert main(["train", "count-text", "--resume", "--out", str(out), "--steps", "6"]) == 0
        capsys.readouterr()
        asked = ["evaluate", str(out), "--batches", "1", "--device", "cpu", "--generate", "--json"]
        assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"exact_match", "token_accuracy", "loss"} <= set(told)
    assert {"exact_match", "token_accuracy", "well_formed"} <= set(told["generated"])
    assert main(["generate", str(out), "--prompt", "3 11", "--device", "cpu"]) == 0
    assert "x = [3, 11]" in capsys.readouterr().out


def test_run_begins_with_another_run_s_weights(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begin = ["train", "count-text", *SHORT, *FEW, "--lora-rank", "2", "--mode", "decoder"]
    assert main([*begin, "--init", str(folder), "--out", str(first)]) == 0
    shutil.rmtree(folder)
    find_json_tokenizer.cache_clear()
    control = ["--task.rule", "count2", "--init", str(first), "--out", str(second)]
    assert main([*begin, *control]) == 0
    configs = [json.loads((out / "config.json").read_text()) for out in (first, second)]
    assert [config["task"].pop("rule") for config in configs] == ["count3", "count2"]
    assert configs[0]["task"].pop("longest") > configs[1]["task"].pop("longest")
    assert configs[0]["task"] == configs[1]["task"]
    assert configs[0]["model"] == configs[1]["model"]


def test_gpt2_is_fine_tuned_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its tokenizer, whose end token is that of tasks on text as well."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = train_bpe(["def f(x): return count % n"], 300)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    for positions in (64, 512):
        folder = tmp_path / f"gpt2-{positions}"
        tokens = {"vocab_size": tokenizer.vocab, "bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(n_positions=positions, **tokens, **sizes)
        GPT2LMHeadModel(config).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes(tokenizer.file() or b"")
        told = {"eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
        capsys.readouterr()
        words = [*SHORT, *FEW, "--mode", "decoder", "--out", str(tmp_path / "run")]
        code = main(["train", "count-text", "--init", str(folder), *words])
        said = capsys.readouterr().err
        assert code == (2 if positions == 64 else 0), said
        assert ("64 is shorter than the sequences of count-text" in said) == (positions == 64)
    task = json.loads((tmp_path / "run/config.json").read_text())["task"]
    assert (task["end"], task["vocab"]) == (tokenizer.end, tokenizer.vocab)


def test_folder_without_tokenizer_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").unlink()
    words = [*FEW, "--out", str(tmp_path / "run")]
    assert main(["train", "count-text", "--init", str(folder), *words]) == 2
    assert "has no tokenizer.json, and count-text is cut" in capsys.readouterr().err
