"""Real pretrained models, where ENTP_WEIGHTS names a folder that has some: exact in float64.

    ENTP_WEIGHTS=FOLDER pytest tests/hf/test_real_weights.py -s

FOLDER/NAME/config.json with the weights beside it, in HuggingFace's format.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import apart, gradients, worst
from torch import Tensor

pytest.importorskip("transformers", reason="needs the transformers library")
import entp.hf
from entp.hf.adapters import PretrainedModel

FOLDERS = sorted(Path(os.environ.get("ENTP_WEIGHTS", "/nowhere")).glob("*/config.json"))
TOKENS, KEPT = 7, 64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDERS, reason="ENTP_WEIGHTS names no folder of models"),
    pytest.mark.usefixtures("quiet"),
]


def one_forward_per_prefix(model: PretrainedModel, x: Tensor) -> Tensor:
    """HuggingFace's forward pass over each prefix alone, with full attention."""
    base: Any = model.network.base_model
    ends = []
    for t in range(1, x.shape[1] + 1):
        seen = torch.ones(1, 1, t, t, dtype=torch.bool)
        if model.config._attn_implementation == "eager":
            seen = torch.zeros(seen.shape, dtype=torch.float64)
        found = base(input_ids=x[:, :t], attention_mask=seen)
        ends.append(model.readout(found.last_hidden_state[:, -1]))
    return torch.stack(ends, dim=1)


@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: Path(str(path)).parent.name)
@pytest.mark.parametrize("lora", [False, True], ids=["", "LoRA"])
def test_packed_is_one_forward_pass_per_prefix(path: Path, lora: bool) -> None:
    model = entp.hf.load(path.parent).double()
    model.keep_tokens(list(range(1000, 1000 + KEPT)))
    if lora:
        peft = pytest.importorskip("peft")
        linear = [
            name.removeprefix("network.")
            for name, module in model.named_modules()
            if type(module).__name__ in ("Linear", "Conv1D") and "layer" in name
        ]
        peft.get_peft_model(model.network, peft.LoraConfig(r=8, target_modules=linear))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.02)
        model.double()
    x = torch.randint(5, KEPT, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    got, want = model(x), one_forward_per_prefix(model, x)
    outputs, slopes = apart(got, want), worst(gradients(model, got), gradients(model, want))
    print(f"\n{path.parent.name}{', LoRA' if lora else ''}: {outputs:.1e} {slopes:.1e}")
    assert max(outputs, slopes) < 1e-9
