"""`entp compare RUN RUN ...`: runs of one task beside each other, or beside recorded ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from entp.bench.options import check_out
from entp.cli.parse import name_of, named_task, parse


@dataclass(frozen=True)
class CompareOptions:
    """Compare runs of one task: their best values over seeds, and what they had at equal sequences,
    FLOPs and seconds. Runs that differ in the seed alone are one arm."""

    metric: str | None = None
    """What is compared. None: the metric that chooses the best checkpoint."""
    recorded: Path | None = None
    """A file of results, such as results/icl.json: was each run where other seeds of its settings
    were?"""
    out: Path | None = None
    """JSON file for runs, curves and settings, as files of results have them; the learning curves
    are drawn in a figure of the same name beside it."""
    task: str | None = None
    """module:Class of the runs' task, if it is not a built-in one."""

    def __post_init__(self) -> None:
        check_out(self.out)


def compare_command(args: list[str]) -> int:
    """compare RUN ...: runs beside each other: over seeds, at equal data, FLOPs and seconds"""
    name_of(args, "run folder", [], "compare")
    names = list(takewhile(lambda word: not word.startswith("-"), args))
    options = parse(CompareOptions, args[len(names) :], "entp compare RUN ...")
    if options.task is not None:
        named_task(options.task)
    print(_compared([Path(name) for name in names], options))
    return 0


def _compared(folders: list[Path], options: CompareOptions) -> str:
    from entp.experiments.compare import compared_runs, comparison
    from entp.experiments.recorded import against_recorded
    from entp.report.figures import draw_record
    from entp.results.store import write_record

    record = compared_runs(folders, options.metric)
    parts = [comparison(record)]
    if options.recorded is not None:
        path = options.recorded
        parts += [against_recorded(folder, path, options.metric) for folder in folders]
    if options.out is not None:
        write_record(options.out, record)
        parts.append(f"runs: {options.out}")
        if draw_record(record, figure := options.out.with_suffix(".png")):
            parts.append(f"figure: {figure}")
    return "\n\n".join(parts)
