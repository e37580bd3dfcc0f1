"""Pictures of the theory studies, each from its dataset alone."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from rankscope._errors import MissingExtraError
from rankscope._registry import Registry
from rankscope.report.theory_canvas import INKS, canvas, line_styles
from rankscope.report.theory_ways import draw_ways
from rankscope.theory.cluster_study import map_at

Pictures = dict[str, Any]
# A heat map is about so many pixels wide.
_PIXELS = 256


def pictures(ds: xr.Dataset) -> Pictures:
    """Return a study's pictures by name: matplotlib figures.

    Raises:
        RankscopeError: The dataset is no study.
        MissingExtraError: matplotlib is not installed.
    """
    return STUDIES[str(ds.attrs.get("study"))](ds)


def png(figure: Any) -> bytes:
    """Return a figure as PNG."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def gif(frames: list[bytes], *, milliseconds: int = 250) -> bytes:
    """Return PNGs as one animated GIF that repeats.

    Raises:
        MissingExtraError: Pillow, which comes with matplotlib, is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pillow", "report", "drawing animations") from None
    images = [Image.open(BytesIO(frame)).convert("P", palette=Image.Palette.ADAPTIVE) for frame in frames]
    buffer = BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
    return buffer.getvalue()


def animation(ds: xr.Dataset) -> bytes:
    """Return P(t) of a clusters study over its times as GIF."""
    frames = []
    for i in range(ds.sizes["time"]):
        figure, axes = canvas(1, 1)
        _heat(axes[0, 0], ds, map_at(ds, i), ds.time.values[i])
        frames.append(png(figure))
    return gif(frames)


def jl_pictures(ds: xr.Dataset) -> Pictures:
    """Failures of both readings against k with the bound; Theorem 2's error and query dependence against δ."""
    eps = 0.5 if 0.5 in ds.eps.values else float(ds.eps.values[0])
    at = ds.sel(eps=eps)
    k = ds.k.values
    figure, axes = canvas(2, 2, sharex=True, sharey=True)
    for ax, matrix in zip(axes.flat, ds.matrix.values, strict=True):
        for ink, kind in zip(INKS, ds.vector.values, strict=False):
            part = at.sel(matrix=matrix, vector=kind)
            low, high = part.relative_failure_low.values, part.relative_failure_high.values
            ax.vlines(k, low, high, color=ink, linewidth=2)
            ax.plot(k, part.relative_failure, color=ink, marker="o", markersize=3, label=f"printed event, w {kind}")
        worst = at.sel(matrix=matrix).additive_failure.max("vector")
        ax.plot(k, worst, color="black", linestyle="--", marker="s", markersize=3, label="additive event, worst w")
        ax.plot(k, at.bound.clip(max=1), color="black", linestyle=":", label="bound 2n exp(−(ε²−ε³)k/4)")
        ax.axvline(ds.attrs["n"], color="#8a93a0", linewidth=1)
        ax.text(ds.attrs["n"], 0.5, " k = n", color="#5b6675", fontsize=8)
        ax.set_title(matrix, fontsize=10)
        ax.set_xscale("log")
        ax.set_xticks([64, 128, 256, 512, 1024, 2048], ["64", "128", "256", "512", "1024", "2048"])
        ax.set_ylim(-0.03, 1.03)
    for ax in axes[-1]:
        ax.set_xlabel("projected length k")
    figure.supylabel(f"share of {ds.attrs['draws']} draws that miss, ε = {eps}", fontsize=10)
    figure.suptitle(f"Theorem 1 at n = {ds.attrs['n']}: the printed event and the one the lemma gives", fontsize=12)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)

    second, axes = canvas(1, 2)
    axes[0, 0].plot(ds.delta, ds.theorem_2_relative_error, color=INKS[0], marker="o")
    axes[0, 0].axhline(1, color="#8a93a0", linewidth=1)
    axes[0, 0].set_ylabel("‖output − PV‖ / ‖PV‖")
    axes[0, 0].set_ylim(0, None)
    axes[0, 1].plot(ds.delta, ds.theorem_2_query_dependence, color=INKS[1], marker="o", label="construction")
    axes[0, 0].text(ds.delta.values.min(), 0.93, "an output of zeros", color="#5b6675", fontsize=8)
    axes[0, 1].axhline(
        ds.attrs["theorem_2_exact_query_dependence"], color="black", linestyle="--", label="exact attention"
    )
    axes[0, 1].set_yscale("log")
    axes[0, 1].set_ylabel("query dependence of the output")
    axes[0, 1].legend(fontsize=8, frameon=False)
    for ax in axes.flat:
        ax.set_xscale("log")
        ax.set_xlabel("δ")
    second.suptitle(f"Theorem 2’s E = δR, F = exp(−δ)R at k = {ds.attrs['theorem_2_k']}", fontsize=12)
    return {"theory_jl_failures": figure, "theory_jl_theorem_2": second}


def clusters_pictures(ds: xr.Dataset) -> Pictures:
    """P(t) as heat maps, the tokens' ways with where they end, rank against time."""
    flow = ds.attrs["flow"]
    heat, axes = canvas(1, ds.sizes["shown"], width=3.2, height=3.4)
    for ax, P, t in zip(axes.flat, ds.P.values, ds.shown.values, strict=True):
        image = _heat(ax, ds, P, t)
    heat.colorbar(image, ax=list(axes.flat), shrink=0.8, label="attention")
    heat.suptitle(f"P(t), flow “{flow}”, n = {ds.attrs['n']}, d = {ds.attrs['d']}", fontsize=12)

    ways = draw_ways(ds)

    rank, axes = canvas(1, 1, width=5.4, height=3.8)
    ax = axes[0, 0]
    ax.plot(ds.time, ds["rank_strict"], color=INKS[6], linestyle="--", label="σ above n · 2⁻⁵² · σ₁")
    ax.plot(ds.time, ds["rank"], color=INKS[0], marker="o", label=f"σ above {ds.attrs['rank_tolerance']:g} · σ₁")
    ax.set_yscale("log")
    ax.set_xlabel("time t")
    ax.set_ylabel("rank of P(t)")
    ax.legend(fontsize=8, frameon=False)
    rank.suptitle(f"Rank against time, flow “{flow}”", fontsize=12)
    stem = f"theory_clusters_{flow}"
    return {f"{stem}_P": heat, f"{stem}_tokens": ways, f"{stem}_rank": rank}


def collapse_pictures(ds: xr.Dataset) -> Pictures:
    """Residual of the tokens and effective rank of P by depth."""
    figure, axes = canvas(1, 2, width=5.2, height=4.2)
    for style, variant in zip(line_styles(), ds.variant.values, strict=False):
        part = ds.sel(variant=variant)
        line = {**style, "marker": "o", "markersize": 3, "label": variant}
        axes[0, 0].plot(ds.depth, part.residual.mean("window"), **line)
        axes[0, 1].plot(ds.layer, part["effective_rank"].mean(("window", "head")), **line)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_xlabel("layers run")
    axes[0, 0].set_ylabel("residual to rank one of the tokens X")
    axes[0, 1].set_xlabel("layer")
    axes[0, 1].set_ylabel(f"effective rank of P (n = {ds.attrs['n']})")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(f"Rank collapse is about tokens, not about P: {ds.attrs['model']}", fontsize=12)
    return {"theory_collapse": figure}


def projections_pictures(ds: xr.Dataset) -> Pictures:
    """Error of PV against k for each layer, and the overlap of the windows' subspaces."""
    layers = ds.sizes["layer"]
    columns = min(3, layers)
    figure, axes = canvas(-(-layers // columns), columns, width=3.7, height=3.1, sharex=True, sharey=True)
    for ax in list(axes.flat)[layers:]:
        ax.remove()
    for ax, layer in zip(axes.flat, ds.layer.values, strict=False):
        for style, name in zip(line_styles(), ds.projection.values, strict=False):
            y = ds.error.sel(projection=name, layer=layer).mean("head")
            # A log axis has no zero: the floor is drawn down to the axis' end.
            ax.plot(ds.k, y.clip(min=1e-3), **style, marker="o", markersize=3, label=str(name).replace("_", " "))
        ax.set_title(f"layer {layer}", fontsize=10)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(ds.k.values, [str(k) for k in ds.k.values])
        ax.minorticks_off()
    axes.flat[0].set_ylim(1e-3, None)
    for ax in list(axes.flat)[max(0, layers - columns) : layers]:
        ax.set_xlabel("projected length k")
    figure.supylabel("‖output − PV‖ / ‖PV‖", fontsize=10)
    figure.suptitle(f"Error at equal k: {ds.attrs['model']}, n = {ds.attrs['n']}", fontsize=12)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)

    second, axes = canvas(1, 1, width=5.4, height=4.0)
    ax = axes[0, 0]
    for style, layer in zip(line_styles(), ds.layer.values, strict=False):
        line = {**style, "marker": "o", "markersize": 3, "label": f"layer {layer}"}
        ax.plot(ds.k, ds.overlap.sel(layer=layer).mean("head"), **line)
    ax.plot(ds.k, ds.chance, color="black", linestyle=":", label="chance, k/n")
    ax.set_xlabel("projected length k")
    ax.set_ylabel("mean cos² of principal angles")
    ax.set_ylim(0, 1)
    ax.legend(fontsize=8, frameon=False, ncols=2)
    second.suptitle("Do two windows share their leading subspace?", fontsize=12)
    return {"theory_projections": figure, "theory_projections_overlap": second}


def _heat(ax: Any, ds: xr.Dataset, P: NDArray[Any], t: float) -> Any:
    # Tokens in the order of their first coordinate, so that clusters are blocks.
    order = ds.tokens.values[0, :, 0].argsort()
    # More tokens than pixels: a pixel is the largest of its block, else a column of ones would go unseen.
    block = -(-len(P) // _PIXELS)
    starts = np.arange(0, len(P), block)
    P = np.maximum.reduceat(np.maximum.reduceat(P[order][:, order], starts, axis=0), starts, axis=1)
    extent = (-0.5, order.size - 0.5, order.size - 0.5, -0.5)
    image = ax.imshow(P, extent=extent, vmin=0, vmax=1, cmap="magma", interpolation="nearest")
    ax.set_title(f"t = {t:.3g}", fontsize=10)
    ax.set_xlabel("token attended to" if block == 1 else f"token attended to (largest of {block} × {block})")
    ax.set_ylabel("token")
    return image


#: A picture maker for each study.
STUDIES: Registry[Callable[[xr.Dataset], Pictures]] = Registry(
    "study",
    {
        "jl": jl_pictures,
        "clusters": clusters_pictures,
        "collapse": collapse_pictures,
        "projections": projections_pictures,
    },
)
