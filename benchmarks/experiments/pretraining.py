"""Pretraining, Transformer against Linformer: k, sharing, length, and spectra from fresh weights to the end.

Each run is `rankscope pretrain` in a process of its own; finished runs are skipped, so the matrix may be run in
pieces. Writes benchmarks/results/pretraining.json and docs/pretraining.md with its pictures.

    python benchmarks/experiments/pretraining.py --corpus TEXT --runs runs/pretraining --steps 1000
"""

import argparse
import json
import subprocess
import sys
from math import exp
from pathlib import Path

from rankscope.report.html import write_picture
from rankscope.report.training_figures import by_label, perplexity_figure, seeds_mean, spectra_figure
from rankscope.training.spectra import load_steps

ROOT = Path(__file__).resolve().parents[2]


def matrix(options):
    """Return the runs of each comparison: (k or none, sharing, n, seed)."""
    k, sharings, n = options.k, options.sharing, options.n
    seeds = range(options.seeds)
    exact = [("none", "headwise", n, seed) for seed in seeds]
    by_k = exact + [(str(x), "headwise", n, seed) for x in k for seed in seeds]
    by_sharing = exact + [(str(k[-1]), sharing, n, seed) for sharing in sharings for seed in seeds]
    by_length = [(str(k[-1]), "headwise", length, seed) for length in options.lengths for seed in seeds]
    return {f"k at n = {n}": by_k, f"sharing at k = {k[-1]}": by_sharing, f"length at k = {k[-1]}": by_length}


def run(options, key):
    """Run one cell, or read it if it is there."""
    k, sharing, n, seed = key
    folder = options.runs / f"k-{k}_{sharing}_n-{n}_seed-{seed}"
    # The same number of tokens an update at every length.
    batch = max(1, options.tokens_per_update // n)
    measured = ["--measure-every", str(options.measure_every)] if options.measure_every and seed == 0 else []
    if not (folder / "result.json").exists():
        command = [sys.executable, "-m", "rankscope", "pretrain", "--config", options.config, "--out", str(folder)]
        command += ["--corpus", options.corpus, "--projected-length", k, "--sharing", sharing, "--n", str(n)]
        command += ["--batch-size", str(batch), "--seed", str(seed), "--max-steps", str(options.steps)]
        command += ["--warmup-steps", str(max(1, options.steps // 10)), "--log-every", str(options.log_every)]
        command += ["--eval-every", str(options.eval_every), "--save-every", str(options.eval_every)]
        command += ["--eval-windows", str(max(1, options.eval_tokens // n)), "--measure-windows", "2", *measured]
        print(" ".join(command[2:]), flush=True)
        subprocess.run(command, check=True)
    result = json.loads((folder / "result.json").read_text())
    result["folder"] = folder.name
    return result


def rows(groups):
    """Return one row a configuration: its final perplexity with the interval over seeds, speed and memory."""
    table = []
    for title, results in groups.items():
        for label, runs in by_label(results).items():
            _, mean, low, high = seeds_mean(runs)
            table.append(
                {
                    "comparison": title,
                    "model": label,
                    "seeds": len(runs),
                    "eval_loss": mean[-1],
                    "eval_loss_low": low[-1],
                    "eval_loss_high": high[-1],
                    "tokens_per_second": sum(r["tokens_per_second"] for r in runs) / len(runs),
                    "peak_memory_bytes": max(r["peak_memory_bytes"] for r in runs),
                    "cpu_hours": sum(r["cpu_seconds"] for r in runs) / 3600,
                }
            )
    return table


def page(options, table, results, pictures):
    """Return docs/pretraining.md."""
    first = results[0]
    data, processor = first["data"], first["environment"]["processor"]
    hours = sum(result["cpu_seconds"] for result in results) / 3600
    lines = [
        "# Pretraining: Transformer against Linformer",
        "",
        f"{len(results)} runs of `{options.config}` on `{data['corpus']}`, {options.steps:,} updates of "
        f"{options.tokens_per_update:,} tokens each, {hours:.2f} CPU hours in all on {processor}. "
        "Perplexity is that of the masked tokens of held-out text, e to the mean loss over seeds; in brackets the 95 % "
        "interval over seeds, where there are several. Written by `benchmarks/experiments/pretraining.py` from "
        "`benchmarks/results/pretraining.json`.",
        "",
        "| comparison | model | seeds | perplexity | tokens/s | memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in table:
        interval = ""
        if row["seeds"] > 1:
            interval = f" [{exp(row['eval_loss_low']):.1f}, {exp(row['eval_loss_high']):.1f}]"
        lines.append(
            f"| {row['comparison']} | {row['model']} | {row['seeds']} | {exp(row['eval_loss']):.1f}{interval} "
            f"| {row['tokens_per_second']:,.0f} | {row['peak_memory_bytes'] / 2**20:,.0f} |"
        )
    lines += [""] + [f"![{alt}](images/{name}.png)" for name, alt in pictures]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--k", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--sharing", nargs="+", default=["headwise", "key_value", "layerwise"])
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512, 1024, 2048])
    parser.add_argument("--tokens-per-update", type=int, default=8192)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-tokens", type=int, default=32768)
    parser.add_argument("--measure-every", type=int, default=0, help="spectra of seed 0's runs; 0 = none")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    known = {}
    groups = {}
    for title, keys in matrix(options).items():
        for key in keys:
            if key not in known:
                known[key] = run(options, key)
        if keys:
            groups[title] = [known[key] for key in keys]
    results = list(known.values())
    table = rows(groups)
    (options.docs / "images").mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    figures = [("pretraining-perplexity", perplexity_figure(groups))]
    for result in results:
        if result["spectra"]:
            steps = load_steps(options.runs / result["folder"] / "spectra")
            figures.append((f"pretraining-spectra-{result['folder']}", spectra_figure(steps)))
    for name, figure in figures:
        write_picture(figure, options.docs / "images" / f"{name}.png")
    written = {"table": table, "runs": results}
    (options.results / "pretraining.json").write_text(json.dumps(written, indent=1) + "\n")
    pictures = [(name, figure.alt) for name, figure in figures]
    (options.docs / "pretraining.md").write_text(page(options, table, results, pictures))


if __name__ == "__main__":
    main()
