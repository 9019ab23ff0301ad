"""Checkpoints: whole or not at all, checked when read, and never code."""

from __future__ import annotations

import errno
import io
import os
import pickle
import resource
import shutil
import stat
from collections.abc import Callable
from contextlib import nullcontext as still
from functools import partial
from pathlib import Path

import pytest
import torch
from faulty_disk import Disk, Fails
from forked import start
from random_models import random_model
from small_runs import small_run

from entp.errors import InputError
from entp.files import CHECKSUMS, Damaged, verify_folder, write_file, write_folder
from entp.training import checkpoint
from entp.training.checkpoint import find, keep_best, load, newest, save_model
from entp.training.trainer import train

FILES = {"model.safetensors", "config.json", CHECKSUMS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen steps with three checkpoints. To be read only."""
    out = tmp_path_factory.mktemp("runs") / "first"
    train(small_run(steps=15), out, device="cpu", quiet=True)
    return out


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def test_last_two_checkpoints_are_kept_and_one_best(trained: Path) -> None:
    names = {p.name for p in (trained / "checkpoints").iterdir()}
    assert {n for n in names if n.startswith("step")} == {"step-00000010", "step-00000015"}
    (best,) = (n for n in names if n.startswith("best"))
    assert {p.name for p in (trained / "checkpoints" / best).iterdir()} == FILES
    last = trained / "checkpoints/step-00000015"
    assert {p.name for p in last.iterdir()} == FILES | {"trainer.pt"}


@pytest.mark.parametrize("position", ["learned", "given", "none"])
def test_model_round_trips(position: str, tmp_path: Path) -> None:
    model = random_model(position_embedding=position, norm="none")
    save_model(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.config == model.config
    assert same_weights(loaded, model)
    assert next(loaded.parameters()).dtype == torch.float64
    assert not loaded.training


def test_run_is_saved_with_the_weights(trained: Path) -> None:
    assert checkpoint.load_run(trained) == small_run(steps=15)
    step = trained / "checkpoints/step-00000015"
    assert find(step) == find(trained, "last") == step
    assert same_weights(load(step), load(trained, "last"))
    assert find(trained).name.startswith("best-")


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt", "config.json", CHECKSUMS])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_newest_is_named_and_the_one_before_used(
    copied: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copied / "checkpoints/step-00000015" / name
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0x40
        file.write_bytes(data)
    assert newest(copied) == copied / "checkpoints/step-00000010"
    assert "step-00000015 is damaged" in capsys.readouterr().err


def test_newest_counts_steps_and_not_letters(trained: Path, tmp_path: Path) -> None:
    """Also beyond 99,999,999 steps, where names have no leading zero any more."""
    for step in (9, 10, 99_999_999, 100_000_000):
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        shutil.copytree(trained / "checkpoints/step-00000010", folder)
        assert newest(tmp_path) == folder
    assert newest(tmp_path, "best") is None


def test_resuming_after_damage_ends_where_the_run_would_have(trained: Path, copied: Path) -> None:
    (copied / "checkpoints/step-00000015/model.safetensors").write_bytes(b"")
    train(small_run(steps=15), copied, device="cpu", resume=True, quiet=True)
    assert same_weights(load(copied, "last"), load(trained, "last"))
    assert same_weights(load(copied), load(trained))


def test_damaged_best_makes_the_next_evaluation_the_best(copied: Path) -> None:
    """Its values would else keep what is worse from being saved, and there would be no best."""
    best = find(copied)
    (best / "model.safetensors").write_bytes(b"")
    result = train(small_run(steps=20), copied, device="cpu", resume=True, quiet=True)
    assert result.best["step"] == 20
    assert [p.name for p in (copied / "checkpoints").glob("best-*")] == ["best-00000020"]


def test_keep_best_removes_all_others_and_tells_whether_it_is_whole(copied: Path) -> None:
    folder = copied / "checkpoints"
    best = find(copied)
    number = int(best.name.removeprefix("best-"))
    for name in ("best-00000003", "best-00000099", "best-mine"):
        shutil.copytree(best, folder / name)
    assert keep_best(copied, number)
    assert {p.name for p in folder.glob("best-*")} == {best.name, "best-mine"}
    (best / "config.json").unlink()
    assert not keep_best(copied, number)
    assert not keep_best(copied, 3)
    assert {p.name for p in folder.glob("best-*")} == {"best-mine"}
    shutil.copytree(folder / "best-mine", folder / "best-00000003")
    assert not keep_best(copied, None)  # nothing was measured yet: it is of another trajectory
    assert {p.name for p in folder.glob("best-*")} == {"best-mine"}
    assert len(list(folder.glob("step-*"))) == 2


def test_leftovers_of_a_killed_process_are_removed(copied: Path, tmp_path: Path) -> None:
    ours = (".frozen.old.tmp", "checkpoints/.step-00000020.tmp", "checkpoints/.best-00000020.tmp")
    for half in (*(copied / name for name in ours), tmp_path / ".model.tmp"):
        half.mkdir()
        (half / "half").touch()
    train(small_run(steps=16), copied, device="cpu", resume=True, quiet=True)
    assert not list(copied.rglob(".*"))
    save_model(load(copied), tmp_path / "model")
    assert {p.name for p in (tmp_path / "model").iterdir()} == FILES
    assert {p.name for p in tmp_path.iterdir()} == {"copy", "model"}


def test_missing_and_half_written_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    with pytest.raises(InputError, match="no complete checkpoint"):
        load(tmp_path / "half")


def test_weights_of_another_config_are_refused(copied: Path) -> None:
    out = copied / "checkpoints/step-00000015"
    text = (out / "config.json").read_text().replace('"width": 16', '"width": 32')
    (out / "config.json").write_text(text)
    (out / CHECKSUMS).unlink()
    with pytest.raises(InputError, match=r"do not fit its config\.json"):
        load(out)


class Bomb:
    """Leaves a folder behind when unpickled the unsafe way."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    folder = tmp_path / "bad"
    folder.mkdir()
    torch.save({"step": Bomb(str(target))}, folder / "trainer.pt")
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.read_trainer(folder)
    assert not target.exists()
    torch.load(io.BytesIO((folder / "trainer.pt").read_bytes()), weights_only=False)
    assert target.exists()  # the bomb works: it was the safe reading that stopped it


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed and renamed from now on, in order."""
    found: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def flushed(handle: int) -> None:
        found.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(how: Callable[[Path, Path], None], before: Path, after: Path) -> None:
        found.append(f"{Path(before).name} to {Path(after).name}")
        how(before, after)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", partial(renamed, rename))
    monkeypatch.setattr(os, "replace", partial(renamed, replace))
    return found


def test_files_are_flushed_before_they_are_renamed(tmp_path: Path, writes: list[str]) -> None:
    """And the folder after it, so that the new name survives a loss of power."""
    write_file(tmp_path / "one", b"1")
    assert writes == ["file", ".one.tmp to one", "folder"]
    writes.clear()
    write_folder(tmp_path / "two", {"a": b"1", "b": b"2"})
    assert writes[-2:] == [".two.tmp to two", "folder"]
    assert writes.count("file") == 3
    verify_folder(tmp_path / "two", ("a", "b"))


@pytest.mark.parametrize(("code", "told"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_failed_flush_of_a_folder_is_told(code: int, told: bool, tmp_path: Path) -> None:
    """Unless the file system flushes no folders."""
    with Disk(tmp_path) as disk:
        write_file(tmp_path / "one", b"1")
    assert disk.calls[-1].path == tmp_path
    with Disk(tmp_path, Fails(len(disk.calls), code)), pytest.raises(OSError) if told else still():
        write_file(tmp_path / "one", b"2")
    assert (tmp_path / "one").read_bytes() == b"2"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"one": 1', b'{"one"}', b"\xff"])
def test_damaged_checksums_are_named(data: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "two", {"one": b"1"})
    (folder / CHECKSUMS).write_bytes(data)
    with pytest.raises(Damaged, match=CHECKSUMS):
        verify_folder(folder, ("one",))


def test_write_file_keeps_the_old_content_when_the_disk_is_full(tmp_path: Path) -> None:
    """The limit on file size makes a real write fail half-way, as a full disk does."""
    path = tmp_path / "there" / "file"
    path.parent.mkdir()
    path.write_bytes(b"old")

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            write_file(path, b"x" * 5000)
        except OSError:
            return 7
        return 0

    assert start(limited, tmp_path).wait()[0] == 7
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
