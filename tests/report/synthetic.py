"""Made-up results with a known structure: exponential spectra whose share at n/4 is set layer by layer."""

import json

import numpy as np
import xarray as xr

MINILM_LAYERS = (0.810, 0.705, 0.761, 0.860, 0.862, 0.977)
RISING = (0.60, 0.66, 0.72, 0.78, 0.84, 0.90, 0.93, 0.95)


def rate_of(share):
    """Solve (1 − e^(−a/4)) / (1 − e^(−a)) = share for a, by bisection."""
    low, high = np.full(np.shape(share), 1e-6), np.full(np.shape(share), 200.0)
    for _ in range(60):
        middle = (low + high) / 2
        small = np.expm1(-middle / 4) / np.expm1(-middle) < share
        low, high = np.where(small, middle, low), np.where(small, high, middle)
    return np.where(np.isnan(share), np.nan, (low + high) / 2)


def curve_of(rate, fractions):
    return np.expm1(-rate[..., None] * fractions) / np.expm1(-rate)[..., None]


def result(
    layers=MINILM_LAYERS,
    heads=12,
    n=512,
    windows=32,
    nulls=(("untrained_scaled", 0.83), ("gaussian", 0.66), ("shuffled_rows", 0.556)),
    null_windows=16,
    head_spread=0.05,
    window_sd=0.008,
    kinds=None,
    absent_heads=0,
    sentences=False,
    bands_only=False,
    documents=None,
    seed=0,
    **attributes,
):
    """Build a dataset in the shape that a measurement writes.

    ``nulls`` are (name, share at n/4), a number for all layers or one for each.
    """
    rng = np.random.default_rng(seed)
    depth = len(layers)
    index = np.arange(1, 65) / 64 if sentences else np.arange(1, n + 1)
    fractions = index if sentences else index / n
    names = ("trained", *(name for name, _ in nulls))
    targets = [np.asarray(layers), *(np.broadcast_to(share, depth) for _, share in nulls)]
    pattern = np.linspace(-1, 1, heads) * head_spread if heads > 1 else np.zeros(1)
    shares = np.full((len(names), windows, depth, heads), np.nan)
    for b, target in enumerate(targets):
        count = windows if b == 0 else min(null_windows, windows)
        noise = rng.normal(0, window_sd, (count, depth, 1))
        spread = pattern if b == 0 else pattern * 0.1
        shares[b, :count] = np.clip(target[:, None] + spread + noise, 0.26, 0.995)
    if absent_heads:
        shares[:, :, 0, heads - absent_heads :] = np.nan
    rates = rate_of(shares)
    counts = np.array([windows, *[min(null_windows, windows)] * len(nulls)])
    curves = curve_of(rates, fractions)
    powers = curve_of(2 * rates, fractions)
    dims, scalar = ("baseline", "layer", "head", "index"), ("baseline", "window", "layer", "head")
    with np.errstate(all="ignore"):
        mean, sd = nanstat(curves, np.nanmean), nanstat(curves, np.nanstd)
        energy = nanstat(powers, np.nanmean)
    span = 1.0 if sentences else n
    rank = {p: -np.log1p(p * np.expm1(-rates)) / rates * span for p in (0.9, 0.95, 0.99)}
    quarter = curve_of(rates, np.array([0.25]))[..., 0]
    quarter_energy = curve_of(2 * rates, np.array([0.25]))[..., 0]
    numbers = {
        "nuclear_fraction_at_quarter": quarter,
        "nuclear_fraction_at_quarter_deflated": quarter - 0.01,
        "energy_fraction_at_quarter": quarter_energy,
        "energy_fraction_at_quarter_deflated": quarter_energy - 0.002,
        "nuclear_rank_90": rank[0.9],
        "nuclear_rank_95": rank[0.95],
        "nuclear_rank_99": rank[0.99],
        "energy_rank_90": rank[0.9] / 2,
        "effective_rank": rank[0.9] * 1.2,
        "stable_rank": span / rates / 10,
        "sigma_ratio": np.exp(-rates / 512),
        "logit_sd": 3.0 - 2 * quarter,
        "sink_share": quarter / 10,
    }
    curves_named = {"energy_fraction": (dims, energy)}
    if bands_only:
        curves_named |= {
            "nuclear_fraction_low": (dims, np.clip(mean - 0.01, 0, 1)),
            "nuclear_fraction_high": (dims, np.clip(mean + 0.01, 0, 1)),
        }
        numbers = {}
    else:
        curves_named |= {"nuclear_fraction": (dims, mean), "nuclear_fraction_sd": (dims, sd)}
    data = {name: (axes, values.astype(np.float32)) for name, (axes, values) in curves_named.items()}
    data |= {name: (scalar, values.astype(np.float32)) for name, values in numbers.items()}
    data["window_count"] = (("baseline",), counts)
    kinds = kinds or ["self/encoder"] * depth
    coords = {
        "baseline": list(names),
        "layer": np.arange(depth),
        "head": np.arange(heads),
        "index": index,
        "window": np.arange(windows),
        "module": ("layer", [f"encoder.layer.{i}.attention.self" for i in range(depth)]),
        "kind": ("layer", list(kinds)),
        "reached": ("layer", ["routed"] * depth),
        "document": ("window", np.arange(windows) if documents is None else np.asarray(documents)),
    }
    attrs = {
        "model": "all-MiniLM-L6-v2",
        "revision": "0.1",
        "corpus": "pydoc",
        "corpus_hash": "b7e23ec29af22b0b4e41da31e868d57226121c84",
        "n": n,
        "packing": "sentence" if sentences else "packed",
        "dtype": "float32",
        "seed": 0,
        "method": "auto",
        "mask_policy": "padded rows and columns are cut out before the decomposition",
        "rank_relative_to": "the sentence's own length" if sentences else "n",
        "left_out": json.dumps({}),
        "self_check": json.dumps({"matches eager": True, "largest difference": 1.2e-7, "row sums": True}),
        "environment": json.dumps({"processor": "a processor", "versions": {"torch": "2.13.0"}}),
    }
    return xr.Dataset(data, coords=coords, attrs=attrs | attributes)


def nanstat(values, function):
    """Reduce over windows (axis 1); where a head is absent the answer is NaN."""
    out = np.full((values.shape[0], *values.shape[2:]), np.nan)
    for b in range(values.shape[0]):
        present = ~np.isnan(values[b]).all(axis=(0, 3))
        out[b][present] = function(values[b][:, present], axis=0)
    return out
