"""`prefix` and `at` of any type: the same numbers give the same outputs, others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from random_models import random_inputs, random_model

from entp.engine.api import all_prefixes
from entp.engine.generation.generate import generate
from entp.engine.masks import visible
from entp.errors import InputError

SAME_PREFIX = [
    np.int64(2),
    np.array(2),
    torch.tensor(2),
    [2, 2],
    (2, 2),
    np.array([2, 2]),
    np.array([2, 2, 2])[::-2],
]
BAD_PREFIX = [
    True,
    1.5,
    [1.5, 2.0],
    np.float64(2.0),
    np.array([True, False]),
    "2",
    [],
    [1, [2, 3]],
    torch.tensor([1.5, 2.0]),
]
BAD_PREFIX.append(torch.tensor([1j, 2.0]))


@pytest.mark.parametrize("prefix", SAME_PREFIX, ids=repr)
def test_a_prefix_of_any_type(prefix: Any) -> None:
    model = random_model()
    x = random_inputs(model, 2, 5)
    assert torch.equal(model(x, "prefix-lm", prefix=prefix), model(x, "prefix-lm", prefix=2))
    assert torch.equal(
        visible("prefix-lm", 5, prefix=prefix)[0], visible("prefix-lm", 5, prefix=2)[0]
    )


@pytest.mark.parametrize(
    "prefix", [p for p in SAME_PREFIX if np.ndim(p) or not isinstance(p, torch.Tensor)], ids=repr
)
def test_a_prefix_of_any_type_in_generation(prefix: Any) -> None:
    model, prompts = random_model(), [[1, 2, 3], [3, 2, 1]]
    assert generate(model, prompts, 2, "prefix-lm", prefix=prefix) == generate(
        model, prompts, 2, "prefix-lm", prefix=2
    )


@pytest.mark.parametrize("prefix", BAD_PREFIX, ids=repr)
def test_what_is_no_prefix_is_refused(prefix: Any) -> None:
    model = random_model()
    with pytest.raises(InputError, match="it must be a whole number, or one for each sequence"):
        model(random_inputs(model, 2, 5), "prefix-lm", prefix=prefix)
    with pytest.raises(InputError, match="it must be a whole number, or one for each sequence"):
        generate(model, [[1, 2, 3], [3, 2, 1]], 2, "prefix-lm", prefix=prefix)


@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_numpys_masks_and_positions(mode: str) -> None:
    model = random_model()
    x = random_inputs(model, 2, 4)
    mask = np.array([[True, False, True, False], [False, False, False, True]])
    assert torch.equal(model(x, mode, at=mask), model(x, mode, at=torch.from_numpy(mask)))
    flipped = mask[::-1]
    assert torch.equal(
        model(x, mode, at=flipped), model(x, mode, at=torch.from_numpy(flipped.copy()))
    )
    assert torch.equal(model(x, mode, at=np.array([3, 1])), model(x, mode, at=[3, 1]))
    with pytest.raises(
        InputError,
        match=r"a mask of shape \(4,\): a mask must have the shape of the batch, \(2, 4\)",
    ):
        model(x, mode, at=mask[0])
    with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
        model(x, mode, at=[mask[0], mask[1]])
    with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
        model(x, mode, at=[np.True_, np.False_])
    with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
        model(x, mode, at=[True, False])  # Python takes them for 1 and 0
    with pytest.raises(InputError, match="it must be a list of positions, or a bool mask"):
        all_prefixes(model, x, at=np.array([1.0]))


# Inputs of any type


LIST = [[1, 2, 3], [4, 5, 6]]
SAME = {"list": LIST, "array": np.array(LIST), "bytes": np.array(LIST, np.uint8)}


@pytest.mark.parametrize("x", SAME.values(), ids=SAME.keys())
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_lists_and_arrays_are_taken_as_tokens(x: Any, mode: str) -> None:
    model = random_model()
    want = model(torch.tensor(LIST), mode)
    assert torch.equal(model(x, mode), want)
    assert torch.equal(model(x, mode, lengths=[3, 2]), model(x, mode, lengths=torch.tensor([3, 2])))
    ids = [[0, 2, 1], [3, 3, 3]]
    assert torch.equal(
        model(x, mode, position_ids=ids), model(x, mode, position_ids=torch.tensor(ids))
    )
    assert torch.equal(
        model(x, mode, position_ids=[0, 2, 1]), model(x, mode, position_ids=[[0, 2, 1]] * 2)
    )


def test_arrays_are_taken_as_vectors() -> None:
    model = random_model(input_dim=3).float()
    x = np.random.default_rng(0).normal(size=(2, 4, 3))
    assert torch.equal(model(x), model(torch.from_numpy(x).float()))


def test_positions_come_from_anything_that_can_be_gone_through() -> None:
    model = random_model()
    x = random_inputs(model, 2, 5)
    want = model(x, at=[1, 3])
    for at in (
        (t for t in (1, 3)),
        range(1, 5, 2),
        {1: "a", 3: "b"},
        torch.tensor([1, 3]),
        np.array([1, 3]),
    ):
        assert torch.equal(all_prefixes(model, x, at=at), want)  # type: ignore[arg-type]


WRONG = {
    "float ids": ({"x": [[1.0, 2.0]]}, r"token ids .* of an integer type, got .* torch.float"),
    "bool ids": (
        {"x": torch.tensor([[True, False]])},
        r"token ids .* of an integer type, got .* torch.bool",
    ),
    "complex ids": (
        {"x": torch.tensor([[1j, 2.0]])},
        r"token ids .* of an integer type, got .* torch.complex",
    ),
    "ragged ids": ({"x": [[1, 2], [3]]}, "x cannot be read as numbers in rows of equal length"),
    "words": ({"x": "abc"}, "x cannot be read as numbers"),
    "float lengths": ({"lengths": [1.0, 2.0]}, "lengths must be whole numbers, got torch.float"),
    "bool lengths": (
        {"lengths": torch.tensor([True, True])},
        "lengths must be whole numbers, got torch.bool",
    ),
    "complex lengths": (
        {"lengths": torch.tensor([1j, 2.0])},
        "lengths must be whole numbers, got torch.complex",
    ),
    "float at": ({"at": [1.0]}, "it must be a list of positions, or a bool mask"),
    "a float tensor at": (
        {"at": torch.tensor([1.0])},
        "it must be a list of positions, or a bool mask",
    ),
    "a number at": ({"at": 3}, "it must be a list of positions, or a bool mask"),
    "nan budget": (
        {"token_budget": float("nan")},
        "token_budget is nan: it must be a whole number from 1 on",
    ),
    "half a budget": (
        {"token_budget": 1.5},
        "token_budget is 1\\.5: it must be a whole number from 1 on",
    ),
    "float position ids": ({"position_ids": [0.0, 1.0, 2.0]}, "position_ids must be whole numbers"),
    "position ids of another shape": (
        {"position_ids": [[0, 1, 2]]},
        r"position_ids have shape \(1, 3\): \(2, 3\) is needed",
    ),
    "position ids beyond the last": (
        {"position_ids": [0, 1, 40]},
        "position_ids go from 0 to 40: allowed are 0 to 39",
    ),
    "negative position ids": ({"position_ids": [0, -1, 2]}, "position_ids go from -1 to 2"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"x": [[1, 2, 3], [4, 5, 6]], **options}
    with pytest.raises(InputError, match=message):
        all_prefixes(random_model(), given.pop("x"), **given)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="a Linear has no width, encode, embed, stack, readout"):
        all_prefixes(torch.nn.Linear(2, 2), [[1]])  # type: ignore[arg-type]


WRONG_GENERATION = {
    "float count": (
        {"max_new_tokens": 2.0},
        "max_new_tokens is 2.0: it must be at least 1, and whole",
    ),
    "float top_k": ({"top_k": 1.5}, "top_k is 1.5: it must be at least 1, and whole"),
    "bool top_k": ({"top_k": True}, "top_k is True"),
    "no temperature": ({"temperature": None}, "temperature is None: allowed are 0"),
    "a word as temperature": ({"temperature": "hot"}, "temperature is 'hot': allowed are 0"),
    "a word as top_p": ({"top_p": "most"}, "top_p is 'most'"),
    "a large seed": (
        {"seed": 2**70},
        "seed is 1180591620717411303424: it must be a whole number from 0 to",
    ),
    "a negative seed": ({"seed": -1}, "seed is -1: it must be a whole number from 0 to"),
    "half a stop": ({"stop": 1.5}, "stop is 1.5: it must be a token, or None"),
    "bool prompts": ({"prompts": torch.tensor([[True]])}, "prompts must be token ids"),
    "bools in lists": (
        {"prompts": [[True, False]]},
        "prompts must be a list of lists of token ids",
    ),
    "position ids of another shape": (
        {"position_ids": lambda x: x[:, :1]},
        "position_ids must give whole numbers of shape",
    ),
}


@pytest.mark.parametrize(
    ("options", "message"), WRONG_GENERATION.values(), ids=WRONG_GENERATION.keys()
)
def test_wrong_arguments_of_generation_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"prompts": [[1, 2, 3]], "max_new_tokens": 2, **options}
    with pytest.raises(InputError, match=message):
        generate(random_model(), given.pop("prompts"), **given)


def test_prompts_may_be_an_array() -> None:
    model = random_model()
    prompts = np.array([[1, 2, 3], [3, 2, 1]])
    got = generate(model, prompts, 3)  # type: ignore[type-var]
    assert torch.equal(got, generate(model, torch.from_numpy(prompts), 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_that_are_not_numbers_are_an_error_and_not_token_0(temperature: float) -> None:
    model = random_model()
    with torch.no_grad():
        model.norm.bias.fill_(float("nan"))  # type: ignore[operator]
    with pytest.raises(InputError, match="the model's outputs are not finite"):
        generate(model, [[1, 2]], 3, temperature=temperature)


# Position ids in generation


def within_words(tokens: torch.Tensor) -> torch.Tensor:
    """How many tokens ago the last 0 was: ids that depend on earlier tokens."""
    steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    last = torch.where(tokens == 0, steps, 0).cummax(1).values
    return steps - last


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
@pytest.mark.parametrize("position", ["learned", "rotary", "relative"])
def test_position_ids_in_generation_follow_the_tokens(mode: str, position: str) -> None:
    """With a cache as without one; and as the model itself says for the tokens that came out."""
    model, prompts = random_model(layers=3, position_embedding=position), [[1, 0, 3], [2], [0, 5]]
    with_cache, without = (
        generate(model, prompts, 8, mode, position_ids=within_words, cache=c) for c in (True, False)
    )
    assert with_cache == without
    read, prefix = torch.tensor([with_cache[0][:-1]]), 3 if mode == "prefix-lm" else None
    logits = model(read, mode, position_ids=within_words(read), prefix=prefix)
    assert (logits - model(read, mode, prefix=prefix)).abs().max() > 1e-3
    assert logits.argmax(-1)[0, 2:].tolist() == with_cache[0][3:]
