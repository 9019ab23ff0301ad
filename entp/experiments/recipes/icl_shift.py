"""Beyond the paper: models that learned linear functions in context, on prompts unlike those of
training, and with the examples of a prompt in other orders.

The models are those of `icl`, and so are their runs. The shifts are Garg et al.'s (entp.tasks
.in_context says what they are). Each is an error by the same measure, and least squares is on the
same prompts. "permuted" is no error: it is the variance of a model's answer over 8 random orders of
the examples before its query, after 10, 20, 30 and 40 of them.
"""

from __future__ import annotations

from dataclasses import replace

from entp.experiments.recipe import Arm, Check, Figure, Table
from entp.experiments.recipes.icl import BOTH, ERROR, FAST, RANDOM_PREFIX, SEEDS, icl_run
from entp.experiments.recipes.icl import RECIPE as CLASSES
from entp.results.schema import PERMUTED, SPLIT
from entp.tasks.in_context import SHIFTS

ORDERS = 8
MODES = {**dict.fromkeys(BOTH, SEEDS["linear"]), RANDOM_PREFIX: (0,)}
"""Seeds of each mode, as `icl` has them."""

RECIPE = replace(
    CLASSES,
    name="icl-shift",
    title="Linear functions in context, on shifted prompts",
    question="How well do models predict on prompts unlike those of training, and does the order "
    "of the examples matter?",
    arms=[Arm(icl_run(mode, "linear"), seeds, mode=mode) for mode, seeds in MODES.items()],
    tiny_arms={},
    table=Table(versus="mode"),
    figure=(
        Figure(
            "slices",
            x="examples",
            y=ERROR,
            lines="mode",
            sources=("test", *(SPLIT + shift for shift in SHIFTS), SPLIT + PERMUTED),
        ),
    ),
    reproduced_if=(
        "Not a claim of the paper. Written before these runs: ENTP is the more robust one if its "
        "mean test squared error over three seeds is below the decoder's on every shift, and its "
        "answers vary less with the order of the examples."
    ),
    checks=tuple(
        Check(
            f"{split}: ENTP's is below the decoder's",
            {"mode": "ENTP"},
            ERROR,
            "below",
            {"mode": "decoder"},
            source=SPLIT + split,
        )
        for split in (*SHIFTS, PERMUTED)
    ),
    test_splits=SHIFTS,
    test_orders=ORDERS,
    baselines=FAST,
    folder="icl",
    not_run={},
)
