"""HuggingFace's models in our training loop, against loops of HuggingFace's own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_networks import CLASSES, add_tokenizer, folder_of, network_of
from small_runs import new_stepper, small_run
from torch import Tensor

import entp
from entp.cli.main import main
from entp.config import EmaConfig, OptimConfig, PretrainedConfig, Run
from entp.config.json import config_hash, run_from_json, run_to_json
from entp.engine.support import support_of
from entp.errors import InputError
from entp.tasks.base import IGNORE, Batch, Split, Task
from entp.tasks.counting import Count3
from entp.training.checkpoint import find, load, load_run, read_trainer, save_model
from entp.training.initialise import Init, load_init, weights_hash, with_init
from entp.training.loggers import read_metrics
from entp.training.schedule import learning_rate
from entp.training.trainer import Result, train

transformers = pytest.importorskip("transformers", reason="needs the transformers library")
from entp.hf.adapters import PretrainedModel  # noqa: E402
from entp.hf.beginning import read_pretrained  # noqa: E402
from entp.hf.building import build, linear_layers  # noqa: E402
from entp.hf.vocabulary import rows_for  # noqa: E402

TASK = Count3(prompt_length=4, length=10, num_values=10)
COUNT3 = ["--task.prompt-length=4", "--task.length=10", "--task.num-values=10"]
QUICK = ["--batch-size=4", "--optim.warmup-steps=2", "--train.eval-batches=1", "--device=cpu"]


@dataclass(frozen=True)
class Parity(Task):
    """Whether the number of ones is even: a class for a whole sequence."""

    name: ClassVar[str] = "parity"

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 10, "context_length": 10, "outputs": 2}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).integers(0, 2, (size, 10))
        y = np.full(x.shape, IGNORE)
        y[:, -1] = x.sum(1) % 2
        return Batch(x, y)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


def fit(run: Run, out: Path, **options: Any) -> Result:
    return train(run, out, device="cpu", **{"quiet": True, **options})


def begin(folder: Path, **changes: Any) -> tuple[Run, Init]:
    """A small run with the model of a folder, and its weights."""
    lora = {name: changes.pop(name) for name in ("lora_rank", "lora_alpha") if name in changes}
    init = read_pretrained(folder, changes.get("task", TASK), **lora)
    return with_init(small_run(model=init.model, **changes), init), init


def last_weights(out: Path) -> dict[str, Tensor]:
    return load(out, "last").state_dict()


def full_attention(family: str, network: Any, x: Tensor) -> Tensor:
    """HuggingFace's logits with full attention: a decoder needs a mask for it."""
    if family == "bert":
        return network(input_ids=x).logits
    if family in ("roberta", "mpnet"):  # theirs leave out the padding token, 1, which is an integer
        return network(input_ids=x, position_ids=torch.arange(x.shape[1])[None] + 2).logits
    mask = torch.ones(len(x), 1, x.shape[1], x.shape[1], dtype=torch.bool)
    return network(input_ids=x, attention_mask=mask, use_cache=False).logits


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


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "mpnet", "llama"])
def test_entp_steps_equal_one_forward_of_huggingface_per_prefix(
    family: str, tmp_path: Path
) -> None:
    changes = {} if family in ("roberta", "mpnet") else {"pad_token_id": None}
    network = network_of(family, **changes).double()
    if family in ("roberta", "mpnet"):  # there the padding token's embedding is not trained
        network.get_input_embeddings().padding_idx = None
    run, init = begin(folder_of(family, tmp_path / family, **changes))
    stepper = new_stepper(run)
    load_init(stepper.state.model, init)
    stepper.state.model.double()
    assert apart(stepper.state.model, network) < 1e-6
    network.load_state_dict(stepper.state.model.network.state_dict())
    optimizer = own_optimizer(network, run.optim)
    # Llama's norm rounds gradients to float32, once for each forward pass.
    bound = 1e-6 if family == "llama" else 1e-9
    began = [p.detach().clone() for p in network.parameters()]
    for step in range(4):
        batch = TASK.batch(run.seed, "train", step, run.batch_size)
        x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.y)
        ends = [full_attention(family, network, x[:, : t + 1])[:, -1] for t in range(x.shape[1])]
        loss = F.cross_entropy(torch.stack(ends, 1).flatten(0, 1), y.flatten())
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


def test_steps_are_not_captured(tmp_path: Path) -> None:
    """A graph replays no Python, and nobody knows what HuggingFace's modules do."""
    _, init = begin(folder_of("bert", tmp_path / "bert"))
    assert isinstance(init.model, PretrainedConfig)
    assert not support_of(build(init.model)).graphs


@pytest.mark.parametrize("family", CLASSES)
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


@pytest.mark.parametrize("family", ["bert", "gpt2"])
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
    counts = {"gpt2": 4, "bert": 6, "roberta": 6, "mpnet": 6, "llama": 7}
    for family, count in counts.items():
        names = linear_layers(entp.hf.wrap(network_of(family)))
        assert len(names) == 2 * count
        assert not any("lm_head" in name or "cls." in name for name in names)


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


@pytest.mark.parametrize("family", CLASSES)
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
    [("gpt2", (32, 2, 4, 18, 128)), ("roberta", (32, 2, 4, 16, 64)), ("llama", (32, 2, 4, 18, 64))],
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


# The command line


def test_run_needs_its_folder_of_weights_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of("bert", tmp_path / "weights", head=False)
    words = [*COUNT3, *QUICK, "--steps=4", "--lora-rank=2", "--train.checkpoint-every=2"]
    assert main(["train", "count3", "--init=weights", "--out=run", *words]) == 0
    shutil.rmtree("weights")
    assert main(["train", "count3", "--resume", "--out=run", "--steps=6", "--device=cpu"]) == 0
    assert main(["evaluate", "run", "--batches=1", "--device=cpu"]) == 0
    assert main(["generate", "run", "--prompt=1 2 3 4", "--device=cpu"]) == 0
    assert main(["export", "run", "--out=small", "--test-sequences=8", "--device=cpu"]) == 0
    assert main(["evaluate", "small", "--batches=1", "--device=cpu"]) == 0
    printed = capsys.readouterr()
    assert "step 6," in printed.out
    assert "1 2 3 4 " in printed.out
    run = load_run("run")
    assert isinstance(run.model, PretrainedConfig)
    assert (run.model.head, run.model.lora_rank, run.model.vocab) == ("embedding", 2, 10)
    told = json.loads(Path("run/environment.json").read_text())["init"]
    assert told["run"] == "weights"
    assert told["weights"].startswith(run.init)


def test_run_begins_with_a_run_of_a_pretrained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of("gpt2", tmp_path / "weights")
    words = [*COUNT3, *QUICK, "--steps=2"]
    assert main(["train", "count3", "--init=weights", "--out=a", "--mode=decoder", *words]) == 0
    assert main(["train", "count3", "--init=a", "--out=b", "--lora-rank=2", *words]) == 0
    run = load_run("b")
    assert isinstance(run.model, PretrainedConfig)
    assert (run.mode, run.model.lora_rank) == ("decoder", 2)
    base = last_weights(tmp_path / "a")
    after = {k.replace(".base_layer", ""): v for k, v in last_weights(tmp_path / "b").items()}
    assert all(torch.equal(base[name], after[name]) for name in base)


REFUSED = {
    "nothing": ("there is no run folder nothing to begin with: --init takes the --out", []),
    "empty": ("there is no run folder empty to begin with: --init takes the --out", []),
    "other": ("describes no model: --init takes the --out", []),
    "weights": ("--size is given, and the shape of a pretrained model", ["--size=medium"]),
    "weights ": ("--model.layers is given, and the shape", ["--model.layers=3"]),
    "short": ("context_length 4 is shorter than the sequences of count3, 10", []),
    "few": ("count3 has 10 tokens and the model in .* only 5", []),
    "sliding": ("cannot be used: its layers have sliding attention", []),
}


@pytest.mark.parametrize("name", REFUSED)
def test_init_that_cannot_be_used_is_refused_with_what_can(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/config.json").write_text('{"a": 1}')
    folder_of("bert", tmp_path / "weights")
    folder_of("bert", tmp_path / "short", max_position_embeddings=4)
    folder_of("bert", tmp_path / "few", vocab_size=5)
    folder_of("llama", tmp_path / "sliding")
    config = json.loads(Path("sliding/config.json").read_text())
    Path("sliding/config.json").write_text(json.dumps({**config, "sliding_window": 3}))
    said, more = REFUSED[name]
    words = ["train", "count3", f"--init={name.strip()}", *COUNT3, *QUICK, *more]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert len(error.strip().splitlines()) == 1


def test_lora_without_a_pretrained_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "count3", "--lora-rank=2", *COUNT3, *QUICK]) == 2
    assert "are for models of HuggingFace's: give --init such a folder" in capsys.readouterr().err


def test_load_says_what_it_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"give the --out .* `entp export` wrote.*entp\.hf\.load"):
        entp.load(tmp_path / "nothing")
    folder = folder_of("bert", tmp_path / "w")
    with pytest.raises(InputError, match=r"HuggingFace's format \(bert\).*entp\.hf\.load"):
        entp.load(folder)
    assert main(["evaluate", str(folder), "--device=cpu"]) == 2
    assert "train it with `entp train TASK --init" in capsys.readouterr().err
    _, init = begin(folder, steps=1)
    with pytest.raises(InputError, match="one of HuggingFace's there and of entp's here"):
        with_init(small_run(), init)


def test_text_with_the_models_own_tokenizer_keeps_its_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses at the first step are those of the pretrained model; other texts are not its."""
    monkeypatch.chdir(tmp_path)
    lines = [f"In {n} of {n + 1} cases there is a note." for n in range(400)]
    Path("notes.txt").write_text("\n\n".join(lines))
    words = ["data", "prepare", "notes.txt", "--tokenizer=bpe", "--vocab=280", "--out=corpus"]
    assert main([*words, "--valid=0.1"]) == 0
    folder = folder_of("gpt2", tmp_path / "weights", vocab_size=280)
    shutil.copy("corpus/tokenizer.json", folder)
    still = ["--optim.lr=1e-30", "--optim.min-lr=0", "--optim.weight-decay=0", "--steps=3"]
    words = ["train", "text", "--data=corpus", "--init=weights", "--out=run", "--mode=decoder"]
    assert main([*words, "--task.block=12", *still, *QUICK]) == 0
    run = load_run("run")
    assert run.model.vocab == 280
    assert "All 280 tokens are the model's own" in capsys.readouterr().err
    trained, theirs = load("run", "last"), entp.hf.load(folder)
    x = torch.from_numpy(run.task.batch(0, "test", 0, 2).x)
    torch.testing.assert_close(trained(x, "decoder"), theirs(x, "decoder"))
    assert main(["generate", "run", "--prompt=In 3", "--max-new-tokens=3", "--device=cpu"]) == 0


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("head", [True, False])
def test_run_is_exported_as_a_folder_of_huggingfaces(
    family: str, head: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its adapters merged: what transformers loads has the run's outputs."""
    folder = folder_of(family, tmp_path / "w", head=head)
    run, init = begin(folder, lora_rank=2, steps=5)
    fit(run, tmp_path / "run", init=init)
    words = ["export", str(tmp_path / "run"), f"--out={tmp_path / 'out'}", "--format=hf"]
    assert main([*words, "--test-sequences=8", "--device=cpu"]) == 0
    x = torch.from_numpy(TASK.batch(0, "test", 0, 2).x)
    trained, again = load(tmp_path / "run"), entp.hf.load(tmp_path / "out")
    torch.testing.assert_close(again(x), trained(x), rtol=1e-4, atol=1e-5)
    assert float((again(x) - entp.hf.load(folder)(x)).detach().abs().max()) > 1e-3
    assert not any("lora" in name for name, _ in again.named_parameters())
    kind = {"bert": "ForMaskedLM"}.get(family, "ForCausalLM")
    kind = kind if head or family == "gpt2" else ""  # GPT-2's head is its embedding
    assert f"AutoModel{kind}.from_pretrained(" in (tmp_path / "out/README.md").read_text()
    other = ["export", str(tmp_path / "run"), f"--out={tmp_path / 'two'}", "--format=gpt2"]
    assert main([*other, "--device=cpu"]) == 2
    assert f"a model of type {family}, which --format hf writes" in capsys.readouterr().err


def test_run_with_a_new_head_is_not_exported_to_huggingface(tmp_path: Path) -> None:
    from entp.hf.export import refuse

    run, _ = begin(folder_of("bert", tmp_path / "w"), task=Parity())
    with pytest.raises(InputError, match="no class of HuggingFace's has its new head of 2"):
        refuse(run, "hf")
