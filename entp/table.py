"""Plain tables for terminals."""

from __future__ import annotations


def format_table(head: list[str], rows: list[list[str]]) -> str:
    """Columns aligned by their widest cell, the first to the left and the others to the right, a rule under the head."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: list[str]) -> str:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])
