"""The numbers behind the pictures: one row a baseline, layer and head, as CSV and as the page's table."""

import csv
import io
from math import isnan

import numpy as np
import xarray as xr

from rankscope.report import reading

KEYS = ("baseline", "layer", "head", "kind", "module", "windows")
SHOWN = {
    "nuclear_fraction_at_quarter": "σ at n/4",
    "energy_fraction_at_quarter": "σ² at n/4",
    "nuclear_rank_90": "rank, 90 % of σ",
    "energy_rank_90": "rank, 90 % of σ²",
    "effective_rank": "effective rank",
    "stable_rank": "stable rank",
    "sigma_ratio": "σ₂ / σ₁",
    "logit_sd": "logit sd",
    "sink_share": "sink share",
}

Row = dict[str, object]


def scalar_names(ds: xr.Dataset) -> list[str]:
    """Return the scalars kept for every window, in the file's order."""
    return [str(name) for name, variable in ds.data_vars.items() if "window" in variable.dims and variable.ndim == 4]


def rows(ds: xr.Dataset) -> list[Row]:
    """Return one row a baseline, layer and head that has numbers: means over windows of every scalar.

    Where the result keeps no scalars for windows, the share at n/4 is read off the mean curve.
    """
    names = scalar_names(ds)
    kinds = [kind for layer in range(ds.sizes["layer"]) for kind, at in reading.kinds(ds).items() if layer in at]
    table: list[Row] = []
    for baseline in reading.baselines(ds):
        columns = {}
        for name in names:
            values = reading.series(ds, name, baseline)
            columns[name] = None if values is None else reading.mean_over(values, 0)
        if reading.QUARTER not in names:
            columns[reading.QUARTER] = reading.quarter_of_curve(ds, baseline)
        for layer in range(ds.sizes["layer"]):
            for head in range(ds.sizes["head"]):
                cells = {name: float("nan") if c is None else float(c[layer, head]) for name, c in columns.items()}
                if all(isnan(value) for value in cells.values()):
                    continue
                keys = (
                    baseline,
                    int(ds["layer"].values[layer]),
                    int(ds["head"].values[head]),
                    kinds[layer],
                    reading.modules(ds)[layer],
                    reading.window_count(ds, baseline),
                )
                table.append({**dict(zip(KEYS, keys, strict=True)), **cells})
    return table


def layer_rows(table: list[Row]) -> list[Row]:
    """Return one row a baseline and layer: means over heads."""
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in table:
        groups.setdefault((row["baseline"], row["layer"]), []).append(row)
    merged = []
    for members in groups.values():
        names = [name for name in members[0] if name not in KEYS]
        means = {name: float(reading.mean_over(np.array([row[name] for row in members]), 0)) for name in names}
        keys = {key: members[0][key] for key in KEYS if key != "head"}
        merged.append({**keys, "heads": len(members), **means})
    return merged


def to_csv(table: list[Row]) -> str:
    r"""Return rows as CSV with a header, numbers to six significant digits, absent ones empty.

    Example:
        >>> to_csv([{"layer": 0, "effective_rank": 12.3456789, "stable_rank": float("nan")}])
        'layer,effective_rank,stable_rank\n0,12.3457,\n'
    """
    if not table:
        return ""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table[0])
    writer.writerows([cell(value) for value in row.values()] for row in table)
    return out.getvalue()


def cell(value: object) -> str:
    """Return a value as it stands in a CSV file; text that a spreadsheet would run as a formula is quoted."""
    if isinstance(value, float):
        return "" if isnan(value) else f"{value:.6g}"
    text = str(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not isinstance(value, int) else text
