"""`entp theory [WHAT]`: each class is the options of a part, and `run` returns what is printed and
the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from entp.bench.options import at_least, check_out
from entp.cli.parse import parse, part_of
from entp.cli.theory_pointers import PointersOptions
from entp.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from entp.model import Transformer

LONGEST = 4096
"""Longest sequence on which compiled weights are tried."""
MOST_RATIO = 256
"""Largest ratio of values to lengths that weights are compiled for: their width is about 4.5 times
it."""
LONGEST_DECODER = 128
"""The same for decoders, whose width is about six times the length."""
RATIO = 4
"""Covers the paper's experiments: values up to 63, from 16 integers on."""
ProgramName = Literal["count3", "count3-printed", "match3", "count2", "count3-cot"]


@dataclass(frozen=True)
class StatementsOptions:
    """Check every statement of the paper's theory: one line each."""

    out: Path | None = None
    """Write the table to this JSON file as well."""

    def __post_init__(self) -> None:
        check_out(self.out)

    def run(self) -> tuple[str, int]:
        from entp.terminal import Progress
        from entp.theory.statements import STATEMENTS, check_all, report

        progress = Progress("theory", len(STATEMENTS), 0, True)
        try:
            found = check_all(lambda done, label: progress.step(done))
        finally:
            progress.close()
        kept = _record(self.out, {"statements": found})
        return f"{report(found)}{kept}", 0 if all(row["as_expected"] for row in found) else 1


@dataclass(frozen=True)
class RaspOptions:
    """Run a RASP program and print every named intermediate value."""

    input: str
    """Whole numbers, such as "3 1 4 1 5"."""
    program: ProgramName = "count3"
    """Which program; `entp theory rasp count3 --input ...` is the same."""

    def run(self) -> tuple[str, int]:
        from entp.theory.programs import PROGRAMS, chain_of_thought, run, trace_table

        x = _whole_numbers(self.input)
        about = PROGRAMS[self.program].about
        if self.program == "count3-cot":
            thought = chain_of_thought(x)
            words = [
                ("partners wanted", thought.y),
                ("found", thought.z_count),
                ("answer", (thought.answer,)),
            ]
            lines = "\n".join(f"{name}: {' '.join(map(str, tokens))}" for name, tokens in words)
            return f"{self.program}: {about}\n\n{trace_table(thought.trace)}\n\n{lines}", 0
        trace = run(self.program, x)
        return f"{self.program}: {about}\n\n{trace_table(trace)}\n\nanswer: {trace.answer}", 0


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(
            f'--input {text!r} is not a list of whole numbers: write them like "3 1 4 1 5".'
        ) from None


@dataclass(frozen=True)
class TradeoffOptions:
    """Count3's algorithms: steps against counters, counted as they run."""

    n_max: int = 4096
    """Longest sequence; lengths are powers of two from 64 on."""
    seed: int = 0
    """Seed of the sequences."""
    out: Path = Path("count3-tradeoff.json")
    """JSON file for the numbers; they are drawn in a figure of the same name beside it."""

    def __post_init__(self) -> None:
        at_least(self, 0, "seed")
        check_out(self.out)

    def run(self) -> tuple[str, int]:
        from entp.theory import tradeoff

        lengths = [n for n in tradeoff.LENGTHS if n <= self.n_max]
        if len(lengths) < 2 or self.n_max > tradeoff.LENGTHS[-1]:
            first, *_, last = tradeoff.LENGTHS[1:]
            raise InputError(
                f"--n-max is {self.n_max}: allowed are {first} to {last}, so that there is a "
                "growth to see."
            )
        result = tradeoff.measure(lengths, self.seed)
        kept = _record(self.out, result, lambda path: tradeoff.draw(result, path))
        return f"{tradeoff.report(result)}{kept}", 0


@dataclass(frozen=True)
class CompiledOptions:
    """Count3 as weights set by hand: build them, try them, and save them like any checkpoint."""

    mode: Literal["entp", "decoder"] = "entp"
    """Which weights: those of an encoder, whose size does not depend on the length, or those of a
    decoder, whose width is six times the length."""
    n_max: int = 64
    """Longest sequence, and number of tokens."""
    ratio: int | None = None
    """Of mode entp: values are below ratio times the length. Without it 4, which covers the paper's
    experiments (up to 63, from 16 integers on)."""
    sequences: int = 256
    """Random sequences to try: as an encoder and under a causal mask, or after every integer."""
    seed: int = 0
    """Seed of these."""
    input: str | None = None
    """Try these whole numbers, such as "3 1 4 1 5", instead of random sequences."""
    precision: Literal["float64", "float32", "bfloat16", "float16"] = "float64"
    """Numbers that the weights are tried in, to see where they break. They are saved in float64."""
    out: Path | None = None
    """Folder for the checkpoint: `entp evaluate` and `entp generate` take it."""

    def __post_init__(self) -> None:
        at_least(self, 1, "n_max", "ratio", "sequences")
        at_least(self, 0, "seed")
        if self.mode == "decoder":
            self._check_decoder()
        if self.input is not None:
            self._check_input(_whole_numbers(self.input))
        if self.n_max > LONGEST:
            raise InputError(
                f"--n-max is {self.n_max}: allowed are 1 to {LONGEST}, because attention takes n² "
                "numbers."
            )
        if self.ratio is not None and self.ratio > MOST_RATIO:
            raise InputError(
                f"--ratio is {self.ratio}: allowed are 1 to {MOST_RATIO}, because the width grows "
                "with it."
            )

    def _check_decoder(self) -> None:
        if self.ratio is not None:
            raise InputError(
                f"--ratio is {self.ratio} with --mode decoder: leave it out, because these weights "
                "take any values below --n-max at any length."
            )
        if self.n_max > LONGEST_DECODER:
            raise InputError(
                f"--n-max is {self.n_max} with --mode decoder: allowed are 1 to {LONGEST_DECODER}, "
                "because the width is six times that."
            )

    def _check_input(self, x: list[int]) -> None:
        """The numbers must be some that the weights are right for."""
        if not 1 <= len(x) <= self.n_max:
            raise InputError(
                f"--input has {len(x)} numbers: with --n-max {self.n_max} 1 to {self.n_max} are "
                "allowed."
            )
        ratio = RATIO if self.ratio is None else self.ratio
        below = self.n_max if self.mode == "decoder" else min(self.n_max, ratio * len(x))
        if strangers := [one for one in x if not 0 <= one < below]:
            told = "" if self.mode == "decoder" else f", with --ratio {ratio} and {len(x)} of them"
            raise InputError(
                f"--input has {strangers[0]}: allowed are 0 to {below - 1}, with --n-max "
                f"{self.n_max}{told}."
            )

    def run(self) -> tuple[str, int]:
        from entp.terminal import format_table

        model, head, rows, wrong = self._decoder() if self.mode == "decoder" else self._encoder()
        weights = sum(p.numel() for p in model.parameters())
        size = f"{model.config.layers} layers, width {model.config.width}, {weights} weights"
        title = f"Count3 up to n = {self.n_max}: {size}"
        return f"{title}\n{format_table(head, rows)}{self._saved(model)}", 1 if wrong else 0

    def _tried(self, ratio: int) -> Iterator[np.ndarray]:
        """Random sequences of three lengths, or the one that was given."""
        import numpy as np

        if self.input is not None:
            yield np.array([_whole_numbers(self.input)])
            return
        rng = np.random.default_rng(self.seed)
        for n in sorted({max(1, self.n_max // 4), max(1, self.n_max // 2), self.n_max}):
            yield rng.integers(0, min(self.n_max, ratio * n), (self.sequences, n))

    def _encoder(self) -> tuple[Transformer, list[str], list[list[str]], int]:
        """The encoder, how it and the same weights as a decoder did, and its errors."""
        from entp.tasks.counting import count3_next
        from entp.theory.compiled import answers, count3

        ratio = RATIO if self.ratio is None else self.ratio
        model, rows, wrong = count3(self.n_max, ratio), [], 0
        tried, head = self._as_tried(model), ["n", "largest value"]
        for x in self._tried(ratio):
            want, said = count3_next(x), [answers(tried, x, mode) for mode in ("entp", "decoder")]
            right = [int((one == want).sum()) for one in said]
            wrong += len(x) - right[0]
            told = [f"{one} of {len(x)}" for one in right]
            if self.input is not None:
                told = [str(want[0]), *(str(one[0]) for one in said)]
            rows.append([str(x.shape[1]), str(x.max()), *told])
        if self.input is not None:
            return model, [*head, "Count3", "said (entp)", "said (decoder)"], rows, wrong
        return model, [*head, "right (entp)", "right (decoder)"], rows, wrong

    def _as_tried(self, model: Transformer) -> Transformer:
        """The weights in the numbers that they are tried in."""
        import copy

        import torch

        return copy.deepcopy(model).to(getattr(torch, self.precision))

    def _decoder(self) -> tuple[Transformer, list[str], list[list[str]], int]:
        """The decoder, its answers after every integer with their margin, and its errors."""
        from entp.theory.count3_decoder import decoder, wrong_and_margin

        model, rows, errors = decoder(self.n_max), [], 0
        tried = self._as_tried(model)
        for x in self._tried(self.n_max):
            wrong, margin = wrong_and_margin(tried, x)
            errors += wrong
            right = f"{x.size - wrong} of {x.size}"
            rows.append([str(x.shape[1]), str(x.max()), right, f"{margin:.1f}"])
        return model, ["n", "largest value", "right (decoder)", "least margin"], rows, errors

    def _saved(self, model: Any) -> str:
        """Save the weights; as a run of Count3 where that task fits them."""
        if self.out is None:
            return ""
        from entp.config import Run, TrainConfig
        from entp.tasks.counting import Count3
        from entp.training.checkpoint import save_model

        if self.n_max <= 2:
            folder = save_model(model, self.out, None)
            return f'\n\nsaved: {folder}. entp.load("{folder}") reads it'
        # From here on values up to n_max - 1 are below ratio n.
        first = max(1, -(-self.n_max // (self.ratio or RATIO)))
        prompt = min(first, self.n_max - 1)
        task = Count3(prompt_length=prompt, length=self.n_max, num_values=self.n_max)
        # fp32: no autocast of float64.
        run = Run(task, model.config, self.mode, train=TrainConfig(precision="fp32"))
        folder = save_model(model, self.out, run)
        return f"\n\nsaved: {folder}. Try: entp evaluate {folder}, entp generate {folder}"


@dataclass(frozen=True)
class ComplexityOptions:
    """The paper's complexity table, measured: time, kept and additional memory of one more token as
    n grows."""

    out: Path | None = None
    """Write the numbers to this JSON file as well."""

    def __post_init__(self) -> None:
        check_out(self.out)

    def run(self) -> tuple[str, int]:
        from entp.theory import complexity

        result = complexity.measure()
        return f"{complexity.report(result)}{_record(self.out, result)}", 0


THEORY: dict[str, type] = {
    "statements": StatementsOptions,
    "rasp": RaspOptions,
    "count3-tradeoff": TradeoffOptions,
    "compiled": CompiledOptions,
    "pointers": PointersOptions,
    "complexity": ComplexityOptions,
}
"""What `entp theory` can be asked for; statements if nothing is said."""


def theory_command(args: list[str]) -> int:
    """theory [WHAT]: check the paper's statements; RASP, Count3's trade-off, tasks as weights"""
    what, rest = part_of(args, "theory", "part of theory", THEORY, "statements")
    if what == "rasp" and rest and not rest[0].startswith("-"):
        rest = ["--program", *rest]
    options: Any = parse(THEORY[what], rest, f"entp theory {what}")
    text, code = options.run()
    print(text)
    return code


def _record(
    out: Path | None, result: dict[str, Any], draw: Callable[[Path], None] | None = None
) -> str:
    """A line about the file that a result was written to, with its environment, and about its
    figure."""
    if out is None:
        return ""
    import torch

    from entp.files import write_file
    from entp.results.environment import environment

    found = {"environment": environment(torch.device("cpu"), 1), **result}
    write_file(out, f"{json.dumps(found, indent=1)}\n".encode())
    if draw is None:
        return f"\n\nnumbers: {out}"
    figure = out.with_suffix(".png")
    try:
        draw(figure)
    except ImportError:
        return f"\n\nnumbers: {out}; no figure: pip install 'entp[plot]' to draw one."
    return f"\n\nnumbers: {out}, figure: {figure}"
