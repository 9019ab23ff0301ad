"""What people and machines do to a run folder: a second process, copies, damage, weights that go
bad, targets that are met."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from small_runs import FLAGS, TASK, entp, small_run, start_entp

from entp.cli.main import main
from entp.config import ModelConfig, OptimConfig, Run, StartConfig, model_for
from entp.errors import InputError, TrainingStopped
from entp.model import Transformer
from entp.tasks.base import IGNORE, Batch, Split, Task
from entp.tasks.counting import Count3
from entp.training import step
from entp.training.checkpoint import find, load, save_model, write_file
from entp.training.evaluate import evaluate
from entp.training.export import export
from entp.training.loggers import read_metrics
from entp.training.trainer import train


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    train(small_run(), tmp_path / "run", device="cpu", quiet=True)
    return tmp_path / "run"


def test_a_second_process_is_sent_away(tmp_path: Path) -> None:
    many = [
        *FLAGS,
        "--batch_size=8",
        "--steps=100000",
        "--train.log-every=1",
        "--train.checkpoint-every=5",
        "--device=cpu",
    ]
    first = start_entp("train", "count3", *many, "--out=run", cwd=tmp_path)
    try:
        while not list((tmp_path / "run/checkpoints").glob("step-*")):
            assert first.poll() is None
        second = entp("train", "count3", "--resume", "--out=run", "--device=cpu", cwd=tmp_path)
        assert (second.returncode, second.stderr.count("\n")) == (2, 1), second.stderr
        assert "run is being trained by another process" in second.stderr
        assert first.poll() is None
    finally:
        first.terminate()
        first.communicate(timeout=60)
    steps = [row["step"] for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    more = entp(
        "train",
        "count3",
        "--resume",
        "--out=run",
        f"--steps={steps[-1] + 1}",
        "--device=cpu",
        cwd=tmp_path,
    )
    assert more.returncode == 0, more.stderr


def test_copies_beside_checkpoints_are_left_alone(trained: Path) -> None:
    for kind in ("best", "step"):
        source = next(iter((trained / "checkpoints").glob(f"{kind}-*")))
        shutil.copytree(source, trained / "checkpoints" / f"{kind}-keep")
    train(small_run(steps=20), trained, device="cpu", quiet=True, resume=True)
    names = {p.name for p in (trained / "checkpoints").iterdir()}
    assert {"best-keep", "step-keep", "step-00000020", "step-00000015"} <= names
    assert find(trained).name.removeprefix("best-").isdecimal()
    assert find(trained, "last").name == "step-00000020"


def test_a_target_that_was_reached_is_not_passed_again(tmp_path: Path) -> None:
    run = small_run(train={"target": 0.0})
    first = train(run, tmp_path / "run", device="cpu", quiet=True)
    again = train(run, tmp_path / "run", device="cpu", quiet=True, resume=True)
    assert (first.step, again.step, "had reached 0" in again.reason) == (5, 5, True)
    assert (again.metrics, again.best) == (first.metrics, first.best)
    higher = replace(run, train=replace(run.train, stop_at=1.0))
    assert train(higher, tmp_path / "run", device="cpu", quiet=True, resume=True).step == 10


def test_weights_that_go_bad_stop_the_run_and_the_best_stay(tmp_path: Path) -> None:
    """The gradient's norm, or an evaluation, may be infinite before a loss is."""
    optim = {"max_lr": 100.0, "min_lr": 0.0, "warmup": 1}
    run = small_run(
        steps=300, optim=optim, train={"eval_every": 2, "checkpoint_every": 1000, "log_every": 5}
    )
    with pytest.raises(TrainingStopped, match=r"is (inf|nan) after step|is not finite at step"):
        train(run, tmp_path / "run", device="cpu", quiet=True)
    assert any(row["kind"] == "eval" for row in read_metrics(tmp_path / "run"))
    assert find(tmp_path / "run").name.startswith("best-")


def test_no_checkpoint_left_is_not_a_new_beginning(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    for folder in (trained / "checkpoints").glob("step-*"):
        (folder / "trainer.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"no checkpoint of .* is whole any more"):
        train(small_run(steps=20), trained, device="cpu", quiet=True, resume=True)
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
        train(small_run(steps=20), trained, device="cpu", quiet=True, resume=True)
    assert path.read_bytes() == before


def test_a_model_is_not_saved_over_other_things(tmp_path: Path) -> None:
    model = Transformer(model_for(TASK, "small", layers=1, heads=1, width=8))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    with pytest.raises(
        InputError, match=r"mine holds other files than a model's, such as notes\.txt"
    ):
        save_model(model, tmp_path / "mine")
    assert (tmp_path / "mine/notes.txt").read_text() == "precious"
    for _ in range(2):  # over a model, and into an empty folder
        (tmp_path / "new").mkdir(exist_ok=True)
        save_model(model, tmp_path / "new")


def test_the_page_is_not_written_over_a_record(tmp_path: Path) -> None:
    (tmp_path / "count3.json").write_text("{}")
    done = entp("report", "--results=.", "--out=count3.json", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n"), "ends with .md" in done.stderr) == (
        2,
        1,
        True,
    ), done.stderr
    assert (tmp_path / "count3.json").read_text() == "{}"


def test_a_fork_inside_a_start_chooses_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(steps=6, optim={"take": 8})
    train(run, tmp_path / "old", device="cpu", quiet=True)
    modes, choose = [], step._choose

    def seen(run: Run, *rest: Any) -> Any:
        modes.append(run.mode)
        return choose(run, *rest)

    monkeypatch.setattr(step, "_choose", seen)
    kinds: tuple[Literal["decoder", "prefixes"], ...] = ("decoder", "random-prefix")
    for mode in kinds:
        modes.clear()
        longer = replace(run, steps=12, start=StartConfig(steps=10, mode=mode))
        train(longer, tmp_path / mode, device="cpu", quiet=True, fork=tmp_path / "old")
        assert modes == ["entp", "entp"]


@dataclass(frozen=True)
class Silent(Count3):
    """Count3 that asks nothing of every second sequence, or of any in some batches."""

    name: ClassVar[str] = "silent"
    batches: tuple[int, ...] = ()

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        batch.y[:: 1 if step in self.batches else 2] = IGNORE
        return batch


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_batches_without_targets(mode: Literal["entp", "decoder"], tmp_path: Path) -> None:
    task = Silent(prompt_length=4, length=10, num_values=10, batches=(2,))
    run = small_run(task=task, mode=mode)
    train(run, tmp_path / "run", device="cpu", quiet=True)
    model = load(tmp_path / "run")
    values = evaluate(model, run, batches=2)
    assert values["n"] == 2 * run.batch_size // 2
    batches = [task.batch(0, "valid", n, 8) for n in range(2)]
    halves = [Batch(b.x[1::2], b.y[1::2]) for b in batches]
    assert evaluate(model, run, batches=halves) == pytest.approx(values)
    with pytest.raises(InputError, match="no sequence of these batches of silent has a target"):
        evaluate(model, run, batches=[task.batch(0, "valid", 2, 8)])


@dataclass(frozen=True)
class Pairs(Task):
    """Two numbers to be predicted at once, which the loss does not do."""

    name: ClassVar[str] = "pairs"
    loss: ClassVar[Literal["cross_entropy", "squared_error"]] = "squared_error"

    def model_needs(self) -> dict[str, Any]:
        return {"context_length": 6, "input_dim": 2, "outputs": 2}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).normal(size=(size, 6, 2)).astype(np.float32)
        return Batch(x, x[..., 0])


REFUSED: dict[str, tuple[Callable[[], Run], str]] = {
    "two outputs": (
        lambda: Run(Pairs(), ModelConfig(**Pairs().model_needs(), layers=1, heads=1, width=8)),
        r"model\.outputs is 2: squared_error is of one number",
    ),
}


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_runs_that_would_train_something_else_are_refused(
    make: Callable[[], Run], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        make()


def test_positions_set_by_hand_are_not_trained(tmp_path: Path) -> None:
    run = Run(TASK, model_for(TASK, "small", position_embedding="given"))
    with pytest.raises(InputError, match=r"model\.position_embedding given is for tables set by hand"):
        train(run, tmp_path / "run", device="cpu", quiet=True)


PARITY = """
from dataclasses import dataclass
from typing import ClassVar
from entp.tasks.counting import Count3

@dataclass(frozen=True)
class Mine(Count3):
    name: ClassVar[str] = "mine"
"""


def test_a_run_of_a_task_of_ones_own_is_exported(tmp_path: Path) -> None:
    (tmp_path / "tasks_of_mine.py").write_text(PARITY)
    flags = [*FLAGS, "--steps=2", "--batch_size=4", "--optim.warmup_steps=1", "--device=cpu", "--out=run"]
    done = entp("train", "tasks_of_mine:Mine", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ("export", "run", "--out=small", "--fresh=8", "--device=cpu")
    assert entp(*words, cwd=tmp_path).returncode == 2
    done = entp(*words, "--task=tasks_of_mine:Mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
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


def test_numbers_of_any_type_train_alike(tmp_path: Path) -> None:
    rough = small_run(task=Rough(prompt_length=4, length=10, num_values=10))
    losses = [
        train(run, tmp_path / run.task.name, device="cpu", quiet=True).metrics
        for run in (rough, small_run())
    ]
    assert losses[0] == losses[1]
    for beyond, first in ((2, 10), (-1, -1)):
        task = Rough(prompt_length=4, length=10, num_values=10, beyond=beyond)
        with pytest.raises(
            InputError,
            match=rf"rough asks for {first}: targets are 0 to 9, or -100 where nothing is asked",
        ):
            train(replace(rough, task=task), tmp_path / "beyond", device="cpu", quiet=True)
    vectors = np.random.default_rng(0).normal(size=(2, 3, 4))
    assert Batch(vectors, vectors[..., 0]).x.dtype == np.float32
    with pytest.raises(InputError, match=r"x of shape \(2, 3, 4\) and y of \(2, 4\)"):
        Batch(vectors, vectors[:, 0])


def test_types_that_would_mean_something_else() -> None:
    with pytest.raises(InputError, match=r"optim\.select is 'no': it must be True or False"):
        OptimConfig(select="no")  # type: ignore[arg-type]
    model, x = (
        Transformer(model_for(TASK, "small", layers=1, heads=1, width=8)),
        torch.zeros(2, 3, dtype=torch.long),
    )
    for at in ([True, False, True], [1.7]):
        with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
            model(x, at=at)
    assert model(x, at=[np.int64(1)]).shape == model(x, at=torch.tensor([1])).shape


def test_resuming_the_default_folder_takes_its_settings(tmp_path: Path) -> None:
    flags = ["--batch_size=4", "--optim.warmup_steps=1", "--mode=decoder", "--device=cpu"]
    done = entp("train", "count3", *FLAGS, *flags, "--steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = entp(
        "train",
        "count3",
        "--resume",
        "--mode",
        "decoder",
        "--steps=4",
        "--device=cpu",
        cwd=tmp_path,
    )
    assert (done.returncode, "step 4/4" in done.stderr) == (0, True), done.stderr


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"new"


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "sums", ["{}", "5", "null", "[]", '["model.safetensors", "config.json", "trainer.pt"]', DEEP]
)
def test_a_checkpoint_without_its_checksums_is_damaged(
    sums: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = find(trained, "last")
    (last / "checksums.json").write_text(sums)
    assert find(trained, "last").name == "step-00000005"
    assert f"checkpoint {last} is damaged" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"step-00000010 is damaged"):
        load(last)


def test_a_trainer_state_without_a_checksum_is_damaged(trained: Path) -> None:
    last = find(trained, "last")
    sums = json.loads((last / "checksums.json").read_text())
    del sums["trainer.pt"]
    (last / "checksums.json").write_text(json.dumps(sums))
    assert find(trained, "last").name == "step-00000005"


@pytest.mark.parametrize(
    "damage", ["{", "5", "null", "[]", '{"device": 5}', '{"resumed": 5}', '{"resumed": [5]}', DEEP]
)
def test_a_damaged_environment_is_named_and_kept(
    damage: str, trained: Path, tmp_path: Path
) -> None:
    path = trained / "environment.json"
    path.write_text(damage)
    uses: list[Callable[[], object]] = [
        lambda: train(small_run(steps=20), trained, device="cpu", quiet=True, resume=True),
        lambda: train(
            small_run(steps=20), tmp_path / "fork", device="cpu", quiet=True, fork=trained
        ),
        lambda: export(trained, tmp_path / "small", fresh=8),
    ]
    for use in uses:
        with pytest.raises(
            InputError, match=r"run/environment\.json is damaged \(.*\): repair or remove it"
        ):
            use()
    assert path.read_text() == damage
    path.unlink()
    train(small_run(steps=20), trained, device="cpu", quiet=True, resume=True)
    assert {"device", "torch", "date"} <= set(json.loads(path.read_text()))


def test_a_config_nested_too_deeply_is_a_sentence(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / "config.json").write_text(DEEP)
    assert main(["train", "count3", "--resume", f"--out={trained}"]) == 2
    assert "config.json cannot be read: it is nested too deeply" in capsys.readouterr().err
    (trained / "metrics.jsonl").write_text(f"{DEEP}\n{DEEP}\n")
    with pytest.raises(InputError, match=r"metrics.jsonl is damaged: line 1"):
        read_metrics(trained)
