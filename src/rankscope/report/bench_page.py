"""One self-contained page of a benchmark: from which length on what pays, on this machine, at what error."""

from html import escape
from math import isnan
from pathlib import Path

from rankscope.attention.mechanisms import MECHANISMS
from rankscope.report import bench_figures
from rankscope.report.bench_reading import CLAIMED, PAPER_TABLE_3, YARDSTICKS, Group, Row, groups, saved
from rankscope.report.growth import Exponent
from rankscope.report.html import shell, write_whole
from rankscope.report.sections import picture, prose, scrolling, section
from rankscope.spectrum.parts import disk_error

PAGE = "bench.html"
NAMES = {"exact_naive": "attention written out", "sdpa": "exact fused attention"}


def write_bench(rows: list[Row], out: Path) -> Path:
    """Write ``out/bench.html``, whole or not at all.

    Args:
        rows: Of :func:`rankscope.bench.store.load`.
        out: A folder; made if absent.

    Returns:
        The page's path.

    Raises:
        RankscopeError: ``out`` cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(out, error) from None
    return write_whole(out / PAGE, page_of(rows).encode())


def page_of(rows: list[Row]) -> str:
    """Return the whole page."""
    found = groups(rows)
    sections = [section("In plain words", [says(found)])]
    for group in found:
        blocks = [f'<p class="note">{escape(group.words())}{escape(busy(group))}</p>']
        if group.series:
            blocks += [picture(bench_figures.growth(group)), exponents(group), crossovers(group)]
            blocks += [picture(bench_figures.fronts(group)), costs(group)]
            if group.find("linformer", None) is None and any(s.mechanism == "linformer" for s in group.series):
                blocks.append(table_3(group))
        if group.lost:
            blocks.append(lost(group))
        sections.append(section(group.title.capitalize(), blocks))
    return shell(
        "Attention mechanisms on this machine",
        "Time, peak memory and error of each mechanism, each case in a process of its own: median of the repeats after "
        "warm-up, peak above what inputs and weights hold, error against exact attention in float64.",
        sections,
        "Table 3 is printed in Wang et al. 2020 (arXiv 2006.04768).",
    )


def busy(group: Group) -> str:
    """Return a warning where other work kept the machine busy: the load before a case was above its cores."""
    rows = [row for series in group.series for row in series.rows]
    loaded = sum((row.get("load_average") or 0) > (row["environment"].get("cores") or 1) for row in rows)
    return (
        f". {loaded} of {len(rows)} cases ran on a busy machine (load above its cores): run them again"
        if loaded
        else ""
    )


def says(found: list[Group]) -> str:
    """Return what can be said of the crossovers, in sentences."""
    lines = []
    for group in found:
        for series in group.series:
            crossing = group.crossover(series, "sdpa")
            if series.mechanism in YARDSTICKS or crossing is None:
                continue
            longest = max(series.values("seconds_median"))
            error = series.values("relative_error").get(longest)
            at = "" if error is None else f" Its error at n = {longest:,} is {error:.2g} of the output."
            fused = {
                float("inf"): f"is not faster than exact fused attention up to n = {crossing.last:,}.",
                float("-inf"): f"is faster than exact fused attention at every measured n (from {crossing.first:,}).",
            }.get(crossing.n, f"is faster than exact fused attention from {crossing.words()} on.")
            lines.append(f"{group.title}: {series.label} {fused}{at}")
    if not lines:
        lines = ["No mechanism was measured beside exact fused attention (sdpa) at two lengths: no crossover is known."]
    return '<ul class="says">' + "".join(f"<li>{prose(line)}</li>" for line in lines) + "</ul>"


def tabled(title: str, head: list[str], body: list[list[str]]) -> str:
    """Return a titled table whose first column is words."""
    header = "".join(
        f'<th class="t">{escape(cell)}</th>' if i == 0 else f"<th>{escape(cell)}</th>" for i, cell in enumerate(head)
    )
    cells = "".join(
        "<tr>"
        + "".join(f'<td class="t">{escape(c)}</td>' if i == 0 else f"<td>{escape(c)}</td>" for i, c in enumerate(row))
        + "</tr>"
        for row in body
    )
    return f"<h3>{escape(title)}</h3>{scrolling(f'<thead><tr>{header}</tr></thead><tbody>{cells}</tbody>', title)}"


def exponent_words(e: Exponent) -> str:
    """Return an exponent with its interval.

    Example:
        >>> exponent_words(Exponent(1.93, 1.88, 1.98, 5))
        '1.93 [1.88, 1.98]'
    """
    if isnan(e.value):
        return "–"
    return f"{e.value:.2f}" if isnan(e.low) else f"{e.value:.2f} [{e.low:.2f}, {e.high:.2f}]"


def exponents(group: Group) -> str:
    """Return fitted powers of n beside the claimed ones."""
    body = [
        [
            series.label,
            CLAIMED.get(MECHANISMS[series.mechanism].cost, "–"),
            exponent_words(series.exponent("seconds_median")),
            exponent_words(series.exponent("peak_bytes")),
        ]
        for series in group.series
    ]
    return tabled("Fitted powers of n, with 95 % intervals", ["mechanism", "claimed", "time", "memory"], body)


def crossovers(group: Group) -> str:
    """Return from which n each mechanism is faster than each yardstick."""
    body = []
    for series in group.series:
        if series.mechanism == "exact_naive":
            continue
        found = [group.crossover(series, name) for name in YARDSTICKS]
        body.append([series.label, *("–" if c is None else c.words() for c in found)])
    head = ["mechanism", *(f"faster than {NAMES[name]}" for name in YARDSTICKS)]
    return tabled("Crossover lengths, with 95 % intervals over repeats", head, body)


def costs(group: Group) -> str:
    """Return every measured number."""
    body = [
        [
            series.label,
            f"{row['n']:,}",
            bench_figures.seconds_words(row["seconds_median"]),
            bench_figures.seconds_words(row["seconds_spread"]) if row["seconds_spread"] else "–",
            bench_figures.bytes_words(row["peak_bytes"]) if row["peak_bytes"] else "–",
            f"{row['relative_error']:.3g}",
            f"{row['relative_error_gaussian']:.3g}",
        ]
        for series in group.series
        for row in series.rows
    ]
    head = ["mechanism", "n", "median", "between quartiles", "peak", "error", "error, Gaussian"]
    return tabled("The numbers", head, body)


def table_3(group: Group) -> str:
    """Return the paper's grid: printed, against attention written out, against exact fused attention."""
    body = []
    for n, row in PAPER_TABLE_3.items():
        for k, printed in row.items():
            ours = [saved(group, n, k, name) for name in YARDSTICKS]
            if any(ours):
                body.append([f"{n:,}", f"{k}", *(times(pair) for pair in (printed, *ours))])
    if not body:
        return ""
    head = ["n", "k", "printed", *(f"here, against {NAMES[name]}" for name in YARDSTICKS)]
    note = (
        "Time saved / memory saved. The paper’s: a V100, whole model, layerwise sharing, the largest batch that fits. "
        "Here: this machine, this batch, one shared projection."
    )
    return tabled("Table 3 of the paper, printed and here", head, body) + f'<p class="note">{escape(note)}</p>'


def times(pair: tuple[float, float] | None) -> str:
    """Return two ratios.

    Example:
        >>> times((1.5, 1.7)), times(None), times((20.0, float("nan")))
        ('1.5 / 1.7', '–', '20 / –')
    """
    if pair is None:
        return "–"
    return " / ".join("–" if isnan(ratio) else f"{ratio:.2g}" for ratio in pair)


def lost(group: Group) -> str:
    """Return the cases that gave no number."""
    body = [
        [
            row["mechanism"] if row["k"] is None else f"{row['mechanism']}, k = {row['k']}",
            f"{row['n']:,}",
            row["status"],
            str(row.get("reason", "")),
        ]
        for row in group.lost
    ]
    return tabled("Not measured", ["mechanism", "n", "status", "why"], body)
