"""Running mean and variance that merge: what keeps memory flat while windows go by."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class Moments:
    r"""Count, mean and sum of squared deviations of a stream of arrays of one shape.

    Law: merging the moments of two pieces equals the moments of the whole, for every cut; the order of the
    pieces does not matter beyond rounding.

    .. math:: M_2(a \cup b) = M_2(a) + M_2(b) + (\bar b - \bar a)^2 \, n_a n_b / (n_a + n_b)

    Args:
        count: How many arrays were seen.
        mean: Their mean, any shape.
        m2: Their summed squared deviations from the mean, the same shape.

    References:
        Chan, Golub and LeVeque 1983, The American Statistician 37, "Algorithms for computing the sample
        variance".

    Example:
        >>> moments = Moments.of(np.array([1.0, 2.0])).merge(Moments.of(np.array([3.0, 2.0])))
        >>> moments.mean.tolist(), moments.sd().tolist()
        ([2.0, 2.0], [1.4142135623730951, 0.0])
    """

    count: int = 0
    mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    m2: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, value: NDArray[np.floating]) -> "Moments":
        """Return the moments of a single array."""
        array = np.asarray(value, dtype=np.float64)
        return cls(1, array.copy(), np.zeros_like(array))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both streams together."""
        if self.count == 0:
            return other
        if other.count == 0:
            return self
        total = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            total,
            self.mean + delta * (other.count / total),
            self.m2 + other.m2 + delta**2 * (self.count * other.count / total),
        )

    def sd(self) -> NDArray[np.float64]:
        """Return the sample standard deviation; NaN below two arrays."""
        if self.count < 2:
            return np.full_like(self.mean, np.nan)
        return np.sqrt(self.m2 / (self.count - 1))
