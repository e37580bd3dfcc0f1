"""MiniLM's attention spectra on three texts at two lengths: results, pictures and the page that quotes them.

``python benchmarks/experiments/minilm_spectra.py --runs DIR [--corpus wiki103=FILE] [--corpus imdb=FILE:text]``

Measures up to 256 windows of each corpus (``pydoc`` always; the others from the files named, so that no hub is
needed) at n = 512 and 128 into DIR, resuming what is there; then writes ``benchmarks/results/minilm_spectra.json``,
pictures in ``docs/images`` and ``docs/measurement.md``. With ``--page`` it only writes the page from the JSON.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import xarray as xr

import rankscope
from rankscope.report import figures, summary
from rankscope.report.statistics import depth_trend
from rankscope.spectrum.intervals import mean_interval

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "minilm_spectra.json"
PAGE = ROOT / "docs" / "measurement.md"
LENGTHS = (512, 128)
SCALARS = (
    "nuclear_fraction_at_quarter",
    "effective_rank",
    "nuclear_rank_90",
    "energy_rank_90",
    "logit_sd",
    "sink_share",
)


def measured(runs: Path, label: str, corpus: str, column: str | None, n: int) -> xr.Dataset:
    """Load a finished run, or measure it."""
    folder = runs / f"minilm-{label}-{n}"
    if (folder / "spectrum.nc").exists():
        return rankscope.load(folder)
    return rankscope.measure("minilm", corpus, column=column, n=n, windows=256, out=folder)


def digest(dataset: xr.Dataset, label: str) -> dict:
    """The numbers of one run that the page and later comparisons need."""
    layers = []
    for at, layer in enumerate(dataset.layer.values):
        row: dict[str, object] = {"layer": int(layer)}
        for name in SCALARS:
            series = dataset[name].sel(baseline="trained", layer=layer).mean("head")
            mean, low, high = mean_interval(series.values, dataset.document.values)
            row[name] = [round(float(x), 5) for x in (mean, low, high)]
        heads = dataset.nuclear_fraction_at_quarter.sel(baseline="trained", layer=layer).mean("window")
        row["heads_at_quarter"] = [round(float(x), 4) for x in heads]
        row["nulls_at_quarter"] = {
            str(name): round(float(dataset.nuclear_fraction_at_quarter.sel(baseline=name).isel(layer=at).mean()), 4)
            for name in dataset.baseline.values[1:]
        }
        layers.append(row)
    by_layer = dataset.nuclear_fraction_at_quarter.sel(baseline="trained").mean("head").values
    trend = depth_trend(by_layer, dataset.document.values)
    return {
        "corpus": label,
        "corpus_hash": dataset.attrs["corpus_hash"],
        "n": int(dataset.attrs["n"]),
        "windows": int(dataset.sizes["window"]),
        "documents": len(np.unique(dataset.document.values)),
        "left_out": json.loads(dataset.attrs["left_out"]),
        "layers": layers,
        "depth_trend": {"spearman_rho": round(float(trend.rho), 4), "p": round(float(trend.p), 4)},
        "statements": [line.replace(str(dataset.attrs["corpus"]), label) for line in summary.statements(dataset)],
        "self_check": json.loads(dataset.attrs["self_check"]),
        "numerics": json.loads(dataset.attrs["numerics"]),
        "method": dataset.attrs["method"],
        "seed": int(dataset.attrs["seed"]),
        "environment": json.loads(dataset.attrs["environment"]),
    }


def pictures(dataset: xr.Dataset, label: str) -> None:
    """Draw one run's pictures into ``docs/images``."""
    dataset = dataset.assign_attrs(corpus=label)
    for name, draw in (("layers", figures.layer_curves), ("heads", figures.heatmap)):
        figure = draw(dataset, backend="matplotlib")
        figure.savefig(ROOT / "docs" / "images" / f"minilm-{label}-{dataset.attrs['n']}-{name}.png", dpi=110)


def page(results: list[dict]) -> str:
    """The page's text, every number from the results."""
    lines = [
        "# How low-rank is MiniLM's attention?",
        "",
        "The share of Σσ that the first quarter of the singular values holds (Linformer's measure: index 128 of 512), "
        "mean over heads and windows, for all-MiniLM-L6-v2 (6 layers, 12 heads of 32). In brackets the 95 % interval "
        "over windows, clustered by document. The nulls are measured on the first 16 windows. This page is written by "
        "`benchmarks/experiments/minilm_spectra.py` from `benchmarks/results/minilm_spectra.json`.",
        "",
    ]
    for result in results:
        nulls = list(result["layers"][0]["nulls_at_quarter"])
        lines += [
            f"## {result['corpus']}, n = {result['n']}",
            "",
            f"{result['windows']} windows that start in {result['documents']} documents; corpus hash "
            f"`{result['corpus_hash'][:12]}`.",
            "",
            "| layer | trained | heads, lowest to highest | "
            + " | ".join(n.replace("_", " ") for n in nulls)
            + " | 90 % of σ in | logit sd |",
            "|---|---|---|" + "---|" * (len(nulls) + 2),
        ]
        for row in result["layers"]:
            mean, low, high = row["nuclear_fraction_at_quarter"]
            heads = row["heads_at_quarter"]
            cells = [
                str(row["layer"]),
                f"{mean:.3f} ({low:.3f} to {high:.3f})",
                f"{min(heads):.2f} to {max(heads):.2f}",
                *[f"{row['nulls_at_quarter'][name]:.3f}" for name in nulls],
                f"{row['nuclear_rank_90'][0]:.0f} of {result['n']}",
                f"{row['logit_sd'][0]:.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        trend = result["depth_trend"]
        lines += [
            "",
            f"Depth trend: Spearman ρ = {trend['spearman_rho']:.2f}, exact p = {trend['p']:.3f} over 6 layers.",
            "",
        ]
        if result["n"] == 512:
            lines += [
                f"![Curves](images/minilm-{result['corpus']}-512-layers.png)",
                "",
                f"![Heads](images/minilm-{result['corpus']}-512-heads.png)",
                "",
                "In words, as the report states it:",
                "",
                *[f"- {statement}" for statement in result["statements"]],
                "",
            ]
    return "\n".join(lines + stopping())


def stopping() -> list[str]:
    """The section on early stopping, from its own result file."""
    simulated = json.loads((RESULT.parent / "stopping_rule.json").read_text())
    lines = [
        "## What `--half-width` stops at",
        "",
        "How often the 95 % interval at which a run stops holds the truth, by simulation on the windows above and on "
        "two synthetic populations (`benchmarks/experiments/stopping_rule.py`; mean over the layers). *This corpus*: "
        "the truth is the corpus's own mean. *Such documents*: a new corpus of as many documents is drawn each time, "
        "and the truth is the mean of what they stand for; few documents of uneven size (pydoc) then cost cover.",
        "",
        "| windows of | half-width | this corpus | such documents | windows used (median) |",
        "|---|---|---|---|---|",
    ]
    for name, rows in simulated["populations"].items():
        here = [row for row in rows if row["question"] == "this corpus"]
        there = [row for row in rows if row["question"] == "such documents"]
        for a, b in zip(here, there, strict=True):
            lines.append(
                f"| {name} | {a['half_width']} | {a['coverage_mean']:.3f} | {b['coverage_mean']:.3f} | "
                f"{a['windows_median']:.0f} |"
            )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--corpus", action="append", default=[], help="LABEL=FILE or LABEL=FILE:COLUMN")
    parser.add_argument("--page", action="store_true", help="only write the page from the result file")
    arguments = parser.parse_args()
    if not arguments.page:
        corpora = [("pydoc", "pydoc", None)]
        for given in arguments.corpus:
            label, _, place = given.partition("=")
            file, _, column = place.partition(":")
            corpora.append((label, file, column or None))
        results = []
        for label, corpus, column in corpora:
            for n in LENGTHS:
                dataset = measured(arguments.runs, label, corpus, column, n)
                results.append(digest(dataset, label))
                if n == max(LENGTHS):
                    pictures(dataset, label)
        RESULT.write_text(json.dumps({"model": "all-MiniLM-L6-v2", "runs": results}, indent=1))
    PAGE.write_text(page(json.loads(RESULT.read_text())["runs"]))


if __name__ == "__main__":
    main()
