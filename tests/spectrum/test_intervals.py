import numpy as np
import pytest
from scipy import stats

from rankscope.spectrum.intervals import mean_interval


def test_windows_of_their_own_documents_give_the_textbook_t_interval():
    x = np.random.default_rng(0).normal(size=20)
    mean, low, high = mean_interval(x, np.arange(20))
    expected = stats.t.interval(0.95, 19, loc=x.mean(), scale=stats.sem(x))
    assert (float(low), float(high)) == pytest.approx(expected, rel=1e-12)
    assert mean == pytest.approx(x.mean())


def test_repeating_every_window_in_its_document_adds_no_certainty():
    x = np.random.default_rng(1).normal(size=12)
    _, low, high = mean_interval(x)
    _, low_twice, high_twice = mean_interval(np.repeat(x, 5), np.repeat(np.arange(12), 5))
    assert (low_twice, high_twice) == pytest.approx((low, high), rel=1e-12)


def test_clustered_interval_covers_at_its_stated_rate_and_the_naive_one_does_not():
    rng = np.random.default_rng(2)
    documents = np.repeat(np.arange(24), 4)
    runs = 2000
    # (windows, runs): document effect as large as the window noise
    x = rng.normal(size=(24, runs))[documents] + rng.normal(size=(96, runs))
    _, low, high = mean_interval(x, documents)
    _, naive_low, naive_high = mean_interval(x)
    cover = np.mean((low < 0) & (high > 0))
    naive = np.mean((naive_low < 0) & (naive_high > 0))
    assert abs(cover - 0.95) < 4 * np.sqrt(0.95 * 0.05 / runs) + 0.005
    assert naive < 0.85


def test_a_null_of_fewer_windows_counts_only_its_own():
    x = np.array([1.0, 2.0, 3.0, np.nan, np.nan])
    assert [float(v) for v in mean_interval(x)] == pytest.approx([float(v) for v in mean_interval(x[:3])])


def test_a_head_that_does_not_exist_stays_nan_and_spoils_no_other():
    x = np.stack([np.arange(4.0), np.full(4, np.nan)], axis=1)
    mean, low, high = mean_interval(x)
    assert np.isfinite([mean[0], low[0], high[0]]).all()
    assert np.isnan([mean[1], low[1], high[1]]).all()


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_windows_have_no_interval(count):
    _, low, high = mean_interval(np.ones((count, 2)))
    assert np.isnan(low).all()
    assert np.isnan(high).all()


def test_one_document_falls_back_to_independent_windows():
    x = np.random.default_rng(3).normal(size=10)
    assert mean_interval(x, np.zeros(10))[1] == pytest.approx(mean_interval(x)[1])
