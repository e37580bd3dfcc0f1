"""Pictures and page of a truncation, from its result file alone: loss against k, the price of P V, layer by layer."""

import json
from html import escape
from math import log2
from pathlib import Path

import numpy as np
import xarray as xr

from rankscope.report.description import Figure, Line, Mark, Panel, Ticks, number_ticks
from rankscope.report.html import shell, write_picture, write_whole
from rankscope.report.palette import layer_color, null_number
from rankscope.report.sections import picture, scrolling, section
from rankscope.spectrum.intervals import mean_interval
from rankscope.spectrum.parts import disk_error
from rankscope.spectrum.truncate import FILE_NAME

PAGE = "truncation.html"
LOOKS = {
    "best": ("best rank k", "set-0", "circle"),
    "remasked": ("best rank k, re-masked", "set-2", "square"),
    "random": ("random projection", "muted", "triangle"),
}
Numbers = tuple[float, ...]


def write_truncation(ds: xr.Dataset, out: Path) -> Path:
    """Write ``out/truncation.nc``, its pictures as PNG and ``out/truncation.html``, each whole or not at all.

    Args:
        ds: A result of :func:`rankscope.spectrum.truncate.truncate`.
        out: A folder; made if absent.

    Returns:
        The page's path.

    Raises:
        MissingExtraError: matplotlib is not installed.
        RankscopeError: ``out`` cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(out, error) from None
    write_whole(out / FILE_NAME, bytes(ds.to_netcdf(engine="h5netcdf")))
    drawn = figures(ds)
    for figure in drawn:
        write_picture(figure, out / f"{figure.name}.png")
    return write_whole(out / PAGE, page_of(ds, drawn).encode())


def figures(ds: xr.Dataset) -> list[Figure]:
    """Return the pictures' descriptions."""
    made = [output_figure(ds), value_figure(ds)]
    return [*made, layer_figure(ds)] if "cosine_by_layer" in ds else made


def price(ds: xr.Dataset) -> tuple[str, str]:
    """Return the variable that says what truncation costs the output, and its words."""
    if "loss_increase" in ds:
        return "loss_increase", "loss above the model’s own (nats a token)"
    return "cosine", "1 − cosine of final states"


def cost(ds: xr.Dataset, suffix: str = "") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, low and high of the price, ``(variant, k, ...)``; of a cosine, what it lacks to 1."""
    name = price(ds)[0] + suffix
    mean, low, high = mean_interval(ds[name].values, ds.document.values)
    return (1 - mean, 1 - high, 1 - low) if name.startswith("cosine") else (mean, low, high)


def output_figure(ds: xr.Dataset) -> Figure:
    """Draw the output's price against k with all heads truncated, and ranks of a measurement marked."""
    mean, low, high = cost(ds)
    top = float(np.nanmax([mean.max(), np.nanmax(high) if np.isfinite(high).any() else 0])) * 1.05 + 1e-9
    bottom = min(0.0, float(np.nanmin(low)) if np.isfinite(low).any() else 0.0)
    marks: list[Mark] = [
        line(ds, mean[v], *LOOKS[str(name)], low=low[v], high=high[v]) for v, name in enumerate(ds.variant.values)
    ]
    reach = x_range(ds)
    ranks = {"this run’s P": float(ds.energy_rank_90.mean())}
    if "marked_rank" in ds:
        ranks = dict(zip(map(str, ds.baseline.values), map(float, ds.marked_rank.values), strict=True))
    for at, (name, rank) in enumerate(ranks.items()):
        words = f"90 % of σ²: {name.replace('_', ' ')}, k = {rank:.0f}"
        color = "trained" if at == 0 else f"null-{null_number(name, list(ranks)[1:])}"
        where = min(max(log2(rank), reach[0]), reach[1])
        marks.append(Line((where, where), (bottom, top), words, color, dash="6 3"))
    return Figure(
        name="truncation-output",
        title="What truncating every head costs the model’s output",
        reading=(
            f"Every head’s map is replaced during the forward. Height: {price(ds)[1]}; 0 is the model itself. "
            "Bars are 95 % intervals over windows. Dashed uprights stand where the mean head keeps 90 % of σ² "
            "(at the picture’s edge where the rank lies beyond it)."
        ),
        alt=f"{price(ds)[1]} against k for {ds.attrs['model']}.",
        panels=(panel(ds, "all heads at once", price(ds)[1], marks, bottom, top),),
    )


def value_figure(ds: xr.Dataset) -> Figure:
    """Draw the error of P V beside what the spectrum predicts, and the leaked mass where there is a mask."""
    marks: list[Mark] = [
        line(ds, heads_mean(ds.pv_error.sel(variant=name)), *LOOKS[str(name)]) for name in ds.variant.values
    ]
    marks.append(line(ds, heads_mean(ds.predicted_error), "√(σ² beyond k / all σ²)", "ink", "", dash="6 3"))
    top = max(max(mark.y) for mark in marks if isinstance(mark, Line)) * 1.05 + 1e-9
    panels = [panel(ds, "relative error of P V", "‖P̂V − PV‖ / ‖PV‖", marks, 0.0, top)]
    if "remasked" in ds.variant.values:
        leaked = heads_mean(ds.leaked_mass)
        drawn = line(ds, leaked, "mass on the future", "set-3", "diamond")
        panels.append(
            panel(ds, "leaked mass of the best rank k", "share of |P̂|", [drawn], 0.0, max(leaked) * 1.1 + 1e-9)
        )
    return Figure(
        name="truncation-values",
        title="What truncation does to P V, and what the spectrum says of it",
        reading=(
            "Means over windows, layers and heads, P and V of the untouched model. The dashed line is the relative "
            "error of P itself, which is that of P V only if V is white: where the best rank k lies elsewhere, "
            "the spectrum alone misjudges what a head loses."
        ),
        alt=f"Relative error of P V against k for {ds.attrs['model']}.",
        panels=tuple(panels),
    )


def layer_figure(ds: xr.Dataset) -> Figure:
    """Draw the price of each layer truncated alone."""
    mean, _, _ = cost(ds, "_by_layer")
    best = mean[list(ds.variant.values).index("best")]
    count = ds.sizes["layer"]
    marks: list[Mark] = [
        line(ds, best[:, at], f"layer {layer}", layer_color(at, count), "circle")
        for at, layer in enumerate(ds.layer.values)
    ]
    low, high = min(0.0, float(best.min())), float(best.max()) * 1.05 + 1e-9
    return Figure(
        name="truncation-layers",
        title="One layer at a time",
        reading="Only one layer’s heads are truncated to their best rank k, the rest of the model is its own.",
        alt=f"{price(ds)[1]} against k for each layer of {ds.attrs['model']}.",
        panels=(panel(ds, "best rank k in one layer", price(ds)[1], marks, low, high),),
    )


def heads_mean(values: xr.DataArray) -> Numbers:
    """Mean over everything but k."""
    return tuple(float(x) for x in values.mean([dim for dim in values.dims if dim != "k"]).values)


def line(
    ds: xr.Dataset,
    y: np.ndarray | Numbers,
    label: str,
    color: str,
    marker: str,
    *,
    dash: str = "",
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
) -> Line:
    """A series over k, on a base-2 logarithmic axis."""
    x = tuple(log2(k) for k in ds.k.values)
    ends = [() if end is None else tuple(map(float, end)) for end in (low, high)]
    return Line(x, tuple(map(float, y)), label, color, dash=dash, marker=marker, low=ends[0], high=ends[1])


def x_range(ds: xr.Dataset) -> tuple[float, float]:
    """The k axis, with a margin that holds a single k too."""
    return log2(int(ds.k.values[0])) - 0.15, log2(int(ds.k.values[-1])) + 0.15


def panel(ds: xr.Dataset, title: str, y_label: str, marks: list[Mark], low: float, high: float) -> Panel:
    """Axes over k."""
    ticks: Ticks = tuple((log2(k), str(k)) for k in ds.k.values)
    return Panel(
        title,
        "rank k (log scale)",
        y_label,
        tuple(marks),
        x_range=x_range(ds),
        y_range=(low, high),
        x_ticks=ticks,
        y_ticks=number_ticks(low, high),
    )


def page_of(ds: xr.Dataset, drawn: list[Figure]) -> str:
    """Return the whole page."""
    attrs = ds.attrs
    facts = {
        "model": attrs["model"],
        "text": attrs["corpus"],
        "tokens a window": attrs["n"],
        "windows": ds.sizes["window"],
        "judged by": {"cosine": "cosine of final states"}.get(attrs["objective"], f"{attrs['objective']} loss"),
        "interval": attrs["interval"],
        "seed": attrs["seed"],
    }
    if "own_loss" in ds:
        facts["the model’s own loss"] = f"{float(ds.own_loss.mean()):.3f} nats a token"
    if attrs["why_no_loss"]:
        facts["why no loss"] = attrs["why_no_loss"]
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items())
    meanings = "".join(
        f"<dt>{escape(LOOKS[name][0])}</dt><dd>{escape(words)}</dd>"
        for name, words in json.loads(attrs["variants"]).items()
    )
    sections = [
        section("What was run", [f'<dl class="facts">{listed}</dl>', f'<dl class="null">{meanings}</dl>']),
        *(section(figure.title, [f'<div class="card">{picture(figure)}</div>']) for figure in drawn),
        section("The numbers", [table(ds)]),
    ]
    lead = (
        "A rank says how well a map can be copied, not what a copy is worth. Here every head’s P is replaced, while "
        "the model runs, by its best approximation of rank k."
    )
    return shell(f"Truncated attention: {attrs['model']}", lead, sections, "Best rank k: Eckart and Young 1936.")


def table(ds: xr.Dataset) -> str:
    """Return the numbers by variant and k."""
    mean, low, high = cost(ds)
    short = "loss increase" if "loss_increase" in ds else "1 − cosine"
    head = ("variant", "k", short, "95 % interval", "cosine", "error of P V", "predicted", "leaked mass")
    rows = ""
    for v, name in enumerate(ds.variant.values):
        for i, k in enumerate(ds.k.values):
            at = ds.sel(variant=name, k=k)
            interval = "–" if np.isnan(low[v, i]) else f"{low[v, i]:.4f} to {high[v, i]:.4f}".replace("-", "−")
            best = name == "best"
            cells = (
                LOOKS[str(name)][0],
                str(k),
                f"{mean[v, i]:.4f}",
                interval,
                f"{float(at.cosine.mean()):.4f}",
                f"{float(at.pv_error.mean()):.4f}",
                f"{float(at.predicted_error.mean()):.4f}" if best else "–",
                f"{float(at.leaked_mass.mean()):.4f}" if best and "remasked" in ds.variant.values else "–",
            )
            rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return scrolling(f"<thead><tr>{header}</tr></thead><tbody>{rows}</tbody>", "Prices by variant and k")
