"""``rankscope measure``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rankscope._errors import RankscopeError

if TYPE_CHECKING:
    import xarray as xr

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

MOST_NUMBERS = 10_000


def numbers(text: str | None, argument: str) -> list[int] | None:
    """Read ``0,3-5`` as ``[0, 3, 4, 5]`` and ``all`` or nothing as ``None``.

    Example:
        >>> numbers("0,3-5", "layers"), numbers("all", "layers")
        ([0, 3, 4, 5], None)
    """
    if text is None or text == "all":
        return None
    chosen: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise RankscopeError(f"`{argument}` must be numbers such as 0,3-5 or all, got {text!r}") from None
        # Far above any model's count, and far below what would fill the memory before the model is asked.
        if not low <= high < MOST_NUMBERS:
            raise RankscopeError(
                f"`{argument}` must be numbers below {MOST_NUMBERS}, a range from the lower to the higher as 3-5, "
                f"got {text!r}"
            )
        chosen += range(low, high + 1)
    return sorted(set(chosen))


def numbers_or_sample(text: str | None, argument: str) -> list[int] | str | None:
    """Read ``random:K`` as it is, and anything else as :func:`numbers` does.

    Example:
        >>> numbers_or_sample("random:4", "heads"), numbers_or_sample("0,2", "heads")
        ('random:4', [0, 2])
    """
    return text if text is not None and text.startswith("random") else numbers(text, argument)


@app.command()
def measure(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, PEFT adapter's folder, or minilm.")],
    corpus: Annotated[str, typer.Argument(help="pydoc, wiki103, imdb, or a .txt/.jsonl/.csv/.tsv/.parquet or folder.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command resumes it.")],
    n: Annotated[int, typer.Option(help="Tokens a window, special tokens included.")] = 512,
    windows: Annotated[int, typer.Option(help="Windows at most.")] = 64,
    half_width: Annotated[
        float | None, typer.Option(help="Stop once every layer's 95 % interval at n/4 is this tight to each side.")
    ] = None,
    packing: Annotated[str, typer.Option(help="packed: windows of n tokens; sentence: one sentence each.")] = "packed",
    column: Annotated[str | None, typer.Option(help="The text's column in a table.")] = None,
    nulls: Annotated[str | None, typer.Option(help="all, none, or names with commas; default three.")] = None,
    null_windows: Annotated[int, typer.Option(help="Nulls are measured on the first so many windows.")] = 16,
    layers: Annotated[str | None, typer.Option(help="Attentions as 0,3-5, or random:K; default all.")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads as 0,3-5, or random:K; default all.")] = None,
    method: Annotated[str, typer.Option(help="auto, svd, gram, gram32, or matrix-free for long n.")] = "auto",
    tolerance: Annotated[float, typer.Option(help="Largest error of a nuclear fraction that auto may leave.")] = 1e-6,
    width: Annotated[float, typer.Option(help="Band width at which matrix-free stops.")] = 0.02,
    workers: Annotated[int | None, typer.Option(help="Decompositions at a time; default the cores.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows a forward.")] = 1,
    dtype: Annotated[str, typer.Option(help="The model's dtype: float32, bfloat16, float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of document order, nulls and fresh weights.")] = 0,
    shard: Annotated[
        str | None, typer.Option(help="i/m: only the i-th of m shards; under accelerate launch it is the rank's own.")
    ] = None,
) -> None:
    """Measure how low-rank a model's attention is on a text, with its nulls beside it."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    part_of = shard_of(shard)
    chosen_layers, chosen_heads = numbers_or_sample(layers, "layers"), numbers_or_sample(heads, "heads")
    console = Console(stderr=True, quiet=part_of[0] > 0)
    columns = (
        TextColumn("windows"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    with console.status("loading model and text"):
        from rankscope.spectrum.measure import measure as run
    with Progress(*columns, console=console) as bar:
        # Unseen until there is progress, so that a refusal stands alone.
        task = bar.add_task("windows", total=windows, rate="", visible=False)

        def progress(done: int, wanted: int) -> None:
            speed = bar.tasks[task].speed
            rate = f"{speed:.2f}/s" if speed else ""
            bar.update(task, completed=done, total=wanted, rate=rate, visible=True)

        dataset = run(
            model,
            corpus,
            n=n,
            windows=windows,
            half_width=half_width,
            packing=packing,
            column=column,
            nulls=nulls,
            null_windows=null_windows,
            layers=chosen_layers,
            heads=chosen_heads,
            method=method,
            tolerance=tolerance,
            width=width,
            workers=workers,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
            seed=seed,
            out=out,
            shard=part_of,
            progress=progress,
        )
    if (out / "spectrum.nc").exists():
        print_result(dataset, out)
    else:
        print(f"shard {part_of[0] + 1}/{part_of[1]} is done; the result comes with the last one, or by rankscope merge")


def shard_of(shard: str | None) -> tuple[int, int]:
    """Read ``--shard i/m``, counted from 1, or the rank that a launcher put into the environment, as (index, count).

    Example:
        >>> shard_of("2/3")
        (1, 3)
    """
    if shard is None:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        index, count = (int(number) for number in shard.split("/"))
    except ValueError:
        raise RankscopeError(f"`shard` must be i/m, as 1/4, got {shard!r}") from None
    if not 1 <= index <= count:
        raise RankscopeError(f"`shard` must be i/m with 1 <= i <= m, got {shard!r}")
    return index - 1, count


def print_result(dataset: "xr.Dataset", out: Path) -> None:
    """Print the layers' nuclear fraction at a quarter, with interval and nulls, and where the result is."""
    import json

    import numpy as np
    from rich.table import Table

    from rankscope.spectrum.intervals import mean_interval

    name = "nuclear_fraction_at_quarter"
    console = Console()
    attrs = dataset.attrs
    table = Table(title=f"Share of Σσ in the first quarter of singular values: {attrs['model']} on {attrs['corpus']}")
    table.add_column("layer", justify="right")
    mixed = len(np.unique(dataset.kind.values)) > 1
    if mixed:
        table.add_column("attention")
    table.add_column("trained", justify="right")
    table.add_column("± 95 %", justify="right")
    table.add_column("its heads", justify="right")
    for baseline in dataset.baseline.values[1:]:
        table.add_column(str(baseline).replace("_", " "), justify="right")
    by_layer = dataset[name].mean("head")
    mean, low, _ = mean_interval(by_layer.sel(baseline="trained").values, dataset.document.values)
    for at, layer in enumerate(dataset.layer.values):
        heads = dataset[name].sel(baseline="trained", layer=layer).mean("window").values
        row = [str(layer)]
        if mixed:
            row.append(str(dataset.kind.sel(layer=layer).item()))
        row += [f"{mean[at]:.3f}", "" if np.isnan(low[at]) else f"{mean[at] - low[at]:.3f}"]
        row.append(f"{np.nanmin(heads):.2f}–{np.nanmax(heads):.2f}")
        row += [f"{float(by_layer.sel(baseline=b, layer=layer).mean()):.3f}" for b in dataset.baseline.values[1:]]
        table.add_row(*row)
    console.print(table)
    check = json.loads(dataset.attrs["self_check"])
    left_out = json.loads(dataset.attrs["left_out"])
    measured = f"windows measured: {dataset.sizes['window']}, left out: {len(left_out)}"
    if dataset.sizes["baseline"] > 1:
        measured += f"; the nulls' means are over the first {int(dataset['window_count'][1:].max())}"
    console.print(measured)
    console.print("self-check: " + ("passed" if check["passed"] else f"[red]FAILED[/red] {check.get('reasons')}"))
    console.print(f"result: {out / 'spectrum.nc'}   picture and page: rankscope report {out}")
