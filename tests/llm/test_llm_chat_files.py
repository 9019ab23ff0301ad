"""`entp llm openai prepare`: the files, what they leave out, and what is refused."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from entp.cli.main import main
from entp.llm.chat_files import DRAWN_FIRST, draw_splits, estimated_tokens, read_test
from entp.llm.prompts import counting_task


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", ["count3", "count2"])
def test_prepare_writes_chats_and_a_report(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / task
    words = f"llm openai prepare --task {task} --train 300 --valid 10 --test 5 --seed 3 --out"
    assert main([*words.split(), str(folder)]) == 0
    shown = capsys.readouterr().out
    train, valid = lines_of(folder / "train.jsonl"), lines_of(folder / "valid.jsonl")
    assert (len(train), len(valid)) == (300, 10)
    for line in [*train, *valid]:
        assert list(line) == ["messages"]
        assert [message["role"] for message in line["messages"]] == ["user", "assistant"]
        prompt, answer = (message["content"] for message in line["messages"])
        seed = prompt.partition("x = ")[2].splitlines()[0]
        assert answer.startswith(seed[:-1] + ", ")
        assert len(json.loads(answer)) == 64
    assert len({line["messages"][0]["content"] for line in [*train, *valid]}) == 310
    for line, item in zip(lines_of(folder / "test.jsonl"), read_test(folder), strict=True):
        assert [message["role"] for message in line["messages"]] == ["user"]
        assert line["answer"] == str(item.sequence)
    report = json.loads((folder / "report.json").read_text())
    assert report["task"]["name"] == task
    tokens = report["estimates"]["train_tokens_per_epoch"]
    assert f"estimates: {tokens:,} training tokens an epoch" in shown
    for split, found in report["splits"].items():
        data = (folder / f"{split}.jsonl").read_bytes()
        assert found["sha256"] == hashlib.sha256(data).hexdigest()
        assert (found["duplicates_dropped"], found["leaks_dropped"]) == (0, 0)


def test_estimates_follow_lines_and_prices(tmp_path: Path) -> None:
    sizes = ["--train", "20", "--valid", "10", "--test", "4"]
    prices = ["--train-price", "100", "--input-price", "10", "--output-price", "1000"]
    assert main(["llm", "openai", "prepare", "--out", str(tmp_path / "a"), *sizes, *prices]) == 0
    found = json.loads((tmp_path / "a/report.json").read_text())["estimates"]
    assert found["about"].startswith("estimates:")
    messages = lines_of(tmp_path / "a/train.jsonl")[0]["messages"]
    assert found["train_tokens_per_epoch"] == 20 * estimated_tokens(messages)
    assert found["train_dollars_per_epoch"] == pytest.approx(
        found["train_tokens_per_epoch"] * 100e-6
    )
    asked, told = found["test_input_tokens"], found["test_output_tokens"]
    assert found["test_dollars"] == pytest.approx(asked * 10e-6 + told * 1000e-6)


def test_token_estimate_counts_pieces() -> None:
    """Brackets, numbers, commas and the spaces between them are one token each."""
    assert estimated_tokens([{"role": "assistant", "content": "[52, 14, 2]"}]) == 4 + 9
    four = "    return count"  # three spaces, then two words with the space before each
    assert estimated_tokens([{"role": "user", "content": four}]) == 4 + 3


def test_splits_share_nothing_and_drops_are_counted() -> None:
    task = counting_task("count3", prompt_length=3, length=6, num_values=4)  # 64 seeds
    drawn = draw_splits(task, {"train": 30, "valid": 10, "test": 10}, seed=0)
    sets = {split: {row.tobytes() for row in drawn[split].sequences} for split in drawn}
    assert {split: len(found) for split, found in sets.items()} == {
        "train": 30,
        "valid": 10,
        "test": 10,
    }
    assert len(set.union(*sets.values())) == 50
    assert drawn["train"].leaks > 0
    assert drawn["train"].duplicates > 0
    assert drawn[DRAWN_FIRST[0]].leaks == 0


def test_prepared_files_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        words = ["--train", "12", "--valid", "10", "--test", "2", "--seed", seed]
        assert main(["llm", "openai", "prepare", "--out", str(tmp_path / name), *words]) == 0
    a, b, c = ((tmp_path / name / "train.jsonl").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("prepare", "--out"),
        ("prepare --out {0} --train 9", "--train is 9: it must be at least 10"),
        ("prepare --out {0} --valid 3", "--valid is 3: it must be at least 10"),
        ("prepare --out {0} --test 0", "--test is 0: it must be at least 1"),
        ("prepare --out {0} --train-price -1", "none may be below 0"),
        ("prepare --out {0} --task count4", "invalid choice"),
        ("prepare --out {0} --length 16", "task.prompt_length 16 must be at least 1 and below"),
        ("prepare --out {0} --prompt-length 1 --num-values 30", "there are too few"),
        ("submit", "needs a prepared folder"),
        ("submit {0}", "has no report.json: make it by entp llm openai prepare"),
        ("status {0}", "has no report.json"),
        ("evaluate {0}", "has no report.json"),
        ("evalute {0}", "Did you mean evaluate?"),
    ],
)
def test_bad_input_is_named(
    words: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["llm", "openai", *words.format(tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert fault in error
    assert error.count("\n") == 1
    assert not (tmp_path / "report.json").exists()


def test_second_prepare_and_changed_files_are_refused(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (prepared / "train.jsonl").read_bytes()
    assert main(["llm", "openai", "prepare", "--out", str(prepared), "--seed", "9"]) == 2
    assert "is prepared already" in capsys.readouterr().err
    assert (prepared / "train.jsonl").read_bytes() == before
    (prepared / "train.jsonl").write_bytes(before + before)
    assert main(["llm", "openai", "submit", str(prepared)]) == 2
    assert "train.jsonl is not what was written" in capsys.readouterr().err


def test_parts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"prepare", "submit", "status", "evaluate"} <= {
        line.split()[0] for line in lines if line.strip()
    }
    assert main(["llm", "claude"]) == 2
    assert "allowed are openai" in capsys.readouterr().err


def test_missing_client_names_the_extra(
    prepared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    assert main(["llm", "openai", "submit", str(prepared), "--yes"]) == 2
    assert capsys.readouterr().err.endswith("pip install 'entp[openai]'.\n")
