"""Confidence intervals over windows, clustered by the document a window starts in."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats


def mean_interval(
    values: ArrayLike, documents: ArrayLike | None = None, *, confidence: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    r"""Mean over windows with its t-interval, windows of one document counted as one cluster.

    With cluster residuals :math:`u_c = \sum_{w \in c} (x_w - \bar x)`, C clusters and N windows,

    .. math:: \operatorname{var}(\bar x) = \frac{C}{C - 1} \sum_c u_c^2 / N^2,

    and the half-width is the t quantile with C − 1 degrees of freedom times its root. When every window
    has a document of its own this is the textbook t-interval; when all windows share one document there is
    nothing to cluster by and windows are taken as independent.

    Args:
        values: ``(windows, ...)``; a window that is NaN throughout (a null measured on fewer windows) is left out.
        documents: ``(windows,)``, the document of each window; ``None`` for independent windows.
        confidence: The interval's nominal cover, in (0, 1).

    Returns:
        ``mean``, ``low``, ``high``, each ``(...)``. Below two windows ``low`` and ``high`` are NaN.

    References:
        Liang and Zeger 1986, Biometrika 73 (the cluster-robust variance).

    Example:
        >>> mean, low, high = mean_interval([1.0, 2.0, 3.0])
        >>> round(float(mean), 2), round(float(low), 2), round(float(high), 2)
        (2.0, -0.48, 4.48)
    """
    x = np.asarray(values, dtype=np.float64)
    keep = ~np.isnan(x).all(axis=tuple(range(1, x.ndim)))
    x = x[keep]
    n = len(x)
    if n == 0:
        nothing = np.full(x.shape[1:], np.nan)
        return nothing, nothing, nothing
    mean = x.mean(axis=0)
    if n < 2:
        unknown = np.full_like(mean, np.nan)
        return mean, unknown, unknown
    labels = np.arange(n) if documents is None else np.unique(np.asarray(documents)[keep], return_inverse=True)[1]
    clusters = int(labels.max()) + 1
    if clusters == 1:
        labels, clusters = np.arange(n), n
    residuals = np.zeros((clusters, *mean.shape))
    np.add.at(residuals, labels, x - mean)
    standard_error = np.sqrt(clusters / (clusters - 1) * (residuals**2).sum(axis=0)) / n
    half = stats.t.ppf(0.5 + confidence / 2, clusters - 1) * standard_error
    return mean, mean - half, mean + half
