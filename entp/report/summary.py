"""The picture of what was found, from the files in results/.

Who learns Count3, in how many minutes and from how many sequences, at which length and depth
decoders fail, what a step costs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from entp.config.json import run_from_json
from entp.experiments.paper_curves import COUNT3
from entp.experiments.recipe import find_recipe
from entp.experiments.records import read_file
from entp.report.curves import depth_lines, new_figure
from entp.report.style import save_figure
from entp.results.schema import read_sections

Draw = Callable[[Any], None]
COLOURS = {"entp": "C0", "decoder": "C1", "prefix-lm": "C4"}
SIDES = {
    "entp reference": ("the paper's loop", "0.6"),
    "entp triton": ("ENTP, here (times faster)", "C0"),
    "decoder-triton": ("decoder, here", "C1"),
}
NAMES = {"entp": "ENTP", "decoder": "decoder", "prefix-lm": "prefix decoder"}


def draw_summary(results: Path, path: Path) -> bool:
    """One panel for each file that is there and has something to show. False where nothing was
    drawn."""
    speed = read_sections(results / "engine_speed.json").get("step")
    count3, depth = (_read(results, name) for name in ("count3", "count3-depth"))
    panels: list[Draw] = []
    if count3 and any(_fast(count3)):
        loop = _step(speed, "entp reference") if speed else None
        panels.append(lambda panel: _learning(panel, count3, loop))
    if count3 and any(runs for *_, runs in _alone(count3)):
        panels.append(lambda panel: _reading(panel, count3))
    if depth and any(arm.get("fresh") for arm in depth["arms"].values()):
        panels.append(lambda panel: _depths(panel, depth))
    if speed and _whole_shapes(speed):
        panels.append(lambda panel: _speeds(panel, speed))
    columns = 2 if len(panels) == 4 else len(panels)
    rows = -(-len(panels) // max(columns, 1))
    figure = new_figure(1 + 4.6 * columns, 3.9 * rows) if panels else None
    if figure is None:
        return False
    for panel, draw in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        draw(panel)
    save_figure(figure, path, dpi=110)
    return True


def _read(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return read_file(path, find_recipe(name)) if path.is_file() else None


def _fast(count3: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of medium models with settings of our own that are about minutes: of ENTP, and of
    decoders that get as many."""
    arms = (
        arm
        for label, arm in count3["arms"].items()
        if label.endswith((", fast", ", decoder first"))
    )
    return [run for arm in arms for run in arm.get("runs", [])]


def _alone(count3: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Runs of ENTP and decoders without a start: mode, name, runs."""
    arms = {
        "ENTP medium, fast": ("entp", "ENTP, here"),
        "decoder medium, as many steps": ("decoder", "decoder, ENTP's settings"),
        "decoder medium, as many sequences": ("decoder", "decoder, settings of its own"),
        "decoder medium, fast": ("decoder", "decoder, for longer"),
    }
    return [
        (mode, name, count3["arms"].get(label, {}).get("runs", []))
        for label, (mode, name) in arms.items()
    ]


def read_by(run: dict[str, Any]) -> list[int]:
    """Sequences that a recorded run had read at each point of its curve."""
    made = run_from_json(run["settings"], "a recorded run")
    return [made.sequences_by(point["step"]) for point in run["curve"]]


def _step(speed: dict[str, Any], contender: str) -> float | None:
    """Seconds of a Count3 step; None where it was not measured."""
    rows = (row for shape in speed["shapes"] if shape["name"] == "count3" for row in shape["steps"])
    return next((row["median"] for row in rows if row["name"] == contender), None)


def _learning(panel: Any, count3: dict[str, Any], loop: float | None) -> None:
    """Sequences right against minutes; the authors' curve at the time that their loop takes on the
    same device."""
    seen: set[str] = set()
    for run in _fast(count3):
        mode, first = run["settings"]["mode"], run["settings"].get("start", {}).get("steps", 0) > 0
        name = f"{NAMES[mode]}, here" + ", a decoder first" * first
        minutes, right = zip(
            *((r["seconds"] / 60, r["sequence_accuracy"]) for r in run["curve"]), strict=True
        )
        style = {"color": COLOURS[mode], "linewidth": 1.5, "linestyle": "--" if first else "-"}
        panel.plot(minutes, right, label=None if name in seen else name, **style)
        seen.add(name)
    if loop is not None:
        minutes, right = zip(
            *((step * loop / 60, v) for step, v in COUNT3["ENTP medium"]["sequence_accuracy"]),
            strict=True,
        )
        told = f"ENTP, the authors' run\nat the loop's {loop:.2f} s a step"
        panel.plot(minutes, right, color="0.6", linewidth=2, zorder=0, label=told)
    panel.set(xscale="log", ylim=(-0.03, 1.03), title="learning Count3 (64 integers, medium)")
    panel.set_xlim(
        left=0.01
    )  # room for the legend: before the first minute nobody has anything right
    device = _fast(count3)[0]["environment"]["device"]
    panel.set(
        xlabel=f"minutes of training on one {device}", ylabel="validation sequences right (share)"
    )
    panel.legend(fontsize=7, loc="upper left")


def _reading(panel: Any, count3: dict[str, Any]) -> None:
    """Sequences right against sequences read, as far as the authors' ENTP went, which read 64 a
    step."""
    points = [
        (step * 64 / 1e6, right) for step, right in COUNT3["ENTP medium"]["sequence_accuracy"]
    ]
    for (mode, name, runs), dashes in zip(_alone(count3), ("-", "-", "--", ":"), strict=True):
        style = {"color": COLOURS[mode], "linestyle": dashes}
        if runs and (last := max(read_by(run)[-1] for run in runs) / 1e6) > points[-1][0]:
            name += f" ({last:.0f} million)"
        for number, run in enumerate(runs):
            right = [point["sequence_accuracy"] for point in run["curve"]]
            panel.plot(
                [read / 1e6 for read in read_by(run)],
                right,
                label=None if number else name,
                **style,
            )
    panel.plot(
        *zip(*points, strict=True),
        color="0.6",
        linewidth=2,
        zorder=0,
        label="ENTP, the authors' run",
    )
    panel.set(
        xlim=(0, points[-1][0]),
        ylim=(-0.03, 1.03),
        title="the same by sequences read, without a decoder first",
    )
    panel.set(xlabel="sequences read (millions)", ylabel="validation sequences right (share)")
    panel.legend(fontsize=7, loc="upper left")


def _depths(panel: Any, depth: dict[str, Any]) -> None:
    lines = depth_lines(depth, "sequence_accuracy")
    for label, lengths, right, style in lines:
        panel.plot(lengths, right, label=label, **style)
    ticks = sorted({length for _, lengths, *_ in lines for length in lengths})
    panel.set(ylim=(-0.03, 1.03), title="Count3 after one minute each, width 192", xticks=ticks)
    panel.set(xlabel="integers in a sequence", ylabel="fresh sequences right (share)")
    panel.legend(fontsize=6)


def _whole_shapes(speed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows by contender of the shapes on which all sides were measured, by name."""
    found = {
        shape["name"]: {row["name"]: row for row in shape["steps"]} for shape in speed["shapes"]
    }
    return {name: rows for name, rows in found.items() if SIDES.keys() <= rows.keys()}


def _speeds(panel: Any, speed: dict[str, Any]) -> None:
    """A training step by the paper's loop and by the kernels."""
    shapes = _whole_shapes(speed)
    steps = list(shapes.values())
    for offset, (contender, (name, colour)) in enumerate(SIDES.items()):
        places = [n + 0.27 * (offset - 1) for n in range(len(shapes))]
        panel.bar(
            places,
            [s[contender]["median"] * 1e3 for s in steps],
            width=0.25,
            color=colour,
            label=name,
        )
    for n, step in enumerate(steps):
        row = step["entp triton"]
        panel.annotate(
            f"{row['ratio']:.0f}x", (n, row["median"] * 1e3), ha="center", va="bottom", fontsize=8
        )
    panel.set(
        yscale="log",
        ylabel="ms",
        title=f"a training step, {speed['environment']['device']}",
        xticks=range(len(shapes)),
    )
    panel.set_xticklabels(list(shapes))
    panel.set_ylim(top=3 * panel.get_ylim()[1])  # room for the legend
    panel.legend(fontsize=7)
