"""``rankscope truncate``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rankscope._errors import RankscopeError
from rankscope.cli.measure import numbers

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def truncate(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, PEFT adapter's folder, or minilm.")],
    corpus: Annotated[str, typer.Argument(help="pydoc, wiki103, imdb, or a .txt/.jsonl/.csv/.tsv/.parquet or folder.")],
    ranks: Annotated[str, typer.Option(help="Ranks k, as 8,16,32, each from 1 to n.")],
    out: Annotated[Path, typer.Option(help="Folder for truncation.nc, truncation.html and the pictures.")],
    n: Annotated[int, typer.Option(help="Tokens a window, special tokens included.")] = 128,
    windows: Annotated[int, typer.Option(help="Windows at most.")] = 8,
    layerwise: Annotated[bool, typer.Option(help="Truncate one layer at a time too.")] = True,
    spectrum: Annotated[
        Path | None, typer.Option(help="A run of measure at the same n: its ranks, nulls' too, are marked.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="The text's column in a table.")] = None,
    dtype: Annotated[str, typer.Option(help="The model's dtype: float32, bfloat16, float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of document order, masked tokens and the random control.")] = 0,
) -> None:
    """Replace every head's P by its best rank-k map: what that does to PV and to the model's own output."""
    from rich.progress import Progress

    chosen = numbers(ranks, "ranks")
    if chosen is None:
        raise RankscopeError("`ranks` must be numbers such as 8,16,32, got 'all': each k costs a forward, so name them")
    if out.exists() and not out.is_dir():
        raise RankscopeError(f"`out` {str(out)!r} can't be used as a folder: it is a file; choose another --out")
    console = Console(stderr=True)
    with console.status("loading model and text"):
        from rankscope.report.truncate_page import write_truncation
        from rankscope.spectrum.truncate import truncate as run
    with Progress(console=console) as bar:
        task = bar.add_task("windows", total=windows)
        dataset = run(
            model,
            corpus,
            ranks=chosen,
            n=n,
            windows=windows,
            layerwise=layerwise,
            spectrum=spectrum,
            column=column,
            dtype=dtype,
            device=device,
            seed=seed,
            progress=lambda done, wanted: bar.update(task, completed=done, total=wanted),
        )
    print(write_truncation(dataset, out))
