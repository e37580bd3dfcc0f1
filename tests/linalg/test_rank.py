import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope._errors import RankscopeError
from rankscope.linalg import rank
from reference import rank as reference

TWINNED = (
    "effective_rank", "stable_rank", "participation_ratio",
    "nuclear_rank_90", "nuclear_rank_95", "nuclear_rank_99", "energy_rank_90", "energy_rank_95", "energy_rank_99",
    "sigma_ratio", "nuclear_fraction_at_quarter", "energy_fraction_at_quarter",
)  # fmt: skip
WHOLE = [*TWINNED]
WHOLE[9:9] = ["numerical_rank", "sigma_1"]

values = st.floats(min_value=1e-6, max_value=10.0)
spectra = st.lists(values, min_size=2, max_size=24).map(
    lambda v: torch.tensor(sorted(v, reverse=True), dtype=torch.float64)
)


def test_the_table_has_exactly_the_promised_names_in_order():
    assert list(rank.SCALARS) == WHOLE + [f"{name}_deflated" for name in TWINNED]


@given(spectra.filter(lambda sigma: len(sigma) > 2), st.integers(0, 40))
def test_every_scalar_equals_its_plain_loop(sigma, more):
    n, m = len(sigma), len(sigma) + more
    expected = reference.scalars(sigma.tolist(), n, m)
    found = rank.scalars(sigma, n=n, m=m)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if re.search(r"_rank_\d\d", name):
            # Rounding may decide the index where the running sum meets the share.
            share, power = int(name.removesuffix("_deflated")[-2:]) / 100, 2 if name.startswith("energy") else 1
            weights = (sigma[1:] if name.endswith("deflated") else sigma) ** power
            assert abs(float(weights[: int(value)].sum() / weights.sum()) - share) < 1e-12 or value == expected[name]
        else:
            assert value.item() == pytest.approx(expected[name], rel=1e-12), name


@given(spectra)
def test_curves_rise_to_one_and_agree_with_the_fractions(sigma):
    for curve, fraction, loop in (
        (rank.nuclear_curve, rank.nuclear_fraction, reference.nuclear_fraction),
        (rank.energy_curve, rank.energy_fraction, reference.energy_fraction),
    ):
        found = curve(sigma)
        assert (found.diff() >= 0).all()
        assert found[-1] == 1
        for k in range(1, len(sigma) + 1):
            assert fraction(sigma, k) == found[k - 1]
            assert found[k - 1].item() == pytest.approx(loop(sigma.tolist(), k), rel=1e-12)


@given(spectra)
def test_the_ranks_are_ordered(sigma):
    # Renyi entropies of the energy fall with their order (infinity: stable, 2: participation), and weighing by σ
    # instead of σ² flattens the distribution.
    stable, participation, effective = (
        f(sigma).item() for f in (rank.stable_rank, rank.participation_ratio, rank.effective_rank)
    )
    slack = 1 + 1e-12
    assert stable * slack >= 1
    assert stable <= participation * slack
    assert participation <= effective * slack
    assert effective <= len(sigma) * slack
    for share in (0.5, 0.9, 0.99):
        assert 1 <= rank.energy_rank(sigma, share) <= rank.nuclear_rank(sigma, share) <= len(sigma)
    assert (rank.energy_curve(sigma) >= rank.nuclear_curve(sigma) - 1e-12).all()


@given(spectra, st.integers(-20, 20))
def test_scale_changes_only_the_largest_value(sigma, exponent):
    # A power of two, so that not even rounding differs.
    n = len(sigma)
    before, after = rank.scalars(sigma, n=n, m=n), rank.scalars(sigma * 2.0**exponent, n=n, m=n)
    for name in before.keys() - {"sigma_1"}:
        assert after[name].item() == pytest.approx(before[name].item(), rel=1e-13), name
    assert after["sigma_1"] == before["sigma_1"] * 2.0**exponent


@given(spectra, st.integers(1, 10))
def test_zeros_at_the_end_change_nothing(sigma, zeros):
    n = len(sigma)
    padded = torch.cat([sigma, sigma.new_zeros(zeros)])
    for name, measure in rank.SCALARS.items():
        assert measure(padded, n, n).item() == pytest.approx(measure(sigma, n, n).item(), rel=1e-12), name


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(3, 9), st.integers(3, 9))
def test_rotation_and_transposition_change_nothing(seed, n, m):
    generator = torch.Generator().manual_seed(seed)
    P = torch.rand(n, m, generator=generator, dtype=torch.float64).softmax(-1)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    expected = rank.scalars(torch.linalg.svdvals(P), n=n, m=m)
    for other in (Q @ P, P.mT):
        found = rank.scalars(torch.linalg.svdvals(other), n=n, m=m)
        for name in ("effective_rank", "stable_rank", "participation_ratio", "sigma_ratio", "sigma_1"):
            assert found[name].item() == pytest.approx(expected[name].item(), rel=1e-9), name


def test_a_batch_equals_its_rows():
    sigma = torch.rand(2, 3, 7, dtype=torch.float64).sort(-1, descending=True).values
    batch = rank.scalars(sigma, n=7, m=9)
    for i in range(2):
        for j in range(3):
            one = rank.scalars(sigma[i, j], n=7, m=9)
            for name, value in batch.items():
                assert value[i, j] == one[name], name


def test_known_spectra():
    flat = rank.scalars(torch.ones(8, dtype=torch.float64), n=8, m=8)
    assert flat["effective_rank"].item() == pytest.approx(8)
    assert flat["stable_rank"] == flat["participation_ratio"] == flat["numerical_rank"] == 8
    assert flat["nuclear_rank_90"] == flat["energy_rank_90"] == 8
    assert flat["nuclear_fraction_at_quarter"] == 0.25
    single = rank.scalars(torch.tensor([2.0, 0.0, 0.0, 0.0]), n=4, m=4)
    assert (
        single["effective_rank"] == single["stable_rank"] == single["nuclear_rank_99"] == single["numerical_rank"] == 1
    )
    assert single["sigma_ratio"] == 0


def test_an_all_zero_spectrum_is_nan_but_has_numerical_rank_zero():
    zero = rank.scalars(torch.zeros(4), n=4, m=4)
    assert zero.pop("numerical_rank") == 0
    assert zero.pop("sigma_1") == 0
    assert all(value.isnan() for value in zero.values())
    # One sink and nothing else: the whole has a rank, what is left after deflation has none.
    single = rank.scalars(torch.tensor([1.0, 0.0, 0.0, 0.0]), n=4, m=4)
    assert all(value.isnan() == name.endswith("_deflated") for name, value in single.items())


def test_one_singular_value_is_enough():
    one = rank.scalars(torch.tensor([0.5]), n=1, m=3)
    assert one["effective_rank"] == one["nuclear_fraction_at_quarter"] == 1
    assert one["sigma_ratio"] == 0
    assert one["effective_rank_deflated"].isnan()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: rank.nuclear_fraction(s, 0), "`k` must be between 1 and r=4, got 0"),
        (lambda s: rank.energy_fraction(s, 5), "`k` must be between 1 and r=4, got 5"),
        (lambda s: rank.nuclear_rank(s, 90), r"`share` must be in \(0, 1\], got 90"),
        (lambda s: rank.scalars(s, n=5, m=6), "must hold min"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(RankscopeError, match=message):
        call(torch.ones(4))
