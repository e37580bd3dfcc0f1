"""Pictures of pretraining: perplexity by step, as the paper's Figure 3, and spectra from fresh weights to the end."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, log
from typing import Any

import numpy as np
import xarray as xr

from rankscope.report.description import Band, Figure, Line, Mark, Panel, Ticks, number_ticks
from rankscope.report.palette import layer_color, set_color
from rankscope.spectrum.intervals import mean_interval

Result = Mapping[str, Any]
SHARE = "nuclear_fraction_at_quarter"


def perplexity_figure(groups: Mapping[str, Sequence[Result]]) -> Figure:
    """Draw held-out perplexity by step, one panel a comparison.

    Runs that differ in their seed alone are one line: the mean of their losses, with its 95 % interval.

    Args:
        groups: Results of :func:`rankscope.training.pretrain.pretrain` by the panel's title.
    """
    panels = tuple(perplexity_panel(title, results) for title, results in groups.items())
    return Figure(
        name="perplexity",
        title="Held-out perplexity while pretraining",
        reading=(
            "Height: perplexity at the masked tokens of the held-out windows, on a logarithmic scale; the masks are "
            "the same in every run. Lower is better. A band is the 95 % interval over seeds."
        ),
        alt="Perplexity by training step: " + "; ".join(groups),
        panels=panels,
    )


def perplexity_panel(title: str, results: Sequence[Result]) -> Panel:
    """Draw one comparison."""
    lines: list[Mark] = []
    bands: list[Mark] = []
    heights: list[float] = []
    steps: list[int] = []
    for place, (label, runs) in enumerate(by_label(results).items()):
        color = set_color(place)
        x, mean, low, high = seeds_mean(runs)
        lines.append(Line(x, mean, label, color, marker="circle" if len(x) < 12 else ""))
        if len(runs) > 1:
            bands.append(Band(x, low, high, label, color))
        steps += [int(step) for step in x]
        # The first value is that of a model that knows nothing: it would press the rest together.
        heights += [y for row in (mean[1:] or mean, low[1:], high[1:]) for y in row if isfinite(y)]
    bottom, top = min(heights) - 0.05, max(heights) + 0.05
    return Panel(
        title,
        "updates",
        "perplexity (log scale)",
        (*bands, *lines),
        x_range=(0.0, float(max(steps)) or 1.0),
        y_range=(bottom, top),
        x_ticks=number_ticks(0.0, float(max(steps)) or 1.0),
        y_ticks=perplexity_ticks(bottom, top),
    )


def perplexity_ticks(low: float, high: float) -> Ticks:
    """Round perplexities between two logarithms of them.

    Example:
        >>> [label for _, label in perplexity_ticks(log(9), log(110))]
        ['10', '20', '50', '100']
    """
    values = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]
    within = [value for value in values if low <= log(value) <= high]
    if len(within) < 2:
        within = sorted({round(float(np.exp(low + (high - low) * share)), 1) for share in (0.1, 0.5, 0.9)})
    return tuple((log(value), f"{value:,}") for value in within)


def seeds_mean(runs: Sequence[Result]) -> tuple[tuple[float, ...], ...]:
    """Steps, mean loss and its interval over seeds, at the steps all runs have."""
    curves = [{int(step): float(loss) for step, loss, *_ in run["curves"]["eval"]} for run in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[step] for step in steps] for curve in curves])
    mean, low, high = mean_interval(values, list(range(len(runs))))
    return tuple(map(float, steps)), *(tuple(map(float, side)) for side in (mean, low, high))


def by_label(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Group runs that differ in their seed alone, under words for what they differ in from the others.

    Example:
        >>> run = lambda k, seed: {"model": {"projected_length": k, "projection_sharing": "headwise",
        ...     "projection": "learned"}, "settings": {"n": 512}, "seed": seed}
        >>> {label: len(runs) for label, runs in by_label([run(None, 0), run(64, 0), run(64, 1)]).items()}
        {'exact Transformer': 1, 'Linformer k = 64': 2}
    """
    results = list(results)
    linformers = [facts(run) for run in results if run["model"]["projected_length"] is not None]
    varying = [name for name in ("sharing", "projection") if len({row[name] for row in linformers}) > 1]
    lengths = len({facts(run)["n"] for run in results}) > 1
    groups: dict[str, list[Result]] = {}
    for run in results:
        known = facts(run)
        label = "exact Transformer"
        if known["k"] is not None:
            label = ", ".join([f"Linformer k = {known['k']}", *(str(known[name]) for name in varying)])
        groups.setdefault(label + (f", n = {known['n']}" if lengths else ""), []).append(run)
    return groups


def facts(run: Result) -> dict[str, Any]:
    """What names a run in a legend."""
    model = run["model"]
    return {
        "k": model["projected_length"],
        "sharing": model["projection_sharing"],
        "projection": model["projection"],
        "n": run["settings"]["n"],
    }


def spectra_figure(steps: Mapping[int, xr.Dataset]) -> Figure:
    """Draw each layer's nuclear fraction at a quarter by step, beside Gaussian noise of the same logit deviation.

    Args:
        steps: Measurements of :mod:`rankscope.training.spectra`, by step.
    """
    order = sorted(steps)
    first = steps[order[0]]
    names = [str(name) for name in first.baseline.values]
    values = np.stack([steps[step][SHARE].mean(("window", "head")).values for step in order])
    deviation = np.stack(
        [steps[step]["logit_sd"].sel(baseline="trained").mean(("window", "head")).values for step in order]
    )
    compressed = "map" in first.attrs
    whole = "k" if compressed else "n"
    x = tuple(map(float, order))
    panels = [
        step_panel(title, f"share of Σσ in the first {whole}/4", x, values[:, names.index(name)])
        for name, title in (("trained", "the model"), ("gaussian", "Gaussian null of its deviation"))
        if name in names
    ]
    panels.append(step_panel("spread of the logits", "s.d. within a row", x, deviation))
    note = "The maps are n × k (a Linformer’s), and ranks are relative to k. " if compressed else ""
    return Figure(
        name="spectra",
        title="Spectra while pretraining",
        reading=(
            f"Each line is a layer, deeper ones darker; at update 0 the weights are fresh. {note}Height: the share of "
            f"the sum of singular values that the first quarter of {whole} holds, mean over heads and "
            f"{first.sizes['window']} held-out windows; 0.25 would be a flat spectrum."
        ),
        alt=f"Nuclear fraction at {whole}/4 of {first.sizes['layer']} layers by training step.",
        panels=tuple(panels),
    )


def step_panel(title: str, y_label: str, x: tuple[float, ...], values: np.ndarray) -> Panel:
    """Draw layers by step; ``values`` is ``(step, layer)``."""
    count = values.shape[1]
    marks = tuple(
        Line(x, tuple(map(float, values[:, layer])), f"layer {layer}", layer_color(layer, count), marker="circle")
        for layer in range(count)
    )
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 0.05 * (high - low) + 1e-3
    return Panel(
        title,
        "updates",
        y_label,
        marks,
        x_range=(0.0, max(x) or 1.0),
        y_range=(low - margin, high + margin),
        x_ticks=number_ticks(0.0, max(x) or 1.0),
        y_ticks=number_ticks(low - margin, high + margin),
    )
