"""The engine and training on a CUDA device. Run with `make gpu-test`."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from random_models import random_inputs, random_model
from small_runs import small_run
from torch import Tensor

import entp
from entp.training.metrics import read_metrics

pytestmark = pytest.mark.gpu

SHAPES = [{"layers": 2}, {"layers": 3, "width": 32}, {"layers": 4, "norm": "none"}, {"layers": 3, "scale": "one", "heads": 1}]


def outputs_and_gradients(model: entp.Transformer, x: Tensor, **options: object) -> dict[str, Tensor]:
    """Outputs under `out`, and every parameter's gradient of a fixed combination of them."""
    model.zero_grad()
    out = entp.all_prefixes(model, x, **options).double()  # type: ignore[arg-type]
    weight = torch.sin(torch.arange(out.numel(), device=out.device, dtype=out.dtype)).view_as(out)
    (out * weight).sum().backward()
    return {"out": out.detach(), **{n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("config", SHAPES, ids=str)
@pytest.mark.parametrize("budget", [None, 50])
def test_packed_equals_reference_in_float64(config: dict[str, object], budget: int | None) -> None:
    model = random_model(**config).cuda()
    x = random_inputs(model, 3, 35).cuda()
    lengths = torch.tensor([35, 20, 1]).cuda()
    want = outputs_and_gradients(model, x, impl="reference", lengths=lengths)
    got = outputs_and_gradients(model, x, impl="packed", lengths=lengths, token_budget=budget)
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


@pytest.mark.parametrize("impl", ["packed", "triton"])
def test_bf16_is_as_close_to_float64_as_the_references_bf16(impl: str) -> None:
    """Outputs and gradients: the ratio of errors, averaged over models, is not above 1 by more than its own uncertainty."""
    ratios: dict[str, list[float]] = {"out": [], "gradients": []}
    for seed in range(16):
        exact = random_model(seed, layers=3, heads=2, width=64, vocab=64)
        half = entp.Transformer(exact.config)
        half.load_state_dict(exact.state_dict())
        exact.load_state_dict(half.state_dict())  # the same weights, rounded to float32
        exact, half = exact.cuda(), half.cuda()
        x = random_inputs(exact, 4, 40, seed).cuda()
        want = outputs_and_gradients(exact, x, impl="reference")
        errors = {}
        for name in ("reference", impl):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                got = outputs_and_gradients(half, x, impl=name)
            names = [n for n in want if n != "out"]
            errors[name] = {
                "out": float((got["out"] - want["out"]).abs().mean()),
                "gradients": sum(float((got[n] - want[n]).norm() / want[n].norm()) for n in names),
            }
        for kind, values in ratios.items():
            values.append(errors[impl][kind] / errors["reference"][kind])
    for kind, values in ratios.items():
        mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
        print(f"bf16 error, {impl} / reference, {kind}: {mean:.3f} +- {error:.3f}")
        assert mean <= 1 + 3 * error, kind
        assert error < 0.05, kind


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix"])
def test_training_follows_the_cpu(mode: str, tmp_path: Path) -> None:
    """The same run on both devices, in fp32: the losses agree to rounding; in bf16 they stay close."""
    for name, device, precision in (("cpu", "cpu", "fp32"), ("gpu", "cuda", "fp32"), ("half", "cuda", "bf16")):
        run = small_run(mode=mode, steps=10, train={"precision": precision})
        entp.train(run, tmp_path / name, device=device, quiet=True)
    cpu, gpu, half = ([r["loss"] for r in read_metrics(tmp_path / n)] for n in ("cpu", "gpu", "half"))
    assert gpu == pytest.approx(cpu, rel=1e-4)
    assert half == pytest.approx(cpu, rel=2e-2)


def test_resume_on_the_gpu(tmp_path: Path) -> None:
    entp.train(small_run(steps=10), tmp_path / "whole", device="cuda", quiet=True)
    entp.train(small_run(steps=5), tmp_path / "parts", device="cuda", quiet=True)
    entp.train(small_run(steps=10), tmp_path / "parts", device="cuda", resume=True, quiet=True)
    whole, parts = ([r["loss"] for r in read_metrics(tmp_path / n)] for n in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-3)


def test_default_budget_keeps_a_large_step_inside_the_memory() -> None:
    """Medium, 256 tokens, batch 64: 2.1 million rows, several chunks, and still a step."""
    from entp.bench import _make_step
    from entp.options import BenchOptions

    step = _make_step(BenchOptions("medium", 256, 64), "entp packed", torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    print(f"peak {peak / 2**30:.1f} GiB of {total / 2**30:.1f} GiB")
    assert peak < 0.6 * total


def test_masks_and_lists_on_the_device() -> None:
    model = random_model(layers=3).cuda()
    x = random_inputs(model, 3, 9).cuda()
    full = entp.all_prefixes(model, x)
    mask = torch.rand(3, 9, device="cuda") > 0.5
    torch.testing.assert_close(entp.all_prefixes(model, x, at=mask), full[mask])
    torch.testing.assert_close(entp.all_prefixes(model, x, at=mask.cpu()), full[mask])
    torch.testing.assert_close(entp.all_prefixes(model, x, at=[8, 2]), full[:, [8, 2]])
