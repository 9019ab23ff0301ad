"""The table of complexities: operations are the formulas', memory grows with the paper's powers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from entp import InputError, ModelConfig, Transformer
from entp.engine.generation.caches import DecoderCache
from entp.theory.complexity import (
    KINDS,
    MEASURES,
    VOCAB,
    StreamingDecoder,
    _measure_one,
    fit_power,
    kept_bytes,
    make,
    measure,
    report,
    summary,
)

LENGTHS = [16, 32, 64, 128, 256, 512]
WIDTH, LAYERS, HEADS = 4, 3, 2


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return measure(LENGTHS, width=WIDTH, layers=LAYERS, heads=HEADS)


def column(result: dict[str, Any], kind: str, what: str) -> list[float]:
    return [point[what] for point in result["points"][kind]]


def small_model(layers: int = LAYERS, width: int = WIDTH, positions: int = 80) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(VOCAB, positions, layers, HEADS, width))


@torch.no_grad()
def one(kind: str, n: int, **shape: int) -> dict[str, float]:
    return _measure_one(kind, small_model(**shape), n)


# Time


@pytest.mark.parametrize("kind", KINDS)
def test_the_operations_that_ran_are_the_formulas(result: dict[str, Any], kind: str) -> None:
    """Of the cached ENTP all but layer 1's new key and new row, which are elementwise products."""
    not_counted = [8 * n * WIDTH if kind == "entp, cached" else 0 for n in LENGTHS]
    counted = column(result, kind, "operations")
    assert [a + b for a, b in zip(counted, not_counted, strict=True)] == column(
        result, kind, "formula"
    )


def test_the_operations_of_the_table_and_those_it_leaves_out(result: dict[str, Any]) -> None:
    attention, linear, readout = 4 * WIDTH * LAYERS, 24 * WIDTH**2 * LAYERS, 2 * WIDTH * VOCAB
    assert column(result, "entp", "operations") == [
        attention * n**2 + linear * n + readout for n in LENGTHS
    ]
    for kind in ("decoder", "decoder, O(D)"):
        assert column(result, kind, "operations") == [
            attention * n + linear + readout for n in LENGTHS
        ]


def test_operations_grow_as_the_table_says(result: dict[str, Any]) -> None:
    assert 1.8 < result["powers"]["entp"]["operations"] < 2
    assert 1.7 < result["powers"]["entp, cached"]["operations"] < 2
    assert 0.8 < result["powers"]["decoder"]["operations"] < 1
    assert (
        result["powers"]["decoder, O(D)"]["operations"] == result["powers"]["decoder"]["operations"]
    )


def test_a_cached_token_of_two_layers_is_linear() -> None:
    """The table's n² is that of a model that keeps nothing: with layer 1 kept, none is left."""
    for layers, linear in ((2, True), (3, False)):
        for what in ("operations", "formula"):
            a, b, c = (one("entp, cached", n, layers=layers)[what] for n in (20, 40, 60))
            assert (c - b == b - a) == linear
    a, b, c = (one("entp", n, layers=2)["operations"] for n in (20, 40, 60))
    assert c - b > b - a


def test_seconds_are_measured(result: dict[str, Any]) -> None:
    for kind in KINDS:
        assert all(0 < s < 5 for s in column(result, kind, "seconds"))


# Precomputed memory


def test_what_is_kept_between_tokens(result: dict[str, Any]) -> None:
    assert column(result, "entp", "precomputed") == [0] * len(LENGTHS)
    for kind in ("decoder", "decoder, O(D)"):  # a key and a value per layer, in float32
        assert column(result, kind, "precomputed") == [4 * 2 * LAYERS * WIDTH * n for n in LENGTHS]
    state = 4 * (5 * WIDTH + HEADS)  # embedding, q, k, v and running sums of layer 1, in float32
    tables = 2 * 8  # where a row stands, int64: made again with each token
    for n, kept in zip(LENGTHS, column(result, "entp, cached", "precomputed"), strict=True):
        assert state * n <= kept <= (state + tables) * n + 100


def test_precomputed_memory_grows_as_the_table_says(result: dict[str, Any]) -> None:
    assert result["powers"]["entp"]["precomputed"] is None
    assert result["powers"]["decoder"]["precomputed"] == pytest.approx(1, abs=1e-9)
    assert result["powers"]["entp, cached"]["precomputed"] == pytest.approx(1, abs=0.01)


def test_what_entp_keeps_does_not_depend_on_the_layers() -> None:
    few, many = (one("entp, cached", 20, layers=layers)["precomputed"] for layers in (2, 5))
    assert few == many
    few, many = (one("decoder", 20, layers=layers)["precomputed"] for layers in (2, 5))
    assert many == 2.5 * few


def test_shared_memory_is_counted_once() -> None:
    cache = DecoderCache(small_model(), 6)
    whole = torch.zeros(10)
    cache.keys, cache.values = [whole, whole[:5]], [torch.zeros(3)]
    assert kept_bytes(cache) == 52


# Additional memory


def test_additional_memory_grows_as_the_table_says(result: dict[str, Any]) -> None:
    assert 0.9 < result["powers"]["entp"]["additional"] < 1.4
    assert 0.9 < result["powers"]["entp, cached"]["additional"] < 1.4
    assert abs(result["powers"]["decoder, O(D)"]["additional"]) < 1e-9
    # At 16 there is one block of keys only.
    assert len(set(column(result, "decoder, O(D)", "additional")[1:])) == 1


def test_a_decoder_that_writes_its_scores_down_grows_after_all(result: dict[str, Any]) -> None:
    assert result["powers"]["decoder"]["additional"] > 0.5
    ordinary, streaming = (
        column(result, kind, "additional") for kind in ("decoder", "decoder, O(D)")
    )
    assert ordinary[-1] > 4 * streaming[-1]
    assert column(result, "entp", "additional")[-1] > 10 * ordinary[-1]


@pytest.mark.parametrize("kind", ["entp", "decoder", "decoder, O(D)"])
def test_additional_memory_does_not_depend_on_the_layers(kind: str) -> None:
    one(kind, 20, layers=2)  # what is set up once
    few, many = (one(kind, 20, layers=layers)["additional"] for layers in (2, 6))
    assert many == few


# Parts


@torch.no_grad()
def test_the_decoder_in_little_memory_says_the_same() -> None:
    model = small_model(width=12).double()
    tokens = torch.randint(VOCAB, (1, 60))
    ordinary, streaming = DecoderCache(model, 60), StreamingDecoder(model, 60)
    for cache in (ordinary, streaming):
        cache.prefill(tokens[:, :10], torch.tensor([10]))
    for t in range(10, 60):
        expected = ordinary.append(tokens[:, t])
        torch.testing.assert_close(streaming.append(tokens[:, t]), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(expected, model(tokens, "decoder")[:, -1], rtol=1e-12, atol=1e-13)


def test_what_cannot_be_measured() -> None:
    with pytest.raises(InputError, match="one sequence, got 2"):
        StreamingDecoder(small_model(), 5).prefill(
            torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 3])
        )
    with pytest.raises(InputError, match="unknown kind 'decode'"):
        make("decode", small_model(), 5)
    with pytest.raises(InputError, match="at least three different ones"):
        measure([16, 32, 16])
    with pytest.raises(InputError, match="from 2 on"):
        measure([1, 16, 32])
    with pytest.raises(InputError, match="layers is 1"):
        measure(layers=1)


def test_measuring_leaves_the_callers_threads_and_draws_alone() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    try:
        found = measure([4, 2, 3], width=2, layers=2, heads=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.rand(3), expected)
    assert found["lengths"] == [2, 3, 4]
    assert column(found, "decoder", "operations") == sorted(column(found, "decoder", "operations"))


def test_fitted_powers() -> None:
    lengths = [2, 4, 8, 16, 32]
    assert fit_power(lengths, [3 * n**2.5 for n in lengths]) == pytest.approx(2.5)
    assert fit_power(lengths, [1e6, 1e5, 8, 16, 32]) == pytest.approx(1)  # the upper half only
    assert fit_power(lengths, [0] * 5) is None
    # What is 0 below the middle does not matter.
    assert fit_power(lengths, [0, 0, 8, 16, 32]) == pytest.approx(1)


def test_the_report(result: dict[str, Any]) -> None:
    text = report(json.loads(json.dumps(result)))
    lines = text.splitlines()
    powers = {
        line.split("  ")[0]: line.split()[-len(MEASURES) :]
        for line in lines
        if "N/A" in line or line.startswith("dec")
    }
    assert powers["paper: encoder-only"] == ["2", "2", "N/A", "1"]
    assert powers["entp"][2] == "N/A"
    assert powers["decoder"][2] == "1.00"
    assert powers["decoder, O(D)"][3] == "0.00"
    assert ["1", "1", "1", "0"] in [
        line.split()[-4:] for line in lines if line.startswith("paper: decoder-only")
    ]
    changed = json.loads(json.dumps(result))
    changed["points"]["decoder"][-1] = {
        "operations": 2345,
        "seconds": 0.0125,
        "precomputed": 3072,
        "additional": 1536,
    }
    changed["points"]["decoder"][-1]["formula"] = 2345
    changed["powers"]["decoder"]["additional"] = -0.004
    told = [line.split() for line in report(changed).splitlines()]
    assert ["512", "decoder", "2,345", "12.50", "3.00", "1.50"] in told
    assert next(words for words in told if words[:1] == ["decoder"])[-1] == "0.00"  # never -0.00
    assert "growth as n^p from n = 128" in text  # the upper half
    assert f"far above 6 D = {6 * WIDTH}." in text
    cached, whole = (column(result, kind, "formula")[-1] for kind in ("entp, cached", "entp"))
    assert f"does {100 * cached / whole:.0f}% of the" in text
    assert cached < whole
    assert "except for: entp, cached." in text
    assert f"n² is left in {LAYERS - 2} of {LAYERS} layers" in text
    assert [line.partition(":")[0] for line in lines[-8:] if not line.startswith(" ")] == list(
        MEASURES
    )


def test_the_summary_judges(result: dict[str, Any]) -> None:
    how, verdict = summary(result)
    assert verdict == "holds"
    assert f"operations {result['powers']['entp']['operations']:.2f} and" in how
    for kind, what, wrong in (
        ("entp", "operations", 1.0),
        ("decoder", "operations", 2.0),
        ("decoder", "precomputed", 0.5),
        ("entp", "precomputed", 1.0),
        ("entp", "additional", 2.0),
        ("decoder, O(D)", "additional", 1.0),
    ):
        changed = json.loads(json.dumps(result))
        changed["powers"][kind][what] = wrong
        assert summary(changed)[1] == "FAILS"
