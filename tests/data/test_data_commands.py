"""`entp data`: prepare a corpus, list those that are found, and say what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_texts import documents, write_jsonl

from entp.cli.main import main
from entp.data.shards import open_corpus


def test_prepare_prints_hash_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", documents(9))
    two = tmp_path / "two.txt"
    two.write_text("another document")
    out = tmp_path / "out"
    words = ["--tokenizer", "bpe", "--vocab", "280", "--name", "mine", "--out", str(out)]
    assert main(["data", "prepare", str(one), str(two), *words, "--valid=0.2"]) == 0
    corpus = open_corpus(out)
    assert capsys.readouterr().out == f"{corpus.hash} {out}\n"
    assert (corpus.name, corpus.vocab) == ("mine", 280)
    assert sum(split["documents"] for split in corpus.manifest["splits"].values()) == 10
    assert corpus.manifest["settings"]["fractions"] == {"valid": 0.2, "test": 0.01, "seed": 0}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["train", "text", "--data=text.txt", "--out=run"], "ENTP_CACHE"),
        (["data", "prepare", "text.txt"], "ENTP_CACHE"),
        (["data", "prepare", "text.txt", "--out=text.txt/corpus"], "--out"),
    ],
)
def test_folder_that_cannot_be_written_is_named_with_what_gives_another(
    words: list[str],
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The --out of `entp train` is the run's: giving another would help nobody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENTP_CACHE", "text.txt/cache")
    Path("text.txt").write_text("a text")
    assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("entp: text.txt/")
    assert said.endswith(f"cannot be written: Not a directory. Give another folder by {remedy}.")


def test_list_shows_what_is_found(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["data", "list"]) == 0
    assert f"no prepared corpus in {cache}: make one" in capsys.readouterr().out
    text = write_jsonl(tmp_path / "stories.jsonl", documents(9))
    assert main(["data", "prepare", str(text)]) == 0
    key, folder = capsys.readouterr().out.split()
    assert Path(folder).parent == cache
    for words in (["data"], ["data", "list"], ["data", "list", "--verify"]):
        assert main(words) == 0
        head, _, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["name", "hash", "tokenizer", "vocab", "tokens", "place"]
        tokens = sum(s["tokens"] for s in open_corpus(key).manifest["splits"].values())
        assert row.split() == ["stories", key, "bytes", "257", f"{tokens:,}", folder]


def test_list_names_a_damaged_corpus_and_shows_the_others(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "bad"):
        write_jsonl(tmp_path / f"{name}.jsonl", documents(9, seed=len(name)))
        assert main(["data", "prepare", str(tmp_path / f"{name}.jsonl")]) == 0
    bad = next(cache.glob("bad-*")) / "train-00000.bin"
    data = bad.read_bytes()
    bad.write_bytes(b"xx" + data[2:])
    capsys.readouterr()
    assert main(["data", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["data", "list", "--verify"]) == 2
    shown = capsys.readouterr()
    assert "good" in shown.out
    assert "bad" not in shown.out
    assert f"{bad} is not what was written" in shown.err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("prepare", "needs a source before its options"),
        ("prepare --tokenizer bytes", "needs a source before its options"),
        ("prepare nowhere.txt", "there is no text 'nowhere.txt'"),
        ("prepare pydoc nowhere", "there is no text 'pydoc'"),
        ("prepare pydoc --tokenizer words", "no tokenizer 'words': allowed are bytes, bpe"),
        ("prepare pydoc --tokenizer gpt2", "gpt2_bpe/encoder.json is not in"),
        ("prepare pydoc --valid 0", "valid is 0.0 and test 0.05: both must be above 0"),
        ("prpare", "unknown part of entp data 'prpare': allowed are prepare, list"),
        ("list --all", "--all"),
    ],
)
def test_bad_words_are_refused(
    words: str, fault: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert main(["data", *words.split()]) == 2
    shown = capsys.readouterr()
    assert fault in shown.err
    assert shown.out == ""
    assert not list(cache.iterdir())


@pytest.mark.parametrize("words", ["", "prepare", "list", "prepare pydoc"])
@pytest.mark.parametrize("word", ["--help", "--help-all"])
def test_data_commands_have_help(
    words: str, word: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", *words.split(), word])
    assert stop.value.code in (0, None)
    part = words.split()[:1]
    assert f"usage: {' '.join(['entp', 'data', *part])}" in capsys.readouterr().out
    assert not list(cache.iterdir())


def test_preparing_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from entp.cli.main import main; "
        "assert main(['data', 'prepare', 'pydoc']) == 0; assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "ENTP_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vocab=300"], "--vocab is for --tokenizer bpe, and the tokenizer is bytes"),
        (["--tokenizer=bpe", "--gpt2=there"], "--gpt2 is for --tokenizer gpt2, and the tokenizer"),
    ],
)
def test_options_of_another_tokenizer_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("a text")
    assert main(["data", "prepare", str(tmp_path / "notes.txt"), *words]) == 2
    assert said in capsys.readouterr().err
