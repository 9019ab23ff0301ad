"""Triton's interpreter without work that changes nothing: it then takes half the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def make_interpreter_fast() -> None:
    """Skip two things that the interpreter does again and again. Kernels run as they are.

    A kernel's launch replaces the functions of triton.language; so does every call of one kernel by
    another: here only the first one in each module. Each integer operation is checked for overflow
    in 64 bits, which compiled kernels do in debug builds only.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    replaced: set[int] = set()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in replaced:
            replaced.add(module)
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    builder = interpreter.interpreter_builder
    interpreter.InterpretedFunction.__call__ = call
    builder.options = replace(builder.options, sanitize_overflow=False)
