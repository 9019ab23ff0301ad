"""How predictions attend: the modes, and the implementations of the engine."""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["entp", "decoder", "prefix-lm"]
CurriculumMode = Literal["entp", "decoder", "prefix-lm", "random-prefix"]
Impl = Literal["auto", "reference", "packed", "triton"]
MODES: tuple[str, ...] = get_args(Mode)
IMPLS: tuple[str, ...] = get_args(Impl)
