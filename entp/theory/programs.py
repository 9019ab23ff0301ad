"""The paper's RASP programs, each with its mask, its domain and every intermediate value by name.

Encoder programs give the answer at every position; causal ones give, at each position, the answer
for the prefix that ends there. `run` checks the domain first: outside it a program would give wrong
numbers without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np

from entp.errors import InputError, one_of
from entp.terminal import format_table
from entp.theory.rasp import Rasp, equals, exact, true

MODULUS = 128
"""Of Match3'."""
REACH = 64
"""count3 takes values below REACH * n: all tokens 0..63 of the paper's Count3, at every length."""
EOS = -1
"""The token that ends a prompt and the chain of thought; the paper leaves its value open."""


def g(a: Any, b: Any) -> Any:
    """a mod b for 0 <= a < 2 b: the one nonlinear step of Count3 outside attention."""
    return a if a < b else a - b


def count3_printed(r: Rasp, x: np.ndarray) -> np.ndarray:
    """Count3 for an encoder, for 0 <= x_i < n, as in the paper."""
    idxs = r.note("idxs", r.indices(x))
    n = r.note("n", r.sel_width(r.select(k=x, q=x, pred=true)))
    last_x = r.note("last_x", r.kqv(k=idxs, q=n - 1, v=x, pred=equals))
    y = r.note("y", r.seq_map(n - x, n, g))  # -x_i mod n
    z = r.note("z", r.seq_map(x + last_x, n, g))  # (x_i + x_n) mod n
    partners = r.note("partners", r.sel_width(r.select(k=z, q=y, pred=equals)))
    one = r.full(x, 1)
    # Attention has means: n times for the sum.
    count = r.note("count", r.kqv(k=one, q=one, v=partners * n, pred=equals))
    # count <= n^2, so that some position i holds the remainder count - i n, or n if count = n^2:
    # then none is selected.
    shifted = r.note("shifted", count - idxs * n)
    return r.kqv(k=shifted, q=n, v=shifted, pred=lambda a, b: 0 <= a < b)


def count3(r: Rasp, x: np.ndarray) -> np.ndarray:
    """Count3 for an encoder, for 0 <= x_i < 64 n: reduced modulo n by g, then `count3_printed`.

    g(a, 32 n), g(a, 16 n), ..., g(a, n) are six applications, however long the input is: still O(1)
    layers.
    """
    n = r.sel_width(r.select(k=x, q=x, pred=true))
    times = REACH
    while times > 1:
        times //= 2
        name = f"x mod {times}n" if times > 1 else "x mod n"
        x = r.note(name, r.seq_map(x, times * n, g))
    return count3_printed(r, x)


def match3(r: Rasp, x: np.ndarray) -> np.ndarray:
    """Match3' for a decoder, for any x_i >= 0: right at every position.

    The paper prints the causal mask for first_x only and none for the last two steps, so that a
    position sees what comes after it: on 1, 126 the print gives 1, 1 where Match3' is 0, 1. Here
    all steps have the one mask. That loses no pair: of i and j, the later one is a query that sees
    the earlier one as its key.
    """
    idxs = r.note("idxs", r.indices(x))
    first_x = r.note("first_x", r.kqv(k=idxs, q=r.full(x, 0), v=x, pred=equals))
    y = r.note("y", -x % MODULUS)
    z = r.note("z", (first_x + x) % MODULUS)
    partners = r.note("partners", r.sel_width(r.select(k=y, q=z, pred=equals)))
    one = r.full(x, 1)
    most = r.note("most", r.kqv(k=one, q=one, v=partners, pred=equals, reduction="max"))
    return r.tok_map(most, lambda a: min(a, 1))


def count2(r: Rasp, x: np.ndarray) -> np.ndarray:
    """Count2 for a decoder or an encoder, for any x_i >= 0: right at every position.

    The modulus is the length of the prefix, so that each query has its own. One select has to test
    x_i = -x_n mod n with n and x_n both from the query, and a query is one number: it holds the two
    as n^2 + (-x_n mod n), which is below (n + 1)^2 and so gives back n as its whole square root, in
    O(log n) bits. A select on n joined by "and" with one on x_n could not do it: x_i = 1 has to
    pass for n, x_n = 2, 1 and for 3, 2, but not for 2, 2. RASP allows any test in a select; where
    x_i < i at every i, two plain equalities are enough: x_i + x_n is 0 or n.
    """
    idxs = r.note("idxs", r.indices(x))
    # Under the causal mask: n is the prefix's length, last_x is x itself.
    n = r.note("n", r.sel_width(r.select(k=x, q=x, pred=true)))
    last_x = r.note("last_x", r.kqv(k=idxs, q=n - 1, v=x, pred=equals))
    pair = r.note("pair", n * n + -last_x % n)
    count = r.note("count", r.sel_width(r.select(k=x, q=pair, pred=_completes)))
    return r.seq_map(count, n, g)


def _completes(key: int, pair: int) -> bool:
    n = isqrt(pair)
    return key % n == pair - n * n


def count3_cot(r: Rasp, x: np.ndarray) -> np.ndarray:
    """The next token after each position of Count3 by chain of thought, for any x_i >= 0.

    index   0 .. n-1   n     n+1 .. 2n        2n+1 .. 3n                 3n+1     3n+2
    token   x_1..x_n   EOS   -x_i mod n + 1   how many y_j match z_i     answer   EOS

    Each token is written one position before the one it is read from. What differs from the print:
    - The print leaves out the mask at last_x; here every step is causal. Nothing changes: x_n comes
      before the EOS, and before the EOS the print selects nothing (there n is -2).
    - EOS is -1; the print gives it no value. It has to be none of 0..n and no value of a prompt, or
      what is read as the end comes too early: with EOS 0, the prompt 0 gets no answer.
    The tokens of the chain go up to n: a vocabulary of 0..n-1 and EOS is one too small.
    """
    idxs = r.note("idxs", r.indices(x))
    n = r.kqv(k=x, q=r.full(x, EOS), v=idxs, pred=equals, reduction="min")
    # Before the EOS: a number that makes all masks false.
    n = r.note("n", r.tok_map(n, lambda a: a if a else -2))
    last_x = r.note("last_x", r.kqv(k=idxs, q=n - 1, v=x, pred=equals))
    seq_len = r.note("seq_len", r.kqv(k=x, q=x, v=idxs, pred=true, reduction="max"))
    xi = r.note("xi", r.kqv(k=idxs, q=seq_len - n, v=x, pred=equals, reduction="max"))
    xj = r.note("xj", r.kqv(k=idxs, q=seq_len - 2 * n, v=x, pred=equals, reduction="max"))
    y = r.note("y", (n - xi) % n + 1)  # + 1, for 0 stands for keys outside the mask
    z = r.note("z", (last_x + xj) % n + 1)

    y_write = r.note("y_write", (n <= idxs) & (idxs < 2 * n))
    z_write = r.note("z_write", (2 * n <= idxs) & (idxs < 3 * n))
    y_read = r.note("y_read", (n < idxs) & (idxs <= 2 * n))
    z_read = r.note("z_read", (2 * n < idxs) & (idxs <= 3 * n))
    matches = r.select(k=x * y_read, q=z, pred=lambda a, b: a == b and a != 0)
    z_count = r.note("z_count", r.sel_width(matches))
    # At index 3n the mean is over n positions: n times it is the sum.
    count = r.kqv(k=z_read, q=z_read, v=n * x * z_read, pred=lambda a, b: a & b)
    answer = r.note("count", count) % n
    return y * y_write + z_count * z_write + answer * (idxs == 3 * n) + EOS * (idxs > 3 * n)


@dataclass(frozen=True)
class Program:
    """A RASP program and what has to be known to run it."""

    name: str
    about: str
    mask: str
    """The mask it is written for: "encoder" or "causal"."""
    function: Callable[[Rasp, np.ndarray], np.ndarray]
    check: Callable[[np.ndarray], None]
    """Raises InputError for a sequence outside the program's domain."""
    label: str
    """Where the paper has it."""


@dataclass(frozen=True)
class Trace:
    """What a program did on a sequence."""

    x: np.ndarray
    named: dict[str, np.ndarray]
    """Its intermediate values, one for each position, in the order in which they were made."""
    output: np.ndarray
    """One value for each position."""

    @property
    def answer(self) -> Any:
        """The output at the last position."""
        return self.output[-1]


@dataclass(frozen=True)
class ChainOfThought:
    """A prompt and what a decoder running `count3_cot` generated after it."""

    prompt: tuple[int, ...]
    y: tuple[int, ...]
    """-x_i mod n, plus 1, for each x_i."""
    z_count: tuple[int, ...]
    """How many tokens of y are (x_i + x_n) mod n, plus 1, for each x_i."""
    answer: int
    """Count3 of the prompt."""
    trace: Trace
    """The last pass, over all tokens but the final EOS; an output is the next token."""

    @property
    def generated(self) -> tuple[int, ...]:
        """All generated tokens, the final EOS included."""
        return (*self.y, *self.z_count, self.answer, EOS)


def _refuse_outside(name: str, x: np.ndarray, below: int | None, allowed: str) -> None:
    for i, v in enumerate(x):
        if v < 0 or (below is not None and v >= below):
            raise InputError(f"{name} takes whole numbers {allowed}: got {v} at index {i}.")


def _check_count3_printed(x: np.ndarray) -> None:
    n = len(x)
    _refuse_outside(
        "count3-printed", x, n, f"from 0 to n - 1 = {n - 1} (count3 takes those below {REACH} n)"
    )


def _check_count3(x: np.ndarray) -> None:
    _refuse_outside("count3", x, REACH * len(x), f"from 0 to {REACH} n - 1 = {REACH * len(x) - 1}")


def _check_count3_cot(x: np.ndarray) -> None:
    ends = [i for i, v in enumerate(x) if v == EOS]
    if not ends or ends[0] == 0:
        raise InputError(
            f"count3-cot takes at least one number and then EOS ({EOS}): use chain_of_thought, "
            "which adds it."
        )
    _refuse_outside("count3-cot", np.where(x == EOS, 0, x), None, f"from 0 on, and EOS ({EOS})")


PROGRAMS: dict[str, Program] = {
    p.name: p
    for p in [
        Program(
            "count3",
            f"count pairs with x_i + x_j + x_n = 0 mod n, values below {REACH} n",
            "encoder",
            count3,
            _check_count3,
            "alg:rasp_count_triplets",
        ),
        Program(
            "count3-printed",
            "the same as the paper prints it, for values below n",
            "encoder",
            count3_printed,
            _check_count3_printed,
            "alg:rasp_count_triplets",
        ),
        Program(
            "match3",
            f"is there a pair with x_1 + x_i + x_j = 0 mod {MODULUS}? answered for every prefix",
            "causal",
            match3,
            lambda x: _refuse_outside("match3", x, None, "from 0 on"),
            "alg:rasp_has_triplet",
        ),
        Program(
            "count2",
            "count i with x_i + x_n = 0 mod n, answered for every prefix",
            "causal",
            count2,
            lambda x: _refuse_outside("count2", x, None, "from 0 on"),
            "fig:llm_pair",
        ),
        Program(
            "count3-cot",
            "the next token of a chain of thought that counts pairs with x_i + x_j + x_n = 0 mod n",
            "causal",
            count3_cot,
            _check_count3_cot,
            "alg:rasp_count_triplets_cot",
        ),
    ]
}


def run(program: Program | str, x: Any) -> Trace:
    """The program, or the one of that name, on a list or array of whole numbers in its domain."""
    if isinstance(program, str):
        if program not in PROGRAMS:
            raise one_of("program", program, PROGRAMS)
        program = PROGRAMS[program]
    tokens = _tokens(program.name, x)
    program.check(tokens)
    r = Rasp(program.mask)
    output = exact(program.function(r, tokens))
    return Trace(tokens, r.named, output)


def _tokens(name: str, x: Any) -> np.ndarray:
    tokens = exact(x)
    if not len(tokens):
        raise InputError(f"{name} takes at least one number: got none.")
    if not all(isinstance(v, int) for v in tokens):
        raise InputError(f"{name} takes whole numbers: got {', '.join(map(str, tokens))}.")
    return tokens


def chain_of_thought(x: Any) -> ChainOfThought:
    """Count3 of any whole numbers from 0 on, by `count3_cot` token by token until it gives EOS."""
    prompt = _tokens("count3-cot", x)
    _refuse_outside("count3-cot", prompt, None, "from 0 on in a prompt")
    n, tokens = len(prompt), [*prompt, EOS]
    trace = run("count3-cot", tokens)
    while trace.answer != EOS:
        tokens.append(trace.answer)
        trace = run("count3-cot", tokens)
    y, z_count = tokens[n + 1 : 2 * n + 1], tokens[2 * n + 1 : 3 * n + 1]
    (answer,) = tokens[3 * n + 1 :]
    return ChainOfThought(tuple(prompt), tuple(y), tuple(z_count), answer, trace)


def trace_table(trace: Trace) -> str:
    """A table with a column for each position: x, the intermediate values, and the output."""
    rows = {"x": trace.x, **trace.named, "output": trace.output}
    head = ["index", *(str(i) for i in range(len(trace.x)))]
    return format_table(head, [[name, *(str(v) for v in values)] for name, values in rows.items()])
