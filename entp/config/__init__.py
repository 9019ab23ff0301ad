"""What a run is, as frozen dataclasses that check themselves. Nothing here imports torch."""

from entp.config.mode import IMPLS, MODES, CurriculumMode, Impl, Mode, check_mode, refresh_of
from entp.config.model import SIZES, ModelConfig, model_for
from entp.config.optim import OptimConfig
from entp.config.pretrained import AnyModelConfig, PretrainedConfig, refit
from entp.config.run import Run
from entp.config.techniques import (
    TECHNIQUE_CONFIGS,
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    RandomTargetsConfig,
)
from entp.config.training import TrainConfig

__all__ = [
    "IMPLS",
    "MODES",
    "SIZES",
    "TECHNIQUE_CONFIGS",
    "AnyModelConfig",
    "BatchScheduleConfig",
    "CurriculumConfig",
    "CurriculumMode",
    "EmaConfig",
    "Impl",
    "ImportanceConfig",
    "Mode",
    "ModelConfig",
    "OptimConfig",
    "PretrainedConfig",
    "RandomTargetsConfig",
    "Run",
    "TrainConfig",
    "check_mode",
    "model_for",
    "refit",
    "refresh_of",
]
