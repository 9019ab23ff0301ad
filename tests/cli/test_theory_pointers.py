"""`entp theory pointers`: weights are tried in every mode, and what is saved can be evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entp.cli.main import main
from entp.cli.theory_pointers import PointersOptions
from entp.tasks.composition import Compose
from entp.theory import pointers


def table(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """The rows of the table by name."""
    assert main(["theory", "pointers", *words]) == 0
    printed = capsys.readouterr().out.replace(" of ", "/")
    rows = [line.split() for line in printed.splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[0] in ("encoder", "decoder", "arcs")}


def test_chase_is_tried_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    found = table(capsys, "--nodes", "12", "--hops", "6", "--sequences", "20")
    assert found["decoder"] == ["6", "5", "1", "120/120", "120/120", "120/120", "60.0"]
    assert found["encoder"][:4] == ["3", "6", "1", "120/120"]
    assert found["encoder"][5:] == ["120/120", "60.0"]
    assert int(found["encoder"][4].split("/")[0]) < 90
    assert "arcs" not in found


def test_compose_without_choices_has_a_shallow_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--task", "compose", "--tables", "8", "--size", "4", "--sequences", "10"]
    found = table(capsys, *sizes, "--choices", "1")
    assert [row[0] for row in found.values()] == ["5", "9", "4"]
    assert found["arcs"][3:] == ["80/80", "80/80", "80/80", "60.0"]
    assert found["encoder"][3] == found["encoder"][5] == "80/80" != found["encoder"][4]
    found = table(capsys, *sizes, "--choices", "1", "--order", "last-to-first")
    assert found["encoder"] == ["5", "8", "2", "80/80", "80/80", "80/80", "60.0"]
    found = table(capsys, *sizes, "--choices", "2")
    assert list(found) == ["encoder", "decoder"]
    assert found["encoder"][5] != "80/80"


def test_other_sequences_are_drawn_with_another_seed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "12", "--hops", "6", "--sequences", "20", "--seed"]
    assert table(capsys, *words, "0") != table(capsys, *words, "1")


def test_what_is_saved_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--task", "compose", "--tables", "2", "--choices", "2", "--size", "3"]
    assert main(["theory", "pointers", *sizes, "--sequences", "5", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for name in ("encoder", "decoder"):
        assert f"entp evaluate {tmp_path / name}" in told
        assert main(["evaluate", str(tmp_path / name), "--batches", "1", "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["exact_match"] == 1.0
        assert values["loss"] < 1e-6


def test_weights_that_are_wrong_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's, called a decoder's."""
    wrong = pointers.compose_encoder(2, 2, 3)
    words = ["theory", "pointers", "--task", "compose", "--tables=2", "--choices=2", "--size=3"]
    assert main([*words, "--sequences=20"]) == 0
    monkeypatch.setattr(pointers, "weights_for", lambda task: {"encoder": ("decoder", wrong)})
    assert main([*words, "--sequences=20"]) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--tables 3", "--tables is an option of compose: with --task chase leave it out"),
        ("--task compose --hops 3", "--hops is an option of chase: with --task compose leave it"),
        ("--nodes 2000", "sequences of 2016 tokens: at most 1024 are tried"),
        ("--hops 17", "on a cycle of 32 nodes at most 16"),
        ("--sequences 0", "--sequences is 0: it must be at least 1"),
        ("--seed -1", "--seed is -1: it must be at least 0"),
    ],
)
def test_bad_options(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "pointers", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_defaults_are_the_tasks() -> None:
    assert PointersOptions(task="compose").chosen() == Compose()
