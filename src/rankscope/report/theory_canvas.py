"""What the theory pictures are drawn on."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from rankscope._errors import MissingExtraError

INKS = (
    "#0b5c8a",
    "#c2571a",
    "#1c7a4d",
    "#7a3b8f",
    "#8a6d0b",
    "#a61b32",
    "#4a5563",
    "#000000",
    "#2a9d9d",
    "#c05fa0",
)


def line_styles() -> Iterator[dict[str, str]]:
    """Return a line's ink and stroke for the first, the second … of any number of lines.

    Example:
        >>> first, *_, last = zip(line_styles(), range(11))
        >>> first[0]["color"] == last[0]["color"], first[0]["linestyle"] == last[0]["linestyle"]
        (True, False)
    """
    for stroke in cycle(("-", "--", "-.", ":")):
        for ink in INKS:
            yield {"color": ink, "linestyle": stroke}


def canvas(rows: int, columns: int, *, width: float = 4.4, height: float = 3.6, **options: Any) -> tuple[Any, Any]:
    """Return a matplotlib figure and its axes in a grid, without a window system or global state.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "drawing pictures") from None
    figure = Figure(figsize=(width * columns, height * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes
