"""Where a step's time goes: the most expensive kernels on CUDA, the most expensive operators on a
CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from entp.bench.measure import Step, wait
from entp.terminal import format_table

TOP = 10
"""Kernels that are named."""
NAME = 70
"""Characters of a kernel's name that are shown."""


def expensive_kernels(step: Step, device: torch.device, steps: int = 3) -> dict[str, Any]:
    """The TOP kernels (CPU: operators) of a step by time: name, calls and ms per step, fraction of
    all of them."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    step()
    wait(device)
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        wait(device)
    found = [e for e in profiler.key_averages() if not on_gpu or _is_kernel(e)]
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for e in found:
        microseconds = e.self_device_time_total if on_gpu else e.self_cpu_time_total
        times[e.key] += microseconds
        calls[e.key] += e.count
    total = times.total()
    rows = [
        {
            "name": name,
            "calls": calls[name] / steps,
            "ms": spent / 1e3 / steps,
            "fraction": spent / total if total else 0.0,
        }
        for name, spent in times.most_common(TOP)
    ]
    return {"what": "kernels" if on_gpu else "operators", "ms": total / 1e3 / steps, "top": rows}


def kernel_table(name: str, found: dict[str, Any]) -> str:
    """What expensive_kernels found, for a person."""
    rows = [
        [_short(r["name"]), f"{r['calls']:g}", f"{r['ms']:.3f}", f"{r['fraction']:.1%}"]
        for r in found["top"]
    ]
    what = found["what"]
    title = f"{name}: {found['ms']:.2f} ms of {what} per step"
    head = [f"most expensive {what}", "calls per step", "ms per step", "fraction"]
    return f"{title}\n{format_table(head, rows)}"


def _is_kernel(event: Any) -> bool:
    """Whether this is work on the device, and not the name of a span of it (such as a whole
    optimizer step)."""
    span = getattr(event, "is_user_annotation", False) or event.key.startswith(
        ("Optimizer.", "ProfilerStep")
    )
    return event.device_type.name == "CUDA" and not span


def _short(name: str) -> str:
    plain = (
        name.removeprefix("void ")
        .replace("at::native::", "")
        .replace("(anonymous namespace)::", "")
    )
    return plain if len(plain) <= NAME else plain[: NAME - 3] + "..."
