r"""Singular values of attention matrices, exactly enough and as fast as libraries allow.

An attention matrix's spectrum has a long tail (of 512 values about 440 hold 99.9 % of the sum), so truncated and
randomised methods do not help. What helps is to skip the singular value decomposition: the eigenvalues of
:math:`P^\top P` need half the work. The price is precision: a relative error ε in the Gram matrix becomes
:math:`\sqrt\varepsilon` in the smallest σ. So there is a row for each bargain in :data:`METHODS`, and ``"auto"``
picks the cheapest whose error the caller allows.

Every result is checked by two identities that cost next to nothing,

.. math:: \sum_i \sigma_i^2 = \|P\|_F^2, \qquad \sum_i \sigma_i^4 = \|P^\top P\|_F^2

(the second where a Gram matrix was made), and a matrix that fails them, or whose iteration did not converge, is
decomposed again by float64 SVD and counted.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.linalg import _lapack


@dataclass(frozen=True)
class Spectra:
    """What a method hands back for a batch.

    Args:
        sigma: float64, largest first, ``(b, r)``; NaN where the iteration did not converge.
        gram_squared: Squared Frobenius norm of each Gram matrix, ``(b)``, if the method made them.
    """

    sigma: Tensor
    gram_squared: Tensor | None = None


@dataclass(frozen=True)
class Method:
    """One way to singular values.

    Args:
        run: ``run(P (b, n, m)) -> Spectra``.
        dtype: The precision it works in.
        error: ``error(n) -> float``: the largest error of a nuclear-fraction curve at any index that was measured
            on real attention matrices of that size, with a margin; infinite where it must not be used.
        description: One line for people.
    """

    run: Callable[[Tensor], Spectra]
    dtype: torch.dtype
    error: Callable[[int], float]
    description: str


@dataclass(frozen=True)
class Decomposition:
    """Singular values and how they were had.

    Args:
        sigma: float64, largest first, ``(*lead, min(n, m))``.
        method: The method that was used (what ``"auto"`` chose).
        retries: Matrices decomposed again by float64 SVD: not converged, or an identity did not hold.
        residual: Worst relative residual of the two identities in what is returned.
        audited: Matrices that were also decomposed by float64 SVD, to compare.
        audit_error: Worst difference of their nuclear-fraction curves at any index; 0 where none was compared.
    """

    sigma: Tensor
    method: str
    retries: int
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
        audit: Positions (in the flattened ``lead``) of matrices to decompose by float64 SVD too and compare; their
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
    squared_norm = _squared_norm(matrices)
    spectra = chosen.run(matrices)
    sigma = spectra.sigma
    residual = _residual(squared_norm, spectra)
    # Rounding of sums of this length; a wrong algorithm misses by orders of magnitude more.
    allowed = 16 * max(n, m) * torch.finfo(chosen.dtype).eps
    failed = [int(i) for i in (~(residual <= allowed)).nonzero()]
    for i in failed:
        again = run_svd(matrices[i : i + 1].double())
        if again.sigma.isnan().any():
            raise RankscopeError(
                f"`P` must have a spectrum LAPACK converges on; matrix {i} of {count} did not in float64"
            )
        sigma[i] = again.sigma[0]
        residual[i] = _residual(squared_norm[i : i + 1], again)[0]
    positions = list(audit)
    error = max((_audit(matrices, sigma, i) for i in positions), default=0.0)
    worst = float(residual.max()) if count else 0.0
    return Decomposition(sigma.view(*P.shape[:-2], min(n, m)), name, len(failed), worst, len(positions), error)


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


def run_svd(P: Tensor) -> Spectra:
    """Decompose by float64 SVD, the yardstick."""
    return Spectra(_svdvals(P.double()))


def run_svd32(P: Tensor) -> Spectra:
    """Decompose by float32 SVD: what people use, and what speed is told against."""
    return Spectra(_svdvals(P.float()).double())


def run_gram(P: Tensor) -> Spectra:
    """Take the eigenvalues of the float64 Gram matrix of the smaller side."""
    solver = _lapack.load(torch.float64) if P.device.type == "cpu" else None
    tall = P if P.shape[-2] >= P.shape[-1] else P.mT
    if solver is None:
        tall = tall.double()
        return _from_gram(tall.mT @ tall)
    return _each(tall, solver, lambda P, work: work.X.copy_(P))


def run_gram32(P: Tensor) -> Spectra:
    r"""Take the eigenvalues of the float32 Gram matrix of the *centred* matrix, and put the mean back exactly.

    With the column means :math:`\mu` and :math:`C = P - 1\mu^\top`,

    .. math:: P^\top P = C^\top C + n\,\mu\mu^\top,

    true of any matrix since :math:`C^\top 1 = 0`. A reflection :math:`H` that takes :math:`\mu` to the first axis
    makes the second part one number, :math:`n|\mu|^2`, in a corner that the reduction never mixes with the rest. So
    the direction of an attention sink, which alone sets the rounding floor of :math:`P^\top P`, no longer does:
    errors shrink by 2 to 2.6 on real heads. A matrix with fewer rows than columns is transposed first.
    """
    solver = _lapack.load(torch.float32) if P.device.type == "cpu" else None
    tall = (P if P.shape[-2] >= P.shape[-1] else P.mT).float()
    if solver is None:
        centred, corner = _centre(tall)
        gram = centred.mT @ centred
        gram[..., 0, 0] += corner
        return _from_gram(gram)
    return _each(tall, solver, _centre_into)


METHODS: Registry[Method] = Registry(
    "method",
    # The cheapest first: "auto" takes the first that is exact enough.
    {
        "gram32": Method(run_gram32, torch.float32, lambda n: 1e-3 if n <= 1024 else 2e-3 if n < 4096 else float("inf"),
                         "eigenvalues of the centred Gram matrix in float32: fast, errors up to 1e-3 of a curve"),
        "gram": Method(run_gram, torch.float64, lambda n: 1e-8, "eigenvalues of the Gram matrix in float64"),
        "svd32": Method(run_svd32, torch.float32, lambda n: 1e-6, "singular value decomposition in float32"),
        "svd": Method(run_svd, torch.float64, lambda n: 1e-12, "singular value decomposition in float64"),
    },
)  # fmt: skip


class _Workspace:
    """Buffers of one thread for one size: fresh pages cost as much as the multiplication at 128 rows."""

    def __init__(self, n: int, m: int, dtype: torch.dtype) -> None:
        self.X = torch.empty(n, m, dtype=dtype)
        # The triangle that `syrk` leaves alone stays zero, so the squared norm is a plain dot product.
        self.gram = torch.zeros(m, m, dtype=dtype)
        self.scratch = torch.empty(3 + _lapack.BLOCK, m, dtype=dtype)


_local = threading.local()


def _workspace(n: int, m: int, dtype: torch.dtype) -> _Workspace:
    """Return this thread's buffers, made anew when the size changes (one size at a time is kept)."""
    cached: dict[torch.dtype, _Workspace] = _local.__dict__.setdefault("cached", {})
    if dtype not in cached or cached[dtype].X.shape != (n, m):
        cached[dtype] = _Workspace(n, m, dtype)
    return cached[dtype]


def _each(
    matrices: Tensor, solver: _lapack.SymmetricSolver, load: Callable[[Tensor, _Workspace], Tensor | float | None]
) -> Spectra:
    """Run LAPACK's three steps on one matrix after the other; ``load`` fills ``work.X``."""
    count, n, m = matrices.shape
    work = _workspace(n, m, solver.dtype)
    sigma = torch.empty(count, m, dtype=torch.float64)
    gram_squared = torch.empty(count, dtype=torch.float64)
    with _lapack.single_threaded():
        for i, P in enumerate(matrices):
            corner = load(P, work)
            solver.gram(work.X, work.gram)
            if isinstance(corner, float):
                work.gram[0, 0] += corner
            flat, diagonal = work.gram.view(-1), work.gram.diagonal()
            gram_squared[i] = 2 * torch.dot(flat, flat).double() - torch.dot(diagonal, diagonal).double()
            eigenvalues, converged = solver.eigenvalues(work.gram, work.scratch)
            sigma[i] = eigenvalues.double().flip(0).clamp(min=0).sqrt() if converged else torch.nan
    return Spectra(sigma, gram_squared)


def _centre(P: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(P - 1 mu^T) H`` and ``n |mu|^2`` (see :func:`run_gram32`) for a batch."""
    n = P.shape[-2]
    mean = P.mean(-2)
    length = torch.linalg.vector_norm(mean, dim=-1)
    axis = mean.clone()
    axis[..., 0] += torch.where(mean[..., 0] < 0, -length, length)
    scale = axis.square().sum(-1)
    axis = axis * torch.where(scale > 0, (2 / scale).sqrt(), 0.0).unsqueeze(-1)
    centred = P - mean.unsqueeze(-2)
    return centred - (centred @ axis.unsqueeze(-1)) * axis.unsqueeze(-2), n * length.square()


def _centre_into(P: Tensor, work: _Workspace) -> float:
    """Write :func:`_centre` of one matrix to ``work.X`` in one pass: both corrections are of rank one."""
    n = P.shape[0]
    mean = torch.mv(P.mT, P.new_full((n,), 1 / n))
    length = float(torch.linalg.vector_norm(mean))
    axis = mean.clone()
    axis[0] += length if axis[0] >= 0 else -length
    axis *= (2 / float(torch.dot(axis, axis))) ** 0.5 if length > 0 else 0.0
    along = torch.mv(P, axis) - torch.dot(mean, axis)
    left = torch.stack([torch.ones_like(along), along], 1)
    torch.addmm(P, left, torch.stack([mean, axis]), alpha=-1, out=work.X)
    return n * length**2


def _from_gram(gram: Tensor) -> Spectra:
    """Take a batch of Gram matrices to singular values with torch alone."""
    try:
        eigenvalues = torch.linalg.eigvalsh(gram)
    except torch.linalg.LinAlgError:
        if len(gram) == 1:
            return Spectra(gram.new_full(gram.shape[:2], torch.nan, dtype=torch.float64))
        return Spectra(torch.cat([_from_gram(one.unsqueeze(0)).sigma for one in gram]))
    squared = torch.linalg.vector_norm(gram, dim=(-2, -1)).double().square()
    return Spectra(eigenvalues.double().flip(-1).clamp(min=0).sqrt(), squared)


def _svdvals(P: Tensor) -> Tensor:
    """Return singular values of a batch, NaN for a matrix whose iteration did not converge."""
    try:
        return torch.linalg.svdvals(P)
    except torch.linalg.LinAlgError:
        if len(P) == 1:
            return P.new_full((1, min(P.shape[1:])), torch.nan)
        return torch.cat([_svdvals(one.unsqueeze(0)) for one in P])


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


def _squared_norm(matrices: Tensor) -> Tensor:
    """Return each matrix's squared Frobenius norm in float64; raise on NaN or infinity."""
    squared = torch.linalg.vector_norm(matrices.flatten(1), dim=1, dtype=torch.float64).square()
    broken = (~squared.isfinite()).nonzero()
    if len(broken):
        raise RankscopeError(
            f"`P` must be finite, got NaN or infinity in matrix {int(broken[0])} of {len(matrices)}: "
            "leave that window out, or look for the overflow in the model's logits"
        )
    return squared


def _residual(squared_norm: Tensor, spectra: Spectra) -> Tensor:
    """Return the worse relative residual of the two identities for each matrix."""
    tiny = torch.finfo(torch.float64).tiny
    squares = spectra.sigma.square()
    residual = (squares.sum(-1) - squared_norm).abs() / squared_norm.clamp(min=tiny)
    if spectra.gram_squared is not None:
        fourth = (squares.square().sum(-1) - spectra.gram_squared).abs() / spectra.gram_squared.clamp(min=tiny)
        residual = torch.maximum(residual, fourth)
    return residual


def _audit(matrices: Tensor, sigma: Tensor, position: int) -> float:
    """Return the worst difference between one matrix's curve and float64 SVD's."""
    if not 0 <= position < len(matrices):
        raise RankscopeError(f"`audit` must hold positions below {len(matrices)}, got {position}: count from 0")
    exact = run_svd(matrices[position : position + 1]).sigma[0]
    given = sigma[position]
    difference = given.cumsum(0) / given.sum() - exact.cumsum(0) / exact.sum()
    return float(difference.nan_to_num().abs().max())
