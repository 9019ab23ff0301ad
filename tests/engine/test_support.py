"""A changed model is computed exactly, or refused with the reason: never a wrong number."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
from changes import CHANGES, Change, Lora
from random_models import random_inputs, random_model
from torch import Tensor, nn

import entp
from entp.engine import fingerprint, packed
from entp.engine.check import SEES, UNLIKE
from entp.engine.choice import choose
from entp.engine.support import support_of
from entp.errors import EngineWarning, InputError

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
MODES = {"entp": {}, "decoder": {}, "prefix-lm": {"prefix": 2}}


def changed(change: Change, **config: Any) -> tuple[entp.Transformer, Tensor]:
    """A model that was used before it was changed, and inputs."""
    model = random_model(layers=3, **config).to(DEVICE)
    x = random_inputs(model, 2, 3).to(DEVICE)
    for mode, options in MODES.items():
        model(x, mode, **options)
    change.apply(model)
    return model.to(DEVICE), x


def outputs_and_gradients(model: entp.Transformer, x: Tensor, mode: str, impl: str) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    out = model(x, mode, impl=impl, **MODES[mode])
    grads = torch.autograd.grad(out.square().sum(), trained, allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(p) if g is None else g for p, g in zip(trained, grads, strict=True)),
    ]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    largest = max(float(w.abs().max()) for w in want)
    return max(float((g - w).abs().max()) for g, w in zip(got, want, strict=True)) / largest


@every_change
@pytest.mark.parametrize("mode", MODES)
def test_auto_is_exact_for_a_changed_model(change: Change, mode: str) -> None:
    model, x = changed(change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)
        got = outputs_and_gradients(model, x, mode, "auto")
    assert worst(got, outputs_and_gradients(model, x, mode, "reference")) < 1e-9


@every_change
def test_packed_is_exact_or_refused_for_a_changed_model(change: Change) -> None:
    model, x = changed(change)
    if not change.packed:
        with pytest.raises(
            InputError, match=r"impl 'packed' is not exact for this model: .*impl='reference'"
        ):
            model(x, impl="packed")
        return
    got = outputs_and_gradients(model, x, "entp", "packed")
    assert worst(got, outputs_and_gradients(model, x, "entp", "reference")) < 1e-9


TAKEN = [name for name, change in CHANGES.items() if change.triton]
REFUSED = [name for name, change in CHANGES.items() if not change.triton]
IN_MODES = [
    *((name, "entp") for name in TAKEN),
    *((name, ("decoder", "prefix-lm")[number % 2]) for number, name in enumerate(TAKEN)),
]
"""Each change that kernels take, in mode entp and in one of the others."""


@pytest.mark.parametrize(("name", "mode"), IN_MODES)
def test_kernels_are_exact_for_a_changed_model(name: str, mode: str) -> None:
    model, x = changed(CHANGES[name])
    got = outputs_and_gradients(model, x, mode, "triton")
    assert worst(got, outputs_and_gradients(model, x, mode, "reference")) < 1e-9


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", MODES)
def test_kernels_refuse_a_changed_model(name: str, mode: str) -> None:
    model, x = changed(CHANGES[name])
    with pytest.raises(
        InputError, match=r"impl 'triton' cannot run here: .*impl='(packed|reference)'"
    ):
        model(x, mode, impl="triton", **MODES[mode])


@every_change
@pytest.mark.parametrize("mode", MODES)
def test_generation_of_a_changed_model_is_that_without_a_cache(change: Change, mode: str) -> None:
    """Greedy tokens of prompts of two lengths, also where a step was captured before the change."""
    model = random_model(layers=3).to(DEVICE)
    prompts = [[1, 2, 3], [4]]
    for _ in range(3 if DEVICE == "cuda" else 1):
        entp.generate(model, prompts, 4, mode)
    change.apply(model)
    model.to(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)
        got = entp.generate(model, prompts, 8, mode)
    assert got == entp.generate(model, prompts, 8, mode, cache=False)


MIXING = {"hook that mixes rows": {}, "module that mixes rows": {"position_embedding": "rotary"}}


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm", "refresh-2"])
@pytest.mark.parametrize("name", MIXING)
def test_a_prompt_of_one_token_tells_a_module_that_mixes_rows(name: str, mode: str) -> None:
    model = random_model(layers=3, **MIXING[name]).to(DEVICE)
    CHANGES[name].apply(model)
    with pytest.warns(EngineWarning, match="packed is off by"):
        got = entp.generate(model, [[3]], 12, mode)
    assert got == entp.generate(model, [[3]], 12, mode, cache=False)


@pytest.mark.parametrize("inputs", [{}, {"input_dim": 3}])
@pytest.mark.parametrize("name", MIXING)
def test_inputs_that_are_all_the_same_tell_a_module_that_mixes_rows(
    name: str, inputs: dict[str, Any]
) -> None:
    model = random_model(layers=3, position_embedding="rotary", **inputs).to(DEVICE)
    CHANGES[name].apply(model)
    x = random_inputs(model, 2, 6).to(DEVICE)
    with pytest.warns(EngineWarning, match="packed is off by"):
        model(torch.zeros_like(x))
    got = outputs_and_gradients(model, x, "entp", "auto")
    assert worst(got, outputs_and_gradients(model, x, "entp", "reference")) < 1e-9


def test_a_model_of_one_position_is_compared_on_one_token() -> None:
    model = random_model(layers=2, context_length=1).to(DEVICE)
    CHANGES["lora"].apply(model)
    assert model(random_inputs(model, 2, 1).to(DEVICE), impl="packed").shape == (2, 1, 11)


class ForgetsIds(nn.Module):
    """A model around another, whose forward pass reads no position ids; embed and project do."""

    def __init__(self, inner: entp.Transformer) -> None:
        super().__init__()
        self.inner, self.width, self.vocab = inner, inner.width, inner.vocab
        self.embed, self.stack, self.readout = inner.embed, inner.stack, inner.readout

    def encode(self, x: Tensor, position_ids: Tensor | None = None, **options: Any) -> Tensor:
        return self.inner.encode(x, None, **options)


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_position_ids_are_compared_although_a_call_without_them_was(position: Any) -> None:
    inner = random_model(layers=3, position_embedding=position).to(DEVICE)
    model, x = ForgetsIds(inner), random_inputs(inner, 2, 6).to(DEVICE)
    ids = torch.tensor([3, 1, 4, 1, 5, 9], device=DEVICE)
    entp.all_prefixes(model, x)
    with pytest.warns(EngineWarning, match="packed is off by"):
        got = entp.all_prefixes(model, x, position_ids=ids)
    assert worst([got], [entp.all_prefixes(model, x, position_ids=ids, impl="reference")]) < 1e-9


def test_each_change_changes_what_is_computed() -> None:
    """Otherwise the tests above could not fail."""
    same = {
        "backward hook that mixes rows",
        "frozen weights",
        "compiled block",
        "embedding with a largest norm",
        "gradient divided by frequency",
    }
    for name, change in CHANGES.items():
        model = random_model(layers=3)
        x = random_inputs(model, 2, 5)
        before = model(x, impl="reference")
        change.apply(model)
        moved = float((model(x, impl="reference") - before).detach().abs().max())
        assert (moved > 1e-4) != (name in same and moved == 0), name


# What auto says


def test_a_slower_implementation_is_announced_once() -> None:
    model = random_model().to(DEVICE)
    x = random_inputs(model, 2, 5).to(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)  # the usual one
    model.blocks[1].register_forward_hook(lambda _m, _i, out: 2 * out)
    with pytest.warns(EngineWarning, match="by the reference implementation.*block 1 has a hook"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def test_the_reason_names_the_module() -> None:
    model = random_model()
    model.blocks[1].fc = Lora(model.blocks[1].fc)  # type: ignore[arg-type]
    assert support_of(model).kernels == "blocks.1.fc is a Lora"
    assert choose("auto", "cpu", model).impl == "packed"
    model.blocks[0].register_forward_pre_hook(lambda *_: None)
    assert choose("packed", "cpu", random_model()).impl == "packed"
    with pytest.raises(InputError, match="block 0 has a hook"):
        choose("packed", "cpu", model)


@pytest.mark.filterwarnings("ignore")
class Unigram(torch.nn.Module):
    """A model that has no blocks, and sees the last token alone."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

    def stack(self) -> list[Any]:
        return []

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.tokens(x)

    def encode(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.tokens(x)

    def readout(self, h: Tensor) -> Tensor:
        return self.head(h)


@pytest.mark.filterwarnings("ignore::entp.errors.EngineWarning")
def test_a_model_without_blocks_runs_by_the_reference() -> None:
    model, x = Unigram(), torch.randint(16, (2, 5))
    torch.testing.assert_close(entp.all_prefixes(model, x), model.readout(model.encode(x)))


def test_layers_quantised_by_torch_run_by_the_reference() -> None:
    """Their scale is that of all rows together, so packed rows give other numbers: 0.1 of 5."""
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    model = quantize(random_model(layers=3).float().eval(), {nn.Linear}, dtype=torch.qint8)
    x = random_inputs(model, 2, 5)
    with torch.no_grad():
        assert torch.equal(model(x), model(x, impl="reference"))
        with pytest.raises(
            InputError, match=r"blocks\.0\.qkv is a torch\.ao\..*Linear, and packed is off by"
        ):
            model(x, impl="packed")


def test_dropout_is_refused_in_training_and_taken_in_evaluation() -> None:
    model = random_model()
    model.blocks[1].activation = nn.Sequential(nn.GELU("tanh"), nn.Dropout(0.5))
    x = random_inputs(model, 2, 5)
    model.train()
    with pytest.raises(
        InputError, match=r"blocks\.1\.activation\.1 is active dropout.*model\.eval\(\)"
    ):
        model(x, impl="packed")
    model.eval()
    torch.testing.assert_close(model(x, impl="packed"), model(x, impl="reference"))


def test_global_hooks_are_compared_and_keep_the_kernels_out() -> None:
    model = random_model()
    x = random_inputs(model, 2, 5)
    assert support_of(model).kernels is None
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _i, out: 2 * out if isinstance(module, nn.Linear) else None
    )
    try:
        assert support_of(model).kernels == "a global module hook is registered"
        torch.testing.assert_close(model(x, impl="packed"), model(x, impl="reference"))
    finally:
        handle.remove()
    assert support_of(model).kernels is None


def test_a_class_that_is_patched_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    x = random_inputs(model, 2, 5)
    model(x)
    monkeypatch.setattr(
        nn.Linear, "forward", lambda self, x: 2 * nn.functional.linear(x, self.weight, self.bias)
    )
    assert support_of(model).kernels == "blocks.0.qkv is a Linear with another forward"
    torch.testing.assert_close(model(x, impl="packed"), model(x, impl="reference"))
    monkeypatch.setattr(entp.Transformer, "encode", lambda self, x, ids=None: self.embed(x, ids))
    with pytest.raises(InputError, match="with another encode"):
        model(x, impl="packed")


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        (entp.model.blocks, "attend", "block 0's forward calls another attend"),
        (nn.functional, "scaled_dot_product_attention", "was replaced, and packed is off by"),
    ],
)
def test_another_attention_is_noticed(
    module: Any, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(layers=3).to(DEVICE)
    x = random_inputs(model, 2, 6).to(DEVICE)
    model(x)
    own = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: 0.5 * own(*args, **options))
    with pytest.warns(EngineWarning, match=reason):
        got = outputs_and_gradients(model, x, "entp", "auto")
    assert worst(got, outputs_and_gradients(model, x, "entp", "reference")) < 1e-9
    monkeypatch.undo()
    assert support_of(model).rows is None
    assert choose("auto", DEVICE, model).impl != "reference"


# The fingerprint


def test_the_fingerprint_follows_every_change_and_its_end() -> None:
    model = random_model()
    before = support_of(model)
    assert support_of(model) is before
    handle = model.blocks[0].fc.register_forward_hook(lambda *_: None)
    hooked = support_of(model)
    assert hooked is not before
    handle.remove()
    assert support_of(model) is before
    model.eval()
    assert support_of(model) is before  # nothing in it depends on training
    model.blocks[0].fc.weight = nn.Parameter(model.blocks[0].fc.weight.detach().clone())
    replaced = support_of(model)
    assert replaced is not before
    model.blocks[0].scale = 0.3
    assert support_of(model) is not replaced


def test_a_model_is_forgotten_with_its_last_reference() -> None:
    model = random_model()
    model(random_inputs(model, 1, 3))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_comparing_a_fingerprint_takes_about_a_microsecond_a_module() -> None:
    """0.24 us on an idle server, 1 to 1.5 on two busy shared cores."""
    with torch.device("meta"):
        model = entp.Transformer(
            entp.ModelConfig(vocab=64, context_length=64, **entp.SIZES["large"])
        )
    support_of(model)
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        support_of(model)
        best = min(best, time.perf_counter() - start)
    each = best / len(list(model.modules()))
    print(f"{each * 1e6:.2f} us a module")
    assert each < 3e-6


# entp.check


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, without kernels: they take most of the time of a check."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_check_finds_every_implementation_exact() -> None:
    report = entp.check(random_model(layers=3).to(DEVICE), length=3, batch=2)
    assert report.exact
    assert {(row.mode, row.implementation) for row in report.rows if row.outputs is not None} >= {
        ("entp", "packed"),
        ("entp", "triton"),
        ("decoder", "triton"),
        ("prefix-lm", "triton"),
        ("refresh-3", "packed"),
        ("refresh-3", "triton"),
    }
    assert len([row for row in report.rows if row.implementation.startswith("generation")]) == 4
    assert all(row.outputs is not None and row.outputs < 1e-12 for row in report.rows)
    assert "auto takes" in str(report)


@pytest.mark.usefixtures("no_interpreter")
def test_check_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.first_layer
    monkeypatch.setattr(packed, "first_layer", lambda *args: 1.001 * right(*args))
    report = entp.check(random_model(layers=3), length=5, batch=2)
    assert not report.exact
    found = {row.mode: row.verdict[:5] for row in report.rows if row.implementation == "packed"}
    assert found == {"entp": "WRONG", "refresh-3": "exact"}


@pytest.mark.usefixtures("no_interpreter")
def test_check_finds_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.first_layer

    def wrong(*args: Any) -> Tensor:
        out = right(*args)
        return out.detach() + 0.999 * (out - out.detach())

    monkeypatch.setattr(packed, "first_layer", wrong)
    rows = entp.check(random_model(layers=3), length=5).rows
    row = next(row for row in rows if row.implementation == "packed")
    assert row.outputs is not None
    assert row.outputs < 1e-12
    assert row.verdict.startswith("WRONG")


def test_check_says_why_an_implementation_is_not_used() -> None:
    model = random_model(layers=3, position_embedding="relative").to(DEVICE)
    triton = [
        row for row in entp.check(model, length=5, batch=2).rows if row.implementation == "triton"
    ]
    assert {row.verdict for row in triton} == {"not used: the model has a bias on attention scores"}


def test_check_says_what_auto_takes_after_the_comparison() -> None:
    model, _ = changed(CHANGES["module that mixes rows"])
    report = entp.check(model, length=5, batch=2)
    assert "auto takes reference" in str(report)
    assert report.exact
    assert not report.attention  # under a causal mask such a module still mixes tokens


def attention_of(model: Any, **options: Any) -> dict[str, str]:
    """What `entp.check` says of attention in each mode."""
    rows = entp.check(model, **options).rows
    return {row.mode: row.verdict for row in rows if row.implementation == "attention"}


@pytest.mark.parametrize("config", [{}, {"layers": 1}, {"layers": 3, "causal_layers": 1}])
def test_check_says_what_tokens_see(config: dict[str, Any]) -> None:
    model = random_model(**config)
    assert attention_of(model) == SEES
    assert entp.check(model).attention
    assert attention_of(model, length=3) == {}  # too short to tell


def test_check_finds_a_mask_that_stays_on_and_one_that_is_off() -> None:
    class Causal(entp.Transformer):
        def encode(self, x: Tensor, position_ids: Tensor | None = None, **mask: Any) -> Tensor:
            return super().encode(x, position_ids, causal=True)

    class Full(entp.Transformer):
        def encode(self, x: Tensor, position_ids: Tensor | None = None, **mask: Any) -> Tensor:
            return super().encode(x, position_ids)

    for kind, wrong in ((Causal, {"entp", "prefix-lm"}), (Full, {"decoder", "prefix-lm"})):
        model = random_model()
        model.__class__ = kind
        found = attention_of(model)
        assert {mode for mode, verdict in found.items() if verdict.startswith(UNLIKE)} == wrong
        assert not entp.check(model).attention


def test_attention_under_dropout_is_not_judged() -> None:
    model = random_model()
    model.blocks[0].out = nn.Sequential(model.blocks[0].out, nn.Dropout(0.5))
    told = "not told: it draws numbers, as dropout does"
    assert set(attention_of(model).values()) == {told}
    assert attention_of(model.eval()) == SEES


def test_attention_that_adds_nothing_is_not_judged() -> None:
    model = random_model()
    with torch.no_grad():
        for block in model.blocks:
            block.proj.weight.zero_()
    assert set(attention_of(model).values()) == {"not told: attention adds nothing to a token yet"}


def test_check_of_a_model_without_masks() -> None:
    class Plain(entp.Transformer):
        def encode(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().encode(x, position_ids)

    report = entp.check(
        Plain(entp.ModelConfig(vocab=11, context_length=9, layers=2, heads=2, width=8)).double(),
        length=5,
    )
    assert report.exact
    told = {row.verdict for row in report.rows if row.mode == "decoder"}
    assert told == {
        "not used: mode decoder needs a model whose encode takes mask= and causal=, and Plain's "
        "does not"
    }


def test_a_compiled_model_runs_in_every_mode() -> None:
    model = random_model()
    x = random_inputs(model, 2, 5)
    whole: Any = torch.compile(model, backend="eager")
    for mode, options in MODES.items():
        torch.testing.assert_close(
            entp.predict(whole, x, mode, **options), model(x, mode, impl="reference", **options)
        )


def test_registered_classes_of_ones_own_are_packed_and_not_read() -> None:
    class Mine(entp.Transformer):
        pass

    fingerprint.register(Mine, "encode", "embed", "stack", "attention_bias", "readout")
    model = Mine(entp.ModelConfig(vocab=11, context_length=9, layers=2, heads=2, width=8))
    assert support_of(model).kernels == "the kernels read the weights of entp.Transformer only"
    assert choose("packed", "cpu", model).impl == "packed"
    x = torch.randint(11, (2, 5))
    torch.testing.assert_close(model(x, impl="packed"), model(x, impl="reference"))


@pytest.mark.usefixtures("no_interpreter")
def test_check_leaves_the_model_as_it_is() -> None:
    model = random_model()
    model(random_inputs(model, 1, 3)).sum().backward()
    before = [
        (p.detach().clone(), p.grad.clone()) for p in model.parameters() if p.grad is not None
    ]
    state = torch.random.get_rng_state()
    entp.check(model, length=4)
    after = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    assert all(
        torch.equal(a, b)
        for one, two in zip(before, after, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    assert torch.equal(state, torch.random.get_rng_state())
