"""What a report asks of a result: curves, series over windows, layers of a kind, names for all of them."""

import json
from collections.abc import Hashable
from warnings import catch_warnings, simplefilter

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from rankscope._errors import RankscopeError

Array = NDArray[np.float64]
TRAINED = "trained"
QUARTER = "nuclear_fraction_at_quarter"
KINDS = {
    "self/encoder": "encoder self-attention",
    "self/decoder": "decoder self-attention",
    "cross/decoder": "cross-attention",
}
MEANINGS = {
    "untrained": "fresh random weights of the same architecture, on the same windows",
    "untrained_scaled": "fresh random weights, with logits scaled to each trained head's deviation",
    "gaussian": "independent Gaussian query and key at each trained head's logit deviation",
    "gaussian_moments": "Gaussian query and key with each trained head's own means and covariances",
    "shuffled_rows": "the trained map with the entries of every row in random order",
    "shuffled_columns": "the trained map with the entries of every column in random order (column sums kept)",
    "random_tokens": "the trained weights fed random tokens",
}


def check(ds: xr.Dataset) -> None:
    """Refuse a dataset that is no result of a measurement.

    Raises:
        RankscopeError: A dimension, the curve or the trained baseline is missing.
    """
    missing = [dim for dim in ("baseline", "layer", "head", "index") if dim not in ds.dims]
    if missing or ("nuclear_fraction" not in ds and "nuclear_fraction_low" not in ds):
        what = f"the dimension {missing[0]!r}" if missing else "the variable 'nuclear_fraction'"
        raise RankscopeError(f"`ds` must be a result of `rankscope measure`: it lacks {what}")
    if TRAINED not in baselines(ds):
        raise RankscopeError(f"`ds` must hold the baseline 'trained', it has {baselines(ds)}")


def baselines(ds: xr.Dataset) -> list[str]:
    """Return the names of the baselines."""
    return [str(name) for name in ds["baseline"].values]


def nulls(ds: xr.Dataset) -> list[str]:
    """Return the names of the nulls, in the file's order."""
    return [name for name in baselines(ds) if name != TRAINED]


def null_label(name: str) -> str:
    """Return a null's name as a reader sees it.

    Example:
        >>> null_label("shuffled_rows")
        'null: shuffled rows'
    """
    return f"null: {name.replace('_', ' ')}"


def null_meanings(ds: xr.Dataset) -> dict[str, str]:
    """Return what each null of the result gives up, in the file's own words where it has them."""
    told = attribute(ds, "nulls_meaning", {})
    told = told if isinstance(told, dict) else {}
    return {name: str(told.get(name) or MEANINGS.get(name, "not described in the file")) for name in nulls(ds)}


def attribute(ds: xr.Dataset, name: Hashable, default: object = None) -> object:
    """Return an attribute, decoded where it is JSON."""
    value = ds.attrs.get(name, default)
    if isinstance(value, str) and (value[:1] in ("{", "[") or value in ("null", "true", "false")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value.item() if isinstance(value, np.generic) else value


def model_name(ds: xr.Dataset) -> str:
    """Return the measured model's name."""
    return str(attribute(ds, "model", "unnamed model"))


def corpus_name(ds: xr.Dataset) -> str:
    """Return the text's name."""
    return str(attribute(ds, "corpus", "unnamed corpus"))


def is_fractional(ds: xr.Dataset) -> bool:
    """Tell whether the index axis holds fractions of a sentence's length rather than counts."""
    return bool(ds["index"].values[-1] <= 1.0 and ds.sizes["index"] > 1)


def total(ds: xr.Dataset) -> int:
    """Return how many singular values a curve ends at: n, or k for a Linformer; grid points for sentences."""
    relative = str(attribute(ds, "rank_relative_to", "n"))
    return int(relative) if relative.isdigit() else int(ds.sizes["index"])


def fractions(ds: xr.Dataset) -> Array:
    """Return the index axis as fractions of its end."""
    index = ds["index"].values.astype(np.float64)
    return index if is_fractional(ds) else index / total(ds)


def quarter_words(ds: xr.Dataset) -> str:
    """Return the words for the point n/4 at which layers and heads are compared.

    Example:
        >>> quarter_words(xr.Dataset(coords={"index": range(1, 513)}))
        'the 128 largest of 512 singular values'
    """
    if is_fractional(ds):
        return "the largest quarter of a sentence's singular values"
    return f"the {total(ds) // 4} largest of {total(ds)} singular values"


def curve(ds: xr.Dataset, baseline: str, power: str = "nuclear_fraction") -> tuple[Array, Array, Array]:
    """Return a curve and its numerical band, each ``(layer, head, index)``.

    A matrix-free result may hold only the band: the curve is then its middle. Without a band the three agree.
    """

    def read(name: str) -> Array | None:
        if name not in ds:
            return None
        values = ds[name].sel(baseline=baseline).transpose("layer", "head", "index").values.astype(np.float64)
        return None if np.isnan(values).all() else values

    middle, low, high = read(power), read(f"{power}_low"), read(f"{power}_high")
    if middle is None:
        if low is None or high is None:
            nothing = np.full([ds.sizes[d] for d in ("layer", "head", "index")], np.nan)
            return nothing, nothing, nothing
        middle = (low + high) / 2
    return middle, middle if low is None else low, middle if high is None else high


def mean_over(values: Array, axis: int | tuple[int, ...]) -> Array:
    """Mean that skips absent heads and is NaN, without a warning, where nothing is left."""
    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def series(ds: xr.Dataset, name: str, baseline: str) -> Array | None:
    """Return a scalar's windows, ``(window, layer, head)``, or ``None`` where the result lacks it."""
    if name not in ds or "window" not in ds[name].dims:
        return None
    values = ds[name].sel(baseline=baseline).transpose("window", "layer", "head").values.astype(np.float64)
    return None if np.isnan(values).all() else values


def layer_series(ds: xr.Dataset, name: str, baseline: str) -> Array | None:
    """Return a scalar's mean over heads, ``(window, layer)``, or ``None``.

    ``nuclear_fraction_at_quarter`` falls back on the curve's value there: one row, from which no interval
    can be had.
    """
    values = series(ds, name, baseline)
    if values is None and name == QUARTER:
        values = quarter_of_curve(ds, baseline)[None]
        values = None if np.isnan(values).all() else values
    return None if values is None else mean_over(values, -1)


def quarter_of_curve(ds: xr.Dataset, baseline: str) -> Array:
    """Return the mean curve's value at n/4, ``(layer, head)``."""
    place = int(np.argmin(np.abs(fractions(ds) - 0.25)))
    return curve(ds, baseline)[0][:, :, place]


def documents(ds: xr.Dataset, values: Array) -> NDArray[np.int64] | None:
    """Return the document each window of ``values`` starts in.

    ``None`` where the file is silent, or for a stand-in row that belongs to no window.
    """
    if "document" not in ds.coords or len(ds["document"]) != len(values):
        return None
    return np.unique(ds["document"].values, return_inverse=True)[1].astype(np.int64)


def matched(values: Array, others: Array) -> Array:
    """Return the trained windows, or their mean where the null has a single row that stands for all."""
    return values if len(values) == len(others) else mean_over(values, 0)[None]


def window_count(ds: xr.Dataset, baseline: str) -> int:
    """Return on how many windows a baseline was measured."""
    if "window_count" in ds:
        return int(ds["window_count"].sel(baseline=baseline).item())
    values = layer_series(ds, QUARTER, baseline)
    return 0 if values is None else int((~np.isnan(values).all(axis=1)).sum())


def kinds(ds: xr.Dataset) -> dict[str, list[int]]:
    """Return the positions of the layers of each kind (self, cross, encoder, decoder), in the file's order."""
    named = [str(kind) for kind in ds["kind"].values] if "kind" in ds.coords else ["self"] * ds.sizes["layer"]
    groups: dict[str, list[int]] = {}
    for position, kind in enumerate(named):
        groups.setdefault(kind, []).append(position)
    return groups


def kind_label(kind: str) -> str:
    """Return a kind in words.

    Example:
        >>> kind_label("cross/decoder"), kind_label("self")
        ('cross-attention', 'self-attention')
    """
    return KINDS.get(kind, "self-attention" if kind == "self" else kind)


def layer_names(ds: xr.Dataset) -> list[str]:
    """Return the layers' numbers as the file and ``--layers`` count them, from 0."""
    return [str(number) for number in ds["layer"].values]


def modules(ds: xr.Dataset) -> list[str]:
    """Return each layer's path in the model, empty where the file is silent."""
    return [str(path) for path in ds["module"].values] if "module" in ds.coords else [""] * ds.sizes["layer"]


def head_count(ds: xr.Dataset) -> int:
    """Return how many heads of all layers hold numbers."""
    return int((~np.isnan(quarter_of_curve(ds, TRAINED))).sum())


def labels(datasets: list[xr.Dataset]) -> list[str]:
    """Return a name for each result that no other of them has: model and corpus, then n, then a number."""
    names = [f"{model_name(ds)} on {corpus_name(ds)}" for ds in datasets]
    if len(set(names)) < len(names):
        names = [f"{name}, n = {attribute(ds, 'n', '?')}" for name, ds in zip(names, datasets, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} (#{i})" for i, name in enumerate(names, 1)]
    return names
