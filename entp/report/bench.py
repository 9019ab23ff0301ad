"""One picture of a file of benchmark sections: bars for steps, memory and generation, curves for
growth with n."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entp.report.style import save_figure

COLOURS = {
    "entp reference": "0.6",
    "entp packed": "C0",
    "entp triton": "C2",
    "decoder": "C1",
    "decoder-triton": "C3",
    "entp uncached": "0.6",
    "entp": "C2",
    "decoder uncached": "0.8",
}
Panel = Callable[[Any, dict[str, Any]], None]


def draw(sections: dict[str, Any], path: Path) -> None:
    """Draw the panels of all known sections; ImportError without matplotlib."""
    from matplotlib.figure import Figure

    panels = [
        (panel, sections[name])
        for name, found in PANELS.items()
        if name in sections
        for panel in found
    ]
    if not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure: Any = Figure(figsize=(5 * columns, 3.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for (panel, section), axis in zip(panels, axes, strict=False):
        panel(axis, section)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    machines = sorted(
        {f"{s['environment']['device']}, torch {s['environment']['torch']}" for _, s in panels}
    )
    figure.suptitle("; ".join(machines), fontsize=10)
    save_figure(figure, path)


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
    """Groups of bars, one group per shape and one bar per contender, on a log scale, each with its
    ratio above it."""
    shapes = section["shapes"]
    names = list(dict.fromkeys(row["name"] for shape in shapes for row in shape["steps"]))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = [
            (at, row)
            for at, shape in enumerate(shapes)
            for row in shape["steps"]
            if row["name"] == name
        ]
        places = [at + (number - (len(names) - 1) / 2) * width for at, _ in found]
        bars = axis.bar(
            places,
            [max(value(row), 1e-6) for _, row in found],
            width,
            label=name,
            color=COLOURS.get(name),
        )
        axis.bar_label(
            bars,
            ["" if row[ratio] is None else f"{row[ratio]:.3g}x" for _, row in found],
            fontsize=6,
            rotation=90,
            padding=2,
        )
    axis.set_yscale("log")
    axis.margins(y=0.25)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.12)  # room for the legend
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(range(len(shapes)), [_shape_label(shape) for shape in shapes], fontsize=7)
    axis.legend(fontsize=7, ncols=2, loc="upper center")


def _shape_label(shape: dict[str, Any]) -> str:
    size = "" if shape["name"] == shape["size"] else f"\n{shape['size']}"
    return f"{shape['name']}{size}\n{shape['batch']} x {shape['tokens']}"


def _generation(axis: Any, section: dict[str, Any]) -> None:
    rows, shape = section["runs"], section["config"]
    bars = axis.bar(
        [row["name"].replace(" ", "\n") for row in rows],
        [row["tokens_per_s"] for row in rows],
        color=[COLOURS.get(row["name"]) for row in rows],
    )
    axis.bar_label(bars, [f"{row['ratio']:.3g}x" for row in rows], fontsize=8)
    axis.set(ylabel="tokens per second")
    what = (
        f"{shape['size']}, {shape['batch']} sequences, {shape['prompt']} to {shape['total']} tokens"
    )
    axis.set_title(f"generation, {what}\nratio to ENTP uncached", fontsize=9)


def _growth(what: str, scale: float, label: str) -> Panel:
    def panel(axis: Any, section: dict[str, Any]) -> None:
        points = section["points"]
        lengths = [point["n"] for point in points]
        for mode in ("entp", "decoder"):
            fit = next((f for f in section["fits"] if (f["what"], f["mode"]) == (what, mode)), None)
            if fit is None:
                continue
            values = [point[mode][what] * scale for point in points]
            axis.loglog(
                lengths,
                values,
                marker=".",
                color=COLOURS[mode],
                label=f"{mode}, n^{fit['exponent']:.2f}",
            )
            upper = [n for n in lengths if n >= fit["from_n"]]
            constant = math.prod(
                v / n ** fit["exponent"] for n, v in zip(upper, values[-len(upper) :], strict=True)
            )
            drawn = [constant ** (1 / len(upper)) * n ** fit["exponent"] for n in upper]
            axis.loglog(upper, drawn, linestyle="--", linewidth=1, color=COLOURS[mode])
        axis.set_xticks(lengths, [str(n) for n in lengths], fontsize=7)
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="n (tokens)", ylabel=label)
        axis.set_title(
            f"growth with n, {section['config']['size']}, batch {section['config']['batch']}",
            fontsize=9,
        )
        axis.legend(fontsize=8)

    return panel


PANELS: dict[str, list[Panel]] = {
    "step": [_step_times, _step_memory],
    "generate": [_generation],
    "scaling": [
        _growth("step", 1e3, "ms per training step (log)"),
        _growth("token", 1e3, "ms per generated token (log)"),
        _growth("memory", 2**-20, "peak memory of a step, MiB (log)"),
    ],
}
"""The panels of each section."""
