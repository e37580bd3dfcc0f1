"""What may be said of numbers measured on a few windows: intervals, differences, trends with depth."""

from dataclasses import dataclass
from math import factorial, isnan, nan

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from rankscope.spectrum.intervals import mean_interval

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
EXACT_UP_TO = 8
DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean over windows with its interval; ``low`` and ``high`` are NaN where one window gives none.

    ``is_of_one_document`` says that several windows share one document, so that they could not be clustered by it and
    the interval speaks of that document alone.
    """

    value: float
    low: float
    high: float
    windows: int
    is_of_one_document: bool = False

    @property
    def has_interval(self) -> bool:
        """Whether there were windows enough for an interval."""
        return not isnan(self.low)

    @property
    def sign(self) -> int:
        """1 or −1 where the whole interval lies above or below zero, else 0."""
        if not self.has_interval:
            return 0
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class DepthTrend:
    """How layer means go with depth.

    Args:
        rho: Spearman's ρ between depth and the layer means; NaN below three layers or without any spread.
        p: Two-sided, exact (all orders) up to 8 layers, Student's t beyond.
        rho_low: Lower end of ρ's 95 % interval over windows.
        rho_high: Upper end.
        slope: Least-squares change from one layer to the next.
        layers: How many there were.
    """

    rho: float
    p: float
    rho_low: float
    rho_high: float
    slope: Estimate
    layers: int

    @property
    def sign(self) -> int:
        """1 or −1 where p < .05 and the interval over windows leaves no doubt of the direction, else 0."""
        if isnan(self.rho) or not self.p < 0.05:
            return 0
        doubt = not isnan(self.rho_low) and self.rho_low <= 0 <= self.rho_high
        return 0 if doubt else int(np.sign(self.rho))


def estimate(values: Array, documents: Labels | None = None, *, confidence: float = 0.95) -> Estimate:
    """Mean of ``(windows,)`` with its t-interval clustered by document; NaN windows are not counted.

    Example:
        >>> e = estimate(np.array([1.0, 2.0, 3.0, np.nan]))
        >>> e.windows, round(e.low, 2), round(e.high, 2), e.sign
        (3, -0.48, 4.48, 0)
    """
    mean, low, high = mean_interval(values, documents, confidence=confidence)
    counted = ~np.isnan(values)
    alone = documents is not None and counted.sum() > 1 and len(np.unique(documents[counted])) == 1
    return Estimate(float(mean), float(low), float(high), int(counted.sum()), alone)


def difference(values: Array, others: Array, documents: Labels | None = None, *, confidence: float = 0.95) -> Estimate:
    """Mean of ``values − others`` over the windows both have: paired, so what windows share drops out.

    Example:
        >>> difference(np.array([1.0, 2.0, 3.0]), np.array([0.9, 1.9, np.nan])).value
        0.1
    """
    return estimate(values - others, documents, confidence=confidence)


def cluster_draws(documents: Labels, draws: int, seed: int) -> Array:
    """How often each window counts in each bootstrap draw, whole documents at a time, ``(draws, windows)``.

    When all windows share one document there is nothing to cluster by and windows are drawn themselves.
    """
    labels = np.unique(documents, return_inverse=True)[1]
    if labels.max() == 0:
        labels = np.arange(len(labels))
    clusters = int(labels.max()) + 1
    counts = np.random.default_rng(seed).multinomial(clusters, np.full(clusters, 1 / clusters), size=draws)
    return counts[:, labels].astype(np.float64)


def bootstrap_means(values: Array, documents: Labels, *, draws: int = DRAWS, seed: int = 0) -> Array:
    """Means of bootstrap samples clustered by document, ``(windows, ...)`` to ``(draws, ...)``.

    References:
        Davison and Hinkley 1997, Bootstrap Methods and their Application, §3.8 (clusters drawn whole).

    Example:
        >>> bootstrap_means(np.array([[1.0], [1.0], [1.0]]), np.array([0, 0, 1]), draws=2).tolist()
        [[1.0], [1.0]]
    """
    weights = cluster_draws(documents, draws, seed)
    return np.tensordot(weights / weights.sum(axis=1, keepdims=True), values, axes=1)


def spearman(values: Array) -> tuple[float, float]:
    """Spearman's ρ between position and value, with its two-sided p.

    Up to 8 values p is exact: the share of all orders whose ρ is as far from zero. Student's t beyond.

    Returns:
        ρ in [−1, 1] and p in (0, 1]; both NaN below three values or where all are equal.

    Example:
        >>> rho, p = spearman(np.array([0.1, 0.2, 0.3, 0.4]))
        >>> rho, round(p, 4)
        (1.0, 0.0833)
    """
    if len(values) < 3 or np.isnan(values).any() or np.ptp(values) == 0:
        return nan, nan
    place = np.arange(len(values), dtype=np.float64)

    def rho_of(order: Array) -> float:
        return float(stats.spearmanr(order, values).statistic)

    rho = rho_of(place)
    if len(values) > EXACT_UP_TO:
        return rho, float(stats.spearmanr(place, values).pvalue)
    ranks = stats.rankdata(values)
    ranks -= ranks.mean()

    def product(order: Array, axis: int = -1) -> Array:
        return np.sum((order - place.mean()) * ranks, axis=axis)

    test = stats.permutation_test(
        (place,), product, permutation_type="pairings", vectorized=True, n_resamples=factorial(len(values))
    )
    return rho, float(test.pvalue)


def depth_trend(values: Array, documents: Labels | None = None, *, seed: int = 0) -> DepthTrend:
    """How the layer means of ``(windows, layers)`` go with depth.

    ρ's interval is the middle 95 % of its values over bootstrap samples of windows, clustered by document.
    It speaks of other text for the same layers; p speaks of the layers' order.

    Example:
        >>> trend = depth_trend(np.array([[0.1, 0.2, 0.3, 0.4, 0.5]]))
        >>> trend.rho, round(trend.p, 3), trend.sign, trend.slope.value, trend.slope.has_interval
        (1.0, 0.017, 1, 0.1, False)
    """
    kept = ~np.isnan(values).any(axis=1)
    documents = (np.arange(len(values)) if documents is None else documents)[kept]
    values = values[kept]
    layers = values.shape[1]
    if not len(values) or layers < 2:
        return DepthTrend(nan, nan, nan, nan, Estimate(nan, nan, nan, len(values)), layers)
    rho, p = spearman(values.mean(axis=0))
    depth = np.arange(layers) - (layers - 1) / 2
    slope = estimate(values @ depth / (depth @ depth), documents)
    low = high = nan
    if len(values) > 1 and not isnan(rho):
        ranks = stats.rankdata(bootstrap_means(values, documents, seed=seed), axis=1)
        ranks -= ranks.mean(axis=1, keepdims=True)
        spread = np.sqrt((ranks**2).sum(axis=1) * (depth @ depth))
        rhos = np.divide(ranks @ depth, spread, out=np.zeros(len(ranks)), where=spread > 0)
        low, high = (float(end) for end in np.quantile(rhos, (0.025, 0.975)))
    return DepthTrend(rho, p, low, high, slope, layers)
