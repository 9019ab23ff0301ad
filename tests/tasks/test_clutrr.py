"""CLUTRR: what is read and answered, which stories are left, and a run that learns it."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entp.cli.main import main
from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.data.tokenizers import train_bpe
from entp.errors import InputError
from entp.tasks.base import IGNORE
from entp.tasks.clutrr import RELATIONS, Clutrr
from entp.tasks.metrics import Predicted
from entp.tasks.tokens import find_tokenizer, tokenizer_name
from entp.training.checkpoint import load_run
from entp.training.evaluate import evaluate_baseline, split_batches
from entp.training.trainer import train

COLUMNS = ("id", "story", "query", "target", "target_text", "task_name")
NAMES = ("Al", "Bo", "Cy", "Di", "Ed")


def story(number: int, relation: str, chain: int) -> tuple[Any, ...]:
    """Two people, and as many sentences as the chain is long."""
    one, other = NAMES[number % 5], NAMES[(number + 1) % 5]
    text = " ".join([f"[{one}] saw [{other}], a {relation}."] * (chain - 1))
    query, target = f"('{one}', '{other}')", RELATIONS.index(relation)
    return number, text, query, target, relation, f"task_1.{chain}"


def table(rows: list[tuple[Any, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows([COLUMNS, *rows])
    return text.getvalue().encode()


TRAIN = [story(n, ("son", "niece", "son", "father-in-law")[n % 4], 2 + n % 3) for n in range(40)]
VALID = [story(n, ("son", "niece")[n % 2], 2 + n % 3) for n in range(11)]
TEST = [story(n, "niece" if n % 3 else "mother-in-law", 2 + n % 9) for n in range(20)]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three small files, which ENTP_DATA names."""
    folder = tmp_path / "data/clutrr"
    folder.mkdir(parents=True)
    (folder / "train.csv.xz").write_bytes(lzma.compress(table(TRAIN)))
    (folder / "validation.csv.gz").write_bytes(gzip.compress(table(VALID)))
    (folder / "test.csv").write_bytes(table(TEST))
    monkeypatch.setenv("ENTP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


def small(**changes: Any) -> Clutrr:
    return Clutrr(**{"train_examples": 20, "block": 64, **changes})


def texts(task: Clutrr, split: str, size: int = 8, step: int = 0) -> list[tuple[str, str]]:
    """What is read and asked of each row that has a target."""
    batch = task.batch(0, split, step, size)
    assert batch.lengths is not None
    found = []
    for x, y, length in zip(batch.x, batch.y, batch.lengths, strict=True):
        if (y != IGNORE).any():
            answer = y[y != IGNORE].tolist()
            read = x[:length].tolist()
            found.append(
                (
                    task.to_text(read),
                    str(answer[0]) if task.head == "class" else task.to_text(answer),
                )
            )
    return found


def test_question_is_the_beginning_of_a_sentence(data: Path) -> None:
    for read, answer in texts(small(), "train"):
        assert answer in (" son", " niece")
        first, second = read.split(" is ")[0].split(" ")[-1], read.split(" is ")[1].split("'")[0]
        assert read.endswith(f" {first} is {second}'s{answer[:-1]}")
        assert read.startswith(f"{second} saw {first}, a{answer}.")
        assert "[" not in read


def test_class_is_asked_at_the_last_position(data: Path) -> None:
    task = small(head="class")
    batch = task.batch(0, "valid", 0, 8)
    assert batch.lengths is not None
    assert batch.target_mask.sum(1).tolist() == [1] * 8
    assert (batch.position == batch.lengths - 1).all()
    for read, answer in texts(task, "valid"):
        assert read.endswith("'s")
        assert f" a {RELATIONS[int(answer)]}." in read
    assert task.model_needs() == {"vocab": 257, "context_length": 64, "outputs": 18}
    assert small().model_needs() == {"vocab": 257, "context_length": 64}


def test_filter_leaves_out_relations_in_law(data: Path) -> None:
    def answers(task: Clutrr) -> set[str]:
        return {answer for _, answer in texts(task, "train", 100)}

    wide = {"train_examples": 28, "block": 256}
    assert answers(small(**wide)) == {" son", " niece"}
    assert answers(small(filter=False, **wide)) == {" son", " niece", " father-in-law"}


def test_long_stories_are_dropped_or_cut(data: Path) -> None:
    dropped = small()
    all_of = dropped.split_batches("test", 1)
    cut = replace(dropped, long="cut")
    assert all_of is not None
    assert all_of < 13 == cut.split_batches("test", 1)
    long = [read for read, _ in texts(cut, "test", 100)]
    assert max(len(read) for read in long) == 64
    assert all(read.endswith("'s niec") for read in long)
    told = f"{13 - all_of} of 13 in test"
    assert told in dropped.caveats(0)[1]
    assert dropped.caveats(0)[1].startswith("Stories left out, beyond 64 tokens: ")
    assert cut.caveats(0)[1].startswith("Stories cut to 64 tokens: ")


def test_training_stories_are_drawn_by_the_split_seed(data: Path) -> None:
    def numbers(task: Clutrr, seed: int = 0) -> set[int]:
        note = task.batch(seed, "train", 0, 2000).note
        assert note is not None
        return set(note.tolist())

    one = small(long="cut")
    assert len(numbers(one)) == 20
    assert numbers(one) == numbers(one, seed=5)
    other = one.for_seed(3)
    assert other.split_seed == 3
    assert numbers(other) != numbers(one)
    assert len(numbers(other)) == 20
    with pytest.raises(InputError, match=r"train_examples is 99: .* there are 30 stories"):
        small(train_examples=99, long="cut").batch(0, "train", 0, 2)


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("size", [1, 4, 32])
def test_every_story_is_measured_once(data: Path, split: str, size: int) -> None:
    task = small(long="cut")
    count = task.split_batches(split, size)
    assert count is not None
    batches = [task.batch(0, split, step, size) for step in range(count)]
    assert {len(batch.x) for batch in batches} == {size}
    notes = [n for b in batches for n, some in zip(b.note, b.target_mask.any(1)) if some]  # type: ignore[arg-type]  # noqa: B905
    assert len(notes) == len(set(notes)) == {"valid": 11, "test": 13}[split]
    assert task.split_batches("train", size) is None


def test_accuracy_is_by_chain_length(data: Path) -> None:
    task = small(long="cut", block=300)
    batch = task.batch(0, "test", 0, 32)
    answer = batch.targets.copy()
    answer[batch.row == 0] += 1
    scores = task.measure(batch, Predicted(answer, np.ones(len(answer))))
    score = scores["accuracy"]
    assert score is not None
    assert score.weight.sum() == 13
    assert score.value.sum() == 12
    reads = [read for read, _ in texts(task, "test", 32)]
    assert score.slices["chain"][:13].tolist() == [1 + read.count("saw") for read in reads]


def test_baseline_says_the_commonest_relation(data: Path) -> None:
    for head in ("tokens", "class"):
        task = small(head=head, long="cut", train_examples=30)
        totals = evaluate_baseline(task, "commonest", split_batches(task, "valid", None, 4, 0))
        assert totals.value("accuracy") == pytest.approx(6 / 11)  # son


def test_hash_of_the_files_is_part_of_the_task(data: Path) -> None:
    task = small().with_data(None)
    assert len(task.data) == 16
    assert task.vocab == 257
    assert task.caveats(0)[0] == f"The files of CLUTRR have the hash {task.data}."
    (data / "clutrr/test.csv.xz").write_bytes(lzma.compress(table(TEST)))
    (data / "clutrr/test.csv").unlink()
    again = data / "again"
    (data / "clutrr").rename(again)
    again.rename(data / "clutrr")
    assert small().with_data(str(data)).data == task.data  # compression does not count


def test_other_files_are_refused(data: Path, tmp_path: Path) -> None:
    task = small().with_data(None)
    other = tmp_path / "other/clutrr"
    other.mkdir(parents=True)
    for name, rows in (("train", TRAIN), ("validation", VALID), ("test", TEST[:-1])):
        (other / f"{name}.csv").write_bytes(table(rows))
    changed = task.with_data(str(tmp_path / "other"))
    with pytest.raises(InputError, match=f"and the task was made with {task.data}"):
        changed.batch(0, "test", 0, 2)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ((0, "x", "Al", 15, "son", "task_1.2"), "ValueError"),
        ((0, "x", "('Al', 'Bo')", 15, "niece", "task_1.2"), "relation 15 is niece"),
        ((0, "x", "('Al', 'Bo')", 20, "son", "task_1.2"), "IndexError"),
    ],
)
def test_foreign_row_is_refused(data: Path, row: tuple[Any, ...], told: str) -> None:
    (data / "clutrr/test.csv").write_bytes(table([row]))
    with pytest.raises(InputError, match=rf"clutrr/test\.csv has a row that is not .*{told}"):
        small().batch(0, "test", 0, 2)


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTP_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"clutrr/train\.csv \(or with \.gz or \.xz\) is not in"):
        small().with_data(None)
    assert small().draw().startswith("No example: clutrr/train.csv")


def small_clutrr_run(steps: int, **changes: Any) -> Run:
    task = small(long="cut", **changes)
    return Run(
        task,
        model_for(task, "small", layers=2, heads=2, width=32),
        "decoder",
        steps=steps,
        batch_size=16,
        optim=OptimConfig(lr=3e-3, min_lr=3e-4, warmup_steps=1, decay_steps=steps),
        train=TrainConfig(eval_every=steps, eval_batches=100, eval_splits=("test",)),
    )


def test_class_of_the_story_is_learned(data: Path, tmp_path: Path) -> None:
    """The small stories tell it in words."""
    result = train(small_clutrr_run(60, head="class"), tmp_path / "run", device="cpu", quiet=True)
    assert result.metrics["n"] == 11
    assert result.metrics["accuracy"] > 0.9


def test_tokens_of_the_relation_are_learned(data: Path, tmp_path: Path) -> None:
    result = train(small_clutrr_run(60), tmp_path / "run", device="cpu", quiet=True)
    assert result.metrics["loss"] < 1.5  # at first it is that of 257 tokens, 5.5


def run_entp(command: str, *words: str) -> None:
    assert main([*command.split(), "--device=cpu", *words]) == 0


def test_fine_tuning_from_a_run_on_text(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tokenizer, context length, mode and model are those of the run it begins with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prose.txt").write_text("Al saw Bo, a son. Cy saw Di, a niece. " * 200)
    shape = ["--model.layers=2", "--model.heads=2", "--model.width=16"]
    few = ["--batch-size=4", "--steps=2"]
    run_entp("train prose.txt --mode=decoder --task.block=48 --out=text", *shape, *few)
    own = ["--task.train-examples=20", "--task.long=cut", "--task.head=class"]
    run_entp("train clutrr --init=text --out=tuned", *own, *few)
    assert "The output head is new: 18 outputs" in capsys.readouterr().err
    run = load_run("tuned")
    assert isinstance(run.task, Clutrr)
    assert (run.task.tokenizer, run.task.block, run.mode) == ("bytes", 48, "decoder")
    assert run.task.data == small().with_data(None).data
    assert run.model == replace(load_run("text").model, outputs=18)
    run_entp("evaluate tuned --batches=all --by=chain")
    assert "clutrr, mode decoder, 13 sequences of test" in capsys.readouterr().out


def test_run_with_a_bpe_tokenizer_finds_it_in_its_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the folder is, and without the run that it began with."""
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    made = train_bpe(["Al saw Bo, a son. Cy saw Di, a niece. Di is Cy's niece."] * 9, 270)
    (data / "corpus").mkdir()
    (data / "corpus/tokenizer.json").write_bytes(made.file() or b"")
    run = small_clutrr_run(2, tokenizer=tokenizer_name(made), vocab=made.vocab)
    train(run, "run", device="cpu", quiet=True)
    (data / "corpus/tokenizer.json").unlink()
    find_tokenizer.cache_clear()
    Path("run").rename("moved")
    run_entp("train clutrr --resume --out=moved --steps=3")
    for command in (
        "evaluate moved --batches=2",
        "evaluate moved/checkpoints/step-00000003 --batches=2",
        "export moved --out=exported --test-sequences=4",
        "evaluate exported --batches=2",
    ):
        find_tokenizer.cache_clear()
        monkeypatch.setenv("ENTP_DATA", str(data))
        run_entp(command)


REAL = os.environ.get("ENTP_DATA", "")


@pytest.mark.skipif(
    not (Path(REAL) / "clutrr").is_dir() or not (Path(REAL) / "gpt2_bpe").is_dir(),
    reason="needs ENTP_DATA with the real files",
)
def test_real_stories_are_as_many_as_the_authors_kept() -> None:
    pytest.importorskip("tokenizers")
    task = Clutrr(tokenizer="gpt2")
    left = {split: task.split_batches(split, 1) for split in ("valid", "test")}
    assert left == {"valid": 2817, "test": 843}
    assert "7 of 11,236 in train, 0 of 2,817 in valid, 177 of 1,020 in test" in task.caveats(0)[1]
    batch = task.batch(0, "test", 0, 843)
    assert batch.target_mask.sum(1).tolist() == [1] * 843  # each relation is one token
    chain = task.measure(batch, Predicted(batch.targets, None))["accuracy"]
    assert chain is not None
    counts = np.bincount(chain.slices["chain"])[2:].tolist()
    assert counts == [38, 102, 67, 178, 103, 143, 114, 73, 25]
