"""A fair comparison: Transformer and Linformer on the same rows in the same order, at equal tokens and equal time."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.spectrum.intervals import mean_interval
from rankscope.spectrum.parts import disk_error, write_whole
from rankscope.training.classify import read_json
from rankscope.training.finetune import RESULT, claim, release, summary
from rankscope.training.listops import write_listops
from rankscope.training.tasks import LISTOPS_ROWS, grammar_for

Row = dict[str, Any]
MODELS = ("transformer", "linformer")
TOKENS, TIME = "tokens", "time"


@dataclass(frozen=True)
class CompareArgs:
    """What is compared, and at which budget.

    Args:
        objective: ``listops`` (a classifier from nothing) or ``pretrain`` (a masked language model from nothing).
        n: Tokens a row; ListOps' expressions are bounded to fit.
        k: Linformer's projected length.
        sharing: Of its projections.
        projection: Their kind.
        max_steps: Updates of the equal-token budget.
        seconds: The equal-time budget; ``None``: what the Transformer took for its tokens, on average.
        seeds: How many pairs of runs, with the seeds 0, 1, …
        batch_size: Rows an update.
        learning_rate: The same for both.
        warmup_share: Of the steps.
        weight_decay: AdamW's, on matrices.
        hidden_size: Of both models, as the next three.
        num_hidden_layers: Layers.
        num_attention_heads: Heads.
        intermediate_size: Channels of the feed-forward layer.
        train_rows: ListOps: training rows.
        eval_rows: ListOps: evaluated rows.
        data: ListOps: folder of its files; ``None`` generates them.
        pretrain: Pretraining: ``corpus``, and other fields of :class:`rankscope.training.args.PretrainArgs`.
        threads: Processor threads; ``None``: PyTorch's choice.
        device: ``auto`` or ``cpu``.
    """

    objective: str
    n: int = 1024
    k: int = 128
    sharing: str = "headwise"
    projection: str = "learned"
    max_steps: int = 1000
    seconds: float | None = None
    seeds: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-4
    warmup_share: float = 0.1
    weight_decay: float = 0.01
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 128
    train_rows: int = LISTOPS_ROWS["train"]
    eval_rows: int = LISTOPS_ROWS["eval"]
    data: str | None = None
    pretrain: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.objective not in ("listops", "pretrain"):
            raise RankscopeError(f"`objective` must be listops or pretrain, got {self.objective!r}")
        for name in ("max_steps", "seeds", "batch_size", "k", "train_rows", "eval_rows"):
            if getattr(self, name) < 1:
                raise RankscopeError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise RankscopeError(f"`threads` must be at least 1, got {self.threads}")
        if not 0 <= self.warmup_share < 1:
            raise RankscopeError(f"`warmup_share` must be in [0, 1), got {self.warmup_share}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise RankscopeError(f"`seconds` must be above 0, got {self.seconds}")
        if self.k > self.n:
            raise RankscopeError(f"`k` must be at most `n` = {self.n}, got {self.k}")

    def model(self, kind: str) -> dict[str, Any]:
        """Keywords of ``LinformerConfig`` for one of :data:`MODELS`; only the projections differ.

        No dropout: at these budgets no row is seen often, and on processors it would keep exact attention from its
        fused form, which is the yardstick of speed.
        """
        shape = {
            name: getattr(self, name)
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        }
        shape |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if kind == "transformer":
            return {**shape, "projected_length": None}
        return {
            **shape,
            "projected_length": self.k,
            "projection_sharing": self.sharing,
            "projection": self.projection,
        }


Progress = Callable[[str, str, Row, bool], None]
Runner = Callable[[str, dict[str, Any]], Row]


def compare(
    args: CompareArgs, out: str | Path, *, progress: Progress | None = None, runner: Runner | None = None
) -> dict[str, Any]:
    """Run both models with every seed at both budgets, each run in a process of its own, and compare in pairs.

    For the equal-time budget a model gets as many steps as fit into the seconds at the speed it had before, with a
    whole schedule over them; the seconds it then really took are in the result. The Transformer's run at its own
    tokens is also its run at its own time.

    Args:
        args: What is compared.
        out: Folder: ``settings.json``, ``runs/*.json`` and ``result.json``; finished runs are kept.
        progress: Called with model, budget, the run's row and whether it was there.
        runner: What runs an order of :mod:`rankscope.training.child`; each in a fresh process by default.

    Returns:
        The result, as in ``out/result.json``.

    Raises:
        RankscopeError: A setting or folder that can't serve, or a run that failed.
    """
    out = Path(out)
    check_models(args)
    claim(out, asdict(args))
    data = prepare(args, out)

    def at(steps: Mapping[str, int], budget: str) -> dict[str, list[Row]]:
        rows: dict[str, list[Row]] = {kind: [] for kind in MODELS}
        # Seed by seed and one model after the other: a machine that slows down slows down both.
        for seed in range(args.seeds):
            for kind in MODELS:
                row, was_there = run_once(args, out, data, kind, steps[kind], seed, runner or in_child)
                rows[kind].append(row)
                if progress is not None:
                    progress(kind, budget, row, was_there)
        return rows

    by_tokens = at(dict.fromkeys(MODELS, args.max_steps), TOKENS)
    seconds = args.seconds or float(np.mean([row["seconds"] for row in by_tokens["transformer"]]))
    steps = {kind: steps_within(seconds, rows) for kind, rows in by_tokens.items()}
    if args.seconds is None:
        steps["transformer"] = args.max_steps
    by_time = at(steps, TIME)
    result = {
        "command": "compare",
        "objective": args.objective,
        "settings": asdict(args),
        "seeds": list(range(args.seeds)),
        "steps": {TOKENS: args.max_steps, TIME: steps},
        "tokens": by_tokens["transformer"][0]["tokens"],
        "seconds_budget": seconds,
        "parameters": {kind: rows[0]["parameters"] for kind, rows in by_tokens.items()},
        "equal_tokens": quality(by_tokens),
        "equal_time": {
            **quality(by_time),
            "seconds": {kind: summary([row["seconds"] for row in rows]) for kind, rows in by_time.items()},
        },
        "tokens_per_second": ratio(by_tokens, lambda row: row["tokens_per_second"]),
        "peak_memory_bytes": ratio(by_tokens, lambda row: row["peak_memory_bytes"]),
        "training_memory_bytes": ratio(by_tokens, lambda row: row["peak_memory_bytes"] - row["memory_before_bytes"]),
        "cpu_seconds": total_cpu(by_tokens, by_time),
        "runs": {TOKENS: by_tokens, TIME: by_time},
        "environment": environment(),
    }
    write_whole(out / RESULT, (json.dumps(result, indent=1) + "\n").encode())
    return result


def check_models(args: CompareArgs) -> None:
    """Build both configurations before anything is written.

    Raises:
        RankscopeError: A size or name that no model can be built from.
    """
    from rankscope.models.configuration_linformer import LinformerConfig
    from rankscope.training.args import PretrainArgs
    from rankscope.training.classifiers import from_config
    from rankscope.training.pretrain import quiet

    if args.objective == "listops":
        if args.pretrain:
            raise RankscopeError("`pretrain` has no meaning for listops: leave it out")
        grammar_for(args.n)
    else:
        if args.data is not None:
            raise RankscopeError("`data` has no meaning for pretraining: give `corpus`")
        PretrainArgs(**pretrain_settings(args))
    import torch

    for kind in MODELS:
        with quiet(), torch.device("meta"):
            from_config(LinformerConfig(max_position_embeddings=args.n, **args.model(kind)), kind)


def pretrain_settings(args: CompareArgs) -> dict[str, Any]:
    """Fields of :class:`~rankscope.training.args.PretrainArgs` that both models share.

    Raises:
        RankscopeError: No corpus, or a field that pretraining does not have.
    """
    from dataclasses import fields

    from rankscope._errors import did_you_mean
    from rankscope.training.args import PretrainArgs

    known = [item.name for item in fields(PretrainArgs)]
    for name in args.pretrain:
        if name not in known:
            raise RankscopeError(f"`pretrain` has no {name!r}: {did_you_mean(name, known)}")
    if "corpus" not in args.pretrain:
        raise RankscopeError("`corpus` is needed to compare pretraining: a name, file or folder of text")
    mine = ("n", "batch_size", "learning_rate", "weight_decay", "device")
    for name in (*mine, "model", "max_steps", "warmup_steps", "seed"):
        if name in args.pretrain:
            raise RankscopeError(f"`pretrain` names {name!r}, which the comparison sets itself: leave it out there")
    return {**args.pretrain, **{name: getattr(args, name) for name in mine}}


def prepare(args: CompareArgs, out: Path) -> Path | None:
    """Make the data that all runs share: ListOps' files, or tokenizer and windows of a corpus."""
    if args.objective == "listops":
        if args.data is not None:
            return Path(args.data)
        folder = out / "data"
        if not all((folder / f"{split}.tsv").exists() for split in ("train", "test")):
            write_listops(
                folder, {"train": args.train_rows, "test": args.eval_rows}, seed=0, grammar=grammar_for(args.n)
            )
        return folder
    from rankscope.training.args import PretrainArgs
    from rankscope.training.run_data import prepare_data

    folder = out / "data"
    steps = {"max_steps": args.max_steps, "log_every": args.max_steps, "save_every": args.max_steps}
    prepare_data(PretrainArgs(**{**pretrain_settings(args), **steps}), folder)
    return folder


def run_once(
    args: CompareArgs, out: Path, data: Path | None, kind: str, steps: int, seed: int, runner: Runner
) -> tuple[Row, bool]:
    """Return a run's row, and whether it was there already.

    Raises:
        RankscopeError: The run failed.
    """
    name = f"{kind}-steps-{steps}-seed-{seed}"
    path = out / "runs" / f"{name}.json"
    kept = read_json(path)
    if kept is not None:
        return kept, True
    folder = out / "pretrain" / name
    order = {
        "objective": args.objective,
        "model": args.model(kind),
        "n": args.n,
        "steps": steps,
        "seed": seed,
        "threads": args.threads,
        "settings": asdict(args),
        "data": None if data is None else str(data),
        "folder": str(folder),
    }
    if args.objective == "pretrain":
        order["pretrain"] = pretrain_settings(args)
        share(data, folder)
    try:
        row = runner(name, order)
        if "error" in row:
            raise RankscopeError(row["error"])
    except RankscopeError:
        release(out, "runs/*.json")
        raise
    path.parent.mkdir(exist_ok=True)
    write_whole(path, (json.dumps({"model": kind, **row}, indent=1) + "\n").encode())
    if args.objective == "pretrain":
        shutil.rmtree(folder, ignore_errors=True)
    return {"model": kind, **row}, False


def share(data: Path | None, folder: Path) -> None:
    """Give a pretraining run the tokenizer and windows that all runs share.

    Raises:
        RankscopeError: The disk can't hold them.
    """
    for part in ("tokenizer", "data"):
        if data is None or (folder / part).exists():
            continue
        try:
            shutil.copytree(data / part, folder / part)
        except OSError as error:
            shutil.rmtree(folder / part, ignore_errors=True)
            raise disk_error(folder, error) from None


def in_child(name: str, order: dict[str, Any]) -> Row:
    """Run an order in a fresh process, so that its peak of memory is its own.

    Raises:
        RankscopeError: The process failed.
    """
    child = subprocess.run(
        [sys.executable, "-m", "rankscope.training.child"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        said = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise RankscopeError(
            f"the run {name} failed: {said[0]}; finished runs are kept, the same command goes on (out of memory: a "
            f"smaller `batch_size` or `n`)"
        )
    return json.loads(child.stdout.splitlines()[-1])


def steps_within(seconds: float, rows: Sequence[Row]) -> int:
    """Steps that fit into a time at the speed of earlier runs.

    Example:
        >>> steps_within(10.0, [{"seconds": 4.0, "steps": 8}, {"seconds": 6.0, "steps": 8}])
        16
    """
    a_step = sum(row["seconds"] for row in rows) / sum(row["steps"] for row in rows)
    return max(1, math.floor(seconds / a_step))


def quality(rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Each metric of both models, and the paired difference Linformer − Transformer with its 95 % t-interval.

    Args:
        rows: Of each model, in the order of the seeds.

    Example:
        >>> rows = {"transformer": [{"metrics": {"accuracy": 0.5}}, {"metrics": {"accuracy": 0.6}}],
        ...         "linformer": [{"metrics": {"accuracy": 0.4}}, {"metrics": {"accuracy": 0.5}}]}
        >>> quality(rows)["accuracy"]["difference"]["mean"]
        -0.1
    """
    found = {}
    for name in rows["transformer"][0]["metrics"]:
        values = {kind: np.array([row["metrics"][name] for row in rows[kind]]) for kind in MODELS}
        found[name] = {
            **{kind: summary(values[kind].tolist()) for kind in MODELS},
            "difference": _interval(values["linformer"] - values["transformer"]),
        }
    return found


def ratio(rows: Mapping[str, Sequence[Row]], cost: Callable[[Row], float]) -> dict[str, Any]:
    """A cost of both models, and Linformer / Transformer: geometric mean over pairs, t-interval of the log."""
    values = {kind: np.array([cost(row) for row in rows[kind]], dtype=np.float64) for kind in MODELS}
    found: dict[str, Any] = {kind: summary(values[kind].tolist()) for kind in MODELS}
    if min(part.min() for part in values.values()) <= 0:
        return {**found, "ratio": None}
    logs = _interval(np.log(values["linformer"]) - np.log(values["transformer"]))
    return {**found, "ratio": {name: None if end is None else math.exp(end) for name, end in logs.items()}}


def total_cpu(*budgets: Mapping[str, Sequence[Row]]) -> float:
    """CPU seconds of all runs, one that serves both budgets counted once."""
    runs = {
        (row["model"], row["steps"], row["seed"]): row["cpu_seconds"]
        for rows in budgets
        for of_one in rows.values()
        for row in of_one
    }
    return float(sum(runs.values()))


def _interval(values: np.ndarray) -> dict[str, float | None]:
    ends = mean_interval(values)
    return {
        name: None if np.isnan(end) else float(end) for name, end in zip(("mean", "low", "high"), ends, strict=True)
    }
