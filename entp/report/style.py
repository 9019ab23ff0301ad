"""How figures look: the only colours, dashes and markers, and how a figure gets onto the disk."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from entp.files import write_file
from entp.results.schema import Factor

GREY = "0.6"
"""The authors' curves, and the paper's loop."""
COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "k", "C8", "C9", "navy", "gold")
"""Of arms: C7 is grey, which is the authors'."""
MODES = {"ENTP": "C0", "decoder": "C1", "prefix-lm decoder": "C4"}
"""One colour for each mode, where there are few lines."""
FAMILIES = {"ENTP": "Blues", "decoder": "Oranges", "prefix-lm decoder": "Purples"}
"""Shades for each mode, where there are many."""
OTHER_FAMILIES = ("Greens", "Reds", "Greys", "YlOrBr")
BENCH = {
    "entp reference": GREY,
    "entp packed": "C0",
    "entp triton": "C2",
    "decoder": "C1",
    "decoder-triton": "C3",
    "entp uncached": GREY,
    "entp": "C2",
    "decoder uncached": "0.8",
}
DASHES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)))
"""Dotted is the paper's value."""
BASELINE = "k"
"""Answers without a model."""
BASELINE_DASHES = ("--", "-.", (0, (1, 1)), (0, (6, 2, 1, 2)))
MARKERS = "vso^DPX*"
HEAT = "viridis"
INK = "0.1"
"""Text on bright cells of it: black text is the page's, which may be white."""
LIMIT = "C3"
"""Lines that say where something ends."""
UNIT = (-0.03, 1.03)
"""Axis of a fraction."""


def new_figure(width: float, height: float) -> Any:
    """A figure, or None with a word on standard error where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no figure: pip install 'entp[plot]' to draw one.", file=sys.stderr)
        return None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path, dpi: int = 120) -> None:
    """Write a matplotlib figure so that `path` holds either all of it or what it held before; the
    suffix says the format."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.lstrip(".") or "png", dpi=dpi)
    write_file(path, image.getvalue())


def arm_colours(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each arm, and dashes when colours begin again."""
    count = len(COLOURS)
    return {
        label: {"color": COLOURS[at % count], "linestyle": DASHES[at // count % len(DASHES)]}
        for at, label in enumerate(labels)
    }


def line_styles(keys: Sequence[tuple[Factor, ...]]) -> dict[tuple[Factor, ...], dict[str, Any]]:
    """A style for each line, by the values of its factors: a family of shades for the first, darker
    for later values of the others, with a marker for each. A colour for each value of one factor
    that has more than there are families."""
    from matplotlib import colormaps

    firsts = [name for name in dict.fromkeys(key[0] for key in keys) if name not in FAMILIES]
    if len(firsts) > len(OTHER_FAMILIES) and all(len(key) == 1 for key in keys):
        return _own_colours(keys)
    families: dict[Factor, str] = dict(FAMILIES.items())
    families.update(zip(firsts, cycle(OTHER_FAMILIES), strict=False))
    rests = sorted(dict.fromkeys(key[1:] for key in keys), key=_in_order)
    styles = {}
    for key in keys:
        rank = rests.index(key[1:])
        shade = 0.6 if len(rests) == 1 else 0.35 + 0.65 * rank / (len(rests) - 1)
        colour = colormaps[families[key[0]]](shade)
        styles[key] = {"color": colour, "marker": MARKERS[rank % len(MARKERS)]}
    return styles


def _own_colours(keys: Sequence[tuple[Factor, ...]]) -> dict[tuple[Factor, ...], dict[str, Any]]:
    """A colour for each value of a factor, those of the modes where it is a mode."""
    free = cycle([colour for colour in COLOURS if colour not in MODES.values()])
    return {
        key: {"color": MODES.get(str(key[0])) or next(free), "marker": MARKERS[at % len(MARKERS)]}
        for at, key in enumerate(keys)
    }


def _in_order(values: tuple[Factor, ...]) -> list[tuple[bool, Any]]:
    """Numbers by size, then texts."""
    return [(isinstance(value, str), value) for value in values]


def mode_style(mode: Factor | None, dashes: Any = "-") -> dict[str, Any]:
    """The colour of a mode."""
    return {"color": MODES.get(str(mode), "k"), "linestyle": dashes}
