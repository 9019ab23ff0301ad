"""Matrix products by the fastest of the algorithms that cuBLASLt offers, not its first proposal.

On the tall matrices of packed rows the first proposal is 5 to 20 % slower than the best. Each shape
is timed once, when it first comes, unless shapes keep coming: where every batch has shapes of its
own, timing costs more than it saves. Algorithms that split the inner dimension are left out, so
that all candidates add in the same order and the choice cannot change a result. torch gives no
access to this: the library it has loaded already is called through ctypes.

    y = product(a, b)              # a @ b.T, a (N, K), b (M, K)
    y = product(a, b, plain=True)  # a @ b,   a (N, K), b (K, M)

Anything that is not bf16 on CUDA, and machines where the library is not found, go to torch.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

BF16, FP32, COMPUTE_FP32 = 14, 0, 68
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS = 3, 4, 7, 8
PLAIN, ADD_BIAS = 1, 4
SPLIT_K, CLUSTER = 2, 8
BATCH, STRIDE = 5, 6
MOST_WORKSPACE = 1
WORKSPACE = 32 << 20
CANDIDATES = 8
MANY = 64
"""Proposals looked through for a batched product."""
SMALL_CLUSTERS = (2, 3, 5)
"""Clusters of 1 x 1, 2 x 1 and 1 x 2 blocks.

With 8 blocks, cuBLAS 13.1's batched product that adds to a matrix ended training on an H200 in
"unspecified launch failure" when several processes shared it: 9 of 12 processes within 99 seconds
together, 0 of 8 in 264 seconds with these.
"""
ALIGNED = 256
"""Bytes that cuBLASLt takes addresses to be multiples of when it proposes algorithms."""
MOST_TIMED = 400
"""Shapes that a process times; those of a step are some twenty."""


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, plain: bool = False) -> Tensor:
    """a @ b.T + bias, or with `plain` a @ b; two-dimensional, bias in the type of a."""
    stored = a.is_contiguous() and b.is_contiguous()
    if not stored or not _takes(a, b) or not (bias is None or _aligned(bias)):
        return _torch_product(a, b, bias, plain)
    columns = b.shape[1] if plain else b.shape[0]
    out = a.new_empty(a.shape[0], columns)
    if not out.numel():
        return out
    call = _call(a.shape[0], columns, a.shape[1], plain, bias is not None, a.device.index)
    if call.algorithms is None and torch.cuda.is_current_stream_capturing():
        return _torch_product(a, b, bias, plain)  # nothing can be timed now
    call.run(a, b, bias, out)
    return out


def _torch_product(a: Tensor, b: Tensor, bias: Tensor | None, plain: bool) -> Tensor:
    other = b if plain else b.T
    return a @ other if bias is None else torch.addmm(bias, a, other)


def batched_product(
    a: Tensor, b: Tensor, add: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """beta add + alpha a @ b for matrices (n, m, k) and (n, k, w).

    On CUDA in bfloat16 by algorithms of small clusters.
    """
    if _takes(a, b) and a.numel() and b.numel():
        out = _batched_product(a, b, add, alpha, beta)
        if out is not None:
            return out
    if add is None:
        return a @ b if alpha == 1.0 else alpha * (a @ b)
    return torch.baddbmm(add, a, b, beta=beta, alpha=alpha)


def _batched_product(
    a: Tensor, b: Tensor, add: Tensor | None, alpha: float, beta: float
) -> Tensor | None:
    """The same by cuBLASLt, or None if it has no such algorithm."""
    (a, a_turned), (b, b_turned) = _as_stored(a), _as_stored(b)
    key = (a.shape[0], a.shape[1], b.shape[2], a.shape[2], a_turned, b_turned, a.device.index)
    if key not in _batched_calls:
        if torch.cuda.is_current_stream_capturing():
            return None
        _batched_calls[key] = _BatchedCall(*key)
    call = _batched_calls[key]
    if call.algorithm is None:
        return None
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    call.run(a, b, None if add is None else add.contiguous(), out, alpha, beta)
    return out


def _as_stored(x: Tensor) -> tuple[Tensor, bool]:
    """x as a contiguous tensor or the transpose of one, and whether it is that."""
    if x.mT.is_contiguous() and not x.is_contiguous():
        return x, True
    return x.contiguous(), False


def _takes(a: Tensor, b: Tensor) -> bool:
    """Whether cuBLASLt takes these factors: on CUDA, in bfloat16, at addresses it expects."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == torch.bfloat16
        and _aligned(a)
        and _aligned(b)
        and _library() is not None
    )


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % ALIGNED == 0


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The cuBLASLt that torch uses, or None."""
    torch.cuda.current_blas_handle()  # loads it
    maps = Path("/proc/self/maps")
    found = re.search(r"/\S*libcublasLt\.so\S*", maps.read_text()) if maps.exists() else None
    return ctypes.CDLL(found.group(0)) if found else None


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")


@lru_cache(maxsize=1)
def _handle() -> ctypes.c_void_p:
    handle, library = ctypes.c_void_p(), _library()
    assert library is not None
    _check(library.cublasLtCreate(ctypes.byref(handle)))
    return handle


@lru_cache(maxsize=8)
def _workspace(device: int) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


_timed: set[tuple[int, int, int, bool, bool, int]] = set()


@lru_cache(maxsize=512)
def _call(rows: int, columns: int, inner: int, plain: bool, biased: bool, device: int) -> _Call:
    return _Call(rows, columns, inner, plain, biased, device)


class _Call:
    """One shape. cuBLASLt counts columns first: it computes out^T (columns, rows) from b and a."""

    def __init__(
        self, rows: int, columns: int, inner: int, plain: bool, biased: bool, device: int
    ) -> None:
        library = _library()
        assert library is not None
        self.shape = (rows, columns, inner, plain, biased, device)
        self.layouts: list[ctypes.c_void_p] = []
        self.library, self.workspace = library, _workspace(device)
        self.operation = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self.operation), COMPUTE_FP32, FP32))
        self._set(TRANSPOSE_A, ctypes.c_int32(0 if plain else 1))
        self._set(TRANSPOSE_B, ctypes.c_int32(0))
        self._set(EPILOGUE, ctypes.c_uint32(ADD_BIAS if biased else PLAIN))
        self.layouts = [
            self._layout(columns, inner) if plain else self._layout(inner, columns),
            self._layout(inner, rows),
            self._layout(columns, rows),
        ]
        self.algorithms: list[_Heuristic] | None = None

    def __del__(self) -> None:
        """Free what the library holds of a shape that is forgotten."""
        for layout in self.layouts:
            self.library.cublasLtMatrixLayoutDestroy(layout)
        self.library.cublasLtMatmulDescDestroy(self.operation)

    def run(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if bias is not None:
            self._set(BIAS, ctypes.c_uint64(bias.data_ptr()))
        if self.algorithms is None:
            self.algorithms = [self._fastest(a, b, out)]
        self._launch(self.algorithms[0], a, b, out)

    def _fastest(self, a: Tensor, b: Tensor, out: Tensor) -> _Heuristic:
        """The candidate with the shortest of three times."""
        candidates = self._candidates()
        if len(candidates) == 1 or len(_timed) >= MOST_TIMED:
            return candidates[0]
        _timed.add(self.shape)
        times = []
        for number, candidate in enumerate(candidates):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
            for mark in marks:
                self._launch(candidate, a, b, out)
                mark.record()
            marks[-1].synchronize()
            times.append((min(x.elapsed_time(y) for x, y in itertools.pairwise(marks[1:])), number))
        return candidates[min(times)[1]]

    def _candidates(self, most: int = CANDIDATES) -> list[_Heuristic]:
        """Proposals of cuBLASLt, best guess first, without split inner dimensions if possible."""
        library, preference, found = self.library, ctypes.c_void_p(), ctypes.c_int()
        _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        room = ctypes.c_uint64(WORKSPACE)
        _check(
            library.cublasLtMatmulPreferenceSetAttribute(
                preference, MOST_WORKSPACE, ctypes.byref(room), ctypes.c_size_t(8)
            )
        )
        results = (_Heuristic * most)()
        b, a, out = self.layouts
        problem = (_handle(), self.operation, b, a, out, out)
        status = library.cublasLtMatmulAlgoGetHeuristic(
            *problem, preference, most, results, ctypes.byref(found)
        )
        _check(library.cublasLtMatmulPreferenceDestroy(preference))
        _check(status)
        usable = [r for r in results[: found.value] if r.state == 0]
        return [r for r in usable if self._setting(r, SPLIT_K, 4) <= 1] or usable

    def _setting(self, candidate: _Heuristic, attribute: int, size: int) -> int:
        value, written = ctypes.c_uint64(), ctypes.c_size_t()
        self.library.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(candidate),
            attribute,
            ctypes.byref(value),
            ctypes.c_size_t(size),
            ctypes.byref(written),
        )
        return value.value

    def _launch(
        self,
        candidate: _Heuristic,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        add: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        pointer = ctypes.c_void_p
        b_layout, a_layout, out_layout = self.layouts
        added = pointer((out if add is None else add).data_ptr())
        stream = torch.cuda.current_stream(a.device).cuda_stream
        _check(
            self.library.cublasLtMatmul(
                _handle(), self.operation,
                ctypes.byref(ctypes.c_float(alpha)),
                pointer(b.data_ptr()), b_layout,
                pointer(a.data_ptr()), a_layout,
                ctypes.byref(ctypes.c_float(beta)),
                added, out_layout,
                pointer(out.data_ptr()), out_layout,
                ctypes.byref(candidate),
                pointer(self.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE),
                pointer(stream),
            )
        )  # fmt: skip

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(
            self.library.cublasLtMatmulDescSetAttribute(
                self.operation, attribute, ctypes.byref(value), size
            )
        )

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _check(self.library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), BF16, *sizes))
        return layout


class _BatchedCall(_Call):
    """One shape of a batched product: (n, rows, inner) times (n, inner, columns).

    Each is stored as it is or transposed.
    """

    def __init__(
        self,
        batch: int,
        rows: int,
        columns: int,
        inner: int,
        a_turned: bool,
        b_turned: bool,
        device: int,
    ) -> None:
        super().__init__(rows, columns, inner, True, False, device)
        self.batch = batch
        self._set(TRANSPOSE_A, ctypes.c_int32(int(b_turned)))
        self._set(TRANSPOSE_B, ctypes.c_int32(int(a_turned)))
        for layout in self.layouts:
            self.library.cublasLtMatrixLayoutDestroy(layout)
        self.layouts = [
            self._layout(inner, columns) if b_turned else self._layout(columns, inner),
            self._layout(rows, inner) if a_turned else self._layout(inner, rows),
            self._layout(columns, rows),
        ]
        small = (
            r for r in self._candidates(MANY) if self._setting(r, CLUSTER, 2) in SMALL_CLUSTERS
        )
        self.algorithm = next(small, None)

    def run(  # type: ignore[override]
        self, a: Tensor, b: Tensor, add: Tensor | None, out: Tensor, alpha: float, beta: float
    ) -> None:
        assert self.algorithm is not None
        self._launch(self.algorithm, a, b, out, add, alpha, 0.0 if add is None else beta)

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = super()._layout(rows, columns)
        if hasattr(self, "batch"):
            set_attribute = self.library.cublasLtMatrixLayoutSetAttribute
            batch, stride = ctypes.c_int32(self.batch), ctypes.c_int64(rows * columns)
            for attribute, value in ((BATCH, batch), (STRIDE, stride)):
                size = ctypes.c_size_t(ctypes.sizeof(value))
                _check(set_attribute(layout, attribute, ctypes.byref(value), size))
        return layout


_batched_calls: dict[tuple[int, int, int, int, bool, bool, int], _BatchedCall] = {}
"""By shape: those of an optimizer's matrices, which do not change."""
