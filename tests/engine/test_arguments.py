"""`prefix` and `at` in whatever type a person has them: the same numbers give the same outputs, anything else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from random_models import random_inputs, random_model

from entp.attention import visible
from entp.engine.api import all_prefixes
from entp.engine.generate import generate
from entp.errors import InputError

SAME_PREFIX = [np.int64(2), np.array(2), torch.tensor(2), [2, 2], (2, 2), np.array([2, 2]), np.array([2, 2, 2])[::-2]]
BAD_PREFIX = [True, 1.5, [1.5, 2.0], np.float64(2.0), np.array([True, False]), "2", [], [1, [2, 3]], torch.tensor([1.5, 2.0])]
BAD_PREFIX.append(torch.tensor([1j, 2.0]))


@pytest.mark.parametrize("prefix", SAME_PREFIX, ids=repr)
def test_a_prefix_of_any_type(prefix: Any) -> None:
    model = random_model()
    x = random_inputs(model, 2, 5)
    assert torch.equal(model(x, "prefix", prefix=prefix), model(x, "prefix", prefix=2))
    assert torch.equal(visible("prefix", 5, prefix=prefix)[0], visible("prefix", 5, prefix=2)[0])


@pytest.mark.parametrize("prefix", [p for p in SAME_PREFIX if np.ndim(p) or not isinstance(p, torch.Tensor)], ids=repr)
def test_a_prefix_of_any_type_in_generation(prefix: Any) -> None:
    model, prompts = random_model(), [[1, 2, 3], [3, 2, 1]]
    assert generate(model, prompts, 2, "prefix", prefix=prefix) == generate(model, prompts, 2, "prefix", prefix=2)


@pytest.mark.parametrize("prefix", BAD_PREFIX, ids=repr)
def test_what_is_no_prefix_is_refused(prefix: Any) -> None:
    model = random_model()
    with pytest.raises(InputError, match="it must be a whole number, or one for each sequence"):
        model(random_inputs(model, 2, 5), "prefix", prefix=prefix)
    with pytest.raises(InputError, match="it must be a whole number, or one for each sequence"):
        generate(model, [[1, 2, 3], [3, 2, 1]], 2, "prefix", prefix=prefix)


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_numpys_masks_and_positions(mode: str) -> None:
    model = random_model()
    x = random_inputs(model, 2, 4)
    mask = np.array([[True, False, True, False], [False, False, False, True]])
    assert torch.equal(model(x, mode, at=mask), model(x, mode, at=torch.from_numpy(mask)))
    flipped = mask[::-1]
    assert torch.equal(model(x, mode, at=flipped), model(x, mode, at=torch.from_numpy(flipped.copy())))
    assert torch.equal(model(x, mode, at=np.array([3, 1])), model(x, mode, at=[3, 1]))
    with pytest.raises(InputError, match=r"a mask of shape \(4,\): a mask must have the shape of the batch, \(2, 4\)"):
        model(x, mode, at=mask[0])
    with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
        model(x, mode, at=[mask[0], mask[1]])
    with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
        model(x, mode, at=[np.True_, np.False_])
    with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
        model(x, mode, at=[True, False])  # Python takes them for 1 and 0
    with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
        all_prefixes(model, x, at=np.array([1.0]))
