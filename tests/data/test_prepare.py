"""A prepared corpus has every document once, the same to the bit after a kill or a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_texts import REAL, documents, needs_real_data, write_jsonl

from entp.data import preparation as module
from entp.data.manifest import SPLITS
from entp.data.prepare import prepare, resolve
from entp.data.shards import Corpus, open_corpus
from entp.data.splits import Fractions, split_of
from entp.errors import InputError

SCRIPT = """
import resource, sys
from pathlib import Path
from entp.data import preparation as module
from entp.data.prepare import prepare
from entp.errors import InputError

text, out, tokenizer, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
module.BATCH = 4_000
options = dict(vocab=300, shard_tokens=20_000, save_seconds=0, quiet=True)
try:
    prepare([Path(text)], Path(out), tokenizer=tokenizer, **options)
except InputError as error:
    sys.exit(str(error))
"""
"""Prepares in small steps, each saved at once; `limit` is the largest file that may be written."""


def start(text: Path, out: Path, tokenizer: str = "bytes", limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(text), str(out), tokenizer, str(limit)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def whole(corpus: Corpus, split: str) -> list[int]:
    tokens = corpus.tokens(split)
    return tokens.take(np.array([0]), len(tokens))[0].tolist()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("batch", [50, 4_000_000])
def test_every_document_is_in_its_split(
    tokenizer: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", batch)
    texts = documents(80)
    given = [write_jsonl(tmp_path / "a.jsonl.gz", texts[:50])]
    given.append(write_jsonl(tmp_path / "b.jsonl", texts[50:]))
    options: dict[str, Any] = {"valid": 0.1, "test": 0.2, "vocab": 300, "shard_tokens": 999}
    folder = prepare(given, tmp_path / "out", tokenizer=tokenizer, quiet=True, **options)
    corpus = open_corpus(folder)
    corpus.verify()
    for split in SPLITS:
        mine = [t for n, t in enumerate(texts) if split_of(n, Fractions(0.1, 0.2)) == split]
        rows = [[*tokens, corpus.end] for tokens in corpus.tokenizer.encode_batch(mine)]
        assert whole(corpus, split) == [token for row in rows for token in row]
        assert corpus.documents(split).tolist() == np.cumsum([0, *map(len, rows[:-1])]).tolist()
        assert corpus.manifest["splits"][split]["bytes"] == sum(len(t.encode()) for t in mine)
    assert not list(folder.glob("*.part")) + list(folder.glob("progress.json"))
    assert [one["name"] for one in corpus.manifest["sources"]] == ["a.jsonl.gz", "b.jsonl"]


def test_one_document_is_cut_in_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entp.data.sources.PIECE", 64)
    text = " ".join(documents(40))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = open_corpus(prepare([tmp_path / "a.txt"], tmp_path / "out", quiet=True))
    parts = [corpus.tokenizer.decode(whole(corpus, split)) for split in SPLITS]
    assert "".join(parts) == text
    assert abs(len(parts[1]) - len(text) / 100) <= 1
    assert abs(len(parts[2]) - len(text) / 100) <= 1
    assert [len(corpus.documents(split)) for split in SPLITS] == [1, 1, 1]


def test_bpe_learns_from_training_documents_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three documents the second is for validation and the third for test."""
    texts = ["hello " * 50, "goodbye " * 500, "farewell " * 500]
    text = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = prepare([text], tmp_path / "out", tokenizer="bpe", vocab=270, quiet=True)
    tokenizer = open_corpus(folder).tokenizer
    assert len(tokenizer.encode("hello")) < 5
    assert len(tokenizer.encode("goodbye")) == 7
    monkeypatch.setattr(module, "BPE_BYTES", 1)
    text = write_jsonl(tmp_path / "b.jsonl", [*texts, *["goodbye " * 500] * 20])
    folder = prepare([text], tmp_path / "few", tokenizer="bpe", vocab=270, quiet=True)
    assert len(open_corpus(folder).tokenizer.encode("goodbye")) == 7


def test_hash_depends_on_the_text_and_not_on_names(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", documents(9))
    two = write_jsonl(tmp_path / "two.jsonl", documents(9))
    other = write_jsonl(tmp_path / "other.jsonl", documents(9, seed=1))
    folders = [prepare([path], quiet=True) for path in (one, two, other)]
    hashes = [open_corpus(folder).hash for folder in folders]
    assert hashes[0] == hashes[1] != hashes[2]
    named = prepare([one], tmp_path / "named", name="mine", quiet=True)
    assert open_corpus(named).name == "mine"
    assert open_corpus(named).hash == hashes[0]
    assert [open_corpus(folder).name for folder in folders] == ["one", "two", "other"]


def test_corpus_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", documents(9))
    first = prepare([text], quiet=True)
    times = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    (first / "progress.json").write_text("{}")  # a kill between the manifest and its removal
    assert prepare([text], quiet=True) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == times
    write_jsonl(text, documents(10))
    assert prepare([text], quiet=True) != first


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"tokenizer": "bpe"}, "other tokenizer and vocab"),
        ({"valid": 0.5}, "other fractions"),
        ({"shard_tokens": 7}, "other shard_tokens"),
    ],
)
def test_folder_of_another_corpus_is_refused(
    options: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", documents(9))
    out = prepare([text], tmp_path / "out", quiet=True)
    with pytest.raises(InputError, match=f"out holds a corpus with {fault}: give another folder"):
        prepare([text], out, quiet=True, **options)
    write_jsonl(text, documents(8))
    with pytest.raises(InputError, match="out holds a corpus with other sources"):
        prepare([text], out, quiet=True)


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", documents(9))
    with pytest.raises(InputError, match="has other files in it: give a new folder by --out"):
        prepare([text], tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(InputError, match=r"a\.jsonl cannot be written: File exists\. Give another"):
        prepare([text], text, quiet=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "progress.json").write_text('{"of": "another program"}')
    with pytest.raises(InputError, match=r"progress\.json is not one of entp's"):
        prepare([text], tmp_path / "b", quiet=True)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_killed_preparation_goes_on_to_the_same_bits(tokenizer: str, tmp_path: Path) -> None:
    """Two kills, each after some more was written, at moments that nobody chose."""
    text = write_jsonl(tmp_path / "a.jsonl.xz", documents(2000))
    process = start(text, tmp_path / "whole", tokenizer)
    assert process.wait(60) == 0, process.stderr and process.stderr.read()
    out, seen = tmp_path / "killed", [0]
    for _ in range(2):
        process = start(text, out, tokenizer)
        while process.poll() is None and saved_tokens(out) <= seen[-1] + 10_000:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        seen.append(saved_tokens(out))
        assert not (out / "manifest.json").exists()
    assert seen == sorted(set(seen))
    process = start(text, out, tokenizer)
    assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert contents(out) == contents(tmp_path / "whole")
    assert len(list(out.glob("train-*.bin"))) > 2


def saved_tokens(folder: Path) -> int:
    try:
        splits = json.loads((folder / "progress.json").read_text())["splits"]
    except OSError:
        return 0
    return sum(split["tokens"] for split in splits.values()) if splits else 0


def test_full_disk_is_told_and_what_is_there_is_kept(tmp_path: Path) -> None:
    """Files may not grow beyond 30,000 bytes, then there is room again."""
    text = write_jsonl(tmp_path / "a.jsonl", documents(800))
    assert start(text, tmp_path / "whole").wait(60) == 0
    out = tmp_path / "out"
    process = start(text, out, limit=30_000)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "out cannot be written: File too large. Make room and run the same command" in error
    assert f"it goes on with what is in {out}." in error
    assert 0 < saved_tokens(out) <= 20_000
    assert start(text, out).wait(60) == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_preparation_that_stopped_at_the_manifest_is_finished(tmp_path: Path) -> None:
    """Every shard is closed by then, which is after what was saved last."""
    text = write_jsonl(tmp_path / "a.jsonl", documents(800))
    assert start(text, tmp_path / "whole").wait(60) == 0
    out = tmp_path / "out"
    assert start(text, out, limit=30_000).wait(60) == 1
    (out / "manifest.json").mkdir()  # in its way
    _, error = start(text, out).communicate(timeout=300)
    assert "manifest.json.tmp cannot be written: Is a directory" in error
    (out / "manifest.json").rmdir()
    assert start(text, out).wait(60) == 0
    assert contents(out) == contents(tmp_path / "whole")


def stopped_halfway(folder: Path) -> tuple[Path, Path]:
    """A text, and the folder of a preparation that stopped after some shards."""
    text = write_jsonl(folder / "a.jsonl", documents(2000))
    text.write_bytes(text.read_bytes()[:-9])  # its last line is broken
    process = start(text, folder / "out")
    _, error = process.communicate(timeout=300)
    assert "a.jsonl, line 2000 is not JSON" in error
    return text, folder / "out"


def test_source_that_changed_is_refused_when_going_on(tmp_path: Path) -> None:
    text, out = stopped_halfway(tmp_path)
    write_jsonl(text, documents(2000))
    _, error = start(text, out).communicate(timeout=300)
    assert "out holds a corpus with other sources" in error


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00002.bin", "train.documents.part"])
def test_damage_is_noticed_when_going_on(name: str, tmp_path: Path) -> None:
    text, out = stopped_halfway(tmp_path)
    assert (out / "train-00002.bin").is_file()
    data = (out / name).read_bytes()
    (out / name).write_bytes(data[:-2])
    _, error = start(text, out).communicate(timeout=300)
    assert f"{name} is not what was written before: delete the folder" in error


def test_two_processes_prepare_the_same_folder_once(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", documents(800))
    both = [start(text, tmp_path / "out") for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert start(text, tmp_path / "whole").wait(60) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak there")
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """A file of 60 MB takes hardly more memory than one of 6 MB."""
    code = (
        "import re, sys; from pathlib import Path; from entp.data.prepare import prepare; "
        "prepare([Path(sys.argv[1])], Path(sys.argv[2]), quiet=True); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    peaks = []
    for name, lines in (("small", 100_000), ("large", 1_000_000)):
        path = tmp_path / f"{name}.txt"
        path.write_text("a line of sixty letters, more or less, in one long document\n" * lines)
        command = [sys.executable, "-c", code, str(path), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < peaks[0] + 20, peaks


def test_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer 'byte': allowed are bytes, bpe, gpt2, or"):
        prepare("pydoc", tmp_path, tokenizer="byte")
    with pytest.raises(InputError, match=r"gpt2_bpe/encoder\.json is not in .*ENTP_DATA"):
        prepare("pydoc", tmp_path, tokenizer="gpt2")
    with pytest.raises(InputError, match="vocab is 3: BPE has at least 257 tokens"):
        prepare("pydoc", tmp_path, tokenizer="bpe", vocab=3)
    with pytest.raises(InputError, match="no text is given"):
        prepare([], tmp_path)


def test_pydoc_needs_no_files(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    corpus = resolve("pydoc")
    assert corpus.folder.parent == cache
    splits = corpus.manifest["splits"]
    documents = {split: splits[split]["documents"] for split in SPLITS}
    assert documents["train"] > 50
    assert min(documents.values()) >= 2
    assert splits["train"]["bytes"] > 300_000
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"preparing pydoc in {corpus.folder}"
    assert told[1].startswith(
        f"corpus {corpus.hash}: tokens of train {splits['train']['tokens']:,}"
    )
    assert resolve("pydoc") is corpus
    assert capsys.readouterr().err == ""


def test_data_may_be_a_folder_a_hash_or_text(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    text = write_jsonl(tmp_path / "a.jsonl", documents(9))
    made = resolve(str(text))
    assert made.folder.parent == cache
    assert made.manifest["tokenizer"]["kind"] == "bytes"
    assert resolve(made.hash) is made
    out = prepare([text], tmp_path / "far" / "away", tokenizer="bpe", vocab=300, quiet=True)
    monkeypatch.chdir(tmp_path / "far")
    corpus = resolve("away")
    assert corpus.folder == out
    code = f"from entp.data.shards import open_corpus; print(open_corpus({corpus.hash!r}).folder)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout == f"{out}\n"
    other = resolve("away", corpus.tokenizer)
    assert other is corpus


def test_data_may_be_a_name_below_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "corpus").mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "corpus" / "stories.jsonl.xz", documents(9))
    with pytest.raises(InputError, match="there is no text 'stories': give a text file"):
        resolve("stories")
    monkeypatch.setenv("ENTP_DATA", str(tmp_path / "data"))
    first = resolve("stories")
    assert first.name == "stories"
    assert resolve("stories") is first
    second = open_corpus(prepare("stories", tokenizer="bpe", vocab=300, quiet=True))
    assert second.manifest["tokenizer"]["kind"] == "bpe"
    assert resolve("stories", second.tokenizer) is second
    assert resolve("stories", first.tokenizer) is first
    with pytest.raises(InputError, match=f"several corpora are called stories.*{second.hash}"):
        resolve("stories")
    assert resolve(second.folder.name) is second


def test_text_is_prepared_with_the_tokenizer_of_a_folder(tmp_path: Path, cache: Path) -> None:
    """The same tokens as where it was learned, found again, and told from a learned one."""
    text = write_jsonl(tmp_path / "a.jsonl", documents(30))
    learned = prepare([text], tmp_path / "one", tokenizer="bpe", vocab=300, quiet=True)
    again = prepare([text], tokenizer=str(learned), quiet=True)
    assert again.parent == cache
    assert again == prepare([text], tokenizer=str(learned / "tokenizer.json"), quiet=True)
    one, other = open_corpus(learned), open_corpus(again)
    assert one.hash != other.hash  # what decides the tokens differs
    for split in ("train", "valid", "test"):
        assert whole(one, split) == whole(other, split)
    text = write_jsonl(tmp_path / "b.jsonl", documents(9, seed=1))
    third = resolve(str(text), one.tokenizer)
    assert third.manifest["tokenizer"] == one.manifest["tokenizer"]
    with pytest.raises(InputError, match="holds a corpus with other sources and tokenizer"):
        prepare([text], again, tokenizer="bytes", quiet=True)


def test_two_names_make_one_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTP_DATA", str(tmp_path))
    for seed, name in enumerate(("one", "two")):
        write_jsonl(tmp_path / f"{name}.jsonl", documents(9, seed))
    corpus = open_corpus(prepare(["one", "two"], quiet=True))
    assert corpus.name == "one+two"
    assert sum(split["documents"] for split in corpus.manifest["splits"].values()) == 18


def test_openwebtext_is_only_prepared_when_asked() -> None:
    with pytest.raises(InputError, match="entp data prepare openwebtext --tokenizer gpt2"):
        resolve("openwebtext")


def test_openwebtext_without_its_library_or_network_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(InputError, match=r"needs the datasets library: pip install 'entp\[openweb"):
        prepare("openwebtext", tmp_path)
    monkeypatch.undo()
    pytest.importorskip("datasets")
    code = "from entp.data.prepare import prepare; prepare('openwebtext')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "InputError: Skylion007/openwebtext cannot be read from the HuggingFace" in done.stderr


@needs_real_data
def test_real_text_with_gpt2s_tokenizer(tmp_path: Path) -> None:
    """Bytes and tokens add up to those of the two files."""
    files = sorted((REAL / "wikitext2_eval").glob("*.txt"))
    options: dict[str, Any] = {"tokenizer": "gpt2", "gpt2": REAL / "gpt2_bpe", "quiet": True}
    corpus = open_corpus(prepare(files, tmp_path / "out", **options))
    splits = corpus.manifest["splits"].values()
    assert sum(split["bytes"] for split in splits) == sum(f.stat().st_size for f in files)
    assert 4 < sum(s["bytes"] for s in splits) / sum(s["tokens"] for s in splits) < 5
    text = files[0].read_text(encoding="utf-8")
    assert text.startswith(corpus.tokenizer.decode(whole(corpus, "train")[:1000]))
