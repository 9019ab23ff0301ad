"""Text: what training and evaluation read, what is measured, and what is refused."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entp.data.prepare import prepare
from entp.data.shards import Corpus, open_corpus
from entp.errors import InputError
from entp.tasks.base import IGNORE, Batch, task_class
from entp.tasks.metrics import Predicted, Totals
from entp.tasks.text import Text
from entp.training.prefetch import batches_ahead

REAL = Path(os.environ.get("ENTP_DATA", "").split(os.pathsep)[0] or "nowhere")
WORDS = ["the", "cat", "sat", "naïve", "日本", "\n\n", "over", "12", "dogs'"]


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents that begin with their number."""
    rng = random.Random(seed)
    return [f"{n:03d} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for n in range(count)]


def write(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a file of text; only the cache in it is searched for corpora."""
    found = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENTP_CACHE", str(found / "cache"))
        patch.setenv("ENTP_DATA", "")
        write(found / "some.jsonl", texts(120))
        yield found


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    """120 documents as bytes, in shards that windows reach across."""
    out = folder / "cache" / "some"
    how: dict[str, Any] = {"name": "numbered", "valid": 0.2, "test": 0.1, "shard_tokens": 500}
    return open_corpus(prepare([folder / "some.jsonl"], out, quiet=True, **how))


@pytest.fixture(scope="module")
def bpe(folder: Path) -> Corpus:
    """The same documents as BPE."""
    pytest.importorskip("tokenizers")
    out = folder / "cache" / "some-bpe"
    how: dict[str, Any] = {"tokenizer": "bpe", "vocab": 290, "valid": 0.2, "test": 0.1}
    return open_corpus(prepare([folder / "some.jsonl"], out, quiet=True, **how))


def all_tokens(corpus: Corpus, split: str) -> list[int]:
    stream = corpus.tokens(split)
    return stream.take(np.zeros(1, np.int64), len(stream))[0].tolist()


def whole_split(task: Text, split: str, size: int) -> list[Batch]:
    count = task.split_batches(split, size)
    assert count is not None
    return [task.batch(0, split, step, size) for step in range(count)]


def test_training_reads_windows_from_all_over_the_text(corpus: Corpus) -> None:
    task = Text(corpus.hash, block=20)
    text = bytes(t % 256 for t in all_tokens(corpus, "train"))  # the end token as a zero
    starts = set()
    for step in range(20):
        batch = task.batch(3, "train", step, 8)
        assert batch.x.shape == batch.y.shape == (8, 20)
        assert (batch.x[:, 1:] == batch.y[:, :-1]).all()
        for x, y in zip(batch.x, batch.y, strict=True):
            row = bytes(int(t) % 256 for t in [*x, y[-1]])
            assert row in text
            starts.add(text.index(row))
    assert min(starts) < len(text) * 0.1
    assert max(starts) > len(text) * 0.9


def test_training_batch_belongs_to_seed_and_step(corpus: Corpus) -> None:
    task = Text(corpus.hash, block=20)
    first = task.batch(0, "train", 5, 4).x
    assert (first == task.batch(0, "train", 5, 4).x).all()
    assert (first != task.batch(0, "train", 6, 4).x).any()
    assert (first != task.batch(1, "train", 5, 4).x).any()


def test_processes_make_the_same_batches(corpus: Corpus) -> None:
    """They find the corpus by its hash."""
    task = Text(corpus.hash, block=20)
    for step, batch in enumerate(batches_ahead(task, 0, 4, range(3), processes=1)):
        assert (batch.x == task.batch(0, "train", step, 4).x).all()


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("rows", ["windows", "documents"])
@pytest.mark.parametrize(("block", "stride"), [(16, None), (16, 16), (16, 5), (1, None), (700, 3)])
def test_evaluation_has_each_token_as_a_target_once(
    corpus: Corpus, split: str, rows: Any, block: int, stride: int | None
) -> None:
    """Each after the token before it, the first after an end token."""
    task = Text(corpus.hash, block=block, stride=stride, rows=rows)
    pairs: Counter[tuple[int, int]] = Counter()
    for batch in whole_split(task, split, 7):
        read = batch.x[batch.row, batch.position]
        pairs.update(zip(read.tolist(), batch.targets.tolist(), strict=True))
    tokens = all_tokens(corpus, split)
    assert pairs == Counter(zip([corpus.end, *tokens], tokens, strict=False))


@pytest.mark.parametrize("rows", ["windows", "documents"])
def test_rows_are_stretches_of_text(corpus: Corpus, rows: Any) -> None:
    """Also those that overlap: earlier tokens are read, and are no targets again."""
    task = Text(corpus.hash, block=16, stride=5, rows=rows)
    text = [corpus.end, *all_tokens(corpus, "valid")]
    written = " ".join(map(str, text)) + " "
    for batch in whole_split(task, "valid", 7):
        for x, y in zip(batch.x, batch.y, strict=True):
            targets = (y != IGNORE).nonzero()[0]
            if len(targets):
                end = targets[-1] + 1
                row = " ".join(map(str, [*x[:end], y[end - 1]])) + " "
                assert row in written
                assert (x[end:] == 0).all()
                assert targets[0] in (0, 11)


def test_documents_begin_rows(corpus: Corpus) -> None:
    task = Text(corpus.hash, block=16, rows="documents")
    batches = whole_split(task, "valid", 7)
    begins = 0
    for batch in batches:
        assert batch.lengths is not None
        inside = np.arange(16) < batch.lengths[:, None]
        counted = batch.target_mask.any(1)
        assert (batch.target_mask == inside)[counted].all()
        begins += int((batch.x[counted, 0] == corpus.end).sum())
        assert (batch.x[:, 1:] != corpus.end).all()
    assert begins == corpus.manifest["splits"]["valid"]["documents"]


def test_training_on_documents_draws_parts_of_them(corpus: Corpus) -> None:
    task = Text(corpus.hash, block=16, rows="documents")
    begins = [task.batch(0, "train", step, 16).x[:, 0] == corpus.end for step in range(20)]
    documents, tokens = (corpus.manifest["splits"]["train"][k] for k in ("documents", "tokens"))
    parts = tokens / 16 + documents / 2
    assert np.mean(begins) == pytest.approx(documents / parts, abs=0.1)


def test_steps_beyond_the_split_begin_again(corpus: Corpus) -> None:
    task = Text(corpus.hash, block=16)
    count = task.split_batches("valid", 7)
    assert count is not None
    assert task.split_batches("train", 7) is None
    assert (task.batch(0, "valid", count + 1, 7).y == task.batch(0, "valid", 1, 7).y).all()
    assert (task.batch(5, "valid", 1, 7).y == task.batch(0, "valid", 1, 7).y).all()


def test_first_batch_is_from_all_over_the_split(corpus: Corpus) -> None:
    """The first documents alone would be no fair sample."""
    task = Text(corpus.hash, block=24)
    written = " ".join(map(str, all_tokens(corpus, "valid")))
    rows = task.batch(0, "valid", 0, 16).y
    places = np.sort([written.index(" ".join(map(str, row))) / len(written) for row in rows])
    assert places[0] < 0.2
    assert places[-1] > 0.8
    assert np.diff(places).max() < 0.3


def test_bits_per_byte_count_the_end_tokens_loss(bpe: Corpus) -> None:
    """Its nats are a cost of the text, and it has no bytes."""
    task = Text(bpe.hash, bpe.vocab, block=16)
    totals, nats = Totals(task.metrics), 0.0
    for step, batch in enumerate(whole_split(task, "valid", 7)):
        loss = np.random.default_rng(step).exponential(size=len(batch.targets))
        got = Predicted(np.where(batch.targets == bpe.end, bpe.end, -1), loss)
        totals += Totals.of(task.metrics, batch, task.measure(batch, got))
        nats += float(loss.sum())
    told = bpe.manifest["splits"]["valid"]
    assert totals.value("loss") == pytest.approx(nats / told["tokens"])
    assert totals.value("perplexity") == pytest.approx(math.exp(nats / told["tokens"]))
    assert totals.value("bits_per_byte") == pytest.approx(nats / math.log(2) / told["bytes"])
    ends = told["documents"] / told["tokens"]
    assert totals.value("token_accuracy") == pytest.approx(ends)
    assert list(totals.sliced("loss", "context")) == ["1", "2", "4", "8", "16"]


def test_unigram_baseline_knows_frequencies_alone(corpus: Corpus) -> None:
    task = Text(corpus.hash, block=16)
    batch = task.batch(0, "valid", 0, 8)
    got = task.baselines()["unigram"](batch)
    counts = Counter(all_tokens(corpus, "train"))
    total = sum(counts.values()) + corpus.vocab
    expected = [-math.log((counts[t] + 1) / total) for t in batch.targets.tolist()]
    assert got.loss == pytest.approx(expected)
    assert set(got.answer.tolist()) == {counts.most_common(1)[0][0]}


def test_caveats_tell_epochs(corpus: Corpus) -> None:
    task = Text(corpus.hash, block=16)
    tokens = corpus.manifest["splits"]["train"]["tokens"]
    assert task.caveats(tokens // 16) == []
    assert f"has {tokens:,}: 3.0 epochs" in task.caveats(3 * tokens // 16 + 1)[0]


def test_few_training_tokens_are_the_first_ones(corpus: Corpus) -> None:
    few, written = Text(corpus.hash, block=16, train_tokens=100), all_tokens(corpus, "train")
    begin = " ".join(map(str, written[:100]))
    for step in range(20):
        batch = few.batch(0, "train", step, 8)
        for row in np.concatenate([batch.x[:, :1], batch.y], axis=1):
            assert " ".join(map(str, row)) in begin
    assert "4.0 epochs" in few.caveats(25)[0]
    with pytest.raises(InputError, match=r"has .* tokens"):
        Text(corpus.hash, block=16, train_tokens=10**9).batch(0, "train", 0, 8)


def test_seen_windows_are_of_the_training_text(corpus: Corpus) -> None:
    task, written = Text(corpus.hash, block=16), all_tokens(corpus, "train")
    assert task.split_batches("seen", 7) == task.split_batches("test", 7)
    one, other = (task.batch(seed, "seen", 2, 7) for seed in (0, 5))
    assert (one.x == other.x).all()
    assert not (one.x == task.batch(0, "train", 2, 7).x).all()
    text = " ".join(map(str, written))
    assert all(" ".join(map(str, row)) in text for row in one.y)


@pytest.mark.parametrize("kind", ["corpus", "bpe"])
def test_text_comes_back_from_its_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    made: Corpus = request.getfixturevalue(kind)
    task = Text(made.hash, made.vocab + 3)
    text = "naïve 日本\n\n😀 the cat"
    assert task.to_text(task.from_text(text)) == text
    assert task.to_text([*task.from_text("sat"), made.end, made.vocab, made.vocab + 2]) == "sat"
    assert task.from_text("") == [task.stop] == [made.end]


def test_prompts_begin_test_documents(corpus: Corpus) -> None:
    task = Text(corpus.hash)
    prompts = task.prompts(0, 5)
    assert prompts == task.prompts(0, 5) != task.prompts(1, 5)
    assert [len(prompt) for prompt in prompts] == [8] * 5
    known = {text.encode()[:8] for text in texts(120)}
    assert {bytes(prompt) for prompt in prompts} <= known
    assert len({bytes(prompt) for prompt in prompts}) == 5


def test_example_shows_characters_that_do_not_print(corpus: Corpus) -> None:
    drawn = [Text(corpus.hash, block=64).draw(seed) for seed in range(4)]
    assert any("\\n" in lines for lines in drawn)
    assert all(len(lines.splitlines()) % 2 == 0 for lines in drawn)


def test_data_may_be_a_file_a_folder_or_a_hash(corpus: Corpus, folder: Path) -> None:
    found = [
        Text(block=16).with_data(data)
        for data in (str(corpus.folder), corpus.hash, "numbered", str(folder / "some.jsonl"))
    ]
    assert found[:3] == [Text(corpus.hash, 257, 16)] * 3
    assert found[3].corpus != corpus.hash  # with other fractions
    assert found[3].with_data(None) == found[3]


def test_default_is_the_text_that_every_python_has(folder: Path) -> None:
    task = Text().with_data(None)
    assert task == Text().with_data("pydoc")
    tokens = task.batch(0, "test", 0, 1).x[0, 1:].tolist()
    assert task.to_text(tokens).isprintable() or "\n" in task.to_text(tokens)


def test_other_text_needs_the_same_tokens(corpus: Corpus, bpe: Corpus, folder: Path) -> None:
    task = Text(corpus.hash)
    write(folder / "other.jsonl", texts(30, seed=1))
    other = task.with_data(str(folder / "other.jsonl"))
    assert other.corpus != task.corpus
    with pytest.raises(InputError, match=r"another tokenizer .bpe of 290 tokens"):
        task.with_data(bpe.hash)


@pytest.fixture
def other(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Another corpus of bytes, which no place has; the task's own is in the cache."""
    monkeypatch.setenv("ENTP_DATA", "")  # and back after the test, which adds places
    text = write(tmp_path / "other.jsonl", texts(30, seed=1))
    return open_corpus(prepare([text], tmp_path / "prepared/other", quiet=True))


def test_folder_of_a_corpus_is_that_corpus(corpus: Corpus, bpe: Corpus, other: Corpus) -> None:
    """Though the task's own is found too."""
    task = Text(corpus.hash)
    found = task.with_data(str(other.folder))
    assert found.corpus == other.hash != corpus.hash
    tokens = all_tokens(other, "test")
    assert sum(len(batch.targets) for batch in whole_split(found, "test", 4)) == len(tokens)
    with pytest.raises(InputError, match=r"another tokenizer .bpe of 290 tokens"):
        task.with_data(str(bpe.folder))


def test_tokenizer_of_an_absent_corpus_is_told_by_its_size(other: Corpus) -> None:
    with pytest.raises(InputError, match=r"bytes of 257 .* 0123456789abcdef .a tokenizer of 290."):
        Text("0123456789abcdef", vocab=290).with_data(str(other.folder))


def test_folder_of_corpora_has_to_hold_the_tasks_own(corpus: Corpus, other: Corpus) -> None:
    task, above = Text(corpus.hash), other.folder.parent
    with pytest.raises(InputError, match=rf"directly below it \(other\) none is {corpus.hash}"):
        task.with_data(str(above))
    shutil.copytree(corpus.folder, above / "own")
    assert task.with_data(str(above)) == task
    assert open_corpus(corpus.hash).folder == above / "own"


def test_folder_without_a_corpus_is_text_or_refused(corpus: Corpus, tmp_path: Path) -> None:
    task = Text(corpus.hash)
    (tmp_path / "texts/more").mkdir(parents=True)
    with pytest.raises(InputError, match=rf"directly below it \(none\) none is {corpus.hash}"):
        task.with_data(str(tmp_path / "texts"))
    write(tmp_path / "texts/some.jsonl", texts(30, seed=2))
    found = open_corpus(task.with_data(str(tmp_path / "texts")).corpus)
    assert found.name == "texts"
    assert [source["name"] for source in found.manifest["sources"]] == ["some.jsonl"]


def test_vocabulary_follows_the_corpus(bpe: Corpus) -> None:
    task = Text().with_data(bpe.hash)
    assert task.model_needs() == {"vocab": 290, "context_length": 128}
    with pytest.raises(InputError, match=r"has 290 tokens and task.vocab is 257"):
        Text(bpe.hash).batch(0, "train", 0, 1)


def test_run_folder_gets_manifest_and_tokenizer(corpus: Corpus, bpe: Corpus) -> None:
    assert list(Text(corpus.hash).files()) == ["corpus.json"]
    files = Text(bpe.hash, bpe.vocab).files()
    assert json.loads(files["corpus.json"]) == bpe.manifest
    assert files["tokenizer.json"] == (bpe.folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stride": 0}, "task.stride is 0: allowed are 1 to task.block, 128"),
        ({"block": 16, "stride": 17}, "task.stride is 17"),
        ({"block": 0}, "task.block is 0: it must be at least 1"),
        ({"rows": "lines"}, "allowed are windows, documents"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Text(**fields)


def test_missing_or_short_text_is_refused(corpus: Corpus) -> None:
    with pytest.raises(InputError, match="the task text has no corpus: give --data"):
        Text().batch(0, "train", 0, 1)
    with pytest.raises(InputError, match=r"0123456789abcdef is not in .*--data or ENTP_DATA"):
        Text("0123456789abcdef").batch(0, "train", 0, 1)
    tokens = corpus.manifest["splits"]["train"]["tokens"]
    with pytest.raises(InputError, match=f"has {tokens} tokens: task.block {tokens} needs"):
        Text(corpus.hash, block=tokens).batch(0, "train", 0, 1)
    one = Text(corpus.hash, block=tokens - 1).batch(0, "train", 0, 1)
    assert [*one.x[0], one.y[0, -1]] == all_tokens(corpus, "train")


def test_task_is_found_by_name() -> None:
    assert task_class("text") is Text


@pytest.mark.skipif(not (REAL / "gpt2_bpe").is_dir(), reason="ENTP_DATA has no gpt2_bpe")
def test_gpt2_tokens_are_rounded_up_as_in_the_paper(folder: Path) -> None:
    pytest.importorskip("tokenizers")
    out = folder / "cache" / "gpt2"
    made = prepare(
        [folder / "some.jsonl"], out, tokenizer="gpt2", gpt2=REAL / "gpt2_bpe", quiet=True
    )
    task = Text().with_data(str(made))
    assert task.model_needs()["vocab"] == 50304
    assert task.stop == 50256
    assert task.from_text("Hello world, this is ENTP.") == [
        *(15496, 995, 11, 428, 318, 12964, 7250, 13)
    ]
