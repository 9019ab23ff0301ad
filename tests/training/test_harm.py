"""What people and machines do to a run folder: a second process, copies, damage, and weights or
tasks that go bad."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from forked import start
from small_runs import FLAGS, TASK, small_run

from entp.cli.main import main
from entp.config import Run, model_for
from entp.errors import InputError, TrainingStopped
from entp.files import write_file
from entp.model import Transformer
from entp.tasks.base import IGNORE, Batch, Split
from entp.tasks.counting import Count3
from entp.training.checkpoint import find, load, save_model
from entp.training.export import export
from entp.training.loggers import read_metrics
from entp.training.trainer import Result, train


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of `small_run()`. To be read only."""
    out = tmp_path_factory.mktemp("runs") / "run"
    train(small_run(), out, device="cpu", quiet=True)
    return out


@pytest.fixture
def trained(ten: Path, tmp_path: Path) -> Path:
    """A copy of it, to be harmed."""
    return Path(shutil.copytree(ten, tmp_path / "run"))


def resume(out: Path, steps: int = 11) -> Result:
    return train(small_run(steps=steps), out, device="cpu", quiet=True, resume=True)


@pytest.mark.usefixtures("ten")
def test_second_process_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = small_run(steps=10**6, train={"eval_every": 10**6})
    first = start(lambda: train(run, out, device="cpu", quiet=True), tmp_path)
    try:
        first.wait_for_step(out, 5)
        with pytest.raises(InputError, match="run is being trained by another process"):
            train(run, out, device="cpu", quiet=True, resume=True)
    finally:
        first.kill(signal.SIGTERM)
    assert first.wait()[0] == 0
    steps = [row["step"] for row in read_metrics(out) if row["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    more = replace(run, steps=steps[-1] + 1)
    assert train(more, out, device="cpu", quiet=True, resume=True).step == steps[-1] + 1


def test_copies_beside_checkpoints_are_left_alone(trained: Path) -> None:
    for kind in ("best", "step"):
        source = next(iter((trained / "checkpoints").glob(f"{kind}-*")))
        shutil.copytree(source, trained / "checkpoints" / f"{kind}-keep")
    resume(trained, 20)
    names = {p.name for p in (trained / "checkpoints").iterdir()}
    assert {"best-keep", "step-keep", "step-00000020", "step-00000015"} <= names
    assert find(trained).name.removeprefix("best-").isdecimal()
    assert find(trained, "last").name == "step-00000020"


def test_weights_that_go_bad_stop_the_run_and_the_best_stay(tmp_path: Path) -> None:
    """The gradient's norm, or an evaluation, may be infinite before a loss is."""
    optim = {"lr": 100.0, "min_lr": 0.0, "warmup_steps": 1}
    every = {"eval_every": 2, "checkpoint_every": 1000, "log_every": 5}
    with pytest.raises(TrainingStopped, match=r"is (inf|nan) after step|is not finite at step"):
        train(small_run(steps=300, optim=optim, train=every), tmp_path, device="cpu", quiet=True)
    assert any(row["kind"] == "eval" for row in read_metrics(tmp_path))
    assert find(tmp_path).name.startswith("best-")


def test_no_checkpoint_left_is_not_a_new_beginning(trained: Path) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    for folder in (trained / "checkpoints").glob("step-*"):
        (folder / "trainer.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"no checkpoint of .* is whole any more"):
        resume(trained)
    assert (trained / "metrics.jsonl").read_bytes() == before
    load(trained)  # the best weights


@pytest.mark.parametrize(
    "damage", [b"garbage", b"null", b"5", b"{}", b"\xff\xfe", b'{"kind": 1, "step": 2}']
)
def test_damaged_metrics_are_named_and_kept(damage: bytes, trained: Path) -> None:
    path = trained / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, *lines[2:]]) + b"\n")
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"metrics.jsonl is damaged: line 2"):
        resume(trained)
    assert path.read_bytes() == before


def test_model_is_not_saved_over_other_files(tmp_path: Path) -> None:
    model = Transformer(model_for(TASK, "small", layers=1, heads=1, width=8))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    with pytest.raises(InputError, match=r"other files than a model's, such as notes\.txt"):
        save_model(model, tmp_path / "mine")
    assert (tmp_path / "mine/notes.txt").read_text() == "precious"
    for _ in range(2):  # into an empty folder, and over a model
        (tmp_path / "new").mkdir(exist_ok=True)
        save_model(model, tmp_path / "new")


@dataclass(frozen=True)
class Silent(Count3):
    """Count3 without targets in every second sequence, and in all of the third batch."""

    name: ClassVar[str] = "silent"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        batch.y[:: 1 if step == 2 else 2] = IGNORE
        return batch


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_batch_without_targets_has_no_loss(
    mode: Literal["entp", "decoder"], tmp_path: Path
) -> None:
    run = small_run(task=Silent(4, 10, 10), mode=mode, steps=4)
    result = train(run, tmp_path, device="cpu", quiet=True)
    rows = [row for row in read_metrics(tmp_path) if row["kind"] == "train"]
    assert [row["loss"] == 0 for row in rows] == [False, False, True, False]
    assert [row["grad_norm"] == 0 for row in rows] == [False, False, True, False]
    assert result.metrics["n"] == 2 * run.batch_size // 2


def test_positions_set_by_hand_are_not_trained(tmp_path: Path) -> None:
    run = Run(TASK, model_for(TASK, "small", position_embedding="given"))
    with pytest.raises(InputError, match=r"model\.position_embedding given is for tables set by"):
        train(run, tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


OWN_TASK = """
from dataclasses import dataclass
from typing import ClassVar
from entp.tasks.counting import Count3

@dataclass(frozen=True)
class Mine(Count3):
    name: ClassVar[str] = "mine"
"""


def test_run_of_an_own_task_is_exported(tmp_path: Path) -> None:
    """Each command is a process of its own, which has not imported the task before."""
    (tmp_path / "tasks_of_mine.py").write_text(OWN_TASK)

    def command(*words: str) -> tuple[int, str]:
        def work() -> int:
            sys.path.insert(0, str(tmp_path))
            return main([*words, "--device=cpu"])

        return start(work, tmp_path).wait()

    flags = [*FLAGS, "--steps=2", "--batch-size=4", "--optim.warmup-steps=1", "--out=run"]
    code, said = command("train", "tasks_of_mine:Mine", *flags)
    assert code == 0, said
    words = ("export", "run", "--out=small", "--test-sequences=8")
    code, said = command(*words)
    assert (code, "which is not built in: import it first" in said) == (2, True), said
    code, said = command(*words, "--task=tasks_of_mine:Mine")
    assert code == 0, said
    assert all(bool(torch.isfinite(p).all()) for p in load(tmp_path / "small").parameters())


@dataclass(frozen=True)
class Rough(Count3):
    """Count3 as people write tasks: other types of numbers, views, and targets of any size."""

    name: ClassVar[str] = "rough"
    beyond: int = 0

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        y = np.where(batch.y == IGNORE, IGNORE, batch.y + self.beyond)
        return Batch(batch.x[:, ::-1].astype(np.int16)[:, ::-1], y.astype(np.int32))


def test_numbers_of_any_type_train_alike(ten: Path, tmp_path: Path) -> None:
    rough = small_run(task=Rough(prompt_length=4, length=10, num_values=10), steps=5)
    train(rough, tmp_path / "rough", device="cpu", quiet=True)
    losses = [[row["loss"] for row in read_metrics(out)] for out in (tmp_path / "rough", ten)]
    assert losses[0] == losses[1][: len(losses[0])]
    for beyond, first in ((2, 10), (-1, -1)):
        task = Rough(prompt_length=4, length=10, num_values=10, beyond=beyond)
        told = rf"rough has the target {first}: targets are 0 to 9, or -100 where there is none"
        with pytest.raises(InputError, match=told):
            train(replace(rough, task=task), tmp_path / "beyond", device="cpu", quiet=True)
    assert not (tmp_path / "beyond").exists()


@dataclass(frozen=True)
class Beyond(Count3):
    """Has tokens that the model does not know; as padding alone, they are nobody's."""

    name: ClassVar[str] = "beyond"
    padding: bool = False

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        x, y = batch.x.copy(), batch.y.copy()
        x[:, -1], y[:, -1] = 99, IGNORE
        lengths = np.full(size, x.shape[1] - 1) if self.padding else None
        return Batch(x, y, lengths)


def test_unknown_tokens_are_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    run = small_run(task=Beyond(prompt_length=4, length=10, num_values=10), steps=2)
    with pytest.raises(InputError, match=r"beyond has the token 99: the model has .* 0 to 9\."):
        train(run, tmp_path / "out", device="cpu", quiet=True)
    assert not (tmp_path / "out").exists()
    padded = replace(run, task=replace(run.task, padding=True))  # type: ignore[call-arg]
    assert train(padded, tmp_path / "out", device="cpu", quiet=True).step == 2


def test_file_behind_a_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"new"


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "sums", ["{}", "5", "null", "[]", '["model.safetensors", "config.json", "trainer.pt"]', DEEP]
)
def test_checkpoint_without_its_checksums_is_damaged(
    sums: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = find(trained, "last")
    (last / "checksums.json").write_text(sums)
    assert find(trained, "last").name == "step-00000005"
    assert f"checkpoint {last} is damaged" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"step-00000010 is damaged"):
        load(last)


def test_trainer_state_without_a_checksum_is_damaged(trained: Path) -> None:
    last = find(trained, "last")
    sums = json.loads((last / "checksums.json").read_text())
    del sums["trainer.pt"]
    (last / "checksums.json").write_text(json.dumps(sums))
    assert find(trained, "last").name == "step-00000005"


@pytest.mark.parametrize(
    "damage", ["{", "5", "null", "[]", '{"device": 5}', '{"resumed": 5}', '{"resumed": [5]}', DEEP]
)
def test_damaged_environment_is_named_and_kept(damage: str, trained: Path, tmp_path: Path) -> None:
    path = trained / "environment.json"
    path.write_text(damage)
    fork = tmp_path / "fork"
    uses: list[Callable[[], object]] = [
        lambda: resume(trained),
        lambda: train(small_run(steps=11), fork, device="cpu", quiet=True, fork=trained),
        lambda: export(trained, tmp_path / "small", test_sequences=8),
    ]
    for use in uses:
        told = r"run/environment\.json is damaged \(.*\): repair or remove it"
        with pytest.raises(InputError, match=told):
            use()
    assert path.read_text() == damage


def test_removed_environment_is_written_anew(trained: Path) -> None:
    (trained / "environment.json").unlink()
    resume(trained)
    written = json.loads((trained / "environment.json").read_text())
    assert {"device", "torch", "date"} <= set(written)


def test_config_nested_too_deeply_is_an_error(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / "config.json").write_text(DEEP)
    assert main(["train", "count3", "--resume", f"--out={trained}"]) == 2
    assert "config.json cannot be read: it is nested too deeply" in capsys.readouterr().err
    (trained / "metrics.jsonl").write_text(f"{DEEP}\n{DEEP}\n")
    with pytest.raises(InputError, match=r"metrics.jsonl is damaged: line 1"):
        read_metrics(trained)
