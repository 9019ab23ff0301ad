"""Recipes that fine-tune a language model: tiny versions, weights by --init, generated answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_llama import write_llama

from entp.cli.main import main
from entp.config import PretrainedConfig
from entp.data.prepare import prepare
from entp.errors import InputError
from entp.experiments.recipe import Recipe, find_recipe
from entp.experiments.reproduce import reproduce
from entp.llm.counting_text import CountText
from entp.report.tables import arms_table
from entp.results.store import read_record
from entp.tasks.text import Text
from entp.tasks.tokens import find_json_tokenizer


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    find_json_tokenizer.cache_clear()


def test_tiny_recipe_trains_tests_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["reproduce", "count3-llm", *args]) == 0
    record = read_record(tmp_path / "count3-llm-tiny" / "results.json")
    assert list(record.arms) == [
        "decoder SmolLM2, Count2",
        "decoder SmolLM2, Count3",
        "prefix-lm decoder SmolLM2, Count3",
        "ENTP SmolLM2, Count3",
    ]
    for arm in record.arms.values():
        test = arm.runs[0].test
        assert test is not None
        assert test.generated is not None
        assert set(test.generated.all) == {"exact_match", "token_accuracy", "well_formed"}
        assert list(test.generated.slices["token_accuracy"]["length"]) == ["2", "3"]
        assert "well_formed" not in test.totals.all
        assert arm.runs[0].config["model"]["lora_rank"] == 2
    table = arms_table(record)
    assert table.head[-3:] == [
        "generated exact match",
        "generated token accuracy",
        "generated well formed",
    ]
    assert not any(name.startswith("well formed") for name in table.head)
    capsys.readouterr()
    assert main(["reproduce", "count2-llm", *args]) == 0
    told = capsys.readouterr().err
    assert "[1/3] decoder SmolLM2, Count2" in told
    assert "count-text decoder" not in told  # trained by the other recipe


def short(recipe: Recipe) -> Recipe:
    """The tiny recipe's causal arm on Count3, as one that begins with weights."""
    tiny = recipe.tiny()
    arm = tiny.arms[1]
    run = replace(arm.run, init="0" * 16)
    return replace(tiny, arms=[type(arm)(run, arm.seeds, **arm.factors)])


def test_init_brings_model_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    recipe = short(find_recipe("count3-llm"))
    with pytest.raises(InputError, match="begins with pretrained weights: give --init"):
        reproduce(recipe, tmp_path / "runs", device="cpu")
    found = reproduce(recipe, tmp_path / "runs", device="cpu", init=folder)
    run = found.arms["decoder SmolLM2, Count3"].runs[0]
    task, model = run.config["task"], run.config["model"]
    assert (task["vocab"], model["huggingface"]["vocab_size"]) == (320, 320)
    assert len(task["tokenizer"]) == 16
    assert task["longest"] < CountText(prompt_length=2, length=4).model_needs()["context_length"]
    assert run.config["init"] != "0" * 16
    assert str(tmp_path) not in str(run.config)


def test_recipe_needs_its_tokenizer_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer bf346d64f6f0fbce is not found.*--init"):
        reproduce(find_recipe("count3-llm"), tmp_path, device="cpu")
    assert not list(tmp_path.rglob("config.json"))


def test_recipes_differ_in_the_mask_alone() -> None:
    for name, task in (("count3-llm", "Count3"), ("count2-llm", "Count2")):
        arms = [arm for arm in find_recipe(name).arms if arm.factors["task"] == task]
        assert [arm.run.mode for arm in arms] == ["decoder", "prefix-lm", "entp"]
        assert len({arm.run.model for arm in arms}) == len({arm.run.init for arm in arms}) == 1
        assert len({arm.run.optim for arm in arms}) == len({arm.run.task for arm in arms}) == 1
        model = arms[0].run.model
        assert isinstance(model, PretrainedConfig)
        assert (model.lora_rank, model.layers, model.width) == (8, 30, 576)
        assert arms[2].run.random_targets is not None


def test_pretrained_decoder_goes_on_reading_text(tmp_path: Path) -> None:
    """Both modes begin with the folder's weights, on a text prepared with its tokenizer."""
    whole = find_recipe("text-pretrained")
    runs = [arm.run for arm in whole.arms]
    assert len({(run.model, run.init, run.task, run.optim, run.steps) for run in runs}) == 1
    assert [run.mode for run in runs] == ["entp", "decoder", "decoder"]
    folder = write_llama(tmp_path / "llama")
    corpus = prepare("pydoc", tmp_path / "corpus", tokenizer=str(folder), quiet=True)
    task = replace(Text().with_data(str(corpus)), block=32)
    tiny = whole.tiny()
    arms = [
        replace(
            arm,
            run=replace(
                arm.run, task=task, model=runs[0].model.with_vocab(task.vocab), init="0" * 16
            ),
            seeds=(0,),
        )
        for arm in tiny.arms[:2]
    ]
    found = reproduce(replace(tiny, arms=arms), tmp_path / "runs", device="cpu", init=folder)
    assert len(found.arms) == 2
    for arm in found.arms.values():
        [run] = arm.runs
        assert run.config["model"]["huggingface"]["vocab_size"] == task.vocab == 280
        assert run.config["init"] != "0" * 16
        assert run.test is not None
        assert "bits_per_byte" in run.test.totals.all
