"""HuggingFace's models on the command line, and their runs as folders of HuggingFace's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from small_networks import DECODERS, begin, folder_of
from small_runs import TASK, Parity, fit, last_weights, small_run

import entp
import entp.hf
from entp.cli.main import main
from entp.config import PretrainedConfig
from entp.errors import InputError
from entp.training.checkpoint import load, load_run
from entp.training.initialise import with_init

pytest.importorskip("transformers", reason="needs the transformers library")

COUNT3 = ["--task.prompt-length=4", "--task.length=10", "--task.num-values=10"]
QUICK = ["--batch-size=4", "--optim.warmup-steps=2", "--train.eval-batches=1", "--device=cpu"]
pytestmark = pytest.mark.usefixtures("quiet")


def test_run_needs_its_folder_of_weights_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of("bert", tmp_path / "weights", head=False)
    words = [*COUNT3, *QUICK, "--steps=4", "--lora-rank=2", "--train.checkpoint-every=2"]
    assert main(["train", "count3", "--init=weights", "--out=run", *words]) == 0
    shutil.rmtree("weights")
    assert main(["train", "count3", "--resume", "--out=run", "--steps=6", "--device=cpu"]) == 0
    assert main(["evaluate", "run", "--batches=1", "--device=cpu"]) == 0
    assert main(["generate", "run", "--prompt=1 2 3 4", "--device=cpu"]) == 0
    assert main(["export", "run", "--out=small", "--test-sequences=8", "--device=cpu"]) == 0
    assert main(["evaluate", "small", "--batches=1", "--device=cpu"]) == 0
    printed = capsys.readouterr()
    assert "step 6," in printed.out
    assert "1 2 3 4 " in printed.out
    run = load_run("run")
    assert isinstance(run.model, PretrainedConfig)
    assert (run.model.head, run.model.lora_rank, run.model.vocab) == ("embedding", 2, 10)
    told = json.loads(Path("run/environment.json").read_text())["init"]
    assert told["run"] == "weights"
    assert told["weights"].startswith(run.init)


def test_run_begins_with_a_run_of_a_pretrained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of("gpt2", tmp_path / "weights")
    words = [*COUNT3, *QUICK, "--steps=2"]
    assert main(["train", "count3", "--init=weights", "--out=a", "--mode=decoder", *words]) == 0
    assert main(["train", "count3", "--init=a", "--out=b", "--lora-rank=2", *words]) == 0
    run = load_run("b")
    assert isinstance(run.model, PretrainedConfig)
    assert (run.mode, run.model.lora_rank) == ("decoder", 2)
    base = last_weights(tmp_path / "a")
    after = {k.replace(".base_layer", ""): v for k, v in last_weights(tmp_path / "b").items()}
    assert all(torch.equal(base[name], after[name]) for name in base)


REFUSED = {
    "nothing": ("there is no run folder nothing to begin with: --init takes the --out", []),
    "empty": ("there is no run folder empty to begin with: --init takes the --out", []),
    "other": ("describes no model: --init takes the --out", []),
    "weights": ("--size is given, and the shape of a pretrained model", ["--size=medium"]),
    "weights ": ("--model.layers is given, and the shape", ["--model.layers=3"]),
    "short": ("context_length 4 is shorter than the sequences of count3, 10", []),
    "few": ("count3 has 10 tokens and the model in .* only 5", []),
    "sliding": ("cannot be used: its layers have sliding attention", []),
}


@pytest.mark.parametrize("name", REFUSED)
def test_init_that_cannot_be_used_is_refused_with_what_can(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/config.json").write_text('{"a": 1}')
    folder_of("bert", tmp_path / "weights")
    folder_of("bert", tmp_path / "short", max_position_embeddings=4)
    folder_of("bert", tmp_path / "few", vocab_size=5)
    folder_of("llama", tmp_path / "sliding")
    config = json.loads(Path("sliding/config.json").read_text())
    Path("sliding/config.json").write_text(json.dumps({**config, "sliding_window": 3}))
    said, more = REFUSED[name]
    words = ["train", "count3", f"--init={name.strip()}", *COUNT3, *QUICK, *more]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert len(error.strip().splitlines()) == 1


def test_lora_without_a_pretrained_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "count3", "--lora-rank=2", *COUNT3, *QUICK]) == 2
    assert "are for models of HuggingFace's: give --init such a folder" in capsys.readouterr().err


def test_alpha_without_a_rank_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("bert", tmp_path / "w")
    assert main(["train", "count3", f"--init={folder}", "--lora-alpha=3", *COUNT3, *QUICK]) == 2
    assert "--lora-alpha needs --lora-rank" in capsys.readouterr().err


def test_our_own_export_is_no_beginning_and_runs_no_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, there = tmp_path / "run", tmp_path / "hf"
    assert main(["train", "count3", f"--out={out}", *COUNT3, *QUICK, "--steps=2"]) == 0
    assert main(["export", str(out), "--format=hf", f"--out={there}"]) == 0
    for file in there.glob("*.py"):
        file.write_text("raise SystemExit('code ran')")
    for words in (
        ["train", "count3", f"--init={there}", *COUNT3, *QUICK],
        ["evaluate", str(there)],
    ):
        assert main(words) == 2
        assert "is what `entp export --format hf` wrote" in capsys.readouterr().err
    with pytest.raises(InputError, match="is what `entp export --format hf` wrote"):
        entp.hf.load(there)


def test_load_says_what_it_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"give the --out .* `entp export` wrote.*entp\.hf\.load"):
        entp.load(tmp_path / "nothing")
    folder = folder_of("bert", tmp_path / "w")
    with pytest.raises(InputError, match=r"HuggingFace's format \(bert\).*entp\.hf\.load"):
        entp.load(folder)
    assert main(["evaluate", str(folder), "--device=cpu"]) == 2
    assert "train it first, with `entp train TASK --init" in capsys.readouterr().err
    _, init = begin(folder, steps=1)
    with pytest.raises(InputError, match="one of HuggingFace's there and of entp's here"):
        with_init(small_run(), init)


def test_text_with_the_models_own_tokenizer_keeps_its_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses at the first step are those of the pretrained model; other texts are not its."""
    monkeypatch.chdir(tmp_path)
    lines = [f"In {n} of {n + 1} cases there is a note." for n in range(400)]
    Path("notes.txt").write_text("\n\n".join(lines))
    words = ["data", "prepare", "notes.txt", "--tokenizer=bpe", "--vocab=280", "--out=corpus"]
    assert main([*words, "--valid=0.1"]) == 0
    folder = folder_of("gpt2", tmp_path / "weights", vocab_size=280)
    shutil.copy("corpus/tokenizer.json", folder)
    still = ["--optim.lr=1e-30", "--optim.min-lr=0", "--optim.weight-decay=0", "--steps=3"]
    words = ["train", "text", "--data=corpus", "--init=weights", "--out=run", "--mode=decoder"]
    assert main([*words, "--task.block=12", *still, *QUICK]) == 0
    run = load_run("run")
    assert run.model.vocab == 280
    assert "All 280 tokens are the model's own" in capsys.readouterr().err
    trained, theirs = load("run", "last"), entp.hf.load(folder)
    x = torch.from_numpy(run.task.batch(0, "test", 0, 2).x)
    torch.testing.assert_close(trained(x, "decoder"), theirs(x, "decoder"))
    assert main(["generate", "run", "--prompt=In 3", "--max-new-tokens=3", "--device=cpu"]) == 0


@pytest.mark.parametrize("family", ["bert", "gpt2", "modernbert", "llama"])
@pytest.mark.parametrize("head", [True, False])
def test_run_is_exported_as_a_folder_of_huggingfaces(
    family: str, head: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its adapters merged: what transformers loads has the run's outputs."""
    folder = folder_of(family, tmp_path / "w", head=head)
    run, init = begin(folder, lora_rank=2, steps=5)
    fit(run, tmp_path / "run", init=init)
    words = ["export", str(tmp_path / "run"), f"--out={tmp_path / 'out'}", "--format=hf"]
    assert main([*words, "--test-sequences=8", "--device=cpu"]) == 0
    x = torch.from_numpy(TASK.batch(0, "test", 0, 2).x)
    trained, again = load(tmp_path / "run"), entp.hf.load(tmp_path / "out")
    torch.testing.assert_close(again(x), trained(x), rtol=1e-4, atol=1e-5)
    assert float((again(x) - entp.hf.load(folder)(x)).detach().abs().max()) > 1e-3
    assert not any("lora" in name for name, _ in again.named_parameters())
    kind = "ForCausalLM" if family in DECODERS else "ForMaskedLM"
    kind = kind if head or family == "gpt2" else ""  # GPT-2's head is its embedding
    assert f"AutoModel{kind}.from_pretrained(" in (tmp_path / "out/README.md").read_text()
    other = ["export", str(tmp_path / "run"), f"--out={tmp_path / 'two'}", "--format=gpt2"]
    assert main([*other, "--device=cpu"]) == 2
    assert f"a model of type {family}, which --format hf writes" in capsys.readouterr().err


def test_run_with_a_new_head_is_not_exported_to_huggingface(tmp_path: Path) -> None:
    from entp.hf.export import refuse

    run, _ = begin(folder_of("bert", tmp_path / "w"), task=Parity())
    with pytest.raises(InputError, match="no class of HuggingFace's has its new head of 2"):
        refuse(run, "hf")
