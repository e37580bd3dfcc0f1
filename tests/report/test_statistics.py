import numpy as np
import pytest

from rankscope.report.statistics import bootstrap_means, cluster_draws, depth_trend, difference, estimate, spearman


def test_spearman_p_is_the_share_of_orders_as_far_from_zero():
    from itertools import permutations

    values = np.array([0.81, 0.705, 0.761, 0.86, 0.862, 0.977])
    ranks = values.argsort().argsort()

    def rho(order):
        return 1 - 6 * sum((a - b) ** 2 for a, b in zip(order, ranks, strict=True)) / (6 * 35)

    own = rho(range(6))
    share = np.mean([abs(rho(order)) >= abs(own) - 1e-12 for order in permutations(range(6))])
    assert spearman(values) == pytest.approx((own, share))


def test_spearman_beyond_eight_values_is_scipys():
    from scipy import stats

    values = np.random.default_rng(0).normal(size=20)
    expected = stats.spearmanr(np.arange(20), values)
    assert spearman(values) == pytest.approx((expected.statistic, expected.pvalue))


@pytest.mark.parametrize("values", [[0.1, 0.2], [0.3, 0.3, 0.3], [0.1, np.nan, 0.3]])
def test_spearman_says_nothing_where_nothing_can_be_said(values):
    assert np.isnan(spearman(np.array(values))).all()


def test_one_window_has_a_mean_and_no_interval():
    e = estimate(np.array([0.5, np.nan]))
    assert (e.value, e.windows, e.has_interval, e.sign) == (0.5, 1, False, 0)


def test_difference_is_paired_over_shared_windows():
    shared = np.random.default_rng(0).normal(size=12)
    gap = difference(shared + 0.1, np.where(np.arange(12) < 6, shared, np.nan))
    assert gap.value == pytest.approx(0.1)
    assert gap.windows == 6
    assert gap.high - gap.low < 1e-9
    assert gap.sign == 1


def test_windows_of_one_document_are_drawn_together():
    documents = np.array([0, 0, 1, 1, 1, 2])
    draws = cluster_draws(documents, 50, seed=1)
    assert (draws[:, 0] == draws[:, 1]).all()
    assert (draws[:, 2] == draws[:, 4]).all()
    assert (draws[:, [0, 2, 5]].sum(axis=1) == 3).all()


def test_one_document_leaves_windows_to_be_drawn():
    assert cluster_draws(np.zeros(5), 20, seed=1).std(axis=1).min() >= 0
    assert len(np.unique(cluster_draws(np.zeros(5), 20, seed=1))) > 2


def test_bootstrap_spread_is_the_standard_error():
    values = np.random.default_rng(3).normal(size=(200, 1))
    means = bootstrap_means(values, np.arange(200), draws=4000)
    assert means.std() == pytest.approx(values.std() / np.sqrt(200), rel=0.06)


def test_clustered_interval_is_wider_when_documents_agree_with_themselves():
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(8), 8)
    values = rng.normal(size=8)[documents] + 0.01 * rng.normal(size=64)
    own, alone = estimate(values, documents), estimate(values)
    assert own.high - own.low > 2 * (alone.high - alone.low)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        documents = np.repeat(np.arange(10), 3)
        values = rng.normal(size=10)[documents] + rng.normal(size=30)
        e = estimate(values, documents)
        hits += e.low <= 0 <= e.high
    assert 0.915 <= hits / 400 <= 0.98  # 95 % ± 3 binomial standard errors


def test_depth_trend_needs_the_layers_order_and_the_windows_to_agree():
    rng = np.random.default_rng(0)
    clear = np.linspace(0.5, 0.9, 8) + 0.001 * rng.normal(size=(20, 8))
    assert depth_trend(clear).sign == 1
    assert depth_trend(clear[:, ::-1]).sign == -1
    assert depth_trend(clear).slope.value == pytest.approx(0.4 / 7, rel=0.01)
    assert depth_trend(clear[:, :3]).sign == 0  # three layers can't reach p < .05
    noise = 0.5 + 0.1 * rng.normal(size=(20, 8))
    assert depth_trend(noise).rho_low < 0 < depth_trend(noise).rho_high


def test_windows_with_an_absent_layer_are_not_counted():
    values = np.tile(np.linspace(0, 1, 5), (4, 1))
    values[3, 2] = np.nan
    assert depth_trend(values, np.arange(4)).slope.windows == 3
