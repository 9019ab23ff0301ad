"""How many runs share a device, and in which order they begin."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_records import small_recipe
from small_runs import small_run

from entp.bench.shapes import RandomTokens
from entp.config import (
    SIZES,
    BatchScheduleConfig,
    CurriculumConfig,
    Mode,
    RandomTargetsConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.engine.flops import engine_flops
from entp.errors import InputError
from entp.experiments import jobs
from entp.experiments.jobs import (
    expected_seconds,
    fitting,
    gpus_of,
    how_many,
    run_bytes,
    seconds_left,
    spread,
    step_of,
)
from entp.experiments.recipe import Arm, Recipe
from entp.experiments.recipes.addition_positions import positions_run
from entp.experiments.recipes.icl import RANDOM_PREFIX, icl_run
from entp.experiments.reproduce import reproduce
from entp.tasks.base import Batch
from entp.tasks.counting import Count3
from entp.training.cover import prefix_rows

H200 = 139 * 2**30
ROOT = Path(__file__).parents[2]


class Fails(RandomTokens):
    """Cannot make a batch."""

    def batch(self, *_: object) -> Batch:
        raise InputError("there is no such file.")


class OneTarget(Fails):
    """Is known to have one target a sequence."""

    sequence_targets = 1


def windows(mode: Mode = "decoder", size: str = "small", **changes: object) -> Run:
    """The shape of addition in windows of 64 characters."""
    task = RandomTokens(64, 14)
    return replace(Run(task, model_for(task, size), mode), **changes)  # type: ignore[arg-type]


def test_step_counts_the_rows_of_prefixes() -> None:
    assert step_of(windows("entp")).rows == 64 * 64 * 65 // 2
    assert step_of(windows("decoder")).rows == 64 * 64
    assert step_of(windows("entp")).flops > 10 * step_of(windows("decoder")).flops


def test_step_of_padded_batches_counts_what_a_captured_one_computes() -> None:
    run = positions_run("ENTP", "abacus")
    own = np.mean([prefix_rows(run.task.batch(0, "train", step, 64)) for step in range(9)])
    assert 1.3 * own < step_of(run).rows < 2.2 * own
    assert step_of(positions_run("decoder", "abacus")).rows == 64 * 34


def test_expected_seconds_follow_steps_and_the_clock() -> None:
    run = windows("entp", steps=1000)
    assert expected_seconds(run) == pytest.approx(4.0, rel=0.3)  # 3.6 ms a step on an H200
    assert expected_seconds(run, done=750) == pytest.approx(expected_seconds(run) / 4)
    assert expected_seconds(run, done=2000) == 0
    assert expected_seconds(replace(run, train=TrainConfig(max_seconds=1.0))) == 1.0
    assert expected_seconds(run) > 2 * expected_seconds(windows("decoder", steps=1000))


def with_prefixes(run: Run, steps: int) -> Run:
    """The run with its first steps at a decoder's cost."""
    return replace(run, curriculum=CurriculumConfig(steps, "random-prefix"))


def test_steps_count_in_the_mode_that_each_is_trained_in() -> None:
    entp, decoder = windows("entp", steps=1000), windows("decoder", steps=1000)
    assert step_of(with_prefixes(entp, 1000)) == step_of(decoder)
    assert expected_seconds(with_prefixes(entp, 1000)) == pytest.approx(expected_seconds(decoder))
    mixed = with_prefixes(entp, 750)
    rows, flops = (
        0.75 * a + 0.25 * b for a, b in zip(step_of(decoder), step_of(entp), strict=True)
    )
    assert step_of(mixed) == (round(rows), round(flops))
    seconds = 0.75 * expected_seconds(decoder) + 0.25 * expected_seconds(entp)
    assert expected_seconds(mixed) == pytest.approx(seconds)
    assert expected_seconds(mixed, done=750) == pytest.approx(expected_seconds(entp) / 4)
    assert run_bytes(mixed) == run_bytes(entp)  # its largest steps have to fit


def test_steps_count_with_the_batch_size_of_each() -> None:
    late = BatchScheduleConfig(step=500, batch_size=128)
    run = windows("decoder", steps=1000, batch_schedule=late)
    assert step_of(run).rows == 64 * (64 + 128) / 2


def test_a_random_prefix_of_icl_shares_a_gpu_as_a_decoder_does() -> None:
    runs = {mode: icl_run(mode, "linear") for mode in ("decoder", RANDOM_PREFIX)}
    seconds = {mode: expected_seconds(run) for mode, run in runs.items()}
    assert seconds[RANDOM_PREFIX] == pytest.approx(seconds["decoder"])
    many = {mode: fitting([run] * 100, H200, 16, True) for mode, run in runs.items()}
    assert many[RANDOM_PREFIX] == many["decoder"] == jobs.AT_ONCE


def test_runs_are_spread_over_all_gpus_unless_one_is_named() -> None:
    mps = {"CUDA_MPS_PIPE_DIRECTORY": "x"}
    assert spread(1, mps, "3") == [mps]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in spread(3, mps, None)] == ["0", "1", "2"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in spread(2, {}, "4, 6")] == ["4", "6"]
    assert all(mps.items() <= one.items() for one in spread(2, mps, None))
    assert gpus_of("cpu") == gpus_of("cuda:1") == 1
    assert gpus_of("auto") == max(1, torch.cuda.device_count())


def test_task_that_fails_is_its_own_runs_affair() -> None:
    run = small_run(task=Fails(), model=model_for(Fails(), "small"), steps=100)
    time = Fails().model_needs()["context_length"]
    all_targets = torch.ones(run.batch_size, time, dtype=torch.bool)
    flops = engine_flops(run.model, all_targets).total
    overhead = jobs.STEP_SECONDS + run.model.layers * jobs.LAYER_SECONDS
    seconds = overhead + flops / jobs.flops_per_second(run)
    assert expected_seconds(run) == pytest.approx(100 * seconds)
    few = replace(run, random_targets=RandomTargetsConfig(1))
    assert expected_seconds(few) < expected_seconds(run)
    one = replace(run, task=OneTarget())
    assert step_of(one).rows == run.batch_size * time
    assert fitting([run] * 4, H200, 16, True) == 4


def test_steps_of_the_measured_shapes_are_estimated_within_a_fifth() -> None:
    """results/engine_speed.json: the whole step of ENTP's kernels."""
    shapes = json.loads((ROOT / "results" / "engine_speed.json").read_text())["step"]["shapes"]
    assert len(shapes) == 4
    for shape in shapes:
        step = next(one for one in shape["steps"] if one["name"] == "entp triton")
        sizes = SIZES[shape["size"]]
        overhead = jobs.STEP_SECONDS + sizes["layers"] * jobs.LAYER_SECONDS
        rate = jobs.flops_per_second(
            small_run(task=Count3(), model=model_for(Count3(), shape["size"]))
        )
        expected = overhead + step["flops"] / rate
        assert 0.8 < expected / step["median"] < 1.25, shape["name"]


def recipe_of(*runs: Run) -> Recipe:
    arms = [Arm(run, number=number) for number, run in enumerate(runs)]
    return replace(small_recipe(generated_sequences=0), arms=arms)


def test_steps_that_are_done_do_not_count(tmp_path: Path) -> None:
    short = small_run(steps=6, mode="decoder")
    long = replace(short, steps=8, model=model_for(short.task, "small", layers=2))
    reproduce(recipe_of(replace(long, steps=5)), tmp_path, device="cpu")
    arms = recipe_of(short, long).runs()
    begun = [seconds_left(arm, tmp_path / "small") for arm in arms]
    blank = [seconds_left(arm, tmp_path / "nowhere") for arm in arms]
    assert begun[0] == blank[0] < blank[1]
    assert begun[1] < blank[0]
    assert seconds_left(arms[1], tmp_path / "nowhere", max_minutes=1e-6) == pytest.approx(6e-5)
    ended = recipe_of(replace(long, steps=5)).runs()[0]
    assert seconds_left(ended, tmp_path / "small") == 0


@pytest.mark.parametrize(
    ("run", "count", "memory", "cores", "at_once", "expected"),
    [
        (windows("decoder"), 100, H200, 16, True, jobs.AT_ONCE),
        (windows("decoder"), 100, H200, 16, False, jobs.IN_TURNS),
        (windows("decoder"), 3, H200, 16, True, 3),  # no more than there are
        (windows("decoder"), 100, H200, 4, True, 2),  # a core and a half for each
        (windows("decoder"), 100, H200, 1, True, 1),
        (windows("decoder"), 100, 5 * 2**30, 16, True, 3),  # memory
        (windows("decoder"), 100, 2**20, 16, True, 1),
        (windows("entp"), 100, H200, 16, True, 6),  # half a GPU's work each
        (windows("entp", "large"), 100, H200, 16, True, 1),  # each fills it
    ],
)
def test_as_many_as_a_gpu_serves(
    run: Run, count: int, memory: float, cores: int, at_once: bool, expected: int
) -> None:
    assert fitting([run] * count, memory, cores, at_once) == expected


def test_runs_of_the_paper_that_fill_a_gpu_are_alone_on_it() -> None:
    task = Count3(prompt_length=17, length=65)
    run = Run(task, model_for(task, "medium"), "entp")
    assert fitting([run] * 10, H200, 16, True) <= 2
    assert run_bytes(run) > 2**34


def test_cpu_serves_one() -> None:
    arms = recipe_of(small_run(), small_run(seed=1)).runs()
    assert how_many(arms, torch.device("cpu"), at_once=True) == 1
    assert fitting([], H200, 16, True) == 1
