"""The shape of a Transformer, and the paper's sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from entp.errors import InputError, one_of
from entp.fields import LARGEST, check_numbers, choice_problems, raise_problems
from entp.tasks.base import Task

MOST = {"context_length": LARGEST, "layers": 10_000, "heads": 100_000, "width": 100_000}
MOST_WEIGHTS = 10**10
"""Of a model: one with more fits no GPU in training, where every process holds all of it."""


SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 3, "heads": 3, "width": 192},
    "medium": {"layers": 6, "heads": 6, "width": 384},
    "large": {"layers": 12, "heads": 12, "width": 768},
    "small-deep": {"layers": 8, "heads": 2, "width": 128},
}
"""The paper's sizes (Table "Model specifications"): `ModelConfig(vocab=64, context_length=64,
**SIZES["medium"])`."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Transformer. The defaults are the paper's: GPT-2 with pre-LN, GELU and learned
    positions."""

    builder: ClassVar[str] = "entp.model.transformer:Transformer"
    """What makes the model."""

    vocab: int | None = None
    """Number of token ids. None: the inputs are vectors (see input_dim)."""
    context_length: int = 64
    """Longest sequence the model reads; only learned and given positions have such a limit."""
    layers: int = 3
    """Transformer blocks, L in the paper."""
    heads: int = 3
    """Attention heads; must divide width."""
    width: int = 192
    """Embedding dimension, D in the paper."""
    input_dim: int | None = None
    """Size of continuous input vectors, read in by one linear layer. None: the inputs are token
    ids."""
    outputs: int | None = None
    """Real outputs per position, from a linear head. None: vocabulary logits from the tied
    embedding."""
    norm: Literal["layer", "rms", "none"] = "layer"
    """layer: LayerNorm as GPT-2; rms: RMSNorm; none: no normalisation anywhere, as in the paper's
    theorems."""
    activation: Literal["gelu", "gelu-exact", "relu", "silu", "swiglu"] = "gelu"
    """The MLP's non-linearity; gelu is GPT-2's tanh form. swiglu has a gate, and a hidden layer of
    8/3 width."""
    position_embedding: Literal["learned", "sinusoidal", "rotary", "relative", "none", "given"] = (
        "learned"
    )
    """learned: trained table; rotary: turned queries and keys; relative: a bias by distance as in
    T5; none: position-free; given: a fixed table, set with Transformer.set_positions."""
    attention_scale: Literal["sqrt", "one"] = "sqrt"
    """Attention scores are multiplied by 1/sqrt(head size) or by 1."""
    norm_placement: Literal["pre", "post"] = "pre"
    """pre: before attention and MLP, as GPT-2; post: after each residual, as BERT."""
    bias: bool = True
    """Biases in the linear layers of the blocks."""
    tied_head: bool = True
    """Vocabulary logits from the embedding's own weights; off: from a matrix of their own."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads / kv_heads queries. None: as many as heads."""
    loops: int = 1
    """How many times the blocks run one after the other, with the same weights."""
    causal_layers: int = 0
    """The first layers that are causal in every mode. They run once for all prefixes of a
    sequence, and tell the others the order of the tokens."""

    def __post_init__(self) -> None:
        check_numbers(self, "model.")
        problems = size_problems(self)
        problems += [
            f"model.{name} is {value}: it must be at least 1, or None"
            for name in ("vocab", "input_dim", "outputs")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.heads > 0 and self.width % self.heads:
            problems.append(
                f"model.heads {self.heads} does not divide model.width {self.width}: choose a "
                f"width that is a multiple of {self.heads}, such as "
                f"{self.heads * max(1, round(self.width / self.heads))}"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            problems.append(
                f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}"
            )
        if self.position_embedding == "rotary" and self.heads > 0 and self.width // self.heads % 2:
            problems.append(
                "model.position_embedding rotary needs an even head size, and "
                f"{self.width // self.heads} is odd"
            )
        if not 1 <= self.loops <= 1000:
            problems.append(f"model.loops is {self.loops}: it must be at least 1, at most 1000")
        if not 0 <= self.causal_layers < max(1, self.layers):
            problems.append(
                f"model.causal_layers is {self.causal_layers}: of {self.layers} layers 0 to "
                f"{self.layers - 1} can be causal in every mode (all of them: use mode decoder)"
            )
        if self.causal_layers > 0 and self.loops > 1:
            problems.append("model.causal_layers needs model.loops 1: a looped layer runs again")
        if (self.vocab is None) == (self.input_dim is None):
            problems.append("model needs exactly one of vocab (token ids) and input_dim (vectors)")
        if self.vocab is None and self.outputs is None:
            problems.append(
                "model.outputs must be set when the inputs are vectors: there is no embedding to "
                "tie to"
            )
        raise_problems(problems + choice_problems(self, "model."))

    @property
    def attention_width(self) -> int:
        """Of all query heads together."""
        return self.width

    @property
    def hidden(self) -> int:
        """Units of the MLP's hidden layer: 4 width, or with a gate about 8/3 width, so that the
        weights are as many."""
        return -(-8 * self.width // 24) * 8 if self.activation == "swiglu" else 4 * self.width

    @property
    def depth(self) -> int:
        """Blocks that an input goes through, loops included."""
        return self.layers * self.loops

    @property
    def has_limit(self) -> bool:
        """Whether sequences beyond context_length tokens cannot be read."""
        return self.position_embedding in ("learned", "given")


def size_problems(model: Any) -> list[str]:
    """Sizes of a ModelConfig that no model has, each by itself or all together."""
    wrong = {name: most for name, most in MOST.items() if not 1 <= getattr(model, name) <= most}
    if wrong:
        return [
            f"model.{name} is {getattr(model, name)}: it must be at least 1, at most {most}"
            for name, most in wrong.items()
        ]
    tables = (
        model.vocab,
        model.input_dim,
        model.outputs,
        model.context_length if model.has_limit else None,
    )
    weights = (12 * model.layers * model.width + sum(rows or 0 for rows in tables)) * model.width
    if weights <= MOST_WEIGHTS:
        return []
    sizes = ", ".join(
        f"{name} {getattr(model, name)}" for name in ("layers", "width", "vocab", "context_length")
    )
    return [
        f"a model with {sizes} has {weights:.3g} weights: it must be at most {MOST_WEIGHTS:.3g}; "
        "make one of them smaller"
    ]


NEEDS = ("context_length", "vocab", "input_dim", "outputs")
"""What tasks say that they need of a model."""


def model_for(task: Task, size: str = "small", **changes: Any) -> ModelConfig:
    """The model of one of the paper's sizes with the inputs and outputs that `task` needs."""
    if size not in SIZES:
        raise one_of("size", size, SIZES)
    needs = task.model_needs()
    if "positions" in needs:
        raise InputError(f"model_needs of {task.name} has 'positions': call it 'context_length'.")
    unknown = needs.keys() - {field.name for field in fields(ModelConfig)}
    if unknown:
        raise one_of(f"key in model_needs of {task.name}", min(unknown), NEEDS)
    return ModelConfig(**{**needs, **SIZES[size], **changes})
