"""Models and tokenizers from GGUF files: in memory, and as folders in HuggingFace's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

import entp.hf
from entp.cli.llm import llm_command
from entp.cli.main import main
from entp.errors import InputError
from entp.hf.beginning import read_pretrained
from entp.llm.counting_text import CountText
from entp.tasks.counting import Count3

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def llama() -> Any:
    """2 layers, width 32, 4 heads that share 2 keys."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=len(vocabulary()),
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    ).eval()


def vocabulary() -> list[str]:
    """Three special tokens, every byte, and one merge."""
    return [*WORDS, *sorted(ByteLevel.alphabet()), "12"]


def grouped(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order of GGUF's rotary positions."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    weights, config = model.state_dict(), model.config
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    for number in range(config.num_hidden_layers):
        for theirs, ours in LAYER.items():
            weight = weights[f"model.layers.{number}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                heads = config.num_attention_heads
                weight = grouped(weight, heads if theirs == "attn_q" else 2)
            yield f"blk.{number}.{theirs}.weight", weight


def write_gguf(path: Path, model: Any, kind: str = "F32") -> Path:
    """The model, its matrices in this type, with a byte-level tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    words = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * len(WORDS) + [1] * (len(words) - len(WORDS)))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in tensors(model):
        data = weight.detach().numpy().astype(np.float32)
        if kind == "F32" or data.ndim == 1:
            writer.add_tensor(name, data)
        else:
            quantised = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("mode", ["decoder", "entp"])
def test_loaded_file_is_the_model(llama: Any, tmp_path: Path, mode: str) -> None:
    model = entp.hf.load(write_gguf(tmp_path / "small.gguf", llama))
    x = torch.randint(model.vocab, (2, 9))
    assert (model(x, mode) - entp.hf.wrap(llama)(x, mode)).abs().max() < 1e-6
    if mode == "decoder":
        assert (model(x, mode) - llama(x).logits).abs().max() < 1e-5


def test_quantised_weights_are_dequantised(llama: Any, tmp_path: Path) -> None:
    model = entp.hf.load(write_gguf(tmp_path / "small.gguf", llama, "Q8_0"))
    for name, weight in llama.state_dict().items():
        found = model.network.state_dict()[name]
        assert found.dtype == torch.float32
        assert 0 <= (found - weight).abs().max() < 0.01 * weight.abs().max(), name
    assert any(
        not torch.equal(found, llama.state_dict()[name])
        for name, found in model.network.state_dict().items()
    )


def test_converted_folder_is_used_without_the_file(
    llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    file, out = write_gguf(tmp_path / "small.gguf", llama), tmp_path / "small"
    assert main(["llm", "convert", str(file), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"next: entp train count-text --init {out}\n"
    assert "it/s" not in printed.err  # no progress bars
    file.unlink()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    model = entp.hf.load(out)
    for name, weight in llama.state_dict().items():
        assert torch.equal(model.network.state_dict()[name], weight.bfloat16().float()), name
    task = CountText(prompt_length=2, length=4, num_values=30).with_data(str(out))
    assert (task.end, task.vocab) == (2, llama.config.vocab_size)
    batch = task.batch(0, "test", 0, 1)
    assert batch.prefix_lengths is not None
    row = batch.x[0, : batch.prefix_lengths[0]].tolist()
    assert task.to_text(row).endswith("What is the output of this code ?\n")
    twelve = task.from_text("x12")
    assert task.to_text(twelve[-1:]) == "12"


def test_wrong_files_say_what_is_needed(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*none\.gguf: give a \.gguf file"):
        entp.hf.load(tmp_path / "none.gguf")
    (tmp_path / "other.gguf").write_bytes(b"safetensors")
    with pytest.raises(InputError, match=r"other\.gguf is no GGUF file"):
        entp.hf.load(tmp_path / "other.gguf")
    (tmp_path / "torn.gguf").write_bytes(write_gguf(tmp_path / "a.gguf", llama).read_bytes()[:99])
    with pytest.raises(InputError, match=r"torn\.gguf cannot be loaded"):
        entp.hf.load(tmp_path / "torn.gguf")
    with pytest.raises(InputError, match="is not empty: give a new folder"):
        llm_command(["convert", str(tmp_path / "a.gguf"), "--out", str(tmp_path)])


def test_file_in_place_of_a_folder_names_the_command(
    llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "small.gguf", llama)
    told = f"`entp llm convert {file} --out FOLDER`"
    for recipe in ("count3-bert", "count3-llm"):
        words = ["reproduce", recipe, f"--out={tmp_path}", "--device=cpu", f"--init={file}"]
        assert main(words) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(InputError, match="is a GGUF file, and a folder"):
        read_pretrained(file, Count3())
