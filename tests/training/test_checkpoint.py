"""Checkpoints: whole or not at all, checked when read, and never code."""

from __future__ import annotations

import io
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_models import random_model
from small_runs import environment, small_run

import entp
from entp.errors import InputError
from entp.training import checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "first"
    entp.train(small_run(steps=15), out, device="cpu", quiet=True)
    return out


def copy_of(folder: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, tmp_path / "copy"))


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def test_last_two_are_kept_and_one_best(trained: Path) -> None:
    names = sorted(p.name for p in (trained / "checkpoints").iterdir())
    assert [n for n in names if n.startswith("step")] == ["step-00000010", "step-00000015"]
    assert len([n for n in names if n.startswith("best")]) == 1
    assert (trained / "checkpoints/step-00000015/trainer.pt").is_file()


def test_any_model_round_trips(tmp_path: Path) -> None:
    for position in ("learned", "given", "none"):
        model = random_model(position_embedding=position, norm="none")
        checkpoint.save_model(model, tmp_path / position)
        loaded = entp.load(tmp_path / position)
        assert loaded.config == model.config
        assert same_weights(loaded, model)
        assert next(loaded.parameters()).dtype == torch.float64


def test_run_is_saved_with_the_weights(trained: Path) -> None:
    assert checkpoint.load_run(trained) == small_run(steps=15)
    step = trained / "checkpoints/step-00000015"
    assert same_weights(entp.load(step), entp.load(trained, "last"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer.pt", "config.json", "checksums.json"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_newest_is_named_and_the_one_before_used(
    trained: Path, tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copy_of(trained, tmp_path)
    file = out / "checkpoints/step-00000015" / name
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0x40
        file.write_bytes(data)
    found = checkpoint.newest(out)
    assert found is not None
    assert found.name == "step-00000010"
    assert "step-00000015 is damaged" in capsys.readouterr().err


def test_resume_after_damage_ends_where_the_run_would_have(trained: Path, tmp_path: Path) -> None:
    out = copy_of(trained, tmp_path)
    (out / "checkpoints/step-00000015/model.safetensors").write_bytes(b"")
    entp.train(small_run(steps=15), out, device="cpu", resume=True, quiet=True)
    assert same_weights(entp.load(out, "last"), entp.load(trained, "last"))


def test_what_a_killed_process_left_is_no_part_of_what_comes_after_it(
    trained: Path, tmp_path: Path
) -> None:
    out = copy_of(trained, tmp_path)
    for half in (out / "checkpoints/.step-00000020.tmp", tmp_path / ".model.tmp"):
        half.mkdir()
        (half / "half").touch()
    entp.train(small_run(steps=16), out, device="cpu", resume=True, quiet=True)
    assert not list((out / "checkpoints").glob(".*"))
    checkpoint.save_model(entp.load(out), tmp_path / "model")
    assert {p.name for p in (tmp_path / "model").iterdir()} == {
        "model.safetensors",
        "config.json",
        checkpoint.CHECKSUMS,
    }
    assert {p.name for p in tmp_path.iterdir()} == {"copy", "model"}


def test_missing_and_half_written_folders_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        entp.load(tmp_path / "nowhere")
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    with pytest.raises(InputError, match="no complete checkpoint"):
        entp.load(tmp_path / "half")


def test_weights_of_another_config_are_refused(trained: Path, tmp_path: Path) -> None:
    out = copy_of(trained, tmp_path) / "checkpoints/step-00000015"
    text = (out / "config.json").read_text().replace('"width": 16', '"width": 32')
    (out / "config.json").write_text(text)
    (out / checkpoint.CHECKSUMS).unlink()
    with pytest.raises(InputError, match=r"do not fit its config\.json"):
        entp.load(out)


class Bomb:
    """Leaves a file behind when unpickled the unsafe way."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    folder = tmp_path / "bad"
    folder.mkdir()
    torch.save({"step": Bomb(str(target))}, folder / "trainer.pt")
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.read_trainer(folder)
    assert not target.exists()
    torch.load(io.BytesIO((folder / "trainer.pt").read_bytes()), weights_only=False)
    assert target.exists()  # the bomb works: it was the safe reading that stopped it


def test_write_file_keeps_the_old_content_when_the_disk_is_full(tmp_path: Path) -> None:
    """The limit on file size makes a real write fail half-way, as a full disk does."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import resource, sys; from pathlib import Path; from entp.training.checkpoint import "
        "write_file\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))\n"
        "try: write_file(Path(sys.argv[1]), b'x' * 5000)\n"
        "except OSError: sys.exit(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment(), timeout=300, check=False
    )
    assert done.returncode == 7
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
