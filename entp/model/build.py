"""A model from its configuration, of whatever kind."""

from __future__ import annotations

import importlib
from typing import Any

from entp.config import AnyModelConfig


def build_model(config: AnyModelConfig) -> Any:
    """The module that a configuration describes, with random weights: a Transformer, or one of
    HuggingFace's (entp.hf.building), which its configuration names so that this imports neither."""
    module, _, name = config.builder.partition(":")
    return getattr(importlib.import_module(module), name)(config)
