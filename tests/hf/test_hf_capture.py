"""A training step of HuggingFace's models can be captured: it reads and copies nothing."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_watch import HostCopies, to_meta
from small_networks import FAMILIES, ROUNDS, apart, begin, folder_of, network_of
from small_runs import new_stepper
from torch import Tensor

import entp
from entp.engine import packed
from entp.engine.layout import Packing
from entp.engine.support import support_of
from entp.tasks.base import IGNORE, Batch
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.gradients import gradients
from entp.training.inputs import make_inputs, step_arrays
from entp.training.prefix_rows import PrefixRows

pytest.importorskip("transformers", reason="needs the transformers library")
pytest.importorskip("triton")
from entp.engine.triton import any_model
from entp.hf.families import wrap

pytestmark = [pytest.mark.usefixtures("quiet")]


def rows(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """What attention returns, without values: kernels do not run on the meta device."""
    some = q.sum() + k.sum() + v.sum()
    return some.expand(packing.rows if q.ndim == 4 else len(q), q.shape[-2] * q.shape[-1])


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device as on CUDA, but for the kernels and autocast, which are not there."""

    def autocast(device: str, *args: Any, **options: Any) -> Any:
        return contextlib.nullcontext() if device == "meta" else real(device, *args, **options)

    real = torch.autocast
    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(packed, "attention_kernels", lambda device, size: device.type == "meta")
    for name in ("first_attention", "prefix_attention", "last_attention"):
        monkeypatch.setattr(any_model, name, rows)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
def test_a_step_leaves_the_host_alone(family: str, rank: int, mode: str, tmp_path: Path) -> None:
    lora = {"lora_rank": rank} if rank else {}
    run, _ = begin(folder_of(family, tmp_path), mode=mode, **lora)
    stepper = new_stepper(run)
    model, how, batch = stepper.state.model, stepper.how[mode], run.task.batch(0, "train", 0, 2)
    if mode == "prefix-lm":  # as padded prompts have them
        batch = replace(batch, prefix_lengths=np.array([2, 3]))
    stepper(batch)  # compares packed with the reference
    inputs, compared = stepper._inputs(how, batch), support_of(model).compared
    model.to("meta")
    inputs.arrays = to_meta(inputs.arrays)
    support = support_of(model)
    assert support.graphs
    support.compared.update(compared)
    gradients(model, inputs, how)  # makes tables
    with HostCopies() as copies:
        loss, found = gradients(model, inputs, how)
    assert loss.is_meta
    assert all(g is None or g.is_meta for g in found.values())
    assert not copies.found


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_prefixes_have_the_gradients_of_packed(family: str) -> None:
    """Padded batches with few targets: each prefix in a row, its last token first."""
    model = wrap(network_of(family).double())
    rng = np.random.default_rng(0)
    lengths = np.array([7, 12, 9])
    y = np.full((3, 12), IGNORE)
    y[[0, 0, 1, 2], [6, 3, 11, 4]] = [1, 2, 3, 4]
    batch, shape = Batch(rng.integers(2, 10, y.shape), y, lengths), PrefixRows()
    shape.grow(batch)
    alone = shape(batch)
    assert alone is not None
    found = []
    for one, mode in ((batch, "entp"), (alone, "prefix-lm")):
        how = Forward(mode, None, "cross_entropy", "auto", None, "fp32")
        arrays = step_arrays(one, 0, [], World())
        inputs = make_inputs(arrays, one, how, model, torch.device("cpu"))
        found.append(gradients(model, inputs, how))
    (loss, one), (other, two) = found
    close = 1e-4 if family in ROUNDS else 1e-9
    assert float(loss) == pytest.approx(float(other), rel=close)
    largest = max(float(g.abs().max()) for g in one.values() if g is not None)
    for p, gradient in one.items():
        if gradient is not None:
            assert float((gradient - two[p]).abs().max()) < close * largest


def test_what_depends_on_python_is_not_captured() -> None:
    def fresh() -> Any:
        return wrap(network_of("llama"))

    assert support_of(fresh()).graphs
    hooked = fresh()
    hooked.network.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    patched = fresh()
    patched.network.model.layers[0].mlp.forward = lambda x: x
    foreign = fresh()

    class Mlp(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    foreign.network.model.layers[0].mlp = Mlp()
    for model, why in ((hooked, "a hook"), (patched, "forward of its own"), (foreign, "is a Mlp")):
        support = support_of(model)
        assert not support.graphs
        assert support.python is not None
        assert why in support.python


def test_a_lora_that_is_switched_off_is_another_model() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    network = peft.get_peft_model(network_of("llama"), config)
    model = wrap(network)
    before = support_of(model)
    assert before.graphs
    network.base_model.disable_adapter_layers()
    assert support_of(model) is not before
    network.base_model.enable_adapter_layers()
    assert support_of(model) is before


GPU_CASES = [
    ("bert", 0, "entp"),
    ("bert", 0, "decoder"),
    ("llama", 2, "entp"),
    ("mpnet", 0, "entp"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "rank", "mode"), GPU_CASES)
def test_captured_steps_are_the_eager_ones(
    family: str, rank: int, mode: str, tmp_path: Path
) -> None:
    lora = {"lora_rank": rank} if rank else {}
    run, _ = begin(folder_of(family, tmp_path), mode=mode, **lora)
    losses = {}
    for graph in (True, False):
        train = replace(run.train, cuda_graph=graph, precision="fp32")
        stepper = new_stepper(replace(run, train=train), "cuda")
        losses[graph] = []
        for step in range(8):
            batch = run.task.batch(0, "train", step, 4)
            losses[graph].append(tuple(float(x) for x in stepper(batch)[:2]))
            stepper.state.step += 1
        assert len(stepper.graphs) == graph
    assert np.array(losses[True]) == pytest.approx(np.array(losses[False]), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_the_reference_on_a_gpu(family: str) -> None:
    model = wrap(network_of(family).double()).cuda()
    x = torch.randint(0, 10, (3, 16), generator=torch.Generator().manual_seed(0)).cuda()
    want = entp.all_prefixes(model, x, impl="reference")
    got = entp.all_prefixes(model, x, impl="packed")
    weight = torch.sin(torch.arange(got.numel(), device="cuda")).view_as(got)
    some = [p for p in model.parameters() if p.requires_grad]
    pairs = [
        torch.autograd.grad((weight * out).sum(), some, allow_unused=True) for out in (got, want)
    ]
    close = 1e-4 if family in ROUNDS else 1e-9
    assert apart(got, want) < close
    largest = max(float(g.abs().max()) for g in pairs[1] if g is not None)
    for one, two in zip(*pairs, strict=True):
        assert one is None or float((one - two).abs().max()) < close * largest
