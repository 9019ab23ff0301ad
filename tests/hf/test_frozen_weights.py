"""Weights that are not trained are written once, and every checkpoint finds them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_networks import begin, folder_of
from small_runs import entp, fit, last_weights

from entp.config import EmaConfig
from entp.config.json import read_run
from entp.errors import InputError
from entp.training import frozen
from entp.training.checkpoint import find, load, load_run, read_trainer, save_checkpoint
from entp.training.weights import read_weights

pytest.importorskip("transformers", reason="needs the transformers library")

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished LoRA run of 6 steps with an EMA."""
    run, init = begin(folder_of("llama", tmp_path / "w"), lora_rank=2, steps=6, ema=EmaConfig(4))
    fit(run, tmp_path / "out", init=init)
    return tmp_path / "out"


def test_checkpoints_hold_what_is_trained_alone(run_folder: Path) -> None:
    base = set(read_weights(run_folder / "frozen"))
    for which in ("best", "last"):
        own = set(read_weights(find(run_folder, which)))
        assert own
        assert all(".lora_" in name for name in own)
        assert own | base == set(load(run_folder, which).state_dict())
    average = read_trainer(find(run_folder, "last"))["techniques"]["ema"]["weights"]
    assert set(average) == own


def test_resumed_run_writes_frozen_weights_no_more(run_folder: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (run_folder / "frozen").iterdir()}
    fit(replace(load_run(run_folder), steps=9), run_folder, resume=True)
    assert {p: p.stat().st_mtime_ns for p in (run_folder / "frozen").iterdir()} == before
    run, init = begin(tmp_path / "w", lora_rank=2, steps=9, ema=EmaConfig(4))
    fit(run, tmp_path / "whole", init=init)
    whole, parts = last_weights(tmp_path / "whole"), last_weights(run_folder)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_checkpoint_with_all_weights_is_resumed(run_folder: Path) -> None:
    """Older runs, and the first checkpoint of a fork, have no folder of frozen weights."""
    run, folder = load_run(run_folder), find(run_folder, "last")
    weights, trainer = load(folder).state_dict(), read_trainer(folder)
    save_checkpoint(run_folder, 6, weights, run, trainer)
    shutil.rmtree(run_folder / "frozen")
    fit(replace(run, steps=9), run_folder, resume=True)
    after = load(run_folder, "last").state_dict()
    assert all(torch.equal(after[n], weights[n]) for n in weights if ".lora_" not in n)
    assert (run_folder / "frozen").is_dir()


def test_fork_has_frozen_weights_of_its_own(run_folder: Path, tmp_path: Path) -> None:
    fit(replace(load_run(run_folder), steps=8), tmp_path / "fork", fork=run_folder)
    shutil.rmtree(run_folder)
    assert set(read_weights(find(tmp_path / "fork", "last"))) < set(last_weights(tmp_path / "fork"))


def test_checkpoint_without_its_run_is_refused(run_folder: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(find(run_folder, "best"), tmp_path / "alone")
    with pytest.raises(InputError, match="entp export"):
        load(alone)
    entp("export", str(run_folder), "--out", "small", "--dtype", "fp32", cwd=tmp_path)
    x = torch.arange(10)[None] % 10
    torch.testing.assert_close(load(tmp_path / "small")(x), load(run_folder)(x))


def test_damaged_frozen_weights_are_named(run_folder: Path) -> None:
    file = next((run_folder / "frozen").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="does not match its checksum"):
        load(find_folder(run_folder))
    with pytest.raises(InputError, match="no checkpoint"):
        fit(replace(read_run(run_folder / "config.json"), steps=9), run_folder, resume=True)


def test_frozen_weights_of_another_run_are_refused(run_folder: Path, tmp_path: Path) -> None:
    run, init = begin(folder_of("llama", tmp_path / "other", vocab_size=11), lora_rank=2)
    fit(run, tmp_path / "stranger", init=init)
    shutil.rmtree(run_folder / "frozen")
    shutil.copytree(tmp_path / "stranger" / "frozen", run_folder / "frozen")
    with pytest.raises(InputError, match="another run"):
        load(find_folder(run_folder))


def test_frozen_weights_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "SHARD_MIB", 0.02)
    run, init = begin(folder_of("llama", tmp_path / "w"), lora_rank=2)
    fit(run, tmp_path / "out", init=init)
    files = list((tmp_path / "out" / "frozen").glob("*.safetensors"))
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) <= 0.02 * 2**20
    after = {n.replace(".base_layer", ""): t for n, t in last_weights(tmp_path / "out").items()}
    assert all(torch.equal(after[name], init.weights[name]) for name in init.weights)


def find_folder(run_folder: Path) -> Path:
    """The last checkpoint, whole or not."""
    return max((run_folder / "checkpoints").glob("step-*"))
