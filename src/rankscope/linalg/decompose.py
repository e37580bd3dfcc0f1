r"""Singular values of attention matrices, exactly enough and as fast as libraries allow.

An attention matrix's spectrum has a long tail (of 512 values about 440 hold 99.9 % of the sum), so truncated and
randomised methods do not help. What helps is to skip the singular value decomposition: the eigenvalues of
:math:`P^\top P` need half the work. The price is precision: a relative error ε in the Gram matrix becomes
:math:`\sqrt\varepsilon` in the smallest σ. So there is a row for each bargain in :data:`METHODS`, and ``"auto"``
picks the cheapest whose error the caller allows.

Every result is checked by two identities that cost next to nothing,

.. math:: \sum_i \sigma_i^2 = \|P\|_F^2, \qquad \sum_i \sigma_i^4 = \|P^\top P\|_F^2

(the second where a Gram matrix was made), and a matrix that fails them, or whose iteration did not converge, is
decomposed again by float64 SVD and counted. Beyond that, ``"auto"`` bounds the float64 Gram route's error from the
spectrum it found: with eigenvalues known to :math:`\delta = 8\varepsilon\sigma_1^2` (Weyl),

.. math:: \max_k |\Delta c_k| \le \sum_i \min(\sqrt\delta, \delta / \sigma_i) \Big/ \sum_i \sigma_i,

and a matrix whose bound exceeds the tolerance (one with a large null space, say) goes to float64 SVD too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.linalg._gram import Spectra, run_gram, run_gram32, run_svd, run_svd32


@dataclass(frozen=True)
class Method:
    """One way to singular values.

    Args:
        run: ``run(P (b, n, m)) -> Spectra``.
        dtype: The precision it works in.
        error: ``error(n) -> float``: the largest error of a nuclear-fraction curve at any index that was measured
            on real attention matrices of that size, with a margin; infinite where it must not be used.
        resolves_numerical_rank: Whether values near float32's rounding, max(n, m) ε σ₁, mean anything.
        description: One line for people.
        backward: Error of the eigenvalues it finds, as a multiple of σ₁²; None where no bound is drawn from it.
    """

    run: Callable[[Tensor], Spectra]
    dtype: torch.dtype
    error: Callable[[int], float]
    resolves_numerical_rank: bool
    description: str
    backward: float | None = None


@dataclass(frozen=True)
class Decomposition:
    """Singular values and how they were had.

    Args:
        sigma: float64, largest first, ``(*lead, min(n, m))``.
        method: The method that was used (what ``"auto"`` chose).
        retries: Matrices decomposed again by float64 SVD: not converged, or an identity did not hold.
        refined: Matrices decomposed again by float64 SVD because "auto" could not bound their error by the tolerance.
        residual: Worst relative residual of the two identities in what is returned.
        audited: Matrices that were also decomposed in float64, to compare (float32 methods with the float64 Gram
            route, the others with float64 SVD).
        audit_error: Worst difference of their nuclear-fraction curves at any index; 0 where none was compared.
    """

    sigma: Tensor
    method: str
    retries: int
    refined: int
    residual: float
    audited: int
    audit_error: float


def singular_values(
    P: Float[Tensor, "*lead n m"], *, method: str = "auto", tolerance: float = 1e-6
) -> Float[Tensor, "*lead r"]:
    """Singular values of each matrix, largest first.

    Args:
        P: ``(*lead, n, m)``, float32 or float64 (bfloat16 and float16 are taken to float32 first; their own rounding,
            up to 2e-3 of a curve in bfloat16, cannot be undone). Square or not, causal or not, zero rows allowed.
        method: ``"auto"`` or a row of :data:`METHODS`.
        tolerance: Largest allowed error of :func:`~rankscope.linalg.rank.nuclear_fraction` at any index; only
            ``"auto"`` looks at it.

    Returns:
        ``(*lead, min(n, m))`` in float64, non-negative, on ``P``'s device.

    Raises:
        RankscopeError: ``P`` is not a floating-point batch of matrices or holds NaN or infinity; the method is
            unknown; no method is as exact as ``tolerance``; float64 SVD did not converge.

    Example:
        >>> singular_values(torch.diag(torch.tensor([0.5, 2.0]))).tolist()
        [2.0, 0.5]
    """
    return decompose(P, method=method, tolerance=tolerance).sigma


def decompose(
    P: Float[Tensor, "*lead n m"],
    *,
    method: str = "auto",
    tolerance: float = 1e-6,
    audit: Iterable[int] = (),
) -> Decomposition:
    """:func:`singular_values`, with the record of how they were had.

    Args:
        P: As there.
        method: As there.
        tolerance: As there.
        audit: Positions (in the flattened ``lead``) of matrices to decompose in float64 too and compare; their
            result is not replaced, so that it does not depend on who is audited.

    Returns:
        The singular values with method, retries, worst residual and audit.

    Raises:
        RankscopeError: As there; an ``audit`` position that is not in the batch.

    Example:
        >>> decompose(torch.eye(3).expand(2, 3, 3)).method
        'gram'
    """
    matrices = _as_batch(P)
    count, n, m = matrices.shape
    name = choose(n, m, tolerance) if method == "auto" else method
    chosen = METHODS[name]
    spectra = chosen.run(matrices)
    sigma = spectra.sigma
    residual = _residual(spectra)
    failed = _failed(matrices, spectra, residual, chosen.dtype)
    loose = _loose(sigma, chosen, tolerance) - failed if method == "auto" else set[int]()
    for i in sorted(failed | loose):
        again = run_svd(matrices[i : i + 1])
        if again.sigma.isnan().any():
            raise RankscopeError(
                f"`P` must have a spectrum that LAPACK converges on, matrix {i} of {count} has none in float64: "
                "leave that window out"
            )
        sigma[i] = again.sigma[0]
        residual[i] = _residual(again)[0]
    positions = list(audit)
    audit_error = max((_audit(matrices, sigma, i, chosen) for i in positions), default=0.0)
    return Decomposition(
        sigma=sigma.view(*P.shape[:-2], min(n, m)),
        method=name,
        retries=len(failed),
        refined=len(loose),
        residual=float(residual.max()) if count else 0.0,
        audited=len(positions),
        audit_error=audit_error,
    )


def choose(n: int, m: int, tolerance: float) -> str:
    """Name the cheapest method whose curve error at this size is within ``tolerance``.

    Raises:
        RankscopeError: There is none.

    Example:
        >>> choose(512, 512, 1e-3), choose(512, 512, 1e-6), choose(4096, 4096, 1e-3)
        ('gram32', 'gram', 'gram')
    """
    for name, method in METHODS.items():
        if method.error(max(n, m)) <= tolerance:
            return name
    best = min(method.error(max(n, m)) for method in METHODS.values())
    raise RankscopeError(
        f"`tolerance` must be at least {best:g}, the error of float64 SVD, got {tolerance:g}: ask for less"
    )


def _gram32_error(n: int) -> float:
    """Measured: 3.2e-4 at 512, 6.2e-4 at 1,024 and 1.5e-3 at 4,096 rows, where it is no longer used."""
    return 1e-3 if n <= 1024 else 2e-3 if n < 4096 else float("inf")


# The cheapest first: "auto" takes the first that is exact enough.
METHODS: Registry[Method] = Registry(
    "method",
    {
        "gram32": Method(
            run_gram32, torch.float32, _gram32_error, False, "eigenvalues of the centred Gram matrix, float32"
        ),
        "gram": Method(
            run_gram,
            torch.float64,
            lambda n: 1e-8,
            True,
            "eigenvalues of the Gram matrix, float64",
            backward=8 * torch.finfo(torch.float64).eps,
        ),
        "svd32": Method(run_svd32, torch.float32, lambda n: 1e-6, True, "singular value decomposition, float32"),
        "svd": Method(run_svd, torch.float64, lambda n: 1e-12, True, "singular value decomposition, float64"),
    },
)


def _as_batch(P: Tensor) -> Tensor:
    """Return ``P`` as ``(b, n, m)`` in float32 or float64, or say what is wrong with it."""
    if P.dim() < 2 or not P.is_floating_point():
        raise RankscopeError(
            f"`P` must be a floating-point tensor (*lead, n, m), got {P.dtype} {tuple(P.shape)}: "
            "pass one matrix or a batch of matrices"
        )
    n, m = P.shape[-2:]
    if not n or not m:
        raise RankscopeError(f"`P` must have rows and columns, got {tuple(P.shape)}: leave empty windows out")
    matrices = P.detach().reshape(-1, n, m)
    if matrices.dtype not in (torch.float32, torch.float64):
        matrices = matrices.float()
    return matrices


def _residual(spectra: Spectra) -> Tensor:
    """Return the worse relative residual of the two identities for each matrix."""
    tiny = torch.finfo(torch.float64).tiny
    squares = spectra.sigma.square()
    residual = (squares.sum(-1) - spectra.squared_norm).abs() / spectra.squared_norm.clamp(min=tiny)
    if spectra.gram_squared is not None:
        fourth = (squares.square().sum(-1) - spectra.gram_squared).abs() / spectra.gram_squared.clamp(min=tiny)
        residual = torch.maximum(residual, fourth)
    return residual


def _failed(matrices: Tensor, spectra: Spectra, residual: Tensor, dtype: torch.dtype) -> set[int]:
    """Return the matrices whose identities do not hold or whose squares leave float32; raise on NaN and infinity."""
    # Rounding of sums of this length; a wrong algorithm misses by orders of magnitude more.
    holds = residual <= 16 * max(matrices.shape[1:]) * torch.finfo(dtype).eps
    safe = (spectra.squared_norm > 1e-12) & (spectra.squared_norm < 1e12)
    failed = set[int]()
    for i in (~(holds & safe)).nonzero().flatten().tolist():
        if not matrices[i].isfinite().all():
            raise RankscopeError(
                f"`P` must be finite, got NaN or infinity in matrix {i} of {len(matrices)}: "
                "leave that window out, or look for the overflow in the model's logits"
            )
        if matrices[i].any():
            failed.add(i)
    return failed


def _loose(sigma: Tensor, method: Method, tolerance: float) -> set[int]:
    """Return the matrices whose curve error cannot be bounded by the tolerance (see the module's text)."""
    if method.backward is None:
        return set()
    delta = method.backward * sigma[:, :1].square()
    bound = torch.minimum(delta.sqrt(), delta / sigma).sum(-1) / sigma.sum(-1)
    return set((bound > tolerance).nonzero().flatten().tolist())


def _audit(matrices: Tensor, sigma: Tensor, position: int, method: Method) -> float:
    """Return the worst difference between one matrix's curve and float64's."""
    if not 0 <= position < len(matrices):
        raise RankscopeError(f"`audit` must hold positions below {len(matrices)}, got {position}: count from 0")
    # The Gram matrix in float64 is exact enough to judge float32, and costs less than half an SVD.
    judge = run_gram if method.dtype == torch.float32 else run_svd
    exact = judge(matrices[position : position + 1]).sigma[0]
    given = sigma[position]
    difference = given.cumsum(0) / given.sum() - exact.cumsum(0) / exact.sum()
    return float(difference.nan_to_num().abs().max())
