"""What a benchmark's times say: exponents, crossover lengths and fronts, each with its interval."""

from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log, nan

import numpy as np
from numpy.typing import NDArray
from scipy import stats

DRAWS = 1000
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Exponent:
    """A fitted power of n; ``low`` and ``high`` are NaN where two lengths leave nothing to judge it by."""

    value: float
    low: float
    high: float
    lengths: int


@dataclass(frozen=True)
class Crossover:
    """The length from which one mechanism stays faster than another.

    Args:
        n: By log–log interpolation. ``inf``: not within the measured lengths; ``-inf``: from the first of them on.
        low: Lower end of the 95 % bootstrap interval over repeats, in the same sense.
        high: Upper end.
        first: Shortest length measured for both.
        last: Longest one.
    """

    n: float
    low: float
    high: float
    first: int
    last: int

    def words(self) -> str:
        """Say it.

        Example:
            >>> Crossover(812.3, 790.0, 840.0, 512, 4096).words(), Crossover(inf, inf, inf, 512, 4096).words()
            ('n = 812 [790, 840]', 'not up to n = 4,096')
        """
        if self.n == inf:
            return f"not up to n = {self.last:,}"
        if self.n == -inf:
            return f"from n = {self.first:,} or earlier"
        return f"n = {self.n:,.0f} [{self._end(self.low)}, {self._end(self.high)}]"

    def _end(self, value: float) -> str:
        return f"< {self.first:,}" if value == -inf else f"> {self.last:,}" if value == inf else f"{value:,.0f}"


def fit_exponent(lengths: Array, values: Array, *, confidence: float = 0.95) -> Exponent:
    r"""Fit :math:`\log y = a \log n + b` by least squares and return a with its t-interval.

    Args:
        lengths: n, two at least for a slope.
        values: Positive, one each.
        confidence: Of the interval.

    Returns:
        The slope; NaN below two lengths, an interval from three on.

    Example:
        >>> fit_exponent(np.array([1.0, 2.0, 4.0]), np.array([3.0, 12.0, 48.0])).value
        2.0
    """
    if len(lengths) < 2:
        return Exponent(nan, nan, nan, len(lengths))
    fit = stats.linregress(np.log(lengths), np.log(values))
    if len(lengths) < 3:
        return Exponent(float(fit.slope), nan, nan, len(lengths))
    half = float(stats.t.ppf(0.5 + confidence / 2, len(lengths) - 2) * fit.stderr)
    return Exponent(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half, len(lengths))


def crossing(lengths: Array, ratios: Array) -> float:
    """Return the n from which ``ratios`` (the other's time over ours) stay at 1 or above, interpolated log–log.

    Example:
        >>> crossing(np.array([256.0, 1024.0]), np.array([0.5, 2.0]))
        512.0
        >>> crossing(np.array([256.0, 1024.0]), np.array([0.5, 0.9]))
        inf
        >>> crossing(np.array([256.0, 1024.0]), np.array([1.5, 1.9]))
        -inf
    """
    if ratios[-1] < 1:
        return inf
    for (n, ratio), (longer, larger) in reversed(list(pairwise(zip(lengths, ratios, strict=True)))):
        if ratio < 1 <= larger:
            part = -log(ratio) / (log(larger) - log(ratio))
            return float(n * exp(part * log(longer / n)))
    return -inf


def crossover(ours: dict[int, list[float]], other: dict[int, list[float]], *, seed: int = 0) -> Crossover | None:
    """Return where ours becomes the faster one, from the repeats at each length.

    The interval is the middle 95 % over bootstrap samples of the repeats, medians taken anew in each: it speaks of
    the timing's noise, not of other machines.

    Args:
        ours: Seconds of each repeat, by n.
        other: The same.
        seed: Of the bootstrap.

    Returns:
        The crossover; ``None`` where fewer than two lengths are common.

    Example:
        >>> crossover({256: [2.0], 1024: [2.0]}, {256: [1.0], 1024: [4.0]}).n
        512.0
    """
    common = sorted(set(ours) & set(other))
    if len(common) < 2:
        return None
    lengths = np.array(common, dtype=np.float64)
    ratios = np.array([np.median(other[n]) / np.median(ours[n]) for n in common])
    generator = np.random.default_rng(seed)

    def medians(seconds: list[float]) -> Array:
        values = np.asarray(seconds)
        return np.median(values[generator.integers(len(values), size=(DRAWS, len(values)))], axis=1)

    draws = np.stack([medians(other[n]) / medians(ours[n]) for n in common], axis=1)
    found = np.sort([crossing(lengths, row) for row in draws])
    low, high = found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS) - 1]
    return Crossover(crossing(lengths, ratios), float(low), float(high), common[0], common[-1])


def front(points: list[tuple[float, float]]) -> list[int]:
    """Return the places of the points that no other beats in both coordinates, by rising first coordinate.

    Example:
        >>> front([(1.0, 5.0), (2.0, 6.0), (3.0, 1.0)])
        [0, 2]
    """
    best, kept = inf, []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best:
            best = points[i][1]
            kept.append(i)
    return kept
