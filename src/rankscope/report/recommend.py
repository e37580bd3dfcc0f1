"""A measured spectrum and this machine's times joined: keep exact attention, or Linformer with which k, and why."""

from dataclasses import dataclass
from math import ceil, isnan

import numpy as np
import xarray as xr

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.bench.cases import CHOICES, Case
from rankscope.bench.cost_model import Rates, measure_rates, predict
from rankscope.report import reading
from rankscope.report.bench_figures import bytes_words, seconds_words
from rankscope.report.bench_reading import Group, Row, groups, machine_of

EXACT, LINFORMER = "exact", "linformer"
ROUND_TO = 8


@dataclass(frozen=True)
class Times:
    """What one call of exact fused attention and of Linformer costs.

    Args:
        exact: Seconds.
        linformer: Seconds.
        exact_bytes: Peak memory; NaN where not known.
        linformer_bytes: The same.
        source: Where the numbers come from, in words.
        foreign: Whether they were measured on another machine than this one.
    """

    exact: float
    linformer: float
    exact_bytes: float
    linformer_bytes: float
    source: str
    foreign: bool = False


@dataclass(frozen=True)
class Advice:
    """What to do, and why.

    Args:
        choice: ``"exact"`` or ``"linformer"``.
        k: Projected length of each layer, by the layer's number; empty where exact attention is kept.
        needed: The k that each layer's spectrum asks for, whatever the choice; n where nothing smaller does.
        lines: The reasons in plain words, the choice first.
    """

    choice: str
    k: dict[int, int]
    needed: dict[int, int]
    lines: tuple[str, ...]


def recommend(
    ds: xr.Dataset,
    rows: list[Row] | None = None,
    *,
    keep: float = 0.9,
    mode: str = "forward",
    rates: Rates | None = None,
) -> Advice:
    """Say whether Linformer pays at a result's n, with which k in each layer.

    A layer's k is the smallest at which its heads' k largest singular values hold ``keep`` of their sum, on the mean
    over heads, rounded up to a multiple of 8. It is what *any* attention of rank k needs, so a least k: Linformer's
    projections are not the best ones of each window. Linformer is advised where all k are below n and its time, at
    the largest of them, is below exact fused attention's.

    Args:
        ds: A result of ``rankscope measure``.
        rows: A benchmark of this machine (:func:`rankscope.bench.store.load`); without it times are predicted by
            the cost model from the machine's rates.
        keep: Share in (0, 1) of the sum of singular values.
        mode: ``"forward"`` or ``"train"``: whose time counts.
        rates: The machine's rates; default measured now, where they are needed.

    Returns:
        The advice.

    Raises:
        RankscopeError: No result, or a number out of range.
    """
    reading.check(ds)
    CHOICES["mode"][mode]
    if not 0 < keep < 1:
        raise RankscopeError(f"`keep` must be a share in (0, 1), got {keep}")
    n = int(str(reading.attribute(ds, "n", reading.total(ds))))
    needed = needed_k(ds, reading.TRAINED, keep, n)
    largest = max(needed.values())
    spectra = spectrum_lines(ds, needed, keep, n)
    decoders = [kind for kind in reading.kinds(ds) if "decoder" in kind and "cross" not in kind]
    if decoders:
        first = (
            f"Keep exact attention at n = {n:,}: these layers are a decoder's, and a projection over the whole text "
            "has no causal form. A decoder trained anew may take the chunked one, LinformerForCausalLM."
        )
        return Advice(EXACT, {}, needed, (first, *spectra))
    if largest >= n:
        first = f"Keep exact attention at n = {n:,}: a layer's spectrum leaves no k below n."
        return Advice(EXACT, {}, needed, (first, *spectra))
    times = times_of(n, largest, rows, mode, rates, reading.head_count(ds) // max(1, ds.sizes["layer"]))
    cost = cost_lines(times, n, largest)
    if times.linformer >= times.exact:
        first = (
            f"Keep exact attention at n = {n:,}: on this machine Linformer with the k these spectra ask for "
            f"(up to {largest}) is not faster."
        )
        return Advice(EXACT, {}, needed, (first, *cost, *spectra))
    listed = ", ".join(f"layer {layer}: {k}" for layer, k in needed.items())
    first = f"Linformer can pay at n = {n:,}, with k of at least {listed}."
    caveat = (
        "These k are what the best projection for each window would need. Linformer learns one projection for all "
        "windows: train it with them, and compare its quality before you rely on it."
    )
    return Advice(LINFORMER, needed, needed, (first, *cost, *spectra, caveat))


def needed_k(ds: xr.Dataset, baseline: str, keep: float, n: int) -> dict[int, int]:
    """Return each layer's k by its number: where the mean curve over heads reaches ``keep``; at most n.

    Where a curve is known as a band only, its lower end counts.
    """
    _, low, _ = reading.curve(ds, baseline)
    fractions = reading.fractions(ds)
    found = {}
    for layer, curve in zip(ds["layer"].values, reading.mean_over(low, 1), strict=True):
        if np.isnan(curve).all():
            continue
        reached = np.flatnonzero(curve >= keep)
        share = float(fractions[reached[0]]) if reached.size else 1.0
        found[int(layer)] = min(n, ROUND_TO * ceil(round(share * n, 6) / ROUND_TO))
    return found


def spectrum_lines(ds: xr.Dataset, needed: dict[int, int], keep: float, n: int) -> list[str]:
    """Return what the spectra say, with a null beside them."""
    share = f"{100 * keep:g} %"
    listed = ", ".join(f"{layer}: {k}" for layer, k in needed.items())
    lines = [
        f"To hold {share} of the sum of singular values of {reading.model_name(ds)} on {reading.corpus_name(ds)}, "
        f"the layers need k of (layer: k) {listed}, of n = {n:,}."
    ]
    told = []
    for name in reading.nulls(ds):
        null = needed_k(ds, name, keep, n)
        if null:
            told.append(f"{reading.null_label(name)} {min(null.values())} to {max(null.values())}")
    if told:
        lines.append(f"The nulls need, by layer: {'; '.join(told)}. Only what lies below them is the training's doing.")
    return lines


def cost_lines(times: Times, n: int, k: int) -> list[str]:
    """Return what the times say."""
    ratio = times.exact / times.linformer
    lines = [
        f"At n = {n:,} and k = {k} exact fused attention takes {seconds_words(times.exact)}, Linformer "
        f"{seconds_words(times.linformer)} ({ratio:.2g} times as fast): {times.source}."
    ]
    if not isnan(times.exact_bytes) and not isnan(times.linformer_bytes):
        lines.append(
            f"Peak memory: {bytes_words(times.exact_bytes)} against {bytes_words(times.linformer_bytes)}. Fused "
            "attention keeps no n × n matrix, so memory alone is rarely a reason."
        )
    if times.foreign:
        lines.append("The benchmark was measured on another machine than this one: run it here before you decide.")
    return lines


def times_of(n: int, k: int, rows: list[Row] | None, mode: str, rates: Rates | None, heads: int) -> Times:
    """Return the times of exact fused attention and of Linformer at (n, k): measured if they can be, else predicted."""
    measured = None if rows is None else interpolated(n, k, rows, mode)
    if measured is not None:
        return measured
    rates = measure_rates() if rates is None else rates
    exact, ours = (
        predict(Case(name, n, size, mode=mode, heads=max(1, heads)), rates)
        for name, size in (("sdpa", None), ("linformer", k))
    )
    why = "" if rows is None else ", since the benchmark does not reach this n and k"
    source = f"predicted from operations and bytes at this machine's measured rates{why}"
    return Times(exact.seconds, ours.seconds, exact.peak_bytes, ours.peak_bytes, source)


def interpolated(n: int, k: int, rows: list[Row], mode: str) -> Times | None:
    """Return times at n by log–log interpolation, Linformer's at the smallest measured k that is enough.

    ``None`` where the benchmark does not hold both at lengths around n; n is never extrapolated.
    """
    for group in sorted(groups(rows), key=lambda group: group.view != "attention"):
        if group.mode != mode or group.conditions["causal"]:
            continue
        enough = sorted(s.k for s in group.series if s.mechanism == "linformer" and s.k is not None and s.k >= k)
        for size in enough:
            found = [at(group, name, own, n) for name, own in (("sdpa", None), ("linformer", size))]
            if isnan(found[0][0]) or isnan(found[1][0]):
                continue
            foreign = group.machine != machine_of({"environment": environment(), "device": group.conditions["device"]})
            source = f"measured at k = {size}, {group.title} ({group.words()})"
            return Times(found[0][0], found[1][0], found[0][1], found[1][1], source, foreign)
    return None


def at(group: Group, mechanism: str, k: int | None, n: int) -> tuple[float, float]:
    """Return a series' time and peak memory at n, NaN outside its lengths."""
    series = group.find(mechanism, k)
    found = []
    for field in ("seconds_median", "peak_bytes"):
        known = {} if series is None else series.values(field)
        if not known or not min(known) <= n <= max(known):
            found.append(float("nan"))
            continue
        found.append(float(np.exp(np.interp(np.log(n), np.log(list(known)), np.log(list(known.values()))))))
    return found[0], found[1]
