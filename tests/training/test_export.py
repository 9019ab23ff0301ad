"""`entp export`: the weights as they lie on disk are the weights that were measured, and the folder
says how they were made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import TASK, entp, small_run

from entp import pretrained
from entp.model import Transformer
from entp.training.checkpoint import load, load_run, save_model
from entp.training.evaluate import evaluate, fresh_batches
from entp.training.export import export
from entp.training.loggers import read_metrics
from entp.training.trainer import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(small_run(), folder, device="cpu", quiet=True)
    return folder


def test_what_is_exported_is_what_was_measured(trained: Path, tmp_path: Path) -> None:
    done = entp("export", str(trained), "--out=small", "--fresh=64", "--device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bf16" in done.stdout
    made = json.loads((tmp_path / "small/made.json").read_text())
    tensors = load_file(tmp_path / "small/model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    model, run = load(tmp_path / "small"), load_run(tmp_path / "small")
    assert run == small_run()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = load(trained)
    assert all(
        torch.equal(p, q.bfloat16().float())
        for p, q in zip(model.parameters(), before.parameters(), strict=True)
    )
    values = evaluate(model, run, batches=fresh_batches(run, 64))
    close = pytest.approx(
        values, rel=1e-6
    )  # the other process has one thread: fp32 sums in another order
    assert {name: made["fresh"][name] for name in values} == close
    low, high = made["fresh"]["exact_match_interval"]
    assert low <= made["fresh"]["exact_match"] <= high
    assert made["training"]["step"] in (5, 10)
    assert made["training"]["seconds"] > 0
    assert {"commit", "date", "device", "torch"} <= made["training"]["environment"].keys() & made[
        "measured"
    ].keys()
    assert made["parameters"] == sum(p.numel() for p in model.parameters())


def test_the_last_weights_are_exported_with_their_own_time(trained: Path, tmp_path: Path) -> None:
    """Also where they are not those of the last line of metrics, as after damage."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    seconds = {row["step"]: row["seconds"] for row in read_metrics(run) if row["kind"] == "train"}
    for step in (10, 5):
        made = export(run, tmp_path / f"small{step}", which="last", fresh=8)
        assert made["weights"] == f"step-{step:08d} in bf16"
        assert (made["training"]["step"], made["training"]["seconds"]) == (step, seconds[step])
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")


def test_weights_alone_can_be_exported(tmp_path: Path) -> None:
    run = small_run()
    save_model(Transformer(run.model), tmp_path / "alone", run)
    done = entp(
        "export", "alone", "--out=out", "--dtype=fp32", "--fresh=8", "--device=cpu", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "will not say how" in done.stderr
    assert all(
        map(torch.equal, load(tmp_path / "out").parameters(), load(tmp_path / "alone").parameters())
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing", "--out=new"], "there is no run folder nothing"),
        (["RUN", "--out=old"], "old exists: give --out a new folder"),
        (["RUN", "--out=new", "--fresh=0"], "--fresh is 0"),
        (["RUN"], "--out"),
        ([], "needs a run folder"),
    ],
)
def test_what_cannot_be_exported_is_a_sentence(
    words: list[str], told: str, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    done = entp(
        "export", *(str(trained) if word == "RUN" else word for word in words), cwd=tmp_path
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_models_that_come_with_entp_are_found_by_name(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run()
    save_model(load(trained), tmp_path / "here" / "count3-tiny", run)
    monkeypatch.setattr(pretrained, "HERE", tmp_path / "here")
    assert pretrained.names() == ["count3-tiny"]
    assert load_run("count3-tiny") == run
    x = torch.from_numpy(TASK.batch(0, "test", 0, 2).x)
    assert torch.equal(load("count3-tiny")(x), load(trained)(x))
    with pytest.raises(ValueError, match="or one of count3-tiny"):
        load("count3-small")
