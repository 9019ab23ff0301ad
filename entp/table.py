"""Plain tables for terminals."""

from __future__ import annotations


def format_table(head: list[str], rows: list[list[str]], *, left: bool = False) -> str:
    """Columns aligned by their widest cell, a rule under the head; the first column, or all if `left`, to the left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: list[str]) -> str:
        cells = [
            cell.ljust(w) if left or i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])
