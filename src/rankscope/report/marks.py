"""The pieces of a result's pictures: lines, bands and axes from its curves and scalars."""

from math import ceil
from typing import Any

import numpy as np
import xarray as xr

from rankscope.report import reading
from rankscope.report.description import Band, Box, Line, Mark, Numbers, Panel, Ticks, number_ticks, thinned
from rankscope.report.palette import DASHES, layer_color, null_number
from rankscope.report.statistics import estimate

MOST_LISTED = 12
MARKERS = ("square", "diamond", "triangle", "circle")
WHOLE_AXIS: Ticks = ((0.0, "0"), (0.2, "0.2"), (0.4, "0.4"), (0.6, "0.6"), (0.8, "0.8"), (1.0, "1"))
SHARE = "share of the sum of singular values"


def by_relative_depth(ds: xr.Dataset, scalar: str, name: str, scale: float, look: dict[str, Any]) -> list[Mark]:
    """Return one line a kind: a scalar's layer means, from the first layer (0) to the last (1)."""
    values = reading.layer_series(ds, scalar, name)
    if values is None:
        return []
    lines: list[Mark] = []
    groups = reading.kinds(ds)
    for kind, layers in groups.items():
        estimates = [estimate(values[:, layer] / scale, reading.documents(ds, values)) for layer in layers]
        x = tuple(i / (len(layers) - 1) if len(layers) > 1 else 0.5 for i in range(len(layers)))
        words = look["label"] if len(groups) == 1 else f"{look['label']}, {reading.kind_label(kind)}"
        dash = look["dash"] if len(groups) == 1 else DASHES[list(groups).index(kind) % len(DASHES)]
        ends = [tuple(e.low for e in estimates), tuple(e.high for e in estimates)]
        y = tuple(e.value for e in estimates)
        lines.append(Line(x, y, low=ends[0], high=ends[1], **(look | {"label": words, "dash": dash})))
    return lines


def kind_title(ds: xr.Dataset, kind: str) -> str:
    """Return a kind's words where a result holds more than one."""
    return reading.kind_label(kind) if len(reading.kinds(ds)) > 1 else ""


def null_look(ds: xr.Dataset, name: str) -> dict[str, Any]:
    """Return a null's colour, dash and marker, the same in every picture."""
    i = null_number(name, reading.nulls(ds))
    label = reading.null_label(name)
    return {"label": label, "color": f"null-{i}", "dash": DASHES[i], "marker": MARKERS[i % 3]}


def thin(x: np.ndarray, *curves: np.ndarray) -> tuple[Numbers, ...]:
    """Return an axis and curves on it at 100 points at most, dense where curves bend: near the start."""
    count = len(x)
    spots = np.concatenate([np.geomspace(1, count, 48), np.linspace(1, count, 49)]).round().astype(int) - 1
    chosen = np.unique(spots) if count > 100 else np.arange(count)
    return tuple(tuple(float(v) for v in series[chosen]) for series in (x, *curves))


def curve_panel(ds: xr.Dataset, title: str, marks: list[Mark]) -> Panel:
    """Return axes for curves: kept along, share up."""
    if reading.is_fractional(ds):
        label, ticks = "share of a sentence's singular values kept", WHOLE_AXIS
    else:
        n = reading.total(ds)
        label = f"singular values kept, largest first, of {n}"
        ticks = tuple((i / 4, f"{i * n / 4:g}") for i in range(5))
    return Panel(title, label, SHARE, tuple(marks), (0.0, 1.0), (0.0, 1.0), ticks, WHOLE_AXIS)


def layer_axis_panel(
    ds: xr.Dataset, title: str, layers: list[int], marks: list[Mark], y_label: str, *, zero_line: bool = False
) -> Panel:
    """Return axes with some layers along and a fitting range up."""
    span = y_span(marks, zero=zero_line)
    ticks = thinned([reading.layer_names(ds)[layer] for layer in layers])
    edges = (-0.6, len(layers) - 0.4)
    return Panel(title, "layer", y_label, tuple(marks), edges, span, ticks, number_ticks(*span), zero_line)


def y_span(marks: list[Mark], *, zero: bool = False) -> tuple[float, float]:
    """Return a range that holds every point and interval with some air."""
    numbers = [0.0] if zero else []
    for mark in marks:
        if isinstance(mark, Line):
            numbers += [*mark.y, *mark.low, *mark.high]
        elif isinstance(mark, Box):
            numbers += mark.quartiles
    known = np.array(numbers)[np.isfinite(numbers)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    air = max(0.06 * (high - low), 0.01)
    return low - air, high + air


def layer_line(ds: xr.Dataset, layer: int, position: int, count: int) -> list[Mark]:
    """Return a layer's mean curve, over its numerical band where there is one."""
    color = layer_color(position, count)
    middle, low, high = (reading.mean_over(c[layer], 0) for c in reading.curve(ds, reading.TRAINED))
    label = f"layer {reading.layer_names(ds)[layer]}"
    every = max(1, ceil(count / MOST_LISTED))
    listed = position % every == 0 or position == count - 1
    x, y, bottom, top = thin(reading.fractions(ds), middle, low, high)
    line = Line(x, y, label, color, strong=count <= MOST_LISTED, listed=listed)
    return [Band(x, bottom, top, "", color), line] if np.nanmax(high - low, initial=0.0) > 1e-3 else [line]


def null_band(ds: xr.Dataset, name: str, layers: list[int]) -> list[Mark]:
    """Return a null's band from its lowest to its highest layer, with the mean over layers."""
    means = [reading.mean_over(c[layers], 1) for c in reading.curve(ds, name)]
    if np.isnan(means[0]).all():
        return []
    lowest, highest = np.nanmin(means[1], axis=0), np.nanmax(means[2], axis=0)
    x, y, low, high = thin(reading.fractions(ds), reading.mean_over(means[0], 0), lowest, highest)
    look = null_look(ds, name) | {"marker": ""}
    return [Band(x, low, high, look["label"], look["color"]), Line(x, y, **look)]


def null_line(ds: xr.Dataset, name: str, layer: int) -> list[Mark]:
    """Return a null's curve in one layer, one sd of a head over windows to either side."""
    middle, low, high = (reading.mean_over(c[layer], 0) for c in reading.curve(ds, name))
    if np.isnan(middle).all():
        return []
    if "nuclear_fraction_sd" in ds:
        spread = ds["nuclear_fraction_sd"].sel(baseline=name).transpose("layer", "head", "index").values[layer]
        sd = np.nan_to_num(reading.mean_over(spread.astype(np.float64), 0))
        low, high = np.clip(low - sd, 0, 1), np.clip(high + sd, 0, 1)
    x, y, bottom, top = thin(reading.fractions(ds), middle, low, high)
    look = null_look(ds, name) | {"marker": ""}
    return [Band(x, bottom, top, look["label"], look["color"]), Line(x, y, **look)]


def trained_line(ds: xr.Dataset, layer: int) -> list[Mark]:
    """Return the trained curve of one layer over its heads' range."""
    middle, low, high = (c[layer] for c in reading.curve(ds, reading.TRAINED))
    present = ~np.isnan(middle).all(axis=1)
    x, y, bottom, top = thin(
        reading.fractions(ds),
        reading.mean_over(middle, 0),
        low[present].min(axis=0, initial=np.inf),
        high[present].max(axis=0, initial=-np.inf),
    )
    return [Band(x, bottom, top, "trained: heads' range", "trained"), Line(x, y, "trained", "trained", strong=True)]
