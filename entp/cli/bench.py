"""`entp bench [WHAT]`: time and memory of a training step, of generation, as length grows, and of
runs that share a device."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from entp.bench.options import ARMS, BENCHES, BenchArmsOptions
from entp.cli.parse import look_here, parse, part_of
from entp.errors import InputError


def _arms(args: list[str]) -> int:
    """entp bench arms RECIPE [OPTIONS]"""
    name = args[0] if args and not args[0].startswith("-") else None
    options = parse(BenchArmsOptions, args[1:] if name else args, "entp bench arms RECIPE")
    if name is None:
        raise InputError("give a recipe: entp bench arms RECIPE. See entp bench arms --help.")
    look_here(name)
    from entp.experiments.arm_times import bench_arms, report

    print(report(bench_arms(name, options)))
    return 0


def bench_command(args: list[str]) -> int:
    """bench [WHAT]: time and memory: a training step, generation, growth with length, sweeps"""
    what, rest = part_of(args, "bench", "benchmark", {**BENCHES, ARMS: BenchArmsOptions}, "step")
    if what == ARMS:
        return _arms(rest)
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
