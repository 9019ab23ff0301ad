"""Sections of benchmark files made by hand."""

from __future__ import annotations

from typing import Any

WHERE = {"device": "somewhere", "torch": "2.0", "commit": None, "date": "2026-01-01"}


def generation() -> dict[str, Any]:
    rows = [
        {"name": "entp", "tokens_per_s": 10.0, "ratio": 2.0},
        {"name": "decoder", "tokens_per_s": 50.0, "ratio": 10.0},
    ]
    config = {"size": "small", "batch_size": 1, "prompt_length": 2, "length": 4}
    return {"environment": WHERE, "config": config, "runs": rows}


def steps(ratio: float | None) -> dict[str, Any]:
    ratios = {"ratio": ratio, "memory_ratio": ratio}
    row = {"name": "entp reference", "median": 0.5, "peak_bytes": 2**24, **ratios}
    rows = [row, {**row, "name": "decoder", "median": 0.01}]
    shape = {"name": "own", "size": "small", "batch_size": 1, "tokens": 8, "steps": rows}
    return {"environment": WHERE, "shapes": [shape, {**shape, "name": "other", "steps": [row]}]}


def growth() -> dict[str, Any]:
    values = {n: {"step": n**2 / 1e4, "token": n / 1e4, "memory": 2**20 * n} for n in (8, 16, 32)}
    powers = {"step": 2.0, "token": 1.0, "memory": 1.0}
    return {
        "environment": WHERE,
        "config": {"size": "small", "batch_size": 1},
        "points": [{"n": n, "entp": v, "decoder": v} for n, v in values.items()],
        "fits": [
            {"what": what, "mode": mode, "from_n": 16, "exponent": power}
            for mode in ("entp", "decoder")
            for what, power in powers.items()
        ],
    }
