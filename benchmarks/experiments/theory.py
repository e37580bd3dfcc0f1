"""What the theorems give: every figure and picture of ``docs/theorems.md``.

    python benchmarks/experiments/theory.py [--only jl,clusters,draws,collapse,projections,fit,speed]

Writes ``benchmarks/results/theory_*.json`` and ``docs/images/theory_*``. Everything is on the processor, float32 for
models and float64 for flows, seed 0, model ``minilm``, text ``pydoc``. Times are processor seconds and wall seconds;
they part on a shared machine.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from rankscope._environment import environment
from rankscope.report.theory_figures import animation, pictures, png
from rankscope.theory import studies
from rankscope.theory.cluster_limits import RANK_TOLERANCE, TOLERANCE, doubly_exponential_rate, judge
from rankscope.theory.cluster_study import clusters_study, named_setting
from rankscope.theory.clusters import Dynamics, integrate, numerical_rank, uniform_tokens
from rankscope.theory.fitted_heads import alternate
from rankscope.theory.jl_counts import count_theorem_1, vectors
from rankscope.theory.johnson_lindenstrauss import failure_bound, jl_dimension, theorem_2_dimension
from rankscope.theory.projections import collect, segment_means

ROOT = Path(__file__).parents[2]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
MODEL, CORPUS = "minilm", "pydoc"
LENGTHS = (512, 1024, 4096, 8192, 65536)
EPS = (0.1, 0.25, 0.5, 2 / 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(EXPERIMENTS))
    for name in parser.parse_args().only.split(","):
        started = time.time(), time.process_time()
        result = EXPERIMENTS[name]()
        result["seconds"] = {"wall": time.time() - started[0], "processor": time.process_time() - started[1]}
        result["environment"] = environment()
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"theory_{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        print(name, result["seconds"], flush=True)


def jl() -> dict:
    ds = studies.johnson_lindenstrauss_study(
        MODEL, CORPUS, n=512, k=(64, 128, 256, 512, 1024, 2048), eps=(0.1, 0.25, 0.5, 0.75), draws=1000, vectors=1,
        seed=0,
    )  # fmt: skip
    draw(ds)
    sizes = [
        {"n": n, "eps": eps, "k": jl_dimension(n, eps), "bound": failure_bound(n, jl_dimension(n, eps), eps)}
        for n in LENGTHS
        for eps in EPS
    ]
    generator = torch.Generator().manual_seed(0)
    identity = torch.eye(512)[None]
    w = vectors("gaussian", identity, count=8, generator=generator)
    counts = count_theorem_1(identity, w, k=[128, 250, 511, 512], eps=[0.5], draws=200, generator=generator)
    return {
        "sizes": sizes,
        "first_n_with_k_below_n": {
            str(round(eps, 3)): next(n for n in range(2, 10**6) if jl_dimension(n, eps) < n) for eps in EPS
        },
        "theorem_2": theorem_2_dimension(65536, 64, 0.5)._asdict(),
        "identity_n_512": {
            str(k): {"relative_error": float(error.mean()), "missed": int(missed.sum()), "of": 8 * 200}
            for k, error, missed in zip(counts.k, counts.relative_error, counts.relative, strict=True)
        },
        "counts": ds.to_dict(),
    }


def clusters() -> dict:
    runs = {}
    for flow, d, end in (
        ("boolean", 1, 14.0),
        ("polytope", 2, 14.0),
        ("hyperplanes", 3, 14.0),
        ("polytope_times_space", 3, 14.0),
        ("collapse", 2, 1000.0),
    ):
        setting = named_setting(flow, n=40, d=d, generator=studies.seeded(0))
        ds = clusters_study(setting, end=end, frames=29, seed=0)
        if flow == "boolean":
            draw(ds)
            (IMAGES / f"theory_clusters_{flow}.gif").write_bytes(animation(ds))
        elif flow != "collapse":
            draw(ds, only="tokens")
        runs[flow] = {
            "verdicts": json.loads(ds.attrs["verdicts"]),
            "times": ds.time.values.tolist(),
            "rank": ds["rank"].values.tolist(),
            "rank_strict": ds["rank_strict"].values.tolist(),
            "largest_token": float(np.linalg.norm(ds.tokens.values[-1], axis=1).max()),
            "solver": ds.attrs["solver"],
        }
    return {"n": 40, "runs": runs}


def draws() -> dict:
    """Theorem 2.1 over 200 draws: how many have rank ≤ 2, and the rate."""
    times = [0.0, 5.0, 8.0, 10.0, 12.0, 14.0]
    generator = torch.Generator().manual_seed(0)
    one = Dynamics.single([[1.0]], [[1.0]], [[1.0]])
    ranks, strict, rates, reached = [], [], [], 0
    for _ in range(200):
        run = integrate(one, uniform_tokens(40, 1, generator=generator), times=times)
        sigma = run.sigma()
        ranks.append([numerical_rank(row, RANK_TOLERANCE) for row in sigma])
        strict.append([numerical_rank(row, 40 * np.finfo(float).eps) for row in sigma])
        rates.append(doubly_exponential_rate(run, 3, 5))
        reached += bool(judge(run, "boolean").holds)
    return {
        "n": 40,
        "draws": 200,
        "times": times,
        "solver": run.solver,
        "rank_tolerance": RANK_TOLERANCE,
        "row_tolerance": TOLERANCE,
        "rank_at_most_2": (np.array(ranks) <= 2).sum(0).tolist(),
        "rank_at_most_2_strict": (np.array(strict) <= 2).sum(0).tolist(),
        "conclusion_reached": reached,
        "rate": {"median": float(np.median(rates)), "low": min(rates), "high": max(rates)},
    }


def collapse() -> dict:
    ds = studies.collapse_study(MODEL, CORPUS, n=128, windows=8, seed=0)
    draw(ds)
    return {
        "n": 128,
        "windows": 8,
        "variants": {
            str(variant): {
                "residual": ds.residual.sel(variant=variant).mean("window").values.tolist(),
                "effective_rank": ds["effective_rank"].sel(variant=variant).mean(("window", "head")).values.tolist(),
                "energy_rank_90": ds["energy_rank_90"].sel(variant=variant).mean(("window", "head")).values.tolist(),
            }
            for variant in ds.variant.values
        },
    }


def projections() -> dict:
    ds = studies.projections_study(MODEL, CORPUS, n=256, k=(16, 32, 64, 128), train_windows=24, test_windows=3, seed=0)
    draw(ds)
    return {
        "n": 256,
        "k": ds.k.values.tolist(),
        "settings": {key: value for key, value in ds.attrs.items() if key != "environment"},
        "error": {
            str(name): {
                "mean": ds.error.sel(projection=name).mean(("layer", "head")).values.tolist(),
                "by_layer": ds.error.sel(projection=name).mean("head").values.tolist(),
            }
            for name in ds.projection.values
        },
        "overlap": {"mean": ds.overlap.mean(("layer", "head")).values.tolist(), "chance": ds.chance.values.tolist()},
        "overlap_by_layer": ds.overlap.mean("head").values.tolist(),
    }


def fit() -> dict:
    """What a fit without regard for other windows comes to, F exactly and E by Adam in turn."""
    n, train_windows = 256, 24
    loaded, windows = studies.packed(MODEL, CORPUS, n, train_windows + 3, seed=0)
    found = collect(loaded.model, windows)
    module = list(found)[len(found) // 2]
    heads = found[module]
    train, test = heads.at(slice(train_windows)), heads.at(slice(train_windows, None))
    runs = {}
    for k in (16, 64):
        E = segment_means(n, k).repeat(heads.query.shape[1], 1, 1)
        fitted = alternate(train, test, E, E, rounds=7)
        runs[str(k)] = {"fitted_on": fitted.losses, "others": fitted.others, "slope_of_F": fitted.slopes}
    return {"n": n, "module": module, "train_windows": train_windows, "test_windows": 3, "mean_squared_error": runs}


def speed() -> dict:
    generator = torch.Generator().manual_seed(0)
    P = torch.randn(12, 512, 512, generator=generator).softmax(-1)
    w = vectors("gaussian", P, count=1, generator=generator)
    found = {}
    started = time.time(), time.process_time()
    count_theorem_1(P, w, k=[128, 256, 666], eps=[0.25, 0.5], draws=1000, generator=generator)
    found["theorem 1, n = 512, 12 heads, 1,000 draws"] = since(started)
    started = time.time(), time.process_time()
    flow = Dynamics.single(np.eye(2), np.eye(2), np.eye(2))
    x0 = uniform_tokens(1024, 2, generator=generator)
    run = integrate(flow, x0, times=[0.0, 5.0, 10.0])
    found["clusters, n = 1,024, d = 2, to t = 10"] = since(started) | {"evaluations": run.evaluations}
    return {"threads": torch.get_num_threads(), "bar_seconds": 60, "found": found}


def since(started: tuple[float, float]) -> dict[str, float]:
    return {"wall": time.time() - started[0], "processor": time.process_time() - started[1]}


def draw(ds: xr.Dataset, *, only: str = "") -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures(ds).items():
        if name.endswith(only):
            (IMAGES / f"{name}.png").write_bytes(png(figure))


EXPERIMENTS = {
    "jl": jl,
    "clusters": clusters,
    "draws": draws,
    "collapse": collapse,
    "projections": projections,
    "fit": fit,
    "speed": speed,
}

if __name__ == "__main__":
    main()
