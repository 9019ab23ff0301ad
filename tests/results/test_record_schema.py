"""A file of results fits its schema, or an error names the key that does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_records import DIGITS, arm_record, make_record, sliced_totals, sourced_run

from entp.errors import InputError
from entp.results.environment import read_environment
from entp.results.schema import (
    AuthorsCurve,
    Check,
    Figure,
    PaperValue,
    Record,
    SliceValues,
    SplitPoint,
    Table,
    parse,
)
from entp.results.store import read_record, write_record


def full_record() -> Record:
    arms = {"ENTP": arm_record(50, 60, mode="ENTP"), "decoder": arm_record(mode="decoder")}
    arms["ENTP"].paper["exact_match"] = PaperValue(0.5, "Table 1")
    return make_record(
        arms,
        table=Table(rows="mode", cells="exact_match"),
        figures=[Figure("slices", x="length", y="token_accuracy", lines="mode")],
        checks=[Check("ENTP learns", {"mode": ["ENTP"]}, "exact_match", "at least", 0.5)],
        authors_curves={"ENTP": AuthorsCurve(steps=[1], sequences=[64], values={"loss": [1.0]})},
        not_run={"BERT": "needs weights"},
    )


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    written = write_record(path, full_record())
    assert read_record(path) == written
    assert written.verdict is not None


def test_a_point_of_a_curve_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_record(path, full_record())
    lines = [line for line in path.read_text().splitlines() if '"step": 5' in line]
    assert [json.loads(line.rstrip(","))["sequences"] for line in lines] == [40, 40]


def take_out(*way: Any) -> Callable[[Any], None]:
    def damage(data: Any) -> None:
        for key in way[:-1]:
            data = data[key]
        del data[way[-1]]

    return damage


def put_in(value: Any, *way: Any) -> Callable[[Any], None]:
    def damage(data: Any) -> None:
        for key in way[:-1]:
            data = data[key]
        data[way[-1]] = value

    return damage


RUN = ("arms", "ENTP", "runs", 0)
DAMAGE: dict[str, tuple[Callable[[Any], None], str]] = {
    "no arms": (take_out("arms"), "it has no 'arms'"),
    "arms a number": (put_in(3, "arms"), "arms is 3"),
    "an arm a number": (put_in(3, "arms", "x"), "arms.x is 3"),
    "unknown key": (put_in(1, *RUN, "fresh"), "arms.ENTP.runs.0.fresh is an unknown key"),
    "seconds a text": (put_in("12", *RUN, "seconds"), "arms.ENTP.runs.0.seconds is '12'"),
    "seconds true": (put_in(True, *RUN, "seconds"), "arms.ENTP.runs.0.seconds is True"),
    "seconds not finite": (put_in(float("nan"), *RUN, "seconds"), "arms.ENTP.runs.0.seconds"),
    "no curve": (put_in([], *RUN, "curve"), "arms.ENTP.runs.0.curve is []"),
    "no environment": (take_out(*RUN, "environment"), "arms.ENTP.runs.0 has no 'environment'"),
    "no task": (take_out(*RUN, "config", "task"), "config has no task with a name"),
    "sums of five": (
        put_in([1] * 5, *RUN, "test", "totals", "all", "loss"),
        "arms.ENTP.runs.0.test.totals.all.loss",
    ),
    "strange metric": (
        put_in(0.5, *RUN, "best", "bleu"),
        "arms.ENTP.runs.0 measures 'bleu', which is not in metrics",
    ),
    "a seed twice": (put_in(0, "arms", "ENTP", "runs", 1, "seed"), "two runs of one seed"),
    "a figure of no kind": (put_in("pie", "figures", 0, "kind"), "figures.0.kind is 'pie'"),
    "a figure of another metric": (
        put_in(["bleu"], "figures", 0, "y"),
        "it is about 'bleu', which is not in metrics",
    ),
    "a curve of two lengths": (
        put_in({"steps": [1], "sequences": [1], "values": {"loss": []}}, "authors_curves", "x"),
        "steps, sequences and values are not as many",
    ),
    "a newer version": (put_in(99, "schema_version"), "schema_version is 99, here it is 2"),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_record_names_its_key(
    damage: Callable[[Any], None], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    write_record(path, full_record())
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', "[" * 100_000])
def test_file_of_another_kind_is_an_input_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is not a file of results"):
        read_record(path)


def test_concurrent_runs_must_be_told_even_if_unknown() -> None:
    data = json.loads(full_record().model_dump_json())
    del data["arms"]["ENTP"]["runs"][0]["test"]["concurrent_runs"]
    with pytest.raises(ValueError, match="has no 'concurrent_runs'"):
        parse(Record, data)


def test_environment_of_a_run_folder_has_a_schema(tmp_path: Path) -> None:
    assert read_environment(tmp_path) == {}
    place = tmp_path / "environment.json"
    fork = {"device": "x", "forked": {"run": "other", "step": 3, "config": "ab"}, "resumed": [{}]}
    place.write_text(json.dumps(fork))
    assert read_environment(tmp_path) == fork
    for text, told in (("5", "it is 5"), ('{"device": 3}', "device is 3"), ('{"x": 1}', "x is an")):
        place.write_text(text)
        with pytest.raises(InputError, match=rf"damaged \({told}.*repair or remove it"):
            read_environment(tmp_path)


def test_one_name_is_a_tuple_of_one() -> None:
    assert Table(rows="mode") == Table(rows=("mode",))


def test_curves_are_against_steps_seconds_or_sequences() -> None:
    with pytest.raises(ValueError, match="x of curves is 'minutes'"):
        Figure("curves", x="minutes")


def test_sources_splits_and_authors_survive_the_file(tmp_path: Path) -> None:
    run = sourced_run(test={"11": 5}, last={"11": 4}, best={"11": 6})
    point = SplitPoint(step=5, totals=sliced_totals(3, {"11": 3}))
    run = run.model_copy(update={"splits": {"test": [point]}})
    arm = arm_record(runs=[run], mode="ENTP")
    arm.authors.append(SliceValues("exact_match", "digits", {"11": 0.9}, "best", "a file"))
    about = {"source": "best", "by": "digits", "bin": "11"}
    record = make_record(
        {"a": arm},
        metrics=DIGITS,
        table=Table(versus="mode"),
        figures=[Figure("slices", x="digits", source="last")],
        checks=[Check("it", {}, "exact_match", "above", 0.5, **about)],  # type: ignore[arg-type]
    )
    path = tmp_path / "mine.json"
    written = write_record(path, record)
    found = read_record(path)
    assert found == written
    assert found.arms["a"].runs[0].splits["test"] == [point]
    assert found.arms["a"].authors[0].values == {"11": 0.9}
    assert found.verdict is not None
    assert found.verdict.checks[0].outcome == "fails"


def test_metric_of_a_split_or_of_the_authors_must_be_known() -> None:
    strange = sliced_totals(3, {"11": 3}).model_copy(update={"all": {"bleu": [1] * 6}})
    run = sourced_run(test={"11": 5})
    run = run.model_copy(update={"splits": {"test": [SplitPoint(step=5, totals=strange)]}})
    with pytest.raises(ValueError, match="measures 'bleu', which is not in metrics"):
        make_record({"a": arm_record(runs=[run])}, metrics=DIGITS)
    arm = arm_record(5)
    arm.authors.append(SliceValues("bleu", "digits", {"11": 0.9}))
    with pytest.raises(ValueError, match="it is about 'bleu'"):
        make_record({"a": arm})
