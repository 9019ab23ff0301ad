"""`entp lm-eval RUN`: a run measured by the tasks of lm-eval, EleutherAI's harness."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from entp.cli.derive import options_of
from entp.cli.parse import HELP, name_of, parse
from entp.config import Impl, Mode
from entp.errors import InputError

DEFAULTS = ["--batch_size", "64", "--device", "auto"]
"""Of the harness' options; those that are given come later, and hold."""
CONFIG = ("--config", "-C")
"""With a file of options, the harness' own defaults hold for the others."""
UNKNOWN = "Tasks not found:"


@dataclass(frozen=True)
class LmEvalOptions:
    """Measure a run of text by lm-eval. All other options are those of `lm-eval run`, such as
    --tasks a,b, --include-path DIR, --num-fewshot N, --limit N, --output-path FILE."""

    checkpoint: Literal["best", "last"] = "best"
    """The best checkpoint by validation, or the last."""
    mode: Mode | None = None
    """entp, decoder or refresh-N, such as refresh-8. None: the run's."""
    impl: Impl = "auto"
    """Engine for mode entp."""
    stride: int | None = None
    """For perplexity: tokens that each window but the first scores. None: windows do not
    overlap."""


def lm_eval_command(args: list[str]) -> int:
    """lm-eval RUN: measure a run by the tasks of lm-eval"""
    folder = name_of(args, "run folder", [], "lm-eval")
    own, others = _own_words(args[1:])
    options = parse(LmEvalOptions, own, f"entp lm-eval {folder}")
    if not any(word.partition("=")[0] == "--tasks" for word in others):
        raise InputError("entp lm-eval needs --tasks, with one or more tasks of lm-eval.")
    evaluate = _harness()
    given = {"run": folder, **{k: v for k, v in vars(options).items() if v is not None}}
    first = [] if any(word.startswith(CONFIG) for word in others) else DEFAULTS
    words = ["run", "--model", "entp", "--model_args", json.dumps(given), *first, *others]
    before, sys.argv = sys.argv, ["lm-eval", *words]
    try:
        evaluate()
    except ConnectionError as error:
        raise InputError(
            f"the data of these tasks cannot be had: {error}. Get it where there is a network, or "
            "give --include-path with tasks of your own."
        ) from None
    except ValueError as error:
        if not str(error).startswith(UNKNOWN):
            raise
        raise InputError(
            f"lm-eval has no task {str(error).removeprefix(UNKNOWN).strip()}: give --tasks names "
            "that `lm-eval ls tasks` lists, or --include-path with the folder of your own."
        ) from None
    finally:
        sys.argv = before
    return 0


def _own_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of our options, and those of the harness, whose names have underscores."""
    names = {*options_of(LmEvalOptions), *HELP, "--help-all"}
    own: list[str] = []
    others: list[str] = []
    now = others
    for word in words:
        if word.startswith("--") or word in HELP:
            name, equals, value = word.partition("=")
            now = own if name in names else others
            if now is others:
                word = f"--{name[2:].replace('-', '_')}{equals}{value}"
        now.append(word)
    return own, others


def _harness() -> Callable[[], None]:
    """The harness' command, with our model registered."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise InputError(
            "entp lm-eval needs EleutherAI's harness: pip install 'entp[lm-eval]'."
        ) from None
    import entp.hf.lm_eval  # noqa: F401  registers the model

    return cli_evaluate
