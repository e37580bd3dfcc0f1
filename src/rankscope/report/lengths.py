"""Rank against n, over several results of one model: the question behind a fixed k."""

from math import log2, log10
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from rankscope.report import reading
from rankscope.report.description import Figure, Line, Mark, Panel, Ticks
from rankscope.report.drawing import BACKENDS
from rankscope.report.marks import MARKERS
from rankscope.report.palette import set_color
from rankscope.report.statistics import estimate

LEAST_LENGTHS = 3
MEASURES = {"effective_rank": "effective rank", "nuclear_rank_90": "directions that hold 90 % of Σσ"}


def of_several_lengths(datasets: list[xr.Dataset]) -> list[xr.Dataset]:
    """Return the results in order of n if they are one model's, packed, at three lengths or more; else nothing."""
    lengths = {int(ds.attrs.get("n", 0)) for ds in datasets}
    models = {reading.model_name(ds) for ds in datasets}
    packed = not any(reading.is_fractional(ds) for ds in datasets)
    if len(models) > 1 or len(lengths) < max(LEAST_LENGTHS, len(datasets)) or not packed:
        return []
    return sorted(datasets, key=lambda ds: int(ds.attrs["n"]))


def growth(ranks: NDArray[np.float64], lengths: NDArray[np.float64]) -> tuple[float, float, float]:
    """Slope of log rank over log n by least squares, one for each head; their mean and its 95 % t-interval.

    Args:
        ranks: ``(heads, lengths)``, positive.
        lengths: ``(lengths)``.

    Returns:
        ``(mean, low, high)``; the ends are NaN for a single head.

    Example:
        >>> growth(np.array([[2.0, 4.0, 8.0], [1.0, 2.0, 4.0]]), np.array([10.0, 20.0, 40.0]))[0]
        1.0
    """
    x = np.log(lengths) - np.log(lengths).mean()
    slopes = (np.log(ranks) * x).sum(axis=1) / (x**2).sum()
    found = estimate(slopes, np.arange(len(slopes)))
    return found.value, found.low, found.high


def head_ranks(datasets: list[xr.Dataset], name: str, baseline: str) -> NDArray[np.float64]:
    """Mean over windows of a rank for each head that every result holds, ``(heads, results)``."""
    each = [ds[name].sel(baseline=baseline).mean("window") for ds in datasets]
    shared = xr.align(*each, join="inner")
    together = np.stack([values.values.ravel() for values in shared], axis=1)
    return together[np.isfinite(together).all(axis=1) & (together > 0).all(axis=1)]


def rank_growth(datasets: list[xr.Dataset], backend: str = "matplotlib") -> Any:
    """Draw effective rank and the rank at 90 % of Σσ against n, log–log, with the fitted power of n.

    Args:
        datasets: Results of one model at three lengths or more.
        backend: ``"matplotlib"``, ``"plotly"``, or ``"none"`` for the description.

    Returns:
        What the backend draws; a figure without panels where the results are not of such a kind.
    """
    draw = BACKENDS[backend]
    ordered = of_several_lengths(datasets)
    lengths = np.array([float(ds.attrs["n"]) for ds in ordered])
    first = reading.baselines(ordered[0]) if ordered else []
    shared = [name for name in first if all(name in ds.baseline for ds in ordered)]
    x = tuple(log2(n) for n in lengths)
    panels = []
    for measure, words in MEASURES.items():
        marks: list[Mark] = []
        for i, baseline in enumerate(shared):
            ranks = head_ranks(ordered, measure, baseline)
            if not len(ranks):
                continue
            slope, low, high = growth(ranks, lengths)
            interval = "" if np.isnan(low) else f" ({low:.2f} to {high:.2f})"
            label = "trained" if baseline == reading.TRAINED else reading.null_label(baseline)
            marks.append(
                Line(
                    x,
                    tuple(np.log10(ranks).mean(axis=0)),
                    f"{label}: {words} ∝ n^{slope:.2f}{interval}",
                    set_color(i),
                    dash="" if baseline == reading.TRAINED else "6 3",
                    marker=MARKERS[i % len(MARKERS)],
                    strong=baseline == reading.TRAINED,
                )
            )
        if marks:
            panels.append(log_panel(words, marks, lengths))
    figure = Figure(
        name="rank-growth",
        title="Rank against n",
        reading=(
            "Both axes are logarithmic, so a power of n is a straight line: a level line would mean that a fixed k "
            "serves every length, one that climbs with n itself that none does. Points are geometric means over the "
            "heads that every result holds; in brackets the 95 % interval of the power over heads."
        ),
        alt=f"Effective rank and rank at 90 % of the sum against n, {len(ordered)} lengths.",
        panels=tuple(panels),
    )
    return draw(figure)


def log_panel(title: str, marks: list[Mark], lengths: NDArray[np.float64]) -> Panel:
    """Return axes whose ticks are the lengths and round ranks."""
    values = [y for mark in marks if isinstance(mark, Line) for y in mark.y]
    low, high = min(values) - 0.1, max(values) + 0.1
    rounds = [m * 10.0**p for p in range(7) for m in (1, 2, 5)]
    ticks: Ticks = tuple((log10(r), f"{r:,.0f}") for r in rounds if low <= log10(r) <= high)
    places: Ticks = tuple((log2(n), f"{n:,.0f}") for n in lengths)
    margin = 0.03 * (places[-1][0] - places[0][0])
    return Panel(
        title,
        "n, tokens",
        title,
        tuple(marks),
        (places[0][0] - margin, places[-1][0] + margin),
        (low, high),
        places,
        ticks,
    )
