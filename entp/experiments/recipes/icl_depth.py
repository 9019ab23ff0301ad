"""Beyond the paper: does ENTP need fewer layers than a decoder to learn linear functions in
context?

One layer of ENTP is a decoder: only the training differs, by its random targets.
"""

from __future__ import annotations

from dataclasses import replace

from entp.experiments.recipe import Arm, Check, Figure, Table
from entp.experiments.recipes.icl import BOTH, ERROR, FAST, icl_run
from entp.experiments.recipes.icl import RECIPE as CLASSES

DEPTHS = (1, 2, 3, 6, 12)

RECIPE = replace(
    CLASSES,
    name="icl-depth",
    title="Linear functions in context by depth, width 256",
    question="Does ENTP need fewer layers than a decoder to come close to least squares?",
    arms=[
        Arm(icl_run(mode, "linear", layers=layers), mode=mode, layers=layers)
        for layers in DEPTHS
        for mode in BOTH
    ],
    tiny_arms={"layers": [1, 2]},
    table=Table(
        rows="layers",
        columns="mode",
        cells=ERROR,
        by="examples",
        bins=("20", "30", "40"),
        excess_over="least squares",
    ),
    figure=(
        Figure("slices", x="layers", y=ERROR, lines="mode"),
        Figure(
            "slices",
            x="examples",
            y=ERROR,
            lines=("mode", "layers"),
            panels="mode",
            baselines="least squares",
        ),
    ),
    reproduced_if=(
        "Not a claim of the paper. Written before these runs: ENTP needs fewer layers if, after 40 "
        "examples, its squared error with 3 layers is at most the decoder's with 6, and with 6 at "
        "most the decoder's with 12."
    ),
    checks=tuple(
        Check(
            f"{layers} layers of ENTP are as good as {2 * layers} of a decoder",
            {"mode": "ENTP", "layers": layers},
            ERROR,
            "at most",
            {"mode": "decoder", "layers": 2 * layers},
            by="examples",
            bin="40",
        )
        for layers in (3, 6)
    ),
    folder="icl",
    baselines=FAST,
    not_run={},
)
