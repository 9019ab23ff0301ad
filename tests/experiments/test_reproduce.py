"""Recipes are carried out: what is missing is trained and tested, what is there is not trained
again, and nothing that is done is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from small_records import small_recipe

from entp.config import OptimConfig
from entp.errors import DeviceFailed, InputError, TrainingStopped
from entp.experiments import RECIPES, running
from entp.experiments import study as study_module
from entp.experiments.collect import find_folder, read_test
from entp.experiments.recipe import Arm, Recipe, find_recipe
from entp.experiments.reproduce import Outcome, reproduce
from entp.experiments.running import shared_device, time_left
from entp.files import lock_folder
from entp.results.schema import RunTest
from entp.results.store import read_record, write_record
from entp.results.summary import status
from entp.training.checkpoint import load
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward
from entp.training.loggers import read_metrics
from entp.training.mps import Shared

BEFORE = Path(__file__).parents[1] / "fixtures" / "before_the_move"
ENTP, DECODER = "ENTP", "decoder"


def decoder_only(**changes: Any) -> Recipe:
    """One arm of one seed."""
    recipe = small_recipe(generated_sequences=0)
    run = replace(recipe.arms[1].run, **changes)
    return replace(recipe, arms=[Arm(run, mode=DECODER)])


def run_once(recipe: Recipe, runs: Path, **options: Any) -> Outcome:
    return reproduce(recipe, runs, device="cpu", **options)


@pytest.fixture(autouse=True)
def _quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures have tests of their own, and take a second each."""
    monkeypatch.setattr(
        study_module, "draw_record", lambda _, path: path.write_bytes(b"a small figure") > 0
    )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders in which training was called, as it goes on."""
    folders: list[Path] = []
    really = running.train

    def noted(run: Any, out: Path, **options: Any) -> Any:
        folders.append(out)
        return really(run, out, **options)

    monkeypatch.setattr(running, "train", noted)
    return folders


def test_recipe_is_trained_tested_and_recorded(tmp_path: Path) -> None:
    recipe = small_recipe()
    found = run_once(recipe, tmp_path)
    assert found.stopped_by is None
    assert [status(arm) for arm in found.arms.values()] == ["done", "done"]
    assert [run.seed for run in found.arms[ENTP].runs] == [0, 1]
    arm = recipe.runs()[0]
    folder = find_folder(arm, tmp_path / "small")
    run = found.arms[ENTP].runs[0]
    rows = [row for row in read_metrics(folder) if row["kind"] == "eval"]
    assert run.best["loss"] == min(row["loss"] for row in rows)
    assert run.best["exact_match"] == max(row["exact_match"] for row in rows)
    assert [point.values["loss"] for point in run.curve] == [row["loss"] for row in rows]
    assert [point.sequences for point in run.curve] == [24, 48]
    assert all(point.seconds for point in run.curve)
    assert run.test is not None
    assert run.test.concurrent_runs == 1
    assert run.test.totals.sequences == 16
    assert run.test.generated is not None
    assert run.test.generated.sequences == 8
    assert "loss" not in run.test.generated.all
    batches = split_batches(arm.run.task, "test", 2, 8, 2**31)
    again = evaluate(load(folder), arm.run.task, batches, Forward.of(arm.run))
    assert again.to_json()["all"] == run.test.totals.all
    written = read_record(tmp_path / "small" / "results.json")
    assert written.model_dump() == found.model_dump()
    assert (tmp_path / "small" / "results.png").read_bytes() == b"a small figure"
    assert found.not_run == {"BERT": "needs weights"}
    assert found.arms[ENTP].paper["exact_match"].value == 0.991


def test_finished_runs_are_not_trained_again(tmp_path: Path, trained: list[Path]) -> None:
    first = run_once(decoder_only(), tmp_path)
    assert len(trained) == 1
    assert run_once(decoder_only(), tmp_path) == first
    assert len(trained) == 1


ALIKE = {"count3-longer", "addition-rates", "addition-tuned", "addition-lines", "icl-rates"}
ALIKE |= {"addition-lines-rates", "text-rates", "text-epochs", "text-block", "tinywinogrande"}
"""Recipes whose tiny runs are of the same kind as another's."""
FILES = {"clutrr": "clutrr", "winogrande": "winogrande", "winogrande-full": "winogrande"}
FILES |= {"lambada": "zeroshot_eval"}
"""Recipes that need data, and its folder below ENTP_DATA."""


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ALIKE])
def test_tiny_recipe_runs(name: str, tmp_path: Path) -> None:
    """One arm of each mode; `entp reproduce NAME --tiny` takes at most 25 s."""
    if name in FILES and not (Path(os.environ.get("ENTP_DATA") or "/no") / FILES[name]).is_dir():
        pytest.skip("its data is not below ENTP_DATA")
    small = find_recipe(name).tiny()
    few = {arm.run.mode: arm for arm in small.arms}
    arms = [Arm(arm.run, arm.seeds[:1], arm.paper, **arm.factors) for arm in few.values()]
    found = run_once(replace(small, arms=arms), tmp_path)
    assert [status(arm) for arm in found.arms.values()] == ["done"] * len(arms)


def test_folder_from_before_the_move_is_not_trained_again(
    tmp_path: Path, trained: list[Path]
) -> None:
    shutil.copytree(BEFORE / "runs", tmp_path, dirs_exist_ok=True)
    (old,) = (tmp_path / "match3-tiny").iterdir()
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    recipe = find_recipe("match3").tiny()
    label = recipe.arms[0].label
    found = run_once(recipe, tmp_path, only=[label])
    assert trained == []
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert list((tmp_path / "match3-tiny").glob("[!.]*/")) == [old]
    run = found.arms[label].runs[0]
    assert (run.status, run.steps) == ("done", 100)


def test_record_from_before_the_move_is_not_trained_again(
    tmp_path: Path, trained: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "match3-tiny.json"
    shutil.copy(BEFORE / path.name, path)
    found = run_once(find_recipe("match3").tiny(), tmp_path, record=path)
    assert trained == []
    assert [status(arm) for arm in found.arms.values()] == ["done"] * 4
    assert not path.with_name(f"{path.name}.old").exists()
    assert "left out" not in capsys.readouterr().err
    assert read_record(path).schema_version == 2


def test_unfinished_arm_goes_on(tmp_path: Path) -> None:
    short = run_once(decoder_only(steps=3), tmp_path)
    assert short.arms[DECODER].runs[0].steps == 3
    long = run_once(decoder_only(), tmp_path)
    assert long.arms[DECODER].runs[0].steps == 6
    assert len(list((tmp_path / "small").glob("*/config.json"))) == 1


def test_failed_arm_is_named_and_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really = running.train

    def fails_as_entp(run: Any, out: Path, **options: Any) -> Any:
        if run.mode == "entp" and run.seed == 0:
            raise TrainingStopped("the loss is not finite at step 3.")
        return really(run, out, **options)

    monkeypatch.setattr(running, "train", fails_as_entp)
    with pytest.raises(TrainingStopped, match=r"1 of 3 runs failed\. ENTP, seed 0: the loss"):
        run_once(small_recipe(generated_sequences=0), tmp_path)
    found = read_record(tmp_path / "small" / "results.json")
    assert status(found.arms[ENTP]) == "done, 1 seed not run"
    assert status(found.arms[DECODER]) == "done"
    assert "ENTP, seed 0 failed: the loss is not finite" in capsys.readouterr().err


def test_gpu_that_failed_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Any, out: Path, **options: Any) -> Any:
        raise DeviceFailed("the GPU failed.")

    monkeypatch.setattr(running, "train", fails)
    with pytest.raises(DeviceFailed):
        run_once(small_recipe(), tmp_path)


def test_signal_stops_and_what_there_is_is_recorded(tmp_path: Path) -> None:
    long = decoder_only(steps=10**6)
    both = replace(long, arms=[*long.arms, small_recipe().arms[0]], generated_sequences=0)
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    timer.start()
    found = run_once(both, tmp_path)
    timer.join()
    assert found.stopped_by == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert re.fullmatch(r"\d+ of 1000000 steps", status(found.arms[DECODER]))
    assert found.arms[DECODER].runs[0].test is None
    assert status(found.arms[ENTP]) == "not run"
    assert read_record(tmp_path / "small" / "results.json").arms == found.arms


def test_some_arms_and_one_seed(tmp_path: Path) -> None:
    recipe = small_recipe(generated_sequences=0)
    found = run_once(recipe, tmp_path, only=[ENTP], seed=1)
    assert status(found.arms[ENTP]) == "done, 1 seed not run"
    assert status(found.arms[DECODER]) == "not run"
    with pytest.raises(InputError, match="unknown arm of small 'entp'"):
        run_once(recipe, tmp_path, only=["entp"])
    with pytest.raises(InputError, match="unknown seed 7: allowed are 0, 1"):
        run_once(recipe, tmp_path, seed=7)
    with pytest.raises(InputError, match="--jobs is 0"):
        run_once(recipe, tmp_path, jobs=0)
    with pytest.raises(InputError, match="--max-minutes is 0: it must be above 0"):
        run_once(recipe, tmp_path, max_minutes=0)


def test_arm_may_be_given_minutes(tmp_path: Path) -> None:
    """Stopped by the clock, tested as it is, and continued by a call with more."""
    long, path = decoder_only(steps=100_000), tmp_path / "all.json"
    short = run_once(long, tmp_path, record=path, max_minutes=0.005).arms[DECODER].runs[0]
    assert re.fullmatch(r"\d+ of 100000 steps", short.status)
    assert short.test is not None
    assert short.config["train"]["max_seconds"] == pytest.approx(0.3)
    more = (short.seconds + 0.3) / 60
    further = run_once(long, tmp_path, record=path, max_minutes=more).arms[DECODER].runs[0]
    assert further.steps > short.steps
    same = len(short.curve) - 1
    assert further.curve[:same] == short.curve[:same]
    assert further.test is not None
    assert further.test.concurrent_runs == 1


def test_minutes_do_not_change_a_schedule_that_follows_the_clock(tmp_path: Path) -> None:
    run = decoder_only().arms[0].run
    timed = decoder_only(
        steps=10**6,
        train=replace(run.train, max_seconds=0.4, eval_every=1000),
        optim=OptimConfig(decay_by="seconds"),
    )
    found = run_once(timed, tmp_path, max_minutes=0.001).arms[DECODER]
    assert status(found) == "done"
    assert found.runs[0].seconds >= 0.4


def test_record_gathers_arms_of_several_machines(tmp_path: Path, trained: list[Path]) -> None:
    recipe, path = small_recipe(generated_sequences=0), tmp_path / "all.json"
    first = run_once(recipe, tmp_path / "one", only=[DECODER], record=path)
    second = run_once(recipe, tmp_path / "two", record=path)
    assert [folder.parts[-3] for folder in trained] == ["one", "two", "two"]
    assert second.arms[DECODER].runs == first.arms[DECODER].runs
    assert [status(arm) for arm in read_record(path).arms.values()] == ["done", "done"]
    assert path.with_suffix(".png").exists()


def test_two_that_write_one_record_wait_for_each_other(tmp_path: Path) -> None:
    """One holds the record's folder, as another process does while it adds its arm."""
    recipe, path = small_recipe(generated_sequences=0), tmp_path / "all.json"
    run_once(recipe, tmp_path, only=[DECODER])
    with ThreadPoolExecutor(1) as pool, lock_folder(tmp_path):
        options = {"only": [ENTP], "seed": 0, "record": path}
        other = pool.submit(run_once, recipe, tmp_path / "two", **options)
        assert not wait([other], timeout=1).done
        assert not path.exists()
        path.write_bytes((tmp_path / "small" / "results.json").read_bytes())
    found = read_record(path)
    assert status(found.arms[DECODER]) == "done"
    assert [run.seed for run in found.arms[ENTP].runs] == [0]


def untested(path: Path) -> None:
    """Take the test out of a record, as a run that was stopped before it."""
    record = read_record(path)
    run = record.arms[DECODER].runs[0].model_copy(update={"test": None})
    arm = record.arms[DECODER].model_copy(update={"runs": [run]})
    write_record(path, record.model_copy(update={"arms": {**record.arms, DECODER: arm}}))


def test_untested_run_of_a_record_is_tested_where_its_folder_is(
    tmp_path: Path, trained: list[Path]
) -> None:
    path = tmp_path / "all.json"
    first = run_once(decoder_only(), tmp_path, record=path)
    untested(path)
    (folder,) = [p.parent for p in (tmp_path / "small").glob("*/test.json")]
    (folder / "test.json").unlink()
    trained.clear()
    found = run_once(decoder_only(), tmp_path, record=path)
    assert trained == []
    before, now = (one.arms[DECODER].runs[0].test for one in (first, found))
    assert isinstance(before, RunTest)
    assert isinstance(now, RunTest)
    assert now.totals == before.totals
    assert now.concurrent_runs is None  # nobody knows any more


def test_untested_run_of_a_record_is_trained_again_where_its_folder_is_not(
    tmp_path: Path, trained: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"
    run_once(decoder_only(), tmp_path / "one", record=path)
    untested(path)
    found = run_once(decoder_only(), tmp_path / "two", record=path)
    assert len(trained) == 2
    assert found.arms[DECODER].runs[0].test is not None
    assert "decoder, seed 0 is done but untested" in capsys.readouterr().err


def test_record_is_copied_before_runs_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"
    run_once(decoder_only(), tmp_path / "one", record=path)
    before = path.read_bytes()
    for number, recipe in (("", decoder_only(batch_size=16)), ("1", decoder_only())):
        run_once(recipe, tmp_path / f"two{number}", record=path)
        told = capsys.readouterr().err
        assert told.count(f"what is left out is still in {path}.old{number}.") == 1
        assert told.count("decoder, seed 0 has other settings than now, and is left out.") == 1
    assert (tmp_path / "all.json.old").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "told"), [("{", "is not a file of results"), ("[]", "is not a file of results")]
)
def test_record_of_another_kind_is_left_alone(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(content)
    with pytest.raises(InputError, match=told):
        run_once(decoder_only(), tmp_path, record=path)
    assert path.read_text() == content


def test_record_of_another_recipe_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    write_record(path, replace(decoder_only(), name="other").record())
    with pytest.raises(InputError, match="holds results of other, not of small"):
        run_once(decoder_only(), tmp_path, record=path)


def test_last_checkpoint_is_tested_on_the_same_sequences(
    tmp_path: Path, trained: list[Path]
) -> None:
    plain = decoder_only(steps=8)
    before = run_once(plain, tmp_path).arms[DECODER].runs[0].test
    assert before is not None
    assert (before.last, before.last_checkpoint) == (None, "")
    both = replace(plain, test_last=True)
    for path in (None, tmp_path / "all.json"):  # the record asks for the last checkpoint as well
        found = run_once(both, tmp_path, record=path).arms[DECODER].runs[0].test
    assert len(trained) == 1
    assert found is not None
    assert found.last is not None
    assert found.last_checkpoint == "step-00000008"
    assert found.model_copy(update={"last": None, "last_checkpoint": ""}) == before
    arm = both.runs()[0]
    folder = find_folder(arm, tmp_path / "small")
    batches = split_batches(arm.run.task, "test", 2, 8, 2**31)
    again = evaluate(load(folder, "last"), arm.run.task, batches, Forward.of(arm.run))
    assert again.to_json()["all"] == found.last.all


def test_run_of_a_record_gets_its_last_checkpoint_tested_where_its_folder_is(
    tmp_path: Path, trained: list[Path]
) -> None:
    recipe, path = decoder_only(), tmp_path / "all.json"
    run_once(recipe, tmp_path, record=path)
    both = replace(recipe, test_last=True)
    elsewhere = run_once(both, tmp_path / "other", record=path).arms[DECODER].runs[0].test
    assert elsewhere is not None
    assert elsewhere.last is None
    here = run_once(both, tmp_path, record=path).arms[DECODER].runs[0].test
    assert here is not None
    assert here.last is not None
    assert len(trained) == 1


def test_best_checkpoint_is_tested_again_only_when_it_is_another(tmp_path: Path) -> None:
    recipe = decoder_only()
    run_once(recipe, tmp_path)
    (path,) = (tmp_path / "small").glob("*/test.json")
    before = path.stat().st_mtime_ns
    run_once(recipe, tmp_path)
    assert path.stat().st_mtime_ns == before
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "checkpoint": "best-00000001"}))
    run_once(recipe, tmp_path)
    tested = read_test(path.parent, recipe.arms[0].run)
    assert tested is not None
    assert tested.checkpoint == data["checkpoint"]
    path.write_text("")
    run_once(recipe, tmp_path)
    assert json.loads(path.read_text())["totals"] == data["totals"]


def test_what_is_done_is_recorded_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, path = running.train, tmp_path / "all.json"

    def killed_in_the_second(run: Any, out: Path, **options: Any) -> Any:
        if run.seed == 1:
            raise KeyboardInterrupt
        return really(run, out, **options)

    monkeypatch.setattr(running, "train", killed_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_once(small_recipe(generated_sequences=0), tmp_path, record=path)
    found = read_record(path).arms[ENTP].runs
    assert [run.seed for run in found] == [0]
    assert found[0].test is not None


def when_two_train(root: Path) -> None:
    """Send SIGTERM to this process alone, as a batch system does, when two runs have evaluated and
    one has ended."""
    limit, results = time.monotonic() + 120, root / "results.json"
    while time.monotonic() < limit:
        begun = [path for path in root.glob("*/metrics.jsonl") if '"eval"' in path.read_text()]
        ended = read_record(results).arms[ENTP].runs if results.exists() else []
        if len(begun) == 3 and any(run.test for run in ended):
            break
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_runs_in_parallel_are_those_one_by_one_and_a_signal_saves_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One run ends, two are stopped: they save, results are written, and nobody is left behind."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as here: threads change the order of sums
    before = {child.pid for child in active_children()}  # other tests' baselines keep some
    short = Arm(small_recipe().arms[0].run, mode=ENTP)
    long = Arm(decoder_only(steps=10**6).arms[0].run, (0, 1), mode=DECODER)
    recipe = replace(decoder_only(), arms=[short, long])
    one = run_once(recipe, tmp_path / "one", only=[ENTP]).arms[ENTP].runs[0]
    watcher = threading.Thread(target=when_two_train, args=(tmp_path / "two" / "small",))
    watcher.start()
    found = run_once(recipe, tmp_path / "two", jobs=3)
    watcher.join()
    told = capfd.readouterr().err
    assert "3 runs, 3 at a time\n" in told
    assert re.search(r"\[1/3\] ENTP, seed 0: done, about \d+ min left\n", told)
    assert re.search(r"\[2/3\] decoder, seed \d: stopped\n", told)
    assert found.stopped_by == signal.SIGTERM
    assert {child.pid for child in active_children()} <= before
    two = found.arms[ENTP].runs[0]
    assert one.test is not None
    assert two.test is not None
    assert (one.test.concurrent_runs, two.test.concurrent_runs) == (1, 3)
    assert one.test.totals == two.test.totals
    assert [point.values for point in one.curve] == [point.values for point in two.curve]
    stopped = found.arms[DECODER].runs
    assert [run.seed for run in stopped] == [0, 1]
    for run in stopped:  # what was saved after the first had stopped, too
        (folder,) = (tmp_path / "two" / "small").glob(f"*{run.config_hash}")
        rows = read_metrics(folder)
        assert run.steps == max(row["step"] for row in rows if row["kind"] == "train")
        assert list(folder.glob(f"checkpoints/step-{run.steps:08d}"))


def test_failed_run_of_several_at_once_is_named_and_stops_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One folder is held by another process."""
    recipe = small_recipe(generated_sequences=0)
    folder = find_folder(recipe.runs()[0], tmp_path / "small")
    folder.mkdir(parents=True)
    with (
        lock_folder(folder),
        pytest.raises(InputError, match=r"1 of 3 runs failed\. ENTP, seed 0: .* is being trained"),
    ):
        run_once(recipe, tmp_path, jobs=2)
    told = capfd.readouterr().err
    assert "ENTP, seed 0: failed" in told
    assert "[3/3]" in told
    found = read_record(tmp_path / "small" / "results.json")
    assert status(found.arms[ENTP]) == "done, 1 seed not run"
    assert status(found.arms[DECODER]) == "done"
    assert found.arms[DECODER].runs[0].test is not None
    assert found.arms[DECODER].runs[0].test.concurrent_runs == 2


def test_jobs_auto_is_one_at_a_time_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_once(small_recipe(generated_sequences=0), tmp_path, jobs="auto")
    assert [status(arm) for arm in found.arms.values()] == ["done", "done"]
    assert found.arms[DECODER].runs[0].test is not None
    assert found.arms[DECODER].runs[0].test.concurrent_runs == 1
    told = capsys.readouterr().err
    assert "[1/3] ENTP, seed 0\n" in told
    assert "MPS" not in told


@pytest.mark.parametrize(("jobs", "expected"), [("auto", 3), (2, 2)])
def test_runs_that_share_a_gpu_do_so_by_a_daemon(
    jobs: Any, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms, asked = small_recipe().runs(), []

    @contextmanager
    def shared_gpu(device: str) -> Iterator[Shared]:
        asked.append(device)
        yield Shared(True, {"A": "b"}, "MPS: yes.")

    monkeypatch.setattr(running, "pick_device", lambda *_: torch.device("cuda:0"))
    monkeypatch.setattr(running, "how_many", lambda arms, device, at_once, gpus=1: len(arms))
    monkeypatch.setattr(running, "shared_gpu", shared_gpu)
    with shared_device(arms, "auto", jobs) as (found, shared):
        assert (found, shared.environment) == (expected, {"A": "b"})
    with shared_device(arms[:1], "auto", jobs) as (found, shared):
        assert (found, shared) == (1, Shared())  # one run needs none
    monkeypatch.setattr(running, "how_many", lambda arms, device, at_once, gpus=1: 1)
    with shared_device(arms, "auto", "auto") as (found, shared):
        assert (found, shared) == (1, Shared())
    assert asked == ["cuda:0"]
    assert capsys.readouterr().err == "MPS: yes.\n"


@pytest.mark.parametrize(
    ("told", "seconds", "done", "runs", "jobs"),
    [
        ("", 0, 0, 8, 4),  # nothing is known yet
        (", about 65 s left", 65, 4, 8, 4),  # one round of two
        (", about 65 s left", 65, 1, 5, 4),  # the other three of the first round are about to end
        (", about 2 min left", 65, 1, 8, 4),
        (", about 40 min left", 600, 1, 5, 1),
        ("", 600, 8, 8, 4),
    ],
)
def test_time_that_is_left(told: str, seconds: float, done: int, runs: int, jobs: int) -> None:
    assert time_left(seconds, done, runs, jobs) == told


def test_time_that_is_left_where_the_others_are_shorter() -> None:
    assert time_left(65, 4, 8, 4, longer=0.4) == ", about 26 s left"
