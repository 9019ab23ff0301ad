"""`entp export`: the weights as they lie on disk are the weights that were measured, and the folder
says how they were made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import TASK, small_run

from entp import pretrained
from entp.cli.main import main
from entp.model import Transformer
from entp.training.checkpoint import load, load_run, save_model
from entp.training.evaluate import evaluate, untouched_batches
from entp.training.export import export
from entp.training.forward import Forward
from entp.training.loggers import read_metrics
from entp.training.trainer import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps, measured and saved between the lines of metrics. To be read only."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(small_run(train={"log_every": 4}), folder, device="cpu", quiet=True)
    return folder


def test_exported_weights_are_those_that_were_measured(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    words = [str(trained), f"--out={out}", "--test-sequences=60", "--device=cpu"]
    assert main(["export", *words]) == 0
    assert "in bf16" in capsys.readouterr().out
    tensors = load_file(out / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    model, run = load(out), load_run(out)
    assert run == small_run(train={"log_every": 4})
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    pairs = zip(model.parameters(), load(trained).parameters(), strict=True)
    assert all(torch.equal(p, q.bfloat16().float()) for p, q in pairs)
    made = json.loads((out / "made.json").read_text())
    batches = untouched_batches(run.task, 60, run.batch_size, run.seed)
    values = evaluate(model, run.task, batches, Forward.of(run)).values()
    assert values["n"] == 64
    assert {name: made["test"][name] for name in values} == pytest.approx(values, rel=1e-6)
    for name in ("exact_match", "token_accuracy", "loss"):
        low, high = made["test"][f"{name}_interval"]
        assert low <= values[name] <= high
    assert made["parameters"] == sum(p.numel() for p in model.parameters())
    told = made["training"]["environment"].keys() & made["measured"].keys()
    assert {"commit", "date", "device", "torch"} <= told


def test_exported_weights_have_their_own_time(trained: Path, tmp_path: Path) -> None:
    """Also where they are not those of the last line of metrics, as after damage."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    seconds = {row["step"]: row["seconds"] for row in read_metrics(run)}
    assert seconds[4] < seconds[5] < seconds[8] < seconds[10]
    for step in (10, 5):
        made = export(run, tmp_path / f"small{step}", checkpoint="last", test_sequences=8)
        assert made["checkpoint"] == f"step-{step:08d} in bf16"
        assert (made["training"]["step"], made["training"]["seconds"]) == (step, seconds[step])
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")


def test_weights_alone_can_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, source, out = small_run(), tmp_path / "alone", tmp_path / "out"
    save_model(Transformer(run.model), source, run)
    made = export(source, out, dtype="fp32", test_sequences=8)
    assert "will not say how" in capsys.readouterr().err
    assert made["training"] == {}
    assert all(map(torch.equal, load(out).parameters(), load(source).parameters()))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing", "--out=new"], "there is no run folder nothing"),
        (["RUN", "--out=old"], "old exists: give --out a new folder"),
        (["RUN", "--out=new", "--test-sequences=0"], "--test-sequences is 0"),
        (["RUN"], "--out"),
        ([], "needs a run folder"),
    ],
)
def test_invalid_export_is_refused(
    words: list[str],
    told: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    assert main(["export", *(str(trained) if word == "RUN" else word for word in words)]) == 2
    assert told in capsys.readouterr().err
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
