"""Runs beside each other, and beside recorded ones: real run folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_runs import entp, fit, small_run

from entp.errors import InputError
from entp.experiments.compare import compared_runs, comparison
from entp.experiments.recorded import against_recorded
from entp.files import parse_json
from entp.results.store import read_record, write_record
from entp.stats import prediction_interval
from entp.tasks.counting import Count2
from entp.training.loggers import read_metrics

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of a decoder and of ENTP, of 20 steps, and a decoder of another learning rate."""
    root = tmp_path_factory.mktemp("runs")
    every = {"eval_every": 5, "monitor": "loss"}
    for seed in SEEDS:
        for mode in ("entp", "decoder"):
            run = small_run(mode=mode, seed=seed, steps=20, train=every)
            fit(run, root / f"{mode}-{seed}")
    fit(small_run(mode="decoder", steps=30, optim={"lr": 0.02}, train=every), root / "fast")
    return root


def some(root: Path, *names: str) -> list[Path]:
    return [root / name for name in names]


def test_seeds_of_one_configuration_are_one_arm(runs: Path) -> None:
    names = [f"{mode}-{seed}" for mode in ("entp", "decoder") for seed in SEEDS]
    record = compared_runs(some(runs, *names))
    assert {label: arm.seeds for label, arm in record.arms.items()} == {
        "ENTP": [0, 1, 2],
        "decoder": [0, 1, 2],
    }
    best = [min(row["loss"] for row in evaluations(runs / f"entp-{seed}")) for seed in SEEDS]
    assert [run.best["loss"] for run in record.arms["ENTP"].runs] == best
    text = comparison(record)
    assert f"{sum(best) / 3:#.4g}" in text
    assert "160 sequences" in text  # 20 steps of 8
    assert text.splitlines()[0].split()[:3] == ["arm", "which", "seeds"]
    assert "0, 1, 2" in text.splitlines()[2]
    assert "FLOPs" in text


def evaluations(folder: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(folder) if row["kind"] == "eval"]


def test_arms_are_named_by_what_differs(runs: Path) -> None:
    record = compared_runs(some(runs, "decoder-0", "fast"))
    (one, factors), (other, more) = ((n, arm.factors) for n, arm in record.arms.items())
    assert set(factors) == set(more) == {"lr", "steps"}
    assert (more["lr"], more["steps"]) == (0.02, 30)
    assert "lr 0.02" in other
    assert "steps 20" in one


def test_longer_run_is_compared_at_as_many_sequences(runs: Path) -> None:
    text = comparison(compared_runs(some(runs, "decoder-0", "fast")))
    at_20 = next(row for row in evaluations(runs / "fast") if row["step"] == 20)["loss"]
    row = next(line for line in text.splitlines() if "160 sequences" in line)
    assert f"{at_20:#.4g}" in row


def test_longer_run_of_the_same_settings_is_an_arm_of_its_own(runs: Path, tmp_path: Path) -> None:
    every = {"eval_every": 5, "monitor": "loss"}
    fit(small_run(mode="decoder", steps=30, train=every), tmp_path / "longer")
    record = compared_runs([runs / "decoder-0", tmp_path / "longer"])
    assert list(record.arms) == ["steps 20", "steps 30"]


def test_record_of_another_task_is_refused(runs: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    write_record(recorded, compared_runs(some(runs, "decoder-1")))
    task = Count2(prompt_length=4, length=10, num_values=10)
    fit(small_run(task=task, steps=5, train={"eval_every": 5}), tmp_path / "count2")
    with pytest.raises(InputError, match="no run of the task count2"):
        against_recorded(tmp_path / "count2", recorded)


def test_same_run_twice_is_refused(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs / "entp-0", tmp_path / "copy")
    with pytest.raises(InputError, match="same run, seed 0"):
        compared_runs([runs / "entp-0", copy])


def test_runs_of_two_tasks_are_refused(runs: Path, tmp_path: Path) -> None:
    task = Count2(prompt_length=4, length=10, num_values=10)
    fit(small_run(task=task, steps=5, train={"eval_every": 5}), tmp_path / "count2")
    with pytest.raises(InputError, match="several tasks"):
        compared_runs([runs / "entp-0", tmp_path / "count2"])


def test_folder_without_an_evaluation_is_refused(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs / "entp-0", tmp_path / "copy")
    (copy / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="no evaluation yet"):
        compared_runs([copy])


def test_run_is_held_against_other_seeds(runs: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    write_record(recorded, compared_runs(some(runs, "decoder-1", "decoder-2")))
    text = against_recorded(runs / "decoder-0", recorded)
    assert "seeds 1, 2" in text
    rows = {row["step"]: row["loss"] for row in evaluations(runs / "decoder-0")}
    theirs = [
        next(row["loss"] for row in evaluations(runs / name) if row["step"] == 20)
        for name in ("decoder-1", "decoder-2")
    ]
    ends = prediction_interval(theirs)
    assert ends is not None
    last = text.splitlines()[-1].split()
    assert last[:3] == ["20", f"{rows[20]:#.4g}", f"{sum(theirs) / 2:#.4g}"]
    assert last[-1] == ("yes" if ends[0] <= rows[20] <= ends[1] else "NO")


def test_bad_run_lies_outside(runs: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    seeds = [f"decoder-{seed}" for seed in SEEDS]
    write_record(recorded, compared_runs(some(runs, *seeds)))
    bad = shutil.copytree(runs / "decoder-0", tmp_path / "bad")
    lines = (bad / "metrics.jsonl").read_text().splitlines()
    broken = [line.replace('"loss": 2', '"loss": 9') for line in lines]
    assert broken != lines
    (bad / "metrics.jsonl").write_text("\n".join(broken) + "\n")
    assert " NO" in against_recorded(bad, recorded)


def test_nearest_arm_is_named_where_none_has_the_settings(runs: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    write_record(recorded, compared_runs(some(runs, "decoder-0", "entp-0")))
    with pytest.raises(InputError, match=r"nearest arm is decoder, which differs in optim.lr 0.02"):
        against_recorded(runs / "fast", recorded)


def test_command_writes_a_record_and_a_figure(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["compare", *map(str, some(runs, "entp-0", "decoder-0")), "--out", "both.json"]
    got = entp(*words, "--metric", "token_accuracy", cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    assert "token accuracy" in got.stdout
    assert list(read_record(tmp_path / "both.json").arms) == ["ENTP", "decoder"]
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    assert parse_json((tmp_path / "both.json").read_text())["recipe"] == "compare"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare"], "needs a run folder"),
        (["compare", "nowhere"], "no run folder"),
        (["compare", "{entp-0}", "--metric", "bleu"], "exact_match, token_accuracy, loss"),
        (["compare", "{entp-0}", "--recorded", "nowhere.json"], "nowhere.json"),
        (["compare", "{entp-0}", "--out", "figure.png"], ".json"),
    ],
)
def test_bad_input_is_told(words: list[str], told: str, runs: Path, tmp_path: Path) -> None:
    named = [str(runs / "entp-0") if word == "{entp-0}" else word for word in words]
    got = entp(*named, cwd=tmp_path)
    assert got.returncode == 2
    assert told in got.stderr
    assert "Traceback" not in got.stderr


def test_unfinished_run_is_told(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs / "decoder-0", tmp_path / "copy")
    config = parse_json((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "steps": 40}))
    assert "20 of 40 steps" in comparison(compared_runs([copy]))
    assert "Not finished" not in comparison(compared_runs([runs / "decoder-0"]))
