"""Descriptions to matplotlib or plotly figures: the backends of every picture."""

from collections.abc import Callable
from math import ceil, isfinite
from typing import Any

from rankscope._errors import MissingExtraError
from rankscope._registry import Registry
from rankscope.report.description import Band, Box, Cells, Figure, Line, Panel, legend
from rankscope.report.palette import COLORS, HEAT

PLOTLY_DASHES = {"": "solid", "6 3": "dash", "2 3": "dot", "9 3 2 3": "dashdot"}
MATPLOTLIB_MARKERS = {"": None, "circle": "o", "square": "s", "diamond": "D", "triangle": "^"}
PLOTLY_MARKERS = {"circle": "circle", "square": "square", "diamond": "diamond", "triangle": "triangle-up"}


def paint(name: str) -> str:
    """Return a colour for light paper."""
    return COLORS[name][0]


def grid_of(figure: Figure) -> tuple[int, int]:
    """Return how many rows and columns the panels take: three abreast at most, four of them two by two."""
    columns = 2 if len(figure.panels) == 4 else max(1, min(3, len(figure.panels)))
    return max(1, ceil(len(figure.panels) / columns)), columns


def to_matplotlib(figure: Figure) -> Any:
    """Return a ``matplotlib.figure.Figure``; no window system and no global state is touched.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "drawing pictures") from None
    rows, columns = grid_of(figure)
    canvas = Canvas(
        figsize=(5.4 * columns + (1.8 if columns == 1 else 0.4), 3.9 * rows + 1.0), dpi=130, layout="constrained"
    )
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes[len(figure.panels) :]:
        ax.remove()
    for ax, panel in zip(axes, figure.panels, strict=False):
        matplotlib_panel(canvas, ax, panel)
    canvas.suptitle(figure.title, fontsize=13, fontweight="bold", parse_math=False)
    entries = legend(figure)
    if entries:
        matplotlib_legend(canvas, entries)
    return canvas


def matplotlib_panel(canvas: Any, ax: Any, panel: Panel) -> None:
    """Draw one panel."""
    ax.set_title(panel.title, fontsize=11, parse_math=False)
    ax.set_xlabel(panel.x_label, parse_math=False)
    ax.set_ylabel(panel.y_label, parse_math=False)
    ax.spines[["top", "right"]].set_visible(False)
    for mark in panel.marks:
        MATPLOTLIB_MARKS[type(mark)](canvas, ax, mark)
    if any(isinstance(mark, Cells) for mark in panel.marks):
        return
    ax.set_xlim(*panel.x_range)
    ax.set_ylim(*panel.y_range)
    ax.set_xticks([value for value, _ in panel.x_ticks], [label for _, label in panel.x_ticks])
    ax.set_yticks([value for value, _ in panel.y_ticks], [label for _, label in panel.y_ticks])
    ax.grid(axis="y", color="#dfe4ea", linewidth=0.8)
    ax.set_axisbelow(True)
    if panel.zero_line:
        ax.axhline(0, color=paint("muted"), linewidth=1)


def matplotlib_line(canvas: Any, ax: Any, line: Line) -> None:
    """Draw a line with its error bars."""
    ink = paint(line.color)
    if line.low:
        known = [i for i in range(len(line.x)) if isfinite(line.low[i]) and isfinite(line.high[i])]
        ax.vlines([line.x[i] for i in known], [line.low[i] for i in known], [line.high[i] for i in known], color=ink)
    style = dash_of(line.dash) if line.joined else "none"
    width = 2.2 if line.strong else 1.4
    ax.plot(
        line.x,
        line.y,
        color=ink,
        linestyle=style,
        linewidth=width,
        marker=MATPLOTLIB_MARKERS[line.marker],
        markersize=5,
    )


def dash_of(dash: str) -> Any:
    """Return an SVG dash pattern as matplotlib takes it.

    Example:
        >>> dash_of(""), dash_of("6 3")
        ('-', (0, (3.0, 1.5)))
    """
    return (0, tuple(float(length) / 2 for length in dash.split())) if dash else "-"


def matplotlib_band(canvas: Any, ax: Any, band: Band) -> None:
    """Draw a band."""
    ax.fill_between(band.x, band.low, band.high, color=paint(band.color), alpha=0.18, linewidth=0)


def matplotlib_box(canvas: Any, ax: Any, box: Box) -> None:
    """Draw a box with its points."""
    low, first, median, third, high = box.quartiles
    ink = paint(box.color)
    ax.vlines([box.x, box.x], [low, third], [first, high], color=ink)
    ax.bar(box.x, third - first, width=0.6, bottom=first, color=ink, alpha=0.25, edgecolor=ink)
    ax.hlines(median, box.x - 0.3, box.x + 0.3, color=ink, linewidth=2)
    shifts = [box.x + ((i * 0.618034) % 1 - 0.5) * 0.4 for i in range(len(box.values))]
    ax.plot(shifts, box.values, linestyle="none", marker=".", markersize=3, color=ink, alpha=0.6)


def matplotlib_cells(canvas: Any, ax: Any, cells: Cells) -> None:
    """Draw a heatmap with its scale."""
    from matplotlib.colors import ListedColormap

    image = ax.imshow(cells.values, cmap=ListedColormap(HEAT), vmin=cells.low, vmax=cells.high, aspect="auto")
    for axis, names in ((ax.xaxis, cells.columns), (ax.yaxis, cells.rows)):
        step = max(1, ceil(len(names) / 16))
        axis.set_ticks(range(0, len(names), step), names[::step])
    canvas.colorbar(image, ax=ax)


def matplotlib_legend(canvas: Any, entries: list[Line | Band | Box]) -> None:
    """Put one legend below all panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for mark in entries:
        if isinstance(mark, Line):
            style: Any = dash_of(mark.dash) if mark.joined else "none"
            marker = MATPLOTLIB_MARKERS[mark.marker]
            handles.append(Line2D([], [], color=paint(mark.color), linestyle=style, marker=marker, markersize=5))
        else:
            handles.append(Patch(color=paint(mark.color), alpha=0.25, linewidth=0))
    words = [mark.label.replace("$", r"\$") for mark in entries]
    room = int(canvas.get_size_inches()[0] * 12 / (max(map(len, words)) + 7))
    columns = max(1, min(room, len(entries)))
    canvas.legend(handles, words, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


MATPLOTLIB_MARKS: dict[type, Callable[[Any, Any, Any], None]] = {
    Line: matplotlib_line,
    Band: matplotlib_band,
    Box: matplotlib_box,
    Cells: matplotlib_cells,
}


def to_plotly(figure: Figure) -> Any:
    """Return a ``plotly.graph_objects.Figure``.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise MissingExtraError("plotly", "report", "drawing pictures with backend 'plotly'") from None
    rows, columns = grid_of(figure)
    chart = make_subplots(rows=rows, cols=columns, subplot_titles=[plain(panel.title) for panel in figure.panels])
    shown: set[str] = set()
    for i, panel in enumerate(figure.panels):
        row, column = i // columns + 1, i % columns + 1
        for mark in panel.marks:
            for trace in PLOTLY_MARKS[type(mark)](mark):
                if not isinstance(mark, Cells):
                    trace.showlegend = bool(trace.name) and trace.name not in shown and getattr(mark, "listed", True)
                    shown.add(trace.name or "")
                chart.add_trace(trace, row=row, col=column)
        chart.update_xaxes(title_text=plain(panel.x_label), row=row, col=column)
        chart.update_yaxes(title_text=plain(panel.y_label), row=row, col=column)
        if any(isinstance(mark, Cells) for mark in panel.marks):
            chart.update_yaxes(autorange="reversed", row=row, col=column)
            continue
        for update, span, ticks in (
            (chart.update_xaxes, panel.x_range, panel.x_ticks),
            (chart.update_yaxes, panel.y_range, panel.y_ticks),
        ):
            places, names = [value for value, _ in ticks], [plain(label) for _, label in ticks]
            update(range=list(span), tickvals=places, ticktext=names, row=row, col=column)
        if panel.zero_line:
            chart.add_hline(y=0, line_color=paint("muted"), row=row, col=column)
    chart.update_layout(title_text=plain(figure.title), template="plotly_white", height=380 * rows + 120)
    return chart


def plain(words: str) -> str:
    """Return words that plotly, which reads a little HTML, shows as they are."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def faint(name: str, opacity: float = 0.18) -> str:
    """Return a colour that lets what lies beneath shine through.

    Example:
        >>> faint("trained")
        'rgba(16,36,79,0.18)'
    """
    code = paint(name)
    return "rgba({},{},{},{})".format(*(int(code[i : i + 2], 16) for i in (1, 3, 5)), opacity)


def plotly_line(line: Line) -> list[Any]:
    """Return a line's trace."""
    from plotly import graph_objects as go

    mode = "+".join(part for part, wanted in (("lines", line.joined), ("markers", bool(line.marker))) if wanted)
    bars = None
    if line.low:
        above = [high - y for high, y in zip(line.high, line.y, strict=True)]
        below = [y - low for low, y in zip(line.low, line.y, strict=True)]
        bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    stroke = {"color": paint(line.color), "width": 3 if line.strong else 1.8}
    dash = PLOTLY_DASHES.get(line.dash) or line.dash.replace(" ", "px,") + "px"
    marker = {"symbol": PLOTLY_MARKERS.get(line.marker, "circle"), "color": paint(line.color)}
    name = plain(line.label)
    trace = go.Scatter(x=line.x, y=line.y, name=name, legendgroup=name, mode=mode, line={**stroke, "dash": dash})
    return [trace.update(marker=marker, error_y=bars)]


def plotly_band(band: Band) -> list[Any]:
    """Return a band's trace: there along the top, back along the bottom."""
    from plotly import graph_objects as go

    x, y = band.x + band.x[::-1], band.high + band.low[::-1]
    name = plain(band.label)
    fill = {"fill": "toself", "fillcolor": faint(band.color), "line": {"width": 0}, "mode": "lines"}
    return [go.Scatter(x=x, y=y, name=name, legendgroup=name, hoverinfo="skip", **fill)]


def plotly_box(box: Box) -> list[Any]:
    """Return a box's trace from its quartiles, with the points themselves."""
    from plotly import graph_objects as go

    low, first, median, third, high = box.quartiles
    ends = {"lowerfence": [low], "q1": [first], "median": [median], "q3": [third], "upperfence": [high]}
    name, ink = plain(box.label), paint(box.color)
    points = {"x": [box.x] * len(box.values), "y": box.values, "mode": "markers"}
    marker = {"color": ink, "size": 3, "opacity": 0.5}
    return [
        go.Box(x=[box.x], **ends, name=name, legendgroup=name, marker_color=ink),
        go.Scatter(**points, marker=marker, name=name, legendgroup=name, hoverinfo="y"),
    ]


def plotly_cells(cells: Cells) -> list[Any]:
    """Return a heatmap's trace."""
    from plotly import graph_objects as go

    last = len(HEAT) - 1
    scale = [[i / last, ink] for i, ink in enumerate(HEAT)]
    values = [[value if isfinite(value) else None for value in row] for row in cells.values]
    ends = {"zmin": cells.low, "zmax": cells.high, "colorscale": scale}
    rows, columns = [f" {name}" for name in cells.rows], [f" {name}" for name in cells.columns]
    hover = "layer%{y}, head%{x}: %{z:.3f}<extra></extra>"
    return [go.Heatmap(z=values, x=columns, y=rows, hovertemplate=hover, **ends)]


PLOTLY_MARKS: dict[type, Callable[[Any], list[Any]]] = {
    Line: plotly_line,
    Band: plotly_band,
    Box: plotly_box,
    Cells: plotly_cells,
}


def as_described(figure: Figure) -> Figure:
    """Return the description itself: what the backend ``"none"`` gives."""
    return figure


BACKENDS: Registry[Callable[[Figure], Any]] = Registry(
    "backend", {"matplotlib": to_matplotlib, "plotly": to_plotly, "none": as_described}
)
