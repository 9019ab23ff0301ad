"""ModernBERT's local layers, beyond what all families are tested for (test_load.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import (
    apart,
    begin,
    config_of,
    folder_of,
    full_attention,
    gradients,
    network_of,
    one_forward_per_prefix,
    worst,
)
from small_runs import TASK
from torch import Tensor

import entp
import entp.hf
from entp.config import PretrainedConfig
from entp.config.json import config_hash
from entp.errors import InputError

transformers = pytest.importorskip("transformers", reason="needs the transformers library")
from entp.hf.building import build, describe  # noqa: E402

TIME, WINDOW = 18, 2
GLOBAL, LOCAL = "full_attention", "sliding_attention"
LAYERS = [
    [GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL],
    [LOCAL, GLOBAL, LOCAL, GLOBAL],
    [LOCAL, LOCAL],
    [GLOBAL, GLOBAL],
    [LOCAL],
]
pytestmark = pytest.mark.usefixtures("quiet")


def modernbert(kinds: list[str] | None = None, **changes: Any) -> Any:
    """A network in float64 with layers of these kinds; local ones see two tokens to each side."""
    kinds = kinds or LAYERS[0]
    shape = {"num_hidden_layers": len(kinds), "layer_types": kinds, "vocab_size": 100}
    return network_of("modernbert", **{**shape, **changes}).double()


def tokens(batch: int = 2, time: int = TIME) -> Tensor:
    """Without the padding token, 0, whose embedding HuggingFace does not train."""
    return torch.randint(1, 100, (batch, time), generator=torch.Generator().manual_seed(1))


def sees(mode: str, prefix: int, near: bool) -> Tensor:
    """Which keys a query sees, (1, 1, TIME, TIME), one by one."""
    rows = [
        [
            (key <= query or (mode == "prefix-lm" and max(query, key) < prefix))
            and (not near or abs(query - key) <= WINDOW)
            for key in range(TIME)
        ]
        for query in range(TIME)
    ]
    return torch.tensor(rows)[None, None]


@pytest.mark.parametrize("kinds", LAYERS)
def test_local_layers_equal_one_forward_of_huggingface_per_prefix(kinds: list[str]) -> None:
    """Sequences are longer than what all local layers together see."""
    plain, x = modernbert(kinds), tokens()
    want = one_forward_per_prefix("modernbert", plain, x)
    model = entp.hf.wrap(modernbert(kinds))
    got = entp.all_prefixes(model, x, impl="packed")
    assert apart(got, want) < 1e-12
    found = gradients(model.network, got)
    assert worst(found, gradients(plain, want)) < 1e-6  # HuggingFace rounds these to float32
    again = entp.all_prefixes(model, x, impl="reference")
    assert apart(again, want) < 1e-12
    assert worst(found, gradients(model.network, again)) < 1e-12


@pytest.mark.parametrize("mode", ["decoder", "prefix-lm"])
@pytest.mark.parametrize("kinds", LAYERS[:3])
def test_other_modes_are_huggingfaces_under_their_masks(mode: str, kinds: list[str]) -> None:
    network, x = modernbert(kinds), tokens()
    masks = {GLOBAL: sees(mode, 5, near=False), LOCAL: sees(mode, 5, near=True)}
    want = network(input_ids=x, attention_mask=masks).logits
    model = entp.hf.wrap(network)
    prefix = 5 if mode == "prefix-lm" else None
    assert apart(model(x, mode=mode, prefix=prefix), want) < 1e-12


@pytest.mark.parametrize("kinds", LAYERS)
def test_check_finds_packed_and_caches_exact(kinds: list[str]) -> None:
    model = entp.hf.wrap(modernbert(kinds))
    report = entp.check(model, length=TIME, batch=2)
    compared = [row for row in report.rows if row.implementation not in ("triton", "attention")]
    assert [row.verdict for row in compared] == ["exact"] * 6
    assert report.attention
    ids = torch.tensor([[0, 2, 2, 5, 1, 9, 17, 3], [1, 0, 3, 3, 8, 2, 12, 10]])
    assert entp.check(model, x=tokens(2, 8), position_ids=ids).exact


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_generation_goes_beyond_the_window(mode: str) -> None:
    """A short prompt is within the window of every layer, what follows it is not."""
    model = entp.hf.wrap(modernbert())
    plain = modernbert()
    found = prompt = tokens(1, 2)
    masks = {GLOBAL: sees("decoder", 0, near=False), LOCAL: sees("decoder", 0, near=True)}
    for time in range(2, TIME):
        if mode == "entp":
            logits = full_attention("modernbert", plain, found)
        else:
            own = {kind: mask[..., :time, :time] for kind, mask in masks.items()}
            logits = plain(input_ids=found, attention_mask=own).logits
        found = torch.cat([found, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(entp.generate(model, prompt, TIME - 2, mode=mode), found)
    assert torch.equal(entp.generate(model, prompt, TIME - 2, mode=mode, cache=False), found)


def test_lengths_and_token_budget_change_nothing() -> None:
    model, x = entp.hf.wrap(modernbert()), tokens()
    want = entp.all_prefixes(model, x)
    few = entp.all_prefixes(model, x, token_budget=40)
    assert apart(few, want) < 1e-12
    some = entp.all_prefixes(model, x, lengths=[TIME, 11])
    assert apart(some[0], want[0]) < 1e-12
    assert apart(some[1, :11], want[1, :11]) < 1e-12


@pytest.mark.parametrize("kind", [GLOBAL, LOCAL])
def test_token_beyond_the_windows_of_local_layers_is_not_seen(kind: str) -> None:
    """Two layers see four tokens back."""
    model, x = entp.hf.wrap(modernbert([kind, kind])), tokens(1)
    other = x.clone()
    other[0, 0] = x[0, 0] % 98 + 1
    for impl in ("packed", "reference"):
        change = (entp.all_prefixes(model, x, impl=impl) - model(other, impl=impl))[0].detach()
        changed = (change.abs().amax(-1) > 1e-9).tolist()
        assert changed == [kind == GLOBAL or t <= 2 * WINDOW for t in range(TIME)]


def test_layers_of_each_kind_have_angles_of_their_own() -> None:
    def turned(theta: float) -> Tensor:
        angles = {"rope_type": "default", "rope_theta": theta}
        same = {"rope_type": "default", "rope_theta": 10.0}
        network = modernbert(rope_parameters={GLOBAL: same, LOCAL: angles})
        want = one_forward_per_prefix("modernbert", network, tokens())
        got = entp.all_prefixes(entp.hf.wrap(network), tokens(), impl="packed")
        assert apart(got, want) < 1e-12
        return got

    assert apart(turned(10.0), turned(50.0)) > 1e-3


def test_eager_attention_has_the_same_windows() -> None:
    """In float32: HuggingFace's eager attention computes its softmax in float32."""
    model, x = entp.hf.wrap(modernbert().float()), tokens()
    want = [model(x, impl="reference"), model(x, mode="decoder")]
    model.network.set_attn_implementation("eager")
    got = [model(x, impl="reference"), model(x, mode="decoder")]
    assert all(apart(one, two) < 1e-5 for one, two in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_mask_is_refused(kind: str) -> None:
    model = entp.hf.wrap(modernbert())
    model.network.config._attn_implementation = kind
    for how in ({"impl": "packed"}, {"impl": "reference"}, {"mode": "decoder"}):
        with pytest.raises(InputError, match=rf"'{kind}', which takes no mask.*'sdpa'"):
            model(tokens(), **how)


def test_loaded_model_has_attention_that_takes_masks(tmp_path: Path) -> None:
    assert entp.hf.load(folder_of("modernbert", tmp_path)).config._attn_implementation == "sdpa"


OLD = {
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 40.0,
    "local_rope_theta": 20.0,
    "local_attention": 4,
    "reference_compile": True,
    "position_embedding_type": "absolute",
}


def test_configuration_with_the_hubs_older_names(tmp_path: Path) -> None:
    """Folders on the hub say every how many layers one is global, and have one theta each."""
    kinds = [GLOBAL, LOCAL, GLOBAL]
    angles = {GLOBAL: 40.0, LOCAL: 20.0}
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in angles.items()}
    network = modernbert(kinds, rope_parameters=rope)
    network.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps({**config, **OLD}))
    model, x = entp.hf.load(tmp_path, dtype=torch.float64), tokens()
    assert apart(model(x), one_forward_per_prefix("modernbert", network, x)) < 1e-12
    kept = describe(model.config)
    assert kept["layer_types"] == kinds
    assert kept["rope_parameters"] == rope
    assert kept == describe(network.config)


@pytest.mark.parametrize("kinds", LAYERS[:4])
def test_built_model_has_the_layers_of_its_configuration(kinds: list[str]) -> None:
    network, x = modernbert(kinds), tokens()
    built = build(PretrainedConfig(describe(network.config))).double()
    built.network.load_state_dict(network.state_dict())
    assert apart(built(x), one_forward_per_prefix("modernbert", network, x)) < 1e-12


@pytest.mark.parametrize("change", [{"layer_types": [LOCAL, GLOBAL]}, {"local_attention": 6}])
def test_kinds_of_layers_and_their_window_decide_the_identity(
    change: dict[str, Any], tmp_path: Path
) -> None:
    run, _ = begin(folder_of("modernbert", tmp_path))
    assert isinstance(run.model, PretrainedConfig)
    other = replace(run.model, huggingface={**run.model.huggingface, **change})
    assert config_hash(replace(run, model=other)) != config_hash(run)
    assert (run.model.position_embedding, run.model.activation) == ("rotary", "swiglu")


@pytest.mark.parametrize(("padding", "after"), [(99, 3), (50, None), (None, None)])
def test_padding_token_follows_the_tokens_that_are_kept(
    padding: int | None, after: int | None, tmp_path: Path
) -> None:
    """The published models' padding token is one of the last."""
    kept, x = [7, 30, 5, 99, 60], torch.tensor([[3, 1, 4, 1, 0]])
    model = entp.hf.wrap(modernbert(pad_token_id=padding))
    want = model(torch.tensor(kept)[x])[..., kept]
    model.keep_tokens(kept)
    assert model.config.pad_token_id == after
    model.network.save_pretrained(tmp_path)
    assert apart(entp.hf.load(tmp_path, dtype=torch.float64)(x), want) < 1e-12


def test_run_begins_with_a_folder_whose_padding_token_is_the_last(tmp_path: Path) -> None:
    folder = folder_of("modernbert", tmp_path, vocab_size=40, pad_token_id=39)
    run, init = begin(folder)
    assert (run.model.vocab, run.model.context_length) == (10, 18)
    model = build(init.model)  # type: ignore[arg-type]
    model.load_state_dict(init.weights)
    x = torch.from_numpy(TASK.batch(0, "test", 0, 2).x)
    torch.testing.assert_close(model(x), entp.hf.load(folder)(x)[..., :10])


@pytest.mark.parametrize("name", ["embedding_dropout", "mlp_dropout", "attention_dropout"])
def test_dropout_is_off_unless_asked_for(name: str, tmp_path: Path) -> None:
    folder, x = folder_of("modernbert", tmp_path, **{name: 0.5}), tokens(1, 4) % 10
    still = entp.hf.load(folder).train()
    assert torch.equal(still(x), still(x))
    active = entp.hf.load(folder, dropout=True).train()
    with pytest.raises(InputError, match="is active dropout"):
        active(x, impl="packed")


def test_dynamic_angles_of_one_kind_of_layers_are_refused(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config_of("modernbert", rope_parameters={LOCAL: dynamic}).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"angles \(dynamic\) depend on the length"):
        entp.hf.load(tmp_path)
