"""HuggingFace's models in our training loop, against loops of HuggingFace's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_networks import (
    FAMILIES,
    ROUNDS,
    SHIFTED,
    add_tokenizer,
    begin,
    folder_of,
    network_of,
    one_forward_per_prefix,
)
from small_runs import TASK, Parity, fit, last_weights, new_stepper
from torch import Tensor

import entp
from entp.config import EmaConfig, OptimConfig, PretrainedConfig
from entp.config.json import config_hash, run_from_json, run_to_json
from entp.errors import InputError
from entp.tasks.base import IGNORE
from entp.tasks.counting import Count3
from entp.training.checkpoint import find, load, read_trainer, save_model
from entp.training.initialise import load_init, weights_hash
from entp.training.loggers import read_metrics
from entp.training.schedule import learning_rate

pytest.importorskip("transformers", reason="needs the transformers library")
from entp.hf.adapters import PretrainedModel
from entp.hf.beginning import read_pretrained
from entp.hf.building import build, linear_layers
from entp.hf.vocabulary import rows_for

pytestmark = pytest.mark.usefixtures("quiet")


def own_optimizer(network: Any, optim: OptimConfig) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in network.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2))


def own_step(network: Any, optimizer: Any, loss: Tensor, optim: OptimConfig, step: int) -> None:
    """What everybody's loop does."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), optim.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(optim, step, 0.0)
    optimizer.step()


def apart(model: PretrainedModel, network: Any) -> float:
    """The largest difference of weights, relative to the largest weight."""
    ours, theirs = (
        {name: p.detach() for name, p in one.named_parameters()} for one in (model.network, network)
    )
    assert ours.keys() == theirs.keys()
    largest = max(float(p.abs().max()) for p in theirs.values())
    return max(float((ours[n] - theirs[n]).abs().max()) for n in theirs) / largest


# Steps


@pytest.mark.parametrize("family", FAMILIES)
def test_entp_steps_equal_one_forward_of_huggingface_per_prefix(
    family: str, tmp_path: Path
) -> None:
    changes = {} if family in SHIFTED else {"pad_token_id": None}
    network = network_of(family, **changes).double()
    if family in SHIFTED:  # there the padding token's embedding is not trained
        network.get_input_embeddings().padding_idx = None
    run, init = begin(folder_of(family, tmp_path / family, **changes))
    stepper = new_stepper(run)
    load_init(stepper.state.model, init)
    stepper.state.model.double()
    assert apart(stepper.state.model, network) < 1e-6
    network.load_state_dict(stepper.state.model.network.state_dict())
    optimizer = own_optimizer(network, run.optim)
    # Some gradients are rounded to float32 there, once for each forward pass.
    bound = 1e-6 if family in ROUNDS else 1e-9
    began = [p.detach().clone() for p in network.parameters()]
    for step in range(4):
        batch = TASK.batch(run.seed, "train", step, run.batch_size)
        x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.y)
        logits = one_forward_per_prefix(family, network, x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        own_step(network, optimizer, loss, run.optim, step)
        ours = stepper(batch)
        stepper.state.step += 1
        assert float(ours.loss) == pytest.approx(loss.item(), rel=bound)
    pairs = zip(began, network.parameters(), strict=True)
    assert max(float((a - b.detach()).abs().max()) for a, b in pairs) > 1e-3
    assert apart(stepper.state.model, network) < bound


def test_decoder_steps_equal_transformers_own_causal_loss(tmp_path: Path) -> None:
    network = network_of("gpt2").double()
    run, init = begin(folder_of("gpt2", tmp_path / "gpt2"), mode="decoder")
    stepper = new_stepper(run)
    load_init(stepper.state.model, init)
    stepper.state.model.double()
    network.load_state_dict(stepper.state.model.network.state_dict())
    optimizer = own_optimizer(network, run.optim)
    for step in range(4):
        batch = TASK.batch(run.seed, "train", step, run.batch_size)
        x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.y)
        whole = torch.cat([x, y[:, -1:]], 1)
        labels = torch.cat([torch.full((len(x), 1), IGNORE), y], 1)
        theirs = network(input_ids=whole, labels=labels, use_cache=False)
        # The same in float64; transformers' own is in float32 in every model.
        loss = F.cross_entropy(theirs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
        own_step(network, optimizer, loss, run.optim, step)
        ours = stepper(batch)
        stepper.state.step += 1
        assert float(ours.loss) == pytest.approx(loss.item(), rel=1e-9)
    assert apart(stepper.state.model, network) < 1e-9


@pytest.mark.parametrize("budget", [20, 100])
def test_token_budget_leaves_the_steps_as_they_are(tmp_path: Path, budget: int) -> None:
    folder, found = folder_of("bert", tmp_path / "bert"), []
    for tokens in (None, budget):
        run, init = begin(folder, train={"token_budget": tokens})
        stepper = new_stepper(run)
        load_init(stepper.state.model, init)
        stepper.state.model.double()
        for step in range(3):
            stepper(TASK.batch(run.seed, "train", step, run.batch_size))
            stepper.state.step += 1
        found.append(stepper.state.model.network)
    assert (
        max(
            float((a - b).detach().abs().max())
            for a, b in zip(*(n.parameters() for n in found), strict=True)
        )
        < 1e-9
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
def test_resumed_run_equals_one_run(family: str, mode: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "weights")
    run, init = begin(folder, mode=mode, steps=6)
    fit(run, tmp_path / "whole", init=init)
    fit(replace(run, steps=5), tmp_path / "parts", init=init)
    fit(run, tmp_path / "parts", resume=True)
    whole, parts = last_weights(tmp_path / "whole"), last_weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    losses = [[row["loss"] for row in read_metrics(tmp_path / out)] for out in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_random_weights_follow_from_the_seed(tmp_path: Path) -> None:
    run, _ = begin(folder_of("bert", tmp_path / "weights"), steps=1)
    first = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fit(replace(run, init="", seed=seed), tmp_path / name)
        first[name] = read_metrics(tmp_path / name)[0]["loss"]
    assert first["a"] == first["b"] != first["c"]


def test_ema_of_a_pretrained_model(tmp_path: Path) -> None:
    still = {"lr": 1e-30, "min_lr": 0.0, "weight_decay": 0.0}
    run, init = begin(folder_of("gpt2", tmp_path / "w"), ema=EmaConfig(4), optim=still, steps=5)
    fit(run, tmp_path / "out", init=init)
    torch.testing.assert_close(load(tmp_path / "out", "best").state_dict(), init.weights)


# LoRA


def test_lora_trains_adapters_alone(tmp_path: Path) -> None:
    run, init = begin(folder_of("llama", tmp_path / "w"), lora_rank=2, steps=5)
    stepper = new_stepper(run)
    model = stepper.state.model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert len(trained) == 2 * 7 * 2  # seven layers in each of two blocks
    stepper(TASK.batch(0, "train", 0, 8))
    with_state = {id(p) for opt in stepper.state.optimizers for p in opt.state}
    assert with_state == {id(p) for _, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    fit(run, tmp_path / "out", init=init)
    after = last_weights(tmp_path / "out")
    kept = [name for name in after if ".lora_" not in name]
    plain = {name.replace(".base_layer", ""): after[name] for name in kept}
    assert plain.keys() == init.weights.keys()
    assert all(torch.equal(plain[name], init.weights[name]) for name in plain)
    assert any(after[name].abs().max() > 0 for name in after if ".lora_B." in name)
    saved = read_trainer(find(tmp_path / "out", "last"))["optimizers"][0]["state"]
    assert len(saved) == len(trained)


@pytest.mark.parametrize("family", ["bert", "gpt2", "modernbert"])
def test_lora_run_resumes_and_its_outputs_change(family: str, tmp_path: Path) -> None:
    run, init = begin(folder_of(family, tmp_path / "w"), lora_rank=2, lora_alpha=4.0, steps=6)
    fit(run, tmp_path / "whole", init=init)
    fit(replace(run, steps=5), tmp_path / "parts", init=init)
    fit(run, tmp_path / "parts", resume=True)
    whole, parts = last_weights(tmp_path / "whole"), last_weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    x = torch.from_numpy(TASK.batch(0, "test", 0, 2).x)
    plain = build(replace(run.model, lora_rank=0))
    load_init(plain, init)
    tuned = load(tmp_path / "whole", "last")
    assert float((tuned(x) - plain(x)).detach().abs().max()) > 1e-3
    assert entp.check(tuned, x=x).exact


def test_lora_is_on_all_linear_layers_of_the_blocks_and_no_others(tmp_path: Path) -> None:
    counts = {"gpt2": 4, "bert": 6, "roberta": 6, "mpnet": 6, "modernbert": 4, "llama": 7}
    for family, count in counts.items():
        names = linear_layers(entp.hf.wrap(network_of(family)))
        assert len(names) == 2 * count
        assert not any(name.startswith(("lm_head", "cls", "head", "decoder")) for name in names)


def test_new_head_is_trained_beside_the_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, init = begin(folder_of("bert", tmp_path / "w"), task=Parity(), lora_rank=2, steps=5)
    assert isinstance(run.model, PretrainedConfig)
    assert (run.model.head, run.model.outputs) == ("linear", 2)
    fit(run, tmp_path / "out", init=init, quiet=False)
    assert "The output head is new: 2 outputs, from random weights." in capsys.readouterr().err
    torch.manual_seed(run.seed)
    before, after = build(run.model), load(tmp_path / "out", "last")
    assert not torch.equal(before.head.weight, after.head.weight)
    assert after.head.weight.shape == (2, 32)


# Weights and tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", [True, False])
def test_run_begins_with_the_weights_of_the_folder(family: str, head: bool, tmp_path: Path) -> None:
    """A task of 6 tokens keeps the first 6 of 10; HuggingFace's logits of these are unchanged."""
    task = Count3(prompt_length=3, length=6, num_values=6)
    folder = folder_of(family, tmp_path / "w", head=head)
    init = read_pretrained(folder, task)
    model = build(init.model)  # type: ignore[arg-type]
    load_init(model, init)
    x = torch.from_numpy(task.batch(0, "test", 0, 4).x)
    whole = entp.hf.load(folder)
    torch.testing.assert_close(model(x), whole(x)[..., :6])
    torch.testing.assert_close(model(x, "decoder"), whole(x, "decoder")[..., :6])
    assert init.model.vocab == 6
    assert init.origin["weights"] == weights_hash(init.weights)


def test_weights_are_saved_once_where_they_are_tied(tmp_path: Path) -> None:
    run, init = begin(folder_of("gpt2", tmp_path / "w"), steps=1)
    fit(run, tmp_path / "out", init=init)
    model = load(tmp_path / "out")
    assert model.network.lm_head.weight is model.network.transformer.wte.weight
    assert "network.lm_head.weight" not in model.state_dict()
    with pytest.raises(InputError, match="is saved with its run"):
        save_model(model, tmp_path / "alone")


def test_padding_token_is_trained_like_any_other(tmp_path: Path) -> None:
    """BERT's padding token is 0, an integer of the task."""
    run, init = begin(folder_of("bert", tmp_path / "w", pad_token_id=0, tie_word_embeddings=False))
    model = new_stepper(run).state.model
    load_init(model, init)
    table = model.network.get_input_embeddings().weight
    model(torch.tensor([[0, 0]])).sum().backward()
    assert table.grad is not None
    assert float(table.grad[0].abs().max()) > 0


def test_tokens_are_found_by_their_text(tmp_path: Path) -> None:
    folder = folder_of("bert", tmp_path / "w", vocab_size=40)
    words = ["[UNK]", "[CLS]", *(f"w{i}" for i in range(20)), *(str(9 - i) for i in range(8))]
    add_tokenizer(folder, words)
    found = rows_for(TASK, folder, 40)
    # 2 to 9 by their text; 0 and 1, which the tokenizer does not know, are its unknown token and
    # then the first that is not taken.
    assert found.ids == [0, 1, *(words.index(str(i)) for i in range(2, 10))]
    assert found.by_text == 9
    assert "9 of 10 tokens" in found.told
    init = read_pretrained(folder, TASK)
    table = next(t for name, t in init.weights.items() if "word_embeddings" in name)
    whole = entp.hf.load(folder).network.get_input_embeddings().weight
    torch.testing.assert_close(table, whole[found.ids])
    assert init.origin["tokens"] == found.told


def test_tokens_without_a_tokenizer_are_the_first(tmp_path: Path) -> None:
    folder = folder_of("bert", tmp_path / "w", vocab_size=40)
    assert rows_for(TASK, folder, 40).ids == list(range(10))


def test_task_with_the_models_own_tokenizer_keeps_all_tokens(tmp_path: Path) -> None:
    """With GPT-2's tokenizer the task has more tokens than it, which no text contains: these
    begin with the mean of the others, and so do their logits."""

    @dataclass(frozen=True)
    class Words(Parity):
        tokenizer: str = ""

        def model_needs(self) -> dict[str, Any]:
            return {"vocab": 12, "context_length": 10}

    from entp.data.json_tokenizer import file_name

    folder = add_tokenizer(folder_of("gpt2", tmp_path / "w"), [f"w{i}" for i in range(10)])
    task = Words(tokenizer=file_name((folder / "tokenizer.json").read_bytes()))
    found = rows_for(task, folder, 10)
    assert (found.ids, found.new) == (list(range(10)), 2)
    init = read_pretrained(folder, task)
    model = build(init.model)  # type: ignore[arg-type]
    load_init(model, init)
    x = torch.arange(10)[None]
    logits, whole = model(x), entp.hf.load(folder)(x)
    torch.testing.assert_close(logits[..., :10], whole)
    torch.testing.assert_close(logits[..., 11], whole.mean(-1))
    with pytest.raises(InputError, match=r"parity has 12 tokens and the model in .* only 10"):
        rows_for(replace(task, tokenizer="bytes"), folder, 10)


# Configuration


def test_configuration_survives_json_and_decides_the_identity(tmp_path: Path) -> None:
    run, _ = begin(folder_of("llama", tmp_path / "w"), lora_rank=4)
    again = run_from_json(json.loads(json.dumps(run_to_json(run))))
    assert again == run
    assert hash(again) == hash(run)
    assert isinstance(run.model, PretrainedConfig)
    deeper = {**run.model.huggingface, "num_hidden_layers": 3}
    others = [
        replace(run, model=replace(run.model, lora_rank=2)),
        replace(run, model=replace(run.model, huggingface=deeper)),
        replace(run, init=""),
    ]
    assert len({config_hash(one) for one in (run, *others)}) == 4


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", (32, 2, 4, 18, 128)),
        ("roberta", (32, 2, 4, 16, 64)),
        ("modernbert", (32, 2, 4, 18, 64)),
        ("llama", (32, 2, 4, 18, 64)),
    ],
)
def test_sizes_are_those_of_the_model(family: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    model = read_pretrained(folder_of(family, tmp_path / "w"), TASK).model
    assert (model.width, model.layers, model.heads, model.context_length, model.hidden) == sizes
    built = build(model)  # type: ignore[arg-type]
    assert (built.width, built.vocab, built.context_length) == (32, 10, sizes[3])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "bert"}, "has None as vocab_size"),
        ({"vocab_size": 3}, "with a model_type"),
    ],
)
def test_incomplete_configuration_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        PretrainedConfig(fields)


def test_what_no_pretrained_model_can_do_is_refused(tmp_path: Path) -> None:
    run, _ = begin(folder_of("bert", tmp_path / "w"))
    with pytest.raises(InputError, match=r"muon is for the blocks of entp\.Transformer"):
        replace(run, optim=OptimConfig("muon"))
    long = Count3(prompt_length=4, length=24, num_values=10)
    model = replace(run.model, huggingface={**run.model.huggingface, "vocab_size": 24})  # type: ignore[union-attr]
    with pytest.raises(InputError, match="context_length 18 is shorter than the sequences"):
        replace(run, task=long, model=model)
    with pytest.raises(InputError, match=r"model\.outputs is 3 with model\.head own"):
        replace(run.model, outputs=3)
