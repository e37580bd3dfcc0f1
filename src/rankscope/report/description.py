"""What a picture shows, free of any plotting library: data in, nothing drawn."""

from dataclasses import dataclass, field
from math import ceil, floor, log10

Numbers = tuple[float, ...]
Ticks = tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Line:
    """A series; ``low`` and ``high`` are error bars, NaN where there is no interval.

    Args:
        x: Abscissae.
        y: Ordinates, one each.
        label: The legend's words; empty for none.
        color: A name of :data:`rankscope.report.palette.COLORS`.
        dash: An SVG dash pattern, empty for solid.
        marker: ``"circle"``, ``"square"``, ``"diamond"``, ``"triangle"`` or empty.
        joined: Whether a stroke joins the points.
        low: Lower ends of error bars.
        high: Upper ends.
        strong: Drawn heavier.
        listed: Whether the legend names it; every line of a deep model would drown the rest.
    """

    x: Numbers
    y: Numbers
    label: str
    color: str
    dash: str = ""
    marker: str = ""
    joined: bool = True
    low: Numbers = ()
    high: Numbers = ()
    strong: bool = False
    listed: bool = True


@dataclass(frozen=True)
class Band:
    """The area between two curves."""

    x: Numbers
    low: Numbers
    high: Numbers
    label: str
    color: str


@dataclass(frozen=True)
class Cells:
    """A heatmap: ``values[row][column]``, NaN where there is no cell, on a scale from ``low`` to ``high``."""

    values: tuple[Numbers, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    low: float
    high: float


@dataclass(frozen=True)
class Box:
    """The spread of ``values`` at ``x``: quartiles, ends, and the points themselves."""

    x: float
    values: Numbers
    quartiles: tuple[float, float, float, float, float]
    label: str
    color: str


Mark = Line | Band | Cells | Box


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    marks: tuple[Mark, ...]
    x_range: tuple[float, float] = (0.0, 1.0)
    y_range: tuple[float, float] = (0.0, 1.0)
    x_ticks: Ticks = ()
    y_ticks: Ticks = ()
    zero_line: bool = False


@dataclass(frozen=True)
class Figure:
    """A picture: panels side by side, and the words that go with it.

    Args:
        name: Also the stem of its file.
        title: One line.
        reading: How to read it, for somebody who has never seen one.
        alt: What it shows, for somebody who cannot see it.
        panels: In reading order.
        notes: What was left out of the picture, and why.
    """

    name: str
    title: str
    reading: str
    alt: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = field(default=())


def legend(figure: Figure) -> list[Line | Band | Box]:
    """Return one mark for each distinct label, in order: a line's own mark rather than its band's."""
    entries: dict[str, Line | Band | Box] = {}
    for panel in figure.panels:
        for mark in panel.marks:
            if not isinstance(mark, Cells) and mark.label and getattr(mark, "listed", True):
                known = entries.get(mark.label)
                if known is None or (isinstance(known, Band) and isinstance(mark, Line)):
                    entries[mark.label] = mark
    return list(entries.values())


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers within a range, about ``count`` of them.

    Example:
        >>> nice_ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        >>> nice_ticks(-0.11, 0.23)
        [-0.1, 0.0, 0.1, 0.2]
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    digits = max(0, 1 - floor(log10(step)))
    return [round(i * step, digits) + 0.0 for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def number_ticks(low: float, high: float, count: int = 5) -> Ticks:
    """Return :func:`nice_ticks` with labels of equal precision.

    Example:
        >>> number_ticks(0.0, 1.0, 2)
        ((0.0, '0.0'), (0.5, '0.5'), (1.0, '1.0'))
    """
    values = nice_ticks(low, high, count)
    step = values[1] - values[0] if len(values) > 1 else 1.0
    digits = max(0, -floor(log10(step) + 1e-9))
    return tuple((value, f"{value:.{digits}f}".replace("-", "−")) for value in values)


def thinned(labels: list[str], most: int = 12) -> Ticks:
    """Return every label at its position, or evenly fewer of them when they would collide.

    Example:
        >>> thinned(["a", "b", "c", "d", "e"], most=3)
        ((0.0, 'a'), (2.0, 'c'), (4.0, 'e'))
    """
    step = max(1, ceil(len(labels) / most))
    return tuple((float(i), label) for i, label in enumerate(labels) if i % step == 0)
