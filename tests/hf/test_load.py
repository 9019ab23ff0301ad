"""Pretrained models of HuggingFace in the three modes, against HuggingFace's own forward pass."""

from __future__ import annotations

import copy
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_networks import (
    CLASSES,
    FAMILIES,
    ROUNDS,
    SHIFTED,
    apart,
    config_of,
    full_attention,
    gradients,
    one_forward_per_prefix,
    worst,
)
from small_networks import network_of as small_network_of
from torch import Tensor, nn

import entp
import entp.hf
from entp.engine.choice import choose
from entp.engine.support import support_of
from entp.errors import EngineWarning, InputError

transformers = pytest.importorskip("transformers", reason="needs the transformers library")

LORA = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "bert": ["query", "key", "value", "dense"],
    "mpnet": ["q", "k", "v", "o", "dense"],
    "modernbert": ["Wqkv", "Wo", "Wi"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
TIME = 7
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in this file may open a connection."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def network_of(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A network of a hundred tokens."""
    return small_network_of(family, **{"vocab_size": 100, **changes}).to(dtype)


def tokens(batch: int = 2, time: int = TIME) -> Tensor:
    """Without the ids 0 and 1, one of which is each family's padding."""
    return torch.randint(2, 100, (batch, time), generator=torch.Generator().manual_seed(1))


def saved(network: Any, folder: Path) -> Path:
    network.save_pretrained(folder)
    return folder


def verdicts(report: Any, implementation: str) -> list[str]:
    return [row.verdict for row in report.rows if implementation in row.implementation]


# The three modes


@pytest.mark.parametrize("family", CLASSES)
def test_every_prefix_equals_one_forward_of_huggingface(family: str, tmp_path: Path) -> None:
    network, x = network_of(family), tokens()
    model = entp.hf.load(saved(network, tmp_path), dtype=torch.float64)
    want = one_forward_per_prefix(family, network, x)
    got = entp.all_prefixes(model, x, impl="packed")
    assert apart(got, want) < 1e-12
    assert apart(got, model(x, mode="decoder")) > 1e-2
    bound = 1e-6 if family in ROUNDS else 1e-12
    assert worst(gradients(model.network, got), gradients(network, want)) < bound


@pytest.mark.parametrize("family", ["llama", "qwen2", "modernbert"])
def test_packed_gradients_are_exact_where_huggingface_rounds(family: str) -> None:
    model, x = entp.hf.wrap(network_of(family)), tokens()
    want = gradients(model, entp.all_prefixes(model, x, impl="reference"))
    assert worst(gradients(model, entp.all_prefixes(model, x, impl="packed")), want) < 1e-12


@pytest.mark.parametrize("family", ["llama", "modernbert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_model_is_huggingfaces_in_other_types(family: str, dtype: torch.dtype) -> None:
    network = network_of(family, dtype)
    plain, x = copy.deepcopy(network), tokens()
    model = entp.hf.wrap(network)
    want = plain(x).logits
    got = model.network(x).logits
    assert torch.equal(got, want)
    ours, theirs = gradients(network, got), gradients(plain, want)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_decoder_mode_is_huggingfaces_own(
    family: str, dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    network, x = network_of(family, dtype), tokens()
    model = entp.hf.load(saved(network, tmp_path), dtype=dtype)
    assert apart(model(x, mode="decoder"), network(input_ids=x).logits) < bound


def test_decoder_mode_of_bert_is_huggingfaces_decoder(tmp_path: Path) -> None:
    folder, x = saved(network_of("bert"), tmp_path), tokens()
    model = entp.hf.load(folder, dtype=torch.float64)
    decoder = transformers.BertLMHeadModel.from_pretrained(
        folder, is_decoder=True, dtype=torch.float64
    )
    assert apart(model(x, mode="decoder"), decoder(input_ids=x).logits) < 1e-12
    # A decoder's weights are an encoder's too.
    assert apart(entp.hf.wrap(decoder)(x), model(x)) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_lm_sees_the_whole_prefix_and_nothing_ahead(family: str) -> None:
    model, x = entp.hf.wrap(network_of(family)), tokens()
    got = model(x, mode="prefix-lm", prefix=3)
    within = full_attention(family, model.network, x[:, :3])
    assert apart(got[:, :3], within) < 1e-12
    other = x.clone()
    other[:, -1] = (x[:, -1] - 2 + 1) % 98 + 2
    assert apart(model(other, mode="prefix-lm", prefix=3)[:, :-1], got[:, :-1]) < 1e-12
    assert apart(got[:, 3], model(x, mode="decoder")[:, 3]) > 1e-3


def test_prefix_lm_of_gpt2_is_huggingfaces_under_that_mask() -> None:
    model, x = entp.hf.wrap(network_of("gpt2")), tokens()
    mask = torch.ones(TIME, TIME, dtype=torch.bool).tril()
    mask[:3, :3] = True
    want = model.network(x, attention_mask=mask.expand(2, 1, -1, -1), use_cache=False).logits
    assert apart(model(x, mode="prefix-lm", prefix=3), want) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_check_finds_packed_and_caches_exact_and_kernels_declined(family: str) -> None:
    report = entp.check(entp.hf.wrap(network_of(family)), length=6, batch=2)
    assert verdicts(report, "packed") == ["exact"] * 2
    assert verdicts(report, "generation") == ["exact"] * 4
    kernels = verdicts(report, "triton")
    assert len(kernels) == 4
    assert all(v.startswith("not used: the model is a ") for v in kernels)


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "llama"])
def test_positions_of_ones_own(family: str) -> None:
    ids = torch.tensor([[0, 2, 2, 5, 1, 9], [1, 0, 3, 3, 8, 2]])
    model = entp.hf.wrap(network_of(family))
    report = entp.check(model, x=tokens(2, 6), position_ids=ids)
    assert report.exact
    assert verdicts(report, "packed") == ["exact"] * 2
    x = tokens(2, 6)
    assert apart(model(x, position_ids=ids), model(x)) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_beyond_the_model_are_refused(family: str) -> None:
    model = entp.hf.wrap(network_of(family))
    limit = 16 if family in SHIFTED else 18
    assert model(tokens(1, limit)).shape == (1, limit, 100)
    with pytest.raises(InputError, match=f"do not fit the model's {limit} positions"):
        model(tokens(1, limit + 1))
    with pytest.raises(InputError, match="the vocabulary is 0 to 99"):
        model(torch.tensor([[5, 100]]))


def test_generation_in_mode_decoder_is_huggingfaces() -> None:
    model = entp.hf.wrap(network_of("gpt2", eos_token_id=None))
    prompt = tokens(1, 4)
    want = model.network.generate(
        prompt, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(prompt)
    )
    assert torch.equal(entp.generate(model, prompt, 8, mode="decoder"), want)
    in_entp = prompt
    for _ in range(8):
        logits = full_attention("gpt2", model.network, in_entp)[:, -1:]
        in_entp = torch.cat([in_entp, logits.argmax(-1)], dim=1)
    assert torch.equal(entp.generate(model, prompt, 8), in_entp)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_runs_packed(family: str) -> None:
    model, x = entp.hf.wrap(network_of(family, torch.float32)), tokens()
    want = entp.all_prefixes(model, x, impl="reference")
    with torch.autocast("cpu", torch.bfloat16):
        got = entp.all_prefixes(model, x, impl="packed")
    assert apart(got.float(), want) < 0.05


# Vocabulary


@pytest.mark.parametrize(
    ("family", "head"),
    [(family, True) for family in ("gpt2", "bert", "roberta", "mpnet", "modernbert", "qwen2")]
    + [("bert", False)],
)
def test_fewer_tokens_have_the_same_logits(family: str, head: bool, tmp_path: Path) -> None:
    kept, x = [7, 30, 5, 99, 60], torch.tensor([[3, 1, 4, 1, 0]])
    network = network_of(family)
    model = entp.hf.wrap(network if head else network.base_model)
    want = model(torch.tensor(kept)[x])[..., kept]
    model.keep_tokens(kept)
    assert model.vocab == 5
    assert apart(model(x), want) < 1e-12
    again = entp.hf.load(saved(model.network, tmp_path), dtype=torch.float64)
    assert apart(again(x), want) < 1e-12
    trained = gradients(model, model(x))
    assert any(g.shape == (5, 32) and g.abs().min() > 0 for g in trained.values())


# LoRA


def lora_on(network: Any, family: str) -> Any:
    """peft's model around a network, with adapters that change its outputs."""
    peft = pytest.importorskip("peft", reason="needs the peft library")
    config = peft.LoraConfig(r=2, target_modules=LORA[family], fan_in_fan_out=family == "gpt2")
    changed = peft.get_peft_model(network, config).eval()
    for name, p in changed.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.25)
    return changed


@pytest.mark.parametrize("family", LORA)
def test_lora_is_exact_and_not_dropped(family: str) -> None:
    x, plain = tokens(), network_of(family)
    without = one_forward_per_prefix(family, plain, x)
    network = lora_on(network_of(family), family)
    model = entp.hf.wrap(network)
    want = one_forward_per_prefix(family, network, x)
    got = entp.all_prefixes(model, x, impl="packed")
    assert apart(want, without) > 1e-2
    assert apart(got, want) < 1e-12
    found = gradients(network, got)
    assert found
    assert all("lora" in name for name in found)
    assert worst(found, gradients(network, want)) < 1e-12
    report = entp.check(model, length=6, batch=2)
    assert verdicts(report, "packed") == ["exact"] * 2
    assert all(v.startswith("not used: ") for v in verdicts(report, "triton"))


def test_lora_added_after_loading_counts() -> None:
    model, x = entp.hf.wrap(network_of("gpt2")), tokens()
    before = entp.all_prefixes(model, x)
    network = lora_on(model.network, "gpt2")
    after = entp.all_prefixes(model, x)
    assert apart(after, before) > 1e-2
    assert apart(after, one_forward_per_prefix("gpt2", network, x)) < 1e-12
    with network.disable_adapter():
        assert apart(entp.all_prefixes(model, x), before) < 1e-12


def test_lora_around_a_loaded_model() -> None:
    """peft takes the model of `load` too: its names are found through peft's."""
    model, x = entp.hf.wrap(network_of("llama")), tokens()
    before = entp.all_prefixes(model, x)
    around = lora_on(model, "llama")
    got = entp.all_prefixes(around, x, impl="packed")
    assert apart(got, before) > 1e-2
    assert apart(got, one_forward_per_prefix("llama", model.network, x)) < 1e-12
    assert entp.check(around, length=6, batch=2).exact
    merged = around.merge_and_unload()
    assert apart(entp.all_prefixes(merged, x), got) < 1e-6


def test_adapters_outside_of_layers_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="needs the peft library")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(InputError, match="PROMPT_TUNING adds tokens or keys outside"):
        entp.hf.wrap(peft.get_peft_model(network_of("gpt2"), config))


# Never silently wrong


def test_hook_on_a_layer_leaves_only_the_reference() -> None:
    model, x = entp.hf.wrap(network_of("gpt2")), tokens()
    before = entp.all_prefixes(model, x)
    model.network.transformer.h[0].register_forward_hook(lambda *call: call[-1] * 1.1)
    with pytest.raises(InputError, match="'packed' is not exact for this model"):
        entp.all_prefixes(model, x, impl="packed")
    with pytest.warns(EngineWarning, match="runs by the reference"):
        got = entp.all_prefixes(model, x)
    assert apart(got, before) > 1e-3
    assert apart(got, one_forward_per_prefix("gpt2", model.network, x)) < 1e-12


@pytest.mark.parametrize("family", ["gpt2", "bert", "modernbert", "llama"])
def test_dropout_in_training_leaves_only_the_reference(family: str, tmp_path: Path) -> None:
    rates = {"gpt2": "attn_pdrop", "bert": "hidden_dropout_prob"}
    changes = {rates.get(family, "attention_dropout"): 0.1}
    folder = saved(network_of(family, **changes), tmp_path)
    assert support_of(entp.hf.load(folder).train()).rows is None
    model = entp.hf.load(folder, dropout=True).train()
    with pytest.raises(InputError, match="active dropout"):
        choose("packed", "cpu", model)
    assert choose("packed", "cpu", model.eval()).impl == "packed"


@pytest.mark.parametrize("family", ["gpt2", "modernbert", "llama"])
def test_eager_attention_takes_the_same_masks(family: str) -> None:
    model, x = entp.hf.wrap(network_of(family, torch.float32)), tokens()
    modes: list[dict[str, Any]] = [
        {"mode": "entp", "impl": "reference"},
        {"mode": "decoder"},
        {"mode": "prefix-lm", "prefix": 3},
    ]
    want = [model(x, **mode) for mode in modes]
    model.network.set_attn_implementation("eager")
    assert all(apart(model(x, **m), w) < 1e-5 for m, w in zip(modes, want, strict=True))
    model.network.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="takes no mask of full attention"):
        model(x, mode="decoder")


WHOLE = {"rope_type": "default", "partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    "changes", [{"use_parallel_residual": False}, {"rope_parameters": {**WHOLE, "rope_theta": 1e4}}]
)
def test_other_layers_of_gpt_neox_are_exact(changes: dict[str, Any]) -> None:
    network = network_of("gpt_neox", **changes).double()
    x = torch.randint(0, 10, (2, 7), generator=torch.Generator().manual_seed(0))
    want = one_forward_per_prefix("gpt_neox", network, x)
    assert apart(entp.hf.wrap(network)(x, "entp"), want) < 1e-12
    usual = network_of("gpt_neox").double()
    usual.load_state_dict(network.state_dict())
    assert apart(one_forward_per_prefix("gpt_neox", usual, x), want) > 1e-3


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REFUSED = [
    ("llama", {"rope_parameters": DYNAMIC}),
    ("modernbert", {"rope_parameters": {"full_attention": DYNAMIC}}),
    ("mistral", {"sliding_window": 8}),
    ("bert", {"is_decoder": True, "add_cross_attention": True}),
]


@pytest.mark.parametrize(("family", "changes"), REFUSED)
def test_what_is_no_full_attention_is_refused(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config_of(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"depend on the length|sliding|cross-attention"):
        entp.hf.load(tmp_path)


@pytest.mark.parametrize("kind", ["modernbert-decoder", "gemma"])
def test_other_families_are_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    said = rf"'{kind}' cannot be used: no adapter knows its layers.*gpt2, bert.*gpt_neox, llama"
    with pytest.raises(InputError, match=said):
        entp.hf.load(tmp_path)


# Files


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "modernbert", "llama"])
def test_model_without_a_head_reads_out_by_its_embedding(family: str, tmp_path: Path) -> None:
    base, x = network_of(family).base_model, tokens()
    model = entp.hf.load(saved(base, tmp_path), dtype=torch.float64)
    table = base.get_input_embeddings().weight
    want = entp.hf.wrap(base).encode(x)[:, -1] @ table.T
    assert apart(entp.all_prefixes(model, x)[:, -1], want) < 1e-12
    assert len(list(model.parameters())) == len(list(model.network.parameters()))


def test_half_a_head_is_refused(tmp_path: Path) -> None:
    saved(network_of("bert"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["cls.predictions.transform.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"have no cls\.predictions\.transform\.dense\.weight"):
        entp.hf.load(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    saved(network_of("gpt2"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"have no transformer\.h\.1\.mlp\.c_fc\.weight"):
        entp.hf.load(tmp_path)


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    saved(network_of("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(InputError, match="mlp"):
        entp.hf.load(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    network = network_of("gpt2")
    network.config.save_pretrained(tmp_path)
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"model\.safetensors"):
        entp.hf.load(tmp_path)


def test_damaged_files_are_an_error_that_names_the_folder(tmp_path: Path) -> None:
    saved(network_of("gpt2"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=re.escape(f"{tmp_path} cannot be loaded")):
        entp.hf.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=re.escape(f"{tmp_path} cannot be loaded")):
        entp.hf.load(tmp_path)


def test_torn_weights_are_told_in_whole_sentences(tmp_path: Path) -> None:
    file = saved(network_of("gpt2"), tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        InputError, match=r"cannot be loaded: .*[a-z]\. A folder needs config\.json"
    ):
        entp.hf.load(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Meta-Llama-3-8B"])
def test_names_are_not_downloaded_unasked(name: str) -> None:
    with pytest.raises(InputError, match=rf"'{name}' is no folder.*download=True"):
        entp.hf.load(name)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder"):
        entp.hf.load(tmp_path / "nothing", download=True)
    with pytest.raises(InputError, match=r"has no config\.json"):
        entp.hf.load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="an adapter of peft, without the model"):
        entp.hf.load(tmp_path)


def test_what_is_no_model_of_huggingface_is_refused() -> None:
    with pytest.raises(InputError, match="a Linear is no HuggingFace model"):
        entp.hf.wrap(nn.Linear(2, 2))


def test_weights_are_shared_and_saved_by_huggingface(tmp_path: Path) -> None:
    model, x = entp.hf.wrap(network_of("llama")), tokens()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    want = model(x)
    again = entp.hf.load(saved(model.network, tmp_path), dtype=torch.float64)
    assert torch.equal(again(x), want)


def test_missing_library_is_named() -> None:
    code = (
        "import sys\nsys.modules['transformers'] = None\nimport entp.hf\n"
        "try:\n    entp.hf.load('.')\nexcept entp.InputError as error:\n    print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'entp[hf]'" in ran.stdout


def test_example_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="needs the peft library")
    text = (Path(__file__).parents[2] / "docs" / "pretrained.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
