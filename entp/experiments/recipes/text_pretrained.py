"""Beyond the paper: a pretrained decoder as ENTP. SmolLM2 goes on reading text, causally or with
full attention over every prefix.

Both modes begin with the same weights, which were pretrained causally, and read the same windows.
The factor `targets`: of each window, the predictions that are learned from. `--init` names the
folder of SmolLM2, or of another language model; then `--data` names a text prepared by its
tokenizer.

    entp data prepare enwik8_clean --tokenizer smollm2
"""

from __future__ import annotations

from dataclasses import replace

from entp.config import OptimConfig, PretrainedConfig, RandomTargetsConfig, Run, TrainConfig
from entp.experiments.recipe import Arm, Check, Figure, Recipe, Table
from entp.experiments.recipes import llm
from entp.experiments.recipes.count3 import MODES
from entp.experiments.recipes.text import equal_curves
from entp.tasks.text import Text

TASK = Text(corpus="e09520079547e812", vocab=llm.SMOLLM2["vocab_size"])
"""enwik8_clean with SmolLM2's tokens: 14.9 million of them to train on."""
ALL, FEW = TASK.block, 8
STEPS, BATCH_SIZE, LR = 2_000, 32, 1e-4
"""8.2 million tokens."""
SEEDS = (0, 1, 2)
TEST_WINDOWS = 993
"""All of the test text: 127,138 tokens."""


def pretrained_run(mode: str, targets: int) -> Run:
    """All weights are trained, by AdamW with a cosine over the run's steps."""
    return Run(
        TASK,
        PretrainedConfig(llm.SMOLLM2),
        MODES[mode],
        steps=STEPS,
        batch_size=BATCH_SIZE,
        optim=OptimConfig(lr=LR, min_lr=LR / 10, warmup_steps=100, decay_steps=STEPS, beta2=0.95),
        train=TrainConfig(
            eval_every=250,
            eval_batches=8,
            log_every=50,
            checkpoint_every=1000,
            token_budget=llm.TOKEN_BUDGET if mode == "ENTP" else None,
        ),
        random_targets=RandomTargetsConfig(targets) if targets < ALL else None,
        init=llm.WEIGHTS,
    )


def arm(mode: str, targets: int, seeds: tuple[int, ...]) -> Arm:
    return Arm(pretrained_run(mode, targets), seeds, mode=mode, targets=targets)


def tiny_run(run: Run) -> Run:
    """Bytes of the documentation that comes with Python, for random weights of 2 layers."""
    task = replace(Text().with_data(None), block=32)
    return replace(
        run,
        task=task,
        model=PretrainedConfig({**llm.SMOLLM2, **llm.TINY, "vocab_size": task.vocab}),
        steps=10,
        batch_size=8,
        optim=replace(run.optim, lr=3e-3, min_lr=3e-4, warmup_steps=2, decay_steps=10),
        train=TrainConfig(eval_every=5, eval_batches=2, checkpoint_every=5),
        init="",
    )


RECIPE = Recipe(
    name="text-pretrained",
    title="SmolLM2-135M trained on, as a decoder and as ENTP",
    question="Does a pretrained decoder become a better language model with full attention?",
    arms=[
        arm("ENTP", FEW, SEEDS),
        arm("decoder", ALL, SEEDS),
        arm("decoder", FEW, SEEDS[:1]),
    ],
    tiny_run=tiny_run,
    table=Table(
        rows="targets",
        columns="mode",
        cells=("loss", "perplexity", "bits_per_byte"),
        pairs=[({"mode": "ENTP"}, {"mode": "decoder"})],
        paired=True,
    ),
    figure=(
        *equal_curves(("mode", "targets")),
        Figure("slices", x="context", y="loss", lines=("mode", "targets")),
    ),
    reproduced_if=(
        "Not a claim of the paper. Written before these runs: full attention makes the better "
        "language model of the same pretrained weights if, after 8.2 million tokens, ENTP's test "
        "loss is below that of the decoder that learns from all targets of the same windows, p < "
        "0.01 over three pairs of seeds. The weights were pretrained causally, which favours the "
        "decoder; ENTP learns from 8 of 128 targets, and its steps cost several times as much. "
        "One learning rate, tuned for neither."
    ),
    checks=(
        Check(
            "ENTP's loss is lower",
            {"mode": "ENTP"},
            "loss",
            "below",
            {"mode": "decoder", "targets": ALL},
            p=0.01,
            paired=True,
        ),
    ),
    test_sequences=TEST_WINDOWS,
    prepare="entp data prepare enwik8_clean --tokenizer smollm2",
    weights=llm.RECIPE.weights,
)
