"""Every statement of the paper's theory, how it was checked, and the verdict: `entp theory`.

A check does the work when it is called and returns how it checked and what it found. `expected` is
what this project's documents say (docs/theory.md); another verdict is a fault, and the command says
so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from entp.model import Transformer
from entp.tasks.counting import Count3, count3_next, match3_labels
from entp.terminal import format_table
from entp.theory import (
    complexity,
    constructions,
    linear_memory,
    lower_bounds,
    pointer_checks,
    tradeoff,
)
from entp.theory.compiled import answers, count3, numbers
from entp.theory.count3_algorithms import linear, quadratic
from entp.theory.count3_decoder import decoder, wrong_and_margin
from entp.theory.count3_narrow import narrow_decoder
from entp.theory.programs import chain_of_thought, g, run
from entp.theory.rasp import Rasp

VACUOUS = "vacuous: its premise is refuted; L = Ω(n) is open"


class Checked(NamedTuple):
    """How a statement was checked, and the verdict."""

    how: str
    verdict: str


@dataclass(frozen=True)
class Statement:
    """A statement of the paper, by its label."""

    label: str
    says: str
    check: Callable[[], Checked]
    expected: str = "holds"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "FAILS"


def _decoder_is_causal() -> Checked:
    models = [_random(seed) for seed in range(12)]
    found = [
        constructions.decoder_is_causal(model, _vectors(seed)) for seed, model in enumerate(models)
    ]
    return Checked(f"random: {len(found)} models, float64", _verdict(all(f.holds for f in found)))


def _one_layer() -> Checked:
    found = [
        constructions.one_layer_is_one_function(_random(s, layers=1), _vectors(s), 1 + s % 6)
        for s in range(12)
    ]
    return Checked(
        f"random: {len(found)} models, entp, decoder and prefix-lm",
        _verdict(all(f.holds for f in found)),
    )


def _decoder_beyond_encoders() -> Checked:
    for layers, width in itertools.product((2, 3, 5), (1, 2, 4)):
        numbers = np.random.default_rng(width).integers(-50, 50, (3, width))
        x = [[Fraction(int(v), 7) for v in row] for row in numbers]
        expected = [
            [4 * a for a in x[0]],
            [(7 * a + 9 * b) / 4 for a, b in zip(*x[:2], strict=True)],
            [(23 * a + 17 * b + 32 * c) / 18 for a, b, c in zip(*x, strict=True)],
        ]
        if constructions.exact_decoder(x, layers) != expected:
            return Checked("exact", "FAILS")
    found = [constructions.collapses_for_any_encoder(_random(seed), seed) for seed in range(12)]
    for seed in range(12):
        model = _random(seed, position_embedding="none")
        found.append(constructions.order_matters(model, seed))
    return Checked(
        "exact: fractions, L 2 to 5, D 1 to 4; random: 24 encoders",
        _verdict(all(f.holds for f in found)),
    )


def _wider_encoder() -> Checked:
    sizes = list(itertools.product((8, 32), (1, 2, 4)))
    found = [constructions.equals_a_wider_encoder(*size) for size in sizes]
    largest = max(f.numbers["difference"] for f in found)
    return Checked(
        f"weights: N = 8, 32, D = 1, 2, 4: {largest:.0e} apart",
        _verdict(all(f.holds for f in found)),
    )


def _encoder_beyond_decoders() -> Checked:
    found = [constructions.repeats_for_any_decoder(_random(seed)) for seed in range(12)]
    return Checked(
        f"random: {len(found)} decoders; beta by formula", _verdict(all(f.holds for f in found))
    )


def _algorithms() -> Checked:
    rows = [*_short_sequences(5), *_random_rows(40, 64)]
    right = all(quadratic(x).value == linear(x).value == count3_next(x[None])[0] for x in rows)
    n = 64
    counts = [(a.time, a.space) for a in (quadratic(np.arange(n)), linear(np.arange(n)))]
    return Checked(
        _exhaustive(5, 40) + "; steps counted",
        _verdict(right and counts == [(n * n, 0), (2 * n, n)]),
    )


@functools.cache
def _tradeoff() -> dict[str, Any]:
    """Two statements look at the same measurement."""
    return tradeoff.measure()


def _conjecture() -> Checked:
    """Runs cannot refute an Omega: a formula does, of order n^1.5 and root n for s = root n, and
    each run must be it."""
    rows = [row for row in _tradeoff()["rows"] if row["algorithm"] == "blocked"]
    right = all(row["correct"] and _as_by_formula(**row) for row in rows)
    verdict = "refuted" if right else "not refuted"
    return Checked(f"exact: 2n ceil(n/s) steps, s counters, in all {len(rows)} runs", verdict)


def _as_by_formula(n: int, s: int, time: int, space: int, **other: Any) -> bool:
    """Whether blocks of s residues took 2n ceil(n/s) steps and s counters."""
    return (time, space) == (2 * n * -(-n // s), s)


def _lemma_decoder() -> Checked:
    result = _tradeoff()
    n = max(result["lengths"])
    row = next(r for r in result["rows"] if r["n"] == n and r["algorithm"] == "running table")
    no_counter = row["correct"] and row["space"] == 0 and row["time"] < 2 * n
    how = f"run: {row['time']} steps and no counter of its own at n = {n}"
    verdict = VACUOUS if no_counter else "not touched"
    return Checked(how, verdict)


def _one_layer_count3() -> Checked:
    rng = np.random.default_rng(0)
    short = [np.array(bits).reshape(2, 4) for bits in itertools.product((0, 1), repeat=8)]
    pairs = [*short, *(rng.integers(0, 2, (2, m)) for m in rng.integers(1, 200, 50))]
    right = True
    for alpha, beta in pairs:
        x = lower_bounds.sequence(alpha, beta)
        told = lower_bounds.common_ones(int(count3_next(x[None])[0]), x)
        right = right and told == int((alpha & beta).sum())
    how = "reduction: exhaustive to 4 bits each, random 50 to 200"
    return Checked(how, "proved in docs; the reduction checked" if right else "FAILS")


def _decoder() -> Checked:
    rng, model = np.random.default_rng(0), decoder(64)
    x = [rng.integers(0, 64, (16, 64)), np.tile([[0], [1], [32], [63]], (1, 64))]
    paper = Count3().extend(rng.integers(0, 64, (8, 16)))
    rows = np.concatenate([*x, paper])
    wrong, _ = wrong_and_margin(model, rows)
    how = f"weights: {_size(model)}; {len(rows)} sequences of 64, after every integer"
    return Checked(how, _verdict(_size(model) == "4 layers, width 384" and wrong == 0))


def _narrow_decoders() -> Checked:
    """Of several sizes; that it goes on like that is how they are made."""
    rng, right, lengths = np.random.default_rng(0), True, (4, 16, 32)
    for n in lengths:
        model = narrow_decoder(n)
        x = np.minimum(rng.integers(0, n, (16, n)), np.arange(n))
        size = _size(model) == f"{n + 3} layers, width 18"
        right = right and size and wrong_and_margin(model, x)[0] == 0
    how = f"weights: n + 3 layers, width 18, for n = {', '.join(map(str, lengths))}; random 16 each"
    return Checked(how, _verdict(right))


def _size(model: Transformer) -> str:
    return f"{model.config.layers} layers, width {model.config.width}"


def _compiled() -> Checked:
    model = count3(64, number=True)
    right = all(
        np.array_equal(answers(model, x), count3_next(x))
        and np.abs(numbers(model, x) - count3_next(x)).max() < 1e-9
        for x in _batches(5, 300, 64)
    )
    return Checked(f"weights: {_size(model)}; {_exhaustive(5, 300)}", _verdict(right))


def _compiled_causal() -> Checked:
    x = np.random.default_rng(0).integers(0, 16, (300, 16))
    model, want = count3(64), count3_next(x)
    encoder, decoder = (
        float(np.mean(answers(model, x, mode) == want)) for mode in ("entp", "decoder")
    )
    right = f"{100 * encoder:.0f} % right as an encoder, {100 * decoder:.0f} % under a causal mask"
    return Checked(f"random 300: {right}", _verdict(encoder == 1 and decoder < 0.3))


def _compiled_generates() -> Checked:
    from entp.engine.generation.generate import generate

    seeds = np.random.default_rng(1).integers(0, 64, (8, 16))
    got = generate(count3(64, ratio=4), torch.from_numpy(seeds), 48).numpy()
    return Checked(
        "random 8: seeds of 16 integers continued to 64",
        _verdict(np.array_equal(got, Count3().extend(seeds))),
    )


def _rasp_count3() -> Checked:
    right = all(
        run("count3-printed", x).answer == count3_next(x[None])[0]
        for x in [*_short_sequences(4), *_random_rows(20, 40)]
    )
    return Checked(_exhaustive(4, 20), _verdict(right))


def _rasp_count3_domain() -> Checked:
    from entp.theory.programs import count3_printed as program

    x = np.random.default_rng(0).integers(0, 64, (50, 16))
    cases = list(zip(x, count3_next(x), strict=True))
    wrong = sum(program(Rasp("encoder"), row.astype(object))[-1] != want for row, want in cases)
    right = all(run("count3", row).answer == want for row, want in cases)
    how = f"random 50: {wrong} wrong as printed, none if x is reduced mod n first"
    verdict = "fails as printed" if wrong and right else "FAILS"
    return Checked(how, verdict)


def _rasp_match3() -> Checked:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.integers(0, 128, (20, 24)), np.tile([1, 126], (1, 12))])
    right = all(
        list(run("match3", row).output) == list(want)
        for row, want in zip(x, match3_labels(x, 128), strict=True)
    )
    return Checked("random 21, every position, one causal mask", _verdict(right))


def _rasp_chain_of_thought() -> Checked:
    rows = [*_short_sequences(3), *_random_rows(4, 10)]
    right = all(chain_of_thought(x).answer == count3_next(x[None])[0] for x in rows)
    return Checked(_exhaustive(3, 4), _verdict(right))


def _relu_form_of_g() -> Checked:
    def relu(a: Fraction) -> Fraction:
        return max(a, Fraction(0))

    half = Fraction(1, 2)
    pairs = [(a, b) for b in range(1, 33) for a in range(2 * b)]

    def form(a: int, b: int) -> Fraction:
        return relu(a - 4 * b * relu(a - b + half)) + relu(Fraction(a - b))

    right = all(form(a, b) == g(a, b) for a, b in pairs)
    return Checked(f"exact: all {len(pairs)} pairs with b <= 32", _verdict(right))


def _linear_memory() -> Checked:
    q, k, v = (
        torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
        for s in range(3)
    )
    difference = 0.0
    for size in (1, 40):  # the second makes scores of thousands
        want = torch.nn.functional.scaled_dot_product_attention(size * q, size * k, v, scale=1.0)
        got = linear_memory.attend_streaming(size * q, size * k, v)
        difference = max(difference, float((got - want).abs().max()))
    short, long = (linear_memory.working_memory(n, 16) for n in (32, 256))
    memory = f"{long} bytes at n = 256, {short} at 32"
    how = f"random, scores up to thousands: {difference:.0e} from SDPA; {memory}"
    return Checked(how, _verdict(difference < 1e-12 and short == long))


def _linear_memory_printed() -> Checked:
    q, k, v = (torch.full((2, 1), c, dtype=torch.float64) for c in (40.0, 40.0, 1.0))
    printed = linear_memory.attend_as_printed(q[-1], k, v)
    verdict = "does not overflow" if bool(printed.isfinite().all()) else "overflows"
    return Checked("exp of a score of 1600", verdict)


def _complexity() -> Checked:
    result = complexity.measure()
    return Checked(*complexity.summary(result))


def _pointers(check: Callable[[], tuple[str, bool]]) -> Callable[[], Checked]:
    def checked() -> Checked:
        how, right = check()
        return Checked(how, _verdict(right))

    return checked


STATEMENTS = (
    Statement("sec:tdd", "a decoder is its own causal model, T_D = D", _decoder_is_causal),
    Statement("sec:ede", "with one layer encoder and decoder are the same", _one_layer),
    Statement("thm:dyen", "some decoder equals no encoder of its width", _decoder_beyond_encoders),
    Statement("thm:dyen", "the same decoder is an encoder of width D + N", _wider_encoder),
    Statement(
        "thm:eydn",
        "some encoder equals no decoder of its width with p1 != p2",
        _encoder_beyond_decoders,
    ),
    Statement("tab:cc", "at most n² and n time a token, n and 1 additional space", _complexity),
    Statement(
        "alg:linear-memory-attn",
        "attention in O(D) memory (with a running maximum)",
        _linear_memory,
    ),
    Statement(
        "alg:linear-memory-attn",
        "the same as printed, without a maximum",
        _linear_memory_printed,
        "overflows",
    ),
    Statement(
        "alg:tc1, alg:tc2", "Count3 in n² time and no space, 2 n time and n space", _algorithms
    ),
    Statement("con:ts2", "Count3 needs n² time or n space of its own", _conjecture, "refuted"),
    Statement(
        "lem:conjl2",
        "given that, a decoder needs n layers",
        _lemma_decoder,
        VACUOUS,
    ),
    Statement(
        "ours: decoders",
        "one of 4 layers, width 384 computes Count3 for n and values to 64",
        _decoder,
    ),
    Statement(
        "ours: decoders",
        "those of n + 3 layers, width 18 compute it for x < n: L D = O(n)",
        _narrow_decoders,
    ),
    Statement(
        "one layer",
        "Count3 needs H(d + 1)p >= floor((n - 1)/2) - O(log n)",
        _one_layer_count3,
        "proved in docs; the reduction checked",
    ),
    Statement("lem:enc-bound", "an encoder of fixed size computes Count3", _compiled),
    Statement("lem:enc-bound", "these weights need full attention", _compiled_causal),
    Statement("eq:auto", "and they continue the paper's own sequences", _compiled_generates),
    Statement("sec:enc-bound-proof", "g(a, b) by ReLU", _relu_form_of_g),
    Statement("alg:rasp_count_triplets", "Count3 in RASP, x < n", _rasp_count3),
    Statement(
        "alg:rasp_count_triplets",
        "the same on the experiments' values",
        _rasp_count3_domain,
        "fails as printed",
    ),
    Statement("alg:rasp_has_triplet", "Match3' in RASP for a decoder", _rasp_match3),
    Statement(
        "alg:rasp_count_triplets_cot",
        "Count3 by a decoder with chain of thought",
        _rasp_chain_of_thought,
    ),
    Statement(
        "ours: chase",
        "ENTP of width 6 follows K pointers in log2(K + 1) blocks, rounded up",
        _pointers(pointer_checks.chase_by_doubling),
    ),
    Statement(
        "ours: chase",
        "a decoder of width 5 follows them in K blocks",
        _pointers(pointer_checks.chase_one_by_one),
    ),
    Statement(
        "ours: chase",
        "ENTP's weights are right with a prefix too, wrong under a causal mask",
        _pointers(pointer_checks.chase_by_mode),
    ),
    Statement(
        "ours: compose",
        "ENTP of width 8 takes T steps in 1 + log2(T + 1) blocks, rounded up",
        _pointers(pointer_checks.compose_by_doubling),
    ),
    Statement(
        "ours: compose",
        "a decoder of width 8 takes them in T + 1 blocks",
        _pointers(pointer_checks.compose_one_by_one),
    ),
    Statement(
        "ours: compose",
        "ENTP's weights are wrong with a prefix and under a causal mask",
        _pointers(pointer_checks.compose_by_mode),
    ),
    Statement(
        "ours: compose",
        "without choices a decoder of width 12 does in 1 + log2 T blocks, rounded up",
        _pointers(pointer_checks.compose_without_choices),
    ),
)


def check_all(
    progress: Callable[[int, str], None] = lambda done, label: None,
) -> list[dict[str, Any]]:
    """Check every statement; returns what the table shows, and whether it is as expected."""
    found = []
    for number, statement in enumerate(STATEMENTS):
        progress(number, statement.label)
        checked = statement.check()
        found.append(
            {
                "label": statement.label,
                "statement": statement.says,
                "checked": checked.how,
                "verdict": checked.verdict,
                "expected": statement.expected,
                "as_expected": checked.verdict == statement.expected,
            }
        )
    return found


def report(found: list[dict[str, Any]]) -> str:
    """One line per statement."""
    head = ["label", "statement", "checked", "verdict"]
    table = format_table(head, [[row[name] for name in head] for row in found], left=True)
    odd = [row["label"] for row in found if not row["as_expected"]]
    end = f"all {len(found)} as docs/theory.md says"
    if odd:
        end = f"NOT as docs/theory.md says: {', '.join(odd)}"
    return f"{table}\n\n{end}"


def _random(seed: int, **config: Any) -> Any:
    """Models of different sizes, with norm and without."""
    sizes = {"layers": 2 + seed % 3, "heads": 1 + seed % 2, "norm": ("none", "layer")[seed % 2]}
    return constructions.random_transformer(seed, width=(4, 8)[seed % 2], **{**sizes, **config})


def _vectors(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 7, (4, 8)[seed % 2], dtype=torch.float64, generator=generator)


def _short_sequences(longest: int) -> Iterator[np.ndarray]:
    """Every sequence of at most `longest` integers below its length."""
    for n in range(1, longest + 1):
        yield from (np.array(x) for x in itertools.product(range(n), repeat=n))


def _random_rows(count: int, longest: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for n in rng.integers(1, longest + 1, count):
        yield rng.integers(0, n, n)


def _batches(short: int, count: int, longest: int) -> Iterator[np.ndarray]:
    """The same, sequences of one length together: all short ones, and `count` random ones."""
    for n in range(1, short + 1):
        yield np.array(list(itertools.product(range(n), repeat=n)))
    rng = np.random.default_rng(0)
    for n in (longest // 4, longest // 2 + 1, longest):
        yield rng.integers(0, n, (count // 3, n))


def _exhaustive(n: int, count: int) -> str:
    return f"exhaustive to n = {n}, random {count}"
