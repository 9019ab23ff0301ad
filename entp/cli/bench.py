"""`entp bench [WHAT]`: time and memory of a training step, of generation, as length grows, and of
runs that share a device."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from entp.bench.options import BENCHES
from entp.cli.parse import parse, part_of


def bench_command(args: list[str]) -> int:
    """bench [WHAT]: time and memory: a training step, generation, growth with length, sweeps"""
    what, rest = part_of(args, "bench", "benchmark", BENCHES, "step")
    options: Any = parse(BENCHES[what], rest, f"entp bench {what}")
    from entp.report.bench import draw_sections
    from entp.results.sections import read_sections, record_section

    out = options.out
    if out is not None:
        read_sections(out)  # a file that cannot be used is an error before the work, not after it
    module = importlib.import_module(f"entp.bench.{what}")
    keep: dict[str, Any] = {}
    if what == "step" and out is not None:
        keep["save"] = partial(record_section, out, what)
    section = module.bench(options, **keep)
    print(module.report(section))
    if out is not None:
        print(f"\n{record_section(out, what, section)}, {draw_sections(out)}")
    return 0
