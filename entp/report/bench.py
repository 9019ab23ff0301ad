"""One figure of a file of benchmark sections: bars for steps, memory and generation, curves for
growth with n."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entp.report.style import BENCH, DASHES, GREY, MARKERS, mode_style, new_figure, save_figure
from entp.results.sections import read_sections

Panel = Callable[[Any, dict[str, Any]], None]
SIDES = {
    "entp reference": ("the paper's loop", GREY),
    "entp triton": ("ENTP, here (times faster)", mode_style("ENTP")["color"]),
    "decoder-triton": ("decoder, here", mode_style("decoder")["color"]),
}
"""Variants that the summary compares."""


def draw_sections(path: Path) -> str:
    """Draw the sections of a file beside it; returns a message for a person."""
    figure = path.with_suffix(".png")
    return f"figure: {figure}" if draw(read_sections(path), figure) else "no figure"


def draw(sections: dict[str, Any], path: Path) -> bool:
    """The panels of all known sections; False without matplotlib, or where there are none."""
    shown = [
        (panel, sections[name])
        for name, found in PANELS.items()
        if name in sections
        for panel in found
    ]
    columns = min(3, len(shown))
    rows = -(-len(shown) // max(columns, 1))
    figure = new_figure(5 * columns, 3.8 * rows) if shown else None
    if figure is None:
        return False
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for (panel, section), axis in zip(shown, axes, strict=False):
        panel(axis, section)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    machines = sorted(
        {f"{s['environment']['device']}, torch {s['environment']['torch']}" for _, s in shown}
    )
    figure.suptitle("; ".join(machines), fontsize=10)
    save_figure(figure, path)
    return True


def _step_times(axis: Any, section: dict[str, Any]) -> None:
    _bars(axis, section, lambda row: row["median"] * 1e3, "ratio")
    axis.set(ylabel="ms per training step (log)")
    axis.set_title("training step; the loop's time over this", fontsize=9)


def _step_memory(axis: Any, section: dict[str, Any]) -> None:
    _bars(axis, section, lambda row: row["peak_bytes"] / 2**20, "memory_ratio")
    axis.set(ylabel="peak memory, MiB (log)")
    axis.set_title("training step; the loop's memory over this", fontsize=9)


def _bars(
    axis: Any, section: dict[str, Any], value: Callable[[dict[str, Any]], float], ratio: str
) -> None:
    """Groups of bars, one group per shape and one bar per variant, on a log scale, each with its
    ratio above it."""
    shapes = section["shapes"]
    names = list(dict.fromkeys(row["name"] for shape in shapes for row in shape["steps"]))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        rows = {
            at: row
            for at, shape in enumerate(shapes)
            for row in shape["steps"]
            if row["name"] == name
        }
        places = [at + (number - (len(names) - 1) / 2) * width for at in rows]
        heights = [max(value(row), 1e-6) for row in rows.values()]
        bars = axis.bar(places, heights, width, label=name, color=BENCH.get(name))
        texts = ["" if row[ratio] is None else f"{row[ratio]:.3g}x" for row in rows.values()]
        axis.bar_label(bars, texts, fontsize=6, rotation=90, padding=2)
    axis.set_yscale("log")
    axis.margins(y=0.25)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.12)  # room for the legend
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(range(len(shapes)), [_shape_label(shape) for shape in shapes], fontsize=7)
    axis.legend(fontsize=7, ncols=2, loc="upper center")


def _shape_label(shape: dict[str, Any]) -> str:
    size = "" if shape["name"] == shape["size"] else f"\n{shape['size']}"
    return f"{shape['name']}{size}\n{shape['batch_size']} x {shape['tokens']}"


def _generation(axis: Any, section: dict[str, Any]) -> None:
    rows, shape = section["runs"], section["config"]
    bars = axis.bar(
        [row["name"].replace(" ", "\n") for row in rows],
        [row["tokens_per_s"] for row in rows],
        color=[BENCH.get(row["name"]) for row in rows],
    )
    axis.bar_label(bars, [f"{row['ratio']:.3g}x" for row in rows], fontsize=8)
    axis.set(ylabel="tokens per second")
    what = (
        f"{shape['size']}, {shape['batch_size']} sequences, {shape['prompt_length']} to "
        f"{shape['length']} tokens"
    )
    axis.set_title(f"generation, {what}\nratio to ENTP uncached", fontsize=9)


def _growth(what: str, scale: float, label: str) -> Panel:
    def panel(axis: Any, section: dict[str, Any]) -> None:
        for mode in ("entp", "decoder"):
            _draw_growth(axis, section, what, mode, scale)
        lengths = [point["n"] for point in section["points"]]
        axis.set_xticks(lengths, [str(n) for n in lengths], fontsize=7)
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="n (tokens)", ylabel=label)
        config = section["config"]
        title = f"growth with n, {config['size']}, batches of {config['batch_size']}"
        axis.set_title(title, fontsize=9)
        axis.legend(fontsize=8)

    return panel


def _draw_growth(axis: Any, section: dict[str, Any], what: str, mode: str, scale: float) -> None:
    """What was measured, and the fitted power through its upper half."""
    fits = [fit for fit in section["fits"] if (fit["what"], fit["mode"]) == (what, mode)]
    if not fits:
        return
    power, colour = fits[0]["exponent"], BENCH[mode]
    lengths = [point["n"] for point in section["points"]]
    values = [point[mode][what] * scale for point in section["points"]]
    axis.loglog(lengths, values, marker=".", color=colour, label=f"{mode}, n^{power:.2f}")
    upper = [n for n in lengths if n >= fits[0]["from_n"]]
    last = zip(upper, values[-len(upper) :], strict=True)
    constant = math.prod(value / n**power for n, value in last) ** (1 / len(upper))
    drawn = [constant * n**power for n in upper]
    axis.loglog(upper, drawn, linestyle="--", linewidth=1, color=colour)


def _sweep(axis: Any, section: dict[str, Any]) -> None:
    """Steps per second over the number of runs at a time, a line per mode and way."""
    rows = [row for row in section["runs"] if row["median"] is not None]
    ways = list(dict.fromkeys(row["how"] for row in rows))
    for mode in dict.fromkeys(row["mode"] for row in rows):
        for at, how in enumerate(ways):
            line = [row for row in rows if (row["mode"], row["how"]) == (mode, how)]
            axis.plot(
                [row["runs"] for row in line],
                [row["median"] for row in line],
                marker=MARKERS[at % len(MARKERS)],
                linestyle=DASHES[at % len(DASHES)],
                color=BENCH[mode],
                label=f"{mode}, {how}",
            )
    counts = sorted({row["runs"] for row in rows})
    axis.set(xscale="log", yscale="log", xlabel="runs at a time", ylabel="steps per second (log)")
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    config = section["config"]
    title = f"{config['size']}, {config['batch_size']} sequences of {config['tokens']} tokens"
    axis.set_title(f"all runs together; {title}", fontsize=9)
    axis.legend(fontsize=7)


PANELS: dict[str, list[Panel]] = {
    "step": [_step_times, _step_memory],
    "generate": [_generation],
    "scaling": [
        _growth("step", 1e3, "ms per training step (log)"),
        _growth("token", 1e3, "ms per generated token (log)"),
        _growth("memory", 2**-20, "peak memory of a step, MiB (log)"),
    ],
    "sweep": [_sweep],
}
"""The panels of each section."""


def step_seconds(speed: dict[str, Any], variant: str) -> float | None:
    """Seconds of a Count3 step; None where it was not measured."""
    rows = (row for shape in speed["shapes"] if shape["name"] == "count3" for row in shape["steps"])
    return next((row["median"] for row in rows if row["name"] == variant), None)


def whole_shapes(speed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows by variant of the shapes on which all of SIDES were measured, by name."""
    found = {
        shape["name"]: {row["name"]: row for row in shape["steps"]} for shape in speed["shapes"]
    }
    return {name: rows for name, rows in found.items() if SIDES.keys() <= rows.keys()}


def draw_speeds(panel: Any, speed: dict[str, Any]) -> None:
    """A training step by the paper's loop and by the kernels."""
    shapes = whole_shapes(speed)
    steps = list(shapes.values())
    for offset, (variant, (name, colour)) in enumerate(SIDES.items()):
        places = [n + 0.27 * (offset - 1) for n in range(len(shapes))]
        heights = [step[variant]["median"] * 1e3 for step in steps]
        panel.bar(places, heights, width=0.25, color=colour, label=name)
    for n, step in enumerate(steps):
        row = step["entp triton"]
        at = (n, row["median"] * 1e3)
        panel.annotate(f"{row['ratio']:.0f}x", at, ha="center", va="bottom", fontsize=8)
    device = speed["environment"]["device"]
    panel.set(yscale="log", ylabel="ms", title=f"a training step, {device}")
    panel.set_xticks(range(len(shapes)), list(shapes))
    panel.set_ylim(top=3 * panel.get_ylim()[1])  # room for the legend
    panel.legend(fontsize=7)
