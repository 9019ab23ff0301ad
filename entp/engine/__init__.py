"""ENTP at every prefix, exactly: its definition, faster implementations, and generation."""

from entp.engine.api import all_prefixes
from entp.engine.choice import choose

__all__ = ["all_prefixes", "choose"]
