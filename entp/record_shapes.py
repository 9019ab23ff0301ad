"""What files of results must hold, so that tables and pictures can be made of them.

A shape is a type; {"key": shape} with "key?" for one that may be missing, or "*" alone for any; [shape] for a list that is not
empty, [shape, shape] for a pair; (shape, None) where null will do as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from entp.config_json import parse_json
from entp.errors import InputError

ENVIRONMENT = {"device": str, "torch": str, "commit": (str, None), "date": str}
VALUES: dict[str, Any] = {"loss": float}
"""Of every recipe; `check_results` asks for the others that a recipe has."""
ALONE: dict[str, Any] = {"right": int, "n": int}
PAIR = [float, float]
FINAL = VALUES | {"weights": str, "n": int, "trained_side_by_side?": int, "by_length?": {"*": float}, "generated?": ALONE}
FRESH = VALUES | {"n": int, "sequence_accuracy_interval?": PAIR, "generated?": ALONE | {"interval": PAIR}}
CURVE = [{"step": int, "seconds": float, **VALUES}]
RUN: dict[str, Any] = {
    "seed": int,
    "status": str,
    "best": VALUES,
    "final?": FINAL,
    "n": int,
    "steps": int,
    "seconds": float,
    "curve": CURVE,
}
RUN |= {"settings": {"mode": str}, "environment": ENVIRONMENT}
PAPER = {"*": {"value": float}}
IDLE = {"status": str, "why?": str, "paper?": PAPER}
ARM: dict[str, Any] = {
    "status": str,
    "ours": VALUES,
    "paper": PAPER,
    "fresh": (FRESH, None),
    "steps": int,
    "seconds": float,
    "seeds": [int],
}
ARM |= {"runs": [RUN]}
ROW = {"name": str, "median": float, "peak_bytes": float, "ratio": (float, None), "memory_ratio": (float, None)}
GROWTH = {"step": float, "token": float, "memory": float}
SECTIONS: dict[str, Any] = {
    "step": {
        "environment": ENVIRONMENT,
        "shapes": [{"name": str, "size": str, "batch": int, "tokens": int, "steps": [ROW]}],
    },
    "generate": {
        "environment": ENVIRONMENT,
        "config": {"size": str, "batch": int, "prompt": int, "total": int},
        "runs": [{"name": str, "tokens_per_s": float, "ratio": float}],
    },
    "scaling": {
        "environment": ENVIRONMENT,
        "config": {"size": str, "batch": int},
        "points": [{"n": int, "entp": GROWTH, "decoder": GROWTH}],
        "fits": [{"what": str, "mode": str, "from_n": int, "exponent": float}],
    },
}
"""The sections of a file of benchmarks."""
NAMES = {dict: "an object", str: "a text", int: "a whole number", float: "a number"}


def read_sections(path: Path) -> dict[str, Any]:
    """The sections in a file of benchmarks; none if there is no file."""
    if not path.exists():
        return {}
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} holds something that is not JSON ({error}): give another file.") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} is not a file of benchmark sections: give another file.")
    for name in SECTIONS.keys() & data.keys():
        try:
            check_shape(data[name], SECTIONS[name], name)
        except ValueError as error:
            told = f"remove {name!r} from it, and make it anew with `entp bench {name} --out {path}`"
            raise InputError(f"{path} is damaged ({error}): {told}.") from None
    return data


def check_results(data: Any, metrics: tuple[str, ...]) -> None:
    """ValueError for what cannot be the results of a recipe with these metrics; its runs' settings are checked elsewhere."""
    check_shape(data, {"recipe": str, "title": str, "arms": {"*": {"status": str}}})
    every = VALUES | dict.fromkeys(metrics, float)
    measured = {"ours": every, "fresh": (every, None), "runs": [{"best": every, "final?": every, "curve": [every]}]}
    for label, arm in data["arms"].items():
        ran = arm.get("runs") or arm.get("fresh")
        check_shape(arm, ARM if ran else IDLE, f"arms.{label}")
        check_shape(arm, measured if ran else {}, f"arms.{label}")


def check_shape(data: Any, shape: Any, where: str = "") -> None:
    """ValueError for the first key that is missing in `data`, read from JSON, or holds something else than its shape says."""
    if isinstance(shape, tuple):
        if data is None:
            return
        shape = shape[0]
    kind: Any = (int, float) if shape is float else shape if isinstance(shape, type) else type(shape)
    few = isinstance(shape, list) and isinstance(data, list) and (not data or len(shape) not in (1, len(data)))
    if not isinstance(data, kind) or isinstance(data, bool) or few:
        text = repr(data)
        wanted = f"a list of {len(shape)}" if isinstance(shape, list) else NAMES[shape if isinstance(shape, type) else dict]
        raise ValueError(f"{where or 'it'} is {text[:40]}{'...' * (len(text) > 40)}: it must be {wanted}")
    if isinstance(shape, list):
        for number, one in enumerate(data):
            check_shape(one, shape[0], f"{where}.{number}")
    elif isinstance(shape, dict):
        for key, inner in (dict.fromkeys(data, shape["*"]) if "*" in shape else shape).items():
            name = key.removesuffix("?")
            if name in data:
                check_shape(data[name], inner, f"{where}.{name}".lstrip("."))
            elif name == key:
                raise ValueError(f"{where or 'it'} has no {key!r}")
