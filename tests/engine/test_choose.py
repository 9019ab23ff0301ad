"""Which implementation runs, and what it says when it cannot."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from random_models import random_model

import entp
from entp.engine.choice import choose
from entp.engine.devices import LARGEST_HEAD
from entp.errors import InputError

pytest.importorskip("triton")
from entp.engine.triton import attention


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        InputError, match=r"impl 'triton' cannot run here: the device is cpu.*Use impl='packed'"
    ):
        choose("triton", "cpu")
    assert choose("auto", "cpu").impl == "packed"
    assert choose("auto", "cuda").impl == "triton"
    assert choose("triton", "cuda", random_model()).reason == "asked for by name"


@pytest.mark.parametrize(
    ("config", "dtype", "reason"),
    [
        (
            {"width": 2048, "heads": 16},
            torch.float32,
            "width 2048 is above 1024, the most for 16 heads in 32 bits",
        ),
        (
            {"width": 1024, "heads": 16},
            torch.float64,
            "width 1024 is above 256, the most for 16 heads in 64 bits",
        ),
        (
            {"width": 512, "heads": 4},
            torch.float64,
            "width 512 is above 256, the most for 4 heads in 64 bits",
        ),
        (
            {"width": 640, "heads": 20},
            torch.float32,
            "width 640 is above 512, the most for 20 heads in 32 bits",
        ),
        (
            {"width": 2 * LARGEST_HEAD, "heads": 1},
            torch.float32,
            f"head size {2 * LARGEST_HEAD} is above {LARGEST_HEAD}",
        ),
        ({}, torch.bfloat16, r"the weights are torch.bfloat16.*torch.autocast"),
    ],
)
def test_models_that_kernels_cannot_run(
    config: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    """By name it is an error with the reason; auto takes packed and gives the reason."""
    with torch.device("meta"):
        model = entp.Transformer(
            entp.ModelConfig(**{"vocab": 5, "layers": 2, "heads": 2, "width": 8, **config})
        ).to(dtype)
    for device in ("cpu", "cuda"):
        with pytest.raises(
            InputError, match=rf"impl 'triton' cannot run here: .*{reason}.*Use impl='packed'"
        ):
            choose("triton", device, model)
    assert choose("auto", "cuda", model).impl == "packed"
    assert re.search(reason, choose("auto", "cuda", model).reason)


@pytest.mark.parametrize(
    ("width", "heads", "half"),
    [(1024, 8, False), (1024, 16, False), (1024, 16, True), (512, 32, True)],
)
def test_the_largest_models_that_kernels_take(width: int, heads: int, half: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = entp.Transformer(entp.ModelConfig(vocab=5, layers=2, heads=heads, width=width))
    with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
        # Under autocast its numbers are the size.
        assert choose("triton", device, model.double() if half else model).impl == "triton"


@pytest.mark.parametrize(
    ("size", "kind", "longest"),
    [
        (64, torch.bfloat16, 128),
        (128, torch.bfloat16, 64),
        (64, torch.float32, 64),
        (128, torch.float32, 32),
        (128, torch.float64, 16),
    ],
)
def test_tiles_fit_a_multiprocessor(size: int, kind: torch.dtype, longest: int) -> None:
    assert attention.whole(size, kind) == longest
