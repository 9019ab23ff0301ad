"""The documents say what the code does: paths exist, commands work as written, formulas and tables
are those of the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from entp import SIZES, ModelConfig, Transformer
from entp.bench.roofline import row_passes
from entp.cli.main import COMMANDS
from entp.config import IMPLS
from entp.engine import packed, reference
from entp.engine.budget import default_token_budget
from entp.engine.flops import engine_flops
from entp.experiments import RECIPES
from entp.training.checkpoint import load_run

ROOT = Path(__file__).parent.parent
DOCS = [
    path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.exists()
]
MADE_BY_RUNS = ("runs", "demo")
SUFFIXES = ("py", "md", "toml", "txt", "json", "yml", "yaml", "sh", "cfg")


def without_blocks(text: str) -> str:
    """The text without its fenced code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    found = re.findall(
        rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert found, f"{path.name} has no {language} block"
    return found


def code_block(path: Path, language: str) -> str:
    return code_blocks(path, language)[0]


def looks_like_a_path(span: str) -> bool:
    """`entp/engine/` and `docs/engine.md`, not `x[:, :t+1]`, `parity.py`, `runs/first` or
    `count3/entp`."""
    plain = span.split("::")[0]
    if not re.fullmatch(r"\.?[\w-][\w.*-]*(/[\w.*-]+)*/?", plain):
        return False
    first, _, rest = plain.partition("/")
    if first in MADE_BY_RUNS:
        return False
    in_a_folder = bool(rest) and plain.rsplit(".", 1)[-1] in SUFFIXES
    return (
        in_a_folder
        or ("/" in plain and (ROOT / first).is_dir())
        or plain.endswith((".md", ".toml"))
    )


def paths_in(path: Path) -> list[str]:
    """Repository paths in backticks and targets of relative links; links are relative to the
    document."""
    text = without_blocks(path.read_text())
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if looks_like_a_path(span)]
    links = [
        link.split("#")[0]
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if not re.match(r"\w+:|#", link)
    ]
    return spans + [os.path.relpath(path.parent / link, ROOT) for link in links]


def exists(name: str) -> bool:
    """Whether the path, or pattern, is there; for `file::test` also whether the file defines the
    test."""
    file, _, test = name.partition("::")
    found = list(ROOT.glob(file.rstrip("/"))) or list((ROOT / "docs").glob(file))
    return bool(found) and (not test or f"def {test}(" in found[0].read_text())


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("entp/engine/packed.py", True),
        ("entp/engine/", True),
        ("tests/engine/test_packed.py::test_split", True),
        ("engine/packed.py", True),
        ("docs/engine.md", True),
        ("pyproject.toml", True),
        ("runs/parity", False),
        ("runs/first/config.json", False),
        ("parity.py", False),
        ("x[:, :t+1]", False),
        ("--task.length", False),
        ("entp train parity", False),
    ],
)
def test_what_counts_as_a_path(span: str, expected: bool) -> None:
    assert looks_like_a_path(span) is expected


def test_a_missing_path_or_test_is_noticed() -> None:
    assert not exists("entp/engine/nowhere.py")
    assert not exists("tests/engine/test_packed.py::test_that_is_not_there")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_paths_exist(path: Path) -> None:
    missing = [name for name in paths_in(path) if not exists(name)]
    assert not missing, f"{path.name} names what is not there: {missing}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_and_recipes_exist(path: Path) -> None:
    """Every `entp COMMAND`, and every recipe that `entp reproduce` is given."""
    text = path.read_text()
    assert set(re.findall(r"(?:`|^)entp ([a-z]+)", text, flags=re.MULTILINE)) <= set(COMMANDS)
    assert set(re.findall(r"entp reproduce ([a-z][\w-]*)(?![\w:-])", text)) <= set(RECIPES)


def test_map_rows_have_a_status() -> None:
    rows = [
        line for line in (ROOT / "docs" / "map.md").read_text().splitlines() if line.startswith("|")
    ]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    body = [row for row in cells if row[0] != "paper" and not row[0].startswith("--")]
    assert len(body) > 40
    for row in body:
        assert len(row) == 5, row
        assert re.match(r"(done|not yet)\b", row[4]), row
        if row[4].startswith("done"):
            assert row[1], f"{row[0]} is done, but no file is named"


def test_the_map_names_every_recipe() -> None:
    named = re.findall(r"entp reproduce ([a-z][\w-]*)", (ROOT / "docs" / "map.md").read_text())
    assert set(named) == set(RECIPES)


def test_a_task_in_30_lines_works_as_written(tmp_path: Path) -> None:
    """The file of docs/add-a-task.md and its commands, run in an empty folder."""
    document = ROOT / "docs" / "add-a-task.md"
    source = code_block(document, "python")
    assert len(source.splitlines()) <= 30
    (tmp_path / "parity.py").write_text(source)
    outputs = [run_command(line, tmp_path) for line in code_block(document, "sh").splitlines()]
    assert len(outputs) == 3
    drawn, trained, measured = outputs
    assert "is the number of ones so far odd?" in drawn
    assert re.search(r"input +[01]( +[01]){15}\ntarget +[01]( +[01]){15}\n", drawn)
    assert "step 20" in trained
    assert "128 sequences of test" in measured
    assert "exact_match" in measured


def test_a_recipe_of_ones_own_works_as_written(tmp_path: Path) -> None:
    """The two files of docs/add-a-task.md, and the first command of its recipe: two processes find
    both files."""
    document = ROOT / "docs" / "add-a-task.md"
    for name, source in zip(("parity.py", "mine.py"), code_blocks(document, "python"), strict=True):
        (tmp_path / name).write_text(source)
    command, _ = re.findall(r"^    (entp reproduce .*)$", document.read_text(), re.MULTILINE)
    shown = run_command(command, tmp_path)
    assert "Which mode learns parity?" in shown
    assert shown.count(" done ") == 2
    assert len(list((tmp_path / "runs/parity-tiny").glob("*/final.json"))) == 6
    assert (tmp_path / "runs/parity-tiny/curves.png").stat().st_size > 10_000


def test_the_quick_training_works_as_written(tmp_path: Path) -> None:
    """The commands of docs/training.md, the first with fewer steps; all three parts take part in
    it."""
    train, evaluate = code_block(ROOT / "docs" / "training.md", "sh").splitlines()
    assert "step 6," in run_command(
        f"{train} --steps 6 --start.steps 4 --optim.warmup 2 --train.eval-batches 1", tmp_path
    )
    run = load_run(tmp_path / "runs" / "quick")
    assert (run.at(0).mode, run.at(0).batch, run.start.mode) == ("decoder", 64, "random-prefix")
    assert (run.optim.name, run.optim.whiten, run.optim.take, run.batch_size, run.steps) == (
        "muon",
        10,
        128,
        128,
        6,
    )
    assert "4096 sequences of test" in run_command(evaluate, tmp_path)


def run_command(line: str, folder: Path) -> str:
    """Output of `entp ...` as the console script runs it: the current folder is not on the path by
    itself."""
    words = shlex.split(line)
    assert words[0] == "entp"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        sys.executable,
        "-P",
        "-c",
        "import sys; from entp.cli.main import main; sys.exit(main())",
        *words[1:],
    ]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def linear_flops(
    implementation: Any, model: Transformer, x: torch.Tensor, wanted: torch.Tensor
) -> int:
    """Floating-point operations of the linear layers, which are addmm or mm: two per multiply-add."""
    with FlopCounterMode(display=False) as counter:
        implementation.prefix_hidden(model, x, wanted)
    return sum(
        flops
        for op, flops in counter.get_flop_counts()["Global"].items()
        if str(op) in ("aten.addmm", "aten.mm")
    )


def table(path: Path, columns: int) -> list[list[str]]:
    """Rows of the tables of that many columns, without their heads."""
    lines = [
        line
        for line in path.read_text().splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == columns]


SHARES = {int(row[0]): row[1:] for row in table(ROOT / "docs" / "engine.md", 3) if row[0].isdigit()}


def test_the_shares_of_linear_work_follow_the_formula() -> None:
    assert sorted(SHARES) == [2, 3, 6, 8, 12]
    for layers, (fraction, percent) in SHARES.items():
        assert fraction == f"{12 * layers - 15}/{12 * layers}"
        assert percent == f"{100 * (12 * layers - 15) / (12 * layers):.1f} %"


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_the_formula_is_what_the_code_does(layers: int) -> None:
    """12 L D² on N rows in the reference; packed (12 L - 15) D² on N rows, 3 D² on tokens and 9 D²
    on prefixes."""
    width, batch, time = 16, 2, 9
    model = Transformer(ModelConfig(vocab=7, context_length=time, layers=layers, heads=2, width=width))
    x = torch.randint(7, (batch, time))
    wanted = torch.rand(batch, time) < 0.7
    wanted[:, -1] = True
    prefixes, rows = int(wanted.sum()), packed.pack(wanted).rows
    unit = 2 * width**2
    assert linear_flops(reference, model, x, wanted) == unit * 12 * layers * rows
    ours = unit * ((12 * layers - 15) * rows + 3 * batch * time + 9 * prefixes)
    assert linear_flops(packed, model, x, wanted) == ours


def test_the_default_budgets() -> None:
    rows = [row for row in table(ROOT / "docs" / "engine.md", 4) if row[0] in SIZES]
    assert [row[0] for row in rows] == list(SIZES)
    for size, layers, width, budget in rows:
        config = ModelConfig(vocab=2, context_length=1, **SIZES[size])
        with torch.device("meta"):
            model = Transformer(config)
        assert (int(layers), int(width)) == (config.layers, config.width)
        assert int(budget) == default_token_budget(model, torch.device("cpu"))


def kept_bytes(model: Transformer, x: torch.Tensor, wanted: torch.Tensor) -> int:
    """What autograd keeps of a forward pass, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t  # held, so that its address is not used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        packed.prefix_hidden(model, x, wanted)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def test_rows_keep_less_than_the_budget_assumes() -> None:
    """docs/engine.md: 42 to 58 bytes per row, layer and width in fp32; the budget assumes 24
    numbers of 4 bytes."""
    found = []
    for size, batch in (("small", 2), ("medium", 1), ("small-deep", 1)):
        config = ModelConfig(vocab=64, context_length=64, **SIZES[size])
        wanted = torch.ones(batch, 64, dtype=torch.bool)
        kept = kept_bytes(Transformer(config), torch.randint(64, (batch, 64)), wanted)
        found.append(kept / (packed.pack(wanted).rows * config.layers * config.width))
    assert (min(found), max(found)) == pytest.approx((42, 58), rel=0.1)
    assert max(found) < 24 * 4


def test_engine_document_names_the_implementations() -> None:
    text = (ROOT / "docs" / "engine.md").read_text()
    assert all(f"`{impl}`" in text for impl in IMPLS)


def test_measured_ratios_are_those_of_the_results_file() -> None:
    section = json.loads((ROOT / "results/bench_step.json").read_text())["step"]
    written = re.findall(r"\| (\d+\.\d+)x \|", (ROOT / "docs/engine.md").read_text())
    rows = [row for shape in section["shapes"] for row in shape["steps"]]
    assert written == [f"{row['ratio']:.2f}" for row in rows if row["name"] == "entp packed"]
    assert all(section["environment"][name] for name in ("commit", "date", "device"))


def test_the_table_of_gpu_steps_is_that_of_the_results_file() -> None:
    found = json.loads((ROOT / "results/engine_speed.json").read_text())
    written = {row[0]: row for row in table(ROOT / "docs" / "engine.md", 10)}
    for shape in found["step"]["shapes"]:
        steps = {row["name"]: row for row in shape["steps"]}
        loop, kernels, row = steps["entp reference"], steps["entp triton"], written[shape["name"]]
        assert row[1].startswith(f"{loop['median'] * 1e3:.0f} (")
        assert row[3].startswith(f"{kernels['median'] * 1e3:.2f} (")
        assert row[4:6] == [f"{kernels['ratio']:.1f}", f"{kernels['memory_ratio']:.2f}"]
        assert row[8] == f"{kernels['median'] / shape['floor']['seconds']:.2f}"
    assert {
        target["met"] for target in found["step"]["targets"] if target["measure"] == "memory"
    } == {"wanted"}
    assert found["generate"]["targets"][0]["met"] == "aim"
    sections = [found[name] for name in ("step", "generate", "scaling")]
    assert all(
        s["environment"][name] for s in sections for name in ("commit", "date", "device", "torch")
    )


def test_theory_document_has_the_numbers_of_its_commands() -> None:
    text = (ROOT / "docs" / "theory.md").read_text()
    powers = json.loads((ROOT / "results/complexity.json").read_text())["powers"]
    for kind, power in powers.items():
        cells = [
            "none kept" if p is None else f"{round(p, 2) + 0.0:.2f}"
            for p in list(power.values())[:4]
        ]
        assert f"| {kind} | {' | '.join(cells)} |" in text
    trade = json.loads((ROOT / "results/count3_tradeoff.json").read_text())["rows"]
    for row in trade:
        if row["n"] == 4096 and row["s"] in (None, 64):
            assert row["correct"]
            assert f"{row['time']}" in text, row
    statements = json.loads((ROOT / "results/theory.json").read_text())["statements"]
    assert all(
        row["as_expected"] and row["label"] in text
        for row in statements
        if row["label"] != "eq:auto"
    )


def test_the_count_of_units_is_the_documents() -> None:
    """docs/engine.md, roofline: Count3's rows, bytes of a unit, and operations."""
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:, 16:] = True
    config = ModelConfig(vocab=64, context_length=64, **SIZES["medium"])
    rows = packed.pack(mask).rows
    text = (ROOT / "docs" / "engine.md").read_text()
    assert f"N = {rows:,} rows, a unit is {2 * config.width * rows / 1e6:.1f} MB" in text
    units = row_passes(config.layers, again=True)
    assert f"{units} units are {units * 2 * config.width * rows / 1e9:.0f} GB" in text
    assert f"{engine_flops(config, mask).total / 1e12:.1f} TFLOP" in text
