"""`entp bench scaling`: a real small run has every number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entp.bench import scaling
from entp.bench.options import BenchScalingOptions
from entp.bench.shapes import RandomTokens
from entp.config import ModelConfig, Run, model_for
from entp.engine.flops import token_flops
from entp.errors import InputError
from entp.stats import fit_exponent


@pytest.fixture(scope="module")
def section(in_one_process: Any) -> dict[str, Any]:
    options = BenchScalingOptions("8,16,24", repeats=1, warmup=0, device="cpu")
    with in_one_process():
        return scaling.bench(options)


@pytest.mark.slow
def test_a_run_has_every_number(section: dict[str, Any]) -> None:
    assert [point["n"] for point in section["points"]] == [8, 16, 24]
    for point in section["points"]:
        entp, decoder = point["entp"], point["decoder"]
        assert entp["step_flops"] > decoder["step_flops"]
        for mode in (entp, decoder):
            assert len(mode["step_seconds"]) == len(mode["token_seconds"]) == 1
            assert min(mode["step"], mode["token"]) > 0
            assert mode["memory"] > 2**20
            assert mode["chunks"] == 1
    fits = {(fit["what"], fit["mode"]): fit for fit in section["fits"]}
    assert set(fits) == {(what, mode) for mode, what in scaling.ASYMPTOTIC}
    assert all(fit["from_n"] == 16 for fit in fits.values())
    assert fits["step", "decoder"]["flops_exponent"] == pytest.approx(1, abs=0.1)
    assert 1.5 < fits["step", "entp"]["flops_exponent"] < 2.1
    assert fits["memory", "entp"]["flops_exponent"] is None


@pytest.mark.slow
def test_the_report_has_both_tables(section: dict[str, Any]) -> None:
    text = scaling.report(section)
    assert "growth as n^p from n = 16" in text
    for words in (
        "training step, entp",
        "one more token, decoder",
        "step's peak memory, entp",
        "p of exact FLOPs",
        "token ms",
    ):
        assert words in text


def test_the_tables_show_what_was_measured() -> None:
    step = {
        "step_seconds": [0.002, 0.001, 0.004],
        "step": 0.002,
        "step_flops": 3e9,
        "chunks": 2,
        "memory": 3 * 2**20,
    }
    points = [
        {"n": n, **{mode: {**step, "token_seconds": [0.0005]} for mode in scaling.MODES}}
        for n in (8, 16, 32)
    ]
    fit = {
        "what": "step",
        "mode": "entp",
        "from_n": 16,
        "exponent": 1.5,
        "standard_error": 0.25,
        "flops_exponent": 2.75,
    }
    fits = [
        {**fit, "asymptotic": 3},
        {**fit, "what": "memory", "standard_error": None, "flops_exponent": None, "asymptotic": 2},
    ]
    where = {"device": "somewhere", "threads": 1, "torch": "2"}
    text = scaling.report(
        {
            "environment": where,
            "config": {"size": "small", "batch_size": 4},
            "points": points,
            "fits": fits,
        }
    )
    lines = [line.split() for line in text.splitlines()]
    assert [
        "32",
        "decoder",
        "2.00",
        "1.00..4.00",
        "2",
        "1.5",
        "3",
        "0.50",
        "0.50..0.50",
    ] in lines  # ms, TFLOP/s, MiB, ms
    assert ["training", "step,", "entp", "1.50", "0.25", "2.75", "3"] in lines
    assert ["step's", "peak", "memory,", "entp", "1.50", "-", "-", "2"] in lines


def test_a_step_that_adds_no_memory_has_a_growth_all_the_same() -> None:
    points = [
        {"n": n, "entp": {"memory": memory}} for n, memory in ((8, 0), (16, 0), (32, 0), (64, 0))
    ]
    assert scaling._fitted(points, "entp", "memory")["exponent"] == 0


def test_operations_are_of_the_whole_batch_and_of_one_sequences_token() -> None:
    task = RandomTokens(16, 64)
    for mode in ("entp", "decoder"):
        runs = [Run(task, model_for(task, "small"), mode, batch_size=size) for size in (1, 3)]
        one, three = (scaling._counts(run, 16, torch.device("cpu")) for run in runs)
        assert (three["step_flops"], three["token_flops"]) == (
            3 * one["step_flops"],
            one["token_flops"],
        )


def test_counts_tend_to_the_papers_powers() -> None:
    """At lengths where attention dominates, exact operations grow as the paper's table says."""
    config = ModelConfig(vocab=64, context_length=64, layers=3, heads=3, width=192)
    long = [2**k for k in range(14, 20)]
    for mode in ("entp", "decoder"):
        counts = [float(token_flops(config, n, mode).total) for n in long]
        assert fit_exponent(long, counts)[0] == pytest.approx(
            scaling.ASYMPTOTIC[mode, "token"], abs=0.05
        )


def test_step_beyond_the_budget_counts_its_chunks() -> None:
    task = RandomTokens(256, 64)
    for mode, chunks in (("entp", 2), ("decoder", 1)):
        run = Run(task, model_for(task, "small"), mode, batch_size=1)
        assert scaling._counts(run, 256, torch.device("cpu"))["chunks"] == chunks


@pytest.mark.parametrize("mode", ["entp", "decoder"])
@pytest.mark.parametrize(("n", "repeats"), [(2, 3), (20, 5)])
def test_tokens_are_timed_one_by_one(mode: Any, n: int, repeats: int) -> None:
    config = ModelConfig(vocab=64, context_length=n, layers=2, heads=2, width=8)
    seconds = scaling.token_seconds(config, mode, n, 2, 2, repeats, torch.device("cpu"))
    assert len(seconds) == repeats
    assert min(seconds) > 0


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("32,64", "at least three different lengths"),
        ("32,32,32", "at least three different lengths"),
        ("1,2,3", "of at least 2"),
        ("32,many", "is not a list of whole numbers such as 32,64,128"),
    ],
)
def test_bad_lengths_are_sentences(lengths: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BenchScalingOptions(lengths)


@pytest.mark.parametrize(
    ("name", "value", "least"), [("batch-size", 0, 1), ("repeats", 0, 1), ("warmup", -1, 0)]
)
def test_other_options_that_are_too_small_are_sentences(name: str, value: int, least: int) -> None:
    with pytest.raises(InputError, match=f"--{name} is {value}: it must be at least {least}"):
        BenchScalingOptions(**{name.replace("-", "_"): value})  # type: ignore[arg-type]


def test_lengths_are_sorted() -> None:
    assert BenchScalingOptions("64, 8,16").numbers() == [8, 16, 64]
