"""Which sums addition trains on and is tested on: numbers as rows of digits, so that they may be of
any length.

    all       every pair of numbers below 10^digits, in a random order
    paper     all pairs, with nine tenths of the longest dropped; splits stratified by digits and
              carries, all one-digit pairs in train (Lee et al. 2023)
    lengths   the number of digits of each operand uniform, no pair twice; tested on longer ones
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from entp.errors import InputError

VALID, TEST, LONG_TEST = 10_000, 70_000, 25_000
"""Sums for validation, for test, and for test of longer numbers; as many as the authors have."""
PER_CELL = 50
"""Sums for each pair of lengths of a test on a grid."""
KEEP = 10
"""Of the pairs with the most digits one in so many is kept."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of numbers: a and b (n, places) have their digits, units first, zeros above."""

    a: np.ndarray
    b: np.ndarray

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, rows: np.ndarray | slice) -> Pairs:
        return Pairs(self.a[rows], self.b[rows])

    @property
    def places(self) -> int:
        return self.a.shape[1]

    @cached_property
    def a_digits(self) -> np.ndarray:
        return written_digits(self.a)

    @cached_property
    def b_digits(self) -> np.ndarray:
        return written_digits(self.b)

    @cached_property
    def digits(self) -> np.ndarray:
        """Of the longer number."""
        return np.maximum(self.a_digits, self.b_digits)

    @cached_property
    def _added(self) -> tuple[np.ndarray, np.ndarray]:
        """The digits of the sums, one place more, and how often 1 is carried."""
        total = np.zeros((len(self), self.places + 1), dtype=np.int8)
        carry, carries = np.zeros(len(self), dtype=np.int8), np.zeros(len(self), dtype=np.int64)
        for place in range(self.places):
            found = self.a[:, place] + self.b[:, place] + carry
            total[:, place], carry = found % 10, found // 10
            carries += carry
        total[:, -1] = carry
        return total, carries

    @property
    def total(self) -> np.ndarray:
        return self._added[0]

    @property
    def carries(self) -> np.ndarray:
        return self._added[1]

    def keys(self, swapped: bool = False, places: int | None = None) -> np.ndarray:
        """A text for each pair, the same for the same pair; swapped: that of b + a."""
        more = (places or self.places) - self.places
        wide = [np.pad(part, ((0, 0), (0, more))) + 1 for part in (self.a, self.b)]
        both = np.concatenate(wide[::-1] if swapped else wide, axis=1).astype(np.uint8)
        return np.ascontiguousarray(both).view(f"S{both.shape[1]}")[:, 0]


def written_digits(numbers: np.ndarray) -> np.ndarray:
    """Digits of each number as it is written: 1 for 0."""
    there = numbers[:, ::-1] != 0
    return np.where(there.any(1), numbers.shape[1] - there.argmax(1), 1)


def from_integers(a: np.ndarray, b: np.ndarray, places: int) -> Pairs:
    """Pairs of integers below 10^places."""
    powers = 10 ** np.arange(places)
    return Pairs(
        *((number[:, None] // powers % 10).astype(np.int8) for number in (a, b)),
    )


def join(parts: list[Pairs]) -> Pairs:
    """All of them, one after the other, with as many places as the longest needs."""
    places = max(part.places for part in parts)
    wide = [
        [np.pad(numbers, ((0, 0), (0, places - part.places))) for numbers in (part.a, part.b)]
        for part in parts
    ]
    return Pairs(*(np.concatenate(numbers) for numbers in zip(*wide, strict=True)))


Splits = dict[str, Pairs]


def all_pairs(digits: int, examples: int, seed: int) -> Splits:
    """All pairs of numbers below 10^digits in a random order: the first for training, the others
    for validation and test in equal parts."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(100**digits)
    pairs = from_integers(order // 10**digits, order % 10**digits, digits)
    middle = examples + (len(order) - examples) // 2
    return {
        "train": pairs[:examples],
        "valid": pairs[examples:middle],
        "test": pairs[middle:],
    }


def paper_pairs(digits: int, examples: int, seed: int) -> Splits:
    """The paper's splits: all one-digit pairs and `examples` - 100 others to train on."""
    rng = np.random.Generator(np.random.Philox(seed))
    everything = _everything(digits)
    kinds = everything.digits * STEP + everything.carries
    longest = kinds >= digits * STEP
    most = np.flatnonzero(longest)
    some = stratified(kinds[most], [len(most) // KEEP], rng)[0]
    kept = np.concatenate([np.flatnonzero(~longest), most[some]])
    short = kinds[kept] < 2 * STEP
    ones, others = kept[short], kept[~short]
    strata = kinds[others]
    rest = len(others) - (examples - len(ones))
    valid = min(VALID, rest // 8)
    sizes = [examples - len(ones), valid, min(TEST, rest - valid)]
    train, held, tested = (others[part] for part in stratified(strata, sizes, rng))
    train = np.concatenate([ones, train])
    return {
        "train": everything[rng.permutation(train)],
        "valid": everything[held],
        "test": everything[tested],
    }


STEP = 100
"""Of the kinds of sums: digits times this, and carries."""


@lru_cache(maxsize=2)
def _everything(digits: int) -> Pairs:
    """All pairs of numbers below 10^digits."""
    return from_integers(*np.divmod(np.arange(100**digits), 10**digits), digits)


def most_paper_examples(digits: int) -> int:
    """Examples that leave the paper's validation and test sets a sum of each kind."""
    return 100 + (100 ** (digits - 1) - 100) + (100**digits - 100 ** (digits - 1)) // KEEP - 80


def stratified(strata: np.ndarray, sizes: list[int], rng: np.random.Generator) -> list[np.ndarray]:
    """Disjoint parts of so many rows, in random order, each with every stratum in proportion."""
    names, counts = np.unique(strata, return_counts=True)
    members = [rng.permutation(np.flatnonzero(strata == name)) for name in names]
    used = np.zeros(len(names), dtype=np.int64)
    parts = []
    for size in sizes:
        take = np.minimum(in_proportion(counts, size), counts - used)
        for short in range(size - int(take.sum())):  # a stratum had too few left
            room = np.flatnonzero(counts - used - take > 0)
            take[room[short % len(room)]] += 1
        chosen = [m[u : u + t] for m, u, t in zip(members, used, take, strict=True)]
        used += take
        parts.append(rng.permutation(np.concatenate(chosen)))
    return parts


def in_proportion(counts: np.ndarray, size: int) -> np.ndarray:
    """Whole numbers that add up to size, in proportion to the counts: the largest remainders are
    rounded up."""
    exact = counts * (size / counts.sum())
    found = np.floor(exact).astype(np.int64)
    most = np.argsort(found - exact, kind="stable")[: size - int(found.sum())]
    found[most] += 1
    return found


Draw = Callable[[int], Pairs]


def length_pairs(digits: int, examples: int, seed: int, longest: int, grid: bool) -> Splits:
    """Both operands of 1 to `digits` digits to train on; a test operand has more.

    Test, with grid: every pair of lengths up to `longest`. Else one operand is longer than in
    training, and the other of any length.
    """
    rng = np.random.Generator(np.random.Philox(seed))

    def lengths(least: int, most: int, size: int) -> np.ndarray:
        return rng.integers(least, most + 1, size)

    def short(size: int) -> Pairs:
        return draw_numbers(lengths(1, digits, size), lengths(1, digits, size), digits, rng)

    def long(size: int) -> Pairs:
        one, other = lengths(digits + 1, longest, size), lengths(1, longest, size)
        first = rng.random(size) < 0.5
        return draw_numbers(np.where(first, one, other), np.where(first, other, one), longest, rng)

    def square(size: int) -> Pairs:
        return draw_numbers(lengths(1, longest, size), lengths(1, longest, size), longest, rng)

    known = without_twins(short, examples + VALID)
    known = known[rng.permutation(len(known))]
    train = known[:examples]
    if grid:
        tested = without_twins(square, PER_CELL * longest**2, avoid=train.keys(places=longest))
    else:
        tested = without_twins(long, LONG_TEST)
    return {"train": train, "valid": known[examples:], "test": tested}


def draw_numbers(
    a_digits: np.ndarray, b_digits: np.ndarray, places: int, rng: np.random.Generator
) -> Pairs:
    """Random numbers that are written with so many digits."""

    def draw(digits: np.ndarray) -> np.ndarray:
        found = rng.integers(0, 10, (len(digits), places), dtype=np.int8)
        place = np.arange(places)
        first = place == digits[:, None] - 1
        leading = rng.integers(1, 10, len(digits), dtype=np.int8)
        found = np.where(first & (digits[:, None] > 1), leading[:, None], found)
        return np.where(place < digits[:, None], found, 0).astype(np.int8)

    return Pairs(draw(a_digits), draw(b_digits))


def without_twins(draw: Draw, size: int, avoid: np.ndarray | None = None) -> Pairs:
    """So many different pairs, in the order in which they are drawn."""
    found: Pairs | None = None
    for _ in range(ROUNDS):
        more = draw(size)
        found = more if found is None else join([found, more])
        keys = found.keys()
        first = np.sort(np.unique(keys, return_index=True)[1])
        if avoid is not None:
            first = first[~np.isin(keys[first], avoid)]
        found = found[first]
        if len(found) >= size:
            return found[:size]
    raise InputError(
        f"there are not {size:,} different sums of these lengths: ask for fewer train_examples, or "
        "for more digits."
    )


ROUNDS = 20
"""Draws of as many pairs as are wanted, before there are taken to be too few."""


@dataclass(frozen=True)
class Lines:
    """Sums as tokens (n, width): `$12+34=46$`, padded with 0 on the right."""

    tokens: np.ndarray
    lengths: np.ndarray
    """Tokens of each line, the closing `$` included."""
    equals: np.ndarray
    """Where its `=` is."""


def write_lines(
    pairs: Pairs, alphabet: str, operands: str, backwards: bool, newline: bool
) -> Lines:
    """The sums as they are written.

    operands: plain, reversed (units first), or padded with zeros to equal length, the sum to one
        more. backwards: units of the sum first.
    """
    digit, dollar = alphabet.index("0"), alphabet.index("$")
    a_digits, b_digits = pairs.a_digits, pairs.b_digits
    c_digits = written_digits(pairs.total)
    if operands == "padded":
        a_digits = b_digits = pairs.digits
        c_digits = a_digits + 1
    plus = 1 + a_digits
    equals = plus + 1 + b_digits
    end = equals + 1 + c_digits
    tokens = np.zeros((len(pairs), int(end.max(initial=0)) + 1 + newline), dtype=np.int8)
    rows = np.arange(len(pairs))
    tokens[:, 0] = dollar
    tokens[rows, plus], tokens[rows, equals] = alphabet.index("+"), alphabet.index("=")
    tokens[rows, end] = dollar
    if newline:
        tokens[rows, end + 1] = alphabet.index("\n")
    for numbers, start, count, units_first in (
        (pairs.a, np.ones_like(plus), a_digits, operands == "reversed"),
        (pairs.b, plus + 1, b_digits, operands == "reversed"),
        (pairs.total, equals + 1, c_digits, backwards),
    ):
        for place in range(numbers.shape[1]):
            there = rows[count > place]
            column = place if units_first else count[there] - 1 - place
            tokens[there, start[there] + column] = digit + numbers[there, place]
    return Lines(tokens, end + 1 + newline, equals)


def one_text(lines: Lines) -> np.ndarray:
    """All lines, one after the other."""
    there = np.arange(lines.tokens.shape[1]) < lines.lengths[:, None]
    return lines.tokens[there]


def operand_lengths(pairs: Pairs) -> Iterator[str]:
    """Bins such as "11x3": the digits of the first and of the second number."""
    return (f"{a}x{b}" for a, b in zip(pairs.a_digits, pairs.b_digits, strict=True))
