"""The Transformer: its blocks, its positions, and the options of ModelConfig."""

from entp.model.blocks import Block
from entp.model.transformer import Transformer

__all__ = ["Block", "Transformer"]
