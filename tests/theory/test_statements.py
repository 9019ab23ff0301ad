"""`entp theory`: every statement comes out as the documents say, and a fault would be seen."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from entp import load
from entp.cli.main import main
from entp.cli.theory import ProgramName
from entp.theory import compiled, complexity, count3_decoder, statements, tradeoff
from entp.theory.programs import PROGRAMS
from entp.theory.statements import STATEMENTS, Checked, Statement, check_all, report
from entp.training.checkpoint import load_run

PAPERS_LABELS = {
    *("sec:tdd", "sec:ede", "thm:dyen", "thm:eydn", "tab:cc", "con:ts2", "lem:conjl2"),
    *("lem:enc-bound", "alg:linear-memory-attn", "alg:tc1", "alg:tc2", "alg:rasp_has_triplet"),
    *("alg:rasp_count_triplets", "alg:rasp_count_triplets_cot"),
}
MEASURED = Path(__file__).parents[2] / "results" / "complexity.json"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two measurements that take most of the time: recorded, and of fewer lengths.

    test_complexity.py and test_count3_algorithms.py measure them.
    """
    recorded = json.loads(MEASURED.read_text())
    shorter = tradeoff.measure((64, 2048))
    monkeypatch.setattr(complexity, "measure", lambda: recorded)
    monkeypatch.setattr(statements, "_tradeoff", lambda: shorter)


@pytest.mark.usefixtures("quick")
def test_all_statements_of_the_paper_are_there_and_come_out_as_documented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {label for s in STATEMENTS for label in s.label.split(", ")} >= PAPERS_LABELS
    assert main(["theory", "--out", str(tmp_path / "theory.json")]) == 0
    printed = capsys.readouterr().out
    assert f"all {len(STATEMENTS)} as docs/theory.md says" in printed
    kept = json.loads((tmp_path / "theory.json").read_text())
    assert [row["label"] for row in kept["statements"]] == [s.label for s in STATEMENTS]
    assert all(row["as_expected"] and row["checked"] in printed for row in kept["statements"])
    assert kept["environment"]["commit"]


def test_another_verdict_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = Statement("thm:odd", "all primes are odd", lambda: Checked("exact: 2", "FAILS"))
    monkeypatch.setattr(statements, "STATEMENTS", (odd,))
    begun: list[tuple[int, str]] = []
    found = check_all(lambda done, label: begun.append((done, label)))
    assert begun == [(0, "thm:odd")]
    assert report(found).endswith("NOT as docs/theory.md says: thm:odd")
    assert main(["theory"]) == 1
    assert "NOT as docs/theory.md says: thm:odd" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fault", [{"time": 1}, {"space": 65}, {"correct": False}], ids=["time", "space", "wrong"]
)
def test_one_run_that_is_not_the_formula_refutes_nothing(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    (conjecture,) = [s for s in STATEMENTS if s.label == "con:ts2"]
    result = tradeoff.measure((64, 90))
    monkeypatch.setattr(statements, "_tradeoff", lambda: result)
    assert conjecture.check().verdict == conjecture.expected == "refuted"
    next(row for row in result["rows"] if row["s"] == 8).update(fault)
    assert conjecture.check().verdict == "not refuted"


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_the_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "rasp", name, "--input", "1 0 2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"answer: \d+$", printed.strip())
    assert re.search(r"^x +1 +0 +2", printed, re.MULTILINE)
    assert set(get_args(ProgramName)) == set(PROGRAMS)
    if name == "count3-cot":  # -x_i mod 3, plus 1; how many of these are x_i + 2 mod 3, plus 1
        assert printed.endswith("\n\npartners wanted: 3 1 2\nfound: 1 1 1\nanswer: 0\n")


def test_trade_off_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tradeoff.json"
    words = ["theory", "count3-tradeoff", "--n-max", "256", "--seed", "2", "--out", str(out)]
    assert main(words) == 0
    assert "fitted: time ~ n^1.50, space ~ n^0.50" in capsys.readouterr().out
    kept = json.loads(out.read_text())
    assert (kept["lengths"], kept["seed"]) == ([64, 128, 256], 2)
    assert (tmp_path / "tradeoff.png").read_bytes().startswith(b"\x89PNG")


def test_trade_off_is_saved_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert (
        main(["theory", "count3-tradeoff", "--n-max", "128", "--out", str(tmp_path / "a.json")])
        == 0
    )
    assert "no figure: pip install 'entp[plot]' to draw one." in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_numbers_of_ones_own_and_fewer_digits(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["theory", "compiled", "--n-max", "16"]
    assert main([*small, "--input", "3 1 4 1 5"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()[1:]
    assert head.split() == [
        "n",
        "largest",
        "value",
        "Count3",
        "said",
        "(entp)",
        "said",
        "(decoder)",
    ]
    assert row.split()[:4] == ["5", "5", "0", "0"]  # five pairs, mod 5
    assert main([*small, "--mode", "decoder", "--input", "3 1 4 1 15"]) == 0
    assert "5 of 5" in capsys.readouterr().out
    assert main([*small, "--precision", "float32", "--sequences", "8"]) == 0
    assert main([*small, "--precision", "bfloat16", "--sequences", "8"]) == 1
    assert "0 of 8" in capsys.readouterr().out


def test_compiled_weights_are_tried_on_the_values_they_are_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["theory", "compiled", "--n-max", "32", "--ratio", "1", "--sequences", "50"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.endswith(" of 50")]
    assert [row[:5] for row in rows] == [
        [str(n), str(n - 1), "50", "of", "50"] for n in (8, 16, 32)
    ]
    assert main([*words, "--seed", "1"]) == 0
    assert capsys.readouterr().out != printed  # under the causal mask other sequences are right
    monkeypatch.setattr(compiled, "margin", lambda n_max: 1.0)  # weights that are wrong
    assert main(words) == 1


def test_compiled_weights_are_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "compiled")
    assert main(["theory", "compiled", "--sequences", "20", "--out", folder]) == 0
    printed = capsys.readouterr().out
    assert "4 layers, width 20" in printed
    assert len(re.findall(r"20 of 20", printed)) == 3
    assert main(["evaluate", folder, "--batches", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact_match"] == 1.0
    assert main(["generate", folder, "--prompt", "3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3"]) == 0
    assert len(capsys.readouterr().out.split()) == 64


def test_a_decoders_weights_are_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "decoder")
    words = ["theory", "compiled", "--mode", "decoder", "--sequences", "20"]
    assert main([*words, "--n-max", "24", "--out", folder]) == 0
    printed = capsys.readouterr().out
    assert "Count3 up to n = 24: 4 layers, width 144" in printed
    rows = [line.split() for line in printed.splitlines() if " of " in line]
    assert [row[2:5] for row in rows] == [[str(20 * n), "of", str(20 * n)] for n in (6, 12, 24)]
    assert all(float(row[5]) > 58 for row in rows)
    assert main(["evaluate", folder, "--batches", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact_match"] == 1.0
    assert load_run(Path(folder)).mode == "decoder"
    assert main(["generate", folder, "--prompt", "3 1 4 1 5 9"]) == 0
    assert len(capsys.readouterr().out.split()) == 24
    monkeypatch.setattr(count3_decoder, "SHARP", 1e-3)  # weights that are wrong
    assert main([*words, "--n-max", "24"]) == 1


@pytest.mark.parametrize("mode", ["entp", "decoder"])
@pytest.mark.parametrize("n_max", [1, 2, 3, 5, 11])
def test_short_compiled_weights_can_be_saved_too(
    n_max: int, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "c")
    words = ["theory", "compiled", "--n-max", str(n_max), "--sequences", "3", "--out", folder]
    assert main([*words, "--mode", mode]) == 0
    told = capsys.readouterr().out
    assert load(folder).config.vocab == n_max
    works = main(["evaluate", folder, "--batches", "1"]) == 0
    assert ("entp evaluate" in told) == works  # what it says to try works
    assert ("entp.load" in told, "entp evaluate" in told) == (n_max <= 2, n_max > 2)
    if n_max > 2:  # from the length on that its values are for
        capsys.readouterr()
        assert main(["evaluate", folder, "--batches", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["exact_match"] == 1.0


def test_a_ratio_beyond_what_can_be_built_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "compiled", "--ratio", "1000000"]) == 2
    assert "--ratio is 1000000: allowed are 1 to 256" in capsys.readouterr().err
