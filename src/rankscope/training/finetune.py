"""Finetuning a model on a task with several seeds: mean and standard error, finished seeds kept."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.training.args import differences
from rankscope.training.tasks import SPLITS, TASKS, load_split

RESULT = "result.json"
SETTINGS = "settings.json"
# A run may be gone on with for more seeds.
FREE = ("seeds", "micro_batch_size", "device")

Progress = Callable[[int, int, int, float], None]


@dataclass(frozen=True)
class FinetuneArgs:
    """What a finetuning run is.

    Args:
        task: A row of :data:`rankscope.training.tasks.TASKS`.
        model: A folder of ``save_pretrained``, a hub id or ``minilm``.
        data: Folder of the task's TSV files or a hub repository; ``None``: the task's own on the hub, and generated
            ListOps.
        tokenizer: Used instead of the model's own.
        n: Tokens a row at most; 512 or what the model holds by default.
        fresh: Draw the weights of the model's architecture anew; ListOps always does.
        seeds: How many runs, with the seeds 0, 1, …
        max_steps: Updates; ``None``: ``epochs`` decides.
        epochs: Passes over the training rows where ``max_steps`` does not say.
        batch_size: Rows an update.
        micro_batch_size: Rows a forward.
        learning_rate: At its peak; ``None``: 2e-5 · 768 / width, 5e-4 for fresh weights.
        warmup_share: Of the steps.
        weight_decay: AdamW's.
        train_rows: So many rows are drawn from the training split.
        eval_rows: And so many from the evaluated one.
        precision: ``float32`` or ``bfloat16``.
        device: ``auto`` or ``cpu``.
        save_models: Keep each seed's classifier in ``model-seed-N``.
    """

    task: str
    model: str
    data: str | None = None
    tokenizer: str | None = None
    n: int | None = None
    fresh: bool = False
    seeds: int = 1
    max_steps: int | None = None
    epochs: float = 3.0
    batch_size: int = 32
    micro_batch_size: int | None = None
    learning_rate: float | None = None
    warmup_share: float = 0.1
    weight_decay: float = 0.01
    train_rows: int | None = None
    eval_rows: int | None = None
    precision: str = "float32"
    device: str = "auto"
    save_models: bool = False

    def __post_init__(self) -> None:
        TASKS[self.task]
        if self.seeds < 1:
            raise RankscopeError(f"`seeds` must be at least 1, got {self.seeds}")
        if self.max_steps is not None and self.max_steps < 1:
            raise RankscopeError(f"`max_steps` must be at least 1, got {self.max_steps}")
        if not 0 < self.epochs < math.inf:
            raise RankscopeError(f"`epochs` must be above 0, got {self.epochs}")


def finetune(args: FinetuneArgs, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Finetune with each seed that has no result in ``out`` yet, and sum up.

    Everything a user may have wrong is looked at before the folder is taken. The evaluated split is scored once for
    each seed, after the last step.

    Args:
        args: The run's settings.
        out: Folder: ``settings.json``, ``seed-N.json`` and ``result.json``, each written whole or not at all.
        progress: Called with (seed, step, steps, loss).

    Returns:
        The result, as in ``out/result.json``.

    Raises:
        RankscopeError: A setting, model, tokenizer, file or folder that can't serve, or a loss that is no number.
    """
    from rankscope.spectrum.parts import write_whole
    from rankscope.training.classifiers import resolve
    from rankscope.training.classify import Plan, encode, read_json, train_and_score
    from rankscope.training.data import tokenizer_hash

    refuse_processes()
    out, task = Path(out), TASKS[args.task]
    source = resolve(task, args.model, n=args.n, tokenizer=args.tokenizer, fresh=args.fresh)
    limits = dict(zip(SPLITS, (args.train_rows, args.eval_rows), strict=True))
    splits = {name: load_split(task, args.data, name, limit=limits[name], n=source.n) for name in SPLITS}
    encoded = {name: encode(split, source.tokenizer, source.n) for name, split in splits.items()}
    model = source.build(0)
    steps = args.max_steps or max(1, math.ceil(args.epochs * len(splits["train"]) / args.batch_size))
    plan = Plan(
        steps,
        args.batch_size,
        args.micro_batch_size,
        source.rate(model) if args.learning_rate is None else args.learning_rate,
        args.warmup_share,
        args.weight_decay,
        args.precision,
        args.device,
    )
    data = {
        name: {
            "source": splits[name].source,
            "rows": len(splits[name]),
            "rows_left_out": splits[name].left_out,
            "truncated": encoded[name].truncated,
            "majority": splits[name].majority,
            "hash": splits[name].data_hash,
        }
        for name in SPLITS
    }
    settings = {
        **asdict(args),
        "n": source.n,
        "weights": sha256(source.fingerprint(model).encode()).hexdigest(),
        "tokenizer_hash": tokenizer_hash(source.tokenizer),
        "train_hash": data["train"]["hash"],
        "eval_hash": data["eval"]["hash"],
    }
    claim(out, settings)
    found = []
    for seed in range(args.seeds):
        path = out / f"seed-{seed}.json"
        one = read_json(path)
        if one is None:
            classifier = model if seed == 0 else source.build(seed)
            tell = None if progress is None else _of_seed(progress, seed)
            try:
                one = train_and_score(
                    classifier,
                    source.tokenizer,
                    task,
                    encoded["train"],
                    encoded["eval"],
                    plan,
                    n=source.n,
                    seed=seed,
                    progress=tell,
                )
            except RankscopeError:
                release(out, "seed-*.json")
                raise
            if args.save_models:
                save_model(classifier, source.tokenizer, out / f"model-seed-{seed}")
            write_whole(path, _json(one))
        found.append(one)
    result = {
        "command": "finetune",
        "task": args.task,
        "model": describe(model, args.model),
        "n": source.n,
        "seeds": [one["seed"] for one in found],
        "steps": steps,
        "tokens": sum(one["tokens"] for one in found),
        "loss": summary([one["loss"] for one in found]),
        "metrics": {name: summary([one["metrics"][name] for one in found]) for name in task.metrics},
        "seconds": sum(one["seconds"] + one["eval_seconds"] for one in found),
        "cpu_seconds": sum(one["cpu_seconds"] for one in found),
        "data": data,
        "settings": settings,
        "plan": asdict(plan),
        "runs": found,
        "environment": environment(),
    }
    write_whole(out / RESULT, _json(result))
    return result


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Mean, and standard error of the mean over seeds: the sample deviation by √seeds, ``None`` of one seed.

    Example:
        >>> summary([0.5, 0.7])
        {'mean': 0.6, 'standard_error': 0.1, 'seeds': 2}
    """
    x = np.asarray(values, dtype=np.float64)
    error = float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else None
    return {"mean": float(x.mean()), "standard_error": error, "seeds": len(x)}


def describe(model: Any, name: str) -> dict[str, Any]:
    """Return what a model is, for a result."""
    config = model.config
    projected = getattr(config, "projected_length", None)
    return {
        "name": name,
        "kind": config.model_type,
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "projected_length": projected,
        "projection_sharing": None if projected is None else config.projection_sharing,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def claim(out: Path, settings: Mapping[str, Any]) -> None:
    """Take a folder for a run, or check that it is this run's.

    Raises:
        RankscopeError: Another run is in the folder (the message names every difference), or it can't be used.
    """
    from rankscope.spectrum.parts import write_whole
    from rankscope.training.classify import read_json

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RankscopeError(f"`out` {str(out)!r} can't be used as a folder: {error.strerror}") from None
    path = out / SETTINGS
    settings = json.loads(json.dumps(settings))
    if path.exists():
        before = read_json(path)
        if not isinstance(before, dict):
            raise RankscopeError(f"{str(path)!r} is damaged: choose another --out")
        kept = [{name: value for name, value in one.items() if name not in FREE} for one in (settings, before)]
        wrong = differences(kept[0], kept[1])
        if wrong:
            raise RankscopeError(
                f"`out` {str(out)!r} holds a run with other settings: {'; '.join(wrong)}. Use the same settings to go "
                "on with it, or another --out"
            )
    elif any(out.glob("seed-*.json")) or (out / RESULT).exists():
        raise RankscopeError(f"`out` {str(out)!r} holds another run's results: choose another --out")
    write_whole(path, _json(settings))


def release(out: Path, finished: str) -> None:
    """Give a folder back that a run took without finishing anything, so that mended settings can have it.

    Args:
        out: The folder.
        finished: Pattern of what a finished part leaves there.
    """
    if not any(out.glob(finished)):
        (out / SETTINGS).unlink(missing_ok=True)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Keep a classifier with its tokenizer.

    Raises:
        RankscopeError: The disk can't hold it.
    """
    from safetensors import SafetensorError

    from rankscope.spectrum.parts import disk_error

    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise disk_error(folder, error) from None


def refuse_processes() -> None:
    """Refuse to be started as several processes, which would each do the whole run."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise RankscopeError(
            f"finetuning runs in one process, but {world} were started: start it without accelerate launch"
        )


def _of_seed(progress: Progress, seed: int) -> Callable[[int, int, float], None]:
    return lambda step, steps, loss: progress(seed, step, steps, loss)


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
