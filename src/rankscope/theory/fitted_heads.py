r"""Linformer heads fitted to captured ones: E and F by Adam, F exactly, and both in turn until nothing is gained.

The loss is the mean squared relative error over windows, per head,

.. math:: L(E, F) = \frac{1}{W} \sum_w \frac{\|S_w(E) F V_w - P_w V_w\|^2}{\|P_w V_w\|^2}, \qquad
          S_w(E) = \mathrm{softmax}(\text{scaling} \cdot Q_w (E K_w)^\top).

In F it is a quadratic form, whose minimum conjugate gradients find to any accuracy; in E it is not convex, so what a
fit of both reaches is a point where it stops, not a proven optimum.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.theory.heads import Heads, linformer_output, relative_error

_STEPS = 200
_EVERY = 20
_STEP_OF_E = 0.003
#: Weights of ‖F − F₀‖² that are tried, relative to the mean curvature of the loss.
RIDGES = (100.0, 10.0, 1.0)


@dataclass(frozen=True)
class Fit:
    """Projections from an alternating fit, and the loss on the way.

    Args:
        E: ``(h, k, n)``.
        F: ``(h, k, n)``.
        losses: Mean over heads of L on the windows fitted on after each round, the start first.
        others: The same on the other windows.
        slopes: Mean over heads of how far F is from its exact minimum after each round but the start: the gradient's
            norm relative to that at F = 0.
    """

    E: Float[Tensor, "h k n"]
    F: Float[Tensor, "h k n"]
    losses: tuple[float, ...]
    others: tuple[float, ...]
    slopes: tuple[float, ...]


def held_out(windows: int) -> int:
    """Return how many of the windows are fitted on: three quarters, or all where there are fewer than four.

    Example:
        >>> held_out(24), held_out(3)
        (18, 3)
    """
    return max(1, windows - windows // 4)


def loss(heads: Heads, exact: Tensor, E: Tensor, F: Tensor) -> Float[Tensor, "h"]:
    """Return L of each head."""
    return relative_error(heads.shares(E) @ (F @ heads.value), exact).square().mean(0)


def fit_by_adam(
    train: Heads, start: Tensor, projections: Callable[[Tensor], Tensor], *, rate: float
) -> Float[Tensor, "2 h k n"]:
    """Fit E and F by Adam, a window a step, to the mean squared relative error.

    The last quarter of the windows is not fitted on: each head keeps the projections that did best there, so a fit
    that only learns its windows by heart falls back to an earlier one, at worst to the start.

    Args:
        train: Heads to fit to.
        start: Free numbers, for E first.
        projections: Makes E and F of the free numbers.
        rate: Adam's.

    Returns:
        E and F.
    """
    free = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    windows = train.query.shape[0]
    fitted = held_out(windows)
    exact = train.outputs()
    kept = projections(start)
    best = torch.full((train.query.shape[1],), torch.inf)
    for step in range(_STEPS + 1):
        E, F = projections(free)
        if step % _EVERY == 0:
            with torch.no_grad():
                others = range(fitted, windows) if fitted < windows else range(windows)
                errors = [relative_error(linformer_output(train, i, E, F), exact[i]) for i in others]
                found = torch.stack(errors).mean(0)
            better = found < best
            best = torch.where(better, found, best)
            kept = torch.where(better[:, None, None], torch.stack([E, F]).detach(), kept)
        at = step % fitted
        error = relative_error(linformer_output(train, at, E, F), exact[at])
        optimizer.zero_grad()
        error.square().sum().backward()
        optimizer.step()
        schedule.step()
    return kept


def fit_values(train: Heads, E: Float[Tensor, "h k n"], F: Float[Tensor, "h k n"]) -> Float[Tensor, "h k n"]:
    r"""Fit F alone for a given E: a ridge regression towards the F given, solved exactly.

    Each head keeps the ridge of :data:`RIDGES`, or the F given, that does best on the last quarter of the windows.

    Args:
        train: Heads to fit to.
        E: What shortens the keys.
        F: What shortens the values so far.

    Returns:
        F.
    """
    windows = train.query.shape[0]
    fitted = held_out(windows)
    judged = slice(fitted, None) if fitted < windows else slice(None)
    part, others = train.at(slice(fitted)), train.at(judged)
    exact, other_exact = part.outputs(), others.outputs()
    kept, centre = F, F
    best = loss(others, other_exact, E, F)
    for ridge in RIDGES:
        F, _ = best_values(part, exact, E, start=F, centre=centre, ridge=ridge, tolerance=1e-2)
        found = loss(others, other_exact, E, F)
        kept = torch.where((found < best)[:, None, None], F, kept)
        best = torch.minimum(found, best)
    return kept


def best_values(
    heads: Heads,
    exact: Float[Tensor, "windows h n width"],
    E: Float[Tensor, "h k n"],
    *,
    start: Float[Tensor, "h k n"],
    centre: Float[Tensor, "h k n"],
    ridge: float,
    steps: int = 200,
    tolerance: float = 1e-3,
) -> tuple[Float[Tensor, "h k n"], Float[Tensor, "h"]]:
    r"""Minimise :math:`L(E, F) + \rho \|F - F_0\|^2` over F by conjugate gradients.

    Args:
        heads: Heads to fit to.
        exact: Their outputs PV.
        E: Held fast.
        start: Where to begin.
        centre: F₀.
        ridge: ρ as a share of the loss's mean curvature.
        steps: At most so many.
        tolerance: Stop where the gradient's norm is this share of that at F = 0 without a ridge.

    Returns:
        F, and the gradient's norm relative to that at F = 0, per head.
    """
    shares = heads.shares(E)
    weight = 1 / exact.square().sum((-2, -1), keepdim=True) / len(exact)
    gram = weight * (shares.mT @ shares)
    curvature = (gram.diagonal(dim1=-2, dim2=-1).sum(-1) * heads.value.square().sum((-2, -1))).sum(0)
    rho = (ridge * curvature / (E.shape[1] * E.shape[2]))[:, None, None]
    pulled = ((weight * (shares.mT @ exact)) @ heads.value.mT).sum(0)

    def applied(F: Tensor) -> Tensor:
        return ((gram @ (F @ heads.value)) @ heads.value.mT).sum(0) + rho * F

    size = pulled.norm(dim=(-2, -1))
    F = start.clone()
    residual = pulled + rho * centre - applied(F)
    step = residual.clone()
    square = residual.square().sum((-2, -1))
    for _ in range(steps):
        if bool((square.sqrt() <= tolerance * size).all()):
            break
        along = applied(step)
        share = (square / (step * along).sum((-2, -1)).clamp(min=1e-30))[:, None, None]
        F = F + share * step
        residual = residual - share * along
        new = residual.square().sum((-2, -1))
        step = residual + (new / square.clamp(min=1e-30))[:, None, None] * step
        square = new
    return F, square.sqrt() / size


def alternate(train: Heads, others: Heads, E: Tensor, F: Tensor, *, rounds: int, steps: int = 50) -> Fit:
    """Lower the loss on all windows given, without regard for others: F exactly, then E by Adam, in turn.

    Args:
        train: Heads to fit to.
        others: The same heads on windows that are only judged on.
        E: Where to begin.
        F: Where to begin.
        rounds: How often both are fitted.
        steps: Adam's steps of E in a round, each on all windows.

    Returns:
        The last projections and the losses: how much an earlier stop has left.
    """
    exact, other_exact = train.outputs(), others.outputs()
    free = E.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=_STEP_OF_E * float(E.abs().max()))
    losses, judged, slopes = [loss(train, exact, E, F)], [loss(others, other_exact, E, F)], []
    for turn in range(rounds):
        E = free.detach()
        F, slope = best_values(train, exact, E, start=F, centre=torch.zeros_like(F), ridge=1e-6)
        slopes.append(slope)
        losses.append(loss(train, exact, E, F))
        judged.append(loss(others, other_exact, E, F))
        for _ in range(steps if turn + 1 < rounds else 0):
            optimizer.zero_grad()
            loss(train, exact, free, F).sum().backward()
            optimizer.step()
    means = (tuple(float(part.mean()) for part in parts) for parts in (losses, judged, slopes))
    return Fit(free.detach(), F, *means)
