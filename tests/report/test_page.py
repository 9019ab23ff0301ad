"""The page is made from the records in a folder, whatever wrote them, and escapes their text."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from small_records import (
    DIGITS,
    arm_record,
    make_record,
    run_record,
    run_test,
    small_recipe,
    sourced_run,
)
from small_runs import run_python

from entp import terminal
from entp.errors import InputError
from entp.experiments.reproduce import reproduce
from entp.report.contents import sharing, which
from entp.report.page import page, write_report
from entp.report.web import write_web_page
from entp.results.schema import (
    ArmRecord,
    Check,
    PaperValue,
    Record,
    SliceValues,
    Table,
    TotalsData,
)
from entp.results.store import find_records, write_record

ROOT = Path(__file__).parents[2]


def page_of(record: Record, path: Path = Path("results/mine.json")) -> str:
    return page({path: record}, Path("docs/page.md"))


def test_docs_page_is_that_of_the_results() -> None:
    path = ROOT / "docs" / "results.md"
    assert path.read_text() == page(find_records(ROOT / "results"), path), "run `entp report`"


def test_report_renders_the_file_that_reproduce_has_just_written(tmp_path: Path) -> None:
    """A recipe of one's own: nothing here is built in but its task."""
    recipe = small_recipe(name="mine")
    decoder = replace(recipe, arms=recipe.arms[1:])
    (tmp_path / "results").mkdir()
    reproduce(decoder, tmp_path, device="cpu", record=tmp_path / "results" / "mine.json")
    told = write_report(tmp_path / "results", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert told == f"page: {tmp_path / 'page.md'}"
    assert "## mine\n" in text
    assert "A small figure. Does it run?" in text
    row = next(line for line in text.splitlines() if line.startswith("| decoder |"))
    assert row.startswith("| decoder | done | 1 | 6 |")
    assert "![A small figure](results/mine.png)" in text
    assert (tmp_path / "results" / "mine.png").stat().st_size > 10_000
    assert "Not run: BERT (needs weights)." in text


def test_long_reports_say_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        write_record(tmp_path / f"{name}.json", make_record({"a": arm_record(50)}, recipe=name))
    for write, name in ((write_report, "page.md"), (write_web_page, "page.html")):
        write(tmp_path, tmp_path / name)
        assert capsys.readouterr().err == ""
        with monkeypatch.context() as changed:
            changed.setattr(terminal, "SILENCE", -1.0)
            write(tmp_path, tmp_path / name)
        assert capsys.readouterr().err.splitlines() == ["report: step 1/2", "report: step 2/2"]


def test_report_imports_no_task_no_recipe_and_no_training(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from entp.report.page import write_report\n"
        "write_report(Path('results'), Path('page.md'))\n"
        "rooms = ('experiments', 'training', 'engine', 'model', 'cli')\n"
        "print([m for m in sys.modules if m.startswith(tuple(f'entp.{r}' for r in rooms))])\n"
        "print([m for m in sys.modules if m.startswith('entp.tasks')])\n"
    )
    (tmp_path / "results").mkdir()
    write_record(tmp_path / "results" / "mine.json", make_record({"a": arm_record(50)}))
    done = run_python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rooms, tasks = done.stdout.splitlines()
    assert rooms == "[]"
    assert set(eval(tasks)) <= {"entp.tasks", "entp.tasks.base", "entp.tasks.metrics"}


class Tags(HTMLParser):
    """All tags of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


NASTY = "a|b <script>alert(1)</script> [x](http://y) ![i](j)\n# head\n```\n*bold* _it_ $m$ ~~~"


def test_every_text_of_a_file_is_escaped(tmp_path: Path) -> None:
    run = run_record(
        caveats=[NASTY],
        status=f"1 of 2 {NASTY}",
        environment=run_record().environment.model_copy(
            update={"device": NASTY, "torch": NASTY, "commit": NASTY, "date": NASTY}
        ),
    )
    arm = arm_record(runs=[run], mode=NASTY)
    arm.paper["exact_match"] = PaperValue(0.5, NASTY)
    arm.authors.append(SliceValues("token_accuracy", "length", {NASTY: 0.5}, "test", NASTY))
    baselines = {NASTY: run_test(3).totals}
    tested = run_record(1, test=run_test(50, baselines=baselines))
    record = make_record(
        {NASTY: arm, "b": arm_record(runs=[tested], mode="b")},
        table=Table(versus="mode"),
        recipe=NASTY,
        title=NASTY,
        question=NASTY,
        command=f"entp {NASTY}",
        reproduced_if=NASTY,
        checks=[Check(NASTY, {"mode": NASTY}, "exact_match", "above", 0.1)],
        not_run={NASTY: NASTY},
    )
    path = tmp_path / "my (nasty) #1.json"
    path.with_suffix(".png").write_bytes(b"png")
    text = page({path: record}, tmp_path / "page.md")
    plain = [line for line in text.splitlines() if not line.startswith("    ")]
    tags = Tags()
    tags.feed("\n".join(plain))
    assert tags.found == []
    assert not any(line.startswith(("# head", "```", "~~~")) for line in text.splitlines())
    assert "<script>" not in "\n".join(plain)
    assert not re.search(r"(?<!\\)\]\(http", "\n".join(plain))
    assert "(my%20%28nasty%29%20%231.png)" in text
    tables = [line for line in plain if line.startswith("| ")]
    for line in tables:
        cells = line.replace(r"\|", "").count("|") - 1
        assert cells in (3, 4, 5, 8, 13), line
    assert "Rows of the authors: a\\|b &lt;script&gt;" in text
    assert "Arms that differ in mode alone" in text
    (command,) = [line for line in text.splitlines() if line.startswith("    entp")]
    assert command == f"    {' '.join(f'entp {NASTY}'.split())}"


def test_rule_and_verdict_stand_above_the_table() -> None:
    record = make_record(
        {"a": arm_record(90, mode="ENTP")},
        reproduced_if="ENTP learns it.",
        checks=[Check("ENTP learns", {"mode": "ENTP"}, "exact_match", "at least", 0.5)],
    )
    text = page_of(record)
    assert "| mine | Who learns? | reproduced |" in text
    assert "Rule: ENTP learns it.\n\nVerdict: **reproduced**.\n" in text
    assert "- holds: ENTP learns (a: 0.9 is at least 0.5)" in text
    assert "| mine | Who learns? | no rule |" in page_of(make_record({"a": arm_record(1)}))


def test_slices_and_seeds_and_baselines_are_tables() -> None:
    totals = TotalsData(sequences=9, all={"exact_match": [9, 3, 9, 3, 3, 9]})
    runs = [run_record(0, test=run_test(40, baselines={"copy": totals})), run_record(1, 60)]
    text = page_of(make_record({"a": arm_record(runs=runs)}))
    assert "Test token accuracy by length:\n\n| arm | 1 | 2 |" in text
    assert "| a | 0.5000 | 0.2500 |" in text
    assert "| a | 0 | 0.4000 | - | 100 | 12 |\n| a | 1 | 0.6000 | - | 100 | 12 |" in text
    assert "| copy | 0.3333 | - | - | a |" in text


def test_caveats_are_told_once() -> None:
    test = run_test(50, note="An old stream.")
    runs = [run_record(seed, caveats=["Few sequences."], test=test) for seed in (0, 1)]
    text = page_of(make_record({"a": arm_record(runs=runs)}))
    assert (text.count("Few sequences."), text.count("An old stream.")) == (1, 1)


def test_record_in_which_nothing_ran_says_only_that() -> None:
    arms = {"a": arm_record(mode="ENTP"), "b": arm_record(mode="decoder")}
    text = page_of(make_record(arms)).partition("## mine")[2]
    assert text.endswith("    entp reproduce mine\n\n\nNot run: a; b.\n")


def test_grid_of_the_recipe_is_shown() -> None:
    arms = {
        f"{mode} {n}": arm_record(right, mode=mode, length=n)
        for mode, n, right in (("ENTP", 16, 85), ("ENTP", 24, 1), ("decoder", 16, 0))
    }
    table = Table(rows="mode", columns="length", cells=("exact_match", "loss"))
    text = page_of(make_record(arms, table=table))
    assert "|  | length 16 | length 24 |" in text
    assert "| ENTP | 0.8500 (0.7672 to 0.9069), loss 0.5000 | 0.0100 (" in text
    assert "| decoder | 0 (0 to 0.0370), loss 0.5000 | - |" in text
    told = "Test exact match with its 95 % interval (one seed, test sampling only), and loss."
    assert told in text


def shared(concurrent: int | None, **factors: object) -> ArmRecord:
    return arm_record(runs=[run_record(test=run_test(1, concurrent=concurrent))], **factors)


def test_page_says_which_runs_shared_the_device() -> None:
    arms = {f"{n}": shared(1 if n == 16 else 4, length=n) for n in (16, 24, 32)}
    assert sharing(arms) == (
        "Runs that shared the device: 4 at a time: length 24, 32. Other runs had it to themselves."
    )
    assert sharing({"a": shared(1)}) == "Every run had the device to itself."
    unknown = {"a": shared(None), "b": shared(1)}
    assert "unknown whether alone: a." in sharing(unknown)
    assert which(["a", "b"], unknown) == "all"


def test_first_column_of_depth_was_run_alone_and_the_page_says_so() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    section = text.partition("## count3-depth")[2].partition("\n## ")[0]
    assert "4 at a time: length 24, 32, 48, 64. Other runs had it to themselves." in section


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "has no results"), ("{", "is not a file of results"), ('{"recipe": 3}', "has no")],
)
def test_what_is_no_result_is_an_input_error(
    content: str | None, told: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "match3.json").write_text(content)
    with pytest.raises(InputError, match=told):
        write_report(tmp_path, tmp_path / "page.md")
    with pytest.raises(InputError, match="make it first"):
        write_report(tmp_path, tmp_path / "nowhere" / "page.md")


def test_report_without_matplotlib_is_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "mine.json", make_record({"a": arm_record(50)}))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert write_report(tmp_path, tmp_path / "page.md") == f"page: {tmp_path / 'page.md'}"
    assert "no figure: pip install 'entp[plot]' to draw one." in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "page.md"]
    assert "![" not in (tmp_path / "page.md").read_text()


def test_page_explains_the_sources_that_it_shows() -> None:
    run = sourced_run(test={"11": 50}, last={"11": 40}, best={"11": 60})
    arm = arm_record(runs=[run])
    arm.authors.append(SliceValues("exact_match", "digits", {"11": 0.94}, "last", "results.csv"))
    text = page_of(make_record({"a": arm}, metrics=DIGITS))
    head = text.partition("## mine")[0]
    assert "- **Last checkpoint**: on the same" in head
    assert "- **Best on the test itself**: of each number" in head
    assert "Test exact match by digits, last checkpoint:\n\n| arm | 11 |" in text
    assert "| a | 0.4000 |\n| authors, a | 0.9400 |" in text
    assert "best evaluation on the test itself, 7 evaluations:\n" in text
    assert "\nRows of the authors: results.csv." in text
    plain = page_of(make_record({"a": arm_record(50)}))
    assert "Last checkpoint" not in plain
    assert "authors" not in plain


def test_comparison_of_arms_stands_below_the_table() -> None:
    arms = {mode: arm_record(*rights, mode=mode) for mode, rights in MODES.items()}
    text = page_of(make_record(arms, table=Table(versus="mode")))
    row = "| ENTP | decoder | exact match | 0.9000, 0.0100, 3 | 0.1000, 0.0100, 3 | 0.8000 |"
    assert row in text
    assert text.index("| ENTP | done |") < text.index(row)


MODES = {"ENTP": (89, 90, 91), "decoder": (9, 10, 11)}
