"""Continuations in windows: every token once, with the context that fits."""

from __future__ import annotations

import pytest

from entp.tasks.windows import Window, windows


@pytest.mark.parametrize(
    ("context", "rest", "stride", "expected"),
    [
        ([1], [2, 3], None, [([1, 2, 3], 2)]),
        ([9, 9, 1, 2, 3], [4, 5], None, [([9, 1, 2, 3, 4, 5], 2)]),
        ([0], [1, 2, 3, 4, 5, 6, 7], None, [([0, 1, 2, 3, 4, 5], 5), ([2, 3, 4, 5, 6, 7], 2)]),
        (
            [0],
            [1, 2, 3, 4, 5, 6, 7, 8, 9],
            2,
            [
                ([0, 1, 2, 3, 4, 5], 5),
                ([2, 3, 4, 5, 6, 7], 2),
                ([4, 5, 6, 7, 8, 9], 2),
            ],
        ),
        ([1], [], None, []),
    ],
)
def test_windows_score_each_token_once(
    context: list[int], rest: list[int], stride: int | None, expected: list[tuple[list[int], int]]
) -> None:
    assert windows(context, rest, 5, stride) == [Window(*one) for one in expected]
