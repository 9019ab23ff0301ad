"""lm-eval finds the same numbers as our own tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")

from small_networks import folder_of  # noqa: E402
from small_tokenizers import pretrained_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from entp.cli.main import main  # noqa: E402
from entp.config import ModelConfig, Run, model_for  # noqa: E402
from entp.errors import InputError  # noqa: E402
from entp.hf.lm_eval import EntpLM  # noqa: E402
from entp.model import Transformer  # noqa: E402
from entp.tasks.choices import Winogrande, encode_pairs  # noqa: E402
from entp.tasks.counting import Count3  # noqa: E402
from entp.tasks.text import Text  # noqa: E402
from entp.tasks.tokens import find_tokenizer  # noqa: E402
from entp.training.checkpoint import load, save_model  # noqa: E402
from entp.training.evaluate import evaluate, split_batches  # noqa: E402
from entp.training.forward import Forward  # noqa: E402

ITEMS = [
    ("Ann met Eve so _ was glad.", "Ann", "Eve", "2"),
    ("The cup hit the jug, and the _ broke.", "cup", "jug", "1"),
    ("Bob sings, but Tim does not: _ has a voice.", "Bob", "Tim", "1"),
    ("Kim is older than Lu, for _ went first.", "Kim", "Lu", "2"),
    ("Ann fears Eve because _ is strong.", "Ann", "Eve", "2"),
]
LENGTH = 40
YAML = """
task: small_winogrande
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
num_fewshot: 0
metric_list: [{{metric: acc}}]
metadata: {{version: 1.0}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model of bytes in `model`, items of WinoGrande, and the same as a YAML task."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("ENTP_DATA", str(tmp_path))
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    keys = ("sentence", "option1", "option2", "answer")
    (tmp_path / "winogrande").mkdir()
    rows = [dict(zip(keys, item, strict=True)) for item in ITEMS]
    (tmp_path / "winogrande/dev.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab=257, context_length=LENGTH, layers=2, heads=2, width=16))
    for p in model.parameters():
        p.data *= 6
    save_model(model, "model", Run(Text(block=LENGTH), model.config, "entp", batch_size=4))
    _write_yaml(tmp_path)
    return tmp_path


def _write_yaml(folder: Path) -> None:
    """Full scoring, which has one context for both options."""
    docs = []
    for item in Winogrande(scoring="full").read_items():
        first = item.options[0]
        choices = [option.continuation for option in item.options]
        docs.append({"question": first.context, "choices": choices, "label": item.label})
    (folder / "yaml").mkdir()
    file = folder / "docs.jsonl"
    file.write_text("\n".join(map(json.dumps, docs)))
    (folder / "yaml/small.yaml").write_text(YAML.format(file=file))


def instances(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in args]


def own_totals(task: Any, mode: Any = "entp") -> Any:
    model = load("model")
    run = Run(task, model.config, mode, batch_size=4)
    return evaluate(model, task, split_batches(task, "test", None, 4, 0), Forward.of(run))


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_accuracy_of_a_yaml_task_is_that_of_our_own(folder: Path, mode: str) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    lm = EntpLM("model", mode=mode, device="cpu", batch_size="3")
    found = simple_evaluate(
        model=lm,
        tasks=["small_winogrande"],
        task_manager=TaskManager(include_path=str(folder / "yaml"), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    task = Winogrande(block=LENGTH, scoring="full")
    accuracy = own_totals(task, mode).value("accuracy")
    assert found["results"]["small_winogrande"]["acc,none"] == pytest.approx(accuracy)
    assert 0 < accuracy < 1


@pytest.mark.parametrize("scoring", ["partial", "full"])
@pytest.mark.parametrize("length", [LENGTH, 7])
def test_log_likelihoods_are_those_of_our_own_task(folder: Path, scoring: Any, length: int) -> None:
    """Also of continuations that are longer than the model reads."""
    task = Winogrande(block=length, scoring=scoring)
    requests = [option for item in task.read_items() for option in item.options]
    lm = EntpLM("model", device="cpu")
    lm.max_length = length
    scores = lm.loglikelihood(instances(*requests), disable_tqdm=True)
    pairs = encode_pairs(find_tokenizer("bytes"), requests)
    labels = [item.label for item in task.read_items()]
    right = [scores[2 * at + label][0] for at, label in enumerate(labels)]
    size = sum(len(pairs[2 * at + label][1]) for at, label in enumerate(labels))
    measured = own_totals(task)
    totals = measured.all["bits_per_byte"]
    longest = max(len(context) + len(rest) for context, rest in pairs)
    assert longest > length  # a context is cut in both
    assert (max(len(rest) for _, rest in pairs) > length) == (length == 7)
    costs = [(-scores[at][0], -scores[at + 1][0]) for at in range(0, len(scores), 2)]
    chosen = [pair.index(min(pair)) == label for pair, label in zip(costs, labels, strict=True)]
    assert measured.value("accuracy") == np.mean(chosen)
    assert -sum(right) == pytest.approx(totals.v, rel=1e-5)
    assert size == totals.w


@pytest.mark.parametrize("stride", [None, 8])
def test_rolling_is_our_perplexity(folder: Path, stride: int | None) -> None:
    """With a length at which the last window is full: then ours are the same windows."""
    for number in range(4):
        words = (f"Some prose, number {number}, until there is enough for all. " * 5)[:239]
        (folder / "prose").mkdir(exist_ok=True)
        (folder / f"prose/{number}.txt").write_text(words)
    task = Text(stride=stride).with_data("prose")
    stream = task._corpus().tokens("test")
    tokens = stream.take(np.zeros(1, np.int64), len(stream))[0].tolist()
    block = next(b for b in range(LENGTH, 9, -1) if (len(tokens) - b) % (stride or b) == 0)
    lm = EntpLM("model", device="cpu", stride=stride)
    lm.max_length = block
    text = lm.text.decode(tokens)
    assert lm.tok_encode(text) == tokens[:-1]  # the end token is the task's alone
    found = lm._scores([([256], tokens)], stride, True)[0][0]
    assert -found == pytest.approx(own_totals(replace(task, block=block)).all["loss"].v, rel=1e-5)
    assert len(tokens) > 2 * block


def test_rolling_scores_a_whole_text(folder: Path) -> None:
    lm = EntpLM("model", device="cpu")
    text = "A text that is longer than the model reads at once, by far. It is."
    (found,) = lm.loglikelihood_rolling(instances((text,)), disable_tqdm=True)
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokens = lm.tok_encode(text)
    parts = map(make_disjoint_window, get_rolling_token_windows(tokens, 256, LENGTH, 1))
    pairs = [(("", ""), context, rest) for context, rest in parts]
    assert len(pairs) == 2
    expected = sum(score for score, _ in lm._loglikelihood_tokens(pairs, disable_tqdm=True))
    assert found == pytest.approx(expected, rel=1e-6)


def test_generation_stops_where_it_is_told(folder: Path) -> None:
    lm = EntpLM("model", device="cpu")
    how = {"max_gen_toks": 50, "until": []}
    (whole,) = lm.generate_until(instances(("Ann met", how)), disable_tqdm=True)
    stop = whole[5:7]
    args = ("Ann met", {**how, "until": [stop]})
    assert lm.generate_until(instances(args), disable_tqdm=True) == [whole.partition(stop)[0]]
    short = ("Ann met", {**how, "max_gen_toks": 3})
    assert len(lm.generate_until(instances(short), disable_tqdm=True)[0]) <= 3


def test_models_of_other_tasks_are_refused(folder: Path) -> None:
    run = Run(Count3(), model_for(Count3(), "small", layers=1))
    save_model(Transformer(run.model), "count3", run)
    with pytest.raises(InputError, match="count3 is no model of text: it has 64 tokens"):
        EntpLM("count3", device="cpu")
    with pytest.raises(InputError, match="mode prefix-lm needs a prefix"):
        EntpLM("model", mode="prefix-lm", device="cpu")
    with pytest.raises(InputError, match="batch_size is 'many'"):
        EntpLM("model", device="cpu", batch_size="many")
    with pytest.raises(InputError, match="stride is 41: allowed are 1 to 40"):
        EntpLM("model", device="cpu", stride=41)


def command(folder: Path, tasks: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`entp lm-eval model` in a process of its own, which sees no GPU."""
    words = [sys.executable, "-m", "entp", "lm-eval", "model", "--tasks", tasks, *more]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=env, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("device", [["--device", "cpu"], []])
def test_command_runs_the_harness(folder: Path, device: list[str]) -> None:
    """On the CPU also where no device is given, and there is no GPU."""
    more = ("--include-path", "yaml", "--output-path", "found", "--mode=decoder")
    done = command(folder, "small_winogrande", *more, *device)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (folder / "found").rglob("results_*.json")
    told = json.loads(file.read_text())["results"]["small_winogrande"]
    task = Winogrande(block=LENGTH, scoring="full")
    assert told["acc,none"] == pytest.approx(own_totals(task, "decoder").value("accuracy"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("small_winogrande,no_such_task", "entp: lm-eval has no task no_such_task: give --tasks"),
        ("lambada_openai", "entp: the data of these tasks cannot be had: "),
    ],
)
def test_tasks_that_are_not_here_are_refused(folder: Path, tasks: str, message: str) -> None:
    done = command(folder, tasks, "--include-path", "yaml")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(message)


def test_device_and_batch_size_are_those_that_are_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto and 64 if none is; those of a file of options are not known, and not replaced."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

    found: list[tuple[Any, Any]] = []

    def execute(self: HarnessCLI, args: Any) -> None:
        config = EvaluatorConfig.from_cli(args)
        found.append((config.device, config.batch_size))

    monkeypatch.setattr(HarnessCLI, "execute", execute)
    (folder / "own.yaml").write_text("device: cpu\nbatch_size: 3\n")
    words = ["lm-eval", "model", "--tasks=small_winogrande"]
    for more in ([], ["--device=cpu", "-b", "5"], ["--config", "own.yaml"]):
        assert main([*words, *more]) == 0
    assert [(device, str(size)) for device, size in found] == [
        ("auto", "64"),
        ("cpu", "5"),
        ("cpu", "3"),
    ]


def test_pretrained_model_has_the_scores_of_lm_evals_own_class(folder: Path) -> None:
    """Log-likelihoods in mode decoder, of continuations and of whole texts beyond its positions."""
    transformers = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    folder_of("gpt2", folder / "gpt2", vocab_size=403, n_positions=32)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(pretrained_file().decode()),
        eos_token="<|end_of_text|>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    made.save_pretrained(folder / "gpt2")
    (folder / "gpt2/tokenizer.json").write_bytes(pretrained_file())
    ours = EntpLM("gpt2", device="cpu")
    network = transformers.GPT2LMHeadModel.from_pretrained("gpt2")
    theirs = HFLM(pretrained=network, tokenizer=made, device="cpu", batch_size=1)
    assert (ours.max_length, ours.eot_token_id) == (theirs.max_length, theirs.eot_token_id)
    asked = instances(("the cat sat", " on a mat"), ("dogs' houses", " (again)"), ("", "the cat"))
    for one, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-4)
        assert one[1] == other[1]
    texts = instances(("the cat sat on a mat. " * 9,), ("dogs",))
    found = [lm.loglikelihood_rolling(texts) for lm in (ours, theirs)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
