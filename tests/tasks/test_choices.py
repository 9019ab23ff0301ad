"""Zero-shot tasks: their scores are those of log-likelihoods computed one text at a time."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entp.config import ModelConfig, Run
from entp.data.tokenizers import ByteTokenizer, train_bpe
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.base import Batch
from entp.tasks.choices import (
    ArcEasy,
    Choices,
    Lambada,
    Piqa,
    Request,
    Sciq,
    Winogrande,
    ZeroShot,
    encode_pairs,
)
from entp.tasks.metrics import Predicted, Totals
from entp.tasks.tokens import find_tokenizer, tokenizer_name
from entp.training.evaluate import evaluate, evaluate_baseline, split_batches
from entp.training.forward import Forward

SENTENCES = [
    ("Ann met Eve so _ was glad.", "Ann", "Eve", "2"),
    ("The cup and the jug fell, but the _ held.", "cup", "jug", "1"),
    ("Bob is not like Tim, _ sings.", "Bob", "Tim", "1"),
    ("_ ate more than Lu, who was full.", "Kim", "Lu", "2"),
    ("Ann fears Eve because _ is strong.", "Ann", "Eve", "2"),
]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def requests(name: str, questions: list[tuple[str, list[str], Any]]) -> list[dict[str, Any]]:
    """Stored requests, and after them those that only normalise."""
    rows = []
    for first, context in ((0, ""), (1_000_000, "Answer:")):
        for number, (question, answers, label) in enumerate(questions):
            for idx, answer in enumerate(answers):
                request = {"context": context or question, "continuation": f" {answer}"}
                more = {"idx": idx, "doc_id": first + number, "label": label}
                rows.append({"request": request, "task_name": name, **more})
    return rows


QUESTIONS: list[tuple[str, list[str], Any]] = [
    ("Question: What is wet?\nAnswer:", ["fire", "water", "a stone in the desert"], 1),
    ("Question: What flies?\nAnswer:", ["a bird", "a cow", "Ümlaut", "no", "it"], 0),
    ("Question: How many?\nAnswer:", ["one", "two", "three", "four"], 3),
]
PASSAGES: list[tuple[str, list[str], Any]] = [
    ("She opened the door and saw the", ["garden"], ["garden"]),
    ("It was late, so he went to", ["bed"], ["bed"]),
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small files of all tasks, which ENTP_DATA names."""
    keys = ("sentence", "option1", "option2", "answer")
    rows = [dict(zip(keys, row, strict=True)) for row in SENTENCES]
    write(tmp_path / "winogrande/dev.jsonl", rows)
    write(tmp_path / "winogrande/tinyWinogrande.jsonl", rows[:2])
    for name in ("arc_easy", "sciq"):
        write(tmp_path / f"zeroshot_eval/{name}.rc_0shot.jsonl.gz", requests(name, QUESTIONS))
    write(tmp_path / "zeroshot_eval/piqa.rc_0shot.jsonl", requests("piqa", QUESTIONS[:1]))
    lambada = [row for row in requests("lambada", PASSAGES) if row["doc_id"] < 1_000_000]
    write(tmp_path / "zeroshot_eval/lambada.bpb_0shot.jsonl.gz", lambada)
    monkeypatch.setenv("ENTP_DATA", str(tmp_path))
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def small_model(vocab: int = 257, context_length: int = 64) -> Transformer:
    """Random weights large enough that options differ."""
    torch.manual_seed(1)
    model = Transformer(
        ModelConfig(vocab=vocab, context_length=context_length, layers=2, heads=2, width=16)
    )
    for p in model.parameters():
        p.data *= 8
    return model.double().eval()


def measured(model: Transformer, task: ZeroShot, mode: Any, size: int = 4) -> Totals:
    run = Run(task, model.config, mode)
    batches = split_batches(task, "test", None, size, 0)
    with torch.no_grad():
        return evaluate(model, task, batches, Forward.of(run))


@torch.no_grad()
def nats(model: Transformer, mode: str, context: list[int], rest: list[int]) -> list[float]:
    """Minus the log-probability of each token of `rest`, one prefix at a time."""
    tokens, found = [*context, *rest], []
    for at in range(len(context), len(tokens)):
        logits = model(torch.tensor([tokens[:at]]), mode)[0, -1]
        found.append(-float(logits.log_softmax(-1)[tokens[at]]))
    return found


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


@cache
def expected_winogrande(mode: str) -> tuple[float, float]:
    """Accuracy and bits per byte."""
    model, right, bits, length = small_model(), [], 0.0, 0
    for sentence, *options, answer in SENTENCES:
        before, after = sentence.split("_")
        rest = f" {after.strip()}"
        sums = [
            sum(nats(model, mode, bytes_of(before + option), bytes_of(rest))) for option in options
        ]
        right.append(sums.index(min(sums)) == int(answer) - 1)
        bits += sums[int(answer) - 1] / math.log(2)
        length += len(rest.encode())
    return float(np.mean(right)), bits / length


@pytest.mark.parametrize("mode", ["entp", "decoder"])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_winogrande_is_the_likelihood_of_what_follows(data: Path, mode: str, size: int) -> None:
    accuracy, bits = expected_winogrande(mode)
    totals = measured(small_model(), Winogrande(block=64), mode, size)
    assert totals.all["accuracy"].n == len(SENTENCES)
    assert totals.value("accuracy") == accuracy
    assert totals.value("bits_per_byte") == pytest.approx(bits, rel=1e-9)
    assert 0 < accuracy < 1


def test_winogrande_full_prefers_the_likelier_sentence(data: Path) -> None:
    """Of whole sentences: what stands before the option is the same in both."""
    model, right = small_model(), []
    for sentence, *options, answer in SENTENCES:
        first = 0 if sentence.startswith("_") else 1
        sums = []
        for option in options:
            tokens = bytes_of(sentence.replace("_", option))
            sums.append(sum(nats(model, "decoder", tokens[:first] or [256], tokens[first:])))
        right.append(sums.index(min(sums)) == int(answer) - 1)
    totals = measured(model, Winogrande(block=64, scoring="full"), "decoder")
    assert totals.value("accuracy") == np.mean(right)
    assert 0 < np.mean(right) < 1


@pytest.mark.parametrize("kind", [ArcEasy, Sciq])
def test_stored_choices_are_scored_by_sum_and_by_byte(
    data: Path, kind: Callable[..., Choices]
) -> None:
    model = small_model()
    by_sum, by_byte = [], []
    for question, answers, label in QUESTIONS:
        rests = [bytes_of(f" {answer}") for answer in answers]
        sums = [sum(nats(model, "entp", bytes_of(question), rest)) for rest in rests]
        each = [cost / len(rest) for cost, rest in zip(sums, rests, strict=True)]
        by_sum.append(sums.index(min(sums)) == label)
        by_byte.append(each.index(min(each)) == label)
    totals = measured(model, kind(block=64), "entp")
    assert totals.value("accuracy") == pytest.approx(np.mean(by_sum))
    assert totals.value("byte_accuracy") == pytest.approx(np.mean(by_byte))
    assert totals.all["accuracy"].n == len(QUESTIONS)


def test_length_counts_in_the_sum_and_not_by_byte(data: Path) -> None:
    """The right option has less loss per byte, and more in all."""
    task = Piqa(block=64)
    batch = task.batch(0, "test", 0, 4)
    loss = np.array([0.2, 0.19, 1.0])[batch.row]  # " fire", " water", " a stone in the desert"
    found = task.measure(batch, Predicted(batch.targets, loss))
    accuracy, by_byte = found["accuracy"], found["byte_accuracy"]
    assert accuracy is not None
    assert by_byte is not None
    assert accuracy.value.tolist() == [False, False, False]
    assert by_byte.value.tolist() == [True, False, False]


def test_lambada_needs_every_token_of_the_word(data: Path) -> None:
    model, words = small_model(), []
    for passage, (word,), _ in PASSAGES:
        words.append(nats(model, "entp", bytes_of(passage), bytes_of(f" {word}")))
    totals = measured(model, Lambada(block=64), "entp")
    mean = np.mean([sum(word) for word in words])
    assert totals.all["perplexity"].mean == pytest.approx(mean, rel=1e-9)
    length = sum(map(len, words))
    bits = sum(map(sum, words)) / math.log(2) / length
    assert totals.value("bits_per_byte") == pytest.approx(bits, rel=1e-9)
    batch = Lambada(block=64).batch(0, "test", 0, 2)
    right = batch.targets.copy()
    right[0] += 1  # one wrong token of the first word
    scores = Lambada(block=64).measure(batch, Predicted(right, None))
    assert scores["accuracy"] is not None
    assert scores["accuracy"].value.tolist() == [False, True]


def test_targets_are_the_continuation_alone(data: Path) -> None:
    task = Winogrande(block=64)
    batch = task.batch(0, "test", 0, 2)
    assert len(batch.x) == 2
    for row, name in enumerate(("Ann", "Eve")):
        text = task.to_text(batch.x[row, : batch.lengths[row]].tolist())  # type: ignore[index]
        assert text == f"Ann met Eve so {name} was glad"
        assert task.to_text(batch.y[row][batch.target_mask[row]].tolist()) == " was glad."


def test_batches_hold_whole_items_and_each_once(data: Path) -> None:
    task = ArcEasy(block=64)
    for size in (1, 5, 9, 10, 1000):
        count = task.split_batches("test", size)
        assert count is not None
        notes = [task.batch(0, "test", step, size).note for step in range(count)]
        assert np.concatenate([n for n in notes if n is not None]).tolist() == list(range(12))
        starts = {0, 3, 8}
        assert all(int(note[0]) in starts for note in notes if note is not None)


def test_part_of_an_item_is_refused(data: Path) -> None:
    task = ArcEasy(block=64)
    batch = task.batch(0, "test", 0, 100)
    for part in (batch.part(0, 2), batch.part(1, 2), rows(batch, slice(0, 2))):
        got = Predicted(part.targets, np.ones(len(part.targets)))
        with pytest.raises(InputError, match="some options of an item and not others"):
            task.measure(part, got)


def rows(batch: Batch, some: slice) -> Batch:
    names = ("x", "y", "lengths", "note")
    return Batch(**{name: getattr(batch, name)[some] for name in names})


def test_ties_go_to_the_first_option(data: Path) -> None:
    task = Winogrande(block=64, items="tiny")
    batch = task.batch(0, "test", 0, 4)
    same = Predicted(batch.targets, np.zeros(len(batch.targets)))
    score = task.measure(batch, same)["accuracy"]
    assert score is not None
    labels = [row[-1] == "1" for row in SENTENCES[:2]]
    assert score.value[[0, 2]].tolist() == labels
    assert score.weight.tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [
        (Winogrande(block=64), "always first", 2 / 5),
        (Winogrande(block=64), "always last", 3 / 5),
        (ArcEasy(block=64), "always first", 1 / 3),
        (ArcEasy(block=64), "always last", 1 / 3),
    ],
)
def test_baseline_answers_one_option(data: Path, task: ZeroShot, name: str, value: float) -> None:
    totals = evaluate_baseline(task, name, split_batches(task, "test", None, 4, 0))
    assert totals.value("accuracy") == pytest.approx(value)
    assert set(totals.all) == {"accuracy"}


def test_normalisation_rows_are_dropped(data: Path) -> None:
    assert [item.label for item in Sciq().read_items()] == [1, 0, 3]
    assert len(Piqa().read_items()) == 1
    contexts = {option.context for item in Sciq().read_items() for option in item.options}
    assert "Answer:" not in contexts


def test_long_context_loses_its_beginning(data: Path) -> None:
    task = Winogrande(block=12)
    batch = task.batch(0, "test", 0, 2)
    assert batch.x.shape == (2, 12)
    assert task.to_text(batch.x[1].tolist()) == "Eve was glad"
    assert task.caveats(0) == [
        "8 of 10 requests are longer than 12 tokens and were cut left.",
        "2 of 10 continuations are longer than 12 tokens and were scored in windows, each token "
        "once.",
    ]
    assert Winogrande(block=64).caveats(0) == []
    assert measured(small_model(context_length=12), task, "decoder").all["accuracy"].n == 5


@torch.no_grad()
def windowed_nats(
    model: Transformer, mode: str, context: list[int], rest: list[int], length: int
) -> list[float]:
    """Minus the log-probability of each token of `rest`, one prefix at a time, each of at most
    `length` tokens: a window's tokens are read from where its last one reads `length`."""
    tokens, found = [*context, *rest], []
    for at, token in enumerate(rest):
        end = len(context) + min(len(rest), (at // length + 1) * length)
        prefix = tokens[max(0, end - 1 - length) : len(context) + at]
        logits = model(torch.tensor([prefix]), mode)[0, -1]
        found.append(-float(logits.log_softmax(-1)[token]))
    return found


@pytest.mark.parametrize("mode", ["entp", "decoder"])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("block", [5, 12])
def test_long_continuations_are_scored_in_windows(
    data: Path, mode: str, size: int, block: int
) -> None:
    """All of their tokens count: in the sums, in their order, and per byte."""
    model = small_model(context_length=block)
    by_sum, by_byte, bits, length = [], [], 0.0, 0
    for question, answers, label in QUESTIONS:
        rests = [bytes_of(f" {answer}") for answer in answers]
        sums = [sum(windowed_nats(model, mode, bytes_of(question), rest, block)) for rest in rests]
        each = [cost / len(rest) for cost, rest in zip(sums, rests, strict=True)]
        by_sum.append(sums.index(min(sums)) == label)
        by_byte.append(each.index(min(each)) == label)
        bits, length = bits + sums[label] / math.log(2), length + len(rests[label])
    totals = measured(model, ArcEasy(block=block), mode, size)
    assert totals.all["accuracy"].n == len(QUESTIONS)
    assert totals.value("accuracy") == pytest.approx(np.mean(by_sum))
    assert totals.value("byte_accuracy") == pytest.approx(np.mean(by_byte))
    assert totals.all["bits_per_byte"].w == length
    assert totals.value("bits_per_byte") == pytest.approx(bits / length, rel=1e-9)


def test_cost_of_an_option_is_that_of_all_its_windows(data: Path) -> None:
    """The last window of the longest option is the cheapest row, and the option the dearest."""
    task = Piqa(block=10)
    batch = task.batch(0, "test", 0, 100)
    assert batch.note is not None
    lengths = np.bincount(batch.row)
    assert lengths.tolist() == [5, 6, 10, 10, 2]  # " fire", " water", " a stone in the desert"
    cost = np.array([1.0, 0.9, 0.5, 0.5, 0.1])
    scores = task.measure(batch, Predicted(batch.targets, (cost / lengths)[batch.row]))
    for name in ("accuracy", "byte_accuracy"):
        score = scores[name]
        assert score is not None
        assert score.weight.tolist() == [True, False, False, False, False]
    assert scores["accuracy"].value[0]  # type: ignore[union-attr]
    assert not scores["byte_accuracy"].value[0]  # type: ignore[union-attr]
    right = evaluate_baseline(task, "always last", [batch])
    assert right.value("accuracy") == 0


def test_word_in_windows_is_one_word(data: Path) -> None:
    model, words = small_model(context_length=3), []
    for passage, (word,), _ in PASSAGES:
        words.append(windowed_nats(model, "entp", bytes_of(passage), bytes_of(f" {word}"), 3))
    totals = measured(model, Lambada(block=3), "entp")
    assert totals.all["perplexity"].n == totals.all["accuracy"].n == len(words)
    assert totals.all["perplexity"].mean == pytest.approx(np.mean([sum(w) for w in words]))
    assert totals.all["bits_per_byte"].w == sum(map(len, words))
    task = Lambada(block=3)
    batch = task.batch(0, "test", 0, 100)
    wrong = np.where(batch.row == 2, batch.targets + 1, batch.targets)  # the first word's last row
    score = task.measure(batch, Predicted(wrong, None))["accuracy"]
    assert score is not None
    assert score.value[score.weight.astype(bool)].tolist() == [False, True]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_only_test_exists(data: Path, split: str) -> None:
    with pytest.raises(InputError, match=f"winogrande has no split {split}, only test"):
        Winogrande().batch(0, split, 0, 2)
    with pytest.raises(InputError, match="only test"):
        Winogrande().split_batches(split, 2)


def test_pairs_are_cut_as_the_harness_cuts_them() -> None:
    tokenizer = ByteTokenizer()
    given = [Request("a ", "b"), Request("", "b"), Request("a", " b")]
    assert encode_pairs(tokenizer, given) == [([97], [32, 98]), ([256], [98]), ([97], [32, 98])]
    with pytest.raises(InputError, match="nothing to score after 'a'"):
        encode_pairs(tokenizer, [Request("a", "")])


def test_tokenizer_is_found_by_its_name(data: Path) -> None:
    pytest.importorskip("tokenizers")
    made = train_bpe([" ".join(sentence for sentence, *_ in SENTENCES)] * 3, 280)
    name = tokenizer_name(made)
    with pytest.raises(InputError, match=f"the tokenizer {name} is not found"):
        find_tokenizer(name)
    (data / "run").mkdir()
    (data / "run/tokenizer.json").write_bytes(made.file() or b"")
    task = Winogrande(block=64, tokenizer=name)
    assert task.model_needs() == {"vocab": made.vocab, "context_length": 64}
    batch = task.batch(0, "test", 0, 2)
    assert task.to_text(batch.targets.tolist()) == " was glad. was glad."
    assert batch.x.shape[1] < len("Ann met Eve so Ann was glad")
    totals = measured(small_model(made.vocab), task, "entp")
    assert totals.all["bits_per_byte"].w == sum(
        len(f" {sentence.split('_')[1].strip()}") for sentence, *_ in SENTENCES
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer": "bpe"}, r"task\.tokenizer is 'bpe': allowed are bytes, gpt2"),
        ({"block": 0}, r"task\.block is 0: it must be at least 1"),
        ({"items": "some"}, "unknown task.items 'some': allowed are tiny, all"),
    ],
)
def test_wrong_field_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Winogrande(**changes)


def test_missing_and_damaged_files_are_named(data: Path) -> None:
    (data / "winogrande/dev.jsonl").write_text('{"sentence": "a _ b"}\n')
    with pytest.raises(InputError, match=r"winogrande/dev\.jsonl has a row without 'option1'"):
        Winogrande().read_items()
    (data / "winogrande/dev.jsonl").write_text("{}\nno\n")
    with pytest.raises(InputError, match=r"dev\.jsonl is not JSON with an object on line 2"):
        Winogrande().read_items()
    (data / "winogrande/dev.jsonl").unlink()
    with pytest.raises(InputError, match=r"winogrande/dev\.jsonl \(or with \.gz or \.xz\) is not"):
        Winogrande().read_items()
    assert Winogrande().draw().startswith("No example: winogrande/dev.jsonl")
    path = data / "zeroshot_eval/sciq.rc_0shot.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"sciq\.rc_0shot\.jsonl\.gz is damaged"):
        Sciq().read_items()


def test_data_folder_is_searched(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    assert len(Winogrande().with_data(str(data)).read_items()) == 5
    with pytest.raises(InputError, match="is no folder"):
        Winogrande().with_data(str(data / "nothing"))


REAL = os.environ.get("ENTP_DATA", "")
real = pytest.mark.skipif(
    not (Path(REAL) / "zeroshot_eval").is_dir(), reason="needs ENTP_DATA with the real files"
)


@real
def test_real_files_have_the_known_numbers() -> None:
    expected: dict[ZeroShot, int] = {
        Winogrande(): 1267,
        Winogrande(items="tiny"): 100,
        Piqa(): 1838,
        Sciq(): 1000,
        ArcEasy(): 570,
        Lambada(): 5153,
    }
    assert {task: len(task.read_items()) for task in expected} == expected


@real
def test_real_winogrande_is_that_of_the_stored_requests() -> None:
    class Stored(Sciq):
        file = "zeroshot_eval/winogrande.rc_0shot.jsonl"

    assert Stored().read_items() == Winogrande().read_items()
    tiny = Winogrande(items="tiny").read_items()
    assert sorted(item.label for item in tiny).count(0) == 45
