"""ENTP at every prefix, exactly: its definition, faster implementations, and generation."""

from entp.engine.api import all_prefixes, choose

__all__ = ["all_prefixes", "choose"]
