"""A benchmark's pictures as descriptions: growth with n, and error for what it costs. All axes are logarithmic."""

from math import ceil, floor, isfinite, log2, log10

from rankscope.report.bench_reading import Group, Series
from rankscope.report.description import Figure, Line, Panel, Ticks
from rankscope.report.growth import front
from rankscope.report.palette import DASHES, set_color

MARKERS = ("circle", "square", "diamond", "triangle")
SHADES = 6


def seconds_words(value: float) -> str:
    """Return a time in short.

    Example:
        >>> seconds_words(0.001), seconds_words(10.0), seconds_words(2e-5)
        ('1 ms', '10 s', '20 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size * 0.9999:
            return f"{value / size:.3g} {unit}"
    return f"{value:.1g} s"


def bytes_words(value: float) -> str:
    """Return a size in short.

    Example:
        >>> bytes_words(1e6), bytes_words(2.5e9)
        ('1 MB', '2.5 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size * 0.9999:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def error_words(value: float) -> str:
    """Return an error in short.

    Example:
        >>> error_words(0.01), error_words(1e-07)
        ('0.01', '1e-07')
    """
    return f"{value:g}"


def decades(values: list[float], words: object) -> tuple[tuple[float, float], Ticks]:
    """Return a logarithmic range that holds the values, and its whole powers of ten as ticks."""
    low, high = floor(min(values)), ceil(max(values))
    high = high if high > low else low + 1
    step = max(1, (high - low) // 6)
    assert callable(words)
    return (low - 0.05, high + 0.05), tuple((float(p), words(10.0**p)) for p in range(low, high + 1, step))


def octaves(lengths: list[int]) -> tuple[tuple[float, float], Ticks]:
    """Return a logarithmic range over lengths with the lengths themselves as ticks."""
    low, high = log2(min(lengths)), log2(max(lengths))
    shown = sorted(set(lengths))[:: max(1, ceil(len(set(lengths)) / 9))]
    return (low - 0.3, high + 0.3), tuple((log2(n), f"{n:,}") for n in shown)


def look(group: Group, series: Series) -> dict[str, str]:
    """Return a series' colour, dash and marker: the same in every picture of its group."""
    i = group.series.index(series)
    turn = i // SHADES
    dash = "" if turn == 0 else DASHES[turn - 1]
    return {"label": series.label, "color": set_color(i), "dash": dash, "marker": MARKERS[i % len(MARKERS)]}


def growth_panel(group: Group, field: str, title: str, words: object) -> Panel | None:
    """Return a quantity against n, one line a series."""
    lines: list[Line] = []
    lengths: list[int] = []
    for series in group.series:
        found = series.values(field)
        if found:
            x, y = tuple(log2(n) for n in found), tuple(log10(v) for v in found.values())
            lines.append(Line(x, y, **look(group, series), strong=series.mechanism == "sdpa"))  # type: ignore[arg-type]
            lengths += found
    if not lines:
        return None
    x_range, x_ticks = octaves(lengths)
    y_range, y_ticks = decades([v for line in lines for v in line.y], words)
    return Panel(title, "n, tokens", "", tuple(lines), x_range, y_range, x_ticks, y_ticks)


def growth(group: Group) -> Figure:
    """Return time and peak memory against n."""
    panels = [
        growth_panel(group, "seconds_median", "time of a call (median)", seconds_words),
        growth_panel(group, "peak_bytes", "peak memory above idle", bytes_words),
    ]
    return Figure(
        f"growth-{group.mode}-{group.view}",
        f"How time and memory grow with n: {group.title}",
        "Both axes are logarithmic, so a power of n is a straight line and its slope is the exponent. The heavy line "
        "is exact fused attention; where another line comes below it, that mechanism is the faster one.",
        f"Time and memory against n, {group.title}.",
        tuple(panel for panel in panels if panel is not None),
    )


def front_panel(group: Group, n: int, field: str, title: str, words: object) -> Panel | None:
    """Return error against a cost at one n: a point a series, and the line of those that nothing beats."""
    points: list[tuple[float, float]] = []
    marks: list[Line] = []
    for series in group.series:
        cost, error = series.values(field).get(n), series.values("relative_error").get(n)
        if cost and error and isfinite(error):
            points.append((log10(cost), log10(error)))
            place = points[-1]
            marks.append(Line((place[0],), (place[1],), **look(group, series) | {"dash": ""}, joined=False))  # type: ignore[arg-type]
    if not points:
        return None
    best = [points[i] for i in front(points)]
    line = Line(tuple(x for x, _ in best), tuple(y for _, y in best), "not beaten in both", "muted", dash="2 3")
    x_range, x_ticks = decades([x for x, _ in points], words)
    y_range, y_ticks = decades([y for _, y in points], error_words)
    return Panel(f"relative error at n = {n:,}", title, "", (line, *marks), x_range, y_range, x_ticks, y_ticks)


def fronts(group: Group) -> Figure:
    """Return error against time and against memory, at the longest n that most series reached."""
    counts: dict[int, int] = {}
    for series in group.series:
        for n in series.values("seconds_median"):
            counts[n] = counts.get(n, 0) + 1
    n = max(counts, key=lambda n: (counts[n], n))
    panels = [
        front_panel(group, n, "seconds_median", "time of a call (median)", seconds_words),
        front_panel(group, n, "peak_bytes", "peak memory above idle", bytes_words),
    ]
    sources = dict.fromkeys(str(row.get("relative_error_on")) for s in group.series for row in s.rows if row["n"] == n)
    return Figure(
        f"front-{group.mode}-{group.view}",
        f"Error for time and for memory: {group.title}",
        "Each point is a mechanism. Left is cheaper, low is nearer to exact attention; a point on the dotted line is "
        "beaten by no other in both. Approximate mechanisms run untrained, as replacements of softmax attention: a "
        "model trained with one of them adapts, and this error does not speak of it.",
        f"Error against cost at n = {n}, {group.title}.",
        tuple(panel for panel in panels if panel is not None),
        tuple(f"Errors are on {source}." for source in sources),
    )
