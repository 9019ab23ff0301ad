"""`entp bench generate`: a real small run, and what its ratios mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entp.bench import generate
from entp.bench.options import BenchGenerateOptions
from entp.bench.shapes import RandomTokens
from entp.config import model_for
from entp.errors import InputError


@pytest.fixture(scope="module")
def section(in_one_process: Any) -> dict[str, Any]:
    options = BenchGenerateOptions(
        "small", batch_size=2, prompt_length=3, length=9, vocab=11, repeats=2, device="cpu"
    )
    with in_one_process():
        return generate.bench(options)


@pytest.mark.slow
def test_ratios_are_of_tokens_per_second(section: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in section["runs"]}
    assert list(rows) == ["entp uncached", "entp", "decoder uncached", "decoder"]
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert row["tokens_per_s"] == pytest.approx(2 * 6 / row["median"])
        assert row["ratio"] == pytest.approx(
            row["tokens_per_s"] / rows["entp uncached"]["tokens_per_s"]
        )
        assert row["decoder_ratio"] == pytest.approx(
            row["tokens_per_s"] / rows["decoder"]["tokens_per_s"]
        )
        assert row["peak_bytes"] > 0
    assert section["config"]["model"]["context_length"] == 9
    assert section["targets"] == []


@pytest.mark.slow
def test_report_names_everything(section: dict[str, Any]) -> None:
    text = generate.report(section)
    assert "generation, small, 2 sequences from 3 to 9 tokens" in text
    assert all(
        word in text
        for word in (
            "tokens/s",
            "to entp uncached",
            "to decoder",
            "peak memory MiB",
            "decoder uncached",
        )
    )
    target = {
        "shape": "generate",
        "measure": "tokens/s",
        "variant": "entp",
        "wanted": 3,
        "aim": 6,
        "reached": 4.0,
    }
    assert "4.00x  wanted" in generate.report({**section, "targets": [{**target, "met": "wanted"}]})


def test_variant_continues_prompts_to_the_end() -> None:
    config = model_for(RandomTokens(8, 11), "small", layers=2, heads=2, width=16)
    cpu = torch.device("cpu")
    cached, uncached = (
        generate.make_generation(config, "entp", cache, 3, 5, cpu)() for cache in (True, False)
    )
    assert cached.shape == (3, 8)  # type: ignore[attr-defined]
    assert torch.equal(cached, uncached)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 16}, "--length is 16: it must be above --prompt-length 16"),
        ({"batch_size": 0}, "--batch-size is 0: it must be at least 1"),
        ({"vocab": 0}, "--vocab is 0"),
        ({"prompt_length": 0}, "--prompt-length is 0: it must be at least 1"),
        ({"repeats": 0}, "--repeats is 0: it must be at least 1"),
        ({"warmup": -1}, "--warmup is -1: it must be at least 0"),
    ],
)
def test_bad_options_of_generation_are_input_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BenchGenerateOptions(**options)
