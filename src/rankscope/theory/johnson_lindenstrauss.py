r"""The sizes and bounds that Linformer's two theorems print.

Both rest on one lemma: for fixed vectors x and y and a Gaussian R of k rows with entries N(0, 1/k),

.. math::
    \Pr\bigl(|x R^\top R y - x \cdot y| > \varepsilon \|x\| \|y\|\bigr)
    \le 2 e^{-(\varepsilon^2 - \varepsilon^3) k / 4}.

The error is *additive*, measured against the product of the norms. The theorems print it relative to the result,
:math:`\varepsilon |x \cdot y|`, which the lemma does not give: :mod:`rankscope.theory.jl_counts` counts both.
"""

from math import ceil, exp, log
from typing import NamedTuple

from rankscope._errors import RankscopeError

#: Where ε² − ε³ is largest, so that the printed dimension is smallest.
BEST_EPS = 2 / 3
# Below this the dimension is beyond 10¹².
_LEAST = 1e-12


class Theorem2(NamedTuple):
    """Both branches of Theorem 2's dimension, and the smaller of them.

    Args:
        by_width: ``⌈9 d ln d / ε²⌉``, free of n.
        by_length: ``⌈5 ln n / ε²⌉``.
        k: The smaller one.
        ln_n_crossover: The length's logarithm from which the branch free of n is the smaller, ``9 d ln d / 5``.
    """

    by_width: int
    by_length: int
    k: int
    ln_n_crossover: float


def jl_dimension(n: int, eps: float) -> int:
    r"""Projected length k that Theorem 1 asks for.

    .. math:: k = \lceil 5 \ln n / (\varepsilon^2 - \varepsilon^3) \rceil

    Not capped at n: where k ≥ n the theorem has nothing to say about a matrix of n columns, and that is a finding,
    not a mistake. The formula is smallest at ε = 2/3 (:data:`BEST_EPS`) and grows again beyond: for an ε above that,
    the k of 2/3 is enough as well.

    Args:
        n: Number of tokens, 1 or more.
        eps: Allowed error ε, between 0 and 1.

    Returns:
        A whole number, 0 only for one token.

    Raises:
        RankscopeError: ``n`` or ``eps`` is outside its range.

    References:
        Wang et al. 2020, arXiv 2006.04768, Theorem 1 and Appendix A.

    Example:
        >>> jl_dimension(512, 0.25)
        666
        >>> min(jl_dimension(512, e / 100) for e in range(1, 100)) == jl_dimension(512, 2 / 3) == 211
        True
    """
    check_tokens(n)
    return ceil(5 * log(n) / exponent(eps))


def failure_bound(n: int, k: int, eps: float) -> float:
    r"""Bound on the probability that some row misses the additive error: the union over n rows.

    .. math:: 2 n e^{-(\varepsilon^2 - \varepsilon^3) k / 4}

    Of the event ``|P_i RᵀR w − P_i w| > ε ‖P_i‖ ‖w‖`` for some row i, not of the relative event that Theorem 1
    prints. At ``k = jl_dimension(n, eps)`` it is at most ``2 n^(−1/4)``.

    Args:
        n: Number of rows.
        k: Projected length.
        eps: Allowed error ε, between 0 and 1.

    Returns:
        A positive number; from 1 on it says nothing.

    Raises:
        RankscopeError: ``n``, ``k`` or ``eps`` is outside its range.

    References:
        Wang et al. 2020, arXiv 2006.04768, Appendix A.

    Example:
        >>> failure_bound(512, 666, 0.25) <= 2 * 512 ** -0.25
        True
        >>> round(failure_bound(512, 256, 0.25), 1)
        51.0
    """
    check_tokens(n)
    if k < 1:
        raise RankscopeError(f"`k` must be 1 or more, got {k}: it is the number of rows of R")
    return 2 * n * exp(-exponent(eps) * k / 4)


def theorem_2_dimension(n: int, d: int, eps: float) -> Theorem2:
    r"""Both branches of the k that Theorem 2 prints, with the constants its Θ's enclose taken at their word.

    .. math:: k = \min\{9 d \ln d / \varepsilon^2,\ 5 \ln n / \varepsilon^2\}

    Args:
        n: Number of tokens, 1 or more.
        d: Width of a head, 2 or more.
        eps: Allowed error ε, between 0 and 1.

    Returns:
        Both branches, rounded up, and where they meet.

    Raises:
        RankscopeError: ``n``, ``d`` or ``eps`` is outside its range.

    References:
        Wang et al. 2020, arXiv 2006.04768, Theorem 2.

    Example:
        >>> theorem_2_dimension(65536, 64, 0.5)
        Theorem2(by_width=9583, by_length=222, k=222, ln_n_crossover=479.1...)
    """
    check_tokens(n)
    if d < 2:
        raise RankscopeError(f"`d` must be 2 or more, got {d}: 9 d ln d is zero below")
    exponent(eps)
    by_width, by_length = ceil(9 * d * log(d) / eps**2), ceil(5 * log(n) / eps**2)
    return Theorem2(by_width, by_length, min(by_width, by_length), 9 * d * log(d) / 5)


def exponent(eps: float) -> float:
    """Return ε² − ε³, refusing an ε outside (0, 1).

    Raises:
        RankscopeError: ``eps`` is not between 0 and 1.

    Example:
        >>> exponent(0.5)
        0.125
    """
    if not 0 < eps < 1:
        raise RankscopeError(
            f"`eps` must be between 0 and 1, got {eps}: the formula is smallest at 2/3, and no larger error is useful"
        )
    if eps**2 - eps**3 < _LEAST:
        raise RankscopeError(f"`eps` must leave ε² − ε³ at {_LEAST:g} or more, got {eps}: nothing is that long")
    return eps**2 - eps**3


def check_tokens(n: int) -> None:
    """Refuse a number of tokens below 1.

    Raises:
        RankscopeError: ``n`` is below 1.
    """
    if n < 1:
        raise RankscopeError(f"`n` must be 1 or more, got {n}: it is the number of tokens")
