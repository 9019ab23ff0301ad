"""Weights in shards: none is larger than asked for, and they load as one file would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import small_run

from entp import pretrained
from entp.cli.main import main
from entp.errors import InputError
from entp.model import Transformer
from entp.training.checkpoint import load, load_run, save_model
from entp.training.initialise import read_init
from entp.training.weights import INDEX, WHOLE, read_weights, weight_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with random weights of a small run."""
    torch.manual_seed(0)
    run = small_run()
    return save_model(Transformer(run.model), tmp_path / "source", run)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_exported_shards_load_as_one_file_does(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--test-sequences=8", "--device=cpu", "--dtype=bf16"]
    assert main(["export", str(source), f"--out={tmp_path / 'one'}", *words]) == 0
    out = tmp_path / "many"
    assert main(["export", str(source), f"--out={out}", *words, "--shard-mib=0.003"]) == 0
    assert "in bf16, 0.02 MB" in capsys.readouterr().out
    files = shards(out)
    assert len(files) > 3
    assert not (out / WHOLE).exists()
    assert all(file.stat().st_size <= 0.003 * 2**20 for file in files)
    assert {t.dtype for file in files for t in load_file(file).values()} == {torch.bfloat16}
    ours, want = load(out).state_dict(), load(tmp_path / "one").state_dict()
    assert ours.keys() == want.keys()
    assert all(torch.equal(ours[name], want[name]) for name in want)
    assert load_run(out) == load_run(source)
    assert read_init(out).name == read_init(tmp_path / "one").name


def test_tensor_larger_than_a_shard_is_cut_into_rows() -> None:
    torch.manual_seed(0)
    tensors = {"big": torch.randn(1000, 7), "small": torch.randn(3)}
    files = weight_files(tensors, shard_mib=0.01)
    sizes = [len(data) for name, data in files.items() if name != INDEX]
    assert len(sizes) == 3
    assert max(sizes) <= 0.01 * 2**20
    index = json.loads(files[INDEX])
    assert list(index["weight_map"]) == ["big/0", "big/1", "big/2", "small"]
    assert index["metadata"]["total_size"] == 4 * 7003


def test_row_larger_than_a_shard_is_refused() -> None:
    with pytest.raises(InputError, match=r"a row of x has 4000 bytes.* larger --shard-mib"):
        weight_files({"x": torch.zeros(2, 1000)}, shard_mib=0.001)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_damaged_shard_is_named(source: Path, tmp_path: Path, damage: str) -> None:
    out = save_model(load(source), tmp_path / "out", small_run(), shard_mib=0.01)
    file = shards(out)[1]
    if damage == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with pytest.raises(InputError, match=f"is damaged: .*{file.name}"):
        load(out)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"weight_map": {"x": "../x.safetensors"}}, "not a file of the folder"),
        ({"weight_map": {"x": "there-is-none"}}, "there-is-none"),
        ({"weight_map": [1]}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_bad_index_is_refused(tmp_path: Path, index: object, told: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=told):
        read_weights(tmp_path)


def test_lost_part_of_a_tensor_is_noticed(tmp_path: Path) -> None:
    files = weight_files({"big": torch.randn(1000, 7)}, shard_mib=0.01)
    index = json.loads(files[INDEX])
    del index["weight_map"]["big/1"]
    for name, data in {**files, INDEX: json.dumps(index).encode()}.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match="big lacks some of its parts"):
        read_weights(tmp_path)


def test_sharded_models_that_come_with_entp_are_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(load(source), tmp_path / "here" / "tiny", small_run(), shard_mib=0.01)
    monkeypatch.setattr(pretrained, "HERE", tmp_path / "here")
    assert pretrained.names() == ["tiny"]
    assert torch.equal(load("tiny").positions, load(source).positions)
