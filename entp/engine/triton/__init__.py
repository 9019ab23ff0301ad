"""Triton kernels for packed prefixes, each defined by a plain function in entp/engine/running.py or packed.py."""

from entp.engine.packed import Kernels
from entp.engine.triton.last import query_attention
from entp.engine.triton.running import running_attention

KERNELS = Kernels(running_attention, query_attention)
"""Layer 1 as one scan over keys, the last layer in a handful of launches. The middle layers are packed's own."""
