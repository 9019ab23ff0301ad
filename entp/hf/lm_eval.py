"""A run, or a pretrained model, as a model of lm-eval, EleutherAI's evaluation harness.

    entp lm-eval runs/text-entp --tasks lambada_openai,piqa

The harness loads no plugins, so importing this module is what makes the model `entp` known to it.
Predictions are computed at the positions of continuations alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from entp.config import Run, check_mode
from entp.engine.generation.generate import generate
from entp.errors import InputError
from entp.hf import is_huggingface, refuse_gguf
from entp.hf.beginning import open_pretrained
from entp.hf.scoring import Scorer
from entp.tasks.tokens import find_tokenizer, look_into, model_vocab, tokenizer_of_run
from entp.tasks.windows import windows
from entp.training.checkpoint import find, load, load_run
from entp.training.cover import padding_is_nothing
from entp.training.distributed import World, pick_device
from entp.training.forward import Forward

BATCH_SIZE = 64
NEW_TOKENS = 256
"""Tokens to generate where a task says nothing."""


@register_model("entp")
class EntpLM(TemplateLM):
    """The model of a run folder or of one in HuggingFace's format, with its tokenizer."""

    def __init__(
        self,
        run: str,
        checkpoint: Literal["best", "last"] = "best",
        mode: str | None = None,
        impl: str = "auto",
        stride: int | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """stride: for perplexity of long texts, the tokens that each window but the first scores;
        None: windows do not overlap."""
        super().__init__()
        where = pick_device(device or "auto", World())
        self.model, told, name = _open(Path(run), checkpoint, where)
        self.text = find_tokenizer(name)
        how = dataclasses.replace(Forward.of(told, mode or told.mode), impl=impl)
        _check_mode(how.mode)
        self.scorer = Scorer(self.model, how, where, _rows(batch_size))
        self.max_length, self.stride = int(told.model.context_length), _stride(stride, told)
        self.told = told

    @property
    def eot_token_id(self) -> int:
        return self.text.end

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.text.encode(string)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, rest) for _, context, rest in requests]
        return self._scores(pairs, None, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Each token of a text once, after the end token and as much as fits."""
        texts = [self.text.encode(request.args[0]) for request in requests]
        pairs = [([self.prefix_token_id], text) for text in texts]
        return [score for score, _ in self._scores(pairs, self.stride, disable_tqdm)]

    def _scores(
        self,
        pairs: Sequence[tuple[list[int], list[int]]],
        stride: int | None,
        disable_tqdm: bool,
    ) -> list[tuple[float, bool]]:
        """Scores of continuations after their contexts; those beyond the model's length are the
        sum of several windows."""
        rows = [windows(context, rest, self.max_length, stride) for context, rest in pairs]
        flat = [row for some in rows for row in some]
        step = 16 * self.scorer.batch_size
        scores: list[tuple[float, bool]] = []
        for at in tqdm(range(0, len(flat), step), "entp", disable=disable_tqdm):
            scores += self.scorer.score(flat[at : at + step])
        rest = iter(scores)
        return [_sum([next(rest) for _ in some]) for some in rows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of its stop texts."""
        return [self._continued(*request.args) for request in tqdm(requests, disable=disable_tqdm)]

    def _continued(self, context: str, how: dict[str, Any]) -> str:
        until = [how["until"]] if isinstance(how.get("until"), str) else how.get("until") or []
        count = int(how.get("max_gen_toks", NEW_TOKENS))
        heat = float(how.get("temperature") or 0.0) if how.get("do_sample") else 0.0
        prompt = (self.text.encode(context) or [self.text.end])[-self.max_length :]
        forward = self.scorer.how
        with forward.autocast(self.scorer.device):
            (tokens,) = generate(
                *(self.model, [prompt], count, forward.mode),
                temperature=heat,
                stop=self.text.end,
                slide=True,
            )
        new = [token for token in tokens[len(prompt) :] if token < self.text.vocab]
        text = self.text.decode(new)
        return min((text.partition(stop)[0] for stop in until if stop), key=len, default=text)


def _open(
    place: Path, checkpoint: Literal["best", "last"], device: torch.device
) -> tuple[Any, Run, str]:
    """Model, run and tokenizer of a run, or of a folder in HuggingFace's format."""
    refuse_gguf(place)
    if is_huggingface(place):
        look_into(place)
        model, run = open_pretrained(place)
        return model.to(device), run, tokenizer_of_run(place)
    folder = find(place, checkpoint)
    told, name = load_run(folder), tokenizer_of_run(folder)
    _check_model(told.model, name, str(place))
    return load(folder, device=device), told, name


def _sum(scores: list[tuple[float, bool]]) -> tuple[float, bool]:
    return sum(score for score, _ in scores), all(greedy for _, greedy in scores)


def _check_model(model: Any, tokenizer: str, run: str) -> None:
    """InputError for a model that does not predict the tokens of a text."""
    vocab = model_vocab(tokenizer)
    if model.vocab != vocab or model.outputs is not None:
        raise InputError(
            f"{run} is no model of text: it has {model.vocab} tokens and "
            f"{model.outputs or 'as many'} outputs, and its tokenizer ({tokenizer}) needs {vocab} "
            "of both. Give a run of `entp train text`."
        )


def _check_mode(mode: str) -> None:
    check_mode(mode)
    if not padding_is_nothing(mode):
        raise InputError(
            f"mode {mode} needs a prefix, and requests of lm-eval have none: use entp, decoder or "
            "refresh-N."
        )


def _rows(batch_size: int | str | None) -> int:
    """Rows at once; the harness says auto, auto:4 or a number."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return BATCH_SIZE
    try:
        found = int(batch_size)
    except ValueError:
        found = 0
    if found < 1:
        raise InputError(f"batch_size is {batch_size!r}: it must be a number from 1 on, or auto.")
    return found


def _stride(stride: int | None, run: Run) -> int | None:
    most = run.model.context_length
    if stride is not None and not 1 <= int(stride) <= most:
        raise InputError(f"stride is {stride}: allowed are 1 to {most}, the model's length.")
    return None if stride is None else int(stride)
