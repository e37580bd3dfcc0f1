"""What a low rank of P is worth to a model: every head truncated to rank k during the forward.

``python benchmarks/experiments/truncation.py MODEL CORPUS --n 128 --ranks 4,8,16 --windows 16 --out DIR [--name NAME]``

Writes the result file, page and pictures into DIR, and the means with their 95 % intervals over windows into
``benchmarks/results/truncation.json`` under NAME (by default model and n), beside what other runs wrote there.
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

RESULT = Path(__file__).parents[1] / "results" / "truncation.json"


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


def main() -> None:
    """Run one model and add it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("corpus")
    parser.add_argument("--n", type=int, default=128)
    parser.add_argument("--ranks", default="4,8,16,32,64,96,128")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--all-at-once", action="store_true", help="No forwards of one layer at a time.")
    parser.add_argument("--spectrum", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name")
    options = parser.parse_args()
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


if __name__ == "__main__":
    main()
