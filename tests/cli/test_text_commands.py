"""Text from the command line: a file is trained on, continued as it comes, and found again."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from small_runs import entp, environment, run_python

from entp.cli.generate import pieces
from entp.cli.main import main
from entp.data.places import cache_folder
from entp.data.shards import open_corpus
from entp.data.tokenizer import Tokenizer
from entp.data.tokenizers import ByteTokenizer
from entp.results.store import read_record
from entp.tasks.text import Text
from entp.training.loggers import read_metrics

TINY = ["--task.block=16", "--layers=2", "--heads=1", "--width=8", "--batch-size=8"]
TINY += ["--train.eval-every=5", "--train.checkpoint-every=5", "--warmup=2", "--lr=0.01"]
WORDS = ["the", "cat", "sat", "on", "a", "naïve", "mat", "and", "日本", "dogs", "ran", "over"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with notes.txt, a cache, and a run on these notes."""
    found = tmp_path_factory.mktemp("text_commands")
    rng = random.Random(0)
    (found / "notes.txt").write_text(" ".join(rng.choices(WORDS, k=3000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENTP_CACHE", str(found / "cache"))
        patch.setenv("ENTP_DATA", "")
        patch.chdir(found)
        assert main(["train", "notes.txt", *TINY, "--steps=10", "--out=run"]) == 0
        yield found


def read(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What a command prints that ends well, on both streams."""
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_file_is_trained_on_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = read(capsys, "train", "notes.txt", *TINY, "--steps=2", f"--out={folder / 'once'}")
    assert "entp train text --data notes.txt" in err
    assert "bytes" in err
    assert "bits_per_byte" in out
    again, _ = read(capsys, "train", "text", "--data=notes.txt", *TINY, "--steps=2", "--out=twice")
    assert re.sub(r"[\d.]+ s of|\(.*\)", "", again) == re.sub(r"[\d.]+ s of|\(.*\)", "", out)


def test_run_stores_the_hash_and_no_path(folder: Path) -> None:
    config = (folder / "run/config.json").read_text()
    assert re.fullmatch("[0-9a-f]{16}", json.loads(config)["task"]["corpus"])
    for name in ("config.json", "environment.json", "corpus.json"):
        assert str(folder) not in (folder / "run" / name).read_text()


def weights(run: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")


@pytest.mark.parametrize("more", [[], ["--random-targets.count=4"], ["--task.rows=documents"]])
def test_resumed_training_is_the_same(folder: Path, more: list[str]) -> None:
    """5 + 5 steps equal 10; the corpus is found by its hash."""
    name = f"resumed{len(' '.join(more))}"
    words = ["train", "text", "--data=notes.txt", *TINY, *more]
    assert main([*words, "--steps=10", f"--out={name}-whole"]) == 0
    assert main([*words, "--steps=5", f"--out={name}"]) == 0
    assert main(["train", "text", "--resume", "--steps=10", f"--out={name}"]) == 0
    one, two = weights(folder / f"{name}-whole", 10), weights(folder / name, 10)
    assert one.keys() == two.keys()
    assert all((one[key] == two[key]).all() for key in one)


@pytest.mark.parametrize("mode", ["decoder", "entp"])
def test_curriculum_of_modes_trains_on_text(mode: str, folder: Path) -> None:
    words = ["--curriculum.mode=random-prefix", "--curriculum.steps=3", f"--out=modes-{mode}"]
    train = ["train", "text", "--data=notes.txt", *TINY, "--steps=6", f"--mode={mode}"]
    assert main([*train, *words]) == 0


def test_prefix_lm_is_refused_with_the_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(capsys, "train", "notes.txt", "--mode=prefix-lm")
    assert "mode prefix-lm needs a task with a prefix, and text has none" in err


def test_evaluate_reads_the_whole_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("evaluate", "run", "--split=valid", "--json")
    whole = json.loads(read(capsys, *words, "--batches=all")[0])
    told = json.loads((folder / "run/corpus.json").read_text())["splits"]["valid"]
    assert whole["n"] == -(-told["tokens"] // 16)
    assert json.loads(read(capsys, *words, "--batches=9999")[0]) == whole
    assert json.loads(read(capsys, *words, "--batches=1")[0])["n"] == 8
    nats = whole["loss"] * told["tokens"]
    assert whole["bits_per_byte"] == pytest.approx(nats / np.log(2) / told["bytes"])
    assert "split train of text has no end" in refused(
        capsys, "evaluate", "run", "--split=train", "--batches=all"
    )


def test_evaluate_on_other_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same tokens: here other words, which the model knows less well."""
    (folder / "digits.txt").write_text(" ".join(str(n * n) for n in range(2000)))
    own, other = (
        json.loads(read(capsys, "evaluate", "run", "--data", data, "--json")[0])["loss"]
        for data in ("notes.txt", "digits.txt")
    )
    assert other > own + 0.2


def test_prepared_folder_is_what_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command, though the run's own corpus is in the cache."""
    (folder / "squares.txt").write_text(" ".join(str(n * n) for n in range(1000, 2500)))
    read(capsys, "data", "prepare", "squares.txt", "--out=corpora/squares")
    squares = "--data=corpora/squares"
    words = ("evaluate", "run", "--batches=all", "--json")
    text = json.loads(read(capsys, *words, "--data=squares.txt")[0])
    assert json.loads(read(capsys, *words, squares)[0]) == text
    assert json.loads(read(capsys, *words)[0])["loss"] < text["loss"]
    prompts = read(capsys, "generate", "run", squares, "--max-new-tokens=1")[0]
    assert re.search(r"\d{5}", prompts)
    read(capsys, "train", "text", squares, *TINY, "--steps=2", "--out=squares-run")
    tiny = ("reproduce", "text-block", "--tiny", "--no-baselines", "--out=reproduced")
    read(capsys, *tiny, squares)
    configs = [folder / "squares-run/config.json", *folder.glob("reproduced/**/config.json")]
    corpora = {json.loads(path.read_text())["task"]["corpus"] for path in configs}
    assert corpora == {open_corpus(folder / "corpora/squares").hash}
    assert len(configs) > 2
    err = refused(capsys, "evaluate", "run", "--data=corpora")
    assert "is no prepared corpus, and of those directly below it (squares) none is" in err
    assert len(err.splitlines()) == 1


def test_generate_prints_prompt_and_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = read(capsys, "generate", "run", "--prompt", "the naïve", "--max-new-tokens=5")
    assert out.startswith("the naïve")
    assert len(out.rstrip("\n").encode()) >= len("the naïve".encode()) + 5
    assert err == ""
    three, _ = read(capsys, "generate", "run")
    assert three.count("-" * 20) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature=-1"], "temperature is -1"),
        (["--max-new-tokens=0"], "max_new_tokens is 0"),
        (["--top-p=3", "--temperature=1"], "top_p is 3"),
        (["--top-k=0", "--temperature=1", "--max-new-tokens=40"], "top_k is 0"),
        (["--seed=-1", "--temperature=1"], "seed is -1"),
    ],
)
def test_generate_refuses_before_it_prints(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "run", "--prompt", "the cat", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_generate_slides_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", "run", "--prompt", "the cat", "--seed=1", "--temperature=1")
    short, err = read(capsys, *words, "--max-new-tokens=10")
    assert err == ""
    out, err = read(capsys, *words, "--max-new-tokens=40")
    assert "from token 17 on, each token is predicted from the last 16 alone" in err
    assert out.startswith(short.rstrip("\n\ufffd"))
    assert read(capsys, *words, "--max-new-tokens=40") == (out, err)


def test_text_is_printed_as_it_comes(folder: Path) -> None:
    """A process that is killed at its first words has not printed the others, which together are
    less than a pipe's buffer."""
    words = ["generate", "run", "--prompt", "the cat", "--max-new-tokens=7000"]
    with subprocess.Popen(
        [sys.executable, "-m", "entp", *words],
        cwd=folder,
        env={**environment(), "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(40)
        process.kill()
        rest = process.stdout.read()
    assert first.startswith(b"the cat")
    assert len(rest) < 6000


class _Bytes(Text):
    """Text whose tokens are bytes, without a corpus."""

    @property
    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer()


def test_characters_are_held_back_until_they_are_whole() -> None:
    text = "é€😀 naïve"
    found = list(pieces(_Bytes(), ([byte] for byte in text.encode())))
    assert "".join(found) == text
    assert "\ufffd" not in "".join(found)
    assert [piece for piece in found if piece] == list(text)


@given(st.lists(st.lists(st.sampled_from([65, 0x80, 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xFF, 256]))))
def test_pieces_are_the_whole_text(tokens: list[list[int]]) -> None:
    """Whatever the bytes."""
    task = _Bytes()
    assert "".join(pieces(task, tokens)) == task.to_text([t for some in tokens for t in some])


FAR_AWAY = """
import sys
from entp.cli.main import main
codes = [main(["generate", "run", "--prompt", "the cat", "--max-new-tokens=3"])]
codes += [main(["evaluate", "run"]), main(["evaluate", "run", "--json", "--data", sys.argv[1]])]
print(codes)
"""


def test_run_without_its_corpus(folder: Path, tmp_path: Path) -> None:
    """It generates; what needs the corpus says which one, and --data finds it."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(cache_folder(), moved)
    shutil.copytree(folder / "run", tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENTP_CACHE", str(tmp_path / "empty"))
        done = run_python("-c", FAR_AWAY, str(moved), cwd=tmp_path)
    corpus = json.loads((tmp_path / "run/config.json").read_text())["task"]["corpus"]
    assert f"the corpus {corpus} is not in" in done.stderr
    *generated, found, codes = done.stdout.splitlines()
    assert codes == "[0, 2, 0]"
    assert "\n".join(generated).startswith("the cat")
    assert json.loads(found)["n"] > 8


def test_run_without_its_corpus_is_compared(folder: Path, tmp_path: Path) -> None:
    """What it measured is in its folder, and how long its corpus is."""
    shutil.copytree(folder / "run", tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENTP_CACHE", str(tmp_path / "empty"))
        patch.setenv("ENTP_DATA", "")
        done = entp("compare", "run", "--out", "compared.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [arm] = read_record(tmp_path / "compared.json").arms.values()
    [point] = [p for p in read_metrics(folder / "run") if p["kind"] == "eval" and p["step"] == 10]
    assert arm.runs[0].curve[-1].values["loss"] == point["loss"]


def test_bpe_run_and_its_export_keep_the_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    prepare = ("data", "prepare", "notes.txt", "--tokenizer=bpe", "--vocab=280", "--name=notes-bpe")
    read(capsys, *prepare)
    read(capsys, "train", "text", "--data=notes-bpe", *TINY, "--steps=5", "--out=bpe")
    read(capsys, "export", "bpe", "--out=small", "--test-sequences=8")
    for name in ("bpe", "small"):
        assert (folder / name / "tokenizer.json").is_file()
        config = json.loads((folder / name / "config.json").read_text())
        assert config["model"]["vocab"] == config["task"]["vocab"] == 280
    words = ("--prompt", "the naïve cat", "--max-new-tokens=4")
    assert read(capsys, "generate", "small", *words)[0].startswith("the naïve cat")
    Path("more.txt").write_text("The naïve cat sat. " * 300)
    assert "bits_per_byte" in read(capsys, "evaluate", "bpe", "--data=more.txt")[0]
    more = ("--data=more.txt", TINY[0], *TINY[4:], "--steps=5")
    read(capsys, "train", "text", "--init=bpe", *more, "--out=longer")
    tokenizers = [(folder / name / "tokenizer.json").read_bytes() for name in ("bpe", "longer")]
    assert tokenizers[0] == tokenizers[1]
    read(capsys, "data", "prepare", "more.txt", "--out=in-bytes")
    err = refused(capsys, "evaluate", "bpe", "--data=in-bytes")
    assert "another tokenizer" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "missing.txt"], "missing.txt"),
        (["train", "text", "--data=missing.txt"], "missing.txt"),
        (["train", "notes"], "unknown task 'notes'"),
        (["train", "mine.py"], "entp train mine:NAME"),
        (["train", "mine.py:Parity"], "entp train mine:Parity"),
        (["train", "count3", "--data=notes.txt"], "--data"),
        (["train", "text", "--task.corpus=0123456789abcdef"], "0123456789abcdef is not in"),
        (["evaluate", "run", "--data=0123456789abcdef"], "0123456789abcdef is not in"),
    ],
)
def test_missing_text_is_one_sentence(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(capsys, *words)
    assert message in err
    assert len(err.splitlines()) == 1


def test_run_that_makes_its_own_data_takes_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--layers=1", "--heads=1", "--width=8", "--task.length=6", "--task.prompt-length=3"]
    assert main(["train", "count3", *small, "--batch-size=2", "--steps=1", "--out=count"]) == 0
    for command in ("evaluate", "generate"):
        err = refused(capsys, command, "count", "--data=notes.txt")
        assert "count3 makes its own data: leave --data notes.txt out" in err
    err = refused(capsys, "evaluate", "count", "--batches=all")
    assert "split test of count3 has no end" in err
