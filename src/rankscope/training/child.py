"""One run of a comparison in a process of its own: ``python -m rankscope.training.child`` reads it as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rankscope._errors import RankscopeError


def main() -> None:
    """Run the order of standard input and print what it found, or a user's mistake, as one line of JSON."""
    order = json.load(sys.stdin)
    if order["threads"] is not None:
        torch.set_num_threads(order["threads"])
    try:
        found = OBJECTIVES[order["objective"]](order)
    except RankscopeError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


def listops(order: dict[str, Any]) -> dict[str, Any]:
    """Train a classifier on ListOps from nothing."""
    from rankscope.models.configuration_linformer import LinformerConfig
    from rankscope.training.classifiers import resolve
    from rankscope.training.classify import Encoded, OrderedRows, Plan, encode, train_and_score
    from rankscope.training.tasks import TASKS, load_split

    task, n, settings = TASKS["listops"], order["n"], order["settings"]
    config = LinformerConfig(max_position_embeddings=n, **order["model"])
    source = resolve(task, config, n=n)
    splits = {
        split: load_split(task, order["data"], split, limit=settings[f"{split}_rows"]) for split in ("train", "eval")
    }
    # Only the rows that the run comes to: tokenizing all of LRA's takes longer than a short run.
    visits = OrderedRows(
        Encoded([], splits["train"].labels, 0), order["seed"], order["steps"] * settings["batch_size"]
    ).places()
    train = encode(splits["train"], source.tokenizer, n, places=visits)
    evaluated = encode(splits["eval"], source.tokenizer, n)
    plan = Plan(
        order["steps"],
        settings["batch_size"],
        learning_rate=settings["learning_rate"],
        warmup_share=settings["warmup_share"],
        weight_decay=settings["weight_decay"],
        device=settings["device"],
    )
    model = source.build(order["seed"])
    found = train_and_score(model, source.tokenizer, task, train, evaluated, plan, n=n, seed=order["seed"])
    return {
        **found,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "truncated": {"train": train.truncated, "eval": evaluated.truncated},
        "data_hash": {split: data.data_hash for split, data in splits.items()},
    }


def pretraining(order: dict[str, Any]) -> dict[str, Any]:
    """Pretrain a masked language model from nothing."""
    from rankscope.training.args import PretrainArgs
    from rankscope.training.classify import LOSS_POINTS, reset_peak
    from rankscope.training.pretrain import pretrain

    steps = order["steps"]
    # The schedule is a whole one at either budget: it warms up over the same share of the steps.
    warmup = round(order["settings"]["warmup_share"] * steps)
    given = {**order["pretrain"], "max_steps": steps, "warmup_steps": warmup, "seed": order["seed"]}
    every = max(1, steps // LOSS_POINTS)
    given |= {"log_every": every, "save_every": every * steps, "eval_every": steps, "model": order["model"]}
    before = reset_peak()
    result = pretrain(PretrainArgs(**given), Path(order["folder"]))
    return {
        "seed": order["seed"],
        "steps": steps,
        "tokens": result["tokens"],
        "loss": result["loss"],
        "metrics": result["metrics"],
        "seconds": result["tokens"] / result["tokens_per_second"],
        "cpu_seconds": result["cpu_seconds"],
        "tokens_per_second": result["tokens_per_second"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "memory_before_bytes": before,
        "parameters": result["model"]["parameters"],
        "data_hash": {"train": result["data"]["corpus_hash"]},
        "plan": given,
        "environment": result["environment"],
    }


OBJECTIVES = {"listops": listops, "pretrain": pretraining}

if __name__ == "__main__":
    main()
