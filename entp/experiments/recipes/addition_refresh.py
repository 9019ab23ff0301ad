"""Beyond the paper: how much of what ENTP gains on addition needs everything computed anew at every
token, and not every few tokens only (mode refresh-N, engine/refreshed.py)?

The paper's reversed sums in windows of 64 characters, with 5,000 examples, where ENTP and decoder
are told apart by five seeds. ENTP's and the decoder's runs are those of `addition-samples`.
"""

from __future__ import annotations

from dataclasses import replace

from entp.config import Run
from entp.experiments.recipe import Arm, Check, Figure, Recipe, Table
from entp.experiments.recipes.addition import RECIPE as SAMPLES
from entp.experiments.recipes.addition import SEEDS, samples_run, tiny_run

EXAMPLES = 5_000
EVERY = (2, 4, 8, 16, 32)
"""Characters from one refresh to the next; a sum has up to 14."""
CHEAP = 4
"""With which a window has a quarter of ENTP's prefixes."""


def refresh_run(mode: str) -> Run:
    """ENTP, decoder, or refresh-N."""
    if mode in ("ENTP", "decoder"):
        return samples_run(mode, "small", "reversed", EXAMPLES)
    return replace(samples_run("ENTP", "small", "reversed", EXAMPLES), mode=mode)


RECIPE = Recipe(
    name="addition-refresh",
    title=f"Reversed addition from {EXAMPLES:,} sums, computed anew every N characters",
    question="How often does ENTP have to be computed anew?",
    arms=[
        Arm(refresh_run(mode), SEEDS, mode=mode)
        for mode in ("ENTP", *(f"refresh-{every}" for every in EVERY), "decoder")
    ],
    tiny_run=tiny_run,
    tiny_arms={"mode": ["refresh-4", "decoder"]},
    table=Table(
        cells=("exact_match", "loss"),
        pairs=[
            *(({"mode": "ENTP"}, {"mode": f"refresh-{every}"}) for every in EVERY),
            *(({"mode": f"refresh-{every}"}, {"mode": "decoder"}) for every in EVERY),
        ],
    ),
    figure=(
        Figure("bars", y=("exact_match", "loss"), lines="mode"),
        Figure("curves", y=("loss", "exact_match"), lines="mode"),
        Figure("curves", x="flops", y=("loss", "exact_match"), lines="mode"),
    ),
    test_sequences=SAMPLES.test_sequences,
    folder=SAMPLES.name,
    reproduced_if=(
        "Not a claim of the paper. Written before these runs. ENTP's gain outlives rare refreshes "
        f"if the mean test exact match of refresh-{CHEAP} over five seeds is above the decoder's, "
        "p < 0.05 (Welch), as ENTP's is. The recorded runs of ENTP and decoder, .978 and .869 as "
        "means, were known."
    ),
    checks=(
        Check(
            f"refresh-{CHEAP} is ahead of the decoder",
            {"mode": f"refresh-{CHEAP}"},
            "exact_match",
            "above",
            {"mode": "decoder"},
            p=0.05,
        ),
        Check(
            "ENTP is ahead of the decoder",
            {"mode": "ENTP"},
            "exact_match",
            "above",
            {"mode": "decoder"},
            p=0.05,
            control=True,
        ),
    ),
)
