r"""Pretrained models finetuned on the paper's four tasks: Table 2's form, with paired differences from the first model.

    python benchmarks/experiments/finetuning.py --glue GLUE --imdb IMDB --seeds 3 \
        --model transformer=RUN0/model,RUN1/model --model linformer-128=RUN2/model,RUN3/model

A model is a name and the folders of its checkpoints, one for each pretraining seed, in the same order for each model.
Every cell is one ``rankscope finetune``; finished seeds are kept in ``--work``. Writes
``benchmarks/results/finetuning.json`` and ``docs/finetuning.md``; ``--page-only`` writes the page anew from the result.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.cli.finetune import scale_of
from rankscope.spectrum.intervals import mean_interval
from rankscope.spectrum.parts import write_whole
from rankscope.training.finetune import FinetuneArgs, finetune, summary
from rankscope.training.table_2 import COLUMNS, Ours, table_2

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "finetuning.json"
PAGE = ROOT / "docs" / "finetuning.md"


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Run every cell and return the result file's content."""
    models = dict(parse_model(text) for text in given.model)
    if len({len(folders) for folders in models.values()}) != 1:
        raise RankscopeError("`--model` must name as many checkpoints for each model, so that they go in pairs")
    cells = []
    for name, folders in models.items():
        for task in given.tasks:
            for place, folder in enumerate(folders):
                args = FinetuneArgs(
                    task,
                    folder,
                    data=given.imdb if task == "imdb" else given.glue,
                    n=given.imdb_n if task == "imdb" else given.n,
                    seeds=given.seeds,
                    max_steps=given.max_steps,
                    epochs=given.epochs,
                    batch_size=given.batch_size,
                    learning_rate=given.learning_rate,
                    train_rows=given.train_rows,
                    eval_rows=given.eval_rows,
                    device=given.device,
                )
                found = finetune(args, given.work / f"{name}-{task}-{place}")
                cells.append({"name": name, "checkpoint": place, **found})
                print(f"{name}, checkpoint {place}, {task}: {found['metrics']['accuracy']}", flush=True)
    hours = sum(cell["cpu_seconds"] for cell in cells) / 3600
    return {"command": "finetuning", "cpu_hours": hours, "cells": cells, "environment": environment()}


def without_places(text: str, given: argparse.Namespace) -> str:
    """Name this machine's folders by what they hold: a result is read elsewhere."""
    names = {given.glue: "GLUE", given.imdb: "IMDB"}
    for name, folders in map(parse_model, given.model):
        names |= {folder: f"{name}-{place}" for place, folder in enumerate(folders)}
    for folder in sorted(filter(None, names), key=len, reverse=True):
        text = text.replace(json.dumps(folder)[1:-1], names[folder])
    return text


def parse_model(text: str) -> tuple[str, list[str]]:
    """Read ``name=folder,folder``.

    Example:
        >>> parse_model("linformer=a,b")
        ('linformer', ['a', 'b'])
    """
    name, _, folders = text.partition("=")
    if not name or not folders:
        raise RankscopeError(f"`--model` must be NAME=FOLDER or NAME=FOLDER,FOLDER, got {text!r}")
    return name, folders.split(",")


def scores(result: dict[str, Any], name: str, task: str, metric: str = "accuracy") -> tuple[np.ndarray, np.ndarray]:
    """Return a model's scores over checkpoints and seeds ``(runs,)``, and the checkpoint of each."""
    found = [
        (run["metrics"][metric], cell["checkpoint"])
        for cell in result["cells"]
        if (cell["name"], cell["task"]) == (name, task)
        for run in cell["runs"]
    ]
    values, checkpoints = zip(*found, strict=True)
    return np.array(values), np.array(checkpoints)


def mean_and_error(values: np.ndarray, checkpoints: np.ndarray) -> tuple[float, float | None]:
    """Mean with its standard error: over checkpoints where there are several, else over finetuning seeds."""
    known = np.unique(checkpoints)
    each = values if len(known) == 1 else np.array([values[checkpoints == one].mean() for one in known])
    found = summary(each.tolist())
    return found["mean"], found["standard_error"]


def page(result: dict[str, Any]) -> str:
    """Write the page from the result file's content."""
    names = list(dict.fromkeys(cell["name"] for cell in result["cells"]))
    tasks = [task for task in COLUMNS if any(cell["task"] == task for cell in result["cells"])]
    ours = [
        Ours(
            next(cell["n"] for cell in result["cells"] if cell["name"] == name),
            name,
            {task: mean_and_error(*scores(result, name, task)) for task in tasks},
        )
        for name in names
    ]
    first = result["cells"][0]
    checkpoints = len({cell["checkpoint"] for cell in result["cells"]})
    scale = (
        f"{scale_of(first)} ({tasks[0]}); checkpoints: {checkpoints}, finetuning seeds of each: {len(first['seeds'])}"
    )
    every = [run for cell in result["cells"] for run in cell["runs"]]
    constant, runs = sum(run["one_answer_share"] == 1 for run in every), len(every)
    lines = [
        "# Finetuning: the paper's Table 2 at this project's scale",
        "",
        f"Written by `benchmarks/experiments/finetuning.py` from `benchmarks/results/finetuning.json`; "
        f"{result['cpu_hours']:.2f} CPU-hours of finetuning.",
        "",
        table_2(ours, scale, tasks),
        f"Most frequent label: {', '.join(majority(result, task) for task in tasks)} %. What lies within a few points "
        f"of it has learnt little; {constant} of {runs} runs give every row the same answer.",
        "",
    ]
    if len(names) > 1:
        lines += [
            f"## Differences from {names[0]}",
            "",
            "Accuracy in points, paired by checkpoint and seed, 95 % t-interval clustered by checkpoint.",
            "",
            f"| model | {' | '.join(COLUMNS[task] for task in tasks)} |",
            f"|{' --- |' * (len(tasks) + 1)}",
        ]
        lines += [
            f"| {name} | {' | '.join(difference(result, name, names[0], task) for task in tasks)} |"
            for name in names[1:]
        ]
        lines += ["", "An interval that holds 0 says the two can't be told apart here, not that they are equal."]
    return "\n".join(lines) + "\n"


def majority(result: dict[str, Any], task: str) -> str:
    """Return a task's name with the share of its most frequent label."""
    data = next(cell["data"]["eval"] for cell in result["cells"] if cell["task"] == task)
    return f"{COLUMNS[task]} {100 * data['majority']:.1f}"


def difference(result: dict[str, Any], name: str, base: str, task: str) -> str:
    """Return a cell of the differences' table."""
    values, checkpoints = scores(result, name, task)
    mean, low, high = (100 * float(end) for end in mean_interval(values - scores(result, base, task)[0], checkpoints))
    return f"{mean:+.1f}" if np.isnan(low) else f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER,FOLDER; the first is compared with")
    parser.add_argument("--glue", help="folder with SST-2, QNLI and QQP; default the hub")
    parser.add_argument("--imdb", help="folder with IMDB's train.tsv and test.tsv; default the hub")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(COLUMNS))
    parser.add_argument("--n", type=int, default=128)
    parser.add_argument("--imdb-n", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--train-rows", type=int)
    parser.add_argument("--eval-rows", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "finetuning")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--page-only", action="store_true")
    given = parser.parse_args(arguments)
    if not given.page_only:
        if not given.model:
            parser.error("give --model NAME=FOLDER at least once")
        write_whole(given.result, (without_places(json.dumps(run(given), indent=1), given) + "\n").encode())
    write_whole(given.page, page(json.loads(given.result.read_text())).encode())
    print(f"written: {given.result}, {given.page}")


if __name__ == "__main__":
    main()
