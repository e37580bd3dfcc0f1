"""True coverage of the intervals that `--half-width` stops at, by simulation.

A stopping rule looks at the interval after every part and stops when it is tight, so the interval it stops at could
be too optimistic. Here the rule itself (`rankscope.spectrum.measure.tight_enough`) runs on windows of a measured run
(`--run DIR`) and of two synthetic populations. Two questions:

- *this corpus*: windows come in random order, as the tool draws them (passages are shuffled); the truth is the mean
  over all of the corpus's windows;
- *such documents*: a new corpus is drawn first, as many documents with replacement, and its windows come in random
  order; the truth is the mean over the population that the documents stand for.

Writes `benchmarks/results/stopping_rule.json`.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import rankscope
from rankscope._environment import environment
from rankscope.spectrum.intervals import mean_interval
from rankscope.spectrum.measure import STOPPING_SCALAR, tight_enough
from rankscope.spectrum.parts import PART_WINDOWS

RESULTS = Path(__file__).parents[1] / "results"


def synthetic(rng: np.random.Generator, layers: int, *, clustered: bool) -> tuple[np.ndarray, np.ndarray]:
    """4,000 windows with the window deviation of MiniLM's layers, skewed; in documents of about three, or alone."""
    size = rng.integers(1, 6, size=1400) if clustered else np.ones(4000, dtype=int)
    documents = np.repeat(np.arange(len(size)), size)[:4000]
    common = rng.gamma(2.0, size=(documents.max() + 1, layers))[documents]
    own = rng.gamma(2.0, size=(len(documents), layers))
    mixed = common + own if clustered else own
    return 0.8 + 0.01 * (mixed - mixed.mean(0)) / mixed.std(0), documents


def simulate(
    values: np.ndarray, documents: np.ndarray, half_width: float, runs: int, seed: int, limit: int, *, redraw: bool
) -> dict:
    """Run the rule `runs` times and count how often each layer's interval holds the population mean."""
    rng = np.random.default_rng(seed)
    rows = [np.flatnonzero(documents == document) for document in np.unique(documents)]
    truth = values.mean(axis=0)
    covered, stopped_at = [], []
    for _ in range(runs):
        if redraw:
            drawn = [rows[place] for place in rng.integers(len(rows), size=len(rows))]
            order = np.concatenate(drawn)
            labels = np.repeat(np.arange(len(drawn)), [len(d) for d in drawn])
        else:
            order = np.arange(len(values))
            labels = documents
        shuffled = rng.permutation(len(order))[:limit]
        order, labels = order[shuffled], labels[shuffled]
        series: list[np.ndarray] = []
        stop = 0
        while stop < len(order):
            series.append(values[order[stop : stop + PART_WINDOWS]])
            stop = min(stop + PART_WINDOWS, len(order))
            if tight_enough(series, labels[:stop].tolist(), half_width):
                break
        _, low, high = mean_interval(np.concatenate(series), labels[:stop])
        covered.append((low <= truth) & (truth <= high))
        stopped_at.append(stop)
    share = np.mean(covered, axis=0)
    return {
        "question": "such documents" if redraw else "this corpus",
        "half_width": half_width,
        "runs": runs,
        "coverage_by_layer": share.round(4).tolist(),
        "coverage_mean": float(share.mean().round(4)),
        "coverage_standard_error": float(np.sqrt(0.95 * 0.05 / runs).round(4)),
        "windows_median": float(np.median(stopped_at)),
        "windows_range": [int(min(stopped_at)), int(max(stopped_at))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, action="append", default=[], help="a finished run of rankscope measure")
    parser.add_argument("--runs", type=int, default=2000)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    populations = {
        "synthetic, independent windows": synthetic(rng, 6, clustered=False),
        "synthetic, correlated within documents": synthetic(rng, 6, clustered=True),
    }
    for run in arguments.run:
        dataset = rankscope.load(run)
        by_layer = dataset[STOPPING_SCALAR].sel(baseline="trained").mean("head").values
        name = f"{dataset.attrs['model']}, {run.name}, {len(by_layer)} windows"
        populations[name] = (by_layer, dataset.document.values)
    results = {
        name: [
            simulate(values, documents, width, arguments.runs, seed, 200, redraw=redraw)
            for redraw in (False, True)
            for seed, width in enumerate((0.01, 0.005, 0.003))
        ]
        for name, (values, documents) in populations.items()
    }
    RESULTS.mkdir(exist_ok=True)
    report = {"nominal": 0.95, "populations": results, "environment": environment()}
    (RESULTS / "stopping_rule.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
