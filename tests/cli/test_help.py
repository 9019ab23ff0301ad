"""Help is quick, short where it should be, and complete where it is asked for."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time

import pytest
from small_runs import environment

from entp import __version__
from entp.cli.derive import options_of
from entp.cli.help import MOST_OF_PART
from entp.cli.main import COMMANDS, main
from entp.cli.train import train_options
from entp.tasks.base import TASKS, task_class

MOST_OPTIONS = 27


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints that ends well."""
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert code in (0, None)
    return capsys.readouterr().out


def option_lines(text: str) -> list[str]:
    return re.findall(r"^  (--[\w.-]+)", text, re.MULTILINE)


def test_help_is_quick_and_imports_no_torch() -> None:
    """In less than 2 s; what else the machine does may slow down some of twenty starts, not all."""
    code = (
        "import sys; from entp.cli.main import main; main(['--help']); "
        "assert not {'torch', 'tyro', 'pydantic'} & set(sys.modules)"
    )
    command, seconds = [sys.executable, "-c", code], [math.inf]
    while min(seconds) >= 2 and len(seconds) <= 20:
        start = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(), timeout=300, check=True
        )
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2
    assert set(COMMANDS) <= set(done.stdout.split())


def test_help_of_training_imports_no_torch() -> None:
    code = (
        "import sys; from entp.cli.main import main; main(['train', 'count3', '--help']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("--version", capsys) == f"entp {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        *("train count3", "evaluate x", "generate x", "export x", "reproduce count3", "report"),
        *(
            "bench",
            "bench step",
            "bench generate",
            "bench scaling",
            "bench sweep",
            "demo",
            "theory",
        ),
        *("theory statements", "theory rasp", "theory count3-tradeoff", "theory compiled"),
        *("theory complexity", "theory pointers"),
    ],
)
@pytest.mark.parametrize("word", ["--help", "--help-all"])
def test_every_command_has_help(
    command: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"usage: entp {command}" in shown(f"{command} {word}", capsys)


@pytest.mark.parametrize("command", ["train", "evaluate", "generate", "export", "reproduce"])
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_without_a_name_says_where_the_options_are(
    command: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = rf"^options: entp {command} [A-Z_]+ --help$"
    assert re.search(where, shown(f"{command} {word}", capsys), re.MULTILINE)


@pytest.mark.parametrize("task", TASKS)
def test_short_help_has_the_options_that_matter(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(f"train {task} --help", capsys)
    options = option_lines(text)
    assert len(options) <= MOST_OPTIONS
    assert f"entp train {task} --help-all" in text
    assert {"--mode", "--steps", "--batch-size", "--out", "--resume", "--optim.lr"} <= set(options)
    own = options_of(task_class(task), prefix="--task.")
    first = list(own)[:MOST_OF_PART]
    assert first == [name for name in options if name in own]
    for option in map(own.get, first):
        assert option is not None
        assert option.help.partition(". ")[0].rstrip(".").split()[0] in text


def test_short_help_shows_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = shown("train count3 --help", capsys).splitlines()
    told = {line.split()[0]: line for line in lines if line.startswith("  --")}
    assert "(default: 0.0005)" in told["--optim.lr"]
    assert "(default: 0)" in told["--seed"]
    assert "(default: small)" in told["--size"]
    assert "(default: that of --size)" in told["--model.layers"]
    assert "entp, decoder, prefix-lm, or refresh-N" in told["--mode"]
    assert "(default" not in told["--resume"]


def test_long_help_has_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = shown("train count3 --help-all", capsys)
    words = set(re.findall(r"--[\w.-]+", text))
    assert set(options_of(train_options(task_class("count3")))) <= words
    assert "First step of the new batch size. (required to use it)" in text


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("bench", {"step", "generate", "scaling", "sweep"}),
        ("theory", {"statements", "rasp", "compiled", "pointers"}),
    ],
)
def test_commands_with_parts_list_them(
    command: str, parts: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(f"{command} --help", capsys).splitlines()
    assert parts <= {line.split()[0] for line in lines if line.strip()}


def test_tasks_are_listed_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    listed = shown("tasks", capsys)
    assert set(TASKS) <= {line.split()[0] for line in listed.splitlines()}
    drawn = shown("tasks count3 --length 8 --prompt-length 4", capsys)
    assert "input " in drawn
    assert "target  .  .  ." in drawn
    assert "  --task.length 8\n" in drawn
    assert "  token_accuracy (per target, higher is better, --by length)\n" in drawn
    assert "entp train count3 takes:" in drawn
    assert "baselines: one hop" in shown("tasks chase", capsys)


def test_task_without_training_says_how_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = shown("tasks winogrande", capsys)
    assert "entp evaluate RUN --on winogrande takes:\n  --on.tokenizer bytes\n" in drawn
    assert "entp train" not in drawn
    assert "--task." not in drawn
