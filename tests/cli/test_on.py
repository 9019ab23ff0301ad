"""`entp evaluate RUN --on TASK`: a run measured on another task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_run

from entp.cli.main import main
from entp.cli.on import take_on
from entp.config import ModelConfig, Run
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.choices import Winogrande
from entp.tasks.text import Text
from entp.training.checkpoint import save_model
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward

ITEMS = [
    {"sentence": "Ann met Eve so _ was glad.", "option1": "Ann", "option2": "Eve", "answer": "2"},
    {
        "sentence": "The cup hit the jug, _ broke.",
        "option1": "cup",
        "option2": "jug",
        "answer": "1",
    },
    {"sentence": "Bob sings, not Tim: _ can.", "option1": "Bob", "option2": "Tim", "answer": "1"},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of bytes in `model`, one of Count3 in `count3`, and items of WinoGrande."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENTP_DATA", str(tmp_path))
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "winogrande").mkdir()
    lines = [json.dumps(item) + "\n" for item in ITEMS]
    (tmp_path / "winogrande/dev.jsonl").write_text("".join(lines))
    (tmp_path / "winogrande/tinyWinogrande.jsonl").write_text(lines[0])
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab=257, context_length=40, layers=2, heads=2, width=16))
    save_model(model, "model", text_run(model))
    other = small_run()
    save_model(Transformer(other.model), "count3", other)
    return tmp_path


def text_run(model: Transformer) -> Run:
    return Run(Text(block=40), model.config, "entp", batch_size=4)


def told(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*command.split(), "--device=cpu"]) == 0
    return capsys.readouterr().out


def refused(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*command.split(), "--device=cpu"]) == 2
    return capsys.readouterr().err


def values(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(told(f"{command} --json", capsys)))


def test_whole_task_is_measured_with_the_tokens_and_length_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = values("evaluate model --on winogrande", capsys)
    from entp.training.checkpoint import load

    model, task = load("model"), Winogrande(block=40)
    totals = evaluate(
        model, task, split_batches(task, "test", None, 4, 0), Forward.of(text_run(model))
    )
    assert found["accuracy"] == totals.value("accuracy")
    assert found["bits_per_byte"] == pytest.approx(totals.value("bits_per_byte"), rel=1e-6)
    assert (found["task"], found["n"], found["caveats"]) == ("winogrande", 3, [])  # items


def test_options_of_the_task_and_of_the_command_hold(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert values("evaluate model --on winogrande --on.items tiny", capsys)["n"] == 1
    assert values("evaluate model --on=winogrande --batches 1", capsys)["n"] == 2
    assert "winogrande, mode entp, 3 items of test\n" in told(
        "evaluate model --on winogrande", capsys
    )
    cut = told("evaluate model --on winogrande --on.block 8 --baselines", capsys)
    assert "4 of 6 requests are longer than 8 tokens and were cut left." in cut
    assert "2 of 6 continuations are longer than 8 tokens and were scored in windows" in cut
    assert "metric, baseline always first" in cut


def test_models_of_other_tasks_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused("evaluate count3 --on winogrande", capsys)
    assert "cannot be measured on winogrande: model.vocab is 10 but winogrande needs 257" in error
    error = refused("evaluate model --on winogrande --on.block 64", capsys)
    assert "model.context_length 40 is shorter than the sequences of winogrande, 64" in error
    error = refused("evaluate model --on winogrande --split valid", capsys)
    assert "winogrande has no split valid, only test" in error
    assert "unknown task 'wino'" in refused("evaluate model --on wino", capsys)


def test_task_of_the_same_kind_keeps_its_fields(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = values("evaluate count3 --on count3 --batches 2", capsys)
    plain = values("evaluate count3 --batches 2", capsys)
    assert {name: found[name] for name in plain if name != "run"} == {
        name: value for name, value in plain.items() if name != "run"
    }


def test_task_is_taken_out_of_the_words() -> None:
    assert take_on(["--json", "--on", "a", "--on.b", "c"]) == ("a", ["--json", "--on.b", "c"])
    assert take_on(["--on=a", "--json"]) == ("a", ["--json"])
    assert take_on(["--json"]) == (None, ["--json"])
    for words in (["--on"], ["--on", "--json"], ["--on="]):
        with pytest.raises(InputError, match="--on needs the name of a task"):
            take_on(words)
