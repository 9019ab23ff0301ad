"""A run that begins with another's checkpoint: the same steps with the same settings, and others
from there on with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FLAGS, TASK, small_run
from small_runs import entp as command

import entp
from entp.config import model_for
from entp.errors import InputError
from entp.tasks.counting import Count2
from entp.training import checkpoint, folder, selection, step
from entp.training.loggers import read_metrics


def trained(out: Path, **changes: Any) -> None:
    entp.train(small_run(**changes), out, device="cpu", quiet=True)


def forked(source: Path, out: Path, **changes: Any) -> entp.training.trainer.Result:
    return entp.train(small_run(**changes), out, device="cpu", quiet=True, fork=source)


def same(a: Path, b: Path) -> bool:
    one, other = (entp.load(path, "last").state_dict() for path in (a, b))
    return all(torch.equal(one[name], other[name]) for name in one)


def files(under: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(under.rglob("*")) if path.is_file()}


KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "whitened muon": {"optim": {"name": "muon", "whiten": 2}},
    "mean of the weights": {"optim": {"average": 4}},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_with_the_same_settings_it_is_the_same_run(changes: dict[str, Any], tmp_path: Path) -> None:
    trained(tmp_path / "whole", **changes)
    trained(tmp_path / "half", steps=5, **changes)
    before = files(tmp_path / "half")
    forked(tmp_path / "half", tmp_path / "fork", **changes)
    assert same(tmp_path / "whole", tmp_path / "fork")
    assert files(tmp_path / "half") == before
    rows = [
        [(r["kind"], r["step"], r["loss"]) for r in read_metrics(tmp_path / name)]
        for name in ("whole", "fork")
    ]
    assert rows[0] == rows[1]
    told = json.loads((tmp_path / "fork" / "environment.json").read_text())
    assert (told["forked"]["run"], told["forked"]["step"], len(told["resumed"])) == ("half", 5, 1)


def test_what_is_chosen_goes_on_where_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "PAYS_BELOW", 100.0)
    monkeypatch.setattr(step, "RENEW", 4)
    chosen: dict[str, Any] = {"optim": {"select": True}}
    trained(tmp_path / "whole", **chosen)
    trained(tmp_path / "half", steps=5, **chosen)
    forked(tmp_path / "half", tmp_path / "fork", **chosen)
    assert same(tmp_path / "whole", tmp_path / "fork")
    others: dict[str, dict[str, Any]] = {
        "more": {"batch": 12},
        "other": {"task": Count2(4, 10, 10)},
    }
    for name, changes in others.items():
        forked(tmp_path / "half", tmp_path / name, steps=7, **changes, **chosen)
        assert "selection" not in checkpoint.read_trainer(
            tmp_path / name / "checkpoints/step-00000007"
        )
    forked(tmp_path / "half", tmp_path / "taken", steps=7, optim={"take": 20})
    assert checkpoint.read_trainer(tmp_path / "taken/checkpoints/step-00000007")["selection"][
        "as_decoder"
    ]
    forked(tmp_path / "half", tmp_path / "plain", steps=7)
    assert "selection" not in checkpoint.read_trainer(tmp_path / "plain/checkpoints/step-00000007")


@pytest.mark.parametrize(
    "optim", [{"weight_decay": 0.5}, {"max_lr": 1e-2}, {"beta1": 0.5}], ids=str
)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_other_settings_hold_from_there_on(
    name: str, optim: dict[str, float], tmp_path: Path
) -> None:
    """Also those that an optimizer keeps beside its state."""
    trained(tmp_path / "half", steps=5, optim={"name": name})
    forked(tmp_path / "half", tmp_path / "same", optim={"name": name})
    forked(tmp_path / "half", tmp_path / "other", optim={"name": name, **optim})
    assert not same(tmp_path / "same", tmp_path / "other")
    assert read_metrics(tmp_path / "same")[:2] == read_metrics(tmp_path / "other")[:2]


def test_a_mean_may_begin_with_it_and_end_with_it(tmp_path: Path) -> None:
    trained(tmp_path / "plain", steps=5)
    forked(tmp_path / "plain", tmp_path / "mean", optim={"average": 4})
    weights = entp.load(tmp_path / "plain", "last").state_dict()
    begun = checkpoint.read_trainer(checkpoint.newest(tmp_path / "mean") or tmp_path)["mean"]
    assert any(not torch.equal(begun[name], weights[name]) for name in weights)
    forked(tmp_path / "mean", tmp_path / "none", steps=12)
    assert "mean" not in checkpoint.read_trainer(checkpoint.newest(tmp_path / "none") or tmp_path)


def test_a_fork_can_be_stopped_and_resumed(tmp_path: Path) -> None:
    trained(tmp_path / "half", steps=5)
    optim = {"max_lr": 1e-2}
    forked(tmp_path / "half", tmp_path / "whole", optim=optim)
    forked(tmp_path / "half", tmp_path / "parts", steps=7, optim=optim)
    entp.train(small_run(optim=optim), tmp_path / "parts", device="cpu", quiet=True, resume=True)
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_the_best_is_its_own(tmp_path: Path) -> None:
    """The best weights of the other run are not copied, so they do not count."""
    trained(tmp_path / "half", steps=5)
    result = forked(tmp_path / "half", tmp_path / "fork")
    assert result.best["step"] > 5
    assert checkpoint.find(tmp_path / "fork").name == f"best-{int(result.best['step']):08d}"


def test_what_cannot_be_forked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere holds no checkpoint to fork: give the --out"):
        forked(tmp_path / "nowhere", tmp_path / "fork")
    trained(tmp_path / "run", steps=5)
    with pytest.raises(
        InputError,
        match=r"run cannot be forked: width was 16 and is now 32\. Its model and optimizer",
    ):
        forked(
            tmp_path / "run",
            tmp_path / "fork",
            model=model_for(TASK, "small", layers=2, heads=2, width=32),
        )
    with pytest.raises(InputError, match=r"optimizer was 'adamw' and is now 'muon'"):
        forked(tmp_path / "run", tmp_path / "fork", optim={"name": "muon"})
    assert not (tmp_path / "fork").exists()
    with pytest.raises(InputError, match="already holds a run"):
        forked(tmp_path / "run", tmp_path / "run")
    with pytest.raises(InputError, match="give one of them"):
        entp.train(small_run(), tmp_path / "run", device="cpu", resume=True, fork=tmp_path / "run")


def test_a_fork_that_was_killed_before_it_was_whole(tmp_path: Path) -> None:
    trained(tmp_path / "half", steps=5)
    folder.write_fork(
        small_run(), folder.read_fork(small_run(), tmp_path / "half"), tmp_path / "fork"
    )
    with pytest.raises(
        InputError,
        match=r"fork holds checkpoints without config\.json, as a killed fork leaves them",
    ):
        forked(tmp_path / "half", tmp_path / "fork")
    with pytest.raises(InputError, match="holds no run to resume"):
        entp.train(small_run(), tmp_path / "fork", device="cpu", quiet=True, resume=True)


def test_on_the_command_line(tmp_path: Path) -> None:
    """Settings that are not given are those of the run that is forked."""
    first = command(
        "train",
        "count3",
        *FLAGS,
        "--steps=6",
        "--batch_size=8",
        "--device=cpu",
        "--out=first",
        cwd=tmp_path,
    )
    assert first.returncode == 0, first.stderr
    changes = ["--steps=8", "--optim.max-lr=1e-2", "--device=cpu"]
    more = command("train", "count3", "--fork=first", "--out=second", *changes, cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "step 8," in more.stdout
    a, b = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second")
    )
    assert b == {**a, "steps": 8, "optim": {**a["optim"], "max_lr": 1e-2}}
    wrong = command("train", "count3", "--fork=none", "--out=third", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "none holds no checkpoint to fork" in wrong.stderr
