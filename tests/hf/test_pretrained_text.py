"""Pretrained language models on text, as they are and trained, by their own tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_networks import add_tokenizer, folder_of, network_of, one_forward_per_prefix
from small_texts import WORDS
from small_tokenizers import gpt2_like, pretrained_file, text_file

from entp.cli.main import main
from entp.data.prepare import resolve
from entp.data.tokenizers import BpeTokenizer, gpt2_tokenizer, make_tokenizer
from entp.tasks.text import Text
from entp.training.checkpoint import load_run

transformers = pytest.importorskip("transformers", reason="needs the transformers library")

VOCAB = 403
ITEMS = [("Ann met Eve so _ was glad.", "Ann", "Eve", "2"), ("A _ sat on it.", "cat", "mat", "1")]
LOUD = ["--device=cpu"]
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
POSITIONS = {"gpt2": "n_positions", "llama": "max_position_embeddings"}
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of models with tokenizers, notes.txt, and questions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENTP_DATA", str(tmp_path))
    for family in CLASSES:
        folder_of(family, tmp_path / family, vocab_size=VOCAB, **{POSITIONS[family]: 64})
        (tmp_path / family / "tokenizer.json").write_bytes(pretrained_file())
    rng = np.random.default_rng(0)
    Path("notes.txt").write_text(" ".join(rng.choice(WORDS, 4000)))
    keys = ("sentence", "option1", "option2", "answer")
    Path("winogrande").mkdir()
    rows = [json.dumps(dict(zip(keys, item, strict=True))) for item in ITEMS]
    Path("winogrande/dev.jsonl").write_text("\n".join(rows))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*words, *LOUD]) == 0
    return capsys.readouterr().out


def theirs(family: str) -> Any:
    return getattr(transformers, CLASSES[family]).from_pretrained(family)


def nats(network: Any, tokens: list[int], scored: int) -> torch.Tensor:
    """Minus the log-likelihoods of the last tokens, by HuggingFace's causal forward pass."""
    with torch.no_grad():
        logits = network(torch.tensor([tokens[:-1]])).logits[0, -scored:]
    return torch.nn.functional.cross_entropy(
        logits, torch.tensor(tokens[-scored:]), reduction="none"
    )


@pytest.mark.parametrize("family", CLASSES)
def test_generated_text_is_that_of_transformers(
    family: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decoder by default, as it was trained."""
    words = (f"--prompt={WORDS[0]} {WORDS[1]}", "--max-new-tokens=6")
    text = BpeTokenizer(pretrained_file())
    start = text.encode(f"{WORDS[0]} {WORDS[1]}")
    network = theirs(family)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": text.end, "pad_token_id": 0}
    want = network.generate(torch.tensor([start]), **how)[0].tolist()
    found = printed(capsys, "generate", family, *words)
    assert found.rstrip("\n") == text.decode(want).rstrip("\n")
    with torch.no_grad():
        last = network(
            torch.tensor([start]), attention_mask=torch.ones(1, 1, len(start), len(start)).bool()
        )
    first = text.decode([*start, int(last.logits[0, -1].argmax())])
    assert printed(capsys, "generate", family, *words[:1], "--max-new-tokens=1", "--mode=entp") in (
        first,
        f"{first}\n",
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_options_are_scored_as_by_transformers(
    family: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt2: with as many tokens as GPT-2 has, to which our own models add 47."""
    text = BpeTokenizer(pretrained_file())
    if family == "gpt2":
        text = gpt2_tokenizer(gpt2_like(place))  # type: ignore[assignment]
        folder_of("gpt2", place / "gpt2", vocab_size=text.vocab, n_positions=64)
        (place / "gpt2/tokenizer.json").write_bytes(text.file())
    network, right, costs, size = theirs(family), 0, 0.0, 0
    for sentence, *options, answer in ITEMS:
        before, after = sentence.split("_")
        scores = []
        for option in options:
            context = text.encode(f"{before}{option}")
            tokens = text.encode(f"{before}{option}{after}")
            scores.append(float(nats(network, tokens, len(tokens) - len(context)).sum()))
        right += int(np.argmin(scores)) == int(answer) - 1
        costs, size = costs + scores[int(answer) - 1], size + len(after.encode())
    words = ("evaluate", family, "--on=winogrande", "--json")
    found = json.loads(printed(capsys, *words))
    assert found["n"] == len(ITEMS)
    assert found["accuracy"] == right / len(ITEMS)
    bits = found["bits_per_byte"]
    assert bits == pytest.approx(costs / np.log(2) / size, rel=1e-4)
    other = json.loads(printed(capsys, *words, "--mode=entp"))
    assert abs(other["bits_per_byte"] - bits) > 1e-3


def test_loss_of_a_text_is_that_of_transformers(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a text of one's own, which is prepared with the model's tokens."""
    words = ("evaluate", "gpt2", "--on=text", "--on.block=16", "--data=notes.txt", "--json")
    found = json.loads(printed(capsys, *words, "--batches=1"))
    corpus = resolve("notes.txt", BpeTokenizer(pretrained_file()))
    batch = Text(corpus.hash, VOCAB, block=16).batch(0, "test", 0, 64)
    network, costs = theirs("gpt2"), []
    for row, mask in zip(batch.x, batch.target_mask, strict=True):
        with torch.no_grad():
            logits = network(torch.from_numpy(row)[None]).logits[0][mask]
        costs.append(logits)
    logits, targets = torch.cat(costs), torch.from_numpy(batch.targets)
    want = float(torch.nn.functional.cross_entropy(logits, targets))
    assert found["loss"] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(("family", "kind"), [("bert", "bert"), ("llama", "llama2")])
def test_models_whose_tokens_are_no_bytes(
    family: str, kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loss as of one forward pass of HuggingFace's for each prefix, with full attention; options by
    the bytes of their text; no bits per byte."""
    file = text_file(kind)
    text = make_tokenizer(file)
    network = network_of(family, vocab_size=text.vocab, max_position_embeddings=64)
    network.save_pretrained("other")
    Path("other/tokenizer.json").write_bytes(file)
    words = ("evaluate", "other", "--mode=entp", "--json")
    own = ("--on=text", "--on.block=12", "--data=notes.txt", "--batches=1")
    found = json.loads(printed(capsys, *words, *own))
    batch = Text(resolve("notes.txt", text).hash, text.vocab, block=12).batch(0, "test", 0, 64)
    with torch.no_grad():
        logits = one_forward_per_prefix(family, network, torch.from_numpy(batch.x))
    want = torch.nn.functional.cross_entropy(
        logits[torch.from_numpy(batch.target_mask)], torch.from_numpy(batch.targets)
    )
    assert found["loss"] == pytest.approx(float(want), rel=1e-4)
    assert "bits_per_byte" not in found
    asked = json.loads(printed(capsys, *words, "--on=winogrande"))
    assert asked["n"] == len(ITEMS)
    assert {"accuracy", "byte_accuracy"} <= set(asked)
    assert "bits_per_byte" not in asked
    start = text.decode(text.encode(f"{WORDS[0]} {WORDS[1]}"))
    prompt = f"--prompt={WORDS[0]} {WORDS[1]}"
    assert printed(capsys, "generate", "other", prompt, "--max-new-tokens=4").startswith(start)
    trained = ("--task.block=8", "--steps=2", "--batch-size=2", "--out=trained")
    printed(capsys, "train", "text", "--init=other", "--data=notes.txt", *trained)
    again = json.loads(printed(capsys, "evaluate", "trained", "--json", "--batches=1"))
    assert again["loss"] > 0
    assert "bits_per_byte" not in again
    assert load_run("trained").task.tokenizer.sha256 == text.sha256  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_text_is_trained_on_with_the_models_own_tokens(
    mode: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raw text needs no preparing; the run is evaluated, generates and is exported alone."""
    words = ["train", "text", "--data=notes.txt", "--init=llama", "--out=run", f"--mode={mode}"]
    words += ["--task.block=12", "--steps=30", "--batch-size=8", "--optim.lr=3e-3"]
    words += ["--optim.warmup-steps=2", "--train.eval-every=10", "--train.eval-batches=2"]
    printed(capsys, *words)
    run = load_run("run")
    assert run.model.vocab == VOCAB
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "eval"]
    assert losses[-1] < losses[0]
    for name in ("llama", "notes.txt"):
        Path(name).rename(f"away-{name}")
    assert printed(capsys, "generate", "run", f"--prompt={WORDS[0]}", "--max-new-tokens=4")
    printed(capsys, "export", "run", "--format=hf", "--out=small", "--test-sequences=8")
    loaded = transformers.AutoTokenizer.from_pretrained("small")
    assert (
        loaded("the cat")["input_ids"][-3:]
        == BpeTokenizer(pretrained_file()).encode("the cat")[-3:]
    )


def test_gpt2_is_trained_with_its_own_tokens_alone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with the 50304 of our own models: its losses are those of transformers."""
    text = gpt2_tokenizer(gpt2_like(place))
    folder_of("gpt2", place / "gpt2", vocab_size=text.vocab, n_positions=64)
    (place / "gpt2/tokenizer.json").write_bytes(text.file() or b"")
    words = ["train", "text", "--data=notes.txt", "--init=gpt2", "--out=run", "--mode=decoder"]
    words += ["--task.block=12", "--batch-size=4", "--optim.warmup-steps=1", "--optim.lr=1e-9"]
    words += ["--optim.min-lr=0", "--train.eval-batches=1", "--train.checkpoint-every=1"]
    printed(capsys, *words, "--steps=1")
    run = load_run("run")
    assert run.model.vocab == text.vocab == 50257
    batch = run.task.batch(0, "test", 0, 4)
    with torch.no_grad():
        logits = theirs("gpt2")(torch.from_numpy(batch.x)).logits
    at = torch.from_numpy(batch.target_mask)
    want = torch.nn.functional.cross_entropy(logits[at], torch.from_numpy(batch.targets))
    found = json.loads(printed(capsys, "evaluate", "run", "--batches=1", "--json"))
    assert found["loss"] == pytest.approx(float(want), rel=1e-4)
    printed(capsys, "train", "text", "--resume", "--out=run", "--steps=2")


def test_models_without_tokens_for_bytes_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tokenizer(folder_of("bert", place / "bert", vocab_size=30), ["a", "b", "the"])
    folder_of("gpt2", place / "bare")
    for name in ("bert", "bare"):
        for words in (["generate", name, "--prompt=a"], ["evaluate", name, "--on=winogrande"]):
            assert main([*words, *LOUD]) == 2
            assert "train it first" in capsys.readouterr().err
    assert main(["evaluate", "llama", "--task=count3", *LOUD]) == 2
    assert "has no task of its own: leave --task out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "changes", "mode"),
    [
        ("llama", {"is_causal": False, "use_cache": False}, "entp"),
        ("llama", {}, "decoder"),
        ("bert", {"is_decoder": True}, "decoder"),
        ("bert", {}, "entp"),
    ],
)
def test_mode_is_that_of_the_configuration(
    family: str, changes: dict[str, Any], mode: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `entp export --format hf` writes it."""
    network_of(family, vocab_size=VOCAB, max_position_embeddings=64, **changes).save_pretrained("m")
    Path("m/tokenizer.json").write_bytes(pretrained_file())
    words = ("evaluate", "m", "--data=notes.txt", "--batches=1")
    assert f"text, mode {mode}, " in printed(capsys, *words)
