"""Generation: caches against no cache and the paper's loop, drawing, stopping, and every error."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from entp.config import MODES, ModelConfig
from entp.engine.generation.caches import Cache, DecoderCache, EntpCache, NoCache
from entp.engine.generation.generate import Sampling, generate, pick
from entp.errors import InputError
from entp.model import Transformer

torch.set_num_threads(1)

VOCAB = 11
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8], [7, 10, 0, 2, 8, 4, 6]]
SHAPES = {
    "one layer": {"layers": 1},
    "two layers": {"layers": 2},
    "three layers": {"layers": 3},
    "four layers": {"layers": 4, "heads": 4},
    "no positions": {"layers": 3, "position_embedding": "none"},
    "given positions": {"layers": 2, "position_embedding": "given"},
    "no norm": {"layers": 3, "norm": "none", "activation": "relu"},
    "scale one": {"layers": 3, "attention_scale": "one", "heads": 1},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
modes = pytest.mark.parametrize("mode", MODES)


def build(dtype: torch.dtype = torch.float64, **shape: object) -> Transformer:
    """A tiny model whose outputs differ between tokens and between modes."""
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            **{"vocab": VOCAB, "context_length": 24, "layers": 3, "heads": 2, "width": 8, **shape}
        )
    )
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor += 0.3 * torch.randn_like(tensor)
    return model.to(dtype)


def batch(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    return torch.tensor([p + [0] * (longest - len(p)) for p in prompts]), torch.tensor(
        [len(p) for p in prompts]
    )


def cache_of(model: Transformer, mode: str, prefix: Tensor | None) -> Cache:
    """The cache that generate takes."""
    if mode == "entp" and model.config.layers > 1:
        return EntpCache(model, 24)
    return DecoderCache(model, 24, prefix)


@torch.no_grad()
def step_logits(cache: Cache, new: Tensor, prompts: list[list[int]] = PROMPTS) -> Tensor:
    """Logits (steps + 1, B, vocab) when the tokens new (steps, B) are appended one by one."""
    return torch.stack([cache.prefill(*batch(prompts)), *(cache.append(token) for token in new)])


@torch.no_grad()
def paper_logits(model: Transformer, mode: str, new: Tensor, prefix: Tensor | None) -> Tensor:
    """The same, one sequence at a time and without padding, from the reference implementation."""
    steps = []
    for step in range(len(new) + 1):
        rows = []
        for b, prompt in enumerate(PROMPTS):
            x = torch.tensor([prompt + new[:step, b].tolist()])
            p = None if prefix is None else int(prefix[b])
            rows.append(model(x, mode=mode, prefix=p, at=[x.shape[1] - 1], impl="reference")[0, 0])
        steps.append(torch.stack(rows))
    return torch.stack(steps)


@shapes
@modes
def test_each_steps_logits_agree(mode: str, shape: dict[str, object]) -> None:
    model = build(**shape)
    prefix = torch.tensor([2, 1, 3, 1, 5]) if mode == "prefix-lm" else None
    new = torch.randint(VOCAB, (9, len(PROMPTS)))
    cached = step_logits(cache_of(model, mode, prefix), new)
    plain = step_logits(NoCache(model, mode, prefix), new)
    paper = paper_logits(model, mode, new, prefix)
    largest = paper.abs().amax(-1, keepdim=True)
    assert cached.shape == (10, len(PROMPTS), VOCAB)
    assert ((cached - paper).abs() / largest).max() < 1e-9
    assert ((plain - paper).abs() / largest).max() < 1e-9


@shapes
@modes
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "seed": 5}],
    ids=["greedy", "drawn"],
)
def test_cached_tokens_equal_uncached(
    mode: str, shape: dict[str, object], sampling: dict[str, float]
) -> None:
    model = build(**shape)
    with_cache = generate(model, PROMPTS, 12, mode, **sampling)
    assert with_cache == generate(model, PROMPTS, 12, mode, cache=False, **sampling)
    assert [row[: len(p)] for row, p in zip(with_cache, PROMPTS, strict=True)] == PROMPTS
    assert [len(row) - len(p) for row, p in zip(with_cache, PROMPTS, strict=True)] == [12] * len(
        PROMPTS
    )


def test_modes_and_prefixes_differ() -> None:
    """Otherwise the comparisons above would prove nothing."""
    model = build()
    new = torch.randint(VOCAB, (3, len(PROMPTS)))
    outputs = [step_logits(cache_of(model, mode, None), new) for mode in ("entp", "decoder")]
    outputs += [
        step_logits(DecoderCache(model, 24, torch.tensor(p)), new)
        for p in ([2, 1, 2, 2, 2], [5, 1, 3, 3, 7])
    ]
    longest = [out[:, 4] for out in outputs]
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(longest) for b in longest[:i])


@pytest.mark.parametrize(
    "prompts", [[[4]], [[4], [5]], [[1, 2, 3]]], ids=["one token", "two of one token", "one prompt"]
)
@modes
def test_small_batches(mode: str, prompts: list[list[int]]) -> None:
    model = build()
    six = generate(model, prompts, 6, mode)
    assert six == generate(model, prompts, 6, mode, cache=False)
    assert generate(model, prompts, 1, mode) == [row[:-5] for row in six]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entp_state_is_at_least_fp32(dtype: torch.dtype) -> None:
    cache = EntpCache(build(dtype), 24)
    logits = step_logits(cache, torch.randint(VOCAB, (4, len(PROMPTS))))
    assert {cache.q.dtype, cache.k.dtype, cache.v.dtype, cache.z.dtype, cache.o.dtype} == {
        torch.float32
    }
    assert logits.dtype == dtype


@modes
def test_runs_under_autocast(mode: str) -> None:
    model, new = build(torch.float32), torch.randint(VOCAB, (9, len(PROMPTS)))
    prefix = torch.tensor([2, 1, 3, 1, 5]) if mode == "prefix-lm" else None
    exact = step_logits(NoCache(model, mode, prefix), new)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = step_logits(cache_of(model, mode, prefix), new)
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()


@torch.no_grad()
def test_entp_state_stays_exact_over_many_tokens() -> None:
    model, tokens = (
        build(torch.float32, position_embedding="none", layers=2),
        torch.randint(VOCAB, (150,)),
    )
    cache = EntpCache(model, 150)
    cache.prefill(tokens[None, :1], torch.tensor([1]))
    last = [cache.append(token[None]) for token in tokens[1:]][-1]
    whole = model(tokens[None], at=[149])[:, 0]
    assert (last - whole).abs().max() < 1e-5 * whole.abs().max()


@modes
def test_ragged_batch_equals_each_prompt_alone(mode: str) -> None:
    model = build()
    together = generate(model, PROMPTS, 10, mode)
    assert together == [generate(model, [prompt], 10, mode)[0] for prompt in PROMPTS]
    assert len({tuple(row[-10:]) for row in together}) > 1


def test_one_layer_is_the_decoder() -> None:
    model = build(layers=1)
    assert generate(model, PROMPTS, 12, "entp") == generate(model, PROMPTS, 12, "decoder")


@modes
@pytest.mark.parametrize("cache", [True, False])
def test_tensor_and_list_outputs_agree(mode: str, cache: bool) -> None:
    model, rows = build(), [[1, 2, 3], [4, 5, 6]]
    out = generate(model, torch.tensor(rows, dtype=torch.int32), 7, mode, cache=cache)
    assert out.dtype == torch.int64
    assert out.shape == (2, 10)
    assert out.tolist() == generate(model, rows, 7, mode, cache=cache)
    any_integers = list(torch.tensor(rows))
    assert out.tolist() == generate(model, any_integers, 7, mode, cache=cache)


@pytest.mark.parametrize("cache", [True, False])
def test_default_prefix_is_the_whole_prompt(cache: bool) -> None:
    model = build()
    whole = generate(model, PROMPTS, 8, "prefix-lm", cache=cache)
    assert whole == generate(
        model, PROMPTS, 8, "prefix-lm", prefix=[len(p) for p in PROMPTS], cache=cache
    )
    assert generate(model, PROMPTS, 8, "prefix-lm", prefix=1, cache=cache) == generate(
        model, PROMPTS, 8, "decoder"
    )


def test_prefix_may_be_one_number_or_one_per_prompt() -> None:
    model, rows = build(), [[1, 2, 3], [4, 5, 6, 7]]
    assert generate(model, rows, 5, "prefix-lm", prefix=3) == generate(
        model, rows, 5, "prefix-lm", prefix=[3, 3]
    )
    alone = [
        generate(model, [row], 5, "prefix-lm", prefix=p)[0]
        for row, p in zip(rows, (2, 4), strict=True)
    ]
    assert generate(model, rows, 5, "prefix-lm", prefix=[2, 4]) == alone


@modes
def test_stop_ends_lists_and_fills_tensors(mode: str) -> None:
    model, rows = build(), [[1, 2, 3], [4, 5, 6], [0, 9, 3], [8, 8, 1]]
    free = generate(model, rows, 10, mode, temperature=2.0, seed=3)
    stop = free[0][5]  # drawn by the first row within three tokens
    cut = generate(model, rows, 10, mode, temperature=2.0, seed=3, stop=stop)
    filled = generate(model, torch.tensor(rows), 10, mode, temperature=2.0, seed=3, stop=stop)
    assert len(cut[0]) <= 6
    assert len({len(row) for row in cut}) > 1
    for whole, row in zip(free, cut, strict=True):
        drawn = whole[3:]
        assert row == whole[: 3 + drawn.index(stop) + 1 if stop in drawn else None]
    assert filled.tolist() == [row + [stop] * (13 - len(row)) for row in cut]


def test_stop_in_the_prompt_does_not_count() -> None:
    model = build()
    out = generate(model, [[1, 2, 3]], 6, stop=2)[0]
    assert len(out) > 3
    assert out == generate(model, [[1, 2, 3]], 6)[0][: len(out)]


def test_generation_ends_when_all_rows_stopped() -> None:
    model, prompts, reads = build(), torch.tensor([[1, 2]]), []
    third = int(generate(model, prompts, 3, "decoder")[0, -1])
    model.blocks[-1].register_forward_hook(lambda *_: reads.append(1))
    assert generate(model, prompts, 20, "decoder", stop=third, cache=False).shape == (1, 22)
    assert len(reads) <= 3


@modes
def test_seed_makes_drawing_repeatable(mode: str) -> None:
    model = build()
    first = generate(model, PROMPTS, 12, mode, temperature=1.0, seed=1)
    torch.manual_seed(99)
    assert generate(model, PROMPTS, 12, mode, temperature=1.0, seed=1) == first
    assert generate(model, PROMPTS, 12, mode, temperature=1.0, seed=2) != first


def test_without_seed_the_global_generator_draws() -> None:
    model, state = build(), torch.get_rng_state()
    runs = [generate(model, PROMPTS, 12, temperature=1.0) for _ in range(2)]
    torch.set_rng_state(state)
    assert generate(model, PROMPTS, 12, temperature=1.0) == runs[0] != runs[1]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-300}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_narrow_sampling_is_greedy(narrow: dict[str, float], dtype: torch.dtype) -> None:
    model = build(dtype)
    assert generate(model, PROMPTS, 12, **{"temperature": 1.0, "seed": 0, **narrow}) == generate(
        model, PROMPTS, 12
    )


LOGITS = torch.tensor([0.5, 2.0, 1.0, -1.0, 1.5, 0.0])


def drawn(sampling: Sampling, draws: int = 20_000) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(pick(LOGITS.expand(draws, -1), sampling, generator).tolist())


def test_draws_follow_softmax() -> None:
    counts = drawn(Sampling(temperature=0.7))
    assert [counts[token] / 20_000 for token in range(6)] == pytest.approx(
        (LOGITS / 0.7).softmax(-1).tolist(), abs=0.015
    )


def test_draws_round_neither_half_nor_double_precision() -> None:
    rows, sampling = LOGITS.bfloat16().expand(5000, -1), Sampling(temperature=0.7, top_p=0.93)
    half, single = (
        pick(logits, sampling, torch.Generator().manual_seed(0)) for logits in (rows, rows.float())
    )
    assert torch.equal(half, single)
    nearly = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert pick(nearly.expand(100, -1), Sampling(temperature=1e-14)).tolist() == [1] * 100


@pytest.mark.parametrize(
    ("k", "allowed"), [(1, {1}), (3, {1, 4, 2}), (6, set(range(6))), (50, set(range(6)))]
)
def test_top_k_draws_from_the_k_best(k: int, allowed: set[int]) -> None:
    assert set(drawn(Sampling(temperature=1.0, top_k=k))) == allowed


def test_top_k_keeps_k_of_equal_tokens() -> None:
    assert len(set(pick(torch.zeros(1000, 6), Sampling(temperature=1.0, top_k=2)).tolist())) == 2


def test_top_p_draws_from_the_fewest_that_reach_p() -> None:
    best_first = [1, 4, 2, 0, 5, 3]
    reached = LOGITS.softmax(-1)[best_first].cumsum(-1)
    for count in range(1, 6):
        just_above, just_below = float(reached[count - 1]) + 1e-3, float(reached[count - 1]) - 1e-3
        assert set(drawn(Sampling(temperature=1.0, top_p=just_below))) == set(best_first[:count])
        more = set(best_first[: count + 1])
        assert set(drawn(Sampling(temperature=1.0, top_p=just_above))) == more
    assert set(drawn(Sampling(temperature=1.0, top_p=1.0))) == set(range(6))
    half = pick(torch.zeros(100, 4), Sampling(temperature=1.0, top_p=0.5))
    assert set(half.tolist()) == {0, 1}  # they reach it exactly


def test_top_p_is_measured_after_top_k() -> None:
    share_of_best = float(LOGITS[[1, 4]].softmax(-1)[0])
    assert set(drawn(Sampling(temperature=1.0, top_k=2, top_p=share_of_best - 1e-3))) == {1}
    assert set(drawn(Sampling(temperature=1.0, top_k=2, top_p=share_of_best + 1e-3))) == {1, 4}


@modes
def test_model_and_prompts_stay_as_they_were(mode: str) -> None:
    model, prompts = build(), torch.tensor([[1, 2, 3]])
    for training in (True, False):
        model.train(training)
        out = generate(model, prompts, 4, mode)
        assert model.training is training
    assert prompts.tolist() == [[1, 2, 3]]
    model(out, mode=mode, prefix=3).sum().backward()  # the tokens can be trained on
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@modes
def test_on_cuda_as_on_the_cpu(mode: str) -> None:
    model = build(width=16)
    expected = generate(model, PROMPTS, 12, mode)
    model.cuda()
    assert generate(model, PROMPTS, 12, mode) == expected
    assert generate(model, torch.tensor(PROMPTS[:1]), 12, mode).tolist() == expected[:1]
    sampling = {"temperature": 1.0, "seed": 1}
    assert generate(model, PROMPTS, 12, mode, **sampling) == generate(
        model, PROMPTS, 12, mode, cache=False, **sampling
    )
    assert not generate(model, torch.tensor([[1, 2, 3]]), 12, mode).is_cuda
    assert generate(model.bfloat16(), torch.tensor([[1, 2, 3]]).cuda(), 12, mode).is_cuda


@modes
def test_every_position_can_be_used(mode: str) -> None:
    model = build(context_length=8)
    assert len(generate(model, [[1, 2, 3]], 6, mode)[0]) == 9
    with pytest.raises(InputError, match="need 9 positions and the model has 8"):
        generate(model, [[1], [1, 2, 3]], 7, mode)
    assert (
        len(generate(build(context_length=2, position_embedding="none"), [[1, 2, 3]], 7, mode)[0])
        == 10
    )


ERRORS: dict[str, tuple[dict[str, object], str]] = {
    "empty prompt": ({"prompts": [[1], []]}, "prompt 1 is empty.*at least one token"),
    "empty tensor": ({"prompts": torch.zeros(2, 0, dtype=torch.long)}, "prompt 0 is empty"),
    "no prompts": ({"prompts": []}, "there are no prompts"),
    "flat list": ({"prompts": [1, 2]}, "list of lists"),
    "floats in a list": ({"prompts": [[1.0, 2.0]]}, "list of lists of token ids"),
    "flat tensor": ({"prompts": torch.tensor([1, 2])}, r"\(batch, time\), got shape \(2,\)"),
    "float tensor": ({"prompts": torch.ones(1, 2)}, "torch.float32"),
    "token too large": ({"prompts": [[1], [2, VOCAB]]}, "token 11 .*0 to 10"),
    "token negative": ({"prompts": torch.tensor([[-1, 2]])}, "token -1 .*0 to 10"),
    "stop outside": ({"stop": VOCAB}, "token 11 .*0 to 10"),
    "mode": ({"mode": "enpt"}, "unknown mode 'enpt'.*entp, decoder, prefix.*mean entp"),
    "temperature": ({"temperature": -0.1}, "temperature is -0.1"),
    "temperature nan": ({"temperature": float("nan")}, "temperature is nan"),
    "temperature endless": ({"temperature": float("inf")}, "temperature is inf"),
    "top_k": ({"top_k": 0}, "top_k is 0: it must be at least 1"),
    "top_p zero": ({"top_p": 0.0}, "top_p is 0.0"),
    "top_p above one": ({"top_p": 1.1}, "top_p is 1.1"),
    "max_new_tokens": ({"max_new_tokens": 0}, "max_new_tokens is 0: it must be at least 1"),
    "prefix zero": ({"mode": "prefix-lm", "prefix": 0}, "prefix 0 does not fit prompt 0.*1 to 3"),
    "prefix too long": (
        {"mode": "prefix-lm", "prefix": [3, 3]},
        "prefix 3 does not fit prompt 1.*1 to 2",
    ),
    "prefix count": ({"mode": "prefix-lm", "prefix": [1, 1, 1]}, "3 numbers for 2 prompts"),
}


@pytest.mark.parametrize(("change", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_say_what_is_wrong(change: dict[str, object], message: str) -> None:
    arguments = {"prompts": [[1, 2, 3], [4, 5]], "max_new_tokens": 2, **change}
    with pytest.raises(InputError, match=message):
        generate(build(layers=2), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [{"outputs": 3}, {"vocab": None, "input_dim": 4, "outputs": 3}])
def test_models_that_do_not_predict_tokens_are_refused(shape: dict[str, object]) -> None:
    # Vectors are no lists of ids, but that is not what is wrong with them.
    for prompts in ([[1, 2]], [[[0.5] * 4] * 2]):
        with pytest.raises(InputError, match=r"reads tokens and predicts them.*outputs=3"):
            generate(build(**shape), prompts, 2)  # type: ignore[type-var]
