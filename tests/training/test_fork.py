"""A run that begins with another's checkpoint: the same steps with the same settings, and others
from there on with others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import TASK, small_run

from entp.config import CurriculumConfig, EmaConfig, ImportanceConfig, Run, model_for
from entp.config.mode import CurriculumMode
from entp.errors import InputError
from entp.tasks.counting import Count2
from entp.training.checkpoint import find, load, read_trainer
from entp.training.loggers import read_metrics
from entp.training.run_folder import read_fork, write_fork
from entp.training.techniques import importance_sampling
from entp.training.techniques.importance_sampling import ImportanceSampling
from entp.training.trainer import Result, train


def fit(run: Run, out: Path, **options: Any) -> Result:
    return train(run, out, device="cpu", quiet=True, **options)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of `small_run()`. To be read only."""
    out = tmp_path_factory.mktemp("runs") / "half"
    fit(small_run(steps=5), out)
    return out


def same(a: Path, b: Path) -> bool:
    one, other = (load(path, "last").state_dict() for path in (a, b))
    return all(torch.equal(one[name], other[name]) for name in one)


def files(under: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(under.rglob("*")) if path.is_file()}


def trainer_of(out: Path) -> dict[str, Any]:
    return read_trainer(find(out, "last"))


KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "preconditioned muon": {"optim": {"name": "muon", "precondition_every": 2}},
    "ema": {"ema": EmaConfig(steps=4)},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_fork_with_the_same_settings_is_the_same_run(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    fit(small_run(**changes), tmp_path / "whole")
    fit(small_run(steps=5, **changes), tmp_path / "half")
    before = files(tmp_path / "half")
    fit(small_run(**changes), tmp_path / "fork", fork=tmp_path / "half")
    assert same(tmp_path / "whole", tmp_path / "fork")
    assert files(tmp_path / "half") == before
    whole, fork = (
        [(r["kind"], r["step"], r["loss"]) for r in read_metrics(tmp_path / name)]
        for name in ("whole", "fork")
    )
    assert [row for row in whole if row[:2] != ("eval", 5)] == fork
    told = json.loads((tmp_path / "fork/environment.json").read_text())
    assert (told["forked"]["run"], told["forked"]["step"], len(told["resumed"])) == ("half", 5, 1)


def test_evaluations_of_the_source_are_no_result_of_the_fork(half: Path, tmp_path: Path) -> None:
    """Neither does it count as having reached its goal, nor does it have a best."""
    goal = {"monitor": "loss", "stop_at": 10.0}
    assert read_metrics(half)[-1]["kind"] == "eval"
    result = fit(small_run(train=goal), tmp_path / "goal", fork=half)
    assert (result.step, result.reason) == (10, "loss reached 10")
    assert result.best["step"] == 10
    done = fit(small_run(steps=5, train={"monitor": "loss"}), tmp_path / "done", fork=half)
    assert (done.step, done.reason) == (5, "all steps done")
    (measured,) = (row for row in read_metrics(tmp_path / "done") if row["kind"] == "eval")
    assert done.best["step"] == measured["step"] == 5
    assert done.best["loss"] == done.metrics["loss"] == measured["loss"]
    assert find(tmp_path / "goal").name == "best-00000010"
    assert find(tmp_path / "done").name == "best-00000005"


def test_best_of_a_fork_is_its_own(half: Path, tmp_path: Path) -> None:
    """The best weights of the source are not copied: they do not count, however good they are."""
    worse = small_run(optim={"lr": 1.0, "min_lr": 0.9, "warmup_steps": 0})
    result = fit(replace(worse, train=replace(worse.train, monitor="loss")), tmp_path, fork=half)
    assert result.best["loss"] > read_metrics(half)[-1]["loss"]
    assert result.best["step"] == 10
    assert find(tmp_path).name == "best-00000010"


def test_sampled_targets_go_on_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importance_sampling, "PAYS_BELOW", 100.0)
    monkeypatch.setattr(importance_sampling, "RENEW", 4)
    chosen: dict[str, Any] = {"importance": ImportanceConfig()}
    fit(small_run(**chosen), tmp_path / "whole")
    fit(small_run(steps=5, **chosen), tmp_path / "half")
    fit(small_run(**chosen), tmp_path / "fork", fork=tmp_path / "half")
    assert same(tmp_path / "whole", tmp_path / "fork")
    others: dict[str, dict[str, Any]] = {
        "more": {"batch_size": 12, **chosen},
        "other": {"task": Count2(4, 10, 10), **chosen},
        "plain": {},
    }
    for name, changes in others.items():
        fit(small_run(steps=6, **changes), tmp_path / name, fork=tmp_path / "half")
        assert "importance" not in trainer_of(tmp_path / name)["techniques"]
    decoder = small_run(steps=6, importance=ImportanceConfig(20, "decoder"))
    fit(decoder, tmp_path / "decoder", fork=tmp_path / "half")
    assert trainer_of(tmp_path / "decoder")["techniques"]["importance"]["as_decoder"]


def test_fork_inside_a_curriculum_samples_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(steps=6, importance=ImportanceConfig(8, "decoder"))
    fit(run, tmp_path / "old")
    seen, choose = [], ImportanceSampling.choose

    def watched(self: ImportanceSampling, model: Any, how: Any, inputs: Any) -> Any:
        found = choose(self, model, how, inputs)
        seen.append((how.mode, found is not inputs))
        return found

    monkeypatch.setattr(ImportanceSampling, "choose", watched)
    modes: tuple[CurriculumMode, ...] = ("decoder", "random-prefix")
    for mode in modes:
        seen.clear()
        longer = replace(run, steps=12, curriculum=CurriculumConfig(steps=10, mode=mode))
        fit(longer, tmp_path / mode, fork=tmp_path / "old")
        assert seen == [(mode, False)] * 4 + [("entp", True)] * 2


SETTINGS = [("adamw", {"weight_decay": 0.5}), ("adamw", {"beta1": 0.5}), ("muon", {"lr": 1e-2})]


@pytest.mark.parametrize(("name", "optim"), SETTINGS, ids=str)
def test_other_settings_hold_from_the_fork_on(
    name: str, optim: dict[str, float], tmp_path: Path
) -> None:
    """Also those that an optimizer keeps beside its state."""
    fit(small_run(steps=2, optim={"name": name}), tmp_path / "half")
    for out, more in (("same", {}), ("other", optim)):
        run = small_run(steps=4, optim={"name": name, **more})
        fit(run, tmp_path / out, fork=tmp_path / "half")
    assert not same(tmp_path / "same", tmp_path / "other")
    first = [read_metrics(tmp_path / out)[:2] for out in ("half", "same", "other")]
    assert first[0] == first[1] == first[2]


def test_ema_may_begin_and_end_with_a_fork(half: Path, tmp_path: Path) -> None:
    fit(small_run(steps=6, ema=EmaConfig(steps=4)), tmp_path / "ema", fork=half)
    average = trainer_of(tmp_path / "ema")["techniques"]["ema"]["weights"]
    before, after = (load(out, "last").state_dict() for out in (half, tmp_path / "ema"))
    for name, weight in average.items():
        expected = before[name] + (after[name] - before[name]) / 4
        torch.testing.assert_close(weight, expected)
    fit(small_run(steps=7), tmp_path / "none", fork=tmp_path / "ema")
    assert trainer_of(tmp_path / "none")["techniques"] == {}


def test_fork_can_be_stopped_and_resumed(half: Path, tmp_path: Path) -> None:
    optim = {"lr": 1e-2}
    fit(small_run(optim=optim), tmp_path / "whole", fork=half)
    fit(small_run(steps=7, optim=optim), tmp_path / "parts", fork=half)
    fit(small_run(optim=optim), tmp_path / "parts", resume=True)
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_invalid_fork_is_refused_before_anything_is_written(half: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere holds no checkpoint to fork: give the --out"):
        fit(small_run(), tmp_path / "fork", fork=tmp_path / "nowhere")
    wide = model_for(TASK, "small", layers=2, heads=2, width=32)
    with pytest.raises(InputError, match=r"half cannot be forked: width was 16 and is now 32\."):
        fit(small_run(model=wide), tmp_path / "fork", fork=half)
    with pytest.raises(InputError, match=r"optimizer was 'adamw' and is now 'muon'"):
        fit(small_run(optim={"name": "muon"}), tmp_path / "fork", fork=half)
    assert not (tmp_path / "fork").exists()
    before = files(half)
    with pytest.raises(InputError, match="already holds a run"):
        fit(small_run(), half, fork=half)
    with pytest.raises(InputError, match="give one of them"):
        fit(small_run(), half, resume=True, fork=half)
    assert files(half) == before


def test_half_written_fork_is_neither_started_nor_resumed(half: Path, tmp_path: Path) -> None:
    """As a kill leaves it: config.json is written last."""
    out = tmp_path / "fork"
    write_fork(small_run(), read_fork(small_run(), half), out)
    with pytest.raises(InputError, match=r"fork holds checkpoints without config\.json"):
        fit(small_run(), out, fork=half)
    with pytest.raises(InputError, match="holds no run to resume"):
        fit(small_run(), out, resume=True)
