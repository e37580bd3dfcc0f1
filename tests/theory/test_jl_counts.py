import math

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from rankscope._errors import RankscopeError
from rankscope.theory.jl_counts import (
    binomial_interval,
    count_theorem_1,
    measure_theorem_2,
    vectors,
)
from rankscope.theory.johnson_lindenstrauss import jl_dimension
from reference.theorem_1 import theorem_1_error, theorem_2_output


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def softmax_matrices(heads, n, sd, seed=0):
    return (sd * torch.randn(heads, n, n, generator=generator(seed), dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("k", [3, 40])
def test_sampled_error_has_the_law_of_drawing_the_projection(k):
    n, draws = 12, 300
    P = softmax_matrices(1, n, 2.0)
    w = vectors("gaussian", P, count=1, generator=generator(1))
    rng = np.random.default_rng(0)
    drawn = [
        theorem_1_error(P[0].numpy(), w[0, :, 0].numpy(), rng.normal(size=(k, n)) / math.sqrt(k)) for _ in range(draws)
    ]
    # One draw a call, so that each call's mean is one error and both events' thresholds can be found by a grid.
    source = generator(2)
    grid = np.linspace(0.01, 0.99, 60)
    sampled = count_theorem_1(P, w, k=[k], eps=grid, draws=4000, generator=source)
    errors = [count_theorem_1(P, w, k=[k], eps=[0.5], draws=1, generator=source).relative_error.item() for _ in drawn]
    assert ks_2samp([relative for relative, _ in drawn], errors).pvalue > 1e-3
    for name, column in (("relative", 0), ("additive", 1)):
        expected = np.array([[pair[column] > eps for pair in drawn] for eps in grid]).mean(1)
        share = getattr(sampled, name)[0, :, 0, 0].numpy() / 4000
        # Kolmogorov–Smirnov at level 1e-3 for 300 against 4,000.
        assert np.abs(expected - share).max() < 1.95 * math.sqrt(1 / draws + 1 / 4000)


def test_additive_failures_stay_below_their_bound():
    draws, compared = 400, 0
    for n in (32, 128):
        P = torch.cat([torch.eye(n, dtype=torch.float64)[None], softmax_matrices(2, n, 1.0), softmax_matrices(1, n, 4)])
        w = torch.cat(
            [
                vectors(kind, P, count=1, generator=generator(3))
                for kind in ("gaussian", "mean_dominated", "adversarial")
            ],
            dim=2,
        )
        eps = (0.25, 0.5, 2 / 3, 0.8)
        k = (64, 256, jl_dimension(n, 0.5), jl_dimension(n, 0.25))
        counts = count_theorem_1(P, w, k=k, eps=eps, draws=draws, generator=generator(4))
        for i in range(len(k)):
            for j in range(len(eps)):
                bound = counts.bound[i, j].item()
                if bound < 1:
                    allowed = bound + 4 * math.sqrt(bound * (1 - bound) / draws)
                    assert (counts.additive[i, j] / draws <= allowed).all(), (n, k[i], eps[j])
                    compared += counts.additive[i, j].numel()
    assert compared > 100


def test_identity_misses_the_printed_event_at_every_k_below_n():
    P = torch.eye(512)[None]
    w = vectors("gaussian", P, count=4, generator=generator())
    counts = count_theorem_1(P, w, k=[128, 250, 511], eps=[0.5, 0.75], draws=50, generator=generator())
    assert (counts.relative == 50).all()
    # The relative error of the identity is √(n / k).
    expected = torch.tensor([512 / 128, 512 / 250, 512 / 511]).sqrt().double()
    torch.testing.assert_close(counts.relative_error.mean((1, 2)), expected, rtol=0.02, atol=0)


def test_printed_event_is_easy_for_a_mean_and_impossible_for_the_smallest_singular_vector():
    P = softmax_matrices(1, 128, 1.0)
    failures = {}
    for kind in ("mean_dominated", "gaussian", "adversarial"):
        w = vectors(kind, P, count=1, generator=generator())
        counts = count_theorem_1(P, w, k=[jl_dimension(128, 0.5)], eps=[0.5], draws=200, generator=generator())
        failures[kind] = counts.relative.sum().item() / 200
    assert failures["mean_dominated"] == 0
    assert failures["adversarial"] == 1
    assert failures["gaussian"] > 0.9


def test_same_seed_gives_the_same_counts_and_batches_do_not_change_the_draws_count(monkeypatch):
    P = softmax_matrices(2, 16, 1.0)
    w = vectors("gaussian", P, count=3, generator=generator())
    ask = {"k": [4], "eps": [0.5], "draws": 64}
    one, other = (count_theorem_1(P, w, **ask, generator=generator(5)) for _ in range(2))
    assert torch.equal(one.relative, other.relative)
    monkeypatch.setattr("rankscope.theory.jl_counts._HELD", 1)
    split = count_theorem_1(P, w, **ask, generator=generator(5))
    assert split.draws == 64
    torch.testing.assert_close(split.relative_error, one.relative_error, rtol=0.25, atol=0)


def test_theorem_2_agrees_with_its_loops():
    n, k = 7, 5
    logits = torch.randn(1, n, n, generator=generator(1), dtype=torch.float64)
    value = torch.randn(1, n, 3, generator=generator(2), dtype=torch.float64)
    found = measure_theorem_2(logits, value, k=k, delta=[0.7], eps=0.5, draws=1, generator=generator(3))
    R = torch.randn(k, n, generator=generator(3), dtype=torch.float64) / k**0.5
    output = theorem_2_output(logits[0].numpy(), value[0].numpy(), R.numpy(), 0.7)
    P = logits[0].softmax(-1)
    exact = (P @ value[0]).numpy()
    assert found.relative_error.item() == pytest.approx(np.linalg.norm(output - exact) / np.linalg.norm(exact))
    spread = np.linalg.norm(output - output.mean(0)) / np.linalg.norm(output)
    assert found.query_dependence.item() == pytest.approx(spread)
    limit = 0.5 * P.norm(dim=1).numpy() * value[0].norm().item()
    assert found.missed.item() == pytest.approx((np.linalg.norm(output - exact, axis=1) > limit).mean())
    assert found.missed_by_zero.item() == pytest.approx((np.linalg.norm(exact, axis=1) > limit).mean())


def test_theorem_2_loses_the_query_as_delta_falls_and_gains_no_accuracy():
    logits = torch.randn(2, 64, 64, generator=generator(1), dtype=torch.float64)
    value = torch.randn(2, 64, 8, generator=generator(2), dtype=torch.float64)
    found = measure_theorem_2(logits, value, k=32, delta=[1.0, 1e-2, 1e-4], eps=0.5, draws=20, generator=generator(3))
    # Linear in δ once the softmax is linear.
    ratio = found.query_dependence[1] / found.query_dependence[2]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 100.0), rtol=0.1, atol=0)
    assert (found.query_dependence[0] > 0.1).all()
    assert (found.relative_error[2] > 0.9).all()


@pytest.mark.parametrize(("successes", "trials"), [(0, 20), (7, 20), (20, 20)])
def test_interval_leaves_half_the_tail_on_each_side(successes, trials):
    from scipy.stats import binom

    low, high = binomial_interval(successes, trials)
    assert low <= successes / trials <= high
    if successes:
        assert binom.sf(successes - 1, trials, low) == pytest.approx(0.025)
    if successes < trials:
        assert binom.cdf(successes, trials, high) == pytest.approx(0.025)


def test_mistakes_are_refused():
    P = softmax_matrices(1, 8, 1.0)
    w = torch.ones(1, 8, 2, dtype=torch.float64)
    ask = {"k": [4], "eps": [0.5], "draws": 2, "generator": generator()}
    for change, words in (
        ({"draws": 0}, "`draws` must be 1 or more"),
        ({"k": [0]}, "`k` must hold projected lengths"),
        ({"eps": [1.0]}, "`eps` must be between 0 and 1"),
    ):
        with pytest.raises(RankscopeError, match=words):
            count_theorem_1(P, w, **{**ask, **change})
    with pytest.raises(RankscopeError, match="all zero"):
        count_theorem_1(P, 0 * w, **ask)
    with pytest.raises(RankscopeError, match="heads first"):
        count_theorem_1(P[0], w, **ask)
    with pytest.raises(RankscopeError, match="did you mean 'gaussian'"):
        vectors("gausian", P, count=1, generator=generator())
    with pytest.raises(RankscopeError, match="`successes`"):
        binomial_interval(3, 2)
