"""Whatever a user gets wrong is one sentence on standard error and exit code 2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_runs import FLAGS

from entp.cli.main import main

TRAIN = ["train", "count3", *FLAGS, "--batch-size=8", "--steps=2", "--out=runs/first"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run in runs/first."""
    folder = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(TRAIN) == 0
    return folder


COMMANDS = [
    ("frain", "unknown command 'frain': allowed are demo, train"),
    ("train", "needs a task: allowed are count2, count3"),
    ("train cuont3", "unknown task 'cuont3': allowed are .* Did you mean count3"),
    ("train nowhere:Task", "task 'nowhere:Task' cannot be imported"),
    ("tasks count9", "unknown task 'count9'"),
    ("tasks count3 --length 3", "prompt_length 16 must be at least 1 and below"),
    ("demo --seed -1", "seed -1 is outside 0 to 2"),
    ("report --out nowhere/x.md", "in a folder that does not exist: make nowhere first"),
    ("report --out page.pdf", "give a name that ends with .md, .html or .csv"),
]
TRAINING = [
    (
        "--mode enpt",
        "'enpt': allowed are entp, decoder, prefix-lm, refresh-N .*. Did you mean entp",
    ),
    (
        "--mode refresh-1",
        r"unknown mode 'refresh-1': allowed are .* refresh-N \(N from 2 to 10+\)\.$",
    ),
    ("--size huge", "'huge' .*: allowed are None, large, medium, small"),
    ("--sise small", "Unrecognized options: --sise"),
    ("--stepz 3", r"Unrecognized options: --stepz=3\. Did you mean --steps\? See"),
    ("--qqqq 3", r"Unrecognized options: --qqqq=3\. See"),
    ("--optim.foo 1", r"Unrecognized options: --optim\.foo"),
    ("--steps many", "entp: 'many' is not a whole number. Expected --steps INT Optimizer steps"),
    ("--steps 0", "steps is 0"),
    ("--lr", r"Missing value for argument '--optim\.lr'"),
    ("lr 3", "Unrecognized options: lr, 3"),
    ("--resume=maybe", "Unrecognized options: maybe"),
    ("--resume --out", "Missing value for argument '--out'"),
    ("--optim.min-lr 6e-4 --lr 6e-5", r"optim\.min_lr 0\.0006 is above optim\.lr 6e-05: .*"),
    ("--model.heads 5", r"model\.heads 5 does not divide model\.width 192"),
    ("--device tpu", "device 'tpu'"),
    ("--fp16", "--fp16 does not exist, .*: use --bf16 or --fp32"),
    ("--out runs/first", "already holds a run: continue it with --resume"),
    ("--out runs/first --resume --batch-size 9", "batch_size was 8 and is now 9"),
    ("--out runs/none --resume", "no run to resume"),
    ("--out runs/first/config.json/x", "config.json.* cannot be used: Not a directory"),
    ("--train.max-seconds 0", "train.max_seconds is 0: it must be above 0, or None"),
    ("--optim.decay-by seconds", "optim.decay_by seconds needs train.max_seconds"),
    ("--train.monitor speed", "train.monitor 'speed' is not measured: allowed are exact_match"),
    ("--curriculum.mode decoder", "--curriculum.mode needs --curriculum.steps as well"),
    ("--model.width 1000000000000", r"model\.width is 10+: it must be at least 1, at most 100000;"),
    (
        "--model.width 100000 --model.heads 1",
        r"width 100000, .* has 3\.6e\+11 weights: it must be at most",
    ),
    ("--model.layers 1000000000000000000000", r"model\.layers is 10+: it must be at most 1e\+12"),
    ("--model.layers 20000", r"model\.layers is 20000: it must be at least 1, at most 10000"),
    ("--lr 1e38", r"optim\.lr is 1e\+38: it must be at most 1e\+12"),
    ("--lr inf", r"optim\.lr is inf: it must be a finite number"),
    (f"--steps 1{'0' * 400}", r"steps is 10+: it must be at most 1e\+12"),
    ("--batch-size 1000000000000", "not enough memory for a model, batch or task of this size"),
    ("--task.num-values 100000000000000000000", r"task\.num_values is 10+: it must be at most"),
    ("--task.num-values 1000000000000", r"vocab 1000000000000, .* make one of them smaller"),
]
RUNS = [
    ("evaluate", "needs a run folder"),
    ("evaluate runs/none", "no run folder runs/none"),
    ("evaluate runs/model.gguf", "write it by `entp llm convert runs/model.gguf --out FOLDER`"),
    ("generate runs/model.gguf", "write it by `entp llm convert runs/model.gguf --out FOLDER`"),
    ("evaluate runs", "holds no complete checkpoint"),
    ("evaluate runs/first --batches 0", "batches is 0: at least 1 is needed"),
    ("evaluate runs/first --by digits", "unknown slice of count3 'digits': allowed are length"),
    ("evaluate runs/first --baselines", "count3 has no baselines: leave --baselines out"),
    ("evaluate runs/first --checkpoint first", "'first' .*: allowed are best, last"),
    (
        "generate runs/first --prompt 3,1,64",
        "64, outside the vocabulary of count3: allowed are 0 to 9",
    ),
    ("generate runs/first --prompt one", "not a list of whole numbers"),
    ("generate runs/first --max-new-tokens 100", "positions"),
    ("generate runs/first --temperature -1", "temperature"),
    ("generate runs/first --top-k 3", "--top-k chooses among tokens that are drawn"),
    ("generate runs/first --top-p 0.5", "--top-p chooses among tokens that are drawn"),
    (
        "evaluate runs/first --task entp.tasks.addition:Addition",
        "runs/first was trained on count3, of another class: leave --task out",
    ),
    ("export runs/first --out runs", "runs exists: give --out a new folder"),
    ("export runs/first --out new --test-sequences 0", "--test-sequences is 0: at least 1"),
    ("export runs/first --out new --shard-mib nan", r"--shard-mib is nan: it must be above 0"),
    ("export runs/first --out new --shard-mib inf", r"--shard-mib is inf: .* at most 1e\+12"),
    ("export runs/first --out new --format hf --shard-mib -1", r"--shard-mib is -1: it must"),
    ("llm trim runs/first --task count-text --out new --shard-mib nan", "--shard-mib is nan: it"),
    ("export runs/first", "--out"),
]
RECIPES = [
    ("figure9", "unknown recipe 'figure9': allowed are count3, count3-depth"),
    ("nowhere:RECIPE", "recipe 'nowhere:RECIPE' cannot be imported: No module named 'nowhere'"),
    ("entp.tasks.base:TASKS", "it must be an entp.experiments.recipe.Recipe"),
    ("count3 --tiny --seed one", "entp: 'one' is not a whole number. Expected --seed INT Train"),
    ("count3 --tiny --max-minutes ten", "entp: 'ten' is not a number. Expected --max-minutes FL"),
    ("count3 --tiny --max-minutes inf", "--max-minutes is inf: it must be above 0 and at most"),
    ("count3 --tiny --max-minutes nan", "--max-minutes is nan: it must be above 0"),
    ("count3 --tiny --total-minutes inf", "--total-minutes is inf: it must be above 0 and at most"),
    ("count3 --tiny --only", "--only names no arm: give one or more"),
    ("count3 --tiny --only None", "unknown arm of count3-tiny 'None': allowed are"),
    ("count3 --tiny --jobs 0", "--jobs is 0: it must be at least 1, or auto"),
    ("count3 --tiny --jobs many", r"'many' is not a whole number\. Expected --jobs INT\|\{auto\}"),
    ("count3 --tiny --out runs/first/config.json", "cannot be used: Not a directory"),
    ("count3 --tiny --record nowhere/x.json", "--record nowhere/x.json is in a folder that does"),
]
THEORY = [
    ("nothing", "unknown part of theory 'nothing': allowed are statements, rasp, count3-tradeoff"),
    ("rasp count4 --input 1", "invalid choice 'count4' for argument '--program': allowed are"),
    ("rasp count3 --input 1,x", "--input '1,x' is not a list of whole numbers: write them like"),
    ("rasp count3-printed --input 3,1,4", "takes whole numbers from 0 to n - 1 = 2"),
    ("count3-tradeoff --n-max 64", "--n-max is 64: allowed are 128 to 4096"),
    ("count3-tradeoff --n-max 4097", "--n-max is 4097: allowed are 128 to 4096"),
    ("count3-tradeoff --seed -1", "--seed is -1: it must be at least 0"),
    ("complexity --out nowhere/x.json", "in a folder that does not exist: make nowhere first"),
    ("compiled --ratio 0", "--ratio is 0: it must be at least 1"),
    ("compiled --input 3,x", "is not a list of whole numbers"),
    ("compiled --n-max 4 --input 1,2,3,0,1", "--input has 5 numbers: with --n-max 4 1 to 4 are"),
    ("compiled --input 3,12,0", "has 12: allowed are 0 to 11, with --n-max 64, with --ratio 4 and"),
    ("compiled --mode decoder --input 64", "--input has 64: allowed are 0 to 63, with --n-max 64."),
    ("compiled --n-max 0", "--n-max is 0: it must be at least 1"),
    ("compiled --n-max 5000", "--n-max is 5000: allowed are 1 to 4096"),
    ("compiled --seed -1", "--seed is -1: it must be at least 0"),
    ("compiled --mode decoder --ratio 4", "--ratio is 4 with --mode decoder: leave it out"),
    ("compiled --mode decoder --n-max 129", "--n-max is 129 with --mode decoder: allowed are 1 t"),
    ("compiled --mode prefix-lm", "invalid choice 'prefix-lm' for argument '--mode'"),
]
BENCH = [
    ("walk", "unknown benchmark 'walk': allowed are step, generate, scaling, sweep"),
    ("--out nowhere/x.json", "in a folder that does not exist: make nowhere first"),
    ("step --shapes count4", "unknown shape 'count4': allowed are count3, text, small-deep, small"),
    ("--shapes small --length 9", "--shapes small decides what --length would"),
    ("--variants loop", "unknown variant 'loop': allowed are reference, packed, triton, decoder"),
    ("generate --length 4", "--length is 4: it must be above --prompt-length 16"),
    ("scaling --lengths 8,16", "at least three different lengths"),
    ("scaling --out speed.txt", "speed.txt must end in .json"),
    ("--repeats 0", "--repeats is 0: it must be at least 1"),
]
OTHER_TASKS = [
    ("train match3 --mode prefix-lm", "mode prefix-lm needs a task with a prefix"),
    ("train match3 --task.modulus 100000000000000000000", r"task\.modulus is 10+: it must be at"),
    ("train addition --task.split-seed -1", r"task\.split_seed is -1: it must be at least 0"),
    ("train chase --task.hops 17", r"task\.hops is 17: on a cycle of 32 nodes at most 16"),
    ("train compose --task.size 1", r"task\.size 1 at least 2"),
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *COMMANDS,
        *((f"train count3 {words}", message) for words, message in TRAINING),
        *OTHER_TASKS,
        *RUNS,
        *((f"reproduce {words}", message) for words, message in RECIPES),
        *((f"theory {words}", message) for words, message in THEORY),
        *((f"bench {words}", message) for words, message in BENCH),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    words: str,
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(here)
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    lines = [line for line in said.splitlines() if not line.startswith("A step takes ")]
    assert [line.startswith("entp: ") for line in lines] == [True]  # that is said on a busy CPU


def test_config_that_does_not_fit_its_task_is_an_error(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder whose config was changed by hand."""
    config = json.loads((here / "runs/first/config.json").read_text())
    config["model"]["context_length"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["train", "count3", f"--out={tmp_path}", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "model.context_length 5 is shorter than the sequences of count3, 10" in said


def test_half_written_config_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"task": {"na')
    assert main(["train", "count3", f"--out={tmp_path}", "--resume"]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
