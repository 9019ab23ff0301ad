"""The paper's RASP programs against brute force, and where the printed ones are wrong.

The printed programs are here as they are in the paper, but for the mask: `every` evaluates a step
without a causal argument, `causal` one with it.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entp import InputError
from entp.theory.programs import (
    EOS,
    PROGRAMS,
    REACH,
    chain_of_thought,
    count2,
    count3_printed,
    g,
    run,
    trace_table,
)
from entp.theory.rasp import Rasp, equals, exact, true

CAUSAL = [p.name for p in PROGRAMS.values() if p.mask == "causal"]
MATCHING = (0, 1, 42, 43, 63, 64, 65, 126, 127, 128)
"""Values of which many triples sum to 0 modulo 128, and many do not."""


def count3_of(x: Any) -> int:
    n = len(x)
    return sum((a + b + x[-1]) % n == 0 for a in x for b in x) % n


def count2_of(x: Any) -> int:
    n = len(x)
    return sum((a + x[-1]) % n == 0 for a in x) % n


def match3_of(x: Any) -> int:
    return int(any((x[0] + a + b) % 128 == 0 for a in x for b in x))


def prefixes(x: Any) -> list[Any]:
    return [x[: i + 1] for i in range(len(x))]


def all_sequences(lengths: range, values: int | None = None) -> list[tuple[int, ...]]:
    """All of these lengths n with values below n, or below the number given; shortest first."""
    return [
        x
        for n in lengths
        for x in itertools.product(range(n if values is None else values), repeat=n)
    ]


@st.composite
def sequences_below(draw: st.DrawFn, longest: int, times: int = 1) -> list[int]:
    """A sequence of n numbers below times * n."""
    n = draw(st.integers(1, longest))
    return draw(st.lists(st.integers(0, times * n - 1), min_size=n, max_size=n))


def printed_count_triplets(x: np.ndarray) -> np.ndarray:
    every = Rasp("encoder")
    idxs = every.indices(x)
    n = every.sel_width(every.select(k=x, q=x, pred=true))
    last_x = every.kqv(k=idxs, q=n - 1, v=x, pred=equals, reduction="mean")
    y = every.seq_map(n - x, n, g)
    z = every.seq_map(x + last_x, n, g)
    c = every.kqv(
        k=every.full(x, 1),
        q=every.full(x, 1),
        v=every.sel_width(every.select(k=z, q=y, pred=equals)) * n,
        pred=equals,
        reduction="mean",
    )
    c -= idxs * n
    return every.kqv(k=c, q=n, v=c, pred=lambda a, b: 0 <= a < b, reduction="mean")


def printed_has_triplet(x: np.ndarray) -> np.ndarray:
    every, causal = Rasp("encoder"), Rasp("causal")
    idxs = every.indices(x)
    first_x = causal.kqv(k=idxs, q=every.full(x, 0), v=x, pred=equals, reduction="mean")
    y = -x & 127
    z = (first_x + x) & 127
    max_count = every.kqv(
        k=every.full(x, 1),
        q=every.full(x, 1),
        v=every.sel_width(every.select(k=y, q=z, pred=equals)),
        pred=equals,
        reduction="max",
    )
    return every.tok_map(max_count, lambda a: min(a, 1))


def printed_count_triplets_cot(x: np.ndarray, eos: int) -> np.ndarray:
    every, causal = Rasp("encoder"), Rasp("causal")
    idxs = every.indices(x)
    n = causal.kqv(k=x, q=every.full(x, eos), v=idxs, pred=equals, reduction="min")
    n = every.tok_map(n, lambda a: a if a else -2)
    last_x = every.kqv(k=idxs, q=n - 1, v=x, pred=equals, reduction="mean")
    seq_len = causal.kqv(k=x, q=x, v=idxs, pred=true, reduction="max")
    i = seq_len - n
    j = seq_len - 2 * n
    xi = causal.kqv(k=idxs, q=i, v=x, pred=equals, reduction="max")
    xj = causal.kqv(k=idxs, q=j, v=x, pred=equals, reduction="max")
    y = (n - xi) % n + 1
    z = (last_x + xj) % n + 1
    y_mask_write = (n <= idxs) & (idxs < 2 * n)
    z_mask_write = (2 * n <= idxs) & (idxs < 3 * n)
    y_mask_read = (n < idxs) & (idxs <= 2 * n)
    z_mask_read = (2 * n < idxs) & (idxs <= 3 * n)
    z_count = causal.sel_width(
        causal.select(k=x * y_mask_read, q=z, pred=lambda a, b: a == b and a != 0)
    )
    count = causal.kqv(
        k=z_mask_read,
        q=z_mask_read,
        v=n * x * z_mask_read,
        pred=lambda a, b: a & b,
        reduction="mean",
    )
    ans = count % n
    ans_mask_write = idxs == 3 * n
    eos_mask_write = idxs > 3 * n
    return exact(
        y * y_mask_write + z_count * z_mask_write + ans * ans_mask_write + eos * eos_mask_write
    )


def printed_chain(prompt: tuple[int, ...], eos: int) -> list[int]:
    """What the printed chain of thought generates until its first EOS."""
    tokens = [*prompt, eos]
    while (token := printed_count_triplets_cot(exact(tokens), eos)[-1]) != eos:
        tokens.append(token)
    return tokens[len(prompt) + 1 :]


# Count3 for an encoder


def test_printed_count3_on_all_short_sequences() -> None:
    for x in all_sequences(range(1, 5)):
        assert run("count3-printed", x).output.tolist() == [count3_of(x)] * len(x)


@given(sequences_below(64))
def test_printed_count3_on_long_sequences(x: list[int]) -> None:
    assert run("count3-printed", x).answer == count3_of(x)
    assert run("count3-printed", x).output.tolist() == printed_count_triplets(exact(x)).tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
def test_count3_of_zeros_counts_all_pairs(n: int) -> None:
    trace = run("count3-printed", [0] * n)
    assert (trace.named["count"] == n * n).all()  # the one count that no position shifts below n
    assert trace.answer == 0


def test_count3_internal_values_reach_n_squared_and_go_below_zero() -> None:
    for n in range(2, 5):
        values = [
            v
            for x in all_sequences(range(n, n + 1))
            for row in run("count3-printed", x).named.values()
            for v in row
        ]
        assert max(values) == n * n
        assert -n * (n - 1) <= min(values) < 0  # the proof's unsigned integers need a sign


def test_g_is_the_remainder_and_two_relu_layers_make_it() -> None:
    def relu(a: Fraction) -> Fraction:
        return max(a, Fraction(0))

    for n in range(1, 9):
        for b, epsilon in itertools.product(range(1, n + 1), (Fraction(1, 100), Fraction(99, 100))):
            for a in map(Fraction, range(2 * b)):
                m = 2 * n / epsilon
                assert g(a, b) == a % b == relu(a - m * relu(a - b + epsilon)) + relu(a - b)


def test_count3_on_all_short_sequences() -> None:
    for x in all_sequences(range(1, 4), 9):
        assert run("count3", x).output.tolist() == [count3_of(x)] * len(x)
    for v in range(REACH):
        assert run("count3", [v]).answer == 0


@given(sequences_below(64, REACH))
def test_count3_on_long_sequences(x: list[int]) -> None:
    assert run("count3", x).answer == count3_of(x)


@given(st.lists(st.integers(0, 63), min_size=1, max_size=64))
def test_count3_takes_the_experiments_tokens_at_every_length(x: list[int]) -> None:
    assert run("count3", x).answer == count3_of(x)


def test_printed_count3_is_wrong_for_values_from_n_on() -> None:
    wrong = [
        x
        for x in all_sequences(range(1, 3), 7)
        if printed_count_triplets(exact(x))[-1] != count3_of(x)
    ]
    assert wrong == [(1, 2), (3, 0), (4, 0), (5, 0), (6, 0)]
    assert printed_count_triplets(exact([1, 2])).tolist() == [1, 1]
    assert count3_of([1, 2]) == 0


def test_printed_count3_is_wrong_on_most_inputs_of_the_experiments() -> None:
    seeds = np.random.default_rng(0).integers(0, 64, (200, 16)).tolist()
    assert sum(printed_count_triplets(exact(x))[-1] != count3_of(x) for x in seeds) == 166
    assert all(run("count3", x).answer == count3_of(x) for x in seeds)


def test_count3_needs_the_encoders_mask() -> None:
    wrong = [
        x
        for x in all_sequences(range(1, 4))
        if count3_printed(Rasp("causal"), exact(x))[-1] != count3_of(x)
    ]
    assert wrong[:2] == [(0, 0), (0, 1)]
    assert len(wrong) == 2 + 17  # of 4 with two numbers, of 27 with three
    assert count3_printed(Rasp("causal"), exact([0, 1])).tolist() == [0, 1]
    assert count3_of([0, 1]) == 0


# Match3' for a decoder


def test_match3_on_all_short_sequences() -> None:
    for n in range(1, 4):
        for x in itertools.product(MATCHING, repeat=n):
            assert run("match3", x).output.tolist() == [match3_of(p) for p in prefixes(x)]


@given(st.lists(st.one_of(st.integers(0, 127), st.integers(0, 2**70)), min_size=1, max_size=64))
def test_match3_on_long_sequences(x: list[int]) -> None:
    assert run("match3", x).output.tolist() == [match3_of(p) for p in prefixes(x)]


def test_printed_match3_is_wrong_before_the_last_position() -> None:
    pairs = itertools.product(range(4), range(128))
    wrong = [
        x
        for x in pairs
        if printed_has_triplet(exact(x)).tolist() != [match3_of(p) for p in prefixes(x)]
    ]
    assert wrong == [(1, 126), (2, 63), (2, 124), (2, 127), (3, 122)]
    assert printed_has_triplet(exact([1, 126])).tolist() == [1, 1]
    assert [match3_of(p) for p in prefixes([1, 126])] == [0, 1]


@given(st.lists(st.sampled_from(MATCHING), min_size=1, max_size=12))
def test_printed_match3_is_right_at_the_last_position(x: list[int]) -> None:
    assert printed_has_triplet(exact(x))[-1] == match3_of(x)


# Count2 for a decoder, and for an encoder


def test_count2_on_all_short_sequences() -> None:
    for x in all_sequences(range(1, 5), 6):
        assert run("count2", x).output.tolist() == [count2_of(p) for p in prefixes(x)]
        assert count2(Rasp("encoder"), exact(x)).tolist() == [count2_of(x)] * len(x)


@given(st.lists(st.one_of(st.integers(0, 63), st.integers(0, 2**70)), min_size=1, max_size=64))
def test_count2_on_long_sequences(x: list[int]) -> None:
    assert run("count2", x).output.tolist() == [count2_of(p) for p in prefixes(x)]
    assert count2(Rasp("encoder"), exact(x)).tolist() == [count2_of(x)] * len(x)


def test_count2_by_two_equalities_where_values_are_below_their_position() -> None:
    r = Rasp("causal")
    for x in itertools.product(*(range(i) for i in range(1, 7))):  # x_i < i
        k = exact(x)
        n = r.indices(k) + 1
        count = sum(r.sel_width(r.select(k=k, q=total - k, pred=equals)) for total in (0 * n, n))
        assert r.seq_map(count, n, g).tolist() == [count2_of(p) for p in prefixes(x)]


# Count3 by chain of thought for a decoder


def assert_chain_is_right(x: Any) -> None:
    n, chain = len(x), chain_of_thought(x)
    assert chain.prompt == tuple(x)
    assert chain.y == tuple(-a % n + 1 for a in x)
    assert chain.z_count == tuple(sum((a + x[-1] + b) % n == 0 for b in x) for a in x)
    assert chain.answer == count3_of(x)
    assert len(chain.generated) == 2 * n + 2
    tokens = (*chain.prompt, EOS, *chain.generated)
    assert chain.trace.x.tolist() == list(tokens[:-1])
    # One pass gives what each pass gave last.
    assert chain.trace.output[n:].tolist() == list(chain.generated)
    assert max(chain.generated) <= n


def test_chain_of_thought_on_all_short_sequences() -> None:
    for x in all_sequences(range(1, 5)):
        assert_chain_is_right(x)


@given(st.one_of(sequences_below(12), st.lists(st.integers(0, 10**9), min_size=1, max_size=12)))
def test_chain_of_thought_on_longer_sequences(x: list[int]) -> None:
    assert_chain_is_right(x)


def test_chain_of_thought_shows_its_work() -> None:
    chain = chain_of_thought([1, 5, 0])
    assert chain.y == (3, 2, 1)
    assert chain.z_count == (1, 1, 1)
    assert chain.generated == (3, 2, 1, 1, 1, 1, 0, EOS)


@given(sequences_below(8))
def test_printed_chain_of_thought_gives_the_same_with_eos_outside_its_tokens(x: list[int]) -> None:
    tokens = chain_of_thought(x).trace.x
    assert (
        printed_count_triplets_cot(tokens, EOS).tolist()
        == run("count3-cot", tokens).output.tolist()
    )


def test_printed_chain_of_thought_needs_eos_outside_its_tokens() -> None:
    assert printed_chain((0,), eos=0) == []  # no answer at all
    assert printed_chain((0, 1), eos=-1) == [1, 2, 1, 1, 0]
    assert printed_chain((0, 1), eos=2) == [1]  # its second token is n = 2
    for eos in (-1, -7, 100):
        for x in all_sequences(range(1, 4)):
            assert printed_chain(x, eos)[-1] == count3_of(x)
    for eos in (0, 1, 2, 3):
        assert any(printed_chain(x, eos)[-1:] != [count3_of(x)] for x in all_sequences(range(1, 4)))


@given(sequences_below(8))
def test_attention_can_take_the_chains_last_remainder(x: list[int]) -> None:
    """As the encoder's program: the count less the largest of 0, n, 2 n, ... that is at most it."""
    chain, r = chain_of_thought(x), Rasp("causal")
    n, count = chain.trace.named["n"], chain.trace.named["count"]
    multiples = (r.indices(n) - n) * n
    remainder = count - r.kqv(
        k=multiples, q=count, v=multiples, pred=lambda a, b: a <= b, reduction="max"
    )
    assert remainder[3 * len(x)] == chain.answer


# All programs


@pytest.mark.parametrize("name", CAUSAL)
@given(st.lists(st.sampled_from([EOS, 0, 1, 2, 3, 64, 127]), min_size=1, max_size=14))
def test_causal_programs_give_at_each_position_what_they_give_on_the_prefix(
    name: str, x: list[int]
) -> None:
    def function(tokens: list[int]) -> list[int]:
        return exact(PROGRAMS[name].function(Rasp("causal"), exact(tokens))).tolist()

    assert function(x) == [function(p)[-1] for p in prefixes(x)]


def test_encoder_programs_do_not() -> None:
    assert (
        run("count3-printed", [0, 1, 0]).output.tolist() == [count3_of([0, 1, 0])] * 3 == [1, 1, 1]
    )
    assert [count3_of(p) for p in prefixes([0, 1, 0])] == [0, 0, 1]


@pytest.mark.parametrize(
    ("name", "x", "message"),
    [
        (
            "count3-printed",
            [0, 2, 1, 4],
            r"count3-printed takes whole numbers from 0 to n - 1 = 3 .*: got 4 at index 3\.",
        ),
        (
            "count3-printed",
            [0, -1],
            r"count3-printed takes whole numbers from 0 to n - 1 = 1 .*: got -1 at index 1\.",
        ),
        (
            "count3",
            [0, 128],
            r"count3 takes whole numbers from 0 to 64 n - 1 = 127: got 128 at index 1\.",
        ),
        ("count3", [-3], r"got -3 at index 0\."),
        ("match3", [5, -1], r"match3 takes whole numbers from 0 on: got -1 at index 1\."),
        ("count2", [-2, 5], r"count2 takes whole numbers from 0 on: got -2 at index 0\."),
        (
            "count3-cot",
            [1, 2],
            r"count3-cot takes at least one number and then EOS \(-1\): use chain_of_thought",
        ),
        ("count3-cot", [EOS, 2], r"at least one number and then EOS"),
        (
            "count3-cot",
            [1, EOS, -2],
            r"count3-cot takes whole numbers from 0 on, and EOS \(-1\): got -2 at index 2\.",
        ),
        ("count3-printed", [], r"count3-printed takes at least one number: got none\."),
        (
            "count3-printed",
            [0, Fraction(1, 2)],
            r"count3-printed takes whole numbers: got 0, 1/2\.",
        ),
        ("count2", [0.5], r"whole numbers or fractions: got 0\.5\."),
        ("match3", [[1, 2]], r"one dimension: got 2\."),
        ("cuont3", [0], r"unknown program 'cuont3': allowed are count3, .*Did you mean count3"),
    ],
)
def test_refusals(name: str, x: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(name, x)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([], r"count3-cot takes at least one number: got none\."),
        ([1, EOS], r"count3-cot takes whole numbers from 0 on in a prompt: got -1 at index 1\."),
    ],
)
def test_chain_of_thought_refusals(x: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        chain_of_thought(x)


def test_programs_are_described() -> None:
    assert list(PROGRAMS) == ["count3", "count3-printed", "match3", "count2", "count3-cot"]
    for name, program in PROGRAMS.items():
        assert program.name == name
        assert program.mask in ("encoder", "causal")
        assert program.about
        assert program.label


@pytest.mark.parametrize("name", PROGRAMS)
def test_trace_table_has_every_named_value(name: str) -> None:
    trace = run(
        PROGRAMS[name], [1, 2, 0, EOS, 3] if name == "count3-cot" else np.array([1, 2, 0, 3, 3])
    )
    head, rule, *rows = trace_table(trace).splitlines()
    assert head.split() == ["index", "0", "1", "2", "3", "4"]
    assert set(rule) == {"-", " "}
    assert [row[: len(rule.split()[0])].strip() for row in rows] == ["x", *trace.named, "output"]
    for row, values in zip(rows, [trace.x, *trace.named.values(), trace.output], strict=True):
        assert row.split()[-5:] == [str(v) for v in values]
    assert len(trace.named) >= 5
    assert trace.answer == trace.output[-1]


def test_count3_trace_by_hand() -> None:
    trace = run("count3-printed", [1, 2, 0, 3])
    assert {name: values.tolist() for name, values in trace.named.items()} == {
        "idxs": [0, 1, 2, 3],
        "n": [4, 4, 4, 4],
        "last_x": [3, 3, 3, 3],
        "y": [3, 2, 0, 1],
        "z": [0, 1, 3, 2],
        "partners": [1, 1, 1, 1],
        "count": [4, 4, 4, 4],
        "shifted": [4, 0, -4, -8],
    }
