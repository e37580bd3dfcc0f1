r"""What a spectrum says about rank: curves, effective ranks and their deflated twins.

Every function takes singular values ``sigma (*lead, r)``, largest first, and is pure torch, so it can be batched,
moved to a device and differentiated where the measure itself can be. Zeros at the end change nothing (only
:func:`numerical_rank` of a caller's own sizes and the positions "at a quarter" look at ``r``). A measure that
divides by a sum that is zero is NaN: an all-zero matrix has no share, no entropy and no ratio.

A name says its power: *nuclear* measures weigh σ (as Linformer's Figure 1 does), *energy* measures weigh σ². One
dominant value, as attention sinks make, drowns every σ² measure; the *deflated* twin is the same measure of
σ₂, σ₃, …, without σ₁.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._errors import RankscopeError

FLOAT32_EPS = torch.finfo(torch.float32).eps
SHARES = (90, 95, 99)


def nuclear_curve(sigma: Float[Tensor, "*lead r"]) -> Float[Tensor, "*lead r"]:
    r"""Share of the nuclear norm held by the first 1, 2, …, r singular values.

    .. math:: c_k = \sum_{i \le k} \sigma_i \,/\, \sum_i \sigma_i

    Un-squared, as in Linformer's Figure 1; :func:`energy_curve` is the squared one.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.

    Returns:
        Non-decreasing numbers in ``(0, 1]``, ``(*lead, r)``; NaN where ``sigma`` is all zero.

    References:
        Wang et al. 2020, arXiv 2006.04768, Figure 1.

    Example:
        >>> nuclear_curve(torch.tensor([3.0, 1.0, 0.0])).tolist()
        [0.75, 1.0, 1.0]
    """
    return _shares(sigma)


def energy_curve(sigma: Float[Tensor, "*lead r"]) -> Float[Tensor, "*lead r"]:
    r"""Share of the squared Frobenius norm held by the first 1, 2, …, r singular values.

    .. math:: e_k = \sum_{i \le k} \sigma_i^2 \,/\, \sum_i \sigma_i^2

    The best rank-k approximation leaves the relative error :math:`\sqrt{1 - e_k}` in the Frobenius norm.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.

    Returns:
        Non-decreasing numbers in ``(0, 1]``, ``(*lead, r)``; NaN where ``sigma`` is all zero.

    Example:
        >>> energy_curve(torch.tensor([2.0, 1.0, 0.0])).tolist()
        [0.8, 1.0, 1.0]
    """
    return _shares(sigma.square())


def nuclear_fraction(sigma: Float[Tensor, "*lead r"], k: int) -> Float[Tensor, "*lead"]:
    r"""Share of the nuclear norm held by the ``k`` largest values: :func:`nuclear_curve` at one index.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.
        k: How many to keep, ``1 <= k <= r``.

    Returns:
        A number in ``(0, 1]`` for each leading index, ``(*lead)``.

    Raises:
        RankscopeError: ``k`` is outside ``1..r``.

    Example:
        >>> nuclear_fraction(torch.tensor([3.0, 1.0, 0.0]), k=1).item()
        0.75
    """
    return nuclear_curve(sigma)[..., _index(sigma, k)]


def energy_fraction(sigma: Float[Tensor, "*lead r"], k: int) -> Float[Tensor, "*lead"]:
    r"""Share of the squared Frobenius norm held by the ``k`` largest values: :func:`energy_curve` at one index.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.
        k: How many to keep, ``1 <= k <= r``.

    Returns:
        A number in ``(0, 1]`` for each leading index, ``(*lead)``.

    Raises:
        RankscopeError: ``k`` is outside ``1..r``.

    Example:
        >>> energy_fraction(torch.tensor([2.0, 1.0, 0.0]), k=1).item()
        0.8
    """
    return energy_curve(sigma)[..., _index(sigma, k)]


def effective_rank(sigma: Float[Tensor, "*lead r"]) -> Float[Tensor, "*lead"]:
    r"""Exponential of the entropy of the singular values, taken as a distribution.

    .. math:: \exp\Bigl(-\sum_i p_i \ln p_i\Bigr), \qquad p_i = \sigma_i \,/\, \sum_j \sigma_j

    Of σ, as Roy and Vetterli define it; some code takes σ² instead, which is another (smaller) number.

    Args:
        sigma: Singular values, ``(*lead, r)``.

    Returns:
        A number in ``[1, r]``; NaN where ``sigma`` is all zero.

    References:
        Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.

    Example:
        >>> round(effective_rank(torch.ones(4)).item(), 4)
        4.0
    """
    p = sigma / sigma.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def stable_rank(sigma: Float[Tensor, "*lead r"]) -> Float[Tensor, "*lead"]:
    r"""Squared Frobenius norm over squared spectral norm.

    .. math:: \sum_i \sigma_i^2 \,/\, \sigma_1^2

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.

    Returns:
        A number in ``[1, r]``; NaN where ``sigma`` is all zero.

    Example:
        >>> stable_rank(torch.tensor([2.0, 1.0, 1.0])).item()
        1.5
    """
    return (sigma / sigma[..., :1]).square().sum(-1)


def participation_ratio(sigma: Float[Tensor, "*lead r"]) -> Float[Tensor, "*lead"]:
    r"""How many directions share the energy evenly.

    .. math:: \Bigl(\sum_i \sigma_i^2\Bigr)^2 \Big/ \sum_i \sigma_i^4

    Never below :func:`stable_rank` and never above :func:`effective_rank`.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.

    Returns:
        A number in ``[1, r]``; NaN where ``sigma`` is all zero.

    Example:
        >>> participation_ratio(torch.tensor([1.0, 1.0, 0.0])).item()
        2.0
    """
    squares = (sigma / sigma[..., :1]).square()
    return squares.sum(-1).square() / squares.square().sum(-1)


def nuclear_rank(sigma: Float[Tensor, "*lead r"], share: float) -> Float[Tensor, "*lead"]:
    r"""Fewest singular values that hold ``share`` of the nuclear norm.

    .. math:: \min\{k : c_k \ge \mathrm{share}\}

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.
        share: Between 0 and 1.

    Returns:
        A whole number in ``1..r`` as a float; NaN where ``sigma`` is all zero.

    Raises:
        RankscopeError: ``share`` is outside ``(0, 1]``.

    Example:
        >>> nuclear_rank(torch.tensor([3.0, 1.0, 1.0]), share=0.8).item()
        2.0
    """
    return _rank_at(sigma, share)


def energy_rank(sigma: Float[Tensor, "*lead r"], share: float) -> Float[Tensor, "*lead"]:
    r"""Fewest singular values that hold ``share`` of the squared Frobenius norm.

    .. math:: \min\{k : e_k \ge \mathrm{share}\}

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.
        share: Between 0 and 1.

    Returns:
        A whole number in ``1..r`` as a float; NaN where ``sigma`` is all zero.

    Raises:
        RankscopeError: ``share`` is outside ``(0, 1]``.

    Example:
        >>> energy_rank(torch.tensor([2.0, 1.0, 1.0]), share=0.8).item()
        2.0
    """
    return _rank_at(sigma.square(), share)


def numerical_rank(
    sigma: Float[Tensor, "*lead r"], *, n: int, m: int, eps: float = FLOAT32_EPS
) -> Float[Tensor, "*lead"]:
    r"""How many singular values stand above rounding error.

    .. math:: \#\{i : \sigma_i > \max(n, m)\,\varepsilon\,\sigma_1\}

    ``numpy.linalg.matrix_rank``'s rule, with float32's ε unless told otherwise: attention is computed in float32 at
    best, so what lies below is noise even when the decomposition runs in float64.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.
        n: Rows of the matrix.
        m: Columns of the matrix.
        eps: Spacing of the precision the matrix was *made* in.

    Returns:
        A whole number in ``0..r`` as a float; 0 where ``sigma`` is all zero.

    Example:
        >>> numerical_rank(torch.tensor([1.0, 1e-3, 1e-9]), n=3, m=3).item()
        2.0
    """
    return (sigma > max(n, m) * eps * sigma[..., :1]).sum(-1).to(sigma.dtype)


def sigma_ratio(sigma: Float[Tensor, "*lead r"]) -> Float[Tensor, "*lead"]:
    r"""Second singular value over the first, :math:`\sigma_2 / \sigma_1`: small where one direction rules.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.

    Returns:
        A number in ``[0, 1]`` (0 where there is no second value); NaN where ``sigma`` is all zero.

    Example:
        >>> sigma_ratio(torch.tensor([4.0, 1.0, 0.0])).item()
        0.25
    """
    second = sigma[..., 1] if sigma.shape[-1] > 1 else torch.zeros_like(sigma[..., 0])
    return second / sigma[..., 0]


def deflated(sigma: Float[Tensor, "*lead r"]) -> Float[Tensor, "*lead r-1"]:
    r"""The spectrum without its largest value.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``; ``r = 1`` leaves one zero.

    Returns:
        :math:`\sigma_2, \dots, \sigma_r`.

    Example:
        >>> deflated(torch.tensor([4.0, 1.0, 0.0])).tolist()
        [1.0, 0.0]
    """
    return sigma[..., 1:] if sigma.shape[-1] > 1 else torch.zeros_like(sigma)


def scalars(sigma: Float[Tensor, "*lead r"], *, n: int, m: int) -> dict[str, Float[Tensor, "*lead"]]:
    """Every scalar measure of a spectrum, in the order and under the names of :data:`SCALARS`.

    "At a quarter" is index ``max(1, min(n, m) // 4)``, in the deflated twins too: the same number of directions,
    counted after the first.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``, with ``r = min(n, m)``.
        n: Rows of the matrix.
        m: Columns of the matrix.

    Returns:
        One tensor ``(*lead)`` for each measure.

    Raises:
        RankscopeError: ``sigma`` does not hold ``min(n, m)`` values.

    Example:
        >>> scalars(torch.tensor([2.0, 1.0, 1.0, 0.0]), n=4, m=5)["stable_rank"].item()
        1.5
    """
    if sigma.shape[-1] != min(n, m):
        raise RankscopeError(
            f"`sigma` must hold min(n, m) = {min(n, m)} values in its last dimension, got {sigma.shape[-1]}: "
            "pass the spectrum of the whole n x m matrix"
        )
    return {name: measure(sigma, n, m) for name, measure in SCALARS.items()}


def _shares(weights: Tensor) -> Tensor:
    """Running sum over the whole sum, never above one by rounding."""
    running = weights.cumsum(-1)
    return running / running[..., -1:]


def _index(sigma: Tensor, k: int) -> int:
    """Turn "how many are kept" into a position."""
    if not 1 <= k <= sigma.shape[-1]:
        raise RankscopeError(f"`k` must be between 1 and r={sigma.shape[-1]}, got {k}: ask for fewer values")
    return k - 1


def _rank_at(weights: Tensor, share: float) -> Tensor:
    """Fewest leading weights whose sum reaches ``share`` of the whole."""
    if not 0 < share <= 1:
        raise RankscopeError(f"`share` must be in (0, 1], got {share}: 90 % is share=0.9")
    curve = _shares(weights)
    rank = (curve < share).sum(-1) + 1
    return torch.where(curve[..., -1].isnan(), torch.nan, rank.to(weights.dtype))


def _at_quarter(curve: Callable[[Tensor], Tensor], sigma: Tensor, n: int, m: int) -> Tensor:
    values = curve(sigma)
    return values[..., min(max(1, min(n, m) // 4), values.shape[-1]) - 1]


class Measure:
    """One row of :data:`SCALARS`: a measure of a spectrum and, for two of them, of the matrix's shape.

    Args:
        function: ``function(sigma, n, m)``.
        is_deflated: Whether σ₁ is taken away first (``n`` and ``m`` stay those of the whole matrix).
    """

    def __init__(self, function: Callable[[Tensor, int, int], Tensor], *, is_deflated: bool = False) -> None:
        self.function = function
        self.is_deflated = is_deflated

    def __call__(self, sigma: Tensor, n: int | None = None, m: int | None = None) -> Tensor:
        """Measure one spectrum ``(*lead, r)``; without ``n`` and ``m`` the matrix is taken as r x r."""
        r = sigma.shape[-1]
        n, m = r if n is None else n, r if m is None else m
        return self.function(deflated(sigma) if self.is_deflated else sigma, n, m)


def _of_sigma(measure: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int, int], Tensor]:
    return lambda sigma, n, m: measure(sigma)


_TWINNED: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "effective_rank": _of_sigma(effective_rank),
    "stable_rank": _of_sigma(stable_rank),
    "participation_ratio": _of_sigma(participation_ratio),
    **{f"nuclear_rank_{share}": _of_sigma(partial(nuclear_rank, share=share / 100)) for share in SHARES},
    **{f"energy_rank_{share}": _of_sigma(partial(energy_rank, share=share / 100)) for share in SHARES},
    "sigma_ratio": _of_sigma(sigma_ratio),
    "nuclear_fraction_at_quarter": partial(_at_quarter, nuclear_curve),
    "energy_fraction_at_quarter": partial(_at_quarter, energy_curve),
}
_WHOLE: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "numerical_rank": lambda sigma, n, m: numerical_rank(sigma, n=n, m=m),
    "sigma_1": lambda sigma, n, m: sigma[..., 0],
}
_names = list(_TWINNED)
_names[_names.index("sigma_ratio") : _names.index("sigma_ratio")] = list(_WHOLE)

#: Every scalar measure by its name, the deflated twins last: ``SCALARS[name](sigma, n, m)``.
SCALARS: dict[str, Measure] = {name: Measure({**_TWINNED, **_WHOLE}[name]) for name in _names} | {
    f"{name}_deflated": Measure(function, is_deflated=True) for name, function in _TWINNED.items()
}
