import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope._errors import RankscopeError
from rankscope.theory.johnson_lindenstrauss import BEST_EPS, failure_bound, jl_dimension, theorem_2_dimension


@pytest.mark.parametrize(
    ("n", "by_eps"),
    [
        (512, (3466, 666, 250, 211)),
        (1024, (3851, 740, 278, 234)),
        (4096, (4621, 888, 333, 281)),
        (8192, (5007, 962, 361, 305)),
        (65536, (6162, 1183, 444, 375)),
    ],
)
def test_dimension_is_the_ceiling_of_the_printed_formula(n, by_eps):
    found = tuple(jl_dimension(n, eps) for eps in (0.1, 0.25, 0.5, 2 / 3))
    raw = [5 * math.log(n) / (eps**2 - eps**3) for eps in (0.1, 0.25, 0.5, 2 / 3)]
    assert found == tuple(math.ceil(value) for value in raw)
    assert found == by_eps


@given(st.integers(2, 10**6), st.floats(0.01, 0.99))
def test_no_eps_gives_a_smaller_dimension_than_two_thirds(n, eps):
    assert jl_dimension(n, eps) >= jl_dimension(n, BEST_EPS)


@given(st.integers(2, 10**6), st.floats(0.01, 0.99))
def test_printed_dimension_bounds_failure_by_two_over_the_fourth_root(n, eps):
    assert failure_bound(n, jl_dimension(n, eps), eps) <= 2 * n**-0.25 * (1 + 1e-9)


def test_dimension_may_exceed_the_number_of_tokens():
    assert jl_dimension(512, 0.25) > 512
    assert jl_dimension(4096, 0.1) > 4096


def test_width_branch_of_theorem_2_wins_only_for_absurd_lengths():
    found = theorem_2_dimension(65536, 64, 0.999999)
    assert (found.by_width, found.by_length, found.k) == (2396, 56, 56)
    assert found.ln_n_crossover == pytest.approx(479.1, abs=0.05)
    before, after = (theorem_2_dimension(int(f"1{'0' * zeros}"), 64, 0.5) for zeros in (208, 209))
    assert before.k == before.by_length < before.by_width
    assert after.k == after.by_width < after.by_length


@pytest.mark.parametrize("eps", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_eps_outside_its_range_is_refused(eps):
    for call in (lambda: jl_dimension(512, eps), lambda: failure_bound(512, 8, eps)):
        with pytest.raises(RankscopeError, match=r"`eps` must be between 0 and 1.*2/3"):
            call()


def test_other_sizes_outside_their_range_are_refused():
    with pytest.raises(RankscopeError, match="`n` must be 1 or more, got 0"):
        jl_dimension(0, 0.5)
    with pytest.raises(RankscopeError, match="`k` must be 1 or more"):
        failure_bound(512, 0, 0.5)
    with pytest.raises(RankscopeError, match="`d` must be 2 or more"):
        theorem_2_dimension(512, 1, 0.5)


@pytest.mark.parametrize("eps", [1e-200, 1e-7, 1 - 1e-13])
def test_eps_so_near_an_end_that_the_formula_leaves_all_lengths_is_refused(eps):
    with pytest.raises(RankscopeError, match="`eps` must leave"):
        jl_dimension(512, eps)
