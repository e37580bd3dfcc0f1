"""Colours by role, a pair for light and dark paper; no picture names a colour itself."""

LAYER_STEPS = 12
HEAT_STEPS = 16

# Known nulls keep their colour from page to page; others take what is left.
NULL_ORDER = (
    "untrained_scaled",
    "gaussian",
    "shuffled_rows",
    "untrained",
    "gaussian_moments",
    "shuffled_columns",
    "random_tokens",
)
DASHES = ("6 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4", "7 2 2 2")

_NULLS = (
    ("#b8470f", "#ff9d66"),
    ("#a0358f", "#f08fe0"),
    ("#7d6a00", "#e3c94b"),
    ("#5f6b76", "#a9b5c0"),
    ("#b3204a", "#ff8aa6"),
    ("#7a4a24", "#d3a27a"),
    ("#5b52b8", "#b3acff"),
)
_SETS = (
    ("#0b5c8a", "#6cc4f5"),
    ("#b8470f", "#ff9d66"),
    ("#1c7a4d", "#6fdca6"),
    ("#a0358f", "#f08fe0"),
    ("#7d6a00", "#e3c94b"),
    ("#5f6b76", "#a9b5c0"),
)


def _mix(stops: tuple[str, ...], at: float) -> str:
    """Return the colour at ``at`` in [0, 1] along straight lines between the stops.

    Example:
        >>> _mix(("#000000", "#ffffff"), 0.5)
        '#808080'
    """
    place = at * (len(stops) - 1)
    first = min(int(place), len(stops) - 2)
    share = place - first
    pair = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops[first : first + 2]]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*pair, strict=True))


def _steps(stops: tuple[str, ...], count: int) -> list[str]:
    return [_mix(stops, i / (count - 1)) for i in range(count)]


# Deeper layers stand out more on either paper.
_LAYERS = zip(
    _steps(("#55b3a0", "#2a809e", "#10244f"), LAYER_STEPS),
    _steps(("#3f6fa8", "#45b0b3", "#dcf7d0"), LAYER_STEPS),
    strict=True,
)

# Lightness rises all the way, so that it reads without colour vision and in print.
HEAT = _steps(("#1a2150", "#2c5a86", "#3f9094", "#9cc48b", "#f6e9b0"), HEAT_STEPS)

COLORS: dict[str, tuple[str, str]] = {
    "trained": ("#10244f", "#dcf7d0"),
    "ink": ("#1b2330", "#e8edf3"),
    "muted": ("#5b6675", "#a3afbd"),
    **{f"null-{i}": pair for i, pair in enumerate(_NULLS)},
    **{f"set-{i}": pair for i, pair in enumerate(_SETS)},
    **{f"layer-{i}": pair for i, pair in enumerate(_LAYERS)},
}


def null_number(name: str, names: list[str]) -> int:
    """Return which colour and dash a null has: its own if known, else one that no null of ``names`` has.

    Example:
        >>> null_number("gaussian", ["gaussian"]), null_number("mine", ["untrained_scaled", "mine"])
        (1, 1)
    """
    if name in NULL_ORDER:
        return NULL_ORDER.index(name)
    taken = {NULL_ORDER.index(other) for other in names if other in NULL_ORDER}
    free = [i for i in range(len(_NULLS)) if i not in taken] or [len(_NULLS) - 1]
    unknown = [other for other in names if other not in NULL_ORDER]
    return free[unknown.index(name) % len(free)]


def layer_color(position: int, count: int) -> str:
    """Return the colour name of layer ``position`` among ``count``, first to last.

    Example:
        >>> layer_color(0, 6), layer_color(5, 6), layer_color(0, 1)
        ('layer-0', 'layer-11', 'layer-11')
    """
    share = position / (count - 1) if count > 1 else 1.0
    return f"layer-{round(share * (LAYER_STEPS - 1))}"


def set_color(position: int) -> str:
    """Return the colour name of the result at ``position`` in a comparison."""
    return f"set-{position % len(_SETS)}"


def heat_step(value: float, low: float, high: float) -> int:
    """Return which step of :data:`HEAT` shows ``value`` on a scale from ``low`` to ``high``.

    Example:
        >>> heat_step(0.0, 0.0, 1.0), heat_step(1.0, 0.0, 1.0), heat_step(3.0, 3.0, 3.0)
        (0, 15, 0)
    """
    if high <= low:
        return 0
    return min(max(int((value - low) / (high - low) * HEAT_STEPS), 0), HEAT_STEPS - 1)
