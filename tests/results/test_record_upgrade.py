"""Records and run folders from before the move are read under today's names, and no number is
lost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from entp.config.json import run_from_json
from entp.results.schema import Record, RunTest, parse
from entp.results.store import read_record
from entp.results.upgrade import sequences_by, upgrade_record, upgrade_test
from entp.stats import wilson
from entp.training.plan import Plan

BEFORE = Path(__file__).parents[1] / "fixtures" / "before_the_move"
RESULTS = Path(__file__).parents[2] / "results"
OLD = {"exact_match": "sequence_accuracy", "token_accuracy": "token_accuracy", "loss": "loss"}


def old(name: str) -> Any:
    return json.loads((BEFORE / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["match3", "match3-tiny"])
def test_upgraded_record_has_every_number(name: str) -> None:
    before, record = old(name), read_record(BEFORE / f"{name}.json")
    assert list(record.arms) == list(before["arms"])
    for label, arm in record.arms.items():
        told = before["arms"][label]
        assert {m: v.value for m, v in arm.paper.items()} == {
            new: told["paper"][was]["value"] for new, was in OLD.items() if was in told["paper"]
        }
        for run, was in zip(arm.runs, told["runs"], strict=True):
            assert run.test is not None
            totals, final = run.test.totals.totals(record.metrics), was["final"]
            for new, name_then in OLD.items():
                assert run.best[new] == was["best"][name_then]
                assert totals.value(new) == pytest.approx(final[name_then], rel=1e-12, abs=1e-300)
            assert totals.sliced("token_accuracy", "length") == final["by_length"]
            right = round(final["sequence_accuracy"] * final["n"])
            assert totals.interval("exact_match") == wilson(right, final["n"])
            assert totals.interval("loss") is None
            kept = (run.steps, run.seconds, run.n, run.status, run.seed)
            assert kept == tuple(was[key] for key in ("steps", "seconds", "n", "status", "seed"))
            assert run.test.concurrent_runs == final["trained_side_by_side"]
            assert run.test.checkpoint == final["weights"]
            assert "test stream of earlier versions" in run.test.note
            assert run.environment.commit == was["environment"]["commit"]
            assert len(run.curve) == len(was["curve"])
            for point, was_point in zip(run.curve, was["curve"], strict=True):
                assert point.seconds == (was_point["seconds"] or None)
                assert {OLD[m]: v for m, v in point.values.items()} == {
                    key: was_point[key] for key in OLD.values()
                }


def test_rewritten_match3_has_the_numbers_of_the_old_file() -> None:
    """`entp reproduce` wrote results/match3.json from the old one, with nothing trained."""
    before, now = read_record(BEFORE / "match3.json"), read_record(RESULTS / "match3.json")
    for was, arm in zip(before.arms.values(), now.arms.values(), strict=True):
        for one, other in zip(was.runs, arm.runs, strict=True):
            changed = {"config_hash": other.config_hash}
            assert one.model_copy(update=changed) == other


def test_unknown_seconds_are_none_and_never_zero() -> None:
    """The tiny run evaluated off its log grid, and recorded 0.0 s then."""
    curve = read_record(BEFORE / "match3-tiny.json").arms["decoder medium"].runs[0].curve
    assert [point.seconds for point in curve] == [None, 8.281, None, 20.145]


def test_unknown_number_of_concurrent_runs_is_none() -> None:
    data = old("match3")
    del data["arms"]["decoder medium"]["runs"][0]["final"]["trained_side_by_side"]
    run = parse(Record, upgrade_record(data)).arms["decoder medium"].runs[0]
    assert run.test is not None
    assert run.test.concurrent_runs is None


def test_generated_answers_and_arms_that_did_not_run() -> None:
    data = old("match3")
    final = data["arms"]["decoder medium"]["runs"][0]["final"]
    final["generated"] = {"right": 3, "n": 20}
    data["arms"]["BERT"] = {"status": "not run", "why": "needs weights"}
    data["arms"]["later"] = {"status": "not run", "paper": {}}
    record = parse(Record, upgrade_record(data))
    test = record.arms["decoder medium"].runs[0].test
    assert test is not None
    assert test.generated is not None
    assert test.generated.totals(record.metrics).interval("exact_match") == wilson(3, 20)
    assert record.not_run == {"BERT": "needs weights"}
    assert record.arms["later"].runs == []


@pytest.mark.parametrize("arm", [arm for arm in old("arms") if arm["seed"] == 0][::3])
def test_sequences_of_old_configs_are_those_of_the_plan(arm: dict[str, Any]) -> None:
    data = {"recipe": "x", "arms": {"a": {"runs": [{"settings": arm["settings"]}]}}}
    config = upgrade_record(copy.deepcopy(data))["arms"]["a"]["runs"][0]["config"]
    run = run_from_json(arm["settings"])
    for step in (0, 1, 24_999, 25_001, 87_999, 88_001, min(run.steps, 200_000)):
        assert sequences_by(config, step) == Plan(run).sequences_by(step)


def test_final_of_a_run_folder_becomes_its_test() -> None:
    folder = BEFORE / "runs" / "match3-tiny" / "decoder-medium-e183b532ad"
    final = json.loads((folder / "final.json").read_text())
    test = parse(RunTest, upgrade_test(final, 32))
    assert (test.checkpoint, test.concurrent_runs) == ("best-00000100", 1)
    assert test.totals.all["exact_match"] == [64, 39, 64, 39, 39, 64]
    assert upgrade_test(json.loads(test.model_dump_json()), 32)["totals"]["sequences"] == 64


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"arms": 3}, "arms is 3"),
        ({"arms": {"x": 3}}, "arms.x is 3"),
        ({"arms": {"x": {"runs": 3}}}, "arms.x.runs is 3"),
        ({"arms": {"x": {"runs": [{"seed": 0}]}}}, "arms.x.runs.0 has no"),
    ],
)
def test_damaged_old_record_names_its_key(
    damage: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"recipe": "x", "title": "t", "question": "q", **damage}))
    with pytest.raises(ValueError, match="is not a file of results") as caught:
        read_record(path)
    assert told in str(caught.value)
