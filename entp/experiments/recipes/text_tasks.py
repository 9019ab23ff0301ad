"""Table "downstream results": what the language models of `openwebtext` do on other tasks.

`tinywinogrande`, `winogrande`, `winogrande-full`, `lambada`: without training, by the likelihood of
continuations. The paper has TinyWinoGrande, 100 items, on which five points are one standard error;
`winogrande` has all 1,267.
`clutrr`: fine-tuned to say how two people of a story are related. Its factor `head`:
  tokens  the authors' way: the language-model head says the relation; without the relations in law,
          and without stories beyond 128 tokens, which drops most of the longest chains
  class   an output for each relation at the last token, all relations, all stories

Runs of 25 million tokens with their own decay are taken, three seeds each, and of 100 million.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.experiments.recipe import Arm, Check, Figure, PaperValue, Recipe, Table
from entp.experiments.recipes import text
from entp.experiments.recipes.count3 import MODES
from entp.experiments.recipes.text import BOTH, PAPER, SEEDS, text_arm
from entp.tasks.choices import Lambada, Winogrande, ZeroShot
from entp.tasks.clutrr import Clutrr

HEADS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "class": {"filter": False, "long": "cut"},
}
TOKENS = {"tokenizer": "gpt2", "vocab": 50304}


def paper_values(mode: str, name: str) -> dict[str, PaperValue]:
    values = PAPER[name]
    return {"accuracy": PaperValue(values[mode], values["source"])}


def clutrr_run(mode: str, head: str) -> Run:
    """The authors' settings: AdamW from 1e-5, 10,000 steps of 64 stories."""
    task = Clutrr(head=head, **TOKENS, **HEADS[head])  # type: ignore[arg-type]
    return Run(
        task,
        model_for(task, "medium"),
        MODES[mode],
        steps=10_000,
        batch_size=64,
        optim=OptimConfig(lr=1e-5, min_lr=1e-6, warmup_steps=50, decay_steps=10_000, beta2=0.95),
        train=TrainConfig(eval_every=500, eval_batches=48, log_every=100, checkpoint_every=2_000),
    )


def clutrr_arm(mode: str, head: str) -> Arm:
    paper = paper_values(mode, "clutrr_accuracy") if head == "tokens" else {}
    begins = text_arm(mode, 25).label
    return Arm(clutrr_run(mode, head), SEEDS, paper, begins=begins, mode=mode, head=head)


def tiny_clutrr(run: Run) -> Run:
    """Bytes, of a model that read 20 batches; stories lose their beginning."""
    assert isinstance(run.task, Clutrr)
    small = text.tiny_run(text.text_run("ENTP", 25))
    task = replace(
        run.task,
        tokenizer="bytes",
        vocab=small.model.vocab,
        block=small.model.context_length,
        long="cut",
        train_examples=200,
    )
    return replace(
        small, task=task, mode=run.mode, model=replace(small.model, **task.model_needs())
    )


CLUTRR_RECIPE = Recipe(
    name="clutrr",
    title='Table "downstream results": CLUTRR',
    question="After fine-tuning, which architecture tells relations of a story better?",
    arms=[clutrr_arm(mode, head) for head in HEADS for mode in BOTH],
    tiny_run=tiny_clutrr,
    tiny_arms={"head": "class"},
    table=Table(rows="head", columns="mode", cells="accuracy", versus="mode", paired=True),
    figure=(
        Figure("slices", x="chain", y="accuracy", lines="mode", panels="head"),
        Figure("curves", y=("accuracy", "loss"), lines="mode", panels="head"),
    ),
    reproduced_if=(
        "Written before these runs. ENTP's mean accuracy on validation stories is above the "
        "decoder's with the authors' head, p < 0.01 over three pairs of seeds, as in the paper's "
        "table, which is of the validation stories."
    ),
    checks=(
        Check(
            "the authors' head: ENTP's validation accuracy is above the decoder's",
            {"mode": "ENTP", "head": "tokens"},
            "accuracy",
            "above",
            {"mode": "decoder", "head": "tokens"},
            p=0.01,
            paired=True,
            source="split:valid",
        ),
    ),
    test_sequences=3_072,
    test_splits=("valid",),
    source=text.RECIPE,
)


def zero_shot(
    name: str, title: str, question: str, task: ZeroShot, paper: str = "", **more: Any
) -> Recipe:
    """A recipe that tests the runs of `openwebtext` on another task; nothing new is trained."""
    return Recipe(
        name=name,
        title=title,
        question=question,
        arms=[
            Arm(
                text.text_run(mode, tokens),
                SEEDS if tokens == 25 else (0,),
                paper_values(mode, paper) if paper and tokens == 25 else {},
                mode=mode,
                tokens=tokens,
            )
            for tokens in (25, 100)
            for mode in BOTH
        ],
        tiny_run=text.tiny_run,
        tiny_arms={"tokens": 25},
        test_on=task,
        tiny_test_on=replace(task, tokenizer="bytes", block=32),
        folder=text.RECIPE.name,
        prepare=text.RECIPE.prepare,
        table=Table(rows="tokens", columns="mode", cells="accuracy", versus="mode", paired=True),
        figure=Figure("slices", x="tokens", y="accuracy", lines="mode"),
        **more,
    )


TINYWINOGRANDE_RECIPE = zero_shot(
    "tinywinogrande",
    'Table "downstream results": TinyWinoGrande, zero-shot',
    "Without training, which architecture finds what a pronoun stands for, in 100 sentences?",
    Winogrande(tokenizer="gpt2", items="tiny"),
    "tinywinogrande_accuracy",
)
WINOGRANDE_RECIPE = zero_shot(
    "winogrande",
    "WinoGrande, zero-shot, all 1,267 sentences",
    "Without training, which architecture finds what a pronoun stands for?",
    Winogrande(tokenizer="gpt2"),
    reproduced_if=(
        "Written before these runs. ENTP's mean accuracy over all 1,267 items is above the "
        "decoder's with 25 million tokens, p < 0.01 over three pairs of seeds."
    ),
    checks=(
        Check(
            "25 million tokens: ENTP's accuracy is above the decoder's",
            {"mode": "ENTP", "tokens": 25},
            "accuracy",
            "above",
            {"mode": "decoder", "tokens": 25},
            p=0.01,
            paired=True,
        ),
    ),
)
WINOGRANDE_FULL_RECIPE = zero_shot(
    "winogrande-full",
    "WinoGrande, zero-shot, all 1,267 sentences, with the likelihood of the option too",
    "Does the way of scoring change which architecture is ahead?",
    Winogrande(tokenizer="gpt2", scoring="full"),
)
LAMBADA_RECIPE = zero_shot(
    "lambada",
    "LAMBADA, zero-shot",
    "Without training, which architecture knows the last word of a passage?",
    Lambada(tokenizer="gpt2"),
)
