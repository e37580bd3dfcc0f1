"""What a worker does with one head: its map and its nulls' maps to curves and numbers."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.linalg.decompose import METHODS, decompose
from rankscope.linalg.rank import energy_curve, nuclear_curve, scalars
from rankscope.spectrum.heads import Head, logit_deviation
from rankscope.spectrum.nulls import NULLS, generator_for

# A float64 SVD costs about four of the fast ones, so the check takes a few per cent of the time.
AUDIT_EVERY = 64
SENTENCE_GRID = np.arange(1, 65) / 64


@dataclass(frozen=True)
class Place:
    """Where a head sits: what its random draws are keyed by and its faults are named by."""

    window: int
    layer: int
    head: int

    @property
    def audited(self) -> bool:
        """Whether this head's spectrum is checked against float64 SVD: one in :data:`AUDIT_EVERY`."""
        return (self.window + 7 * self.layer + self.head) % AUDIT_EVERY == 0


@dataclass(frozen=True)
class Plan:
    """What to compute for a head.

    Args:
        method: A name of :data:`rankscope.linalg.decompose.METHODS`, or ``"auto"``.
        tolerance: Largest error of a nuclear fraction that ``auto`` may leave.
        seed: The run's seed.
        points: Values of the index axis, or ``None`` for the fractions of :data:`SENTENCE_GRID`.
    """

    method: str
    tolerance: float
    seed: int
    points: int | None


@dataclass(frozen=True)
class HeadSpectrum:
    """One map's curves, ``(index,)`` each, and scalars, with what the numerics had to do."""

    curves: dict[str, NDArray[np.float64]]
    scalars: dict[str, float]
    notes: dict[str, float]


def head_spectra(
    head: Head, place: Place, names: tuple[str, ...], plan: Plan, deviation: float | None
) -> tuple[float, dict[str, HeadSpectrum]] | str:
    """Measure a head and the nulls that start from it.

    Args:
        head: The head.
        place: Its window, layer and number.
        names: ``"trained"`` and nulls.
        plan: How.
        deviation: The trained head's content-logit deviation, for nulls of another forward; ``None``
            to take this head's own.

    Returns:
        The head's own content-logit deviation and a spectrum for each name; or, when its logits are
        not finite, the reason in words.
    """
    content = head.content_logits()
    if not bool(torch.isfinite(content).all()):
        return f"layer {place.layer}, head {place.head}: non-finite logits"
    allowed = head.allowed()
    own = logit_deviation(content, allowed)
    spectra = {}
    for name in names:
        if name == "trained":
            P = head.map_of(content) if head.weights is None else head.context_map()
            logits = content if head.bias is None else content + head.bias
        else:
            generator = generator_for(plan.seed, name, place.window, place.layer, place.head)
            P = NULLS[name].context_map(head, own if deviation is None else deviation, generator)
            logits = P.clamp_min(torch.finfo(torch.float32).tiny).log()
        spectra[name] = map_spectrum(P, plan, logit_deviation(logits, allowed), audited=place.audited)
    return own, spectra


def map_spectrum(P: Tensor, plan: Plan, logit_sd: float, *, audited: bool = False) -> HeadSpectrum:
    """Curves and scalars of one dense map ``(n, m)``; an audited one is decomposed by float64 SVD too."""
    result = decompose(P, method=plan.method, tolerance=plan.tolerance, audit=[0] if audited else [])
    sigma = result.sigma
    n, m = P.shape
    numbers = {name: float(value) for name, value in scalars(sigma, n=n, m=m).items()}
    if plan.points is None:
        numbers |= {name: value / min(n, m) for name, value in numbers.items() if is_rank(name)}
    if not METHODS[result.method].resolves_numerical_rank:
        numbers["numerical_rank"] = math.nan
    numbers["logit_sd"] = logit_sd
    numbers["sink_share"] = float(P.sum(dim=0).max()) / n
    curves = {
        "nuclear_fraction": on_axis(nuclear_curve(sigma).numpy(force=True), plan.points),
        "energy_fraction": on_axis(energy_curve(sigma).numpy(force=True), plan.points),
    }
    notes = {
        "retries": float(result.retries),
        "refined": float(result.refined),
        "residual_max": result.residual,
        "audited": float(result.audited),
        "audit_error_max": result.audit_error,
    }
    return HeadSpectrum(curves, numbers, notes)


def is_rank(name: str) -> bool:
    """Whether a scalar counts directions, so that sentences of several lengths need it relative to their own.

    Example:
        >>> is_rank("nuclear_rank_90_deflated"), is_rank("sigma_ratio")
        (True, False)
    """
    return "rank" in name or name.startswith("participation_ratio")


def on_axis(curve: NDArray[np.float64], points: int | None) -> NDArray[np.float64]:
    """Bring a curve to the run's index axis: padded with its final 1, or resampled at fractions.

    Example:
        >>> on_axis(np.array([0.5, 1.0]), 3).tolist()
        [0.5, 1.0, 1.0]
    """
    if points is None:
        kept = np.arange(len(curve) + 1) / len(curve)
        return np.interp(SENTENCE_GRID, kept, np.concatenate([[0.0], curve]))
    return np.pad(curve, (0, points - len(curve)), constant_values=1.0)
