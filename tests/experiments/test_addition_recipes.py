"""Recipes of addition: the controls that they rest on, and small runs from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from entp.config import Run
from entp.experiments.recipe import find_recipe
from entp.experiments.recipes.addition import RECIPE as SAMPLES
from entp.experiments.recipes.addition import samples_run
from entp.experiments.recipes.addition_length import RECIPE as LENGTH
from entp.experiments.recipes.addition_positions import positions_run, tiny_run
from entp.experiments.recipes.addition_refresh import RECIPE as REFRESH
from entp.experiments.reproduce import reproduce
from entp.model import Transformer
from entp.tasks.addition import Addition


def small_model(run: Run) -> tuple[Transformer, Run]:
    torch.manual_seed(0)
    small = tiny_run(run)
    return Transformer(small.model).double(), small


def test_entp_without_positions_sees_a_bag_of_tokens_and_the_last() -> None:
    model, run = small_model(positions_run("ENTP", "none"))
    batch = run.task.batch(0, "test", 0, 8)
    x = torch.from_numpy(batch.x[:, :12])
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([x[:, order], x[:, 11:]], 1)
    last = torch.zeros(x.shape, dtype=torch.bool)
    last[:, -1] = True
    assert not torch.equal(x, mixed)
    one, other = (model(tokens, "entp", at=last) for tokens in (x, mixed))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    one, other = (model(tokens, "decoder", at=last) for tokens in (x, mixed))
    assert (one - other).abs().max() > 1e-3  # the causal mask tells a decoder the order


@pytest.mark.parametrize("positions", ["learned", "rotary", "abacus", "coupled"])
def test_one_layer_of_entp_is_a_decoder(positions: str) -> None:
    model, run = small_model(positions_run("ENTP", positions, layers=1))
    batch = run.task.batch(0, "test", 0, 8)
    x, at = torch.from_numpy(batch.x), torch.from_numpy(batch.target_mask)
    ids = {}
    if batch.position_ids is not None:
        ids = {"position_ids": torch.from_numpy(batch.position_ids)}
    one, other = (model(x, mode, at=at, **ids) for mode in ("entp", "decoder"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_refreshed_runs_differ_in_the_mode_alone() -> None:
    """ENTP's and the decoder's are runs of the paper's recipe."""
    of_paper = {one.hash for one in SAMPLES.runs()}
    for arm in REFRESH.arms:
        assert replace(arm.run, mode="entp") == REFRESH.arms[0].run
    shared = {one.run.mode for one in REFRESH.runs() if one.hash in of_paper}
    assert shared == {"entp", "decoder"}
    assert len(REFRESH.runs()) == 7 * 5


def test_samples_are_the_papers_hundred_runs_and_two() -> None:
    runs = SAMPLES.runs()
    assert len(runs) == 102
    assert len({one.hash for one in runs}) == 102
    for one in runs:
        task = one.run.task
        assert isinstance(task, Addition)
        assert task.split_seed == one.run.seed  # the seed also draws the split
    both = (
        samples_run("ENTP", "small", "plain", 5_000),
        samples_run("decoder", "small", "plain", 5_000),
    )
    assert replace(both[0], mode="decoder") == both[1]  # nothing but the mode differs


def test_patience_waits_for_a_loss_with_many_examples() -> None:
    few, many = (samples_run("ENTP", "small", "reversed", n) for n in (5_000, 10_000))
    assert few.train.patience == many.train.patience == 10
    assert (few.train.patience_from, many.train.patience_from) == (None, 1.1)


def test_lengths_are_measured_at_three_checkpoints(tmp_path: Path) -> None:
    label = LENGTH.arms[1].label
    record = reproduce(LENGTH.tiny(), tmp_path, device="cpu", seed=0, only=[label])
    (run,) = record.arms[label].runs
    assert run.test is not None
    assert run.test.last is not None
    assert [point.step for point in run.splits["test"]] == [10, 20, 30]
    assert set(run.splits["test"][0].totals.slices["exact_match"]["digits"]) == {"4", "5"}


def test_names_are_known() -> None:
    for name in ("samples", "rates", "lines", "lines-rates", "length", "positions"):
        name = f"addition-{name}"
        assert find_recipe(name).name == name
