"""The ways from a batch of matrices to singular values: LAPACK's three steps on a Gram matrix, or an SVD."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, nan

import torch
from torch import Tensor

from rankscope.linalg import _lapack


@dataclass(frozen=True)
class Spectra:
    """What a method hands back for a batch.

    Args:
        sigma: float64, largest first, ``(b, r)``; NaN where the iteration did not converge.
        squared_norm: Squared Frobenius norm of each matrix, taken apart from ``sigma``, ``(b)``.
        gram_squared: Squared Frobenius norm of each Gram matrix, ``(b)``, if the method made them.
    """

    sigma: Tensor
    squared_norm: Tensor
    gram_squared: Tensor | None = None


def run_svd(P: Tensor) -> Spectra:
    """Decompose by float64 SVD, the yardstick."""
    return Spectra(_by_ones(torch.linalg.svdvals, P.double()), _squared_norm(P))


def run_svd32(P: Tensor) -> Spectra:
    """Decompose by float32 SVD: what people use, and what speed is told against."""
    return Spectra(_by_ones(torch.linalg.svdvals, P.float()), _squared_norm(P))


def run_gram(P: Tensor) -> Spectra:
    """Take the eigenvalues of the float64 Gram matrix of the smaller side."""
    solver = _lapack.load(torch.float64) if P.device.type == "cpu" else None
    tall = P if P.shape[-2] >= P.shape[-1] else P.mT
    if solver is None:
        grams = [X.double().mT @ X.double() for X in _apart(tall)]
        return _from_gram(torch.cat(grams), _squared_norm(P))
    return _each(tall, solver, _copy_into)


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
    tall = P if P.shape[-2] >= P.shape[-1] else P.mT
    if solver is None:
        return _from_gram(torch.cat([_centred_gram(X.float()) for X in _apart(tall)]), _squared_norm(P))
    return _each(tall, solver, _centre_into)


def _squared_norm(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=torch.float64).square()


class _Workspace:
    """Buffers of one thread for one size: fresh pages cost as much as the multiplication at 128 rows."""

    def __init__(self, n: int, m: int, dtype: torch.dtype) -> None:
        self.X = torch.empty(n, m, dtype=dtype)
        self.flat = self.X.view(-1)
        self.weights = torch.full((n,), 1 / n, dtype=dtype)
        self.left = torch.ones(2, n, dtype=dtype)
        self.right = torch.empty(2, m, dtype=dtype)
        # The triangle that `syrk` leaves alone stays zero, so the squared norm is a plain dot product.
        self.gram = torch.zeros(m, m + _lapack.PADDING, dtype=dtype)
        self.scratch = torch.empty(3 + _lapack.BLOCK, m, dtype=dtype)


_local = threading.local()


# Buffers above this many entries (32 MiB in float64) are not kept: there the arithmetic dwarfs the page faults.
KEPT_ENTRIES = 2**22


def _workspace(n: int, m: int, dtype: torch.dtype) -> _Workspace:
    """Return this thread's buffers, made anew when the size changes (one size at a time is kept)."""
    if n * m > KEPT_ENTRIES:
        return _Workspace(n, m, dtype)
    cached: dict[torch.dtype, _Workspace] = _local.__dict__.setdefault("cached", {})
    if dtype not in cached or cached[dtype].X.shape != (n, m):
        cached[dtype] = _Workspace(n, m, dtype)
    return cached[dtype]


def _each(
    matrices: Tensor, solver: _lapack.SymmetricSolver, fill: Callable[[Tensor, _Workspace], tuple[float, float]]
) -> Spectra:
    """Run LAPACK's three steps on one matrix after the other.

    ``fill`` writes ``work.X`` and returns the matrix's squared norm and what to add to the Gram matrix's corner.
    """
    count, n, m = matrices.shape
    work = _workspace(n, m, solver.dtype)
    eigenvalues = torch.full((count, m), torch.nan, dtype=solver.dtype)
    norms: list[tuple[float, float]] = []
    flat, diagonal, corner = work.gram.view(-1), work.gram.diagonal(), work.gram[0, :1]
    with _lapack.single_threaded():
        for i, P in enumerate(matrices):
            squared, addend = fill(P, work)
            if not isfinite(squared):
                norms.append((nan, nan))
                continue
            solver.gram(work.X, work.gram)
            corner += addend
            norms.append((squared, 2 * float(torch.dot(flat, flat)) - float(torch.dot(diagonal, diagonal))))
            found, converged = solver.eigenvalues(work.gram, work.scratch)
            if converged:
                eigenvalues[i] = found
    squared_norm, gram_squared = torch.tensor(norms, dtype=torch.float64).view(-1, 2).unbind(1)
    return Spectra(_roots(eigenvalues), squared_norm, gram_squared)


def _roots(eigenvalues: Tensor) -> Tensor:
    """Turn ascending eigenvalues of Gram matrices into descending singular values; rounding's negatives are zeros."""
    return eigenvalues.double().flip(-1).clamp(min=0).sqrt()


def _copy_into(P: Tensor, work: _Workspace) -> tuple[float, float]:
    """Write the matrix itself."""
    work.X.copy_(P)
    return float(torch.dot(work.flat, work.flat)), 0.0


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


def _centred_gram(P: Tensor) -> Tensor:
    """Return the Gram matrix of :func:`_centre` with the mean put back, for a batch."""
    centred, corner = _centre(P)
    gram = centred.mT @ centred
    gram[..., 0, 0] += corner
    return gram


def _centre_into(P: Tensor, work: _Workspace) -> tuple[float, float]:
    """Write :func:`_centre` of one matrix in one pass: both corrections are of rank one."""
    # All arithmetic is on the buffer, never on P: the last bits must not depend on where in a batch P lies.
    X = work.X.copy_(P)
    squared = float(torch.dot(work.flat, work.flat))
    mean, axis = work.right
    torch.mv(X.mT, work.weights, out=mean)
    length, first = float(torch.dot(mean, mean)) ** 0.5, float(mean[0])
    if length == 0:
        return squared, 0.0
    # |mean + sign * length * e1|^2 = 2 * half, and its product with the mean is half.
    half = length * (length + abs(first))
    scale = half**-0.5
    axis.copy_(mean)[0] += length if first >= 0 else -length
    axis *= scale
    torch.mv(X, axis, out=work.left[1])
    work.left[1] -= scale * half
    X.addmm_(work.left.mT, work.right, alpha=-1)
    return squared, len(X) * length**2


def _from_gram(gram: Tensor, squared_norm: Tensor) -> Spectra:
    """Take a batch of Gram matrices to singular values with torch alone."""
    gram_squared = torch.linalg.vector_norm(gram, dim=(-2, -1), dtype=torch.float64).square()
    return Spectra(_roots(_by_ones(torch.linalg.eigvalsh, gram)), squared_norm, gram_squared)


def _by_ones(solve: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Solve a batch in float64 terms, each matrix apart: NaN for one that does not converge."""
    return torch.cat([_solved(solve, part) for part in _apart(matrices)])


def _apart(matrices: Tensor) -> list[Tensor]:
    """Cut a batch on the CPU into batches of one, each in memory of its own; elsewhere leave it whole.

    BLAS takes other instructions where a matrix starts off a cache line, as it may inside a batch, and then the last
    bits of a result would depend on its neighbours' sizes.
    """
    if matrices.device.type != "cpu" or not len(matrices):
        return [matrices]
    return [one.clone(memory_format=torch.contiguous_format) for one in matrices.split(1)]


def _solved(solve: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    try:
        return solve(matrices).double()
    except torch.linalg.LinAlgError:
        if len(matrices) == 1:
            return matrices.new_full((1, min(matrices.shape[1:])), torch.nan, dtype=torch.float64)
        return torch.cat([_solved(solve, one) for one in matrices.split(1)])
