"""One self-contained page, and its pictures, from result files alone."""

import base64
import hashlib
import os
from collections.abc import Callable
from html import escape
from importlib.resources import files
from pathlib import Path

import xarray as xr

from rankscope._environment import version_of
from rankscope._errors import MissingExtraError, RankscopeError
from rankscope.report import figures, reading, table
from rankscope.report.description import Figure
from rankscope.report.drawing import to_matplotlib
from rankscope.report.lengths import of_several_lengths, rank_growth
from rankscope.report.palette import COLORS, HEAT
from rankscope.report.sections import (
    comparison_table,
    explained,
    measured,
    numbers,
    picture,
    said,
    section,
    topic,
    trust,
)
from rankscope.spectrum.parts import disk_error, publish

PAGE = "report.html"
PICTURES: tuple[Callable[[xr.Dataset, str], Figure], ...] = (
    figures.layer_curves,
    figures.layer_panels,
    figures.heatmap,
    figures.depth_trend,
    figures.excess,
    figures.windows_distribution,
)
THEME = {
    "paper": ("#f4f6f8", "#0e141b"),
    "card": ("#ffffff", "#161e28"),
    "rule": ("#dbe1e8", "#2b3644"),
    "accent": ("#0b5c8a", "#6cc4f5"),
    "good": ("#1c7a4d", "#6fdca6"),
    "bad": ("#a61b32", "#ff8aa6"),
}


def write_report(datasets: list[xr.Dataset], out: Path, *, pictures: bool = True) -> Path:
    """Write ``out/report.html``, its pictures as PNG and its table as CSV, each whole or not at all.

    The page needs no network and no other file. Two or more results are put side by side. Its size does not
    depend on n: curves are drawn at 100 points at most.

    Args:
        datasets: Results of ``rankscope measure``, one at least.
        out: A folder; made if absent.
        pictures: Whether to write the PNGs, which need matplotlib; the page draws its own.

    Returns:
        The page's path.

    Raises:
        MissingExtraError: ``pictures`` is wanted and matplotlib is not installed.
        RankscopeError: A dataset is no result, there is none, or ``out`` cannot be written.
    """
    if not datasets:
        raise RankscopeError("`datasets` must hold one result at least, got none")
    for ds in datasets:
        reading.check(ds)
    if pictures and version_of("matplotlib") is None:
        raise MissingExtraError("matplotlib", "report", "writing pictures (or leave them out with pictures=False)")
    drawn = [[describe(ds, "none") for describe in PICTURES] for ds in datasets]
    comparisons = [figures.compare(datasets, "none")] if len(datasets) > 1 else []
    if of_several_lengths(datasets):
        comparisons.append(rank_growth(datasets, "none"))
    tables = [table.rows(ds) for ds in datasets]
    page = page_of(datasets, drawn, comparisons, tables)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(out, error) from None
    for i, (own, rows) in enumerate(zip(drawn, tables, strict=True), 1):
        stem = f"{i}-" if len(datasets) > 1 else ""
        write_whole(out / f"{stem}heads.csv", table.to_csv(rows).encode())
        for figure in own if pictures else ():
            write_picture(figure, out / f"{stem}{figure.name}.png")
    for figure in comparisons if pictures else ():
        write_picture(figure, out / f"{figure.name}.png")
    return write_whole(out / PAGE, page.encode())


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file under a temporary name, then give it its own.

    Raises:
        RankscopeError: The disk is full or the place can't be written.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from None
    return path


def write_picture(figure: Figure, path: Path) -> None:
    """Write a description as PNG; one without panels has no picture."""
    if not figure.panels:
        return
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        to_matplotlib(figure).savefig(temporary, format="png")
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from None


def side_by_side(datasets: list[xr.Dataset], names: list[str], comparisons: list[Figure]) -> list[str]:
    """Return the sections that hold several results at once; none for a single one."""
    if not comparisons:
        return []
    first, *others = comparisons
    return [
        section("Side by side", [comparison_table(datasets, names), picture(first)]),
        *(section(figure.title, [picture(figure)]) for figure in others),
    ]


def page_of(
    datasets: list[xr.Dataset], drawn: list[list[Figure]], comparisons: list[Figure], tables: list[list[table.Row]]
) -> str:
    """Return the whole page."""
    names = reading.labels(datasets)
    title = f"Attention spectra: {names[0]}" if len(names) == 1 else f"Attention spectra: {len(names)} results compared"
    sections = [
        said(datasets, names),
        measured(datasets, names),
        *side_by_side(datasets, names, comparisons),
        explained(datasets),
        *(topic([own[i] for own in drawn], names) for i in range(len(PICTURES))),
        section(
            "The numbers", [numbers(*pair, many=len(names) > 1) for pair in zip(datasets, names, tables, strict=True)]
        ),
        section("Can the measurement be trusted?", [trust(*pair) for pair in zip(datasets, names, strict=True)]),
    ]
    lead = (
        "How the singular values of each attention head’s context mapping matrix P (the softmax of its "
        "scaled logits, each row of which averages over tokens) are spread, with nulls beside them. Layers and heads "
        "are counted from 0, as in the result file."
    )
    source = (
        "The quantity is the one of Wang et al. 2020 (arXiv 2006.04768), Figure 1: sums of singular values, not of "
        "their squares."
    )
    return shell(title, lead, sections, source)


def shell(title: str, lead: str, sections: list[str], source: str) -> str:
    """Return a whole page around sections: head, style, the script that sorts tables, and a footer.

    Args:
        title: One line, escaped here.
        lead: What the page shows, escaped here.
        sections: HTML.
        source: Where the page's quantities come from, escaped here.
    """
    script = asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style()}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>'
        f"<main>{''.join(sections)}</main>"
        f"<footer><p>Made by rankscope {escape(str(version_of('rankscope')))} from result files alone. "
        f"{escape(source)}</p></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def asset(name: str) -> str:
    """Return one of the page's own files."""
    return files("rankscope.report").joinpath(name).read_text(encoding="utf-8")


def style() -> str:
    """Return the page's style: the theme's variables for light and dark, then the rules."""
    both = {**THEME, **COLORS}
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in both.items()) for i in (0, 1))
    heat = "".join(f".h{i}{{fill:{ink}}}.b{i}{{background:{ink}}}" for i, ink in enumerate(HEAT))
    dark_rule = f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f":root{{color-scheme:light dark;{light}}}{dark_rule}{heat}{asset('page.css')}"
