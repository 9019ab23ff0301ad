"""Words of the command line in today's names: what people type from habit works, and what an
option was called before is answered.

Nothing here knows the commands. A habit counts where the option that it means exists, so that
`--bs` is a batch size in `entp train` and in `entp bench`; a name that is an option stays one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from entp.cli.derive import Option
from entp.config import upgrade
from entp.errors import InputError

HABITS: dict[str, tuple[str, ...]] = {
    "--steps": ("max-steps", "iters", "max-iters", "num-steps", "train-steps"),
    "--batch-size": ("bs", "micro-batch-size"),
    "--out": ("out-dir", "output-dir", "output"),
    "--optim.name": ("optim", "optimizer"),
    "--optim.lr": ("lr", "learning-rate"),
    "--optim.min-lr": ("min-lr",),
    "--optim.warmup-steps": ("warmup", "warmup-steps", "warmup-iters"),
    "--optim.decay-steps": ("decay-steps", "lr-decay-iters"),
    "--optim.weight-decay": ("weight-decay", "wd"),
    "--optim.grad-clip": ("grad-clip", "clip-grad-norm", "max-grad-norm"),
    "--optim.beta1": ("beta1",),
    "--optim.beta2": ("beta2",),
    "--train.eval-every": ("eval-every", "eval-interval", "eval-steps"),
    "--train.log-every": ("log-every", "log-interval", "logging-steps"),
    "--train.checkpoint-every": ("checkpoint-every", "save-every", "save-steps"),
    "--train.max-seconds": ("max-seconds",),
    "--train.precision": ("precision", "dtype"),
    "--train.logger": ("logger", "report-to"),
    "--model.layers": ("layers", "n-layer", "n-layers", "num-layers"),
    "--model.heads": ("heads", "n-head", "n-heads", "num-heads"),
    "--model.width": ("width", "d-model", "n-embd", "dim", "hidden-size"),
    "--max-new-tokens": ("max-tokens",),
}
"""An option, and what else people call it, without the hyphens in front."""
SWITCHES: dict[str, tuple[str, str]] = {
    "--bf16": ("--train.precision", "bf16"),
    "--fp32": ("--train.precision", "fp32"),
    "--wandb": ("--train.logger", "wandb"),
    "--tensorboard": ("--train.logger", "tensorboard"),
    "--trackio": ("--train.logger", "trackio"),
}
"""Words without a value that mean one of an option."""
NO_COMPILE = (
    "is gone, because it never reached the kernels: leave it out, and choose the engine with "
    "--train.impl"
)
GONE: dict[str, str] = {
    **{
        f"--{part}.{name}".replace("_", "-"): "is gone: leave it out"
        for part, fields in upgrade.GONE.items()
        for name in fields
    },
    "--compile": NO_COMPILE,
    "--train.compile": NO_COMPILE,
    "--fp16": "does not exist, because gradients would need scaling: use --bf16 or --fp32",
}
"""Options that there are not, and what to do."""
FORMER = {"--prompt": "--prompt-length", "--total": "--length"}
"""Names of earlier versions that are options elsewhere; `upgrade.option_today` has all others."""


class Given(NamedTuple):
    """An option as it was typed, with the words after it."""

    name: str
    values: tuple[str, ...]


def translate(args: list[str], options: Mapping[str, Option]) -> list[str]:
    """The same words in the names of `options`; an InputError about names of earlier versions."""
    found = [_today(one, options) for one in _groups(args)]
    problems = [problem for one in found for problem in _problems(one, options)]
    if problems:
        raise InputError(f"{'; '.join(problems)}.")
    return [word for one in found for word in _words(_switched(one, options))]


def _groups(args: list[str]) -> Iterator[Given]:
    """Each option with its values; words before the first option have no name."""
    name, values = "", list[str]()
    for word in [*args, "--"]:
        if not word.startswith("--") and word != "-h":
            values.append(word)
            continue
        if name or values:
            yield Given(name, tuple(values))
        name, equals, value = word.partition("=")
        name, values = name.replace("_", "-"), [value] if equals else []


def _words(one: Given) -> list[str]:
    """Back to words; a single value stays with its option, so that it may begin with a hyphen."""
    if one.name and len(one.values) == 1:
        return [f"{one.name}={one.values[0]}"]
    return [one.name, *one.values] if one.name else list(one.values)


def _today(one: Given, options: Mapping[str, Option]) -> Given:
    """A habit under the name of the option that it means."""
    if one.name in options:
        return one
    for target, habits in HABITS.items():
        if one.name.removeprefix("--") in habits and target in options:
            return Given(target, one.values)
    if one.name in SWITCHES and SWITCHES[one.name][0] in options and not one.values:
        target, value = SWITCHES[one.name]
        return Given(target, (value,))
    return one


def _problems(one: Given, options: Mapping[str, Option]) -> Iterator[str]:
    """What was called otherwise in an earlier version, or is gone."""
    if one.name not in options:
        today = _name_today(one.name)
        if one.name in GONE:
            yield f"{one.name} {GONE[one.name]}"
        elif today is not None and today.split()[0] in options:
            yield f"{one.name} is now {today}"
    renamed = _values_today(one.name)
    for value in one.values:
        if one.name in options and value in renamed:
            yield f"{one.name} {value} is now {one.name} {renamed[value]}"


def _name_today(name: str) -> str | None:
    fields = {
        f"--{old}".replace("_", "-"): f"--{new}".replace("_", "-")
        for names in upgrade.TASK_FIELDS.values()
        for old, new in names.items()
    }
    return upgrade.option_today(name) or FORMER.get(name) or fields.get(name)


def _values_today(name: str) -> dict[str, str]:
    """Old values of an option, and what they are called today."""
    if name in ("--mode", "--curriculum.mode"):
        return upgrade.MODES
    return upgrade.METRICS if name == "--train.monitor" else {}


def _switched(one: Given, options: Mapping[str, Option]) -> Given:
    """A yes-or-no option in the form that tyro takes: --x and --no-x, or --x True where it may be
    left out."""
    name = one.name if one.name in options else _without_no(one.name)
    option = options.get(name)
    if option is None or option.kind not in (bool, bool | None):
        return one
    value = "true" if name == one.name else "false"
    if one.values and name == one.name:
        value = one.values[0].lower()
    if len(one.values) > (name == one.name) or value not in ("true", "false"):
        return one
    if option.kind is not bool:
        return Given(name, (value.capitalize(),))
    return Given(name if value == "true" else _with_no(name), ())


def _without_no(name: str) -> str:
    """--no-a.b and --a.no-b as --a.b."""
    plain = name.replace("--no-", "--", 1)
    return plain.replace(".no-", ".", 1)


def _with_no(name: str) -> str:
    """--a.b as --a.no-b."""
    part, dot, last = name.removeprefix("--").rpartition(".")
    return f"--{part}{dot}no-{last}"
