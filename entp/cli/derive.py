"""Options derived from dataclasses: what each is called, takes, defaults to and is good for.

The docstring under a field is its help text. It is read from the source, because classes that are
made here have none for tyro to read.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

MISSING = dataclasses.MISSING


class Option(NamedTuple):
    """One option of a command."""

    name: str
    """As it is typed, such as --optim.lr."""
    kind: Any
    """Its type."""
    default: Any
    """MISSING if it must be given."""
    help: str
    hint: str = ""
    """What stands for the default where that is None, such as (default: that of --size)."""

    @property
    def takes(self) -> str:
        """What is typed after it, such as INT or {best,last}; nothing for a switch."""
        kinds = [kind for kind in _members(self.kind) if kind is not type(None)]
        return "|".join(word for word in map(_metavar, kinds) if word)

    @property
    def told_default(self) -> str:
        """What help says about the default."""
        if self.default is MISSING:
            return "(required)"
        if self.default is not None:
            is_off = self.default is False or self.default == ()
            return "" if is_off else f"(default: {self.default})"
        without = re.search(r"None: ([^.]+)", self.help)
        return self.hint or (f"(default: {without[1]})" if without else "")


@cache
def docs_of(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for statement, text in pairwise(_body(base)):
            match statement, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[name] = " ".join(words.split())
    return found


def optional(
    kind: type, *, without: Collection[str] = (), defaults: Mapping[str, str] | None = None
) -> type:
    """A dataclass with the fields of `kind`, each None unless it is given.

    defaults: what help says of fields whose default is not that of `kind`.
    """
    from tyro.conf import arg

    hints = typing.get_type_hints(kind)
    docs = docs_of(kind)
    made: list[Any] = []
    for f in dataclasses.fields(kind):
        if f.name not in without:
            hint = _hint(f, (defaults or {}).get(f.name))
            told = arg(help=docs.get(f.name, ""), help_behavior_hint=hint)
            made.append((f.name, Annotated[hints[f.name] | None, told], None))
    name, about = f"Optional{kind.__name__}", {"__doc__": kind.__doc__}
    return dataclasses.make_dataclass(name, made, frozen=True, namespace=about)


def given(options: Any) -> dict[str, Any]:
    """The fields of an `optional` dataclass that are not None."""
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return {name: value for name, value in fields.items() if value is not None}


def about(kind: type) -> str:
    """The docstring of a class on one line."""
    return " ".join((kind.__doc__ or "").split())


def options_of(kind: type, values: Any = None, prefix: str = "--") -> dict[str, Option]:
    """Every option of a dataclass by its name; defaults are those of the instance `values`."""
    return {option.name: option for option in _options(kind, values, prefix)}


def _options(kind: type, values: Any, prefix: str) -> Iterator[Option]:
    hints = typing.get_type_hints(kind, include_extras=True)
    docs = docs_of(kind)
    for f in dataclasses.fields(kind):
        plain, told = _plain(hints[f.name])
        name = f"{prefix}{f.name.replace('_', '-')}"
        default = _default(f) if values is None else getattr(values, f.name)
        if dataclasses.is_dataclass(plain):
            inner = None if default is MISSING else default
            yield from _options(typing.cast(type, plain), inner, f"{name}.")
        else:
            text = getattr(told, "help", None) or docs.get(f.name, "")
            hint = getattr(told, "help_behavior_hint", None) or ""
            yield Option(name, plain, default, text, hint)


def _body(kind: type) -> list[ast.stmt]:
    """The statements of a class; none where it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return []
    first = tree.body[0]
    return first.body if isinstance(first, ast.ClassDef) else []


def _plain(hint: Any) -> tuple[Any, Any]:
    """A type without its annotation, and the annotation."""
    if get_origin(hint) is not Annotated:
        return hint, None
    plain, note, *_ = get_args(hint)
    return plain, note


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _hint(f: dataclasses.Field[Any], instead: str | None) -> str:
    """What help says about the default of a field that may be left out."""
    default = _default(f) if instead is None else instead
    return "(required to use it)" if default is MISSING else f"(default: {default})"


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    if get_origin(kind) in (types.UnionType, typing.Union):
        return get_args(kind)
    return (kind,)


def _metavar(kind: Any) -> str:
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    inner = [one for one in get_args(kind) if one is not Ellipsis]
    if inner:
        return f"[{_metavar(inner[0])} ...]"
    return str(getattr(kind, "__name__", kind)).upper()
