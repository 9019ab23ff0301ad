"""Compiles kernels for an H200 (sm_90) and prints the shared memory of each; for test_compile.py.

A process of its own, because the tests' one has told Triton to interpret kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from entp.engine.triton import any_model, attention, embed, last, loss, mlp, online_softmax, rows

TARGET = GPUTarget("cuda", 90, 32)
FRONT_END = "front-end"
"""A second argument: compile as far as Triton's own intermediate code only."""
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}


def shared(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    warps: int = 4,
    stages: int = 3,
) -> int:
    """Bytes of shared memory of a kernel whose other arguments are aligned integers."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants}
    values = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    if FRONT_END in sys.argv:
        make_ir(source, options)
        return 1
    return int(triton.compile(source, target=TARGET, options=options).metadata.shared)


def make_ir(source: ASTSource, options: dict[str, int]) -> None:
    """Triton's own intermediate code: what is wrong with types and shapes shows here."""
    backend, context = make_backend(TARGET), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    functions = backend.get_codegen_implementation(parsed)
    source.make_ir(TARGET, parsed, functions, backend.get_module_map(), context)


def attention_kernels(half: torch.dtype, size: int) -> dict[str, int]:
    """Both whole-tile kernels in their largest tile, and the streaming ones."""
    wide = torch.float64 if half == torch.float64 else torch.float32
    fixed = {"SCALE": 0.1, "WIDE": rows.KINDS[wide], "DP": attention._padded(size), "PREFIX": 16}
    base = {
        "qkv": POINTERS[half],
        "out": POINTERS[half],
        "grad": POINTERS[half],
        **dict.fromkeys(("starts", "ends", "prefix_length"), "*i32"),
    }
    base |= {"dqkv": POINTERS[half], **dict.fromkeys(("share", "lse", "delta"), POINTERS[wide])}
    largest, found = attention.whole(size, half), {}
    for backward, kernel in (
        (False, attention._attention_forward_whole),
        (True, attention._attention_backward_whole),
    ):
        tile = attention._whole(largest, half, backward=backward)
        warps = tile.pop("num_warps")
        found[f"whole {'backward' if backward else 'forward'}"] = shared(
            kernel, base, {**fixed, **tile}, warps
        )
    for name in ("_attention_forward", "_attention_backward_queries", "_attention_backward_keys"):
        found[name] = shared(getattr(attention, name), base, {**fixed, "TILE": min(64, largest)})
    return found


def query_kernels(half: torch.dtype, width: int, heads: int) -> dict[str, int]:
    wide = torch.float64 if half == torch.float64 else torch.float32
    base = {"starts": "*i32", "ends": "*i32", "lse": POINTERS[wide]}
    base |= dict.fromkeys(("x", "q", "out", "context", "grad", "dx", "dq"), POINTERS[half])
    found = {}
    for backward, kernel in ((False, last._query_forward), (True, last._query_backward)):
        tiles = last._tiles(width, heads, backward=backward)
        warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
        found[kernel.__name__] = shared(kernel, base, {"SCALE": 0.1, **tiles}, warps, stages)
    return found


def one_query_kernels(half: torch.dtype, size: int) -> dict[str, int]:
    """The last layer of any model."""
    wide = torch.float64 if half == torch.float64 else torch.float32
    base = {"starts": "*i32", "ends": "*i32", "lse": POINTERS[wide]}
    base |= dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), POINTERS[half])
    fixed = {"SCALE": 0.1, "WIDE": rows.KINDS[wide], "ROWS": any_model.ROWS, "DP": size}
    kernels = (any_model._one_query_forward, any_model._one_query_backward)
    return {kernel.__name__: shared(kernel, base, fixed, 1) for kernel in kernels}


def row_kernels(width: int) -> dict[str, int]:
    """The rest, in bf16, at one width."""
    tile, down = rows._tile(width), rows._backward_tile(width, torch.bfloat16)
    warps = tile.pop("num_warps"), down.pop("num_warps")
    wide = "h bias h_out r_out r_in db_out part z_out z_in dkv loss lse"
    half = "y x x_out last_out dh dx dlast dh_out dy_out u grad du qkv out dqkv logits"
    base = {**dict.fromkeys(wide.split(), "*fp32"), **dict.fromkeys(half.split(), "*bf16")}
    base |= {"index": "*i32", "row_of": "*i32", "targets": "*i64", "ids": "*i64"}
    last_kind = {"KIND": 2, "NORM": True, **tile}
    back = {"WIDE": tl.float32, "KIND": 1, "RECOMPUTE": True}
    scan = {"SCALE": 0.1, "WIDE": tl.float32, "TOKENS": online_softmax.TOKENS, "DP": 64}
    return {
        "add_norm": shared(rows._add_norm, base, {"EPS": 1e-5, **last_kind}, warps[0]),
        "add_norm_backward": shared(rows._add_norm_backward, base, {**last_kind, **down}, warps[1]),
        "first": shared(
            rows._first_add_norm_backward,
            {**base, "dh_out": "*fp32"},
            {"NORM": True, **tile},
            warps[0],
        ),
        "activate": shared(
            mlp._activate, base, {"WIDE": tl.float32, "KIND": 1, "R": 8, "C": 512}, 8
        ),
        "activate_backward": shared(
            mlp._activate_backward, base, {**back, "R": 16, "C": 512, "STAGES": 2}
        ),
        "activate_backward of few columns": shared(
            mlp._activate_backward, base, {**back, "R": 32, "C": 128, "STAGES": 3}
        ),
        "column_sums": shared(rows._column_sums, {**base, "out": "*fp32"}, {"R": 1024, "C": 8}, 8),
        "scan_forward": shared(online_softmax._scan_forward, base, scan, 1),
        "scan_backward": shared(online_softmax._scan_backward, base, scan, 1),
        "loss": shared(loss._loss_forward, base, {"BLOCK": loss.BLOCK}),
        "tokens": shared(
            embed._token_gradients,
            {**base, "grad": "*fp32", "out": "*fp32"},
            {"PART": 8192, "R": 512, "C": 32},
        ),
    }


GROUPS: dict[str, Callable[[], dict[str, int]]] = {
    "attention": lambda: attention_kernels(torch.bfloat16, 128),
    "attention of 128 keys": lambda: attention_kernels(torch.bfloat16, 64),
    "queries": lambda: query_kernels(torch.bfloat16, 1024, 16),
    "one query": lambda: one_query_kernels(torch.bfloat16, 128),
    "one query of float64": lambda: one_query_kernels(torch.float64, 128),
    "rows": lambda: row_kernels(384),
}

if __name__ == "__main__":
    for group in GROUPS if sys.argv[1] == "all" else [sys.argv[1]]:
        for name, size in GROUPS[group]().items():
            print(size, name)
