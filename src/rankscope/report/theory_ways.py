"""The tokens' ways in one, two or three dimensions, with the set they end in."""

from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from rankscope.report.theory_canvas import INKS, canvas
from rankscope.theory.limit_sets import LimitSet, limit_set

Array = NDArray[Any]

_INK = INKS[2]


def draw_ways(ds: xr.Dataset) -> Any:
    """Return the figure of a clusters study; of more than three dimensions the first three are drawn."""
    d, n = ds.sizes["axis"], ds.sizes["token"]
    options = {"subplot_kw": {"projection": "3d"}} if d >= 3 else {}
    figure, axes = canvas(1, 1, width=5.8, height=4.8, **options)
    ax, way, last = axes[0, 0], ds.way.values, ds.tokens.values[-1]
    for token in range(n):
        line = (
            (ds.moment.values, way[:, token, 0]) if d == 1 else tuple(way[:, token, axis] for axis in range(min(d, 3)))
        )
        ax.plot(*line, color=INKS[0], linewidth=0.7, alpha=max(0.1, min(0.6, 40 / n)))
    if d > 1:
        ax.plot(*ds.tokens.values[0, :, :3].T, ".", color="#8a93a0", markersize=4, label="start")
        ax.plot(*last[:, :3].T, "o", color=INKS[1], markersize=5, label="end")
    name = "z" if ds.attrs["form"] != "x" else "x"
    labels = ("time t", name) if d == 1 else tuple(f"{name}, axis {axis + 1}" for axis in range(min(d, 3)))
    for label, text in zip((ax.set_xlabel, ax.set_ylabel, getattr(ax, "set_zlabel", None)), labels, strict=False):
        label(text)
    found = limit_set(ds.attrs["limit"], last, ds.V.values) if ds.attrs["limit"] and d <= 3 else None
    if found is None:
        why = "no theorem’s hypotheses are met" if d <= 3 else f"3 of {d} axes; limit set not drawn"
        ax.plot([], [], " ", label=why)
    elif d == 1:
        _draw_levels(ax, found)
    else:
        _draw_set(ax, found, last)
    figure.suptitle(f"Tokens {ds.attrs['form']}, flow “{ds.attrs['flow']}”", fontsize=12)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_levels(ax: Any, found: LimitSet) -> None:
    for i, (level,) in enumerate(found.vertices):
        ax.axhline(level, color=_INK, linestyle="--", linewidth=1.2, label=found.words if i == 0 else None)


def _draw_set(ax: Any, found: LimitSet, last: Array) -> None:
    """Draw the polytope's vertices and edges, each carried along the set's directions as far as the tokens go."""
    label: str | None = found.words
    if not len(found.along):
        for one, other in found.edges:
            ax.plot(*found.vertices[[one, other]].T, color=_INK, linewidth=1.2, label=label)
            label = None
        ax.plot(*found.vertices.T, "s", color=_INK, fillstyle="none", markersize=10, label=label or "its vertices")
        return
    reach = last @ found.along.T
    low, high = reach.min(axis=0), reach.max(axis=0)
    margin = 0.1 * np.maximum(high - low, np.abs(last).max())
    low, high = low - margin, high + margin
    # A place of the set is a vertex without its part along the directions, plus any step along them.
    feet = found.vertices - (found.vertices @ found.along.T) @ found.along
    if len(found.along) == 1:
        for foot in feet:
            ax.plot(*np.stack([foot + end * found.along[0] for end in (low[0], high[0])]).T, color=_INK, label=label)
            label = None
        for end in (low[0], high[0]):
            for one, other in found.edges:
                ax.plot(*(feet[[one, other]] + end * found.along[0]).T, color=_INK, linewidth=0.8)
        return
    # Seen nearly edge-on, so that the planes are apart and what lies on them shows.
    normal = np.cross(*found.along)
    ax.view_init(elev=20, azim=float(np.degrees(np.arctan2(normal[1], normal[0]))) + 70)
    first, second = np.meshgrid((low[0], high[0]), (low[1], high[1]))
    for foot in feet:
        surface = foot + first[..., None] * found.along[0] + second[..., None] * found.along[1]
        ax.plot_surface(*np.moveaxis(surface, -1, 0), color=_INK, alpha=0.2)
    ax.plot([], [], color=_INK, linewidth=6, alpha=0.3, label=label)
