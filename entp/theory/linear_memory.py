"""Attention in O(D) memory: the paper's algorithm as printed, a stable one, and their memory.

    # one query, exp(q k) summed as it is: overflows for large scores
    y = attend_as_printed(q[-1], k, v)
    # all queries, with a running maximum: any scores
    y = attend_streaming(q, k, v, scale=0.125)
    # bytes besides inputs and output, no more than for n = 32
    working_memory(1024, width=8)

The paper needs it for its table of complexities: with it an encoder's additional memory per token
is O(nD) and a decoder's O(D), where attention that writes all scores down takes O(n²) and O(n).

Names: n keys, d size of queries and keys, D size of values.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from entp.errors import InputError

BLOCK = 16
"""Queries, and keys, at a time. 1 is the paper's loop; more saves time and is still O(D)."""


def attend_as_printed(q_d: Tensor, k_nd: Tensor, v_nD: Tensor) -> Tensor:
    """One query over n keys as in the paper's "Implementation of Attention Using O(D) Memory".

    exp(q k) is summed as it is: in float64 a score of 710 gives inf / inf, and scores that are all
    below -745 give 0 / 0.
    """
    a_D = v_nD.new_zeros(v_nD.shape[1])
    b = v_nD.new_zeros(())
    for j in range(len(k_nd)):
        c = torch.exp(q_d @ k_nd[j])
        a_D = a_D + c * v_nD[j]
        b = b + c
    return a_D / b


def attend_streaming(
    q_md: Tensor,
    k_nd: Tensor,
    v_nD: Tensor,
    scale: float = 1.0,
    causal: bool = False,
    block: int = BLOCK,
) -> Tensor:
    """softmax(scale q k^T) v, (m, D), in O(block (block + D)) memory.

    As printed but relative to the largest score so far: when that grows, both sums shrink by what
    it grew. A block of queries and a block of keys are taken at a time.
    causal: query i sees keys 0..i.
    """
    matrices = all(x.ndim == 2 for x in (q_md, k_nd, v_nD))
    if not matrices or q_md.shape[1] != k_nd.shape[1] or len(k_nd) != len(v_nD):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_md, k_nd, v_nD))
        raise InputError(
            f"attention needs queries (m, d), keys (n, d) and values (n, D), got {shapes}."
        )
    if len(k_nd) < 1 or block < 1:
        raise InputError(
            f"attention needs at least one key and a block of at least 1, got {len(k_nd)} keys, "
            f"block {block}."
        )
    y_mD = v_nD.new_empty(len(q_md), v_nD.shape[1])
    for start in range(0, len(q_md), block):
        q_bd = q_md[start : start + block]
        y_bD = _some_queries(q_bd, k_nd, v_nD, scale, start, causal, block)
        y_mD[start : start + block] = y_bD
    return y_mD


def _some_queries(
    q_bd: Tensor, k_nd: Tensor, v_nD: Tensor, scale: float, start: int, causal: bool, block: int
) -> Tensor:
    """The outputs of a block of queries, of which the first is number `start`."""
    a_bD = v_nD.new_zeros(len(q_bd), v_nD.shape[1])
    b_b = v_nD.new_zeros(len(q_bd), 1)
    top_b = v_nD.new_full((len(q_bd), 1), float("-inf"))
    seen = min(start + len(q_bd), len(k_nd)) if causal else len(k_nd)
    for first in range(0, seen, block):
        end = min(first + block, seen)
        k_cd, v_cD = k_nd[first:end], v_nD[first:end]
        scores_bc = (q_bd @ k_cd.T) * scale
        if causal and end > start + 1:  # some query of the block does not see all of these keys
            future = torch.ones_like(scores_bc, dtype=torch.bool).triu(start - first + 1)
            scores_bc = scores_bc.masked_fill(future, float("-inf"))
        higher_b = torch.maximum(top_b, scores_bc.amax(1, keepdim=True))
        shrink_b = torch.exp(top_b - higher_b)
        c_bc = torch.exp(scores_bc - higher_b)
        a_bD = a_bD * shrink_b + c_bc @ v_cD
        b_b = b_b * shrink_b + c_bc.sum(1, keepdim=True)
        top_b = higher_b
    return a_bD / b_b


def attend_at_once(q_md: Tensor, k_nd: Tensor, v_nD: Tensor) -> Tensor:
    """The ordinary way, which writes all scores down: O(mn) memory."""
    return torch.softmax(q_md @ k_nd.T, dim=1) @ v_nD


@torch.no_grad()
def working_memory(
    n: int,
    width: int,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend_streaming,
    queries: int | None = None,
) -> int:
    """Most bytes that attention of n keys holds at once besides inputs and output, in float64.

    queries: how many; n unless told.
    The peak less the size of the output, which is too little by that size if the output is not
    there yet at the peak.
    """
    generator = torch.Generator().manual_seed(0)
    many = n if queries is None else queries
    q, k, v = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64) for rows in (many, n, n)
    )
    return peak_bytes(lambda: attend(q, k, v)) - many * width * v.element_size()


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes of CPU memory that `work` holds at once of what it allocates, result included.

    Taken from every single allocation and release that torch's allocator reports, so what an
    operation allocates inside itself counts too. Work that has never run may allocate things that
    stay: run it once before.
    """
    # Otherwise the profiler writes lines of its own to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()  # held until the end: it counts
    assert profiled.profiler is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    del result
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
