"""HuggingFace's layers under torch.compile: the same steps, one piece of code for all layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import FAMILIES, ROUNDS, begin, folder_of, network_of
from small_runs import new_stepper, small_run

import entp
from entp.config import Run
from entp.engine.support import support_of
from entp.errors import InputError
from entp.training.compiling import compile_layers, explained
from entp.training.gradients import gradients
from entp.training.loggers import read_metrics

pytest.importorskip("transformers", reason="needs the transformers library")
from entp.hf import compiling
from entp.hf.families import wrap

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Layers are traced and run as they are: what torch.compile does, but for writing kernels."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    import torch._dynamo as dynamo

    dynamo.reset()
    compiling._methods.cache_clear()
    dynamo.utils.counters.clear()
    yield dynamo.utils.counters
    dynamo.reset()
    compiling._methods.cache_clear()


def gradients_of(run: Run, compiled: bool) -> tuple[Any, list[torch.Tensor], Any]:
    torch.manual_seed(0)
    stepper = new_stepper(run)
    model = stepper.state.model.double()
    if compiled:
        compile_layers(model)
    how = stepper.how[run.mode]
    inputs = stepper._inputs(how, run.task.batch(0, "train", 0, 2))
    loss, found = gradients(model, inputs, how)
    return loss, [torch.zeros(1) if g is None else g for g in found.values()], model


@pytest.mark.parametrize(("family", "rank"), [*((family, 0) for family in FAMILIES), ("llama", 2)])
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_compiled_layers_have_the_same_gradients(
    family: str, rank: int, mode: str, tmp_path: Path, traced: Any
) -> None:
    lora = {"lora_rank": rank} if rank else {}
    run, _ = begin(folder_of(family, tmp_path), mode=mode, **lora)
    loss, want, _ = gradients_of(run, compiled=False)
    other, found, model = gradients_of(run, compiled=True)
    assert (traced["stats"]["unique_graphs"] > 0) == (mode == "entp" or model.compiles_whole)
    assert support_of(model).graphs  # such a step may be captured
    close = 1e-5 if family in ROUNDS else 1e-9
    assert float(loss) == pytest.approx(float(other), rel=close)
    largest = max(float(g.abs().max()) for g in want)
    for one, two in zip(want, found, strict=True):
        assert float((one - two).abs().max()) <= close * largest


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_layers_share_their_code(mode: str, traced: Any) -> None:
    """Whatever their number is: the last one's norm and the first one's frozen input aside."""
    counts = []
    for layers in (3, 6):
        traced.clear()
        torch._dynamo.reset()
        model = wrap(network_of("llama", num_hidden_layers=layers))
        compile_layers(model)
        x = torch.randint(0, 10, (2, 6))
        for _ in range(2):
            model(x, mode).sum().backward()
        counts.append(traced["stats"]["unique_graphs"])
    assert counts[0] == counts[1]


def test_a_compiled_run_trains_as_a_plain_one(tmp_path: Path) -> None:
    """With the kernels that torch writes for a CPU, which takes a compiler."""
    run, init = begin(folder_of("gpt2", tmp_path / "weights"), mode="entp", steps=3)
    found = []
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        train = replace(run.train, compile_layers=compiled, log_every=1)
        entp.train(replace(run, train=train), out, device="cpu", init=init, quiet=True)
        found.append([row["loss"] for row in read_metrics(out) if row["kind"] == "train"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert len(found[0]) == 3


def test_what_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    run, out = small_run(train={"compile_layers": True}), tmp_path / "ours"
    with pytest.raises(InputError, match=r"train.compile_layers is for models of HuggingFace's"):
        entp.train(run, out, device="cpu", quiet=True)
    assert not (out / "config.json").exists()
    with pytest.raises(InputError, match="this is a Linear"):
        compile_layers(torch.nn.Linear(2, 2))
    from torch._dynamo.exc import InternalTorchDynamoError

    with (
        pytest.raises(InputError, match=r"cannot compile this model here \(no compiler\)"),
        explained(),
    ):
        raise InternalTorchDynamoError("no compiler")
    with pytest.raises(KeyError), explained():
        raise KeyError("anything else")
