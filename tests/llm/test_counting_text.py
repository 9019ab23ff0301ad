"""Count3 and Count2 as text: prompts, targets, tokenizers, and the scores of what models write."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_llama import write_tokenizer
from small_tokenizers import text_file
from tokenizers import Tokenizer

import entp
from entp.config import OptimConfig, RandomTargetsConfig, Run, TrainConfig, model_for
from entp.config.json import run_from_json, run_to_json
from entp.errors import InputError
from entp.llm.counting_text import CountText
from entp.llm.prompts import QUESTION, answer_text, prompt_text
from entp.model import Transformer
from entp.tasks.base import Batch, Task, task_class
from entp.tasks.metrics import Predicted, Totals
from entp.tasks.tokens import find_json_tokenizer
from entp.training.evaluate import evaluate, evaluate_generated
from entp.training.forward import Forward
from entp.training.trainer import train

SMALL = CountText(prompt_length=2, length=5, num_values=12)


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    find_json_tokenizer.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


@pytest.fixture(params=["bytes", "file"])
def task(request: pytest.FixtureRequest, folder: Path) -> CountText:
    return SMALL if request.param == "bytes" else SMALL.with_data(str(folder))


def answers(batch: Batch) -> list[list[int]]:
    """The right tokens of each row."""
    return [row[mask].tolist() for row, mask in zip(batch.y, batch.target_mask, strict=True)]


def tokens_of(task: CountText, text: str) -> list[int]:
    """The tokens of a text and the end token, without those that a text begins with."""
    if task.tokenizer == "bytes":
        return [*text.encode(), task.stop]
    return [*find_json_tokenizer(task.tokenizer).encode_batch([text])[0], task.stop]


def totals(task: Task, batch: Batch, rows: list[list[int]]) -> Totals:
    return Totals.of(task.metrics, batch, task.measure_texts(batch, rows))


def small_run(task: CountText, mode: str, steps: int = 6, **more: object) -> Run:
    return Run(
        task,
        model_for(task, "small", layers=2, heads=2, width=16),
        mode,  # type: ignore[arg-type]
        steps=steps,
        batch_size=4,
        optim=OptimConfig(lr=1e-2, warmup_steps=1, decay_steps=steps),
        train=TrainConfig(eval_every=steps, eval_batches=1, checkpoint_every=3),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("rule", ["count3", "count2"])
def test_targets_are_what_the_prompt_s_code_prints(task: CountText, rule: str) -> None:
    task = replace(task, rule=rule)
    batch = task.batch(0, "train", 3, 5)
    assert batch.prefix_lengths is not None
    assert batch.lengths is not None
    for row in range(5):
        first, end = int(batch.prefix_lengths[row]), int(batch.lengths[row])
        asked = task.to_text(batch.x[row, :first].tolist()).removeprefix("<s>")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(asked.removesuffix(f"{QUESTION}\n"), {})
        *told, last = batch.y[row, first - 1 : end].tolist()
        assert task.to_text(told) == printed.getvalue().strip()
        assert last == task.stop
        assert batch.target_mask[row].sum() == len(told) + 1
        assert (batch.x[row, first:end] == told).all()


def test_prompt_is_the_papers(task: CountText) -> None:
    seed = [3, 11]
    text = f"{prompt_text(task.counting, seed)}\n"
    assert task.from_text("3, 11") == task.from_text("[3 11]") == task.from_text(text)
    assert task.to_text(task.from_text(text)).removeprefix("<s>") == text
    with pytest.raises(InputError, match="seed has 3 integers"):
        task.from_text("3 11 4")


def test_file_s_first_special_token_begins_each_prompt(folder: Path) -> None:
    task = SMALL.with_data(str(folder))
    assert (task.batch(0, "train", 0, 3).x[:, 0] == 0).all()
    assert task.end == 1
    assert task.from_text("code")[0] == 0


def test_file_that_cuts_texts_off_is_read_whole(folder: Path) -> None:
    whole = SMALL.with_data(str(folder)).batch(0, "train", 0, 3)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0}
    data["truncation"]["direction"] = "Right"
    data["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    data["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    path.write_text(json.dumps(data))
    assert len(Tokenizer.from_file(str(path)).encode("a b c d e f g h i j").ids) == 9
    assert (SMALL.with_data(str(folder)).batch(0, "train", 0, 3).x == whole.x).all()


def test_splits_have_no_sequence_in_common() -> None:
    task = CountText(prompt_length=2, length=4, num_values=8)

    def seeds(split: str) -> set[str]:
        batches = [task.batch(seed, split, 0, 64) for seed in range(4)]
        return {task.to_text(row) for batch in batches for row in answers(batch)}

    found = {split: seeds(split) for split in ("train", "valid", "test")}
    assert sum(map(len, found.values())) == len(set.union(*found.values()))
    assert all(found.values())


def test_batch_depends_on_its_arguments_alone(task: CountText) -> None:
    one, same = task.batch(1, "train", 2, 4), task.batch(1, "train", 2, 4)
    assert (one.x == same.x).all()
    asked = ((1, "train", 3, 4), (2, "train", 2, 4), (1, "test", 2, 4))
    others = [task.batch(*arguments) for arguments in asked]
    assert all(other.x.shape != one.x.shape or (other.x != one.x).any() for other in others)


def test_split_without_sequences_says_so() -> None:
    with pytest.raises(InputError, match=r"belong to split train: raise task\.num_values"):
        CountText(prompt_length=1, length=3, num_values=1).batch(0, "train", 0, 4)


def test_teacher_forced_scores_count_integers(task: CountText) -> None:
    batch = task.batch(0, "test", 0, 3)
    right = Predicted(batch.targets, np.zeros(len(batch.targets)))
    found = Totals.of(task.metrics, batch, task.measure(batch, right))
    assert found.values() == {"exact_match": 1, "token_accuracy": 1, "loss": 0, "n": 3}
    assert list(found.sliced("token_accuracy", "length")) == ["2", "3", "4"]
    assert found.all["token_accuracy"].w == 9
    first, *_, last = np.flatnonzero(batch.row == 1)
    for wrong, lost in ((first + 1, None), (last - 1, "4"), (last, None)):
        answer = batch.targets.copy()
        answer[wrong] = task.from_text("?")[-1]
        scores = task.measure(batch, Predicted(answer, np.zeros(len(answer))))
        found = Totals.of(task.metrics, batch, scores)
        assert found.value("exact_match") == pytest.approx(2 / 3)
        assert found.value("token_accuracy") == pytest.approx(8 / 9 if lost else 1)
        assert found.sliced("token_accuracy", "length")["4"] == pytest.approx(2 / 3 if lost else 1)


def test_generated_text_is_scored_by_its_integers(task: CountText) -> None:
    sequences = task.counting.extend(np.array([[3, 11], [7, 7], [10, 2]]))
    batch = task.encode(sequences)
    right = answers(batch)
    assert totals(task, batch, right).values() == {
        "exact_match": 1,
        "token_accuracy": 1,
        "well_formed": 1,
        "n": 3,
    }
    longer = sequences[1].copy()
    longer[2] = 1000  # more digits: what follows stands elsewhere among the tokens
    rows = [right[0], tokens_of(task, answer_text(longer)), right[2]]
    found = totals(task, batch, rows)
    assert found.value("well_formed") == 1
    assert found.value("exact_match") == pytest.approx(2 / 3)
    assert found.sliced("token_accuracy", "length") == pytest.approx({"2": 2 / 3, "3": 1, "4": 1})


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda text: f"It is {text}", 1.0),
        (lambda text: text[:-1], 2 / 3),
        (lambda text: "no list", 0.0),
        (lambda text: text.replace("]", ", 1]"), 1.0),
    ],
)
def test_other_text_is_not_well_formed(task: CountText, change: object, right: float) -> None:
    sequences = task.counting.extend(np.array([[3, 11]]))
    text = change(answer_text(sequences[0]))  # type: ignore[operator]
    found = totals(task, task.encode(sequences), [tokens_of(task, text)])
    assert found.value("well_formed") == found.value("exact_match") == 0
    assert found.value("token_accuracy") == pytest.approx(right)


def test_answer_without_its_end_is_not_well_formed(task: CountText) -> None:
    batch = task.batch(0, "test", 0, 2)
    one, two = answers(batch)
    found = totals(task, batch, [one, two[:-1]])
    assert found.values() == {"exact_match": 0.5, "token_accuracy": 1, "well_formed": 0.5, "n": 2}


def test_longest_sequence_fits(task: CountText) -> None:
    needs = task.model_needs()
    for step in range(5):
        batch = task.batch(0, "train", step, 32)
        assert batch.lengths is not None
        assert batch.lengths.max() < needs["context_length"]
        assert batch.target_mask.sum(1).max() <= task.most_new_tokens
    tens = task.counting.extend(np.full((1, 2), 11))
    tens[:] = 11
    whole = task.encode(tens)
    assert whole.lengths is not None
    assert whole.lengths[0] + 1 == needs["context_length"]


def test_prefix_lm_reads_each_prompt_whole() -> None:
    task = replace(SMALL, num_values=120)
    torch.manual_seed(0)
    model = Transformer(model_for(task, "small", layers=2, heads=2, width=16)).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    batch = task.batch(0, "train", 0, 6)
    assert batch.prefix_lengths is not None
    assert batch.lengths is not None
    assert len(set(batch.prefix_lengths.tolist())) > 1
    how = Forward.of(small_run(task, "prefix-lm"))
    together = evaluate(model, task, [batch], replace(how, precision="fp32"))
    nats = []
    for x, y, first, end in zip(batch.x, batch.y, batch.prefix_lengths, batch.lengths, strict=True):
        logits = model(torch.from_numpy(x[None, :end]), "prefix-lm", prefix=int(first))[0]
        told = torch.from_numpy(y[:end])
        nats.append(torch.nn.functional.cross_entropy(logits, told, reduction="none")[told >= 0])
    assert together.value("loss") == pytest.approx(torch.cat(nats).mean().item(), rel=1e-12)
    other = task.encode(task.counting.extend(np.array([[1, 2], [3, 40]])))
    assert other.y.shape[1] != batch.y.shape[1]
    alone = [evaluate(model, task, [one], replace(how, precision="fp32")) for one in (batch, other)]
    both = evaluate(model, task, [batch, other], replace(how, precision="fp32"))
    assert both.value("loss") == pytest.approx((alone[0] + alone[1]).value("loss"), rel=1e-12)
    causal = evaluate(model, task, [batch], replace(how, mode="decoder", precision="fp32"))
    assert abs(causal.value("loss") - together.value("loss")) > 1e-3


@pytest.mark.parametrize("mode", ["decoder", "prefix-lm", "entp"])
def test_generated_scores_are_those_of_each_prompt_alone(mode: str) -> None:
    task = replace(SMALL, num_values=120)
    torch.manual_seed(0)
    model = Transformer(model_for(task, "small", layers=2, heads=2, width=16))
    batch = task.batch(0, "test", 0, 4)
    assert batch.prefix_lengths is not None
    with torch.no_grad():
        model.tokens.weight.mul_(20)  # texts of different tokens
    how = Forward.of(small_run(task, mode))
    found = evaluate_generated(model, task, [batch], how)
    rows = []
    for x, first in zip(batch.x, batch.prefix_lengths.tolist(), strict=True):
        prompt = [x[:first].tolist()]
        out = entp.generate(model, prompt, task.most_new_tokens, mode, stop=task.stop, cache=False)
        rows.append(out[0][first:])
    assert found.to_json() == totals(task, batch, rows).to_json()


@pytest.mark.parametrize("mode", ["decoder", "prefix-lm", "entp"])
def test_training_resumes_bit_for_bit(mode: str, tmp_path: Path) -> None:
    few = {"random_targets": RandomTargetsConfig(4)} if mode == "entp" else {}
    whole = small_run(SMALL.with_data(None), mode, **few)
    train(whole, tmp_path / "whole", device="cpu", quiet=True)
    half = replace(whole, steps=3)
    train(half, tmp_path / "parts", device="cpu", quiet=True)
    train(whole, tmp_path / "parts", device="cpu", resume=True, quiet=True)
    one, two = (entp.load(tmp_path / name, checkpoint="last") for name in ("whole", "parts"))
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name]), name


def test_prefix_lengths_change_training_in_mode_prefix_lm_alone(tmp_path: Path) -> None:
    weights = {}
    for mode in ("decoder", "prefix-lm"):
        train(small_run(SMALL, mode), tmp_path / mode, device="cpu", quiet=True)
        weights[mode] = entp.load(tmp_path / mode, checkpoint="last").state_dict()
    assert any(not torch.equal(a, weights["decoder"][n]) for n, a in weights["prefix-lm"].items())


def test_run_stores_no_path_and_keeps_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    task = SMALL.with_data(str(folder))
    run = small_run(task, "decoder", steps=3)
    assert str(tmp_path) not in str(run_to_json(run))
    assert run_from_json(run_to_json(run)) == run
    train(run, tmp_path / "run", device="cpu", quiet=True)
    before = task.batch(0, "test", 0, 2)
    shutil.rmtree(folder)
    find_json_tokenizer.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENTP_DATA", str(tmp_path / "run"))
        after = task.batch(0, "test", 0, 2)
    assert (before.x == after.x).all()


def test_wrong_folders_say_what_is_needed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        SMALL.with_data(str(tmp_path))
    task = SMALL.with_data(str(folder))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(InputError, match=f"made with the tokenizer {task.tokenizer}"):
        task.with_data(str(other))
    (folder / "tokenizer_config.json").unlink()
    assert SMALL.with_data(str(folder)).stop == task.stop  # by its name
    assert replace(SMALL, end=1).with_data(str(folder)).stop == 1
    with pytest.raises(InputError, match="0123456789abcdef is not found"):
        replace(SMALL, tokenizer="0123456789abcdef", end=1).batch(0, "train", 0, 1)
    with pytest.raises(InputError, match=r"task\.tokenizer is 'gpt2'"):
        replace(SMALL, tokenizer="gpt2")
    with pytest.raises(InputError, match=r"task\.end is 300: tokens are 0 to 256"):
        replace(SMALL, end=300, vocab=257)


def test_task_is_found_by_name() -> None:
    assert task_class("count-text") is CountText
    assert CountText().prompt_length == 16
    assert QUESTION in CountText().draw()


def test_batch_refuses_prefix_lengths_of_another_shape() -> None:
    x = np.zeros((2, 3), np.int64)
    with pytest.raises(InputError, match=r"prefix_lengths of shape \(3,\)"):
        Batch(x, x, prefix_lengths=np.ones(3, np.int64))
    with pytest.raises(InputError, match="prefix_lengths of type float64"):
        Batch(x, x, prefix_lengths=np.ones(2))


def test_end_is_found_by_its_name_where_no_file_tells_it(tmp_path: Path) -> None:
    """As in a folder of a tokenizer.json alone."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(text_file("llama2"))
    task = CountText(prompt_length=2, length=4).for_model(tmp_path)
    assert task.end == Tokenizer.from_file(str(file)).token_to_id("</s>")
    file.write_bytes(text_file("bert"))
    with pytest.raises(InputError, match=r"which token ends a text: .* --task\.end"):
        CountText(prompt_length=2, length=4).for_model(tmp_path)
