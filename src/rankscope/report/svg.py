"""Descriptions to small SVG drawings whose colours are the page's variables: light and dark in one file."""

from html import escape
from math import ceil, isfinite

from rankscope.report.description import Band, Box, Cells, Figure, Line, Panel, legend
from rankscope.report.palette import HEAT, heat_step

WIDTH, HEIGHT = 460.0, 300.0
LEAST_WIDTH = 300.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 14.0, 12.0, 46.0
MOST_TITLES = 3000
MARKERS = {
    "circle": "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0",
    "square": "M-3.2 -3.2h6.4v6.4h-6.4z",
    "diamond": "M0 -4.4L4.4 0L0 4.4L-4.4 0z",
    "triangle": "M0 -4.2L4.2 3.4H-4.2z",
}


def number(value: float) -> str:
    """Return a coordinate as short as a tenth of a unit allows.

    Example:
        >>> number(12.04), number(0.25), number(-0.01)
        ('12', '0.2', '0')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def color(name: str) -> str:
    """Return the page's variable for a colour's name."""
    return f"var(--{name})"


class Frame:
    """Maps a panel's numbers to the drawing's units."""

    def __init__(self, panel: Panel, height: float = HEIGHT, left: float = LEFT) -> None:
        self.left, self.right = left, WIDTH - RIGHT
        self.top, self.bottom = TOP, height - BOTTOM
        self.panel = panel

    def x(self, value: float) -> float:
        """Return the abscissa of a number."""
        low, high = self.panel.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the ordinate of a number; SVG counts downwards."""
        low, high = self.panel.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def path(self, xs: tuple[float, ...], ys: tuple[float, ...]) -> str:
        """Return a path's data, broken where a number is missing."""
        pieces, pen_down = [], False
        for a, b in zip(xs, ys, strict=True):
            if isfinite(b):
                pieces.append(f"{'L' if pen_down else 'M'}{number(self.x(a))} {number(self.y(b))}")
            pen_down = isfinite(b)
        return "".join(pieces)


def draw(panel: Panel, alt: str) -> str:
    """Return one panel as an ``<svg>`` element that fills its container's width.

    Args:
        panel: What to draw.
        alt: What a screen reader says.
    """
    cells = next((mark for mark in panel.marks if isinstance(mark, Cells)), None)
    body, width, height = draw_cells(cells, panel) if cells else (draw_axes(panel), WIDTH, HEIGHT)
    view = f"0 0 {number(width)} {number(height)}"
    return f'<svg viewBox="{view}" role="img" aria-label="{escape(alt)}">{body}</svg>'


def draw_axes(panel: Panel) -> str:
    """Return the axes and everything on them."""
    frame = Frame(panel)
    out = []
    for value, label in panel.y_ticks:
        y = number(frame.y(value))
        out.append(f'<path class="grid-line" d="M{number(frame.left)} {y}H{number(frame.right)}"/>')
        out.append(f'<text class="end" x="{number(frame.left - 7)}" y="{y}" dy=".35em">{escape(label)}</text>')
    for value, label in panel.x_ticks:
        x = number(frame.x(value))
        out.append(f'<path class="axis" d="M{x} {number(frame.bottom)}v4"/>')
        out.append(f'<text class="mid" x="{x}" y="{number(frame.bottom + 17)}">{escape(label)}</text>')
    out.append(f'<path class="axis" d="M{number(frame.left)} {number(frame.bottom)}H{number(frame.right)}"/>')
    if panel.zero_line:
        out.append(f'<path class="zero" d="M{number(frame.left)} {number(frame.y(0))}H{number(frame.right)}"/>')
    out += [draw_band(mark, frame) for mark in panel.marks if isinstance(mark, Band)]
    out += [draw_box(mark, frame) for mark in panel.marks if isinstance(mark, Box)]
    out += [draw_line(mark, frame) for mark in panel.marks if isinstance(mark, Line)]
    return "".join(out) + axis_names(panel, frame)


def axis_names(panel: Panel, frame: Frame) -> str:
    """Return the two axes' names."""
    middle = number((frame.left + frame.right) / 2)
    across = number((frame.top + frame.bottom) / 2)
    below = f'<text class="mid name" x="{middle}" y="{number(frame.bottom + 37)}">{escape(panel.x_label)}</text>'
    beside = f'<text class="mid name" transform="translate(13 {across}) rotate(-90)">{escape(panel.y_label)}</text>'
    return below + beside


def draw_band(band: Band, frame: Frame) -> str:
    """Return a filled area."""
    known = [i for i, (a, b) in enumerate(zip(band.low, band.high, strict=True)) if isfinite(a) and isfinite(b)]
    if not known:
        return ""
    x = tuple(band.x[i] for i in known)
    there = frame.path(x, tuple(band.high[i] for i in known))
    back = frame.path(x[::-1], tuple(band.low[i] for i in reversed(known))).replace("M", "L", 1)
    return f'<path class="band" style="fill:{color(band.color)}" d="{there}{back}z">{title(band.label)}</path>'


def draw_line(line: Line, frame: Frame) -> str:
    """Return a stroke, its error bars and markers."""
    out = []
    style = f"stroke:{color(line.color)}"
    if line.joined:
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        kind = "line strong" if line.strong else "line"
        out.append(f'<path class="{kind}" style="{style}"{dash} d="{frame.path(line.x, line.y)}">')
        out.append(f"{title(line.label)}</path>")
    bars = "".join(
        f"M{number(frame.x(x))} {number(frame.y(low))}V{number(frame.y(high))}"
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if isfinite(low) and isfinite(high)
    )
    if bars:
        out.append(f'<path class="bar" style="{style}" d="{bars}"/>')
    if line.marker:
        for i, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
            if isfinite(y):
                ends = f" [{line.low[i]:.3f}, {line.high[i]:.3f}]" if line.low and isfinite(line.low[i]) else ""
                place = f"translate({number(frame.x(x))} {number(frame.y(y))})"
                words = title(f"{line.label}: {y:.3f}{ends}")
                fill = f'style="fill:{color(line.color)}"'
                out.append(f'<path class="marker" {fill} transform="{place}" d="{MARKERS[line.marker]}">{words}</path>')
    return "".join(out)


def draw_box(box: Box, frame: Frame) -> str:
    """Return a box with whiskers, and the points themselves."""
    low, first, median, third, high = (frame.y(q) for q in box.quartiles)
    x = frame.x(box.x)
    half = min(13.0, 0.36 * (frame.x(1) - frame.x(0)))
    style = f"stroke:{color(box.color)}"
    whiskers = f"M{number(x)} {number(low)}V{number(first)}M{number(x)} {number(third)}V{number(high)}"
    middle = f"M{number(x - half)} {number(median)}h{number(2 * half)}"
    out = [f'<path class="bar" style="{style}" d="{whiskers}"/>']
    out.append(
        f'<rect class="box" style="{style};fill:{color(box.color)}" x="{number(x - half)}" y="{number(third)}" '
        f'width="{number(2 * half)}" height="{number(first - third)}">{title(box_words(box))}</rect>'
    )
    out.append(f'<path class="line" style="{style}" d="{middle}"/>')
    for i, value in enumerate(box.values):
        shift = ((i * 0.618034) % 1 - 0.5) * 1.3 * half
        place = f'cx="{number(x + shift)}" cy="{number(frame.y(value))}"'
        out.append(f'<circle class="dot" style="fill:{color(box.color)}" {place} r="1.7"/>')
    return "".join(out)


def box_words(box: Box) -> str:
    """Return a box's numbers in words."""
    low, first, median, third, high = box.quartiles
    return f"{box.label}: median {median:.3f}, middle half {first:.3f} to {third:.3f}, all {low:.3f} to {high:.3f}"


def draw_cells(cells: Cells, panel: Panel) -> tuple[str, float, float]:
    """Return a heatmap with its width and height: cells as large as the width allows, 30 units at most."""
    rows, columns = len(cells.rows), len(cells.columns)
    wide = min(30.0, (WIDTH - LEFT - RIGHT) / columns)
    tall = wide if rows <= 24 else max(5.0, min(wide, 14.0))
    named = rows * columns <= MOST_TITLES
    out = []
    for r, row in enumerate(cells.values):
        for first, last, step in runs(row, cells, whole=named):
            place = f'x="{number(LEFT + first * wide)}" y="{number(TOP + r * tall)}"'
            box = f'width="{number((last - first) * wide - (0.4 if named else 0))}" height="{number(tall - 0.4)}"'
            words = title(f"layer {cells.rows[r]}, head {cells.columns[first]}: {row[first]:.3f}") if named else ""
            out.append(f'<rect class="h{step}" {place} {box}>{words}</rect>')
            if named and wide >= 25 and tall >= 20:
                ink = "on-dark" if step < len(HEAT) // 2 else "on-light"
                where = f'x="{number(LEFT + (first + 0.5) * wide)}" y="{number(TOP + (r + 0.5) * tall)}"'
                out.append(f'<text class="cell {ink}" {where} dy=".35em">{short(row[first])}</text>')
    bottom = TOP + rows * tall
    for r in range(0, rows, ceil(14 / tall)):
        y = number(TOP + (r + 0.5) * tall)
        out.append(f'<text class="end" x="{number(LEFT - 7)}" y="{y}" dy=".35em">{escape(cells.rows[r])}</text>')
    for c in range(0, columns, ceil(20 / wide)):
        x = number(LEFT + (c + 0.5) * wide)
        out.append(f'<text class="mid" x="{x}" y="{number(bottom + 16)}">{escape(cells.columns[c])}</text>')
    frame = Frame(panel, height=bottom + BOTTOM)
    frame.right = LEFT + columns * wide
    return "".join(out) + axis_names(panel, frame), max(LEAST_WIDTH, frame.right + RIGHT), bottom + BOTTOM - 2


def runs(row: tuple[float, ...], cells: Cells, *, whole: bool) -> list[tuple[int, int, int]]:
    """Return (first, past the last, step) of a row's cells, neighbours of one step joined unless ``whole``.

    Example:
        >>> cells = Cells((), (), (), 0.0, 1.0)
        >>> runs((0.0, 0.01, 1.0, float("nan")), cells, whole=False)
        [(0, 2, 0), (2, 3, 15)]
    """
    found: list[tuple[int, int, int]] = []
    for c, value in enumerate(row):
        if not isfinite(value):
            continue
        step = heat_step(value, cells.low, cells.high)
        if not whole and found and found[-1][1:] == (c, step):
            found[-1] = (found[-1][0], c + 1, step)
        else:
            found.append((c, c + 1, step))
    return found


def short(value: float) -> str:
    """Return a share as two digits after the point.

    Example:
        >>> short(0.829), short(1.0), short(0.005)
        ('.83', '1.0', '.01')
    """
    return "1.0" if value >= 0.995 else f"{value + 1e-9:.2f}".removeprefix("0")


def title(words: str) -> str:
    """Return what a pointer resting on a mark shows."""
    return f"<title>{escape(words)}</title>" if words else ""


def draw_legend(figure: Figure) -> str:
    """Return the legend as a list beside the drawing, or a colour scale for a heatmap."""
    cells = [mark for panel in figure.panels for mark in panel.marks if isinstance(mark, Cells)]
    if cells:
        return draw_scale(cells[0])
    entries = "".join(f"<li>{swatch(mark)}{escape(mark.label)}</li>" for mark in legend(figure))
    return f'<ul class="legend">{entries}</ul>' if entries else ""


def swatch(mark: Line | Band | Box) -> str:
    """Return a mark's sample."""
    paint = color(mark.color)
    if isinstance(mark, Line):
        dash = f' stroke-dasharray="{mark.dash}"' if mark.dash else ""
        kind = "line strong" if mark.strong else "line"
        drawn = f'<path class="{kind}" style="stroke:{paint}"{dash} d="M1 7H27"/>' if mark.joined else ""
        if mark.marker:
            path = MARKERS[mark.marker]
            drawn += f'<path class="marker" style="fill:{paint}" transform="translate(14 7)" d="{path}"/>'
    else:
        drawn = f'<rect class="band" style="fill:{paint}" x="1" y="2" width="26" height="10"/>'
    return f'<svg class="swatch" viewBox="0 0 28 14" aria-hidden="true">{drawn}</svg>'


def draw_scale(cells: Cells) -> str:
    """Return a heatmap's colour scale."""
    steps = "".join(f'<i class="b{i}"></i>' for i in range(len(HEAT)))
    return f'<p class="scale"><span>{cells.low:.2f}</span><span class="ramp">{steps}</span>{cells.high:.2f}</p>'
