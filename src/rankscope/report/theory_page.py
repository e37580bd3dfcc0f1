"""One self-contained page of a theory study: its words, pictures and numbers, from the dataset alone."""

import base64
import json
from collections.abc import Callable
from html import escape
from pathlib import Path

import xarray as xr

from rankscope._environment import version_of
from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.report.html import style, write_whole
from rankscope.report.sections import scrolling, section
from rankscope.report.theory_figures import animation, pictures, png

Rows = list[tuple[str, ...]]


def write_theory(ds: xr.Dataset, out: Path) -> Path:
    """Write ``out/theory.nc``, its pictures as PNG (and GIF) and ``out/theory.html``, each whole or not at all.

    Args:
        ds: A study of :mod:`rankscope.theory.studies`.
        out: A folder; made if absent.

    Returns:
        The page's path.

    Raises:
        MissingExtraError: matplotlib is not installed.
        RankscopeError: The dataset is no study, or ``out`` cannot be written.
    """
    drawn = {f"{name}.png": png(figure) for name, figure in pictures(ds).items()}
    if ds.attrs["study"] == "clusters":
        drawn[f"theory_clusters_{ds.attrs['flow']}.gif"] = animation(ds)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RankscopeError(f"`out` {str(out)!r} is no folder that can be made ({error}): give another") from None
    # Late maps are zeros and ones: compressed, they are next to nothing.
    packed = {name: {"zlib": True} for name in ("P", "way") if name in ds}
    write_whole(out / "theory.nc", bytes(ds.to_netcdf(engine="h5netcdf", encoding=packed)))
    for name, content in drawn.items():
        write_whole(out / name, content)
    return write_whole(out / "theory.html", page_of(ds, drawn).encode())


def page_of(ds: xr.Dataset, drawn: dict[str, bytes]) -> str:
    """Return the whole page."""
    title, lead = TITLES[ds.attrs["study"]]
    facts = "".join(
        f"<div><dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd></div>"
        for key, value in ds.attrs.items()
        if key not in ("study", "environment", "verdicts", "leaders")
    )
    settings = f'<dl class="facts">{facts}</dl>'
    shown = [
        f'<figure><img style="max-width:100%" alt="{escape(name)}" src="data:image/{name.rpartition(".")[2]};base64,'
        f'{base64.b64encode(content).decode()}"></figure>'
        for name, content in drawn.items()
    ]
    head, *rows = TABLES[ds.attrs["study"]](ds)
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    table = scrolling(f"<thead><tr>{header}</tr></thead><tbody>{cells}</tbody>", title)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style()}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header><main>'
        f"{section('What was run', [settings])}"
        f"{section('Pictures', shown)}{section('Numbers', [table])}</main>"
        f"<footer><p>Made by rankscope {escape(str(version_of('rankscope')))} from theory.nc alone.</p></footer>"
        "</body></html>\n"
    )


def jl_table(ds: xr.Dataset) -> Rows:
    """Every count with its interval."""
    rows: Rows = [("matrix", "w", "ε", "k", "printed event missed", "additive event missed", "bound", "mean error")]
    for matrix in ds.matrix.values:
        for kind in ds.vector.values:
            for eps in ds.eps.values:
                for k in ds.k.values:
                    at = ds.sel(matrix=matrix, vector=kind, eps=eps, k=k)
                    shares = tuple(
                        f"{float(at[name]):.3f} [{float(at[f'{name}_low']):.3f}, {float(at[f'{name}_high']):.3f}]"
                        for name in ("relative_failure", "additive_failure")
                    )
                    numbers = (f"{float(at.bound):.3g}", f"{float(at.relative_error):.3f}")
                    rows.append((str(matrix), str(kind), f"{eps:.3g}", str(k), *shares, *numbers))
    return rows


def clusters_table(ds: xr.Dataset) -> Rows:
    """The verdicts, then rank by time."""
    verdicts = json.loads(ds.attrs["verdicts"])
    rows: Rows = [("theorem or time", "verdict, or rank of P")]
    rows += [(name, words.partition(": ")[2]) for name, words in verdicts.items()]
    return rows + [(f"t = {float(t):.3g}", str(int(rank))) for t, rank in zip(ds.time, ds["rank"], strict=True)]


def collapse_table(ds: xr.Dataset) -> Rows:
    """Residual and ranks after each layer."""
    rows: Rows = [("variant", "layers run", "residual of X", "effective rank of P", "rank of P at 90 % of σ²")]
    for variant in ds.variant.values:
        part = ds.sel(variant=variant)
        for depth in ds.depth.values:
            ranks = ("–", "–")
            if depth:
                last = part.sel(layer=depth - 1)
                ranks = (f"{float(last['effective_rank'].mean()):.1f}", f"{float(last['energy_rank_90'].mean()):.1f}")
            residual = float(part.residual.sel(depth=depth).mean())
            rows.append((str(variant), str(depth), f"{residual:.3g}", *ranks))
    return rows


def projections_table(ds: xr.Dataset) -> Rows:
    """Mean error over heads, a column a k."""
    rows: Rows = [("projection", "layer", *(f"k = {k}" for k in ds.k.values))]
    for name in ds.projection.values:
        for layer in ds.layer.values:
            errors = ds.error.sel(projection=name, layer=layer).mean("head").values
            rows.append(
                (
                    str(name).replace("_", " "),
                    str(layer),
                    *("–" if error != error else f"{error:.3f}" for error in errors),
                )
            )
    for layer in ds.layer.values:
        shares = ds.overlap.sel(layer=layer).mean("head").values
        rows.append(("overlap of two windows’ subspaces (cos²)", str(layer), *(f"{share:.3f}" for share in shares)))
    return [*rows, ("the same by chance", "", *(f"{share:.3f}" for share in ds.chance.values))]


TITLES = Registry(
    "study",
    {
        "jl": (
            "Linformer’s theorems, counted",
            "How often a Gaussian projection misses what Theorem 1 prints and what its lemma gives, with 95 % "
            "Clopper–Pearson intervals; the worst of heads and vectors is shown.",
        ),
        "clusters": (
            "Tokens under attention alone",
            "The flow of arXiv 2305.05465, its P(t), and what each theorem says of this run: hypotheses first.",
        ),
        "collapse": (
            "Rank collapse by depth",
            "The tokens’ residual to one common row (arXiv 2103.03404) in a real model with and without its parts, and "
            "the rank of P in the same forwards. Collapse is about the tokens X; P has no part in the statement.",
        ),
        "projections": (
            "Projections at equal k",
            "What a head’s output PV loses under each projection of the sequence axis. Subspaces of P and the best of "
            "PV are references that need P itself; what is fitted is judged on windows it has not seen. “–”: a "
            "convolution whose stride is its width needs a k that divides n.",
        ),
    },
)
TABLES: Registry[Callable[[xr.Dataset], Rows]] = Registry(
    "study",
    {"jl": jl_table, "clusters": clusters_table, "collapse": collapse_table, "projections": projections_table},
)
