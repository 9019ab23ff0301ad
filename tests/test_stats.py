"""Intervals, tests and fitted powers are what they are defined to be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from entp.stats import fit_exponent, t_interval, t_test, welch_interval, welch_test, wilson

LENGTHS = [32, 64, 128, 256, 512, 1024]


def test_wilson_interval() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    low, high = wilson(500, 1000)
    assert low == pytest.approx(0.469, abs=1e-3)
    assert high == pytest.approx(0.531, abs=1e-3)


@pytest.mark.parametrize(("right", "n"), [(1, 7), (3, 10), (512, 1024), (10_080, 10_240)])
@pytest.mark.parametrize("z", [1.0, 1.96, 3.0])
def test_wilsons_ends_are_the_shares_z_deviations_away(right: int, n: int, z: float) -> None:
    for end in wilson(right, n, z):
        assert abs(right / n - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), rel=1e-9)


def test_wilson_never_leaves_what_shares_can_be() -> None:
    """In floating point the end at 0 of n can fall below 0, and is printed as -0.0000 then."""
    for n in range(1, 2000):
        assert wilson(0, n)[0] >= 0
        assert wilson(n, n)[1] <= 1


def test_students_interval_by_hand() -> None:
    """The seeds of "matched data": mean .583, standard deviation .07464, t 4.3027."""
    low, high = t_interval([0.539, 0.541, 0.669]) or (0, 0)
    assert low == pytest.approx(0.583 - 4.302653 * 0.074485 / math.sqrt(3), abs=1e-4)
    assert (round(low, 2), round(high, 2)) == (0.4, 0.77)
    assert t_interval([0.5]) is None
    assert t_interval([1.0, 2.0, 3.0, 4.0], 0.9) == pytest.approx((0.98091, 4.01909), abs=1e-4)


def test_tests_are_scipys() -> None:
    from scipy.stats import ttest_1samp, ttest_ind

    rng = np.random.default_rng(0)
    for sizes in ((2, 3), (5, 2), (7, 9)):
        a, b = (rng.normal(size=size).tolist() for size in sizes)
        assert welch_test(a, b) == pytest.approx(ttest_ind(a, b, equal_var=False).pvalue)
        assert t_test(a, 0.3) == pytest.approx(ttest_1samp(a, 0.3).pvalue)
        for level in (0.95, 0.5):
            ends = ttest_ind(a, b, equal_var=False).confidence_interval(level)
            assert welch_interval(a, b, level) == pytest.approx(tuple(ends))


def test_tests_without_spread_or_seeds() -> None:
    assert welch_test([1.0, 1.0], [1.0, 1.0]) == 1
    assert welch_test([1.0, 1.0], [2.0, 2.0]) == 0
    assert welch_test([1.0, 1.0], [1.0, 3.0]) == pytest.approx(0.5)
    assert t_test([1.0, 1.0], 1.0) == 1
    assert welch_interval([3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0)
    assert welch_interval([3.0], [1.0, 2.0]) is None
    assert welch_test([1.0], [1.0, 2.0]) is None
    assert t_test([1.0], 1.0) is None


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5, 3.0])
def test_a_power_law_is_recovered_exactly(power: float) -> None:
    exponent, error = fit_exponent(LENGTHS, [7e-5 * n**power for n in LENGTHS])
    assert exponent == pytest.approx(power, abs=1e-9)
    assert error == pytest.approx(0, abs=1e-9)


def test_overheads_of_short_lengths_do_not_count() -> None:
    values = [1.0, 1.0, 1.0, *(n**2.0 for n in LENGTHS[3:])]
    assert fit_exponent(LENGTHS, values)[0] == pytest.approx(2)


def test_the_standard_error_is_that_of_noise() -> None:
    """Over many noisy fits, the spread of the exponents is the size of the standard errors, and the
    mean is right."""
    rng = np.random.default_rng(0)
    lengths = [2**k for k in range(3, 19)]
    fits = [
        fit_exponent(lengths, [n**2 * np.exp(0.1 * rng.standard_normal()) for n in lengths])
        for _ in range(300)
    ]
    exponents, errors = zip(*fits, strict=True)
    assert np.mean(exponents) == pytest.approx(2, abs=0.01)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(exponents), rel=0.15)


def test_two_points_have_no_error() -> None:
    assert fit_exponent([1, 2, 4], [9.0, 2.0, 8.0]) == (pytest.approx(2), None)


def test_exponent_and_error_are_those_of_a_straight_line_through_logarithms() -> None:
    values = [1.0, 5.0, 2.0, 6.5, 40.0, 90.0]
    slopes, covariance = np.polyfit(np.log(LENGTHS[3:]), np.log(values[3:]), 1, cov=True)
    assert fit_exponent(LENGTHS, values) == pytest.approx(
        (slopes[0], math.sqrt(covariance[0, 0])), rel=1e-9
    )
