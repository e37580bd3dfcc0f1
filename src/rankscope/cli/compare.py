"""``rankscope compare listops|pretrain``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="Folder of the results; the same command goes on with it.")]
N = Annotated[int, typer.Option(help="Tokens a row.")]
K = Annotated[int, typer.Option(help="Linformer's projected length.")]
Sharing = Annotated[str, typer.Option(help="Of its projections: none, headwise, key_value or layerwise.")]
Projection = Annotated[str, typer.Option(help="learned, mean, max, convolution, gaussian or dynamic.")]
MaxSteps = Annotated[int, typer.Option(help="Updates of the equal-token budget.")]
Seconds = Annotated[
    float | None, typer.Option(help="Equal-time budget of training; default what the Transformer took.")
]
Seeds = Annotated[int, typer.Option(help="Pairs of runs, for the intervals; may be raised later.")]
BatchSize = Annotated[int, typer.Option(help="Rows an update.")]
LearningRate = Annotated[float, typer.Option(help="At its peak, the same for both.")]
Width = Annotated[int, typer.Option(help="Of both models.")]
Layers = Annotated[int, typer.Option(help="Of both models.")]
Heads = Annotated[int, typer.Option(help="Of both models.")]
Channels = Annotated[int, typer.Option(help="Of the feed-forward layers.")]
Threads = Annotated[int | None, typer.Option(help="Processor threads; default PyTorch's choice.")]
Device = Annotated[str, typer.Option(help="auto or cpu.")]


@app.command()
def listops(
    out: Out,
    n: N = 1024,
    k: K = 128,
    sharing: Sharing = "headwise",
    projection: Projection = "learned",
    max_steps: MaxSteps = 1000,
    seconds: Seconds = None,
    seeds: Seeds = 3,
    batch_size: BatchSize = 32,
    learning_rate: LearningRate = 5e-4,
    hidden_size: Width = 64,
    layers: Layers = 2,
    heads: Heads = 2,
    intermediate_size: Channels = 128,
    train_rows: Annotated[int, typer.Option(help="Training expressions.")] = 96_000,
    eval_rows: Annotated[int, typer.Option(help="Evaluated expressions.")] = 2_000,
    data: Annotated[str | None, typer.Option(help="Folder of ListOps files; default generates them.")] = None,
    threads: Threads = None,
    device: Device = "auto",
) -> None:
    """Compare on ListOps from nothing: accuracy at equal tokens and at equal time, speed, memory."""
    _run(
        out,
        objective="listops",
        n=n,
        k=k,
        sharing=sharing,
        projection=projection,
        max_steps=max_steps,
        seconds=seconds,
        seeds=seeds,
        batch_size=batch_size,
        learning_rate=learning_rate,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        train_rows=train_rows,
        eval_rows=eval_rows,
        data=data,
        threads=threads,
        device=device,
    )


@app.command()
def pretrain(
    out: Out,
    corpus: Annotated[str, typer.Option(help="Text to pretrain on: a name, file or folder.")],
    column: Annotated[str | None, typer.Option(help="The text's column in a table.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id; default trains one on the corpus.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Of a trained tokenizer.")] = 8192,
    eval_windows: Annotated[int, typer.Option(help="Held-out windows at most.")] = 64,
    n: N = 512,
    k: K = 128,
    sharing: Sharing = "headwise",
    projection: Projection = "learned",
    max_steps: MaxSteps = 1000,
    seconds: Seconds = None,
    seeds: Seeds = 3,
    batch_size: BatchSize = 16,
    learning_rate: LearningRate = 2e-3,
    hidden_size: Width = 128,
    layers: Layers = 4,
    heads: Heads = 2,
    intermediate_size: Channels = 512,
    threads: Threads = None,
    device: Device = "auto",
) -> None:
    """Compare in masked language modelling from nothing: perplexity at equal tokens and equal time, speed, memory."""
    _run(
        out,
        objective="pretrain",
        n=n,
        k=k,
        sharing=sharing,
        projection=projection,
        max_steps=max_steps,
        seconds=seconds,
        seeds=seeds,
        batch_size=batch_size,
        learning_rate=learning_rate,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        pretrain={
            "corpus": corpus,
            "column": column,
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eval_windows": eval_windows,
        },
        threads=threads,
        device=device,
    )


def _run(out: Path, **settings: Any) -> None:
    from rankscope.training.compare import CompareArgs, compare

    console = Console(stderr=True)

    def progress(kind: str, budget: str, row: dict[str, Any], was_there: bool) -> None:
        values = ", ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        console.print(
            f"{kind}, seed {row['seed']}, {budget} budget: {row['steps']} steps, {row['seconds']:.1f} s, {values}"
            f"{' (was there)' if was_there else ''}",
            highlight=False,
        )

    args = CompareArgs(**settings)
    console.print(f"{2 * args.seeds} runs at equal tokens, then those at equal time; data first", highlight=False)
    result = compare(args, out, progress=progress)
    print(lines_of(result))
    print(f"\nwritten: {out / 'result.json'}")


def lines_of(result: dict[str, Any]) -> str:
    """Return a comparison as a Markdown table.

    Args:
        result: As written to ``result.json``.
    """
    lines = ["| | Transformer | Linformer | difference or ratio, 95 % interval |", "| --- | --- | --- | --- |"]
    for budget, words in (("equal_tokens", "equal tokens"), ("equal_time", "equal time")):
        for metric, found in result[budget].items():
            if metric == "seconds":
                lines.append(f"| seconds, {words} | {_both(found)} | |")
            else:
                lines.append(f"| {metric}, {words} | {_both(found)} | {_ends(found['difference'], signed=True)} |")
    for name in ("tokens_per_second", "peak_memory_bytes", "training_memory_bytes"):
        found = result[name]
        times = "" if found["ratio"] is None else f"× {_ends(found['ratio'])}"
        lines.append(f"| {name.replace('_', ' ')} | {_both(found)} | {times} |")
    settings = result["settings"]
    count = len(result["seeds"])
    pairs = "pair of runs" if count == 1 else "pairs of runs"
    lines.append("")
    lines.append(
        f"{result['objective']}, n = {settings['n']}, k = {settings['k']}, {settings['sharing']}, {count} {pairs} of "
        f"{result['steps']['tokens']} steps ({result['tokens']} tokens with seed 0); mean ± standard error. "
        f"Equal time: {result['seconds_budget']:.1f} s, {result['steps']['time']['transformer']} and "
        f"{result['steps']['time']['linformer']} steps. Memory: of a whole process, and above what it held before."
    )
    return "\n".join(lines)


def _both(found: dict[str, Any]) -> str:
    cells = []
    for kind in ("transformer", "linformer"):
        error = found[kind]["standard_error"]
        cells.append(f"{found[kind]['mean']:.4g}" + ("" if error is None else f" ± {error:.2g}"))
    return " | ".join(cells)


def _ends(found: dict[str, float | None], *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    mean = f"{found['mean']:{sign}.4g}"
    if found["low"] is None:
        return f"{mean} (one pair: no interval)"
    return f"{mean} ({found['low']:{sign}.4g} to {found['high']:{sign}.4g})"
