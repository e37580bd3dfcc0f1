"""A result in plain words: every sentence stands only if the numbers and their intervals carry it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
import xarray as xr

from rankscope.report import reading
from rankscope.report.reading import QUARTER, TRAINED, Array
from rankscope.report.statistics import DepthTrend, Estimate, depth_trend, difference, estimate

RANK = "nuclear_rank_90"
SIDES = {-1: "fewer than in every null", 1: "more than in every null"}


@dataclass(frozen=True)
class Verdict:
    """How a layer stands to a null: the sign that holds for all layers and nulls at once, and the numbers."""

    sign: int
    gap: Estimate
    null: float


def statements(ds: xr.Dataset) -> list[str]:
    """Say what a result shows, null beside each number, in sentences that its intervals support.

    What is said of single layers against a null holds for all layers at once: intervals are widened to
    1 − .05 / layers (Bonferroni); "every null" needs each of them and so no widening of its own. A trend with depth is
    claimed only if p < .05 and ρ keeps its sign over windows. One window gives no interval, so nothing is claimed
    beyond it.

    Args:
        ds: A result.

    Returns:
        Plain text, the most important first.

    Raises:
        RankscopeError: ``ds`` is no result.
    """
    reading.check(ds)
    said = [overall(ds), *(against(ds, name) for name in reading.nulls(ds)), *directions(ds)]
    for kind, layers in reading.kinds(ds).items():
        said += trend(ds, kind, layers)
    said += [*one_direction(ds), *spread_of_heads(ds), *logits(ds), *limits(ds)]
    return [sentence for sentence in said if sentence]


def overall(ds: xr.Dataset) -> str:
    """Say what share the top quarter holds, on average, and what it holds in each null."""
    values = everywhere(ds, TRAINED)
    if values is None:
        return "The result holds no numbers at a quarter of the singular values."
    mean = estimate(values, reading.documents(ds, values))
    layers, heads = counted(ds.sizes["layer"], "layer"), counted(reading.head_count(ds), "head")
    words = f"{reading.quarter_words(ds)} hold {percent(mean.value)} of the sum of all{within(mean, percent)}"
    start = f"{reading.model_name(ds)} on {reading.corpus_name(ds)}, averaged over {layers} and {heads}: {words}."
    beside = [
        f"{plain(name)} {percent(float(np.nanmean(other)))}"
        for name in reading.nulls(ds)
        if (other := everywhere(ds, name)) is not None
    ]
    if not beside:
        return f"{start} No null was measured, so this number says nothing about what training did."
    return f"{start} In the nulls they hold: {', '.join(beside)}."


def against(ds: xr.Dataset, name: str) -> str:
    """Say whether trained is above or below one null, by how much, and in how many layers."""
    values, others = everywhere(ds, TRAINED), everywhere(ds, name)
    if values is None or others is None:
        return ""
    values = reading.matched(values, others)
    gap = difference(values, others, reading.documents(ds, values))
    start = f"Against the null “{plain(name)}”"
    side = "more" if gap.value > 0 else "less"
    if not gap.has_interval:
        return f"{start}: {points(abs(gap.value))} {side}, without an interval (see below)."
    signs = [verdict.sign for verdict in verdicts(ds, name, QUARTER)]
    layers = f"above in {signs.count(1)} and below in {signs.count(-1)} of {counted(len(signs), 'layer')}"
    if untold := signs.count(0):
        layers += f", {untold} cannot be told"
    if not gap.sign:
        return f"{start}: no difference can be told on average, {signed(gap.value)}{within(gap, points)}; {layers}."
    size = gap if gap.sign > 0 else flipped(gap)
    return f"{start}: {points(size.value)} {side}{within(size, points)}; {layers}."


def directions(ds: xr.Dataset) -> list[str]:
    """Say how many directions hold 90 % of σ, for the layers that differ from every null the same way."""
    trained = reading.layer_series(ds, RANK, TRAINED)
    if trained is None:
        return []
    means = reading.mean_over(trained, 0)
    names = [name for name in reading.nulls(ds) if reading.layer_series(ds, RANK, name) is not None]
    said = []
    for kind, layers in reading.kinds(ds).items():
        place = f"In {reading.kind_label(kind)}, " if len(reading.kinds(ds)) > 1 else ""
        if not names:
            said.append(f"{place}90 % of σ lies in {span(ds, means[layers])}; no null says how many noise would need.")
            continue
        table = {name: verdicts(ds, name, RANK) for name in names}
        signs = {layer: {table[name][layer].sign for name in names} for layer in layers}
        groups = [([layer for layer in layers if signs[layer] == {s}], w) for s, w in SIDES.items()]
        rest = [layer for layer in layers if signs[layer] not in ({-1}, {1})]
        for chosen, words in (*groups, (rest, "between the nulls or too close to one of them to tell apart")):
            if chosen:
                needed = {name: np.array([table[name][layer].null for layer in chosen]) for name in names}
                beside = ", ".join(f"{plain(name)} {span(ds, null, short=True)}" for name, null in needed.items())
                verb = "hold" if len(chosen) > 1 else "holds"
                who = capital(f"{place}{named(ds, chosen)}")
                said.append(f"{who} {verb} 90 % of σ in {span(ds, means[chosen])}, {words}; the nulls need: {beside}.")
    return said


def trend(ds: xr.Dataset, kind: str, layers: list[int]) -> list[str]:
    """Say whether the share goes with depth, and whether a null does the same without the training."""
    values = reading.layer_series(ds, QUARTER, TRAINED)
    if values is None or len(layers) < 3:
        return []
    own = depth_trend(values[:, layers], reading.documents(ds, values))
    place = f" in {reading.kind_label(kind)}" if len(reading.kinds(ds)) > 1 else ""
    if isnan(own.rho):
        return [f"No depth trend can be told{place}: the layers do not differ."]
    if not own.sign:
        return [f"No depth trend can be claimed{place}: {rho_words(own)}."]
    direction = "more" if own.sign > 0 else "less"
    step = f"{signed(own.slope.value)} from one layer to the next{within(own.slope, points)}"
    beside = []
    for name in reading.nulls(ds):
        others = reading.layer_series(ds, QUARTER, name)
        if others is not None:
            null = depth_trend(others[:, layers], reading.documents(ds, others))
            course = {own.sign: "the same way", 0: "no trend", -own.sign: "the opposite way"}[null.sign]
            beside.append(f"{plain(name)} {course}" + (f" (ρ = {decimal(null.rho)})" if not isnan(null.rho) else ""))
    tail = f" The nulls: {', '.join(beside)}." if beside else " No null says how much of it is scale alone."
    return [f"Deeper layers are {direction} concentrated{place}: {rho_words(own)}; {step}.{tail}"]


def one_direction(ds: xr.Dataset) -> list[str]:
    """Warn where one singular value makes most of an energy figure."""
    whole = reading.layer_series(ds, "energy_fraction_at_quarter", TRAINED)
    rest = reading.layer_series(ds, "energy_fraction_at_quarter_deflated", TRAINED)
    if whole is None or rest is None:
        return []
    first, second = reading.mean_over(whole, 1), reading.mean_over(rest, 1)
    gap = difference(first, second, reading.documents(ds, first))
    if gap.sign <= 0 or gap.value < 0.05:
        return []
    return [
        f"By energy (σ²) the same directions hold {percent(float(np.nanmean(first)))}, but "
        f"{percent(float(np.nanmean(second)))} once the single largest singular value is set aside: part of the energy "
        "figure is one direction."
    ]


def spread_of_heads(ds: xr.Dataset) -> list[str]:
    """Say whether heads of one layer differ more than layers do."""
    values = reading.series(ds, QUARTER, TRAINED)
    if values is None or len(values) < 2 or values.shape[1] < 3 or values.shape[2] < 3:
        return []
    heads = reading.mean_over(values, 0)
    between = float(np.std(reading.mean_over(heads, 1), ddof=1))
    inside = float(np.sqrt(np.nanmean(np.nanvar(heads, axis=1, ddof=1))))
    if inside > 1.25 * between:
        return [
            f"Heads of one layer differ more (sd {points(inside)}) than layers do (sd {points(between)}): a layer's "
            "mean hides its heads, see the heatmap."
        ]
    return []


def logits(ds: xr.Dataset) -> list[str]:
    """Say how far logits deviate, since small deviations concentrate any map."""
    values = reading.layer_series(ds, "logit_sd", TRAINED)
    if values is None or np.isnan(values).all():
        return []
    means = reading.mean_over(values, 0)
    low, high = int(np.nanargmin(means)), int(np.nanargmax(means))
    names = reading.layer_names(ds)
    where = f"from {means[low]:.2f} (layer {names[low]}) to {means[high]:.2f} (layer {names[high]})"
    where = f"by {means[low]:.2f}" if low == high else where
    return [f"Logits vary {where} within a row (root mean square): the scale that the nulls are matched to."]


def limits(ds: xr.Dataset) -> list[str]:
    """Say what the numbers do not reach."""
    said = []
    values = reading.series(ds, QUARTER, TRAINED)
    windows = reading.window_count(ds, TRAINED)
    if values is None:
        said.append("The result holds no numbers for single windows: no interval can be given, so none is claimed.")
    elif windows < 2:
        said.append("One window was measured: there is no interval, and nothing is claimed beyond that window.")
    elif any(reading.window_count(ds, name) < 2 for name in reading.nulls(ds)):
        said.append("A null was measured on fewer than two windows: no interval for the distance to it.")
    if "nuclear_fraction_low" in ds:
        curve, low, high = (reading.mean_over(c, (0, 1)) for c in reading.curve(ds, TRAINED))
        if not np.isnan(curve).all():
            wide = float(np.nanmax(high - low))
            said.append(f"Curves are bounds from a matrix-free method, up to {points(wide)} apart; middles are quoted.")
    said.append(f"All of this speaks of {reading.model_name(ds)} on {reading.corpus_name(ds)}, and of nothing else.")
    return said


def verdicts(ds: xr.Dataset, name: str, scalar: str) -> list[Verdict]:
    """Return for each layer how trained stands to a null, at a confidence that all layers share."""
    values, others = reading.layer_series(ds, scalar, TRAINED), reading.layer_series(ds, scalar, name)
    if values is None or others is None:
        return []
    values = reading.matched(values, others)
    confidence = 1 - 0.05 / ds.sizes["layer"]
    found = []
    for layer in range(values.shape[1]):
        own, null = values[:, layer], others[:, layer]
        gap = difference(own, null, reading.documents(ds, values), confidence=confidence)
        found.append(Verdict(gap.sign, gap, float(reading.mean_over(null, 0))))
    return found


def everywhere(ds: xr.Dataset, baseline: str) -> Array | None:
    """Return the share at n/4 averaged over all heads of all layers, one number a window."""
    values = reading.series(ds, QUARTER, baseline)
    if values is None:
        layers = reading.quarter_of_curve(ds, baseline)[None]
        return None if np.isnan(layers).all() else reading.mean_over(layers, (1, 2))
    return reading.mean_over(values, (1, 2))


def flipped(gap: Estimate) -> Estimate:
    """Return the same difference taken the other way round."""
    return Estimate(-gap.value, -gap.high, -gap.low, gap.windows)


def percent(value: float) -> str:
    """Return a share in per cent.

    Example:
        >>> percent(0.8293)
        '82.9 %'
    """
    return f"{100 * value:.1f} %".replace("-", "−")


def points(value: float) -> str:
    """Return a difference of shares in percentage points.

    Example:
        >>> points(0.1234)
        '12.3 points'
    """
    return f"{round(100 * value, 1) + 0.0:.1f} points".replace("-", "−")


def signed(value: float) -> str:
    """Return a difference with its sign.

    Example:
        >>> signed(-0.002)
        '−0.2 points'
    """
    size = round(100 * value, 1)
    return f"{size:+.1f} points".replace("-", "−") if size else points(0.0)


def decimal(value: float) -> str:
    """Return ρ or p the way papers print it.

    Example:
        >>> decimal(0.829), decimal(-0.76), decimal(1.0), decimal(0.0004)
        ('.83', '−.76', '1.00', '< .001')
    """
    if 0 < value < 0.001:
        return "< .001"
    text = f"{abs(value):.3f}" if abs(value) < 0.1 else f"{abs(value):.2f}"
    return ("−" if value < 0 else "") + text.removeprefix("0")


def within(e: Estimate, unit: object) -> str:
    """Return an estimate's interval in brackets, empty where it has none."""
    if not e.has_interval:
        return ""
    write = percent if unit is percent else points
    low, high = write(e.low), write(e.high)
    low = low.removesuffix(" %").removesuffix(" points")
    source = counted(e.windows, "window") + (" of one document" if e.is_of_one_document else "")
    return f" (95 % interval {low} to {high}, {source})"


def rho_words(t: DepthTrend) -> str:
    """Return Spearman's ρ with p and its interval."""
    over = (
        ""
        if isnan(t.rho_low) or decimal(t.rho_low) == decimal(t.rho_high)
        else f", ρ over windows {decimal(t.rho_low)} to {decimal(t.rho_high)}"
    )
    p = decimal(t.p)
    p = p if p.startswith("<") else f"= {p}"
    return (
        f"Spearman’s ρ = {decimal(t.rho)} between depth and the share held at n/4, p {p} over {t.layers} layers{over}"
    )


def span(ds: xr.Dataset, values: Array, *, short: bool = False) -> str:
    """Return the lowest to the highest of some ranks, with what they are out of unless ``short``."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if reading.is_fractional(ds) and high <= 1:
        text = percent(low) if f"{low:.3f}" == f"{high:.3f}" else f"{100 * low:.1f} to {percent(high)}"
        return text if short else f"{text} of a sentence's directions"
    text = f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"
    if short:
        return text
    return f"{text} directions" if reading.is_fractional(ds) else f"{text} of {reading.total(ds)} directions"


def named(ds: xr.Dataset, layers: Sequence[int]) -> str:
    """Return layers by number, runs joined.

    Example:
        >>> ds = xr.Dataset(coords={"layer": range(8)})
        >>> named(ds, [3, 4, 5]), named(ds, [0, 2, 3, 4, 7]), named(ds, [6])
        ('layers 3–5', 'layers 0, 2–4, 7', 'layer 6')
    """
    numbers = reading.layer_names(ds)
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    words = []
    for run in runs:
        ends = [numbers[run[0]], numbers[run[-1]]]
        words.append(ends[0] if len(run) == 1 else "–".join(ends) if len(run) > 2 else ", ".join(ends))
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(words)}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    Example:
        >>> counted(1, "window"), counted(64, "window")
        ('1 window', '64 windows')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def plain(name: str) -> str:
    """Return a null's name without its underscores."""
    return name.replace("_", " ")


def capital(words: str) -> str:
    """Return words with a capital first letter, the rest as it is."""
    return words[:1].upper() + words[1:]
