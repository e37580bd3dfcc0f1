"""Exponents, crossovers and fronts from made-up times whose answers are known."""

from math import inf, isnan

import numpy as np
import pytest

from rankscope.report.growth import crossing, crossover, fit_exponent, front

LENGTHS = np.array([512.0, 1024, 2048, 4096])


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_the_interval_of_a_fitted_exponent_holds_the_true_one(power):
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        found = fit_exponent(LENGTHS, LENGTHS**power * np.exp(generator.normal(0, 0.05, 4)))
        held += found.low <= power <= found.high
    # 200 intervals at 95 %: fewer than 180 or none missing would have a chance below 1 in 1,000.
    assert 180 <= held < 200


def test_few_lengths_give_no_interval_or_no_exponent():
    two = fit_exponent(LENGTHS[:2], LENGTHS[:2] ** 2)
    assert two.value == pytest.approx(2)
    assert isnan(two.low)
    assert isnan(fit_exponent(LENGTHS[:1], LENGTHS[:1]).value)


def test_the_crossover_of_two_powers_is_where_they_meet():
    # n² / 10⁶ against n / 10³ meet at n = 1000.
    ours = {int(n): [n / 1e3] * 5 for n in LENGTHS}
    other = {int(n): [n**2 / 1e6] * 5 for n in LENGTHS}
    found = crossover(ours, other)
    assert found.n == pytest.approx(1000)
    assert found.low == found.high == pytest.approx(1000)
    assert crossover(other, ours).n == inf


def test_noise_widens_the_crossovers_interval_around_it():
    generator = np.random.default_rng(1)

    def noisy(curve):
        return {int(n): (curve(n) * np.exp(generator.normal(0, 0.1, 9))).tolist() for n in LENGTHS}

    found = crossover(noisy(lambda n: n / 1e3), noisy(lambda n: n**2 / 1e6))
    assert found.low < found.n < found.high
    assert 800 < found.low < found.high < 1250


def test_a_mechanism_that_is_faster_only_at_first_has_no_crossover():
    assert crossing(LENGTHS, np.array([2.0, 2.0, 0.5, 0.4])) == inf
    assert crossing(LENGTHS, np.array([2.0, 0.5, 0.5, 2.0])) == pytest.approx(2048 * 2**0.5)


def test_one_common_length_gives_no_crossover():
    assert crossover({512: [1.0]}, {512: [1.0], 1024: [1.0]}) is None


def test_the_front_holds_what_no_other_beats():
    assert front([(2.0, 2.0), (1.0, 3.0), (3.0, 2.5), (2.0, 1.0)]) == [1, 3]
