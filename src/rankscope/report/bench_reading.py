"""A benchmark's rows in the groups that may be compared, and the paper's table beside them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.attention.mechanisms import MECHANISMS
from rankscope.report.growth import Crossover, Exponent, crossover, fit_exponent

Row = dict[str, Any]
YARDSTICKS = ("exact_naive", "sdpa")
#: Two rows are compared only where all of these agree.
CONDITIONS = ("heads", "head_dim", "batch", "dtype", "device", "causal", "padding", "threads")
CLAIMED = {"n": "1", "n^2": "2", "n sqrt(n)": "1.5", "n log n": "1 and a logarithm"}
#: Below it a call's fixed costs hide how time grows.
FIT_FROM = 1024

#: Table 3 of arXiv 2006.04768 (16 GB V100, layerwise sharing, largest batch that fits): n: {k: (time, memory)} saved.
PAPER_TABLE_3: dict[int, dict[int, tuple[float, float]]] = {
    512: {128: (1.5, 1.7), 256: (1.3, 1.5)},
    1024: {128: (1.7, 3.0), 256: (1.6, 2.9), 512: (1.3, 1.8)},
    2048: {128: (2.6, 6.1), 256: (2.4, 5.6), 512: (2.1, 3.6), 1024: (1.3, 2.0)},
    4096: {128: (3.4, 14), 256: (3.2, 13), 512: (2.8, 8.3), 1024: (2.2, 4.3), 2048: (1.3, 2.3)},
    8192: {128: (5.5, 28), 256: (5.0, 26), 512: (4.4, 17), 1024: (3.5, 8.5), 2048: (2.1, 4.5)},
    16384: {128: (8.6, 56), 256: (7.8, 48), 512: (7.0, 32), 1024: (5.6, 16), 2048: (3.3, 8)},
    32768: {128: (13, 56), 256: (12, 48), 512: (11, 36), 1024: (8.8, 18), 2048: (5.0, 16)},
    65536: {128: (20, 60), 256: (18, 52), 512: (16, 40), 1024: (14, 20), 2048: (7.9, 18)},
}


@dataclass(frozen=True)
class Series:
    """One mechanism at one size over lengths: only what was measured."""

    mechanism: str
    k: int | None
    rows: tuple[Row, ...]

    @property
    def label(self) -> str:
        """The legend's words."""
        return self.mechanism if self.k is None else f"{self.mechanism}, k = {self.k}"

    def values(self, field: str) -> dict[int, float]:
        """Return a number by n, where it is there and positive."""
        return {row["n"]: float(row[field]) for row in self.rows if row.get(field)}

    def seconds(self) -> dict[int, list[float]]:
        """Return the repeats by n."""
        return {row["n"]: row["seconds"] for row in self.rows}

    def exponent(self, field: str) -> Exponent:
        """Fit the growth with n, from :data:`FIT_FROM` on where three lengths are left."""
        found = self.values(field)
        long = {n: value for n, value in found.items() if n >= FIT_FROM}
        used = long if len(long) >= 3 else found
        return fit_exponent(np.array(list(used), dtype=np.float64), np.array(list(used.values())))


@dataclass(frozen=True)
class Group:
    """Rows of one mode and view, one machine and one set of conditions."""

    mode: str
    view: str
    conditions: dict[str, Any]
    machine: str
    series: tuple[Series, ...]
    lost: tuple[Row, ...]

    @property
    def title(self) -> str:
        """What sets it apart."""
        mode = {"forward": "forward", "train": "forward and backward"}[self.mode]
        return f"{mode}, {'attention alone' if self.view == 'attention' else 'whole layer'}"

    def words(self) -> str:
        """Conditions in one line."""
        told = {key: value for key, value in self.conditions.items() if value not in (None, 0.0, False)}
        return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in told.items()) + f"; {self.machine}"

    def find(self, mechanism: str, k: int | None = None) -> Series | None:
        """Return one series."""
        return next((s for s in self.series if s.mechanism == mechanism and s.k == k), None)

    def crossover(self, ours: Series, yardstick: str) -> Crossover | None:
        """Return where a series becomes faster than a yardstick, ``None`` where it cannot be told."""
        other = self.find(yardstick)
        if other is None or ours.mechanism == yardstick:
            return None
        return crossover(ours.seconds(), other.seconds())


def machine_of(row: Row) -> str:
    """Return the machine a row was measured on."""
    stamp = row.get("environment") or {}
    device = stamp.get("device_name", "cpu")
    name = str(stamp.get("processor", "unknown machine")) if row.get("device", "cpu") == "cpu" else str(device)
    return f"{name}, {stamp.get('cores', '?')} cores"


def groups(rows: list[Row]) -> list[Group]:
    """Return the rows in groups that may be compared, in the order of their first row."""
    order: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row["mode"], row["view"], machine_of(row), *(row.get(name) for name in CONDITIONS))
        order.setdefault(key, []).append(row)
    found = []
    for (mode, view, machine, *settings), own in sorted(order.items(), key=lambda item: item[0][:2]):
        named = dict(zip(CONDITIONS, settings, strict=True))
        measured = [row for row in own if row["status"] == "ok"]
        keys = dict.fromkeys((row["mechanism"], row["k"]) for row in measured)
        places = {name: i for i, name in enumerate(MECHANISMS)}
        series = [
            Series(name, k, tuple(row for row in measured if (row["mechanism"], row["k"]) == (name, k)))
            for name, k in sorted(keys, key=lambda key: (places.get(key[0], len(places)), key[1] or 0))
        ]
        found.append(Group(mode, view, named, machine, tuple(series), tuple(r for r in own if r["status"] != "ok")))
    return found


def saved(group: Group, n: int, k: int, yardstick: str) -> tuple[float, float] | None:
    """Return how many times less time and memory Linformer takes than a yardstick; NaN memory where not known."""
    ours, other = group.find("linformer", k), group.find(yardstick)
    if ours is None or other is None:
        return None
    ratios = []
    for field in ("seconds_median", "peak_bytes"):
        mine, its = ours.values(field).get(n), other.values(field).get(n)
        ratios.append(its / mine if mine and its else float("nan"))
    return None if np.isnan(ratios[0]) else (ratios[0], ratios[1])
