"""docs/change-the-model.md says what the code does: its blocks run, its tables are the code's."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import warnings
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import torch
from engine.changes import CHANGES
from random_models import random_inputs, random_model
from torch import Tensor, nn

import entp
from entp.config import ModelConfig
from entp.engine import packed
from entp.engine.check import Report
from entp.engine.choice import choose, resolve
from entp.engine.support import support_of
from entp.errors import EngineWarning, InputError

DOCUMENT = Path(__file__).parents[2] / "docs" / "change-the-model.md"
SECTIONS = dict(
    re.findall(
        r"^## (\d)\. .*?\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL
    )
)
WITH_CODE = "123456"


class Ran(NamedTuple):
    """What a section's blocks did, one after the other in one namespace."""

    names: dict[str, Any]
    printed: str
    warned: list[str]
    reports: list[Report]
    """What entp.check returned, in order."""


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """entp.check leaves the kernels out, as on a reader's CPU: interpreted they take seconds."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def without_blocks(text: str) -> str:
    """The text without its fenced code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def table(columns: int) -> list[list[str]]:
    """Rows of the document's tables of that many columns."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == columns and set(row[0]) != {"-"}]


def blocks(section: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", SECTIONS[section], flags=re.MULTILINE | re.DOTALL)


def run(section: str, count: int | None = None) -> Ran:
    """Run a section's first `count` blocks, all of them unless told."""
    names: dict[str, Any] = {"__name__": "document"}
    reports: list[Report] = []
    printed, check = io.StringIO(), entp.check

    def checked(*args: Any, **options: Any) -> Report:
        reports.append(check(*args, **options))
        return reports[-1]

    with (
        pytest.MonkeyPatch.context() as patch,
        torch.random.fork_rng(),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(record=True) as caught,
    ):
        patch.setattr(entp, "check", checked)
        warnings.simplefilter("always")
        torch.manual_seed(0)
        for number, source in enumerate(blocks(section)[:count]):
            exec(
                compile(source, f"{DOCUMENT.name}, section {section}, block {number}", "exec"),
                names,
            )
    return Ran(
        names, printed.getvalue(), [f"{w.category.__name__}: {w.message}" for w in caught], reports
    )


def verdict(report: Report, implementation: str = "packed") -> str:
    return next(
        row.verdict
        for row in report.rows
        if (row.mode, row.implementation) == ("entp", implementation)
    )


def plain(line: str) -> str:
    """A line of output without its spaces, and without what rounding decides."""
    return re.sub(r"\d\.\de[-+]\d\d", "#", " ".join(line.split()))


@pytest.mark.parametrize("section", WITH_CODE)
def test_blocks_work_as_written(section: str) -> None:
    """Blocks run; comments and indented lines show what was printed; entp.check comes last."""
    ran = run(section)
    printed = {plain(line) for line in ran.printed.splitlines()}
    shown = re.findall(r"# (\[.*)$", "".join(blocks(section)), flags=re.MULTILINE)
    shown += re.findall(r"^    (.*)$", without_blocks(SECTIONS[section]), flags=re.MULTILINE)
    assert not [line for line in shown if plain(line) not in printed]
    assert re.search(
        r"entp\.check\(model[^\n]*\n(print\(report\)\nassert report\.exact\n)?\Z",
        blocks(section)[-1],
    )
    assert ran.reports
    assert all(report.exact and "auto takes" in str(report) for report in ran.reports)
    hooked = section == "5"  # the only one that ends with a model for which packed is not exact
    assert [verdict(report) for report in ran.reports[: -1 if hooked else None]].count(
        "exact"
    ) == len(ran.reports) - hooked
    assert len([w for w in ran.warned if "EngineWarning" in w]) == hooked


@pytest.mark.parametrize("section", "123")
def test_a_wrong_implementation_is_noticed(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks' own assertions fail where packed is wrong, so that they say something."""
    right = packed.first_layer
    monkeypatch.setattr(packed, "first_layer", lambda *args: 1.01 * right(*args))
    with pytest.raises(AssertionError):
        run(section, 1)


def test_there_are_seven_sections_and_short_sentences() -> None:
    assert list(SECTIONS) == [*WITH_CODE, "7"]
    prose = re.sub(
        r"^(\||    |- |#).*$", "", without_blocks(DOCUMENT.read_text()), flags=re.MULTILINE
    )
    sentences = re.split(r"(?<=[.:;?])\s", " ".join(re.sub(r"`[^`]*`", "X", prose).split()))
    assert [s for s in sentences if len(s.split()) > 25] == []


# 1. Options


def option_rows() -> list[tuple[str, list[Any], list[bool]]]:
    """Field, values, and whether reference, packed and kernels take them."""
    found = []
    for field, values, *takes in table(5):
        if field.startswith("`"):
            assert set(takes) <= {"yes", "no"}
            found.append(
                (
                    field.strip("`"),
                    [value_of(v) for v in re.findall(r"`(.*?)`", values)],
                    [t == "yes" for t in takes],
                )
            )
    return found


def value_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


OPTIONS = [(field, value, takes) for field, values, takes in option_rows() for value in values]


@pytest.mark.parametrize(
    ("field", "value", "takes"), OPTIONS, ids=[f"{field}={value}" for field, value, _ in OPTIONS]
)
def test_the_table_of_options(field: str, value: Any, takes: list[bool]) -> None:
    config = {} if value is None else {field: value}
    model = random_model(**{"heads": 4, "width": 16, "layers": 2, "context_length": 12, **config})
    x = random_inputs(model, 2, 5)
    assert bool(model(x, impl="reference").isfinite().all()) == takes[0]
    assert (verdict(entp.check(model, length=5, batch=2)) == "exact") == takes[1]
    assert (support_of(model).kernels is None) == takes[2]


def test_the_table_of_options_is_complete() -> None:
    listed: dict[str, set[Any]] = {}
    for field, value, _ in OPTIONS:
        listed.setdefault(field, set()).add(value)
    assert {"vocab", "context_length", "heads", "width", *listed} == {
        field.name for field in fields(ModelConfig)
    }
    for field, hint in get_type_hints(ModelConfig).items():
        if get_origin(hint) is Literal:
            assert listed[field] == set(get_args(hint))
        if hint is bool:
            assert listed[field] == {False, True}


def test_the_table_of_limits() -> None:
    """Models at the limits run by the kernels, those one step beyond do not."""
    pytest.importorskip("triton")
    rows = {row[0]: [int(n) for n in row[1:]] for row in table(3) if row[1].isdigit()}
    heads_of = {
        "numbers in a head, at most": 1,
        "width, up to 16 heads": 16,
        "width, up to 32 heads": 32,
    }
    assert rows.keys() == heads_of.keys()
    for name, heads in heads_of.items():
        for width, kind in zip(rows[name], (torch.float32, torch.float64), strict=True):
            choose("triton", "cuda", model_on_paper(heads, width).to(kind))
            with pytest.raises(InputError, match="is above"):
                choose("triton", "cuda", model_on_paper(heads, width + heads).to(kind))
    with pytest.raises(InputError, match="bfloat16"):
        choose("triton", "cuda", model_on_paper(1, 8).bfloat16())


def model_on_paper(heads: int, width: int) -> entp.Transformer:
    with torch.device("meta"):
        return entp.Transformer(
            ModelConfig(vocab=2, context_length=2, layers=1, heads=heads, width=width)
        )


# 2 to 5. Norms, positions, LoRA, hooks


def test_the_norms() -> None:
    swapped = run("2", 1).names["model"]
    assert not [m for m in swapped.modules() if isinstance(m, nn.LayerNorm)]
    assert support_of(swapped).kernels is None
    own = run("2").names["model"]
    assert support_of(own).kernels == "blocks.0.norm_1 is a ScaleNorm"
    x = torch.randint(16, (3, 9))
    assert resolve("auto", own, x, None).impl == "packed"
    assert (torch.float32, 5, True, True) in support_of(own).compared


def test_position_ids() -> None:
    names = run("3").names
    model, tokens, ids = names["model"], names["tokens"], names["ids"]
    with torch.no_grad():
        model.positions.normal_()  # a fresh model hardly knows where it is
    want = model(tokens, position_ids=ids, impl="reference")
    torch.testing.assert_close(model(tokens, position_ids=ids), want)
    assert float((model(tokens, position_ids=0 * ids) - want).detach().abs().max()) > 0.01
    assert tokens.shape[1] > model.config.context_length
    generate = functools.partial(entp.generate, model, tokens, 3, position_ids=names["digit_ids"])
    assert torch.equal(generate(), generate(cache=False))
    with pytest.raises(InputError, match="allowed are 0 to 5"):
        model(tokens, position_ids=ids + 3)


def test_lora() -> None:
    model = run("4", 1).names["model"]
    assert support_of(model).kernels == "blocks.0.qkv is a Lora"
    assert support_of(model).rows is None
    assert support_of(run("4").names["model"]).kernels is None


def test_hooks() -> None:
    names = run("5", 1).names
    model, tokens, seen = names["model"], names["tokens"], names["seen"]
    seen.clear()
    model(tokens)
    assert seen == [(42, 64)]
    ran = run("5")
    (warned,) = [w for w in ran.warned if w.startswith("EngineWarning")]
    comment = re.search(r"# (EngineWarning: .*), \.\.\.", "".join(blocks("5")))
    assert comment
    assert warned.startswith(comment[1])
    assert choose("auto", "cpu", ran.names["model"]).impl == "reference"


def test_a_backward_hook_that_mixes_rows_is_found_by_check() -> None:
    model = random_model(layers=3)
    model.blocks[1].fc.register_full_backward_hook(
        lambda _m, grad, _out: (grad[0] / (1 + grad[0].norm()),)
    )
    report = entp.check(model, length=5, batch=2)
    assert not report.exact or verdict(report).startswith("not used")


def test_notebook_shows_the_table_of_a_report() -> None:
    shown: list[str] = []
    report = entp.check(random_model(layers=2), length=3, batch=1)
    report._repr_pretty_(SimpleNamespace(text=shown.append), False)
    assert shown == [str(report)]


# 6. A Transformer of one's own


@pytest.fixture
def own() -> dict[str, Any]:
    return run("6").names


def test_the_model_of_ones_own_is_run_by_packed_and_caches(own: dict[str, Any]) -> None:
    model, tokens = own["model"], own["tokens"]
    classes = "".join(blocks("6")).split("torch.manual_seed")[0].split("class ParallelBlock")[1]
    assert len([line for line in classes.splitlines() if line.strip()]) <= 45
    assert resolve("auto", model, tokens, None).impl == "packed"
    report = run("6").reports[0]
    assert [r.verdict for r in report.rows if r.implementation == "generation, cached"] == [
        "exact"
    ] * 4
    want = entp.predict(model, tokens, "decoder", impl="reference")
    assert float((want - own["every"]).detach().abs().max()) > 1e-3
    assert entp.generate(model, [[3, 1, 4], [1, 5]], 4, cache=False) == entp.generate(
        model, [[3, 1, 4], [1, 5]], 4
    )


def test_a_bias_that_encode_forgets_is_found(own: dict[str, Any]) -> None:
    """encode defines the model: auto takes the reference, packed by name is an error."""

    class Forgetful(own["Parallel"]):
        def encode(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
            bias, self.attention_bias = self.attention_bias, lambda *_: None
            try:
                return super().encode(x, position_ids)
            finally:
                self.attention_bias = bias

    torch.manual_seed(0)
    model = Forgetful(vocab=16, width=16, heads=2, layers=3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    tokens = own["tokens"]
    with pytest.warns(EngineWarning, match="by the reference implementation.*packed is off by"):
        got = entp.all_prefixes(model, tokens)
    torch.testing.assert_close(got[:, 5], model.readout(model.encode(tokens[:, :6])[:, -1]))
    with pytest.raises(InputError, match="packed is off by"):
        entp.all_prefixes(model, tokens, impl="packed")


class Encoder(nn.Module):
    """No blocks with project and finish, and no masks."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab, self.width = 16, 8
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )

    def stack(self) -> list[nn.Module]:
        return list(self.layers)

    def embed(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.tokens(x)

    def readout(self, h: Tensor) -> Tensor:
        return self.head(h)

    def encode(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return functools.reduce(lambda h, layer: layer(h), self.layers, self.embed(x))


def test_which_members_are_needed() -> None:
    model, tokens = Encoder(), torch.randint(16, (2, 6))
    torch.testing.assert_close(
        entp.all_prefixes(model, tokens, impl="reference")[:, -1],
        model.head(model.encode(tokens)[:, -1]),
    )
    with pytest.raises(InputError, match="impl 'packed'"):
        entp.all_prefixes(model, tokens, impl="packed")
    with pytest.raises(InputError, match="encode takes mask= and causal="):
        entp.predict(model, tokens, "decoder")
    del model.vocab
    with pytest.raises(InputError, match="vocab"):
        entp.generate(model, [[1, 2]], 2)
    with pytest.raises(InputError, match="x="):
        entp.check(model)
    (needed,) = [row[0] for row in table(2) if row[1] == "everything"]
    for name in re.findall(r"`(\w+)`", needed):
        model = Encoder()
        blank = type(
            "Blank",
            (nn.Module,),
            {k: v for k, v in vars(Encoder).items() if k != name and k != "__init__"},
        )()
        blank.__dict__.update({k: v for k, v in model.__dict__.items() if k != name})
        with pytest.raises(InputError, match=f"has no {name}"):
            entp.all_prefixes(blank, tokens)


# 7. What is refused


def with_dropout(model: entp.Transformer) -> None:
    model.blocks[0].activation = nn.Dropout(0.5)
    model.train()


REFUSED = {row[0]: row[1:] for row in table(4) if row[0] != "change"}
APPLY = {name: change.apply for name, change in CHANGES.items()} | {"active dropout": with_dropout}


def test_every_change_is_listed_where_it_belongs() -> None:
    refused = {name for name, change in CHANGES.items() if not (change.packed and change.triton)}
    assert set(REFUSED) == {*refused, "active dropout"}
    assert set(re.findall(r"^- (.*)$", SECTIONS["7"], flags=re.MULTILINE)) == set(CHANGES) - refused


@pytest.mark.parametrize("name", REFUSED)
def test_the_table_of_refusals(name: str) -> None:
    pytest.importorskip("triton")
    model = random_model(layers=3)
    x = random_inputs(model, 2, 5)
    APPLY[name](model)
    on_cpu, on_cuda, reason = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)
        assert resolve("auto", model, x, None).impl == on_cpu
        first = choose("auto", "cuda", model).impl
        assert first != "triton"
        assert (first if first == "reference" else resolve("auto", model, x, None).impl) == on_cuda
    errors = []
    if on_cpu == "reference":
        with pytest.raises(
            InputError, match="impl 'packed' is not exact for this model: "
        ) as refused:
            model(x, impl="packed")
        errors.append(str(refused.value))
    with pytest.raises(InputError, match="impl 'triton' cannot run here: ") as refused:
        choose("triton", "cuda", model)
    errors.append(str(refused.value).replace("Use impl='reference'", "Use impl='packed'"))
    assert f": {reason}" in errors[0]
    said = re.findall(r"`(impl '\w+' .*?)`", " ".join(SECTIONS["7"].split()))
    for error, form in zip(errors, said[-len(errors) :], strict=True):
        assert re.fullmatch(re.escape(form).replace("REASON", ".*"), error)


@pytest.mark.parametrize("name", sorted(set(CHANGES) - set(REFUSED)))
def test_what_the_kernels_take(name: str) -> None:
    pytest.importorskip("triton")
    model = random_model(layers=3)
    APPLY[name](model)
    assert choose("triton", "cuda", model).impl == "triton"
