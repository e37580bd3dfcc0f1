"""Transformer against Linformer on long ListOps from nothing: accuracy at equal tokens and equal time, speed, memory.

    python benchmarks/experiments/listops.py --n 1024,2048 --k 128,256 --max-steps 5000 --seeds 3

Every cell is one ``rankscope compare listops``; finished runs are kept in ``--work``, and the Transformer's runs of an
n serve every k. Writes ``benchmarks/results/listops.json`` and ``docs/listops.md``, both from the runs alone;
``--page-only`` writes the page anew from the result file.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from rankscope._environment import environment
from rankscope.cli.compare import lines_of
from rankscope.spectrum.parts import write_whole
from rankscope.training.compare import CompareArgs, compare

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "listops.json"
PAGE = ROOT / "docs" / "listops.md"
#: Accuracy in percent of Transformer and Linformer on LRA's ListOps, as printed.
PRINTED = (
    ("Long Range Arena, arXiv 2011.04006, Table 1", 36.37, 35.70),
    ("Nyströmformer's re-run, arXiv 2102.03902", 37.10, 37.25),
    ("FlashAttention, arXiv 2205.14135, Table 3", 36.0, 35.6),
)


def cell_folder(work: Path, args: CompareArgs) -> Path:
    """Take a cell's folder, with the Transformer's runs and the data of another k at the same n."""
    folder = work / f"n-{args.n}-k-{args.k}-{args.sharing}"
    runs = folder / "runs"
    for other in sorted(work.glob(f"n-{args.n}-k-*")):
        if other == folder or not (other / "runs").is_dir():
            continue
        if not (folder / "data").exists():
            shutil.copytree(other / "data", folder / "data")
        for path in (other / "runs").glob("transformer-*.json"):
            if not (runs / path.name).exists():
                runs.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, runs / path.name)
    return folder


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Run every cell and return the result file's content."""
    cells = []
    for n in given.n:
        for k in given.k:
            args = CompareArgs(
                "listops",
                n=n,
                k=k,
                sharing=given.sharing,
                max_steps=given.max_steps,
                seeds=given.seeds,
                batch_size=given.batch_size,
                learning_rate=given.learning_rate,
                train_rows=given.train_rows,
                eval_rows=given.eval_rows,
                hidden_size=given.hidden_size,
                num_hidden_layers=given.layers,
                num_attention_heads=given.heads,
                intermediate_size=2 * given.hidden_size,
                threads=given.threads,
                device=given.device,
            )
            print(f"n = {n}, k = {k}", flush=True)
            cells.append(compare(args, cell_folder(given.work, args), progress=tell))
    # The Transformer's runs that several cells share are counted once.
    cpu = {
        (
            cell["settings"]["n"],
            None if row["model"] == "transformer" else cell["settings"]["k"],
            row["steps"],
            seed,
        ): row
        for cell in cells
        for rows in cell["runs"].values()
        for of_one in rows.values()
        for seed, row in enumerate(of_one)
    }
    hours = sum(row["cpu_seconds"] for row in cpu.values()) / 3600
    return {"command": "listops", "cpu_hours": hours, "cells": cells, "environment": environment()}


def tell(kind: str, budget: str, row: dict[str, Any], was_there: bool) -> None:
    """Print a run's line."""
    accuracy, seconds = row["metrics"]["accuracy"], row["seconds"]
    there = " (was there)" if was_there else ""
    print(f"  {kind}, seed {row['seed']}, {budget}: accuracy {accuracy:.3f}, {seconds:.0f} s{there}", flush=True)


def page(result: dict[str, Any]) -> str:
    """Write the page from the result file's content."""
    first = result["cells"][0]["settings"]
    lines = [
        "# ListOps: Transformer against Linformer from nothing",
        "",
        f"Long ListOps by LRA's grammar, generated with seed 0 and bounded so that none is cut: {first['train_rows']} "
        f"training and {first['eval_rows']} evaluated expressions, ten classes. Both models: "
        f"{first['num_hidden_layers']} layers of width {first['hidden_size']}, {first['num_attention_heads']} heads, "
        f"learning rate {first['learning_rate']:g}, {first['max_steps']} updates of {first['batch_size']} expressions, "
        f"the same rows in the same order; {result['cpu_hours']:.2f} CPU-hours in all. Written by "
        "`benchmarks/experiments/listops.py` from `benchmarks/results/listops.json`.",
        "",
    ]
    for cell in result["cells"]:
        settings = cell["settings"]
        lines += [f"## n = {settings['n']:,}, k = {settings['k']}, {settings['sharing']}", "", lines_of(cell), ""]
        lines += [verdict(cell), ""]
    lines += [
        "## As printed elsewhere",
        "",
        "LRA trains on 96,000 expressions of up to 2,000 tokens; accuracy in percent.",
        "",
        "| | Transformer | Linformer |",
        "| --- | --- | --- |",
        *(f"| {source} | {exact:.2f} | {linformer:.2f} |" for source, exact, linformer in PRINTED),
    ]
    return "\n".join(lines) + "\n"


def verdict(cell: dict[str, Any]) -> str:
    """Say what the intervals allow to say."""
    said = []
    for budget, words in (("equal_tokens", "At equal tokens"), ("equal_time", "At equal time")):
        gap = cell[budget]["accuracy"]["difference"]
        points = f"{100 * gap['mean']:+.1f} points"
        if gap["low"] is None:
            said.append(f"{words} one pair of runs differs by {points}, which is no evidence either way.")
        elif gap["low"] > 0 or gap["high"] < 0:
            better = "Linformer" if gap["mean"] > 0 else "the Transformer"
            said.append(f"{words} {better} is ahead: {points} for Linformer.")
        else:
            said.append(
                f"{words} the two can't be told apart: {points}, interval {100 * gap['low']:+.1f} to "
                f"{100 * gap['high']:+.1f}."
            )
    return " ".join(said)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=numbers, default=[1024, 2048])
    parser.add_argument("--k", type=numbers, default=[128])
    parser.add_argument("--sharing", default="headwise")
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--train-rows", type=int, default=96_000)
    parser.add_argument("--eval-rows", type=int, default=2_000)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "listops")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--page-only", action="store_true")
    given = parser.parse_args(arguments)
    if not given.page_only:
        write_whole(given.result, (json.dumps(run(given), indent=1) + "\n").encode())
    write_whole(given.page, page(json.loads(given.result.read_text())).encode())
    print(f"written: {given.result}, {given.page}")


if __name__ == "__main__":
    main()
