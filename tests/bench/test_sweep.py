"""`entp bench sweep`: real runs in processes, their rates, the table and the figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from entp.bench import sweep
from entp.bench.options import BenchSweepOptions
from entp.bench.shapes import RandomTokens
from entp.bench.sweep import MPS, PROCESSES, Process, Trainer
from entp.config import model_for
from entp.errors import InputError
from entp.report.bench import draw
from entp.results.sections import read_sections, record_section
from entp.tasks.base import Task
from entp.tasks.counting import Count3

SHORT = RandomTokens(6, 5)


def small_section(error: str = "") -> dict[str, Any]:
    """A section as one that was measured."""

    def row(mode: Any, how: str, runs: int, rate: float) -> dict[str, Any]:
        failed = bool(error) and (mode, how) == ("decoder", MPS)
        rates = [] if failed else [rate, rate + 2, rate + 1]
        return sweep._row(mode, how, runs, rates, error if failed else "")

    rows = [row("entp", PROCESSES, 1, 99.0), row("entp", PROCESSES, 2, 149.0)]
    rows += [row("entp", MPS, 2, 199.0)]
    rows += [row("decoder", PROCESSES, 1, 499.0), row("decoder", MPS, 2, 899.0)]
    where = {"device": "a GPU", "torch": "2", "cores": 16, "commit": None, "date": "2026-01-01"}
    config = {"task": "addition", "size": "small", "batch_size": 64, "tokens": 64}
    runs = sweep._with_ratios(rows)
    return {
        "environment": where,
        "config": {**config, "repeats": 3, "seconds": 1.5},
        "mps": "MPS: yes.",
        "note": "a quiet machine",
        "runs": runs,
        "targets": sweep._targets(runs),
    }


def test_task_has_windows_of_64_characters() -> None:
    run = sweep.sweep_run("entp", 64, seed=2)
    batch = run.task.batch(0, "train", 0, 64)
    assert batch.x.shape == (64, 64)
    assert batch.lengths is None
    assert batch.target_mask.all()
    assert (run.mode, run.seed, run.batch_size) == ("entp", 2, 64)
    assert run.model == model_for(run.task, "small")


def test_ratios_are_to_one_run_at_a_time_of_the_same_mode() -> None:
    found = {(r["mode"], r["how"], r["runs"]): r for r in small_section()["runs"]}
    assert found["entp", PROCESSES, 1]["ratio"] == 1
    assert found["entp", MPS, 2]["ratio"] == 2
    assert found["decoder", MPS, 2]["ratio"] == 1.8
    assert found["entp", MPS, 2]["median"] == 200


def test_best_way_of_each_mode_stands_beside_the_target() -> None:
    entp, decoder = small_section()["targets"]
    assert (entp["how"], entp["reached"], entp["met"]) == (MPS, 2.0, True)
    assert (decoder["how"], decoder["reached"], decoder["met"]) == (MPS, 1.8, False)


def test_report_names_everything() -> None:
    text = sweep.report(small_section())
    assert "addition, small, 64 sequences of 64 tokens; a GPU, 16 cores, torch 2; n = 3" in text
    line = next(line for line in text.splitlines() if line.startswith("entp, processes, MPS"))
    assert line.split()[-5:] == ["2", "200", "199..201", "2.00x", "10.00"]
    assert (
        "entp: 2.00x the steps of one at a time by processes, MPS, 2 runs; wanted 2x: met" in text
    )
    assert "decoder: 1.80x" in text
    assert "wanted 2x: not met" in text
    assert "MPS: yes." in text
    assert text.endswith("note: a quiet machine")


def test_what_failed_is_said_and_has_no_numbers() -> None:
    section = small_section("OutOfMemoryError: too much")
    failed = [row for row in section["runs"] if row["error"]]
    assert [(row["median"], row["ratio"]) for row in failed] == [(None, None)]
    assert "decoder, processes, MPS, 2 runs: OutOfMemoryError: too much" in sweep.report(section)


def test_section_is_recorded_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    record_section(path, "sweep", small_section("too much"))
    found = read_sections(path)
    assert found == {"sweep": small_section("too much")}
    assert draw(found, tmp_path / "a.png")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"counts": "1,x"}, "--counts '1,x' is not a list of whole numbers such as 1,2,4"),
        ({"counts": "0,2"}, "--counts 0,2: allowed are 1 to 48"),
        ({"counts": "2,49"}, "allowed are 1 to 48"),
        ({"seconds": 0.0}, "--seconds is 0: it must be above 0 and at most 600"),
        ({"repeats": 0}, "--repeats is 0: it must be at least 1"),
    ],
)
def test_bad_options_are_sentences(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        BenchSweepOptions(**options)
    assert BenchSweepOptions(counts="4,1,4").numbers() == [1, 4]


def short_run(mode: Any, task: Task = SHORT, **changes: Any) -> Any:
    model = model_for(task, "small", layers=2, heads=2, width=16)
    return replace(sweep.sweep_run("decoder", 3), task=task, model=model, mode=mode, **changes)


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_trainer_counts_its_steps(mode: str) -> None:
    trainer = Trainer("cpu", short_run(mode))
    assert trainer.done == 1  # warm
    rate = trainer.steps_per_second(0.05)
    done = trainer.done - 1
    assert done >= 1
    assert 0 < rate <= done / 0.05
    assert trainer.meter.steps + trainer.meter.kept == trainer.done
    trainer.close()


def test_trainer_that_is_there_is_used_again() -> None:
    desk = sweep.Desk()
    desk.prepare("cpu", short_run("decoder"))
    first = desk.trainer
    desk.prepare("cpu", short_run("decoder"))
    assert desk.trainer is first
    desk.prepare("cpu", short_run("decoder", seed=1))
    assert desk.trainer is not first
    desk.close()
    assert desk.trainer is None


def test_process_answers_with_errors_and_goes_on() -> None:
    """Targets of Count3 begin after a prompt: they are the same in every batch, too."""
    task = Count3(prompt_length=3, length=6, num_values=6)
    process = Process({})
    try:
        process.ask("prepare", "nowhere", short_run("decoder", task))
        with pytest.raises(InputError, match=r"RuntimeError: .*nowhere"):
            process.answer()
        process.ask("prepare", "cpu", short_run("decoder", task))
        assert process.answer() is None
        rates = [sweep._together([process], 0.02) for _ in range(2)]
        assert min(rates) > 0
        process.process.kill()
        process.process.join()
        with pytest.raises(InputError, match="a process died"):
            sweep._together([process], 0.02)
    finally:
        process.close()


@pytest.mark.slow
def test_a_run_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep.bench(BenchSweepOptions(quick=True, counts="1", batch_size=1, device="cpu"))
    ways = [(row["mode"], row["how"], row["runs"]) for row in found["runs"]]
    assert ways == [(mode, PROCESSES, 1) for mode in ("entp", "decoder")]
    assert all(row["median"] > 0 and row["error"] == "" for row in found["runs"])
    assert (found["mps"], found["targets"]) == ("", [])
    assert found["config"]["rows"] == 16 * 17 // 2
    assert found["environment"]["date"]
    assert "decoder, processes, 1 at a time: " in capsys.readouterr().out


@pytest.mark.gpu
def test_graphs_are_captured_on_cuda() -> None:
    for mode in ("entp", "decoder"):
        desk = sweep.Desk()
        desk.prepare("cuda:0", sweep.sweep_run(mode, 64))  # type: ignore[arg-type]
        assert desk.trainer is not None
        assert desk.trainer.stepper is not None
        assert desk.trainer.stepper.graphs
        assert desk.measure(0.2) > 0
        before = torch.cuda.memory_allocated()
        desk.close()
        assert torch.cuda.memory_allocated() < before
