r"""The spectrum of a context map that is never written down: block Lanczos on :math:`P^\top P`, and its open rest.

A run multiplies one random block by :math:`P^\top P` again and again and keeps an orthonormal basis of all blocks.
On that basis :math:`P^\top P` is a small block-tridiagonal T. Its eigenvalues (Ritz values) approach the largest
squared singular values, and count once each when their residual says so. The others are counted by quadrature: an
eigenvector's weight in the first block says how many singular values it stands for. The tail is scaled to the exact
:math:`\|P\|_F^2` (which takes away most of the noise), once for T as it is (Gauss) and once for T extended so that
0 is an eigenvalue (Gauss-Radau). For a square root, Gauss is too high and Radau too low for each starting vector;
after the scaling that is no theorem any more but what is seen. So the *band* is their span, widened by three
standard errors of a jackknife over the starting vectors, by a tenth of its widest place and by the effect of
rounding. The band's cover is therefore empirical, not proved: ``benchmarks/experiments/matrix_free.py`` counts it
against dense spectra.

Rounding of *products* would be an error of :math:`P^\top P`, and hide all singular values below its root: in float32
one thousandth, which at 16,384 tokens is where most of them lie. So the basis and the products are float64 whatever
P's entries are. What rounding is left is that of the entries, an error of P itself, which moves a singular value by
no more than its own size; one product with float64 entries measures it.

References:
    Golub and Meurant, "Matrices, Moments and Quadrature with Applications", Princeton University Press 2010.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope.linalg.context_map import ContextMap
from rankscope.linalg.decompose import singular_values

# A Ritz value whose residual is within this share of it counts as found.
FOUND = 0.02
# Standard errors of the jackknife that widen the band on either side.
STANDARD_ERRORS = 3.0
# Share of a band's widest span that is added everywhere.
SHAPE = 0.1
# Error of the eigenvalues of a Gram matrix made in some precision, as a multiple of its spacing and of the largest.
BACKWARD = 8.0
# Below this many entries P is written down when Lanczos vectors would fill half the space.
DENSE_ENTRIES = 2**26
# Seconds of work after which a run that has a state file writes it.
SAVE_EVERY = 30.0


@dataclass(frozen=True)
class MatrixFreeSpectrum:
    """What a run knows about the spectrum of an ``n x m`` map; ``r = min(n, m)``. All float64, on the CPU.

    Args:
        sigma: The largest singular values, as many as were asked for; from below, to rounding.
        sigma_error: For each, a distance within which a true singular value lies.
        found: How many leading values have converged.
        frobenius_squared: Squared Frobenius norm of P, exact to rounding.
        nuclear_norm: ``(low, middle, high)``.
        effective_rank: ``(low, middle, high)``, of all σ as :func:`rankscope.linalg.rank.effective_rank` has it.
        stable_rank: ``(low, middle, high)``: the exact Frobenius norm over σ₁ and its error.
        nuclear_fraction_low: Lower edge of the band of the share of Σσ in the first 1, …, r values, ``(r)``.
        nuclear_fraction: Its middle.
        nuclear_fraction_high: Its upper edge.
        energy_fraction_low: The same of σ².
        energy_fraction: Its middle.
        energy_fraction_high: Its upper edge.
        passes: Products with ``P.T @ P`` that were made.
        block: Starting vectors.
        rounding: Size of the eigenvalues of ``P.T @ P`` that rounding makes: σ below its root is not resolved.
        is_exact: Whether P was small enough to be decomposed whole; the band then has no width.
    """

    sigma: Tensor
    sigma_error: Tensor
    found: int
    frobenius_squared: float
    nuclear_norm: tuple[float, float, float]
    effective_rank: tuple[float, float, float]
    stable_rank: tuple[float, float, float]
    nuclear_fraction_low: Tensor
    nuclear_fraction: Tensor
    nuclear_fraction_high: Tensor
    energy_fraction_low: Tensor
    energy_fraction: Tensor
    energy_fraction_high: Tensor
    passes: int
    block: int
    rounding: float
    is_exact: bool

    @property
    def width(self) -> float:
        """Widest place of the two bands."""
        nuclear = (self.nuclear_fraction_high - self.nuclear_fraction_low).max()
        return float(torch.maximum(nuclear, (self.energy_fraction_high - self.energy_fraction_low).max()))


@dataclass(frozen=True)
class _Rule:
    """A quadrature rule: eigenvalues of T, largest first, and the weight of each in each starting vector."""

    theta: Tensor
    weights: Tensor


class BlockLanczos:
    """A run that can be read, continued and saved at any pass.

    Laws: ``extend(a)`` and ``extend(b)`` equal ``extend(a + b)``, also with :meth:`save_state` and
    :meth:`load_state` between them, to the last bit on one machine.

    Args:
        context_map: P.
        block: Starting vectors; more make less noise and find more values, more passes narrow the band sooner.
        generator: Draws the starting vectors, on the CPU.

    Raises:
        RankscopeError: ``block`` is below 2 (the noise is told from the vectors' differences); at the first pass,
            fewer queries than keys.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> P = ContextMap(torch.randn(600, 4, generator=generator), torch.randn(600, 4, generator=generator))
        >>> run = BlockLanczos(P, block=8, generator=generator)
        >>> run.extend(12)
        >>> spectrum = run.spectrum(rank=4)
        >>> exact = torch.linalg.svdvals(P.dense().double())
        >>> bool(((exact[:4] - spectrum.sigma).abs() <= spectrum.sigma_error).all())
        True
    """

    def __init__(self, context_map: ContextMap, *, block: int = 32, generator: torch.Generator) -> None:
        if block < 2:
            raise RankscopeError(f"`block` must be at least 2, got {block}: the noise is told from differences")
        self.context_map = context_map
        m = context_map.shape[1]
        self.block = min(block, m)
        start = torch.randn(m, self.block, generator=generator, dtype=torch.float64)
        self._basis = [torch.linalg.qr(start).Q.to(context_map.device).contiguous()]
        self._diagonal: list[Tensor] = []
        self._below: list[Tensor] = []

    @property
    def passes(self) -> int:
        """Products made so far."""
        return len(self._diagonal)

    @property
    def is_exhausted(self) -> bool:
        """Whether the basis holds half of a space small enough to be decomposed whole."""
        n, m = self.context_map.shape
        return (self.passes + 1) * self.block > m // 2 and n * m <= DENSE_ENTRIES

    def extend(self, passes: int) -> None:
        """Make more passes; none where P can be, and will be, decomposed whole."""
        for _ in range(passes):
            if self.is_exhausted:
                return
            if self.context_map.shape[0] < self.context_map.shape[1]:
                raise RankscopeError(
                    f"`context_map` must have at least as many queries as keys, got {self.context_map.shape}: "
                    "decompose a wide map whole, or pass all queries"
                )
            if (self.passes + 2) * self.block > self.context_map.shape[1]:
                raise RankscopeError(
                    f"`passes` must leave room in {self.context_map.shape[1]} dimensions, got a basis of "
                    f"{(self.passes + 2) * self.block}: take fewer passes or a smaller `block`"
                )
            last = self._basis[-1]
            image = self.context_map.gram_matmul(last)
            coupling = last.mT @ image
            self._diagonal.append(((coupling + coupling.mT) / 2).cpu())
            following, below = self._orthonormal(image)
            self._basis.append(following)
            self._below.append(below.cpu())

    def spectrum(self, rank: int = 64) -> MatrixFreeSpectrum:
        """Read the run: see :class:`MatrixFreeSpectrum`.

        Args:
            rank: How many leading singular values to return.

        Raises:
            RankscopeError: No pass was made yet, or ``rank`` is below 1.
        """
        if rank < 1:
            raise RankscopeError(f"`rank` must be at least 1, got {rank}")
        if self.is_exhausted:
            return self._exact(rank)
        if not self.passes:
            raise RankscopeError("a run without passes knows nothing: call `extend(passes)` first")
        return self._banded(rank)

    def save_state(self, path: Path | str) -> None:
        """Write the run to a safetensors file, whole or not at all."""
        tensors = {f"basis.{i}": block.contiguous() for i, block in enumerate(self._basis)}
        for name in ("diagonal", "below"):
            tensors |= {f"{name}.{i}": block.contiguous() for i, block in enumerate(getattr(self, f"_{name}"))}
        path = Path(path)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        save_file(tensors, temporary, metadata={"passes": str(self.passes), "map": fingerprint(self.context_map)})
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)

    @classmethod
    def load_state(cls, path: Path | str, context_map: ContextMap) -> "BlockLanczos":
        """Continue a saved run on the same map.

        Raises:
            RankscopeError: The file belongs to another map.
        """
        run = cls.__new__(cls)
        run.context_map = context_map
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            if metadata["map"] != fingerprint(context_map):
                raise RankscopeError(
                    f"`path` {str(path)!r} is a run on another map ({metadata['map']}), not on this one "
                    f"({fingerprint(context_map)}): start anew"
                )
            passes = int(metadata["passes"])
            run._basis = [file.get_tensor(f"basis.{i}").clone().to(context_map.device) for i in range(passes + 1)]
            run._diagonal = [file.get_tensor(f"diagonal.{i}") for i in range(passes)]
            run._below = [file.get_tensor(f"below.{i}") for i in range(passes)]
        run.block = run._basis[0].shape[1]
        return run

    def _orthonormal(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Split a block into an orthonormal one, orthogonal to the basis, and its coefficients.

        Orthogonalised twice, the second time at unit length, so a block that is rounding noise, or nothing, still
        gives new directions: the run goes on beyond an invariant subspace as if started afresh.
        """
        coefficients = torch.eye(self.block, dtype=torch.float64, device=block.device)
        for attempt in range(5):
            for known in self._basis:
                block = block - known @ (known.mT @ block)
            Q, R = torch.linalg.qr(block)
            coefficients = R @ coefficients
            # Row by row, as a loaded state lies too: the order of sums, and so the last bits, depend on it.
            block = Q.contiguous()
            if attempt and float(R.diagonal().abs().min()) > 0.5:
                break
        return block, coefficients

    def _rules(self, floor: float) -> tuple[_Rule, _Rule, Tensor]:
        """Gauss's and Gauss-Radau's rule, and the residual of each of Gauss's eigenvalues."""
        b, size = self.block, self.block * self.passes
        T = torch.zeros(size + b, size + b, dtype=torch.float64)
        for i in range(self.passes):
            here, beyond = slice(b * i, b * i + b), slice(b * i + b, b * i + 2 * b)
            T[here, here] = self._diagonal[i]
            T[beyond, here] = self._below[i]
            T[here, beyond] = self._below[i].mT
        below = self._below[-1]
        theta, Y = torch.linalg.eigh(T[:size, :size])
        residual = torch.linalg.vector_norm(below @ Y[-b:], dim=0)
        inverse = (Y[-b:] / theta.clamp_min(floor)) @ Y[-b:].mT
        gauss = _Rule(theta.flip(0).clamp_min(0), Y[:b].flip(1).square())
        T[size:, size:] = below @ inverse @ below.mT
        theta, Y = torch.linalg.eigh(T)
        return gauss, _Rule(theta.flip(0).clamp_min(0), Y[:b].flip(1).square()), residual.flip(0)

    def _banded(self, rank: int) -> MatrixFreeSpectrum:
        squared = self.context_map.frobenius_squared()
        eps = torch.finfo(self.context_map.dtype).eps
        product = BACKWARD * torch.finfo(torch.float64).eps * self._largest()
        rounding = product + self._entries**2
        gauss, radau, residual = self._rules(max(rounding, torch.finfo(torch.float64).tiny))
        is_found = residual + rounding <= FOUND * gauss.theta
        found = int(is_found.cumprod(0).sum())
        reading = _Reading(self.context_map.shape, eps, squared, found, product, self._entries)
        ends = np.stack([reading.read(rule) for rule in (gauss, radau)])
        left_out = np.stack(
            [
                np.mean([reading.read(rule, [c for c in range(self.block) if c != out]) for rule in (gauss, radau)], 0)
                for out in range(self.block)
            ]
        )
        margin = STANDARD_ERRORS * np.sqrt((self.block - 1) * left_out.var(0)) + reading.blur(gauss)
        # Where the two rules' curves cross, their span says nothing of the tail's shape; and of σ² the two rules agree
        # more than they are right, so its curve takes the nuclear one's allowance by the tails' shares.
        r = reading.r
        shape = SHAPE * np.ptp(ends[:, :r], axis=0).max()
        tails = 1 - ends.mean(0)[[found - 1, r + found - 1]] if 0 < found < r else np.ones(2)
        margin[:r] += shape
        margin[r : 2 * r] += shape * min(1.0, tails[1] / max(tails[0], 1e-12))
        low, middle, high = ends.min(0) - margin, ends.mean(0), ends.max(0) + margin
        sigma = gauss.theta[:rank].sqrt()
        # Weyl's bound, whatever the structure of the error: eigenvalues for the products', singular values for P's.
        reach = residual[:rank] + product
        sigma_error = sigma - (gauss.theta[:rank] - reach).clamp_min(0).sqrt() + self._entries
        first, error = float(sigma[0]), float(sigma_error[0])
        return _assemble(
            MatrixFreeSpectrum(
                sigma=sigma,
                sigma_error=sigma_error,
                found=found,
                frobenius_squared=squared,
                nuclear_norm=(0.0, 0.0, 0.0),
                effective_rank=(0.0, 0.0, 0.0),
                stable_rank=(
                    squared / (first + error) ** 2,
                    squared / first**2,
                    squared / (first - error) ** 2 if first > error else inf,
                ),
                **_no_curves(),
                passes=self.passes,
                block=self.block,
                rounding=rounding,
                is_exact=False,
            ),
            (low, middle, high),
        )

    @cached_property
    def _entries(self) -> float:
        """Norm of the rounding error of P's entries: float32's products against float64's.

        A random error E of norm e has ``|E q| = e / 2`` for a unit vector q. Systematic errors show in the direction
        of the column sums, near to that of the largest singular value.
        """
        if self.context_map.dtype == torch.float64:
            return BACKWARD * torch.finfo(torch.float64).eps * self._largest() ** 0.5
        sums = self.context_map.column_sums()
        vectors = torch.cat([self._basis[0], (sums / torch.linalg.vector_norm(sums)).unsqueeze(-1)], 1)
        error = self.context_map.matmul(vectors) - self.context_map.double().matmul(vectors)
        return 2 * float(torch.linalg.vector_norm(error, dim=0).max())

    def _largest(self) -> float:
        return max(float(torch.linalg.matrix_norm(block, 2)) for block in self._diagonal)

    def _exact(self, rank: int) -> MatrixFreeSpectrum:
        P = self.context_map.dense()
        sigma = singular_values(P.unsqueeze(0), tolerance=1e-6)[0].double().cpu()
        energy = sigma.square()
        nuclear, squared = float(sigma.sum()), self.context_map.frobenius_squared()
        shares = sigma / nuclear
        effective = float(torch.special.entr(shares).sum().exp())
        values = np.concatenate(
            [(sigma.cumsum(0) / nuclear).numpy(), (energy.cumsum(0) / energy.sum()).numpy(), [nuclear, effective]]
        )
        stable = squared / float(energy[0])
        return _assemble(
            MatrixFreeSpectrum(
                sigma=sigma[:rank],
                sigma_error=torch.full_like(sigma[:rank], float(torch.finfo(P.dtype).eps * sigma[0])),
                found=len(sigma),
                frobenius_squared=squared,
                nuclear_norm=(0.0, 0.0, 0.0),
                effective_rank=(0.0, 0.0, 0.0),
                stable_rank=(stable, stable, stable),
                **_no_curves(),
                passes=self.passes,
                block=self.block,
                rounding=0.0,
                is_exact=True,
            ),
            (values, values, values),
        )


class _Reading:
    """Turns a rule into one vector: the nuclear and the energy curve, the nuclear norm and the effective rank."""

    def __init__(
        self, shape: tuple[int, int], eps: float, squared: float, found: int, product: float, entries: float
    ) -> None:
        self.r, self.m, self.eps = min(shape), shape[1], eps
        self.squared, self.found, self.product, self.entries = squared, found, product, entries

    def read(self, rule: _Rule, columns: list[int] | None = None) -> np.ndarray:
        """Read a rule by some of its starting vectors."""
        sigma, counts = self._spectrum(rule, columns)
        index = np.arange(1, self.r + 1)
        ends = np.concatenate([[0.0], counts.cumsum()])
        curves = []
        for power in (1, 2):
            running = np.interp(index, ends, np.concatenate([[0.0], (counts * sigma**power).cumsum()]))
            curves.append(running / running[-1])
            if power == 1:
                nuclear = running[-1]
        shares = sigma / nuclear
        entropy = -(counts * shares * np.log(np.where(shares > 0, shares, 1.0))).sum()
        return np.concatenate([*curves, [nuclear, np.exp(entropy)]])

    def blur(self, rule: _Rule) -> np.ndarray:
        """How far rounding can have moved each entry of :meth:`read`.

        A random error of the eigenvalues, of norm δ, moves one of θ > δ in second order only, by δ² / θ, and makes
        those below δ anything up to δ; one of P does the same to singular values.
        """
        sigma, counts = self._spectrum(rule, None)
        size = np.maximum(sigma, 1e-100)
        moved = counts * (
            np.minimum(self.product**0.5, self.product**2 / (2 * size**3))
            + np.minimum(self.entries, self.entries**2 / (2 * size))
            + BACKWARD * self.eps * sigma
        )
        nuclear = (counts * sigma).sum()
        share = moved.sum() / nuclear
        energy = BACKWARD * self.eps
        entropy = share * (1 + np.log(self.r))
        effective = self.read(rule)[-1]
        return np.concatenate(
            [np.full(self.r, share), np.full(self.r, energy), [moved.sum(), effective * np.expm1(entropy)]]
        )

    def _spectrum(self, rule: _Rule, columns: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
        """Singular values and how many each stands for, largest first; the counts add up to m."""
        weights = (rule.weights if columns is None else rule.weights[columns]).mean(0)
        counts, theta, found = torch.ones_like(rule.theta), rule.theta.clone(), self.found
        mass = float(weights[found:].sum())
        if mass < 0.5 * (1 - found / self.m):
            # The values that were found stand for many equal ones (as the identity's): only weights can count them.
            found, mass = 0, float(weights.sum())
        if mass > 0:
            counts[found:] = weights[found:] * (self.m - found) / mass
            energy = float((counts * theta)[found:].sum())
            rest = self.squared - float(theta[:found].sum())
            # Where the rest is itself rounding, the scale goes to one.
            slack = BACKWARD * self.eps * self.squared
            theta[found:] *= max(rest + slack, 0.0) / (energy + slack)
        return theta.sqrt().numpy(), counts.numpy()


def matrix_free_spectrum(
    context_map: ContextMap,
    *,
    rank: int = 64,
    block: int = 32,
    passes: int = 64,
    width: float | None = None,
    generator: torch.Generator,
    state: Path | None = None,
) -> MatrixFreeSpectrum:
    r"""Singular values, nuclear norm and both rank curves of P with a band, in O(n · block · passes) memory.

    Args:
        context_map: P, ``(n, m)``.
        rank: How many leading singular values to return.
        block: Random starting vectors, all of them run at once.
        passes: Products with :math:`P^\top P` at most; each takes little more than one product with P.
        width: Stop as soon as no place of a band is wider; ``None`` makes all passes.
        generator: Draws the starting vectors.
        state: A file that keeps the run, written every half minute: a call with the same arguments goes on from its
            last pass, to the same values. It stays; one of another run is written over.

    Returns:
        The spectrum; ``width`` in it tells what was reached.

    Raises:
        RankscopeError: ``block``, ``passes``, ``rank`` or ``width`` is out of range, or the map is broken.

    Example:
        >>> P = ContextMap(torch.zeros(40, 2), torch.zeros(40, 2))
        >>> spectrum = matrix_free_spectrum(P, rank=1, generator=torch.Generator().manual_seed(0))
        >>> round(spectrum.sigma.item(), 4), spectrum.is_exact
        (1.0, True)
    """
    if passes < 1:
        raise RankscopeError(f"`passes` must be at least 1, got {passes}")
    if width is not None and not width > 0:
        raise RankscopeError(f"`width` must be positive, got {width}: None makes all passes")
    run = BlockLanczos(context_map, block=block, generator=generator)
    if state is not None:
        run = _continued(run, state, passes)
    saved = time.monotonic()
    for stop in _checkpoints(passes) if width is not None else iter([passes]):
        # A run that was continued beyond a look had not reached its width there.
        if run.passes > stop:
            continue
        while run.passes < stop and not run.is_exhausted:
            run.extend(1)
            if state is not None and time.monotonic() - saved >= SAVE_EVERY:
                run.save_state(state)
                saved = time.monotonic()
        spectrum = run.spectrum(rank)
        if spectrum.is_exact or (width is not None and spectrum.width <= width):
            break
    return spectrum


def _checkpoints(passes: int) -> Iterator[int]:
    """Passes after which to look: a look costs the cube of the passes, so steps grow by a quarter."""
    stop = 12
    while stop < passes:
        yield stop
        stop = max(stop + 1, stop * 5 // 4)
    yield passes


def _continued(fresh: BlockLanczos, state: Path, passes: int) -> BlockLanczos:
    """Return the run that a file holds if it started as the fresh one does and is not beyond it, else the fresh one."""
    try:
        run = BlockLanczos.load_state(state, fresh.context_map)
    except (OSError, SafetensorError, KeyError, RankscopeError):
        return fresh
    same = torch.equal(run._basis[0], fresh._basis[0]) and run.passes <= passes
    return run if same else fresh


def fingerprint(context_map: ContextMap) -> str:
    """Tell maps apart: shape, precision and squared norm to ten digits."""
    n, m = context_map.shape
    return f"{n} x {m}, {context_map.dtype}, squared norm {context_map.frobenius_squared():.9e}"


def _no_curves() -> dict[str, Any]:
    names = ("nuclear_fraction", "energy_fraction")
    return {f"{name}{edge}": torch.empty(0) for name in names for edge in ("_low", "", "_high")}


def _assemble(spectrum: MatrixFreeSpectrum, edges: tuple[np.ndarray, np.ndarray, np.ndarray]) -> MatrixFreeSpectrum:
    """Fill in the curves and scalars: a share lies in [0, 1], grows with the index and ends at one."""
    r = (len(edges[0]) - 2) // 2
    low, mid, high = edges
    curves: dict[str, Any] = {}
    for position, name in enumerate(("nuclear_fraction", "energy_fraction")):
        below, middle, above = (torch.from_numpy(edge[position * r : (position + 1) * r].copy()) for edge in edges)
        share = torch.arange(1, r + 1, dtype=torch.float64) / r
        # Values fall with the index, so the first j hold at least j / r.
        curves[f"{name}_low"] = torch.maximum(below, share).cummax(0).values.clamp(max=1)
        curves[name] = middle.clamp(0, 1)
        curves[f"{name}_high"] = above.clamp(max=1).flip(0).cummin(0).values.flip(0)
    nuclear, effective = ((float(low[i]), float(mid[i]), float(high[i])) for i in (2 * r, 2 * r + 1))
    return replace(spectrum, nuclear_norm=nuclear, effective_rank=effective, **curves)
