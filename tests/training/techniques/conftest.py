"""Kernels in Triton's interpreter take half the time."""

from fast_interpreter import make_interpreter_fast

make_interpreter_fast()
