"""Exported models compute in transformers what they compute here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_run
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'entp[hf]'")

import transformers

import entp
from entp.cli.main import main
from entp.config import ModelConfig, Run, model_for
from entp.data.places import add_place
from entp.data.prepare import prepare
from entp.errors import InputError
from entp.hf.export import export_hf, register, to_gpt2, to_hf
from entp.model import Transformer
from entp.tasks.counting import Count3
from entp.tasks.in_context import InContext
from entp.tasks.text import Text
from entp.training.checkpoint import load, save_model

VOCAB, TIME = 40, 18
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "norm": "rms",
        "activation": "swiglu",
        "position_embedding": "rotary",
        "kv_heads": 2,
        "bias": False,
        "tied_head": False,
    },
    "bert": {"norm_placement": "post", "position_embedding": "relative", "activation": "silu"},
    "loops": {"position_embedding": "sinusoidal", "attention_scale": "one", "loops": 2},
    "bare": {"position_embedding": "none", "norm": "none", "activation": "relu"},
    "given": {"position_embedding": "given", "activation": "gelu-exact"},
}
MODES = ("entp", "decoder", "prefix-lm")


def make(shape: str = "gpt2", dtype: torch.dtype = torch.float64) -> Transformer:
    """A random model whose predictions depend on what it reads."""
    torch.manual_seed(0)
    changes = {"vocab": VOCAB, "context_length": TIME, "layers": 2, "heads": 4, "width": 32}
    model = Transformer(ModelConfig(**{**changes, **SHAPES[shape]})).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3) if p.ndim == 2 else p.add_(0.1 * torch.randn_like(p))
        if shape == "given":
            model.set_positions(torch.randn(TIME, 32, dtype=dtype))
    return model.eval()


def tokens(batch: int, time: int = TIME) -> Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(1))


def in_mode(model: Transformer, mode: str) -> Any:
    found = to_hf(model)
    found.config.mode = mode
    return found


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens with other tokens as padding, and their mask."""
    time = max(map(len, rows))
    x = torch.tensor([[7] * (time - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (time - len(row)) + [1] * len(row) for row in rows])
    return x, mask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_are_ours(shape: str, mode: str) -> None:
    model, x = make(shape), tokens(3)
    prefix = torch.tensor([3, 1, 8]) if mode == "prefix-lm" else None
    found = in_mode(model, mode)
    want = model(x, mode, prefix=prefix, impl="reference" if mode == "entp" else "auto")
    got = found(x, prefix_lengths=prefix).logits
    assert float(want.detach().abs().max()) > 1
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = torch.randn(want.shape, dtype=want.dtype)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    ours = {n.replace("head.", "lm_head."): p.grad for n, p in model.named_parameters()}
    theirs = {n: p.grad for n, p in found.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(theirs[name], grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(shape: str, mode: str, side: str) -> None:
    found, x = in_mode(make(shape), mode), tokens(3, 10)
    found.config.prefix_length = 4
    lengths = [10, 6, 3]
    padded, mask = x.clone(), torch.zeros_like(x)
    for row, length in enumerate(lengths):
        real = slice(10 - length, 10) if side == "left" else slice(0, length)
        padded[row] = 7
        padded[row, real] = x[row, :length]
        mask[row, real] = 1
    got = found(padded, attention_mask=mask).logits
    for row, length in enumerate(lengths):
        want = found(x[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(got[row][mask[row] == 1], want, rtol=1e-12, atol=1e-12)


def test_only_asked_prefixes_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, x = in_mode(make(), "entp"), tokens(2)
    want = found(x).logits
    read: list[tuple[int, ...]] = []
    encode = found._encode
    monkeypatch.setattr(found, "_encode", lambda x, *rest: read.append(x.shape) or encode(x, *rest))
    got = found(x, logits_to_keep=1).logits
    assert read == [(2, TIME)]
    torch.testing.assert_close(got, want[:, -1:], rtol=1e-12, atol=1e-12)
    some = found(x, logits_to_keep=torch.tensor([4, 2])).logits
    torch.testing.assert_close(some, want[:, [4, 2]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_greedy_generation_is_ours(shape: str, mode: str) -> None:
    model = make(shape)
    found = in_mode(model, mode)
    prompts = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8]]
    want = entp.generate(model, prompts, 9, mode)
    x, mask = left_padded(prompts)
    got = found.generate(x, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert [row[-9:] for row in got.tolist()] == [row[-9:] for row in want]
    assert len({token for row in want for token in row[-9:]}) > 3


def test_generation_computes_one_prefix_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_mode(make(), "entp")
    read: list[tuple[int, ...]] = []
    encode = found._encode
    monkeypatch.setattr(found, "_encode", lambda x, *rest: read.append(x.shape) or encode(x, *rest))
    found.generate(tokens(2, 5), max_new_tokens=3, do_sample=False)
    assert read == [(2, 5), (2, 6), (2, 7)]


@pytest.mark.parametrize("mode", MODES)
def test_sampling_repeats_with_its_seed(mode: str) -> None:
    found = in_mode(make(), mode)
    x, mask = left_padded([[3, 1, 4], [2]])

    def draw(seed: int) -> list[list[int]]:
        transformers.set_seed(seed)
        return found.generate(
            x, attention_mask=mask, max_new_tokens=8, do_sample=True, temperature=2.0
        ).tolist()

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_enough_beams_find_the_likeliest_continuation() -> None:
    model = make()
    found = in_mode(model, "entp")
    x, mask = left_padded([[3, 1, 4], [2, 5]])
    got = found.generate(
        x, attention_mask=mask, max_new_tokens=2, num_beams=VOCAB, do_sample=False
    )[:, -2:]
    for row, prompt in enumerate([[3, 1, 4], [2, 5]]):
        every = torch.tensor([[*prompt, a] for a in range(VOCAB)])
        logp = model(every, "entp", at=[len(prompt) - 1, len(prompt)]).log_softmax(-1)
        first = logp[range(VOCAB), 0, range(VOCAB)]
        both = first[:, None] + logp[:, 1]
        best = int(both.argmax())
        assert got[row].tolist() == [best // VOCAB, best % VOCAB]


@pytest.mark.parametrize("mode", MODES)
def test_cache_and_embeddings_are_refused(mode: str) -> None:
    found, x = in_mode(make(), mode), tokens(1, 4)
    with pytest.raises(ValueError, match="there is no cache in mode"):
        found(x, use_cache=True)
    with pytest.raises(ValueError, match="there is no cache in mode"):
        found.generate(x, max_new_tokens=2, use_cache=True)
    with pytest.raises(ValueError, match="inputs_embeds"):
        found(inputs_embeds=found.tokens(x))
    with pytest.raises(ValueError, match="inputs_embeds"):
        found.generate(inputs_embeds=found.tokens(x), max_new_tokens=2)


def test_unusable_input_is_refused() -> None:
    found = in_mode(make(), "prefix-lm")
    x = tokens(1, TIME)
    with pytest.raises(ValueError, match="needs prefix_lengths or config"):
        found(x)
    with pytest.raises(ValueError, match="set their labels to -100"):
        found(x, prefix_lengths=4, labels=x)
    with pytest.raises(ValueError, match=f"reads {TIME} tokens at most"):
        found(tokens(1, TIME + 1), prefix_lengths=4)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        found(x, prefix_lengths=4, attention_mask=torch.ones(1, 1, TIME, TIME))
    with pytest.raises(ValueError, match="a loss needs all logits"):
        in_mode(make(), "entp")(x, labels=x, logits_to_keep=3)
    found.config.mode = "encoder"
    with pytest.raises(ValueError, match="mode is 'encoder'"):
        found(x)


def test_loss_is_the_mean_over_all_labels() -> None:
    model, x = make(), tokens(2)
    found, labels = in_mode(model, "entp"), x.clone()
    labels[0, :5] = -100
    want = torch.nn.functional.cross_entropy(
        model(x, "entp")[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    torch.testing.assert_close(found(x, labels=labels).loss.double(), want, rtol=1e-6, atol=0)
    count = int((labels[:, 1:] != -100).sum())
    halved = found(x, labels=labels, num_items_in_batch=2 * count).loss.double()
    torch.testing.assert_close(halved, want / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_autocast_computes_about_the_same(shape: str) -> None:
    found, x = in_mode(make(shape, torch.float32), "entp"), tokens(2, 9)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    with torch.autocast("cpu", torch.bfloat16):
        got = found(x, attention_mask=mask).logits
    want = found(x, attention_mask=mask).logits
    assert got.dtype == torch.bfloat16
    assert float((got - want).detach().abs().mean()) < 0.02 * float(want.detach().abs().max())


def test_vocabulary_can_grow() -> None:
    model, x = make(), tokens(2, 9)
    found = in_mode(model, "entp")
    found.resize_token_embeddings(VOCAB + 3)
    torch.testing.assert_close(found(x).logits[..., :VOCAB], model(x), rtol=1e-12, atol=1e-12)
    assert found(x, labels=x + 3).loss.isfinite()
    assert found.lm_head.weight is found.tokens.weight


@pytest.mark.parametrize("shape", SHAPES)
def test_new_models_are_drawn_as_ours(shape: str) -> None:
    model = make(shape)
    new = type(in_mode(model, "entp"))(to_hf(model).config)
    found = {name: float(p.detach().std()) for name, p in new.named_parameters()}
    for name, p in Transformer(model.config).named_parameters():
        want = pytest.approx(float(p.detach().std()), rel=0.2, abs=1e-9)
        assert found[name.replace("head.", "lm_head.")] == want, name


def test_checkpointed_gradients_are_the_same() -> None:
    x = tokens(2, 9)
    grads = []
    for checkpointing in (False, True):
        found = in_mode(make("bert"), "entp").train()
        if checkpointing:
            found.gradient_checkpointing_enable()
        found(x, labels=x).loss.backward()
        grads.append([p.grad for p in found.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*grads, strict=True))


class Rows(torch.utils.data.Dataset):
    """Sequences with prompts of different lengths, which have no loss."""

    def __init__(self, count: int) -> None:
        self.x = tokens(count, 9)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        labels = self.x[at].clone()
        labels[: 1 + at % 7] = -100
        return {"input_ids": self.x[at], "labels": labels}


def test_trainer_accumulates_exactly(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    logs = []
    for size, steps in ((8, 1), (2, 4)):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=4,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        found = in_mode(make(dtype=torch.float32), "entp")
        trainer = transformers.Trainer(found, arguments, train_dataset=Rows(32))
        trainer.train()
        logs.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(logs[0]) == 4
    assert logs[0][0] > logs[0][-1]
    assert logs[0] == pytest.approx(logs[1], abs=1e-5)


def test_lora_trains_and_merges() -> None:
    peft = pytest.importorskip("peft")
    found, x = in_mode(make(), "entp"), tokens(2, 9)
    config = peft.LoraConfig(target_modules=["qkv", "proj", "fc", "out"], init_lora_weights=False)
    wrapped = peft.get_peft_model(found, config).double()
    base = make()(x)
    got = wrapped(input_ids=x, labels=x)
    assert float((got.logits - base).detach().abs().max()) > 1e-3
    got.loss.backward()
    assert all((p.grad is not None) == ("lora" in n) for n, p in wrapped.named_parameters())
    with torch.no_grad():
        merged = wrapped.merge_and_unload()(x).logits
    torch.testing.assert_close(merged, got.logits, rtol=1e-10, atol=1e-10)


def small_text(folder: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run on a small corpus."""
    words = "the cat sat on the mat <|endoftext|> and the dog did not, said Zoë. "
    (folder / "text.txt").write_text(words * 40)
    monkeypatch.setenv("ENTP_CACHE", str(folder / "cache"))
    corpus = prepare([folder / "text.txt"], folder / "corpus", tokenizer=tokenizer, vocab=300)
    add_place(corpus)
    task = Text(block=16).with_data(str(corpus))
    return Run(task=task, model=model_for(task, layers=2, heads=2, width=16), steps=1)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokenizer_cuts_text_as_ours(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_text(tmp_path, kind, monkeypatch)
    save_model(Transformer(run.model), tmp_path / "run", run, more=run.task.files())
    export_hf(tmp_path / "run", tmp_path / "out", test_sequences=2)
    told = (tmp_path / "out/README.md").read_text()
    assert 'AutoTokenizer.from_pretrained("this folder", trust_remote_code=True)' in told
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    for text in ("the cat said Zoë.", "<|endoftext|> is no end", "  two\n\nlines \x00 日本"):
        assert found(text)["input_ids"] == run.task.tokenizer.encode(text)
        assert found.decode(run.task.tokenizer.encode(text)) == text
    assert found.eos_token_id == run.task.tokenizer.end
    batch = found(["the cat", "a"], return_tensors="pt", padding=True)
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][1].tolist()[-1] == 1
    model = to_hf(load(tmp_path / "run"), run)
    got = model.generate(**batch, max_new_tokens=3, do_sample=False)
    prompts = [run.task.tokenizer.encode(text) for text in ("the cat", "a")]
    want = entp.generate(load(tmp_path / "run"), prompts, 3, stop=run.task.stop)
    assert [row[-3:] for row in got.tolist()] == [row[-3:] for row in want]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a model of Count3 whose predictions depend on what it reads."""
    run = small_run()
    model = Transformer(run.model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return save_model(model, tmp_path / "source", run)


SCRIPT = """
import sys
sys.modules["entp"] = None  # as where it is not installed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

folder = sys.argv[1]
assert AutoConfig.from_pretrained(folder, trust_remote_code=True).mode == "entp"
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
x = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
assert model.dtype == torch.float32
with torch.no_grad():
    logits = model(x).logits
torch.save({"logits": logits, "new": model.generate(x[:, :5], max_new_tokens=5)}, sys.argv[2])
model.save_pretrained(sys.argv[3])
"""


@pytest.mark.slow
def test_folder_loads_where_entp_is_not_installed(source: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    words = ["--format=hf", f"--out={out}", "--test-sequences=8", "--device=cpu"]
    assert main(["export", str(source), *words]) == 0
    (tmp_path / "empty").mkdir()
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out), str(tmp_path / "got.pt"), str(again)],
        cwd=tmp_path / "empty",
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "got.pt", weights_only=True)
    model = load(source)
    x = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
    want = model(x).detach()
    assert float(want.abs().max()) > 0.5
    torch.testing.assert_close(got["logits"], want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got["new"], entp.generate(model, x[:, :5], 5))
    assert (again / "modeling_entp.py").read_bytes() == (out / "modeling_entp.py").read_bytes()
    assert {"made.json", "checksums.json", "README.md"} <= {path.name for path in out.iterdir()}
    assert "AutoTokenizer" not in (out / "README.md").read_text()


def test_exported_source_imports_torch_and_transformers_alone() -> None:
    import ast

    from entp.hf import modeling_entp

    tree = ast.parse(Path(modeling_entp.__file__).read_text())
    roots = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
        )
    }
    assert roots - sys.stdlib_module_names == {"torch", "transformers"}


def test_weights_are_saved_in_their_type_and_in_shards(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = export_hf(source, out, dtype="bf16", shard_mib=0.01, test_sequences=8)
    assert made["checkpoint"].endswith("in bf16")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    from entp.hf.modeling_entp import EntpForCausalLM

    register()
    found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(found) is EntpForCausalLM
    want = load(source)
    for name, p in found.named_parameters():
        assert torch.equal(p, want.state_dict()[name].bfloat16().float())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False, "tied_head": False, "activation": "gelu-exact"},
        {"attention_scale": "one", "activation": "relu", "position_embedding": "given"},
    ],
)
def test_decoder_is_a_plain_gpt2(changes: dict[str, Any], tmp_path: Path) -> None:
    run = small_run(mode="decoder")
    config = ModelConfig(vocab=VOCAB, context_length=TIME, layers=2, heads=4, width=32, **changes)
    torch.manual_seed(0)
    model = Transformer(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    x = tokens(2)
    want = model(x, "decoder").detach()
    found = to_gpt2(model, run)
    torch.testing.assert_close(found(x).logits, want, rtol=1e-10, atol=1e-10)
    assert float(want.abs().max()) > 1


def test_exported_gpt2_loads_without_our_source(tmp_path: Path) -> None:
    run = small_run(mode="decoder")
    torch.manual_seed(0)
    model = Transformer(run.model)
    save_model(model, tmp_path / "source", run)
    words = ["--format=gpt2", f"--out={tmp_path / 'out'}", "--test-sequences=8", "--device=cpu"]
    assert main(["export", str(tmp_path / "source"), *words]) == 0
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    x = torch.from_numpy(run.task.batch(0, "test", 0, 3).x)
    want = model(x, "decoder").detach()
    torch.testing.assert_close(found(x).logits, want, rtol=1e-5, atol=1e-5)
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    got = auto.generate(x[:, :4], max_new_tokens=5, do_sample=False)
    assert torch.equal(got, entp.generate(model, x[:, :4], 5, "decoder"))
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "its mode is entp, and GPT-2 is a decoder"),
        ({"mode": "refresh-3"}, "its mode is refresh-3, and our class for HuggingFace knows entp"),
        ({"mode": "decoder", "norm": "rms"}, "model.norm is rms"),
        (
            {"mode": "decoder", "kv_heads": 1, "loops": 2},
            "heads are shared; its blocks run several",
        ),
        ({"mode": "decoder", "position_embedding": "rotary"}, "position_embedding is rotary"),
        ({"mode": "decoder", "activation": "swiglu"}, "activation is swiglu"),
    ],
)
def test_other_models_are_no_gpt2(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mode = changes.pop("mode", "entp")
    run = small_run(mode=mode)
    model = model_for(run.task, layers=2, heads=2, width=16, **changes)
    run = small_run(mode=mode, model=model)
    save_model(Transformer(model), tmp_path / "source", run)
    words = ["--format=gpt2", f"--out={tmp_path / 'out'}", "--test-sequences=8"]
    assert main(["export", str(tmp_path / "source"), *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_without_tokens_are_refused(tmp_path: Path) -> None:
    task = InContext(dim=2, points=4)
    run = Run(task=task, model=model_for(task, layers=1, heads=1, width=8), steps=1)
    save_model(Transformer(run.model), tmp_path / "source", run)
    with pytest.raises(InputError, match="it reads vectors, not tokens"):
        export_hf(tmp_path / "source", tmp_path / "out")


def test_runs_with_causal_layers_are_refused(tmp_path: Path) -> None:
    task = Count3(prompt_length=4, length=10, num_values=10)
    model = model_for(task, layers=2, heads=1, width=8, causal_layers=1)
    save_model(Transformer(model), tmp_path / "source", Run(task=task, model=model, steps=1))
    with pytest.raises(InputError, match="its first layers are causal in every mode"):
        export_hf(tmp_path / "source", tmp_path / "out")


def test_missing_transformers_is_named(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["export", str(source), "--format=hf", f"--out={tmp_path / 'out'}"]) == 2
    assert "pip install 'entp[hf]'" in capsys.readouterr().err


def test_worked_example_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0].splitlines()
    for line in commands:
        assert main([*shlex.split(line)[1:], "--device=cpu"]) == 0
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    for found in ("sequences", "best", "answers"):
        assert (
            names[found].tolist()
            == entp.generate(load("count3-16-entp"), names["prompt"], 6).tolist()
        )
    assert float(names["loss"].detach()) > 0
    models = [names[name] for name in ("small", "as_decoder", "by_name")]
    assert {type(model).__name__ for model in models} == {"EntpForCausalLM"}
    assert [model.config.mode for model in models] == ["entp", "decoder", "entp"]
    state = names["trainer"].state
    assert (state.global_step, Path("small-trained/model.safetensors").is_file()) == (8, True)
