"""Several recipes in one command: what fails or cannot begin, limits of time, how far each is."""

from __future__ import annotations

import re
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from small_runs import small_run

from entp.cli.main import main
from entp.errors import InputError
from entp.experiments import RECIPES
from entp.experiments.recipe import Arm, Check, Recipe, find_recipe
from entp.experiments.whole import PAPER, every_recipe, names_of, state_of, time_limit, waves
from entp.results.store import read_record
from entp.tasks.counting import Count3

CHECK = Check("it learns", {}, "exact_match", "at least", 0.0)


BOTH = [Arm(replace(small_run(), mode=mode), mode=mode) for mode in ("entp", "decoder")]


def make(name: str, arms: list[Arm] = BOTH, **changes: str) -> Recipe:
    return Recipe(
        name,
        name,
        "Who?",
        arms,
        tiny_run=lambda run: run,
        test_sequences=16,
        checks=(CHECK,),
        **changes,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class NoData(Count3):
    """Reads files that are not here."""

    takes_data = True

    def split_batches(self, *_: object) -> int | None:
        raise InputError("there is no such data.")


@pytest.fixture(autouse=True)
def own_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recipes, a short one, one that fails, and one whose run takes minutes."""
    no_data = replace(small_run(), task=NoData(**asdict(small_run().task)))
    short = [Arm(replace(small_run(), steps=2, mode="decoder"), kind="short")]
    bad = [Arm(replace(small_run(), optim=replace(small_run().optim, lr=1e12)), size="x")]
    slow = [Arm(replace(small_run(), steps=10**6), mode="entp")]
    found = {
        "first": make("first"),
        "second": make("second", folder="first"),
        "short": make("short", arms=short),
        "lacking": replace(
            make("lacking", arms=[Arm(small_run(), begins="entp", mode="entp")]),
            source=make("nodata", arms=[Arm(no_data, mode="entp")]),
        ),
        "bad": make("bad", arms=bad),
        "slow": make("slow", arms=slow),
    }
    for name, recipe in found.items():
        monkeypatch.setitem(RECIPES, name, f"test_whole:{name.upper()}")
        monkeypatch.setitem(globals(), name.upper(), recipe)


def command(*words: str, runs: Path) -> int:
    folders = ["--out", str(runs / "runs"), "--records", str(runs / "records")]
    return main(["reproduce", *words, *folders, "--device", "cpu"])


def test_recipes_run_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("first", "second", runs=tmp_path) == 0
    told = capsys.readouterr().out
    assert re.search(r"^first +beyond +2 of 2 +- +- +shown$", told, re.M)
    assert re.search(r"^second +beyond +2 of 2 +- +- +shown$", told, re.M)
    for name in ("first", "second"):
        assert read_record(tmp_path / "records" / f"{name}.json").recipe == name
    assert len(list((tmp_path / "runs" / "first").glob("*/config.json"))) == 2
    assert not list((tmp_path / "runs" / "second").glob("*/config.json"))  # trained by the first
    (tmp_path / "records" / "second.json").unlink()
    left = state_of("second", tmp_path / "records")
    assert (left.done, left.runs, left.minutes, left.verdict) == (2, 2, 0.0, "-")


def test_runs_of_several_recipes_are_one_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("short", "bad", "first", "second", "--jobs", "2", runs=tmp_path) == 1
    told = capsys.readouterr()
    assert "4 runs, 2 at a time" in told.err  # second has the runs of first: none are left for it
    order = re.findall(r"^\[[1-4]/4\] (.*), seed 0: \w+", told.err, re.M)
    assert sorted(order) == ["decoder", "entp", "short", "x"]
    assert re.search(r"^failed: bad: .*not finite", told.out, re.M)
    for name, runs in (("short", 1), ("first", 2), ("second", 2)):
        assert re.search(rf"^{name} +beyond +{runs} of {runs} ", told.out, re.M)
        record = read_record(tmp_path / "records" / f"{name}.json")
        assert record.recipe == name
        assert all(run.test for arm in record.arms.values() for run in arm.runs)


def test_a_recipe_that_cannot_go_on_leaves_the_others_in_the_queue_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with a damaged folder, and one whose source lacks its data."""
    out = ["--out", str(tmp_path / "runs"), "--device", "cpu"]
    assert main(["reproduce", "short", *out]) == 0
    (folder,) = (tmp_path / "runs" / "short").glob("*/config.json")
    (folder.parent / "metrics.jsonl").unlink()
    assert command("short", "lacking", "first", "--jobs", "2", runs=tmp_path) == 0
    told = capsys.readouterr().out
    assert re.search(r"^skipped: short: .* has been tested, but its metrics", told, re.M)
    assert re.search(r"^skipped: lacking: .*there is no such data", told, re.M)
    assert re.search(r"^first +beyond +2 of 2 +- +- +shown$", told, re.M)


def test_recipes_that_share_runs_are_in_waves() -> None:
    first, second, other, after = (
        make("first"),
        make("second", folder="first"),
        make("other"),
        replace(make("after"), source=make("other")),
    )
    assert waves([first, other, second, after], "auto") == [[0, 1], [2, 3]]
    assert waves([other, after, first, second], 4) == [[0], [1, 2], [3]]
    assert waves([first, other], 1) == [[0], [1]]


def test_a_recipe_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("bad", "count3-bert", "first", runs=tmp_path) == 1
    told = capsys.readouterr().out
    assert re.search(r"^failed: bad: .*not finite", told, re.M)
    assert re.search(r"^skipped: count3-bert: .*give --init", told, re.M)
    assert read_record(tmp_path / "records" / "first.json").verdict is not None


def test_time_limit_saves_what_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("slow", "first", "--total-minutes", "0.1", runs=tmp_path) == 0
    told = capsys.readouterr().out
    assert "the time is up: run the same command again to go on" in told
    record = read_record(tmp_path / "records" / "slow.json")
    (run,) = record.arms["entp"].runs
    assert 0 < run.steps < 10**6
    assert not run.done
    assert not (tmp_path / "records" / "first.json").exists()


def test_time_limit_ends_what_is_no_training() -> None:
    before, start = signal.getsignal(signal.SIGTERM), time.monotonic()
    threads = set(threading.enumerate())
    with time_limit(0.002) as told:
        time.sleep(30)
    assert told == [True]
    assert time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGTERM) is before
    with time_limit(None) as told, pytest.raises(KeyboardInterrupt):
        raise KeyboardInterrupt
    with time_limit(10):
        pass
    for timer in set(threading.enumerate()) - threads:  # a cancelled one ends when it next runs
        timer.join(30)
        assert not timer.is_alive()
    with pytest.raises(InputError, match="total-minutes is 0: it must be above 0"), time_limit(0):
        pass


def test_state_counts_what_is_left(tmp_path: Path) -> None:
    blank = state_of("second", tmp_path)
    assert blank[:3] == ("second", 0, 2)
    assert blank.minutes == 0  # the first trains them
    assert state_of("first", tmp_path).minutes > 0
    assert state_of("count3-bert", tmp_path).needs == "weights"
    recorded = state_of("match3", Path(__file__).parents[2] / "results")
    assert recorded == ("match3", 4, 4, 0.0, "", "reproduced")


def test_state_is_shown_without_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entp.experiments.whole.every_recipe", lambda: ["first", "match3"])
    assert main(["reproduce", "--records", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "recipe",
        "of",
        "the",
        "runs",
        "recorded",
        "minutes",
        "left",
        "needs",
        "verdict",
    ]
    assert lines[2].split()[:5] == ["first", "beyond", "0", "of", "2"]
    assert main(["reproduce", "--records", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)  # without results/, as where entp is installed
    assert main(["reproduce"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == lines[:3]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["first", "nosuch"], "unknown recipe 'nosuch'"),
        (["first", "second", "--init", "bert"], "--init 'bert': with several recipes give"),
        (["first", "second", "--init", "match3=x"], "a RECIPE among first, second"),
    ],
)
def test_wrong_words_fail_before_anything_runs(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*words, runs=tmp_path) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_all_is_the_papers_recipes() -> None:
    assert names_of(["all"]) == list(PAPER)
    assert names_of(["match3", "all"])[0] == "match3"
    assert sorted(every_recipe()) == sorted(RECIPES)
    assert {find_recipe(name).name for name in PAPER} == set(PAPER)
