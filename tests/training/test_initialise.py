"""A run that begins with the weights of another, at step 0 and with a new optimizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FLAGS, Parity, fit, small_run

from entp.cli.main import main
from entp.config import EmaConfig, Run, model_for
from entp.config.json import config_hash, run_from_json, run_to_json
from entp.errors import InputError
from entp.model import Transformer
from entp.training.checkpoint import find, load, load_run, save_model
from entp.training.initialise import Init, init_from, load_init, read_init, weights_hash, with_init
from entp.training.loggers import read_metrics


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of `small_run()`. To be read only."""
    out = tmp_path_factory.mktemp("runs") / "source"
    fit(small_run(), out)
    return out


def parity_run(**changes: Any) -> Run:
    shape = {"layers": 2, "heads": 2, "width": 16}
    task = Parity()
    return small_run(task=task, model=model_for(task, "small", **shape), **changes)


def first_loss(out: Path) -> float:
    return next(row["loss"] for row in read_metrics(out) if row["kind"] == "train")


def test_run_begins_with_the_weights_at_step_0(source: Path, tmp_path: Path) -> None:
    """A learning rate of almost nothing leaves them as they are."""
    still = {"lr": 1e-30, "min_lr": 0.0, "weight_decay": 0.0}
    result = fit(small_run(steps=2, optim=still), tmp_path / "a", init=read_init(source))
    assert result.step == 2
    began, ended = load(source).state_dict(), load(tmp_path / "a").state_dict()
    assert all(torch.equal(began[name], ended[name]) for name in began)
    fit(small_run(steps=2, optim=still), tmp_path / "b")
    assert not torch.equal(load(tmp_path / "b").state_dict()["positions"], began["positions"])


def test_technique_begins_with_the_weights_too(source: Path, tmp_path: Path) -> None:
    still = {"lr": 1e-30, "min_lr": 0.0, "weight_decay": 0.0}
    run = small_run(steps=5, optim=still, ema=EmaConfig(steps=4))
    fit(run, tmp_path, init=read_init(source))
    began, ended = load(source).state_dict(), load(tmp_path, "best").state_dict()
    torch.testing.assert_close(ended, began)


def test_run_folder_records_what_it_began_with(source: Path, tmp_path: Path) -> None:
    init = read_init(source)
    fit(small_run(steps=2), tmp_path / "out", init=init)
    told = json.loads((tmp_path / "out/environment.json").read_text())["init"]
    step = int(find(source).name.rpartition("-")[2])
    weights = weights_hash(load(source).state_dict())
    assert told == {
        "run": "source",
        "step": step,
        "config": config_hash(load_run(source)),
        "weights": weights,
    }
    assert load_run(tmp_path / "out").init == weights[:16]


def test_identity_changes_with_the_weights(source: Path) -> None:
    run = small_run()
    begun = with_init(run, read_init(source))
    other = load(source).state_dict()
    other["positions"] = other["positions"] + 1
    changed = with_init(run, init_from(other, run.model, run="x"))
    assert len({config_hash(one) for one in (run, begun, changed)}) == 3
    assert run_from_json(run_to_json(begun)) == begun


@pytest.mark.parametrize("init", ["abc", "x" * 16, 1234567890123456])
def test_wrong_init_of_a_run_is_refused(init: Any) -> None:
    with pytest.raises(InputError, match="it must be 16 hexadecimal digits, or empty"):
        small_run(init=init)


def test_classification_has_a_new_head_and_says_so(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = {"lr": 1e-30, "min_lr": 0.0, "weight_decay": 0.0}
    fit(parity_run(steps=2, optim=still), tmp_path, init=read_init(source), quiet=False)
    assert "The output head is new: 2 outputs, from random weights." in capsys.readouterr().err
    began, ended = load(source).state_dict(), load(tmp_path).state_dict()
    assert set(ended) - set(began) == {"head.weight", "head.bias"}
    assert all(torch.equal(began[name], ended[name]) for name in began)
    assert ended["head.weight"].std() > 0.01


def test_head_of_the_same_shape_is_kept(tmp_path: Path) -> None:
    model = Transformer(parity_run().model)
    save_model(model, tmp_path / "model")
    other = Transformer(model.config)
    assert load_init(other, read_init(tmp_path / "model")) == ""
    assert torch.equal(other.state_dict()["head.weight"], model.state_dict()["head.weight"])


def test_head_that_is_not_needed_is_left_out(tmp_path: Path) -> None:
    model = Transformer(parity_run().model)
    other = Transformer(small_run().model)
    init = init_from(model.state_dict(), model.config)
    assert load_init(other, init).startswith("The output head is the token embedding")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"width": 32}, r"model\.width is 16 there and 32 here"),
        ({"layers": 1}, r"model\.layers is 2 there and 1 here"),
        ({"context_length": 12}, r"model\.context_length is 10 there and 12 here"),
        ({"activation": "relu"}, r"model\.activation is gelu there and relu here"),
    ],
)
def test_other_model_is_refused(
    source: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    run = small_run()
    other = replace(run, model=replace(run.model, **change))
    with pytest.raises(InputError, match=f"{told}. Only the output head may differ"):
        fit(other, tmp_path / "out", init=read_init(source))
    assert not (tmp_path / "out").exists()


def test_length_may_differ_where_positions_have_no_weights() -> None:
    run = small_run()
    model = replace(run.model, position_embedding="rotary")
    init = init_from(Transformer(model).state_dict(), model)
    longer = replace(run, model=replace(model, context_length=50))
    assert with_init(longer, init).init == init.name


def test_incomplete_weights_are_refused() -> None:
    model = Transformer(small_run().model)
    weights = {name: t for name, t in model.state_dict().items() if name != "positions"}
    with pytest.raises(InputError, match="have no positions: they are incomplete"):
        load_init(model, Init(weights, model.config, {}))


def test_resumed_run_needs_no_init_after_its_first_checkpoint(source: Path, tmp_path: Path) -> None:
    init = read_init(source)
    fit(small_run(), tmp_path / "whole", init=init)
    fit(small_run(steps=5), tmp_path / "half", init=init)
    fit(with_init(small_run(), init), tmp_path / "half", resume=True)
    whole, half = (load(tmp_path / name, "last").state_dict() for name in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)


def test_resumed_run_without_checkpoint_asks_for_its_weights(source: Path, tmp_path: Path) -> None:
    init = read_init(source)
    run = with_init(small_run(steps=2), init)
    (tmp_path / "config.json").write_text(json.dumps(run_to_json(run)))
    with pytest.raises(InputError, match=f"begins with the weights {init.name}.*give --init"):
        fit(run, tmp_path, resume=True)
    other = init_from(Transformer(run.model).state_dict(), run.model)
    with pytest.raises(InputError, match=f"begins with the weights {init.name}, and those given"):
        fit(run, tmp_path, resume=True, init=other)
    fit(run, tmp_path, resume=True, init=init)
    fit(run, tmp_path / "again", init=init)
    assert first_loss(tmp_path) == first_loss(tmp_path / "again")


def test_init_and_fork_exclude_each_other(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="init and fork both say"):
        fit(small_run(), tmp_path / "out", init=read_init(source), fork=source)


def test_command_line_takes_model_and_mode_from_the_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = ["train", "count2", f"--init={source}", "--out=next", *FLAGS[:3]]
    assert main([*begin, "--steps=2", "--batch-size=8", "--device=cpu"]) == 0
    run = load_run("next")
    assert (run.model, run.mode) == (small_run().model, "entp")
    assert run.init == read_init(source).name
    again = ["train", "count2", "--resume", "--out=next", "--steps=3", "--device=cpu"]
    assert main(again) == 0
    assert load_run("next").init == run.init


def test_command_line_refuses_a_folder_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    assert main(["train", "count3", f"--init={missing}", f"--out={tmp_path / 'next'}"]) == 2
    assert f"there is no run folder {missing} to begin with" in capsys.readouterr().err
    assert not (tmp_path / "next").exists()
