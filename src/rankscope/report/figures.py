"""A result's pictures: dataset to description, drawn by the backend asked for."""

from math import ceil, floor
from typing import Any

import numpy as np
import xarray as xr

from rankscope.report import reading
from rankscope.report.description import Band, Box, Cells, Figure, Line, Mark, Panel, Ticks, number_ticks
from rankscope.report.drawing import BACKENDS
from rankscope.report.marks import (
    MARKERS,
    SHARE,
    WHOLE_AXIS,
    by_relative_depth,
    curve_panel,
    kind_title,
    layer_axis_panel,
    layer_line,
    null_band,
    null_line,
    null_look,
    thin,
    trained_line,
    y_span,
)
from rankscope.report.palette import set_color
from rankscope.report.statistics import difference, estimate
from rankscope.report.summary import trend

MOST_PANELS = 24
MOST_TOGETHER = 3
MOST_CELLS = 13000
MOST_DOTS = 1500


def layer_curves(ds: xr.Dataset, backend: str = "matplotlib") -> Any:
    """Draw each layer's cumulative singular values with the nulls as bands: the Linformer paper's Figure 1, left.

    A line is a layer's mean over heads and windows; a null's band runs from its lowest to its highest layer.

    Args:
        ds: A result.
        backend: ``"matplotlib"``, ``"plotly"``, or ``"none"`` for the description.

    Returns:
        What the backend draws; with ``"none"`` a :class:`rankscope.report.description.Figure`.

    Raises:
        MissingExtraError: The backend's package is not installed.
        RankscopeError: ``ds`` is no result, or the backend is unknown.

    References:
        Wang et al. 2020, arXiv 2006.04768, Figure 1.
    """
    draw = BACKENDS[backend]
    reading.check(ds)
    panels = []
    for kind, layers in reading.kinds(ds).items():
        # The nulls' lines come last: many layers would bury them.
        noise = [mark for name in reading.nulls(ds) for mark in null_band(ds, name, layers)]
        marks: list[Mark] = [mark for mark in noise if isinstance(mark, Band)]
        for position, layer in enumerate(layers):
            marks += layer_line(ds, layer, position, len(layers))
        marks += [mark for mark in noise if isinstance(mark, Line)]
        panels.append(curve_panel(ds, kind_title(ds, kind), marks))
    figure = Figure(
        name="layer-curves",
        title="How fast the singular values add up, layer by layer",
        reading=(
            "Read it so: go right along the axis, keeping more and more of the largest singular values; the height is "
            f"the share of their total sum kept so far. {quarter_example(ds)} A curve that rises early means that few "
            "directions carry most of the map; the diagonal would mean that all directions weigh the same. "
            f"{null_words(ds)}"
        ),
        alt=f"Cumulative singular-value curves of {len(reading.layer_names(ds))} layers of {reading.model_name(ds)}.",
        panels=tuple(panels),
    )
    return draw(figure)


def layer_panels(ds: xr.Dataset, backend: str = "matplotlib") -> Any:
    """Draw every layer beside its own nulls, one panel a layer, 24 at most, evenly chosen.

    The band around the trained curve spans its heads; a null's spans ± 1 sd of a head over windows.
    """
    draw = BACKENDS[backend]
    reading.check(ds)
    count = ds.sizes["layer"]
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_PANELS)).round().astype(int))
    panels = []
    for layer in chosen:
        marks: list[Mark] = []
        for name in reading.nulls(ds):
            marks += null_line(ds, name, int(layer))
        marks += trained_line(ds, int(layer))
        panels.append(curve_panel(ds, f"layer {reading.layer_names(ds)[layer]}", marks))
    notes = () if len(chosen) == count else (f"{len(chosen)} of {count} layers are shown, evenly chosen.",)
    figure = Figure(
        name="layer-panels",
        title="Each layer against its own nulls",
        reading=(
            "The heavy line is the layer's mean over its heads, and the area around it runs from its lowest to its "
            "highest head. A null's area is one standard deviation of a head over windows to either side. Where the "
            "heavy line lies on a null, that null alone explains the curve."
        ),
        alt="One small picture a layer: the trained curve, its heads' range, and each null.",
        panels=tuple(panels),
        notes=notes,
    )
    return draw(figure)


def heatmap(ds: xr.Dataset, backend: str = "matplotlib") -> Any:
    """Draw the share held at n/4 by layer and head, nulls beside it: the paper's Figure 1, right."""
    draw = BACKENDS[backend]
    reading.check(ds)
    values = {name: reading.quarter_of_curve(ds, name) for name in reading.baselines(ds)}
    budget = MOST_CELLS - values[reading.TRAINED].size
    shown = [reading.TRAINED]
    dropped: list[str] = []
    for name in reading.nulls(ds):
        budget -= values[name].size
        (shown if budget >= 0 else dropped).append(name)
    known = np.concatenate([values[name][~np.isnan(values[name])] for name in shown])
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low, high = floor(low * 20) / 20, max(ceil(high * 20) / 20, floor(low * 20) / 20 + 0.05)
    panels = []
    for kind, layers in reading.kinds(ds).items():
        for name in shown:
            if np.isnan(values[name][layers]).all():
                continue
            words = "trained" if name == reading.TRAINED else reading.null_label(name)
            title = f"{kind_title(ds, kind)}: {words}" if kind_title(ds, kind) else words
            rows = tuple(reading.layer_names(ds)[layer] for layer in layers)
            filled = ~np.isnan(values[reading.TRAINED][layers]).all(axis=0)
            columns = tuple(str(head) for head in ds["head"].values[filled])
            table = tuple(tuple(float(v) for v in values[name][layer][filled]) for layer in layers)
            panels.append(Panel(title, "head", "layer", (Cells(table, rows, columns, low, high),)))
    figure = Figure(
        name="heatmap",
        title=f"Share held by {reading.quarter_words(ds)}, head by head",
        reading=(
            f"One cell a head: the share of the sum that {reading.quarter_words(ds)} hold, as in the Linformer paper's "
            "right panel. Light is concentrated, dark is spread out; all pictures here share one scale."
        ),
        alt="Heatmap of layers by heads, trained and nulls on one colour scale.",
        panels=tuple(panels),
        notes=tuple(f"{reading.null_label(name)} is left out to keep the page small." for name in dropped),
    )
    return draw(figure)


def depth_trend(ds: xr.Dataset, backend: str = "matplotlib") -> Any:
    """Draw the share held at n/4 against depth, with 95 % intervals over windows, nulls beside it."""
    draw = BACKENDS[backend]
    reading.check(ds)
    panels = []
    notes = [words for kind, layers in reading.kinds(ds).items() for words in trend(ds, kind, layers)]
    crowded = len(reading.nulls(ds)) > MOST_TOGETHER
    if crowded:
        notes.append("The nulls are many, so their own intervals are left out here; the next picture has them.")
    for kind, layers in reading.kinds(ds).items():
        marks: list[Mark] = []
        for name in [*reading.nulls(ds), reading.TRAINED]:
            values = reading.layer_series(ds, reading.QUARTER, name)
            if values is None:
                continue
            estimates = [estimate(values[:, layer], reading.documents(ds, values)) for layer in layers]
            if name == reading.TRAINED:
                look: dict[str, Any] = {"label": "trained", "color": "trained", "marker": "circle", "strong": True}
            else:
                look = null_look(ds, name)
            x = tuple(float(i) for i in range(len(layers)))
            ends = [tuple(e.low for e in estimates), tuple(e.high for e in estimates)]
            if crowded and name != reading.TRAINED:
                ends = [(), ()]
            marks.append(Line(x, tuple(e.value for e in estimates), low=ends[0], high=ends[1], **look))
        panels.append(layer_axis_panel(ds, kind_title(ds, kind), layers, marks, SHARE))
    figure = Figure(
        name="depth-trend",
        title=f"Does depth matter? Share held by {reading.quarter_words(ds)}",
        reading=(
            "Each point is a layer's mean over its heads and windows. The upright stroke through it is its 95 % "
            "interval over windows: how far the draw of the text leaves the mean open. A rising line means that deeper "
            "layers are more concentrated; a null that rises as well takes that much of the credit away."
        ),
        alt="Share held at a quarter of the singular values by layer, trained and nulls, with intervals.",
        panels=tuple(panels),
        notes=tuple(notes),
    )
    return draw(figure)


def excess(ds: xr.Dataset, backend: str = "matplotlib") -> Any:
    """Draw trained − null at n/4 by layer, paired over the windows both have, with 95 % intervals."""
    draw = BACKENDS[backend]
    reading.check(ds)
    trained = reading.layer_series(ds, reading.QUARTER, reading.TRAINED)
    panels = []
    nulls = reading.nulls(ds)
    # Beyond three nulls signs and strokes would hide each other: a panel each.
    groups = [nulls] if len(nulls) <= MOST_TOGETHER else [[name] for name in nulls]
    for kind, layers in reading.kinds(ds).items():
        for names in groups:
            marks: list[Mark] = []
            for j, name in enumerate(names):
                values = reading.layer_series(ds, reading.QUARTER, name)
                if values is None or trained is None:
                    continue
                own = reading.matched(trained, values)
                gaps = [difference(own[:, layer], values[:, layer], reading.documents(ds, own)) for layer in layers]
                x = tuple(i + (j - (len(names) - 1) / 2) * 0.16 for i in range(len(layers)))
                look = null_look(ds, name) | {"label": f"trained − {name.replace('_', ' ')}", "joined": False}
                ends = [tuple(gap.low for gap in gaps), tuple(gap.high for gap in gaps)]
                marks.append(Line(x, tuple(gap.value for gap in gaps), low=ends[0], high=ends[1], **look))
            if marks:
                titles = [kind_title(ds, kind), reading.null_label(names[0]) if len(groups) > 1 else ""]
                title = ": ".join(part for part in titles if part)
                panels.append(layer_axis_panel(ds, title, layers, marks, "trained − null", zero_line=True))
    figure = Figure(
        name="excess",
        title="What training adds: the excess over each null",
        reading=(
            "Above the zero line the trained layer is more concentrated than the null, below it less. A stroke that "
            "crosses the line is no evidence either way. Differences are taken window by window, so that what a "
            "window does to both drops out."
        ),
        alt="Difference between trained and each null by layer with 95 % intervals.",
        panels=tuple(panels),
        notes=() if panels else ("No null was measured, so nothing can be said about what training adds.",),
    )
    return draw(figure)


def windows_distribution(ds: xr.Dataset, backend: str = "matplotlib") -> Any:
    """Draw how the share held at n/4 spreads over windows, layer by layer (mean over heads)."""
    draw = BACKENDS[backend]
    reading.check(ds)
    per_window = reading.series(ds, reading.QUARTER, reading.TRAINED)
    panels = []
    notes: tuple[str, ...] = ("The result holds no numbers for single windows.",)
    if per_window is not None:
        notes = ()
        values = reading.mean_over(per_window, -1)
        dots = values.size <= MOST_DOTS
        for kind, layers in reading.kinds(ds).items():
            marks: list[Mark] = []
            for position, layer in enumerate(layers):
                own = values[:, layer][~np.isnan(values[:, layer])]
                if own.size:
                    low, first, median, third, high = (float(q) for q in np.quantile(own, (0, 0.25, 0.5, 0.75, 1)))
                    points = tuple(float(v) for v in own) if dots else ()
                    words = "trained, one window a dot" if dots else "trained, over windows"
                    marks.append(Box(float(position), points, (low, first, median, third, high), words, "trained"))
            for name in reading.nulls(ds):
                means = reading.layer_series(ds, reading.QUARTER, name)
                if means is not None:
                    y = tuple(float(v) for v in reading.mean_over(means, 0)[layers])
                    x = tuple(float(i) for i in range(len(layers)))
                    marks.append(Line(x, y, **(null_look(ds, name) | {"joined": False})))
            panels.append(layer_axis_panel(ds, kind_title(ds, kind), layers, marks, SHARE))
    figure = Figure(
        name="windows",
        title="How much windows differ",
        reading=(
            "One box a layer: half of the windows lie inside it, the line in it is the median, the strokes reach the "
            "lowest and highest window. Signs without a box are the nulls' means. Boxes that overlap belong to layers "
            "that text alone can make change places."
        ),
        alt="Box plot over windows for each layer.",
        panels=tuple(panels),
        notes=notes,
    )
    return draw(figure)


def compare(datasets: list[xr.Dataset], backend: str = "matplotlib") -> Any:
    """Draw results over each other at fractions of their own n, each with its first null.

    Different n have no index in common, so curves are drawn at fractions of n and effective ranks as shares of n.
    """
    draw = BACKENDS[backend]
    for ds in datasets:
        reading.check(ds)
    curves: list[Mark] = []
    quarters: list[Mark] = []
    ranks: list[Mark] = []
    for i, (ds, label) in enumerate(zip(datasets, reading.labels(datasets), strict=True)):
        color, marker = set_color(i), MARKERS[i % len(MARKERS)]
        for name in [reading.TRAINED, *reading.nulls(ds)[:1]]:
            own = name == reading.TRAINED
            words = label if own else f"{label}: {reading.null_label(name)}"
            look: dict[str, Any] = {"label": words, "color": color, "dash": "" if own else "6 3", "strong": own}
            x, y = thin(reading.fractions(ds), reading.mean_over(reading.curve(ds, name)[0], (0, 1)))
            curves.append(Line(x, y, **look))
            quarters += by_relative_depth(ds, reading.QUARTER, name, 1.0, look | {"marker": marker})
            scale = 1.0 if reading.is_fractional(ds) else float(reading.total(ds))
            ranks += by_relative_depth(ds, "effective_rank", name, scale, look | {"marker": marker})
    depth: Ticks = ((0.0, "first"), (0.5, "middle"), (1.0, "last"))
    panels = [
        Panel(
            "All layers",
            "share of the singular values kept",
            SHARE,
            tuple(curves),
            (0, 1),
            (0, 1),
            WHOLE_AXIS,
            WHOLE_AXIS,
        )
    ]
    for title, y_label, marks in (
        ("Held at n/4, by depth", SHARE, quarters),
        ("Effective rank, by depth", "effective rank ÷ n", ranks),
    ):
        if marks:
            span = y_span(marks)
            panels.append(Panel(title, "layer", y_label, tuple(marks), (-0.04, 1.04), span, depth, number_ticks(*span)))
    figure = Figure(
        name="compare",
        title="Results side by side",
        reading=(
            "Every result is drawn at fractions of its own length n, so that different lengths share an axis; but a "
            "longer n leaves more room for noise, so compare each solid line with its own dashed null before comparing "
            "solid lines with each other."
        ),
        alt=f"{len(datasets)} results over each other: mean curve, share at n/4 by depth, effective rank by depth.",
        panels=tuple(panels),
    )
    return draw(figure)


def quarter_example(ds: xr.Dataset) -> str:
    """Return the reading of one point, with the result's own numbers."""
    at_quarter = reading.mean_over(reading.quarter_of_curve(ds, reading.TRAINED), 1)
    if np.isnan(at_quarter).all():
        return ""
    best = int(np.nanargmax(at_quarter))
    words = reading.quarter_words(ds)
    return f"For example, in layer {reading.layer_names(ds)[best]}, {words} hold {at_quarter[best]:.0%} of the sum."


def null_words(ds: xr.Dataset) -> str:
    """Return what the bands are."""
    if not reading.nulls(ds):
        return "No null was measured, so how much of this comes from softmax and scale alone cannot be seen."
    return (
        "The shaded bands are nulls: the same measurement where something learned has been taken away. Noise under a "
        "softmax makes a long tail too, so only the distance to a null says anything about training."
    )
