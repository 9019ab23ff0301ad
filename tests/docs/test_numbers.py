"""Numbers in documents are those of the results files, or of the code that they describe."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from documents import DOCS, ROOT, rows_of, tables
from torch.utils.flop_counter import FlopCounterMode

from entp import SIZES, ModelConfig, Transformer
from entp.bench.roofline import row_passes
from entp.config.mode import IMPLS
from entp.engine import packed, reference
from entp.engine.budget import default_token_budget
from entp.engine.flops import engine_flops
from entp.engine.layout import pack
from entp.results.schema import ArmRecord, Record
from entp.results.store import read_record
from entp.results.summary import values_of
from entp.stats import t_interval, welch_test, wilson

ENGINE, THEORY = DOCS / "engine.md", DOCS / "theory.md"
MAP, DIFFERENCES = DOCS / "map.md", DOCS / "differences.md"


@pytest.fixture(scope="module")
def count3() -> Record:
    return read_record(ROOT / "results" / "count3.json")


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * min(1.0, value):.{digits}f}"


def over_seeds(values: list[float], digits: int = 1) -> str:
    interval = t_interval(values)
    return "" if interval is None else " to ".join(percent(end, digits) for end in interval)


def seconds_of(arm: ArmRecord) -> str:
    told = [f"{run.seconds:,.0f}" for run in sorted(arm.runs, key=lambda run: run.seconds)]
    return told[0] if told[0] == told[-1] else f"{told[0]} to {told[-1]}"


def test_map_has_the_recorded_exact_matches(count3: Record) -> None:
    rows = rows_of(MAP, "arm", "seeds")
    assert len(rows) == 6
    for label, *cells in rows:
        arm = count3.arms[label]
        values = values_of(count3, arm, "exact_match")
        mean = percent(sum(values) / len(values), 2)
        expected = [str(len(values)), mean, over_seeds(values), seconds_of(arm)]
        assert cells == expected, label


def test_map_has_the_recorded_depths_at_16_integers() -> None:
    record = read_record(ROOT / "results" / "count3-depth.json")
    for layers, *cells in rows_of(MAP, "layers", "decoder, exact match"):
        for mode, told in zip(("decoder", "ENTP"), cells, strict=True):
            arm = record.arms.get(f"{mode}, layers {layers}, length 16")
            assert (arm is None) == (told == "")
            if arm is not None:
                (value,) = values_of(record, arm, "exact_match")
                assert told == f"{percent(value)} %"
                assert [run.test and run.test.concurrent_runs for run in arm.runs] == [1]


def test_differences_have_intervals_by_sequences_and_by_seeds(count3: Record) -> None:
    for label, seeds, mean, pooled, interval in rows_of(DIFFERENCES, "Count3 of 64", "seeds"):
        values = values_of(count3, count3.arms[label], "exact_match")
        average, n = sum(values) / len(values), 10_240 * len(values)
        assert (seeds, mean) == (str(len(values)), f"{percent(average, 2)} %")
        assert pooled == " to ".join(percent(end, 2) for end in wilson(round(average * n), n))
        assert interval == over_seeds(values)


def test_lead_of_the_tuned_decoder_has_the_p_of_the_documents(count3: Record) -> None:
    labels = ("ENTP medium, curriculum", "decoder medium, tuned")
    entp, decoder = (values_of(count3, count3.arms[label], "exact_match") for label in labels)
    p = welch_test(entp, decoder)
    assert p is not None
    told = f"Welch's p = {p:.2f}".replace("0.", ".")
    assert told in MAP.read_text()
    assert told in DIFFERENCES.read_text()


def linear_flops(implementation: Any, model: Transformer, x: torch.Tensor, at: torch.Tensor) -> int:
    """Floating-point operations of linear layers, addmm or mm: two per multiply-add."""
    with FlopCounterMode(display=False) as counter:
        implementation.prefix_hidden(model, x, at)
    counts = counter.get_flop_counts()["Global"].items()
    return sum(flops for op, flops in counts if str(op) in ("aten.addmm", "aten.mm"))


def test_fractions_of_linear_work_follow_the_formula() -> None:
    rows = [row for table in tables(ENGINE) for row in table[1:] if table[0][0] == "layers"]
    found = {int(row[0]): row[1:] for row in rows if len(row) == 3}
    assert sorted(found) == [2, 3, 6, 8, 12]
    for layers, (fraction, told) in found.items():
        assert fraction == f"{12 * layers - 15}/{12 * layers}"
        assert told == f"{100 * (12 * layers - 15) / (12 * layers):.1f} %"


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_code_does_the_linear_work_of_the_formula(layers: int) -> None:
    """12 L D² on N rows in the reference; packed (12 L - 15) D² on N rows, 3 D² on tokens and 9 D²
    on prefixes."""
    width, batch, time = 16, 2, 9
    model = Transformer(
        ModelConfig(vocab=7, context_length=time, layers=layers, heads=2, width=width)
    )
    x = torch.randint(7, (batch, time))
    at = torch.rand(batch, time) < 0.7
    at[:, -1] = True
    prefixes, rows = int(at.sum()), pack(at).rows
    unit = 2 * width**2
    assert linear_flops(reference, model, x, at) == unit * 12 * layers * rows
    ours = unit * ((12 * layers - 15) * rows + 3 * batch * time + 9 * prefixes)
    assert linear_flops(packed, model, x, at) == ours


def test_default_token_budgets() -> None:
    rows = [row for row in rows_of(ENGINE, "size", "layers") if row[0] in SIZES]
    assert [row[0] for row in rows] == list(SIZES)
    for size, layers, width, budget in rows:
        config = ModelConfig(vocab=2, context_length=1, **SIZES[size])
        with torch.device("meta"):
            model = Transformer(config)
        assert (int(layers), int(width)) == (config.layers, config.width)
        assert int(budget) == default_token_budget(model, torch.device("cpu"))


def kept_bytes(model: Transformer, x: torch.Tensor, at: torch.Tensor) -> int:
    """What autograd keeps of a forward pass, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t  # held, so that its address is not used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        packed.prefix_hidden(model, x, at)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def test_rows_keep_less_than_the_budget_assumes() -> None:
    """docs/engine.md: 42 to 58 bytes per row, layer and width in fp32; the budget assumes 24
    numbers of 4 bytes. Medium is between the other two."""
    found = []
    for size in ("small", "small-deep"):
        config = ModelConfig(vocab=64, context_length=64, **SIZES[size])
        at = torch.ones(1, 64, dtype=torch.bool)
        kept = kept_bytes(Transformer(config), torch.randint(64, (1, 64)), at)
        found.append(kept / (pack(at).rows * config.layers * config.width))
    assert (min(found), max(found)) == pytest.approx((42, 58), rel=0.1)
    assert max(found) < 24 * 4


def test_engine_document_names_the_implementations() -> None:
    text = ENGINE.read_text()
    assert all(f"`{impl}`" in text for impl in IMPLS)


def test_ratios_on_a_cpu_are_those_of_the_results_file() -> None:
    section = json.loads((ROOT / "results/bench_step.json").read_text())["step"]
    written = re.findall(r"\| (\d+\.\d+)x \|", ENGINE.read_text())
    rows = [row for shape in section["shapes"] for row in shape["steps"]]
    assert written == [f"{row['ratio']:.2f}" for row in rows if row["name"] == "entp packed"]
    assert all(section["environment"][name] for name in ("commit", "date", "device"))


def test_gpu_steps_are_those_of_the_results_file() -> None:
    found = json.loads((ROOT / "results/engine_speed.json").read_text())
    written = {row[0]: row for table in tables(ENGINE) for row in table if len(row) == 10}
    for shape in found["step"]["shapes"]:
        steps = {row["name"]: row for row in shape["steps"]}
        loop, kernels, row = steps["entp reference"], steps["entp triton"], written[shape["name"]]
        least = shape.get("roofline") or shape["floor"]
        assert row[1].startswith(f"{loop['median'] * 1e3:.0f} (")
        assert row[3].startswith(f"{kernels['median'] * 1e3:.2f} (")
        assert row[4:6] == [f"{kernels['ratio']:.1f}", f"{kernels['memory_ratio']:.2f}"]
        assert row[8] == f"{kernels['median'] / least['seconds']:.2f}"
    for name in ("step", "generate", "scaling"):
        where = found[name]["environment"]
        assert all(where[key] for key in ("commit", "date", "device", "torch"))


def test_theory_document_has_the_numbers_of_its_commands() -> None:
    text = THEORY.read_text()
    powers = json.loads((ROOT / "results/complexity.json").read_text())["powers"]
    for kind, power in powers.items():
        measured = list(power.values())[:4]
        cells = ["none kept" if p is None else f"{round(p, 2) + 0.0:.2f}" for p in measured]
        assert f"| {kind} | {' | '.join(cells)} |" in text
    for row in json.loads((ROOT / "results/count3_tradeoff.json").read_text())["rows"]:
        if row["n"] == 4096 and row["s"] in (None, 64):
            assert row["correct"]
            assert f"{row['time']}" in text, row
    for row in json.loads((ROOT / "results/theory.json").read_text())["statements"]:
        assert row["as_expected"]
        assert row["label"] in text or row["label"] == "eq:auto"


def test_roofline_counts_are_the_documents() -> None:
    """docs/engine.md, roofline: Count3's rows, bytes of a unit, and operations."""
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:, 16:] = True
    config = ModelConfig(vocab=64, context_length=64, **SIZES["medium"])
    rows, text = pack(mask).rows, ENGINE.read_text()
    assert f"N = {rows:,} rows, a unit is {2 * config.width * rows / 1e6:.1f} MB" in text
    units = row_passes(config.layers, recompute=True)
    assert f"{units} units are {units * 2 * config.width * rows / 1e9:.0f} GB" in text
    assert f"{engine_flops(config, mask).total / 1e12:.1f} TFLOP" in text
