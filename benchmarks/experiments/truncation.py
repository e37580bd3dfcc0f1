"""What a low rank of P is worth to a model: every head truncated to rank k during the forward.

``python benchmarks/experiments/truncation.py MODEL CORPUS --n 128 --ranks 4,8,16 --windows 16 --out DIR [--name NAME]``

Writes the result file, page and pictures into DIR, and the means with their 95 % intervals over windows into
``benchmarks/results/truncation.json`` under NAME (by default model and n), beside what other runs wrote there; then
``docs/truncation.md`` from that file. ``--page`` alone only writes the page.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import xarray as xr

from rankscope.report.truncate_page import write_truncation
from rankscope.spectrum.intervals import mean_interval
from rankscope.spectrum.truncate import truncate

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "truncation.json"
PAGE = ROOT / "docs" / "truncation.md"


def summary(ds: xr.Dataset) -> dict:
    """Means by variant and k, with intervals, and the origin of the numbers."""
    rows = []
    for variant in ds.variant.values:
        for k in ds.k.values:
            at = ds.sel(variant=variant, k=k)
            row: dict[str, object] = {"variant": str(variant), "k": int(k)}
            for name in ("loss_increase", "cosine", "pv_error"):
                if name in at:
                    values = at[name].mean(("layer", "head")) if name == "pv_error" else at[name]
                    row[name] = [round(float(x), 6) for x in mean_interval(values.values, ds.document.values)]
            if variant == "best":
                row["predicted_error"] = round(float(at.predicted_error.mean()), 6)
                row["leaked_mass"] = round(float(at.leaked_mass.mean()), 6)
                row["pv_error_by_layer"] = at.pv_error.mean(("window", "head")).round(4).values.tolist()
                row["predicted_error_by_layer"] = at.predicted_error.mean(("window", "head")).round(4).values.tolist()
                for name in ("loss_increase_by_layer", "cosine_by_layer"):
                    if name in at:
                        row[name] = at[name].mean("window").round(6).values.tolist()
            rows.append(row)
    ranks = {"this run": float(ds.energy_rank_90.mean())}
    if "marked_rank" in ds:
        ranks |= dict(zip(map(str, ds.baseline.values), map(float, ds.marked_rank.values), strict=True))
    facts = {
        name: ds.attrs[name]
        for name in ("model", "weights", "corpus", "corpus_hash", "n", "dtype", "seed", "objective", "interval")
    }
    own = {"own_loss": float(ds.own_loss.mean())} if "own_loss" in ds else {}
    environment = json.loads(ds.attrs["environment"])
    documents = len(set(ds.document.values.tolist()))
    counts = {"windows": ds.sizes["window"], "documents": documents}
    return facts | counts | {"energy_rank_90": ranks} | own | {"rows": rows, "with": environment}


def with_interval(numbers: list[float], digits: int = 3) -> str:
    """Mean and interval in words."""
    mean, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{mean} ({low} to {high})"


def run_text(name: str, run: dict) -> list[str]:
    """One run's part of the page."""
    has_loss = "own_loss" in run
    price = "loss above the model's own, nats a token" if has_loss else "cosine of final states"
    marks = ", ".join(f"{key.replace('_', ' ')} {rank:.0f}" for key, rank in run["energy_rank_90"].items())
    lines = [
        f"## {name}",
        "",
        f"{run['windows']} windows of {run['n']} tokens of {run['corpus']} (documents they start in: "
        f"{run['documents']}), judged by "
        + (f"its {run['objective']} loss (its own: {run['own_loss']:.2f} nats)" if has_loss else "its final states")
        + f". Rank at which the mean head keeps 90 % of σ²: {marks} (of {run['n']}).",
        "",
        f"| map | k | {price} |{' cosine |' * has_loss} error of PV | predicted by σ | leaked mass |",
        "|---|---|---|---|---|---|" + "---|" * has_loss,
    ]
    causal = any(row["variant"] == "remasked" for row in run["rows"])
    for row in run["rows"]:
        best = row["variant"] == "best"
        cells = (
            row["variant"],
            str(row["k"]),
            with_interval(row["loss_increase" if has_loss else "cosine"]),
            *([f"{row['cosine'][0]:.3f}"] if has_loss else []),
            with_interval(row["pv_error"]),
            f"{row['predicted_error']:.3f}" if best else "",
            f"{row['leaked_mass']:.3f}" if best and causal else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    best = [row for row in run["rows"] if row["variant"] == "best" and row["predicted_error"] > 1e-6]
    ratios = [row["pv_error"][0] / row["predicted_error"] for row in best]
    lines += [
        "",
        f"The error of PV is {min(ratios):.2f} to {max(ratios):.2f} times what the spectrum predicts for white V.",
        "",
    ]
    return lines


def page(runs: dict[str, dict]) -> str:
    """The page's text, every number from the results."""
    lines = [
        "# What is the rank of P worth?",
        "",
        "Every head's P is replaced, while the model runs, by its best approximation of rank k (all heads at once); "
        "`random` is a projection on k random directions, `remasked` the best of rank k without its entries on the "
        "future, rows scaled back to 1. No weight is trained: it says what a model's own maps lose, not what a model "
        "trained with them would. In brackets 95 % t-intervals over windows, clustered by document; with two documents "
        "or fewer they are wide or over windows only, and a t-interval knows no upper end of a cosine. Written by "
        "`benchmarks/experiments/truncation.py` from `benchmarks/results/truncation.json`, which also has each layer "
        "truncated alone.",
        "",
    ]
    for name, run in runs.items():
        lines += run_text(name, run)
    return "\n".join(lines)


def main() -> None:
    """Run one model and add it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("corpus", nargs="?")
    parser.add_argument("--n", type=int, default=128)
    parser.add_argument("--ranks", default="4,8,16,32,64,96,128")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--all-at-once", action="store_true", help="No forwards of one layer at a time.")
    parser.add_argument("--spectrum", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", action="store_true", help="Only write the page.")
    parser.add_argument("--name")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(json.loads(RESULT.read_text())))
        return
    if not (options.model and options.corpus and options.out):
        parser.error("MODEL, CORPUS and --out are needed")
    start = time.perf_counter()
    ds = truncate(
        options.model,
        options.corpus,
        ranks=[int(k) for k in options.ranks.split(",")],
        n=options.n,
        windows=options.windows,
        layerwise=not options.all_at_once,
        spectrum=options.spectrum,
    )
    # A file's place says nothing elsewhere; its name does.
    ds.attrs |= {name: Path(str(ds.attrs[name])).name for name in ("model", "corpus")}
    seconds = round(time.perf_counter() - start, 1)
    write_truncation(ds, options.out)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    name = options.name or f"{ds.attrs['model']} n={options.n}"
    known[name] = summary(ds) | {"seconds": seconds, "threads": torch.get_num_threads()}
    RESULT.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(known))


if __name__ == "__main__":
    main()
