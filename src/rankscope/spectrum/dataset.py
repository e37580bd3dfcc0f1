"""The result: one labelled dataset in one netCDF file."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.spectrum.accumulate import Moments
from rankscope.spectrum.intervals import mean_interval
from rankscope.spectrum.parts import RunFolder, add_notes, disk_error, publish, temporary_name

TRAINED = "trained"
FILE_NAME = "spectrum.nc"


@dataclass(frozen=True)
class LayerInfo:
    """One attention of the model, as the first forward met it.

    Args:
        number: Its place among the model's attentions, from 0.
        module: Its path in the model.
        call: How often the module had run before in that forward (layers that share one module).
        kind: ``"self"`` or ``"cross"``.
        stack: ``"encoder"`` or ``"decoder"``.
        reached: ``"routed"`` or ``"fallback"``.
        heads: How many heads it has.
    """

    number: int
    module: str
    call: int
    kind: str
    stack: str
    reached: str
    heads: int


def build(folder: RunFolder) -> xr.Dataset:
    """Merge a folder's finished parts into the result.

    Args:
        folder: Its description holds the layers, baselines, axis and attributes; attributes that are no number or
            string are written as JSON.

    Returns:
        Curves ``(baseline, layer, head, index)`` with ``_sd``; scalars ``(baseline, window, layer, head)`` with
        ``_ci_low`` and ``_ci_high`` ``(baseline, layer, head)``; coordinates ``module``, ``kind``, ``document``.

    Raises:
        RankscopeError: There is no part.
    """
    description = folder.description()
    layers = [LayerInfo(**layer) for layer in description["layers"]]
    baselines: list[str] = description["baselines"]
    curves: dict[str, dict[str, Moments]] = {name: {} for name in baselines}
    rows: dict[str, dict[str, list[np.ndarray]]] = {name: {} for name in baselines}
    measured: dict[str, list[int]] = {name: [] for name in baselines}
    documents: list[int] = []
    windows: list[int] = []
    left_out: dict[int, str] = {}
    notes: dict[str, float] = {}
    hashes: list[str] = []
    for part in folder.load_all(description["windows"]):
        for baseline in baselines:
            for name, moments in part.curves.get(baseline, {}).items():
                curves[baseline][name] = curves[baseline].get(name, Moments()).merge(moments)
            for name, values in part.scalars.get(baseline, {}).items():
                rows[baseline].setdefault(name, []).append(values)
            measured[baseline] += part.measured.get(baseline, [])
        windows += range(part.start, part.stop)
        documents += part.documents
        hashes += part.hashes
        left_out |= part.left_out
        add_notes(notes, part.notes)
    if not measured[TRAINED]:
        raise RankscopeError("no window was measured: the run's folder holds no finished part")

    kept = [i for i, window in enumerate(windows) if window not in left_out]
    windows = [windows[i] for i in kept]
    documents = [documents[i] for i in kept]
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
    for name in curves[TRAINED]:
        mean = np.stack([curve_or_nan(curves[b], name, curves[TRAINED][name]).mean for b in baselines])
        sd = np.stack([curve_or_nan(curves[b], name, curves[TRAINED][name]).sd() for b in baselines])
        dims = ("baseline", "layer", "head", "index")
        variables[name] = (dims, mean.astype(np.float32))
        if name.endswith(("_low", "_high")):
            continue
        variables[f"{name}_sd"] = (dims, sd.astype(np.float32))
    for name in rows[TRAINED]:
        values = np.full((len(baselines), len(windows), *rows[TRAINED][name][0].shape[1:]), np.nan)
        for b, baseline in enumerate(baselines):
            if name in rows[baseline]:
                at = np.searchsorted(windows, measured[baseline])
                values[b, at] = np.concatenate(rows[baseline][name])
        intervals = [mean_interval(series, documents) for series in values]
        variables[name] = (("baseline", "window", "layer", "head"), values.astype(np.float32))
        for side, position in (("low", 1), ("high", 2)):
            bound = np.stack([interval[position] for interval in intervals])
            variables[f"{name}_ci_{side}"] = (("baseline", "layer", "head"), bound.astype(np.float32))
    variables["window_count"] = (("baseline",), np.array([len(measured[b]) for b in baselines]))

    heads = max(layer.heads for layer in layers)
    coords = {
        "baseline": list(baselines),
        "layer": [layer.number for layer in layers],
        "head": np.arange(heads),
        "index": description["index"],
        "window": windows,
        "module": ("layer", [layer.module if not layer.call else f"{layer.module}#{layer.call}" for layer in layers]),
        "kind": ("layer", [f"{layer.kind}/{layer.stack}" for layer in layers]),
        "reached": ("layer", [layer.reached for layer in layers]),
        "document": ("window", documents),
    }
    attributes = description["attributes"] | {
        "left_out": {str(k): v for k, v in sorted(left_out.items())},
        "numerics": notes,
        "window_hashes": ",".join(hashes),
        "environment": environment(),
        "interval": "95 % t-interval over windows, clustered by the document a window starts in",
    }
    return xr.Dataset(variables, coords=coords, attrs={k: plain(v) for k, v in attributes.items()})


def curve_or_nan(curves: dict[str, Moments], name: str, like: Moments) -> Moments:
    """Return a baseline's curve, or NaN of the same shape where the run was too short to measure it."""
    missing = np.full_like(like.mean, np.nan)
    return curves.get(name, Moments(0, missing, missing))


def plain(value: object) -> str | int | float:
    """Turn an attribute into what netCDF can hold; anything structured becomes JSON."""
    if isinstance(value, bool) or value is None or isinstance(value, dict | list | tuple):
        return json.dumps(value)
    return value if isinstance(value, str | int | float) else str(value)


def save(dataset: xr.Dataset, path: Path) -> Path:
    """Write a result atomically as netCDF (h5netcdf), compressed.

    Raises:
        RankscopeError: The disk is full or the place can't be written.
    """
    temporary = temporary_name(path)
    encoding = {name: {"zlib": True, "complevel": 4} for name, v in dataset.data_vars.items() if v.ndim > 1}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dataset.to_netcdf(temporary, engine="h5netcdf", encoding=encoding)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from None
    return path


def load(path: str | Path) -> xr.Dataset:
    """Read a result: a ``spectrum.nc``, or the folder of a run that holds one.

    Raises:
        RankscopeError: Nothing is there, the run is unfinished, or the file is no such result.
    """
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    if not file.exists():
        unfinished = path.is_dir() and (path / "settings.json").exists()
        hint = "the run is unfinished: give its command again" if unfinished else "give a folder that measure wrote"
        raise RankscopeError(f"no result at {str(file)!r}: {hint}")
    try:
        with xr.open_dataset(file, engine="h5netcdf") as dataset:
            loaded = dataset.load()
    except (OSError, ValueError, KeyError) as error:
        raise RankscopeError(f"{str(file)!r} can't be read as a result: {error}") from None
    if "nuclear_fraction" not in loaded and "nuclear_fraction_low" not in loaded:
        raise RankscopeError(f"{str(file)!r} is a netCDF file, but no result of `rankscope measure`")
    return loaded
