"""Which of two records of a run is kept, and which files of a folder are results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_records import arm_record, make_record, run_record, run_test

from entp.errors import InputError
from entp.results.schema import Bootstrap
from entp.results.store import better_run, compact_json, find_records, write_record


def test_of_two_records_of_a_run_done_wins_then_tested_then_further() -> None:
    done = run_record(steps=5)
    untested = run_record(right=None, steps=9)
    further = run_record(steps=1000, status="1000 of 2000 steps")
    half = run_record(steps=500, status="500 of 2000 steps")
    for better, worse in (
        (done, further),
        (done, untested),
        (untested, further),
        (further, half),
        (half, run_record(right=None, steps=900, status="900 of 2000 steps")),
    ):
        assert better_run(better, worse) is better
        assert better_run(worse, better) is better
    assert better_run(None, done) is done
    assert better_run(done, None) is done
    assert better_run(None, None) is None


def test_of_runs_as_far_as_each_other_the_one_with_more_tests_wins() -> None:
    less = run_record()
    assert less.test is not None
    totals = less.test.totals
    ends = Bootstrap(level=0.9, resamples=10, all={})
    for more in ({"splits": {"shift": totals}}, {"last": totals}, {"bootstrap": ends}):
        better = run_record(test=run_test(50, **more))
        assert better_run(less, better) is better
        assert better_run(better, less) is better
        assert better_run(run_record(steps=11), better) is not better


def test_of_equal_records_the_first_is_kept() -> None:
    one, other = run_record(), run_record()
    assert better_run(one, other) is one


def test_records_of_a_folder_are_found_among_other_files(tmp_path: Path) -> None:
    write_record(tmp_path / "mine.json", make_record({"a": arm_record(50)}))
    (tmp_path / "engine_speed.json").write_text('{"step": {}}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "mine.json.old").write_text("{")
    assert [path.name for path in find_records(tmp_path)] == ["mine.json"]
    (tmp_path / "torn.json").write_text('{"recipe": ')
    with pytest.raises(InputError, match=r"torn\.json is not a file of results"):
        find_records(tmp_path)


def test_compact_json_says_the_same_as_json() -> None:
    data = {"a": [[1, 2.5, None]] * 40, "b": {"c": {}, "d": [], "e": "x" * 200}, "f": True}
    assert json.loads(compact_json(data)) == data
    assert all(len(line) <= 230 for line in compact_json(data).splitlines())
