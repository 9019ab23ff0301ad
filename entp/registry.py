"""Things by name: those that come with entp, and `module:NAME` for one's own."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from typing import Any

from entp.errors import InputError, one_of


def find_named(what: str, name: str, known: Mapping[str, str], form: str) -> Any:
    """What `known` says is where, or what `name` says itself, such as "module:Class", which is the
    `form`."""
    path = known.get(name, name)
    if ":" not in path:
        raise one_of(what, name, [*known, f"or {form} of your own"])
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        told = _where(error) + str(error).rstrip(".")
        stop = "" if told.endswith("?") else "."
        raise InputError(
            f"{what} {name!r} cannot be imported: {told}{stop} Give {form}, importable from here."
        ) from None


def _where(error: Exception) -> str:
    """The line of one's own module that raised it; "" if it was the import of that."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [one for one in frames if "importlib" not in one.filename]
    return f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
