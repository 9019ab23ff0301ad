"""The page of HTML stands by itself, has the numbers of the page of Markdown, and shows every text
of a file as it is."""

from __future__ import annotations

import html
import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure as MplFigure
from small_records import DIGITS, arm_record, make_record, run_record, run_test
from small_runs import fit, small_run

from entp.cli.main import main
from entp.report.arms import (
    curves_table,
    places_table,
    runs_table,
    settings_table,
    shared_settings,
)
from entp.report.page import page
from entp.report.style import COLOURS
from entp.report.svg import (
    DARK,
    KEPT,
    READABLE,
    _relative,
    contrast,
    dark_colours,
    inline_svg,
    on_dark,
    share_styles,
)
from entp.report.web import unique_names, web_page, write_web_page
from entp.results.schema import (
    Began,
    Check,
    Environment,
    Figure,
    Forked,
    PaperValue,
    Point,
    Record,
    SliceValues,
    Table,
    TotalsData,
)
from entp.results.store import find_records, read_record, write_record

ROOT = Path(__file__).parents[2]
MOST_BYTES_A_RUN = 4_000
VOID = {"meta", "link", "br", "hr", "img", "input", "source"}
FETCHES = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}
NASTY = (
    "a|b <script>alert(1)</script> \"x\" 'y' ]]> --> &amp; {{ 7 * 7 }} $m$ "
    '\x07</title></style></svg><img src="http://example.com/x.png" onerror=alert(1)>'
)


class Read(HTMLParser):
    """What a page has: its tags, ids, references, tables and texts. Tags that do not match are an
    error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.inner: list[str] = []
        """Ids that something refers to."""
        self.outer: list[str] = []
        """All other addresses."""
        self.handlers: list[str] = []
        self.tables: list[list[list[str]]] = []
        """Of each table outside of <details> the rows of cells."""
        self.texts: dict[str, list[str]] = {}
        """By the tag that they are in."""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        shown = "details" not in self.open
        if tag == "table" and shown:
            self.tables.append([])
        elif tag == "tr" and shown:
            self.tables[-1].append([])
        elif tag in ("th", "td") and shown:
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            value = value or ""
            if name == "id":
                self.ids.append(value)
            elif name == "aria-labelledby":
                self.inner.append(value)
            elif name.startswith("on"):
                self.handlers.append(name)
            elif name in FETCHES:
                (self.inner if value.startswith("#") else self.outer).append(value.lstrip("#"))
            else:
                self._styles(value)

    def _styles(self, text: str) -> None:
        for address in re.findall(r"url\(([^)]*)\)", text):
            (self.inner if address.startswith("#") else self.outer).append(address.lstrip("#"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1] if self.open else ""
        if tag == "style":
            assert "@import" not in data
            self._styles(data)
        self.texts.setdefault(tag, []).append(data)
        if tag in ("th", "td", "a", "span") and "table" in self.open and "details" not in self.open:
            self.tables[-1][-1][-1] += data


def check_page(text: str) -> Read:
    """The page as it was read: nothing is asked for outside, and every reference has its target."""
    read = Read(text)
    assert read.ids
    assert len(set(read.ids)) == len(read.ids)
    assert set(read.inner) <= set(read.ids)
    assert all(address.startswith("data:") for address in read.outer)
    assert not read.handlers
    assert not {"script", "iframe", "object", "embed", "base", "img"} & set(read.tags)
    return read


def html_of(record: Record, path: Path = Path("nowhere/mine.json")) -> str:
    return web_page(path.parent, {path: record})


def rich_record() -> Record:
    """Two arms of two seeds with slices, baselines, authors' values, a comparison and a rule."""
    totals = TotalsData(sequences=9, all={"exact_match": [9, 3, 9, 3, 3, 9]})
    arms = {}
    for mode, right in (("ENTP", 90), ("decoder", 40)):
        runs = [
            run_record(seed, test=run_test(right + seed, baselines={"copy": totals}))
            for seed in (0, 1)
        ]
        arms[mode] = arm_record(runs=runs, mode=mode)
    arms["ENTP"].paper["exact_match"] = PaperValue(0.991, "Table 1")
    return make_record(
        arms,
        table=Table(versus="mode", reach=(0.5,)),
        figures=[Figure("curves"), Figure("bars", y="exact_match")],
        reproduced_if="ENTP is ahead.",
        checks=[
            Check("ENTP is ahead", {"mode": "ENTP"}, "exact_match", "above", {"mode": "decoder"})
        ],
        not_run={"BERT": "needs weights"},
    )


@pytest.fixture(scope="module")
def rich() -> str:
    """The page of that record."""
    return html_of(rich_record())


def markdown_tables(text: str) -> list[list[list[str]]]:
    """The tables of a page of Markdown, without what was escaped."""
    found: list[list[list[str]]] = []
    last = ""
    for line in text.splitlines():
        if line.startswith("| "):
            if not last.startswith("| "):
                found.append([])
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if set(cells) != {"---"}:
                plain = [re.sub(r"\\([^\w\s])", r"\1", html.unescape(cell)) for cell in cells]
                found[-1].append(plain)
        last = line
    return found


def test_page_has_the_tables_of_the_page_of_markdown(rich: str) -> None:
    index, *tables = check_page(rich).tables
    markdown = page({Path("nowhere/mine.json"): rich_record()}, Path("docs/page.md"))
    told, *others = markdown_tables(markdown)
    assert len(others) == 6
    assert tables == others
    assert index[1] == ["mine", "reproduced", "Who learns?", "4 of 4"]
    assert told[1] == ["mine", "Who learns?", "reproduced"]


def test_page_tells_rule_verdict_and_what_was_not_run(rich: str) -> None:
    read = check_page(rich)
    assert read.texts["code"][1:] == ["entp reproduce mine"]
    assert "ENTP is ahead." in read.texts["p"]
    assert read.texts["span"] == ["reproduced", "reproduced", "holds"]
    assert "ENTP: 0.905 is above 0.405 of decoder" in read.texts["li"]
    assert "Not run: BERT (needs weights)." in read.texts["p"]
    assert "paper, exact match: 0.991 (Table 1)" in read.texts["li"]
    assert {"recipe-mine", "recipe-mine.arm-1", "recipe-mine.arm-2"} <= set(read.ids)
    assert "recipe-mine" in read.inner


def test_headings_have_ids_and_heads_of_tables_a_scope(rich: str) -> None:
    assert not re.search(r"<h\d(?! id=)", rich)
    assert not re.search(r"<th(?! scope=|ead)", rich)
    assert rich.count('role="img"') == rich.count("<svg") == 1


def nasty_record() -> Record:
    run = run_record(
        caveats=[NASTY],
        status=f"1 of 2 {NASTY}",
        config={"task": {"name": "count3"}, NASTY: {NASTY: NASTY}},
        environment=Environment(
            device=NASTY, torch=NASTY, commit=NASTY, date=NASTY, init=Began(run=NASTY, weights="")
        ),
    )
    arm = arm_record(runs=[run], mode=NASTY)
    arm.paper["exact_match"] = PaperValue(0.5, NASTY)
    arm.authors.append(SliceValues("token_accuracy", "length", {NASTY: 0.5}, "test", NASTY))
    return make_record(
        {NASTY: arm, "b": arm_record(50, mode="b")},
        table=Table(versus="mode"),
        recipe=NASTY,
        title=NASTY,
        question=NASTY,
        command=f"entp {NASTY}",
        reproduced_if=NASTY,
        checks=[Check(NASTY, {"mode": NASTY}, "exact_match", "above", 0.1)],
        not_run={NASTY: NASTY},
    )


@pytest.mark.filterwarnings("ignore:Glyph 7")
def test_every_text_of_a_file_is_shown_as_it_is() -> None:
    read = check_page(html_of(nasty_record(), Path('my "nasty" <b>#1.json')))
    texts = {tag: "\n".join(found) for tag, found in read.texts.items()}
    for tag in ("a", "h2", "strong", "p", "code", "li", "summary", "th", "td"):
        assert NASTY in texts[tag], tag
    drawn = NASTY.replace("\x07", "\ufffd")
    assert drawn in texts["text"]  # the legend
    assert drawn in texts["title"]


def test_figures_of_a_page_do_not_share_ids() -> None:
    record = make_record(
        {"a": arm_record(50, mode="ENTP")}, figures=[Figure("curves", y="exact_match")]
    )
    text = web_page(Path("nowhere"), {Path("a.json"): record, Path("b.json"): record})
    read = check_page(text)
    assert read.tags.count("svg") == 2
    assert {"f1-1", "f2-1"} <= set(read.ids)


def lines_svg(*colours: str) -> str:
    """A figure with a line of each colour and a text."""
    figure = MplFigure()
    axis = figure.subplots()
    for at, colour in enumerate(colours):
        axis.plot([0, 1], [at, at], color=colour)
    axis.set_title("]]> & <b>")
    return inline_svg(figure, "f", "What <it> is")


def test_figure_has_text_and_colours_for_light_and_dark() -> None:
    text = lines_svg("C0", "k", "navy")
    assert "stroke:#1f77b4" in text
    assert "stroke:var(--c000080,#000080)" in text
    assert dark_colours(text) == {"--c000080": on_dark("#000080")}
    assert "#000000" not in text
    assert "currentColor" in text
    assert "]]&gt; &amp; &lt;b&gt;</text>" in text
    assert '<title id="f-title">What &lt;it&gt; is</title>' in text
    assert "<metadata" not in text
    assert "<style" not in text
    assert "xmlns" not in text
    assert text == lines_svg("C0", "k", "navy")


def test_styles_that_several_elements_have_are_rules_once() -> None:
    one, other = lines_svg("C0", "navy"), lines_svg("C0", "C1")
    rules, (first, second) = share_styles([one, other])
    found = dict(re.findall(r"^\.(\w+)\{(.*)\}$", rules, re.M))
    assert len(first) + len(second) + len(rules) < len(one) + len(other)
    for before, after in ((one, first), (other, second)):
        again = re.sub(r' class="(\w+)"', lambda name: f' style="{found[name[1]]}"', after)
        assert again == before


def test_lines_are_steps_that_lead_to_the_same_points() -> None:
    assert _relative("M 1 2 L 3 1.5 L 3 1 M 0 0 L 0 -0.5 z", 1) == "M1 2l2-.5 0-.5M0 0l0-.5z"
    assert _relative("M 1 1 L 2 1 z L 1 3", 1) == "M1 1l1 0zl0 2"


def test_every_colour_can_be_read_on_dark_and_light_ones_stay() -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = [to_hex(colormaps[name](at / 9)) for name in ("Blues", "Greys") for at in range(10)]
    for colour in [*map(to_hex, COLOURS), *shades]:
        found = on_dark(colour)
        assert contrast(found, DARK) >= READABLE
        assert (found == colour) == (contrast(colour, DARK) >= KEPT)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)
    blues = [contrast(on_dark(shade), DARK) for shade in shades[:10]]
    assert all(later < before for before, later in pairwise(blues))


def test_arm_has_only_settings_that_others_lack() -> None:
    def run(seed: int, **config: object) -> object:
        return run_record(seed, config={"task": {"name": "count3", "n": 4}, "seed": seed, **config})

    arms = {
        "a": arm_record(runs=[run(0, optim={"lr": 0.1}), run(1, optim={"lr": 0.1})]),
        "b": arm_record(runs=[run(0, optim={"lr": 0.2}), run(1, optim={"lr": 0.2}, ema=None)]),
    }
    shared = shared_settings(make_record(arms))
    assert shared == {"task.name": "count3", "task.n": "4"}
    (first, second) = (settings_table(arm, shared) for arm in arms.values())
    assert first is not None
    assert first.rows == [["optim.lr", "0.1"]]
    assert second is not None
    assert second.rows == [["optim.lr", "0.2"], ["ema", "seed 0: -; seed 1: null"]]
    assert settings_table(arms["a"], {**shared, "optim.lr": "0.1"}) is None


def test_arm_tells_its_seeds_and_curves() -> None:
    values = [(5, 0.25), (10, 0.75), (15, 0.5)]
    curve = [
        Point(step=step, seconds=1.0, sequences=step, values={"exact_match": value})
        for step, value in values
    ]
    runs = [run_record(0, 40, curve=curve, steps=1500), run_record(1, None)]
    record = make_record({"a": arm_record(runs=runs)}, metrics=DIGITS)
    found = curves_table(record, record.arms["a"])
    assert found is not None
    assert found.rows[0] == ["0", "3", "0.2500", "5", "0.7500", "10", "0.5000", "15"]
    first, second = runs_table(record, record.arms["a"]).rows
    assert first[:8] == ["0", "done", "1,500", "80", "12", "0.5000", "0.7500", "0.2500"]
    assert first[8:] == ["0.4000", "100", "1", "2026-01-01T00"]
    assert second[8:11] == ["-", "-", "-"]


def test_seeds_of_one_place_share_a_row() -> None:
    where = Environment(device="GPU", torch="2.1", commit="abc", resumed=[Environment()])
    forked = where.model_copy(update={"forked": Forked(run="runs/old", step=7), "resumed": []})
    runs = [run_record(seed, environment=where) for seed in (0, 1)]
    runs.append(run_record(2, environment=forked))
    assert places_table(arm_record(runs=runs)).rows == [
        ["0, 1", "GPU", "2.1", "-", "-", "abc", "a new model, resumed once"],
        ["2", "GPU", "2.1", "-", "-", "abc", "step 7 of runs/old"],
    ]


def test_without_matplotlib_the_page_has_all_tables(
    rich: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = check_page(rich)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_record(tmp_path / "mine.json", rich_record())
    write_web_page(tmp_path, tmp_path / "page.html")
    read = check_page((tmp_path / "page.html").read_text())
    assert "no figure: pip install 'entp[plot]' to draw one." in capsys.readouterr().err
    assert "svg" in whole.tags
    assert "svg" not in read.tags
    assert read.tables == whole.tables


def test_record_in_which_nothing_ran_says_only_that() -> None:
    read = check_page(html_of(make_record({"a": arm_record(mode="ENTP"), "b": arm_record()})))
    assert read.tables == [
        [
            ["recipe", "verdict", "question", "runs recorded"],
            ["mine", "no rule", "Who learns?", "0 of 2"],
        ]
    ]
    assert "Not run: a; b." in read.texts["p"]
    assert "details" not in read.tags
    assert "svg" not in read.tags


def test_names_are_ids_and_none_is_there_twice() -> None:
    names = unique_names(["a", "A", "a.2", "a-2", "<b>", "", "é"])
    assert names[:2] == ["recipe-a", "recipe-a.2"]
    assert names[-2:] == ["recipe-x", "recipe-x.2"]
    assert len(set(names)) == 7
    assert all(re.fullmatch(r"recipe-[a-z0-9.-]+", name) for name in names)


def test_page_of_ones_own_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `entp compare` writes, from the command line: one file, and nothing beside it."""
    folders = [str(tmp_path / f"run{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        fit(small_run(mode="decoder", seed=seed, steps=5), Path(folder))
    results, out = tmp_path / "results", tmp_path / "page.html"
    results.mkdir()
    assert main(["compare", *folders, "--out", str(results / "mine.json")]) == 0
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    assert main(["report", "--results", str(results), "--out", str(out)]) == 0
    assert f"page: {out}, 0." in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before
    assert not list(tmp_path.glob("*.png"))
    read = check_page(out.read_text())
    recipe = read_record(results / "mine.json").recipe
    assert [(row[0], row[3]) for row in read.tables[0][1:]] == [(recipe, "2 of 2")]
    assert "svg" in read.tags


@pytest.mark.slow
def test_page_of_the_results_is_small_and_whole() -> None:
    records = find_records(ROOT / "results")
    text = web_page(ROOT / "results", records)
    runs = sum(len(arm.runs) for r in records.values() for arm in r.arms.values())
    assert len(text.encode()) <= MOST_BYTES_A_RUN * runs
    read = check_page(text)
    assert read.tables[1:] == markdown_tables((ROOT / "docs" / "results.md").read_text())[1:]
    drawn = [r for r in records.values() if r.figures and any(a.runs for a in r.arms.values())]
    assert read.tags.count("svg") == len(drawn) + 1
