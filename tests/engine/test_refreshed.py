"""Mode refresh-N: what it means, that its rows and caches are exact, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from changes import CHANGES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_models import random_inputs, random_model
from small_networks import FAMILIES, ROUNDS, apart, begin, folder_of, gradients, worst
from torch import Tensor

import entp
from entp.config import check_mode, refresh_of
from entp.engine import refreshed
from entp.engine.generation.caches import NoCache
from entp.engine.generation.generate import make_cache
from entp.engine.generation.refresh_cache import RefreshCache
from entp.engine.masks import draw, visible
from entp.errors import InputError
from entp.model import Transformer
from entp.model.build import build_model
from entp.training.initialise import load_init

MODELS: list[dict[str, Any]] = [
    {},
    {"position_embedding": "rotary"},
    {"position_embedding": "relative", "kv_heads": 1},
    {"input_dim": 3},
    {"layers": 3, "causal_layers": 1},
    {"norm_placement": "post", "loops": 2},
]


def by_hand(model: Transformer, x: Tensor, every: int) -> Tensor:
    """Each prefix alone, under a mask that is written out: the first tokens see each other."""
    outputs = []
    for n in range(1, x.shape[1] + 1):
        fresh = n - n % every
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        mask[:fresh, :fresh] = True
        outputs.append(model.readout(model.encode(x[:, :n], mask=mask[None])[:, -1]))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("every", [2, 3, 7, 8, 100])
def test_what_it_means(every: int, impl: str) -> None:
    model = random_model()
    x = random_inputs(model, 2, 7)
    found = entp.predict(model, x, f"refresh-{every}", impl=impl)
    torch.testing.assert_close(found, by_hand(model, x, every), rtol=1e-10, atol=1e-10)


def test_between_entp_and_decoder() -> None:
    """As ENTP where all has just been computed anew, as a decoder before the first refresh."""
    model = random_model(layers=3)
    x = random_inputs(model, 2, 9)
    full, causal, found = (model(x, mode) for mode in ("entp", "decoder", "refresh-4"))
    same: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(found[:, [3, 7]], full[:, [3, 7]], **same)
    torch.testing.assert_close(found[:, :3], causal[:, :3], **same)
    assert (found - full)[:, [4, 5, 6, 8]].abs().amax((0, 2)).min() > 1e-3
    assert (found - causal)[:, 3:].abs().amax((0, 2)).min() > 1e-3
    torch.testing.assert_close(model(x, "refresh-10"), causal, **same)


def outputs_and_gradients(model: Any, x: Tensor, mode: str, **options: Any) -> list[Tensor]:
    found = entp.predict(model, x, mode, **options)
    return [found.detach(), *gradients(model, found).values()]


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("config", MODELS, ids=str)
def test_rows_are_exact(config: dict[str, Any], every: int) -> None:
    """Outputs and gradients against one pass for each prediction: padded, some targets, in chunks,
    with position ids."""
    model = random_model(**config)
    x, mode = random_inputs(model, 3, 9), f"refresh-{every}"
    generator = torch.Generator().manual_seed(0)
    some = torch.rand(3, 9, generator=generator) < 0.5
    cases: list[dict[str, Any]] = [
        {"at": some},
        {"lengths": torch.tensor([9, 1, 4])},
        {"at": some, "lengths": torch.tensor([3, 9, 5])},
        {"token_budget": 11},
        {"at": [2, 8]},
        {"at": torch.zeros(3, 9, dtype=torch.bool)},
    ]
    if "input_dim" not in config:
        ids = torch.randint(40, (3, 9), generator=generator).sort(1).values
        cases += [{"at": some, "position_ids": ids, "token_budget": 7}]
    for case in cases:
        want = outputs_and_gradients(model, x, mode, impl="reference", **case)
        for got, one in zip(outputs_and_gradients(model, x, mode, **case), want, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_kernels_are_exact(position: Any) -> None:
    """In Triton's interpreter, or on a GPU."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(position_embedding=position).float().to(device)
    x = random_inputs(model, 2, 7).to(device)
    at = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    got = outputs_and_gradients(model, x, "refresh-3", at=at, impl="triton")
    want = outputs_and_gradients(model, x, "refresh-3", at=at, impl="reference")
    size = max(float(g.abs().max()) for g in want[1:])
    assert apart(got[0], want[0]) < 1e-5
    assert max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) < 1e-5 * size


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_huggingface(family: str, tmp_path: Path) -> None:
    run, init = begin(folder_of(family, tmp_path))
    model = build_model(run.model)
    load_init(model, init)
    model = model.double()
    x = torch.randint(10, (2, 9), generator=torch.Generator().manual_seed(0))
    want, got = (entp.predict(model, x, "refresh-4", impl=impl) for impl in ("reference", "auto"))
    close = 1e-4 if family in ROUNDS else 1e-9
    assert apart(got, want) < close
    assert worst(gradients(model, got), gradients(model, want)) < close


@pytest.mark.filterwarnings("ignore::entp.EngineWarning")
@pytest.mark.parametrize("name", ["module that mixes rows", "lora", "hook that mixes rows"])
def test_changed_models_are_exact_or_run_one_by_one(name: str) -> None:
    model = random_model(layers=3)
    CHANGES[name].apply(model.double())
    x = random_inputs(model, 2, 7)
    want = outputs_and_gradients(model, x, "refresh-3", impl="reference")
    for got, one in zip(outputs_and_gradients(model, x, "refresh-3"), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-9, atol=1e-9)
    if "mixes" in name:
        with pytest.raises(InputError, match="is not exact for this model"):
            entp.predict(model, x, "refresh-3", impl="packed")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(1, 40), st.floats(0, 1))
@example(0, 2, 1, 0.5)
@example(0, 3, 1, 0.0)
def test_chunks_add_up_and_fit(seed: int, every: int, budget: int, share: float) -> None:
    mask = torch.rand(4, 11, generator=torch.Generator().manual_seed(seed)) < share
    chunks = list(refreshed.split(mask, every, budget))
    assert torch.equal(sum(chunk.int() for chunk in chunks), mask.int()) if chunks else ~mask.any()
    for chunk in chunks:
        ends = {(b, (t + 1) // every): t + 1 for b, t in chunk.nonzero().tolist()}
        assert sum(ends.values()) <= budget or len(ends) == 1


def test_predictions_share_rows() -> None:
    """A sequence has a row for each refresh, not for each prediction."""
    full = torch.ones(5, 32, dtype=torch.bool)
    assert len(refreshed.row_widths(full, 8)) == 5 * 5
    rows = {mode: refreshed.computed_rows(full, mode) for mode in ("entp", "refresh-8", "decoder")}
    assert rows["entp"] == 5 * 32 * 33 // 2
    assert rows["decoder"] == 5 * 32
    assert 4 < rows["entp"] / rows["refresh-8"] < 8  # a row is a few tokens longer, or padded
    assert refreshed.computed_rows(full, "refresh-100") == rows["decoder"]


# Generation


@torch.no_grad()
@pytest.mark.parametrize("given_ids", [False, True])
@pytest.mark.parametrize("every", [2, 3, 20])
@pytest.mark.parametrize("config", [MODELS[0], MODELS[1], MODELS[2], MODELS[5]], ids=str)
def test_cache_gives_the_logits_of_none(
    config: dict[str, Any], every: int, given_ids: bool
) -> None:
    """Prompts of different lengths, whose refreshes are due at different tokens."""
    model, mode = random_model(**config), f"refresh-{every}"
    tokens = random_inputs(model, 3, 13)
    lengths = torch.tensor([4, 1, 3])
    ids = torch.arange(13).repeat(3, 1) * 2 if given_ids else None
    cache = make_cache(model, mode, 13, tokens_BT=tokens, position_ids=ids)
    assert isinstance(cache, RefreshCache)
    plain = NoCache(model, mode, None)
    prompts = tokens[:, :4] * (torch.arange(4) < lengths[:, None])
    start = None if ids is None else ids[:, :4]
    both = [one.prefill(prompts, lengths, start) for one in (cache, plain)]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)
    for t in range(4, 13):
        own = None if ids is None else ids[torch.arange(3), lengths + t - 4]
        both = [one.append(tokens[:, t], own) for one in (cache, plain)]
        torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)


def test_generated_tokens() -> None:
    """Greedy ones are those of the definition; before the first refresh a decoder's."""
    model = random_model(layers=3)
    prompts = [[1, 2, 3], [4]]
    found = entp.generate(model, prompts, 6, "refresh-4")
    for prompt, tokens in zip(prompts, found, strict=True):
        for n in range(len(prompt), len(tokens)):
            logits = entp.predict(model, torch.tensor([tokens[:n]]), "refresh-4", impl="reference")
            assert int(logits[0, -1].argmax()) == tokens[n]
    assert entp.generate(model, prompts, 6, "refresh-4", cache=False) == found
    late = entp.generate(model, prompts, 6, "refresh-100")
    assert late == entp.generate(model, prompts, 6, "decoder")


def test_generation_beyond_the_context() -> None:
    model = random_model(context_length=6)
    with_cache, without = (
        entp.generate(model, [[1, 2, 3]], 9, "refresh-4", cache=cache, slide=True)
        for cache in (True, False)
    )
    assert with_cache == without


# Names, pictures, reports


@pytest.mark.parametrize(
    "name", ["refresh-1", "refresh-0", "refresh-", "refresh-08", "refresh-2.5"]
)
def test_other_names_are_refused(name: str) -> None:
    assert refresh_of(name) is None
    with pytest.raises(InputError, match=r"allowed are entp, decoder, prefix-lm, refresh-N"):
        check_mode(name)


def test_drawn() -> None:
    lines = draw("refresh-3", 8).splitlines()
    last = [line.split("   ")[-1].split() for line in lines]
    prefix = visible("prefix-lm", 8, prefix=6)[0]
    assert last == [["#" if seen else "." for seen in row] for row in prefix.tolist()]


def test_check_has_its_rows() -> None:
    rows = [row for row in entp.check(random_model()).rows if row.mode == "refresh-3"]
    assert [row.implementation for row in rows] == ["packed", "triton", "generation, cached"]
    assert all(row.verdict == "exact" for row in rows if row.outputs is not None)
