"""ENTP at every prefix, exactly: what it means (reference), how it is computed (packed), and generation."""

from entp.engine.api import all_prefixes, choose

__all__ = ["all_prefixes", "choose"]
