"""`entp bench step`: the shapes, the variants, a real run, its tables and its targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entp.bench import step
from entp.bench.measure import count_flops, take_turns
from entp.bench.options import BenchStepOptions
from entp.bench.profile import expensive_kernels, kernel_table
from entp.bench.shapes import PAPER, TARGETS, VARIANTS, RandomTokens, Shape, named_shapes, reached
from entp.engine.layout import pack
from entp.errors import InputError
from entp.tasks.counting import Match3

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def section(in_one_process: Any) -> dict[str, Any]:
    """A real run of a small shape, operators named."""
    saved: list[dict[str, Any]] = []
    options = BenchStepOptions(length=12, batch_size=2, repeats=3, profile=True, device="cpu")
    with in_one_process():
        section = step.bench(options, saved.append)
    assert saved == [section]  # after its only shape
    return section


@pytest.mark.parametrize(
    ("name", "size", "batch", "shortest", "longest", "outputs"),
    [
        ("count3", "medium", 64, 17, 64, 64),
        ("text", "medium", 32, 1, 128, 50_304),
        ("small-deep", "small-deep", 64, 1, 64, 2),
        ("small", "small", 64, 1, 64, 2),
    ],
)
def test_the_named_shapes(
    name: str, size: str, batch: int, shortest: int, longest: int, outputs: int
) -> None:
    shape = PAPER[name]
    assert (shape.size, shape.batch_size) == (size, batch)
    packing = pack(torch.from_numpy(shape.task.batch(0, "train", 0, batch).target_mask))
    assert [packing.groups[0][0], packing.groups[-1][0]] == [shortest, longest]
    assert len(packing.groups) == longest - shortest + 1
    assert {count for _, count in packing.groups} == {batch}
    run = shape.run("packed")
    assert (run.model.outputs or run.model.vocab) == outputs
    assert (run.mode, run.train.impl, run.train.precision) == ("entp", "packed", "auto")


def test_random_tokens_ask_for_the_next_token() -> None:
    task = RandomTokens(length=5, vocab=7)
    batch = task.batch(0, "train", 0, 100)
    assert batch.x.shape == batch.y.shape == (100, 5)
    assert (batch.y[:, :-1] == batch.x[:, 1:]).all()
    assert set(batch.x.flatten()) == set(batch.y.flatten()) == set(range(7))


def test_shapes_by_name() -> None:
    assert [shape.name for shape in named_shapes("paper")] == [
        "count3",
        "text",
        "small-deep",
        "small",
    ]
    assert [shape.name for shape in named_shapes("small, count3")] == ["count3", "small"]
    with pytest.raises(
        InputError,
        match=r"unknown shape 'count4': allowed are count3, text, .*paper\. Did you mean count3",
    ):
        named_shapes("small,count4")
    with pytest.raises(InputError, match="the list of shapes is empty: allowed are count3"):
        named_shapes(",")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "--length is 0: it must be at least 1"),
        ({"batch_size": 0}, "--batch-size is 0: it must be at least 1"),
        ({"repeats": 0}, "--repeats is 0: it must be at least 1"),
        ({"warmup": -1}, "--warmup is -1: it must be at least 0"),
        (
            {"variants": "packed,walk"},
            "unknown variant 'walk': allowed are reference, packed, triton, decoder",
        ),
        (
            {"shapes": "small", "size": "medium", "batch_size": 3},
            "decides what --size and --batch-size would: leave out",
        ),
    ],
)
def test_bad_options_are_sentences(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BenchStepOptions(**options)


def test_a_variant_that_cannot_run_here_is_an_error_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match="'triton' cannot run here"):
        step.bench(BenchStepOptions(variants="triton", device="cpu"))


def test_every_variant_trains() -> None:
    """A step changes the loss: it is a whole training step, and the same work by each ENTP
    variant."""
    shape = Shape("tiny", Match3(length=6), "small", 2)
    losses = {}
    for name in ("reference", "packed", "decoder"):
        one = step.make_step(shape.run(name), CPU)
        losses[name] = [float(one()[0]) for _ in range(3)]  # type: ignore[index]
        assert losses[name][2] < losses[name][0]
    assert losses["packed"] == pytest.approx(losses["reference"], rel=1e-4)
    assert losses["decoder"] != pytest.approx(losses["reference"], rel=1e-4)


def test_packed_does_less_work_than_the_reference() -> None:
    """Three layers: 21 of 36 units of linear work are left, and attention is a small part."""
    shape = Shape("tiny", Match3(length=24), "small", 2)
    names = [name for name in VARIANTS if "triton" not in name]
    flops = {name: count_flops(step.make_step(shape.run(name), CPU)) for name in names}
    assert 0.55 < flops["packed"] / flops["reference"] < 0.65
    assert flops["decoder"] < 0.15 * flops["reference"]


@pytest.mark.slow
def test_a_run_has_every_number(section: dict[str, Any]) -> None:
    (shape,) = section["shapes"]
    assert (shape["tokens"], shape["prefixes"], shape["rows"]) == (12, [1, 12], 2 * 78)
    rows = {row["name"]: row for row in shape["steps"]}
    assert list(rows) == ["entp reference", "entp packed", "decoder"]
    loop = rows["entp reference"]
    for row in rows.values():
        assert len(row["seconds"]) == 3
        assert row["median"] == sorted(row["seconds"])[1]
        assert row["peak_bytes"] > 2**20
        assert row["ratio"] == loop["median"] / row["median"]
        assert row["memory_ratio"] == loop["peak_bytes"] / row["peak_bytes"]
        assert row["tflops_per_s"] == pytest.approx(row["flops"] / row["median"] / 1e12)
    assert loop["ratio"] == loop["memory_ratio"] == 1.0
    assert loop["flops"] > rows["entp packed"]["flops"] > rows["decoder"]["flops"]
    assert section["environment"]["date"]
    assert section["targets"] == []  # targets are for a GPU


@pytest.mark.slow
def test_the_report_names_everything(section: dict[str, Any]) -> None:
    text = step.report(section)
    assert "small, 2 sequences of 12 tokens, prefixes of 1 to 12, 2 outputs" in text
    assert all(
        word in text
        for word in ("ms (median)", "spread", "reference / this", "TFLOP/s", "peak memory MiB")
    )
    assert all(row["name"] in text for row in section["shapes"][0]["steps"])
    assert "wanted" not in text


@pytest.mark.slow
def test_the_profile_names_ten_operators_but_not_the_loops(section: dict[str, Any]) -> None:
    profiles = section["shapes"][0]["profile"]
    assert list(profiles) == ["entp packed", "decoder"]
    for found in profiles.values():
        top = found["top"]
        assert len(top) == 10
        assert [row["ms"] for row in top] == sorted((row["ms"] for row in top), reverse=True)
        assert sum(row["fraction"] for row in top) <= 1.0
        assert sum(row["ms"] for row in top) <= found["ms"]
        assert {"aten::mm", "aten::addmm"} <= {row["name"] for row in top}
    assert "most expensive operators" in step.report(section)


def test_a_profile_counts_per_step() -> None:
    a = torch.randn(300, 300)
    found = expensive_kernels(lambda: [a @ a for _ in range(4)], CPU, steps=3)
    assert found["top"][0]["name"] == "aten::mm"
    assert found["top"][0]["calls"] == 4
    long = kernel_table(
        "x", {**found, "top": [{**found["top"][0], "name": "void at::native::" + "k" * 99}]}
    )
    assert "k" * 67 + "..." in long
    assert "k" * 68 not in long


def test_without_the_reference_there_is_no_ratio() -> None:
    """Memory is measured here, in a process of its own."""
    section = step.bench(
        BenchStepOptions(length=6, batch_size=1, repeats=1, variants="decoder", device="cpu")
    )
    (row,) = section["shapes"][0]["steps"]
    assert (row["ratio"], row["memory_ratio"]) == (None, None)
    assert row["peak_bytes"] > 2**20
    assert " - " in step.report(section)


def test_a_step_that_adds_no_memory_has_a_ratio() -> None:
    rows = [
        {"name": name, "median": 1.0, "peak_bytes": peak}
        for name, peak in (("entp reference", 600), ("decoder", 0))
    ]
    assert [row["memory_ratio"] for row in step._with_ratios(rows)] == [1.0, 600.0]


def test_the_report_of_a_named_shape_with_kernels() -> None:
    """The roofline stands beside the kernels' own time; a note stands at the end."""
    measured = {
        "seconds": [0.3],
        "median": 0.3,
        "tflops_per_s": 2.0,
        "ratio": 1.0,
        "peak_bytes": 5 * 2**20,
        "memory_ratio": 1.0,
    }
    rows = [
        {**measured, "name": name, "median": median}
        for name, median in (("entp packed", 0.3), ("entp triton", 0.06))
    ]
    roofline = {
        "flops": 1e12,
        "tflops_per_s": 50.0,
        "product_seconds": 0.02,
        "bytes": 1e9,
        "tbytes_per_s": 0.1,
    }
    shape = {**step._describe(PAPER["count3"], torch.ones(2, 64, dtype=torch.bool)), "steps": rows}
    shape["roofline"] = {**roofline, "pass_seconds": 0.01, "seconds": 0.03}
    where = {"device": "somewhere", "threads": 1, "torch": "2"}
    text = step.report(
        {"environment": where, "shapes": [shape], "targets": [], "note": "a quiet machine"}
    )
    assert "\ncount3: medium, 64 sequences of 64 tokens, prefixes of 1 to 64, 64 outputs\n" in text
    assert "entp triton takes 2.00 times that" in text
    assert any(
        line.split() == ["entp", "packed", "300.00", "300.00..300.00", "1.00x", "2", "5", "1.00x"]
        for line in text.splitlines()
    )
    assert text.endswith("\n\nnote: a quiet machine")


def test_plain_bench_step_is_the_readmes_shape() -> None:
    shape = step._shape(BenchStepOptions())
    assert (shape.size, shape.batch_size, shape.task) == ("small", 8, Match3(length=64))


@pytest.mark.parametrize(
    ("got", "met"), [(31.9, "no"), (32.0, "wanted"), (44.9, "wanted"), (45.0, "aim")]
)
def test_what_counts_as_reached(got: float, met: str) -> None:
    (row,) = reached("count3", {"time": {"entp triton": got, "entp packed": 99.0}})
    assert (row["wanted"], row["aim"], row["reached"], row["met"]) == (32, 45, got, met)


def test_targets_are_of_named_shapes_and_rows_of_the_table() -> None:
    assert {target.shape for target in TARGETS} == {*PAPER, "generate"}
    assert all(1 < target.wanted < target.aim for target in TARGETS)
    assert reached("own", {"time": {"entp triton": 1000.0}}) == []
    assert reached("count3", {"time": {"entp triton": None}, "memory": {}}) == []
    rows = reached("text", {"time": {"entp triton": 60.0}, "memory": {"entp triton": 2.5}})
    table = step.targets_table(rows)
    assert "50x" in table
    assert "60.00x  wanted" in table
    assert "2.50x      no" in table


@pytest.mark.slow
def test_on_a_gpu_the_targets_stand_under_the_tables(section: dict[str, Any]) -> None:
    """A measured shape renamed, its ratios set: targets are looked up by shape, measure and
    variant."""
    rows = [{**row, "ratio": 33.0, "memory_ratio": 6.0} for row in section["shapes"][0]["steps"]]
    shape = {
        **section["shapes"][0],
        "name": "count3",
        "steps": [{**rows[1], "name": "entp triton"}],
    }
    targets = step._targets(shape)
    assert [(t["measure"], t["met"]) for t in targets] == [("time", "wanted"), ("memory", "aim")]
    assert "33.00x  wanted" in step.report({**section, "shapes": [shape], "targets": targets})


@pytest.mark.gpu
def test_kernels_take_part_and_are_named_on_cuda() -> None:
    options = BenchStepOptions(
        shapes="small", repeats=2, variants="packed,triton,decoder", profile=True, device="cuda"
    )
    found = step.bench(options)
    (shape,) = found["shapes"]
    assert [row["name"] for row in shape["steps"]] == ["entp packed", "entp triton", "decoder"]
    assert all(len(row["seconds"]) == 2 and row["peak_bytes"] > 2**20 for row in shape["steps"])
    for profile in shape["profile"].values():
        assert profile["what"] == "kernels"
        assert len(profile["top"]) == 10
        assert not any(row["name"].startswith(("aten::", "Optimizer.")) for row in profile["top"])
    assert found["targets"] == []  # ratios need the loop


@pytest.mark.slow
def test_packed_is_faster_than_the_loop_on_a_cpu() -> None:
    """Small, 64 tokens, every prefix. Recorded ratios are in docs/engine.md; this guards the order.

    One step each after another; on a machine that is busy with something else just then, the
    comparison is made again.
    """
    shape = Shape("order", Match3(length=64), "small", 2)
    steps = {name: step.make_step(shape.run(name), CPU) for name in ("reference", "packed")}
    for one in steps.values():
        one()
    ratios: list[float] = []
    while len(ratios) < 5 and max(ratios, default=0) < 1.3:
        seconds = take_turns(steps, CPU, 1)
        ratios.append(seconds["reference"][0] / seconds["packed"][0])
    assert max(ratios) > 1.3
