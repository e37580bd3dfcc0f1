"""What a worker does with one head: its map and its nulls' maps to curves and numbers."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rankscope.linalg.decompose import METHODS, decompose
from rankscope.linalg.rank import energy_curve, nuclear_curve, scalars
from rankscope.spectrum.heads import Head, deviation
from rankscope.spectrum.matrix_free import MATRIX_FREE, head_bands
from rankscope.spectrum.nulls import NULLS, generator_for
from rankscope.spectrum.parts import head_prefix

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
        method: A name of :data:`rankscope.linalg.decompose.METHODS`, ``"auto"`` or ``"matrix-free"``.
        tolerance: Largest error of a nuclear fraction that ``auto`` may leave.
        width: Band width at which matrix-free stops.
        seed: The run's seed.
        index: The numbers of singular values the curves are kept at, or ``None`` for sentences of several
            lengths, whose curves are kept at the fractions :data:`SENTENCE_GRID`.
        keep: A folder for matrix-free heads finished or in progress until their part is written; ``None`` keeps none.
    """

    method: str
    tolerance: float
    width: float
    seed: int
    index: NDArray[np.int64] | None
    keep: Path | None = None


@dataclass(frozen=True)
class HeadSpectrum:
    """One map's curves, ``(index,)`` each, and scalars, with what the numerics had to do."""

    curves: dict[str, NDArray[np.float64]]
    scalars: dict[str, float]
    notes: dict[str, float]


def head_spectra(
    head: Head, place: Place, names: tuple[str, ...], plan: Plan, target: float | None
) -> tuple[float, dict[str, HeadSpectrum]] | str:
    """Measure a head and the nulls that start from it.

    Args:
        head: The head.
        place: Its window, layer and number.
        names: ``"trained"`` and nulls.
        plan: How.
        target: The trained head's content-logit deviation, for nulls of another forward; ``None`` to take this
            head's own.

    Returns:
        The head's own content-logit deviation and a spectrum for each name; or, when its logits are not
        finite, the reason in words.
    """
    own = deviation(head, content=True)
    if math.isnan(own):
        return f"layer {place.layer}, head {place.head}: non-finite logits"
    spectra = {}
    for name in names:
        measured = head
        if name != "trained":
            generator = generator_for(plan.seed, name, place.window, place.layer, place.head)
            measured = NULLS[name].head(head, own if target is None else target, generator)
        spectrum = banded(measured, place, name, plan) if plan.method == MATRIX_FREE else dense(measured, place, plan)
        # Without a bias the logits are the content.
        same = measured is head and head.bias is None
        spectrum.scalars["logit_sd"] = own if same else deviation(measured, content=False)
        spectra[name] = spectrum
    return own, spectra


def dense(head: Head, place: Place, plan: Plan) -> HeadSpectrum:
    """Curves and scalars of a map that is written down; an audited one is decomposed by float64 SVD too."""
    P = head.context_map()
    result = decompose(P, method=plan.method, tolerance=plan.tolerance, audit=[0] if place.audited else [])
    sigma = result.sigma
    n, m = P.shape
    numbers = {name: float(value) for name, value in scalars(sigma, n=n, m=m).items()}
    if plan.index is None:
        numbers |= {name: value / min(n, m) for name, value in numbers.items() if is_rank(name)}
    if not METHODS[result.method].resolves_numerical_rank:
        numbers["numerical_rank"] = math.nan
    numbers["sink_share"] = float(P.sum(dim=0).max()) / n
    curves = {
        "nuclear_fraction": on_axis(nuclear_curve(sigma), plan.index),
        "energy_fraction": on_axis(energy_curve(sigma), plan.index),
    }
    notes = {
        "retries": float(result.retries),
        "refined": float(result.refined),
        "residual_max": result.residual,
        "audited": float(result.audited),
        "audit_error_max": result.audit_error,
    }
    return HeadSpectrum(curves, numbers, notes)


def banded(head: Head, place: Place, name: str, plan: Plan) -> HeadSpectrum:
    """Curves with their bands, and the scalars that are known, of a map that is never written down."""
    generator = generator_for(plan.seed, f"{name}, Lanczos", place.window, place.layer, place.head)
    keep = None if plan.keep is None else plan.keep / f"{head_prefix(place.window)}{place.layer}-{place.head}-{name}"
    curves, numbers, notes = head_bands(head, width=plan.width, generator=generator, keep=keep)
    return HeadSpectrum({name: on_axis(curve, plan.index) for name, curve in curves.items()}, numbers, notes)


def is_rank(name: str) -> bool:
    """Whether a scalar counts directions, so that sentences of several lengths need it relative to their own.

    Example:
        >>> is_rank("nuclear_rank_90_deflated"), is_rank("sigma_ratio")
        (True, False)
    """
    return "rank" in name or name.startswith("participation_ratio")


def on_axis(curve: Tensor, index: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """Bring a curve to the run's axis: read at numbers of values (1 beyond its end), or at fractions.

    Example:
        >>> import torch
        >>> on_axis(torch.tensor([0.5, 1.0]), np.array([1, 2, 3])).tolist()
        [0.5, 1.0, 1.0]
    """
    values = curve.double().numpy(force=True)
    if index is None:
        kept = np.arange(len(values) + 1) / len(values)
        return np.interp(SENTENCE_GRID, kept, np.concatenate([[0.0], values]))
    return np.where(index <= len(values), values[np.minimum(index, len(values)) - 1], 1.0)
