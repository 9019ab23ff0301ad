"""What each mode's attention sees, and the demo's figure around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from entp.engine import masks
from entp.report.style import FAMILIES, UNIT, mode_style, new_figure, save_figure

TITLES = {"ENTP": "ENTP: each prediction from scratch", "decoder": "decoder: causal mask"}


class Side(Protocol):
    """One of the models that the demo compares."""

    @property
    def label(self) -> str: ...
    @property
    def curve(self) -> Sequence[tuple[int, float]]: ...
    @property
    def flops(self) -> float: ...


def draw_demo(sides: Sequence[Side], path: Path) -> bool:
    """Save what each mode sees, accuracy against steps, and what it cost. False without
    matplotlib."""
    figure = new_figure(11, 3.8)
    if figure is None:
        return False
    seen, learned, cost = figure.subfigures(1, 3, width_ratios=(1.1, 1.9, 1))
    draw_patterns(seen)
    draw_learning(learned.subplots(), sides)
    draw_cost(cost.subplots(), sides)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=110)
    return True


def draw_learning(panel: Any, sides: Sequence[Side]) -> None:
    """Validation exact match against steps."""
    for side in sides:
        steps, values = zip(*side.curve, strict=True)
        panel.plot(steps, values, marker=".", label=side.label, **mode_style(side.label))
    panel.set(xlabel="optimizer steps", ylabel="validation exact match", ylim=UNIT)
    panel.set_title("learning two-digit addition")
    panel.legend()


def draw_cost(panel: Any, sides: Sequence[Side]) -> None:
    colours = [mode_style(side.label)["color"] for side in sides]
    panel.bar([side.label for side in sides], [side.flops / 1e9 for side in sides], color=colours)
    panel.set(ylabel="training GFLOP", title="what it cost")


def draw_patterns(figure: Any, time: int = 6) -> None:
    """Three squares per mode: what is seen when the last three tokens are predicted."""
    panels = figure.subplots(2, 3)
    for row, mode in zip(panels, TITLES, strict=True):
        for panel, n in zip(row, range(time - 2, time + 1), strict=True):
            square = np.zeros((time, time))
            square[:n, :n] = 0.15 + 0.85 * _seen(mode, n)
            panel.imshow(square, cmap=FAMILIES[mode], vmin=0, vmax=1.4)
            panel.set(xticks=[], yticks=[])
        row[1].set_title(TITLES[mode], fontsize=8)
    figure.supxlabel("keys", fontsize=8)
    figure.supylabel("queries", fontsize=8)


def _seen(mode: str, n: int) -> np.ndarray:
    """(n, n) whether a query sees a key when the n-th prediction is made."""
    if mode == "ENTP":
        return np.ones((n, n))
    return masks.visible("decoder", n)[0].numpy()
