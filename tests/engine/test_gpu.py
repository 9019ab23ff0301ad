"""The engine and training on a CUDA device. Run with `make gpu-test`."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_inputs, random_model
from small_runs import entp as entp_command
from small_runs import small_run
from torch import Tensor

import entp
from entp.bench.shapes import RandomTokens
from entp.bench.step import make_step
from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.engine.triton import cublaslt
from entp.tasks.base import Task
from entp.tasks.counting import Count3, Match3
from entp.training.cuda_graph import EAGER_STEPS
from entp.training.loggers import read_metrics

pytestmark = pytest.mark.gpu

SHAPES = [
    {"layers": 2},
    {"layers": 3, "width": 32},
    {"layers": 4, "norm": "none"},
    {"layers": 3, "attention_scale": "one", "heads": 1},
]


def outputs_and_gradients(
    model: entp.Transformer, x: Tensor, mode: str = "entp", **options: object
) -> dict[str, Tensor]:
    """Outputs under `out`, and every parameter's gradient of a fixed combination of them."""
    model.zero_grad()
    out = model(x, mode, **options).double()  # type: ignore[arg-type]
    weight = torch.sin(torch.arange(out.numel(), device=out.device, dtype=out.dtype)).view_as(out)
    (out * weight).sum().backward()
    return {
        "out": out.detach(),
        **{n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None},
    }


def rounded_pair(seed: int = 0, **config: Any) -> tuple[entp.Transformer, entp.Transformer]:
    """A float64 and a float32 model with the same weights, of activations of about one size."""
    exact = random_model(seed, **config)
    for p in exact.blocks.parameters():
        p.data *= min(1.0, (64 / exact.config.width) ** 0.5) if p.ndim == 2 else 1.0
    single = entp.Transformer(exact.config)
    single.load_state_dict(exact.state_dict())
    exact.load_state_dict(single.state_dict())
    return exact.cuda(), single.cuda()


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """How far outputs are off on average, and gradients, each relative to its own size, summed."""
    names = [name for name in want if name != "out"]
    return {
        "out": float((got["out"] - want["out"]).abs().mean()),
        "gradients": sum(
            float((got[name] - want[name]).norm() / want[name].norm()) for name in names
        ),
    }


@pytest.mark.parametrize(
    ("impl", "config"),
    [*(("packed", s) for s in SHAPES), *(("triton", s) for s in SHAPES[1:3])],
    ids=str,
)
@pytest.mark.parametrize("budget", [None, 50])
def test_engines_equal_the_reference_in_float64(
    impl: str, config: dict[str, Any], budget: int | None
) -> None:
    model = random_model(**config).cuda()
    x = random_inputs(model, 3, 35).cuda()
    lengths = torch.tensor([35, 20, 1]).cuda()
    want = outputs_and_gradients(model, x, impl="reference", lengths=lengths)
    got = outputs_and_gradients(model, x, impl=impl, lengths=lengths, token_budget=budget)
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


@pytest.mark.parametrize("impl", ["packed", "triton"])
def test_long_prefixes_equal_the_reference_in_float64(impl: str) -> None:
    """Up to 200 tokens: prefixes of one tile and of several, side by side."""
    model = random_model(layers=3, context_length=200).cuda()
    x = random_inputs(model, 2, 200).cuda()
    at = torch.rand(2, 200, generator=torch.Generator().manual_seed(0)) < 0.15
    at[:, [0, 63, 64, 127, 128, 199]] = True
    want = outputs_and_gradients(model, x, impl="reference", at=at)
    got = outputs_and_gradients(model, x, impl=impl, at=at)
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


@pytest.mark.parametrize("size", [32, 64, 96, 128])
@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
def test_head_sizes(size: int, half: bool) -> None:
    """In one tile and in several: at most twice as far from float64 as the reference is."""
    exact, single = rounded_pair(layers=3, heads=384 // size, width=384, context_length=200)
    x = random_inputs(exact, 2, 200).cuda()
    at = [126, 198]
    want = outputs_and_gradients(exact, x, impl="reference", at=at)
    found = {}
    for impl in ("reference", "triton"):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            found[impl] = errors(outputs_and_gradients(single, x, impl=impl, at=at), want)
    for kind, error in found["triton"].items():
        print(
            f"head size {size}, {'bf16' if half else 'fp32'}, {kind}: {error:.2g}, reference "
            f"{found['reference'][kind]:.2g}"
        )
        assert error <= 2 * found["reference"][kind], kind


@pytest.mark.parametrize("impl", ["packed", "triton"])
def test_bf16_is_as_close_to_float64_as_the_references_bf16(impl: str) -> None:
    """The ratio of errors, averaged over models, is not above 1 by more than its uncertainty."""
    ratios: dict[str, list[float]] = {"out": [], "gradients": []}
    for seed in range(16):
        exact, single = rounded_pair(seed, layers=3, heads=2, width=64, vocab=64)
        x = random_inputs(exact, 4, 40, seed).cuda()
        want = outputs_and_gradients(exact, x, impl="reference")
        found = {}
        for name in ("reference", impl):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                found[name] = errors(outputs_and_gradients(single, x, impl=name), want)
        for kind, values in ratios.items():
            values.append(found[impl][kind] / found["reference"][kind])
    for kind, values in ratios.items():
        mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
        print(f"bf16 error, {impl} / reference, {kind}: {mean:.3f} +- {error:.3f}")
        assert mean <= 1 + 3 * error, kind
        assert error < 0.05, kind


@pytest.mark.parametrize("free", [None, 16])
def test_a_decoder_by_the_kernels_is_as_close_to_float64_as_torchs(free: int | None) -> None:
    """The kernels' errors over torch's in bf16, averaged over models, are at most about 1."""
    mode, ratios = "decoder" if free is None else "prefix-lm", {"out": [], "gradients": []}
    for seed in range(16):
        exact, single = rounded_pair(seed, layers=3, heads=2, width=64, vocab=64)
        x = random_inputs(exact, 8, 40, seed).cuda()

        want = outputs_and_gradients(exact, x, mode, prefix=free)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            names = ("auto", "triton")
            found = {
                n: errors(outputs_and_gradients(single, x, mode, prefix=free, impl=n), want)
                for n in names
            }
        for kind, values in ratios.items():
            values.append(found["triton"][kind] / found["auto"][kind])
    for kind, values in ratios.items():
        mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
        print(f"bf16 error, decoder by kernels / by torch, {kind}: {mean:.3f} +- {error:.3f}")
        assert mean <= 1 + 3 * error, kind


def loss_curve(run: Run, out: Path) -> dict[int, float]:
    """Mean loss of the ten steps up to 50, 100, 150 and 200."""
    entp.train(run, out, device="cuda", quiet=True)
    losses = {row["step"]: row["loss"] for row in read_metrics(out) if row["kind"] == "train"}
    return {step: losses[step] for step in (50, 100, 150, 200)}


def test_bf16_training_follows_the_references_loss_curve(tmp_path: Path) -> None:
    """200 steps of Count3 in bf16, by kernels and graphs and by the loop, for each of four seeds.

    At each of four places on the curve, the two differ for the same seed, on average over seeds, by
    less than the loop's own curves do from seed to seed (their standard deviation): exchanging the
    engine is less than exchanging the seed. 3 % of noise on every gradient gives a twentieth of
    that; the places are far below the first loss, so that there is a curve.
    """
    task = Count3(prompt_length=8, length=20)
    model = model_for(task, "small", layers=3, heads=2, width=64)
    optim = OptimConfig(lr=2e-3, min_lr=2e-4, warmup_steps=20, decay_steps=400)
    curves: dict[str, list[dict[int, float]]] = {"reference": [], "triton": []}
    for impl, found in curves.items():
        train = TrainConfig(
            impl=impl, precision="bf16", log_every=10, eval_every=200, eval_batches=1
        )  # type: ignore[arg-type]
        for seed in range(4):
            run = Run(
                task, model, "entp", steps=200, batch_size=32, seed=seed, optim=optim, train=train
            )
            found.append(loss_curve(run, tmp_path / f"{impl}-{seed}"))
    for step in (50, 100, 150, 200):
        loop, kernels = (
            [curve[step] for curve in curves[impl]] for impl in ("reference", "triton")
        )
        apart = statistics.mean(abs(a - b) for a, b in zip(loop, kernels, strict=True))
        print(
            f"step {step}: reference {statistics.mean(loop):.4f} +- {statistics.stdev(loop):.4f}, "
            f"triton off by {apart:.4f}"
        )
        assert apart < statistics.stdev(loop)
        assert statistics.mean(loop) < math.log(task.model_needs()["vocab"]) - 1


@pytest.mark.parametrize(
    ("mode", "impl"),
    [
        ("entp", "auto"),
        ("decoder", "auto"),
        ("prefix-lm", "auto"),
        ("refresh-3", "auto"),
        ("decoder", "triton"),
        ("prefix-lm", "triton"),
    ],
)
def test_training_follows_the_cpu(mode: str, impl: str, tmp_path: Path) -> None:
    """The same run on both devices: losses agree to rounding in fp32, and stay close in bf16."""
    for name, device, precision in (
        ("cpu", "cpu", "fp32"),
        ("gpu", "cuda", "fp32"),
        ("half", "cuda", "bf16"),
    ):
        run = small_run(
            mode=mode,
            steps=10,
            train={"precision": precision, "impl": impl if device == "cuda" else "auto"},
        )
        entp.train(run, tmp_path / name, device=device, quiet=True)
    cpu, gpu, half = (
        [r["loss"] for r in read_metrics(tmp_path / n)] for n in ("cpu", "gpu", "half")
    )
    assert gpu == pytest.approx(cpu, rel=1e-4)
    assert half == pytest.approx(cpu, rel=2e-2)


def test_resume_on_the_gpu(tmp_path: Path) -> None:
    entp.train(small_run(steps=10), tmp_path / "whole", device="cuda", quiet=True)
    entp.train(small_run(steps=5), tmp_path / "parts", device="cuda", quiet=True)
    entp.train(small_run(steps=10), tmp_path / "parts", device="cuda", resume=True, quiet=True)
    whole, parts = ([r["loss"] for r in read_metrics(tmp_path / n)] for n in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-3)


def peak_bytes(step: Callable[[], Any], count: int = 1) -> int:
    """The most memory that `count` steps take from the device; every loss must be finite."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(count):
        loss, norm, _ = step()
        assert math.isfinite(float(loss))
        assert math.isfinite(float(norm))
    return torch.cuda.max_memory_reserved()


def medium_step(task: Task, batch: int, impl: str) -> Callable[[], Any]:
    train = TrainConfig(impl=impl)  # type: ignore[arg-type]
    run = Run(task, model_for(task, "medium"), "entp", batch_size=batch, train=train)
    return make_step(run, torch.device("cuda"))


def test_default_budget_keeps_a_large_step_inside_the_memory() -> None:
    """Medium, 256 tokens, batch 64: 2.1 million rows, several chunks, and still a step."""
    peak, total = (
        peak_bytes(medium_step(Match3(length=256), 64, "packed")),
        torch.cuda.get_device_properties(0).total_memory,
    )
    print(f"peak {peak / 2**30:.1f} GiB of {total / 2**30:.1f} GiB")
    assert peak < 0.6 * total


def test_a_long_sequence_trains_within_80_gib() -> None:
    """Medium, 1,024 tokens, all prefixes: plain steps first, then the recorded one."""
    step = medium_step(RandomTokens(1024, 64), 1, "triton")
    plain, recorded = peak_bytes(step), peak_bytes(step, EAGER_STEPS + 1)
    print(f"n = 1,024: peak {plain / 2**30:.1f} GiB, as a graph {recorded / 2**30:.1f} GiB")
    assert max(plain, recorded) < 80 * 2**30


def test_masks_and_lists_on_the_device() -> None:
    model = random_model(layers=3).cuda()
    x = random_inputs(model, 3, 9).cuda()
    full = entp.all_prefixes(model, x)
    mask = torch.rand(3, 9, device="cuda") > 0.5
    torch.testing.assert_close(entp.all_prefixes(model, x, at=mask), full[mask])
    torch.testing.assert_close(entp.all_prefixes(model, x, at=mask.cpu()), full[mask])
    torch.testing.assert_close(entp.all_prefixes(model, x, at=[8, 2]), full[:, [8, 2]])


# Matrix products


PRODUCTS = [
    (1, 8, 8),
    (64, 64, 64),
    (37, 24, 40),
    (1000, 192, 576),
    (333, 7, 5),
    (129, 33, 65),
    (4096, 384, 1536),
]
"""(rows, columns, inner)."""


def factors(rows: int, columns: int, inner: int, plain: bool) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 factors for cublaslt.product, and a bias."""
    generator = torch.Generator("cuda").manual_seed(rows)
    shapes = [(rows, inner), (inner, columns) if plain else (columns, inner), (columns,)]
    a, b, bias = (torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes)
    return a, b, bias


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products_equal_torchs_to_rounding(
    shape: tuple[int, int, int], biased: bool, plain: bool
) -> None:
    """Half a step of bf16 at each number's size, and fp32's rounding of `inner` products."""
    a, b, bias = factors(*shape, plain)
    got = cublaslt.product(a, b, bias if biased else None, plain=plain)
    want = a.double() @ (b.double() if plain else b.double().T) + (bias.double() if biased else 0)
    size = a.double().abs() @ (b.double().abs() if plain else b.double().abs().T) + 1
    assert got.dtype == torch.bfloat16
    assert bool(
        ((got.double() - want).abs() <= 2**-8 * want.abs() + 2**-22 * shape[2] * size).all()
    )
    assert torch.equal(got, cublaslt.product(a, b, bias if biased else None, plain=plain))


def test_shapes_that_keep_coming_are_not_timed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than are timed and kept: the same bits, and no more is timed."""
    monkeypatch.setattr(cublaslt, "_timed", set())
    monkeypatch.setattr(cublaslt, "MOST_TIMED", 20)
    cublaslt._call.cache_clear()
    for rows in [*range(64, 64 + 600), 64]:
        a, b, _ = factors(rows, 64, 32, False)
        assert torch.allclose(
            cublaslt.product(a, b).float(), a.float() @ b.float().T, rtol=2**-7, atol=2**-4
        )
    assert len(cublaslt._timed) == 20
    assert cublaslt._call.cache_info().currsize == 512


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("shape", [s for s in PRODUCTS if all(n % 8 == 0 for n in s[1:])], ids=str)
def test_all_algorithms_give_the_same_bits(shape: tuple[int, int, int], plain: bool) -> None:
    """So which one is the fastest on a day cannot change a result."""
    a, b, _ = factors(*shape, plain)
    call = cublaslt._Call(*shape, plain, False, 0)
    candidates = call._candidates()
    assert candidates
    results = []
    for candidate in candidates:
        out = a.new_full((shape[0], shape[1]), float("nan"))
        call._launch(candidate, a, b, out)
        results.append(out)
    print(f"{shape}: {len(candidates)} algorithms")
    assert all(torch.equal(results[0], other) for other in results)
    assert bool(results[0].isfinite().all())


# Lengths, and other processes


def test_random_lengths_in_all_modes_while_others_use_the_gpu() -> None:
    """Four processes at once, 40 seconds of random lengths each, with graphs: random_lengths.py."""
    script = Path(__file__).with_name("random_lengths.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(seed), "40"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for seed in range(4)
    ]
    outputs = [process.communicate(timeout=400)[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        print(output[-400:])
        assert process.returncode == 0, output[-2000:]
        assert f"seed {running.index(process)}: " in output


FAILING = """
import sys
from dataclasses import dataclass
import numpy as np
from entp.bench.shapes import RandomTokens
from entp.tasks.base import Batch

@dataclass(frozen=True)
class Bad(RandomTokens):
    length: int = 6
    vocab: int = 8
    def batch(self, seed, split, step, size):
        batch = super().batch(seed, split, step, size)
        return Batch(batch.x + (10_000 if split == "train" and step == 12 else 0), batch.y)
"""


def test_a_failure_of_the_gpu_is_a_sentence_with_the_step_to_continue_from(tmp_path: Path) -> None:
    """A token outside the vocabulary stops the device; the process ends without a stack."""
    (tmp_path / "bad.py").write_text(FAILING)
    options = [
        "--steps=40",
        "--batch-size=4",
        "--train.checkpoint-every=5",
        "--train.no-cuda-graph",
        "--device=cuda",
        "--out=run",
    ]
    done = entp_command("train", "bad:Bad", *options, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the GPU failed at about step 1" in done.stderr
    assert "continue from step-00000010 with --resume --out run" in done.stderr
    assert "Traceback" not in done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(40, 256, 256, 256), (3, 24, 40, 8), (2, 7, 5, 3)], ids=str)
def test_batched_products_equal_torchs_to_rounding(
    shape: tuple[int, int, int, int], turned: bool
) -> None:
    """(n, rows, inner, columns), with and without a matrix added, as stored and transposed."""
    n, rows, inner, columns = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a, b, add = (
        torch.randn(s, generator=generator, device="cuda").bfloat16()
        for s in ((n, rows, inner), (n, inner, columns), (n, rows, columns))
    )
    if turned:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    for more in (None, add):
        got = cublaslt.batched_product(a, b, more, alpha=2.0, beta=-3.0)
        want = 2 * (a.double() @ b.double()) - (0 if more is None else 3 * more.double())
        size = 2 * (a.double().abs() @ b.double().abs()) + (
            0 if more is None else 3 * more.double().abs()
        )
        assert bool(
            ((got.double() - want).abs() <= 2**-8 * want.abs() + 2**-22 * inner * size).all()
        )
    assert all(call.algorithm is None or call.batch for call in cublaslt._batched_calls.values())


def test_products_at_unaligned_addresses_go_to_torch() -> None:
    whole = torch.randn(64 * 64 + 1, device="cuda").bfloat16()
    a, b = whole[1:].view(64, 64), torch.randn(64, 64, device="cuda").bfloat16()
    assert not cublaslt._takes(a, b)
    assert torch.equal(cublaslt.product(a, b), a @ b.T)
