"""Encoder-only next-token prediction: every prediction with full attention over the whole prefix.

import entp
model = entp.Transformer(entp.ModelConfig(vocab=64, context_length=64, **entp.SIZES["small"]))
logits = model(tokens, mode="entp")
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ImportanceConfig": "entp.config",
    "EmaConfig": "entp.config",
    "CurriculumConfig": "entp.config",
    "BatchScheduleConfig": "entp.config",
    "EngineWarning": "entp.errors",
    "InputError": "entp.errors",
    "ModelConfig": "entp.config",
    "OptimConfig": "entp.config",
    "Run": "entp.config",
    "SIZES": "entp.config",
    "TrainConfig": "entp.config",
    "Transformer": "entp.model",
    "all_prefixes": "entp.engine.api",
    "check": "entp.engine.check",
    "generate": "entp.engine.generation.generate",
    "load": "entp.training.checkpoint",
    "predict": "entp.engine.api",
    "train": "entp.training.trainer",
}
__all__ = [
    "SIZES",
    "BatchScheduleConfig",
    "CurriculumConfig",
    "EmaConfig",
    "EngineWarning",
    "ImportanceConfig",
    "InputError",
    "ModelConfig",
    "OptimConfig",
    "Run",
    "TrainConfig",
    "Transformer",
    "__version__",
    "all_prefixes",
    "check",
    "generate",
    "load",
    "predict",
    "train",
]

if TYPE_CHECKING:
    from entp.config import (
        SIZES,
        BatchScheduleConfig,
        CurriculumConfig,
        EmaConfig,
        ImportanceConfig,
        ModelConfig,
        OptimConfig,
        Run,
        TrainConfig,
    )
    from entp.engine.api import all_prefixes, predict
    from entp.engine.check import check
    from entp.engine.generation.generate import generate
    from entp.errors import EngineWarning, InputError
    from entp.model import Transformer
    from entp.training.checkpoint import load
    from entp.training.trainer import train


def __getattr__(name: str) -> Any:
    """Import public names when first used: `import entp` and `entp --help` need no torch."""
    import importlib

    if name == "hf":
        return importlib.import_module("entp.hf")
    if name not in _HOMES:
        raise AttributeError(f"module 'entp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, which are not imported yet."""
    return sorted({*globals(), *__all__})
