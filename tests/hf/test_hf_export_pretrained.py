"""Runs of pretrained models compute in transformers, where entp is not installed, what they compute
here in their mode."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_networks import DECODERS, SHIFTED, begin, folder_of
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'entp[hf]'")

import entp
import entp.hf
from entp.cli.main import main
from entp.config import Run
from entp.config.pretrained import refit
from entp.errors import InputError
from entp.hf.beginning import read_pretrained
from entp.hf.export import export_hf, refuse
from entp.model.build import build_model
from entp.tasks.addition import Addition
from entp.training.checkpoint import load, load_run, save_model
from entp.training.initialise import load_init

pytestmark = pytest.mark.usefixtures("quiet")


class Case(NamedTuple):
    """A run, by the model that it began with."""

    family: str
    mode: str
    head: bool = True

    @property
    def name(self) -> str:
        return f"{self.family}-{self.mode}-{'head' if self.head else 'bare'}"


NEWER = ("qwen3", "olmo2", "gpt_neox")
CAUSAL = ("gpt2", "bert", "roberta", "xlm-roberta", "llama", "qwen2", *NEWER)
EVERY = (*CAUSAL, "mpnet", "distilbert", "modernbert")
CASES = [
    *(Case(family, "entp") for family in EVERY),
    *(Case(family, "decoder") for family in CAUSAL),
    *(Case(family, mode, False) for family in ("bert", "llama") for mode in ("entp", "decoder")),
]
SCRIPT = """
import json, sys
sys.modules["entp"] = None  # as where it is not installed
import torch, transformers

found = {}
for folder, name in json.loads(sys.argv[1]):
    model = getattr(transformers, name).from_pretrained(folder)
    x = torch.tensor(json.loads(sys.argv[2]))
    placed = {} if "roberta" not in folder and "mpnet" not in folder else {
        "position_ids": torch.arange(x.shape[1])[None] + 2
    }
    with torch.no_grad():
        out = model(x, **placed)
    found[folder] = [getattr(out, "logits", None)]
    if name == "AutoModel":
        found[folder] = [out.last_hidden_state @ model.get_input_embeddings().weight.T]
    if name == "AutoModelForCausalLM" and not placed:
        found[folder].append(model.generate(x[:, :5], max_new_tokens=4, do_sample=False))
torch.save(found, sys.argv[3])
"""
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 1], [2, 7, 1, 8, 2, 8, 1, 8, 0]]


def saved_run(case: Case, folder: Path, **changes: Any) -> Run:
    """A folder with the model that a run begins with."""
    source = folder_of(case.family, folder.parent / f"{folder.name}-source", head=case.head)
    run, init = begin(source, mode=case.mode, **changes)
    model = build_model(run.model)
    load_init(model, init)
    save_model(model, folder, run)
    return run


def outside(names: list[tuple[Path, str]], folder: Path) -> dict[str, list[Tensor]]:
    """Logits of folders, and tokens that they generate, in a process without entp."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    asked = json.dumps([(str(path), name) for path, name in names])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, asked, json.dumps(TOKENS), str(folder / "got.pt")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "got.pt", weights_only=True)


def class_in(readme: str) -> str:
    found = re.search(r"^model = (\w+)\.from_pretrained", readme, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Tensor]]]:
    """The folder of all runs and exports, and what the exports do in another process."""
    root = tmp_path_factory.mktemp("exported")
    names = []
    for case in CASES:
        saved_run(case, root / case.name)
        out = root / f"{case.name}-hf"
        export_hf(root / case.name, out, test_sequences=2)
        names.append((out, class_in((out / "README.md").read_text())))
    return root, outside(names, root)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exported_folder_computes_the_mode_of_the_run(
    case: Case, exported: tuple[Path, dict[str, list[Tensor]]]
) -> None:
    root, found = exported
    got, *generated = found[str(root / f"{case.name}-hf")]
    model, x = load(root / case.name), torch.tensor(TOKENS)
    with torch.no_grad():
        want, other = (model(x, mode) for mode in (case.mode, *{"entp", "decoder"} - {case.mode}))
    places = slice(-1, None) if case.mode == "entp" else slice(None)
    torch.testing.assert_close(got[:, places], want[:, places], rtol=1e-4, atol=1e-5)
    assert float((want - other)[:, -1].abs().max()) > 0.01
    assert bool(generated) == (case.head and case.family not in SHIFTED and _writes(case))
    for tokens in generated:
        assert torch.equal(tokens, entp.generate(model, x[:, :5], 4, case.mode))


def _writes(case: Case) -> bool:
    return case.family in DECODERS or case.mode == "decoder"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exported_folder_begins_the_same_runs(
    case: Case, exported: tuple[Path, dict[str, list[Tensor]]]
) -> None:
    """What was changed for transformers changes nothing here, in any mode."""
    root, _ = exported
    run, out = load_run(root / case.name), root / f"{case.name}-hf"
    init = read_pretrained(out, run.task)
    assert (init.model, init.name) == (run.model, run.init)
    model, again, x = load(root / case.name), entp.hf.load(out), torch.tensor(TOKENS)
    for mode in ("entp", "decoder"):
        torch.testing.assert_close(again(x, mode), model(x, mode), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_readme_says_what_the_model_computes(
    exported: tuple[Path, dict[str, list[Tensor]]],
) -> None:
    root, _ = exported
    told = {case.name: (root / f"{case.name}-hf/README.md").read_text() for case in CASES}
    for case in CASES:
        text = told[case.name]
        assert ("last position is that of mode entp" in text) == (case.mode == "entp")
        assert ("reads the whole" in text) == (case.mode == "entp" and case.family in DECODERS)
        causal = case.mode == "decoder" and case.family not in DECODERS
        assert ("`is_decoder` in `config.json` makes it causal" in text) == causal
        assert ("model(tokens).last_hidden_state @" in text) == (not case.head)
        assert ("Where token 1 is among the inputs" in text) == (case.family in SHIFTED)


@pytest.mark.parametrize(
    ("family", "mode", "told"),
    [
        ("bert", "prefix-lm", "its mode is prefix-lm, and HuggingFace's classes compute entp and"),
        ("llama", "prefix-lm", "its mode is prefix-lm"),
        ("mpnet", "decoder", "its mode is decoder, and HuggingFace's mpnet always attends fully"),
        ("modernbert", "decoder", "HuggingFace's modernbert always attends fully"),
    ],
)
def test_modes_that_huggingface_does_not_compute_are_refused(
    family: str, mode: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_run(Case(family, mode), tmp_path / "run")
    words = ["export", str(tmp_path / "run"), f"--out={tmp_path / 'out'}", "--format=hf"]
    assert main([*words, "--device=cpu"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "--format entp takes every run." in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_positions_that_transformers_does_not_know_are_refused(tmp_path: Path) -> None:
    task = Addition(digits=2, positions="abacus")
    run, _ = begin(folder_of("bert", tmp_path / "w", max_position_embeddings=256, vocab_size=40))
    run = replace(run, task=task, model=refit(run.model, task.model_needs()))
    with pytest.raises(InputError, match="gives its tokens positions that generate does not know"):
        refuse(run, "hf")
