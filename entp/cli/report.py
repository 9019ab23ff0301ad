"""`entp report`: the page of all recorded results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from entp.cli.parse import parse
from entp.errors import InputError


@dataclass(frozen=True)
class ReportOptions:
    """Write the page of all recorded results."""

    results: Path = Path("results")
    """Folder of the files that `entp reproduce --record` writes."""
    out: Path = Path("docs/results.md")
    """The page: .md with figures beside it, or .html, one file that needs nothing else. Or .csv:
    every number of every seed, a row each."""

    def __post_init__(self) -> None:
        if not self.out.parent.is_dir():
            raise InputError(
                f"--out {self.out} is in a folder that does not exist: make {self.out.parent} "
                "first."
            )
        if self.out.suffix not in (".md", ".html", ".csv"):
            raise InputError(
                f"--out {self.out} is to be a page of Markdown or of HTML, or rows of CSV: give a "
                "name that ends with .md, .html or .csv."
            )


def report_command(args: list[str]) -> int:
    """report: the page of all recorded results"""
    options = parse(ReportOptions, args, "entp report")
    from entp.report.page import write_report
    from entp.report.rows import write_rows
    from entp.report.web import write_web_page

    writers = {".md": write_report, ".html": write_web_page, ".csv": write_rows}
    print(writers[options.out.suffix](options.results, options.out))
    return 0
