import numpy as np
import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.theory.cluster_limits import RANK_TOLERANCE, classify, doubly_exponential_rate, judge, points
from rankscope.theory.clusters import Dynamics, integrate, numerical_rank, uniform_tokens

I1, I2 = [[1.0]], np.eye(2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def boolean_runs(draws):
    source = generator()
    for _ in range(draws):
        yield integrate(
            Dynamics.single(I1, I1, I1), uniform_tokens(40, 1, generator=source), times=[0, 5, 8, 10, 12, 14]
        )


def check_boolean(draws):
    # Solver DOP853 at rtol 1e-10, atol 1e-12; rows one-hot to 1e-2; rank above 1e-6 of the largest singular value.
    ranks = []
    for run in boolean_runs(draws):
        verdict = judge(run, "boolean")
        assert verdict.unmet == ""
        assert verdict.holds, str(verdict)
        ranks.append([numerical_rank(sigma, RANK_TOLERANCE) for sigma in run.sigma()])
        assert doubly_exponential_rate(run, 3, 5) == pytest.approx(1.0, abs=0.05)
    ranks = np.array(ranks)
    assert (ranks[:, -1] <= 2).all()
    # The limit takes its time: at t = 5 hardly any draw is there.
    assert (ranks[:, 1] <= 2).mean() < 0.2


def test_every_row_but_one_turns_one_hot_on_an_extreme_token_at_a_doubly_exponential_rate():
    check_boolean(30)


@pytest.mark.slow
def test_boolean_limit_in_200_draws():
    check_boolean(200)


def test_negative_value_breaks_a_hypothesis_and_no_row_turns_one_hot():
    x0 = uniform_tokens(40, 1, generator=generator())
    run = integrate(Dynamics.single(I1, I1, [[-1.0]]), x0, times=[0, 12])
    verdict = judge(run, "boolean")
    assert verdict.holds is None
    assert str(verdict) == "boolean: hypotheses not met: V = -1, not above 0"
    assert (run.P(-1).max(axis=1) < 0.5).all()


def test_tied_extreme_tokens_share_their_rows():
    x0 = uniform_tokens(40, 1, generator=generator())
    x0[x0.argsort(axis=0)[-2]] = x0.max()
    run = integrate(Dynamics.single(I1, I1, I1), x0, times=[0, 14])
    assert "start at the same place" in judge(run, "boolean").unmet
    assert (run.P(-1).max(axis=1) < 0.6).sum() > 10


def definite(d, source):
    root = torch.randn(d, d, generator=source, dtype=torch.float64).numpy()
    return root @ root.T + 0.5 * np.eye(d)


@pytest.mark.parametrize("d", [2, 3])
def test_identity_value_sends_tokens_to_a_polytope(d):
    source = generator(d)
    few = []
    for _ in range(6):
        run = integrate(
            Dynamics.single(definite(d, source), np.eye(d), np.eye(d)),
            uniform_tokens(30, d, generator=source),
            times=[0, 12],
            rtol=1e-8,
        )
        verdict = judge(run, "polytope")
        assert verdict.unmet == ""
        assert verdict.holds, str(verdict)
        few.append(verdict.seen["places"])
        assert not judge(run.at([0]), "polytope").holds
    assert max(few) < 20


def gaussian_matrices(source, d, count):
    return torch.randn(count, d, d, generator=source, dtype=torch.float64).numpy()


def test_leading_eigenvalue_sends_tokens_to_at_most_three_hyperplanes():
    # Gaussian Q, K, V: hypotheses are met by some draws only, and each other one is told which fails.
    source, judged, told = generator(4), 0, set()
    for _ in range(40):
        Q, K, V = gaussian_matrices(source, 3, 3)
        V /= np.abs(np.linalg.eigvals(V)).max()
        x0 = uniform_tokens(15, 3, generator=source)
        start = integrate(Dynamics.single(Q, K, V), x0, times=[0])
        first = judge(start, "hyperplanes")
        if first.unmet:
            told.add(first.unmet.split(", ")[-1])
            continue
        assert not first.holds
        # The rate at which other parts grow in z is 1 − Re μ: the eigenvalue that is furthest left sets the end.
        end = min(14.0, 16 / np.abs(np.linalg.eigvals(V).real).max())
        verdict = judge(integrate(Dynamics.single(Q, K, V), x0, times=[0, end], rtol=1e-8), "hyperplanes")
        assert verdict.unmet == ""
        assert verdict.holds, (str(verdict), V)
        judged += 1
    assert judged >= 5
    assert {"is not real", "not above 0", "is not above 0"} <= told


def test_repeated_eigenvalue_gives_a_polytope_in_its_space():
    source = generator(5)
    for rest in (-0.5, 0.4, -0.9, 0.1, 0.6):
        basis = np.eye(3) + 0.3 * gaussian_matrices(source, 3, 1)[0]
        value = basis @ np.diag([1.0, 1.0, rest]) @ np.linalg.inv(basis)
        x0 = uniform_tokens(25, 3, generator=source)
        dynamics = Dynamics.single(definite(3, source), np.eye(3), value)
        verdict = judge(integrate(dynamics, x0, times=[0, 12], rtol=1e-8), "polytope_times_space")
        assert verdict.unmet == ""
        assert verdict.holds, str(verdict)
        assert not judge(integrate(dynamics, x0, times=[0]), "polytope_times_space").holds


def test_repelling_value_collapses_tokens_to_zero_at_an_algebraic_rate():
    for seed in range(4):
        x0 = uniform_tokens(20, 2, generator=generator(seed))
        run = integrate(Dynamics.single(I2, I2, -I2), x0, times=[0, 1000, 4000], rescaled=False, rtol=1e-8)
        verdict = judge(run, "collapse", tolerance=0.1)
        assert verdict.unmet == ""
        assert verdict.holds, str(verdict)
        # The covariance's own flow, ẏ = −Cov y, falls like t^{−1/2}.
        sizes = np.linalg.norm(run.tokens[1:], axis=(1, 2))
        assert sizes[0] / sizes[1] == pytest.approx(2.0, rel=0.02)


def test_each_theorem_names_the_hypothesis_that_fails():
    rotation = np.array([[0.0, -1.0], [1.0, 0.0]])
    x0 = uniform_tokens(5, 2, generator=generator())
    found = {v.theorem: v.unmet for v in classify(integrate(Dynamics.single(I2, I2, rotation), x0, times=[0, 1]))}
    assert "d = 1" in found["boolean"]
    assert "not the identity" in found["polytope"]
    assert "not real" in found["hyperplanes"]
    assert "not real" in found["polytope_times_space"]
    assert "not −I" in found["collapse"]
    plain = integrate(Dynamics.single(I2, I2, I2), x0, times=[0, 1], rescaled=False)
    assert "other form" in judge(plain, "polytope").unmet
    far = integrate(Dynamics.single(I1, I1, I1), [[-1.0], [0.5], [1.0]], times=[0, 40], rtol=1e-6)
    assert "40, beyond the 16" in judge(far, "boolean").unmet
    skew = judge(integrate(Dynamics.single(rotation, I2, I2), x0, times=[0, 1]), "polytope")
    assert "not symmetric" in skew.unmet
    indefinite = judge(integrate(Dynamics.single(-I2, I2, I2), x0, times=[0, 1]), "polytope")
    assert "eigenvalue -1" in indefinite.unmet
    simple = judge(integrate(Dynamics.single(I2, I2, I2), x0, times=[0, 1]), "hyperplanes")
    assert "not simple" in simple.unmet
    late = judge(integrate(Dynamics.single(I2, I2, I2), x0, times=[1, 2]), "polytope")
    assert "from t = 1 on" in late.unmet
    heads = Dynamics(2 * Dynamics.single(I2, I2, I2).heads)
    assert "here are 2" in judge(integrate(heads, x0, times=[0, 1], rescaled=False), "collapse").unmet
    with pytest.raises(RankscopeError, match="`theorem` has no"):
        judge(integrate(Dynamics.single(I2, I2, I2), x0, times=[0, 1]), "2.1")


def test_points_link_what_is_near():
    assert len(points(np.array([[0.0], [0.009], [0.018], [1.0]]), 0.01)) == 2
