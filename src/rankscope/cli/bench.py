"""``rankscope bench attention|report``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rankscope._errors import RankscopeError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


def sizes(text: str, argument: str) -> list[int]:
    """Read ``512,1024`` as numbers of at least 1.

    Example:
        >>> sizes("512, 1024", "n")
        [512, 1024]
    """
    try:
        found = [int(piece.replace("_", "")) for piece in text.split(",")]
    except ValueError:
        raise RankscopeError(f"`{argument}` must be numbers with commas such as 512,1024, got {text!r}") from None
    if min(found) < 1:
        raise RankscopeError(f"`{argument}` must be at least 1, got {min(found)}")
    return found


@app.command()
def attention(
    out: Annotated[Path, typer.Option(help="Folder for one JSON a case; the same command goes on.")],
    n: Annotated[str, typer.Option(help="Lengths, as 512,1024.")] = "512,1024,2048,4096",
    k: Annotated[str, typer.Option(help="Sizes, as 128,256; each below n.")] = "128,256",
    mechanisms: Annotated[str, typer.Option(help="all, or names with commas.")] = "all",
    mode: Annotated[str, typer.Option(help="forward, train, or both with a comma.")] = "forward",
    view: Annotated[str, typer.Option(help="attention, layer (with the projections), or both.")] = "attention",
    heads: Annotated[int, typer.Option(help="Heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed calls after two to warm up; the median is kept.")] = 5,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    causal: Annotated[bool, typer.Option(help="Queries see only what came before.")] = False,
    padding: Annotated[float, typer.Option(help="Share of each row that is padding.")] = 0.0,
    threads: Annotated[int | None, typer.Option(help="Processor threads; default PyTorch's choice.")] = None,
    model: Annotated[
        str, typer.Option(help="Whose query, key, value the error is on; none: Gaussian only.")
    ] = "minilm",
    corpus: Annotated[str, typer.Option(help="The model's text.")] = "pydoc",
    memory: Annotated[float | None, typer.Option(help="GB a case may take; default what is free.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a case is given up.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of inputs, weights and draws.")] = 0,
) -> None:
    """Time attention mechanisms on this machine: seconds, peak memory, error; each case in its own process."""
    from rankscope.bench.cases import choose_mechanisms, grid
    from rankscope.bench.run import run_cases

    if device != "cpu":
        # Imported only here: it takes longer to load than a short case to run.
        from rankscope.pretrained.loading import resolve_device

        device = str(resolve_device(device))
    settings: dict[str, Any] = {
        "heads": heads,
        "head_dim": head_dim,
        "batch": batch,
        "repeats": repeats,
        "dtype": dtype,
        "device": device,
        "causal": causal,
        "padding": padding,
        "threads": threads,
        "seed": seed,
    }
    chosen, lengths = choose_mechanisms(mechanisms, causal=causal), sizes(n, "n")
    cases = [
        case
        for one_mode in mode.split(",")
        for one_view in view.split(",")
        for case in grid(chosen, lengths, sizes(k, "k"), mode=one_mode.strip(), view=one_view.strip(), **settings)
    ]
    console = Console(stderr=True)
    real = None
    if model != "none":
        from rankscope.bench.captured import captured

        with console.status(f"capturing query, key and value of {model} on {corpus}"):
            real = captured(out, max(lengths), model=model, corpus=corpus)
    count = 0

    def progress(case: Any, row: dict[str, Any], skipped: bool) -> None:
        nonlocal count
        count += 1
        console.print(f"{count}/{len(cases)} {line_of(row)}{' (was there)' if skipped else ''}", highlight=False)

    limit = None if memory is None else int(memory * 1e9)
    run_cases(cases, out, captured=real, memory_bytes=limit, timeout=timeout, progress=progress)
    Console().print(f"{len(cases)} cases in {out}   page: rankscope bench report {out}", highlight=False)


def line_of(row: dict[str, Any]) -> str:
    """Return a row in one line."""
    size = "" if row["k"] is None else f" k={row['k']}"
    start = f"{row['mechanism']} n={row['n']}{size} {row['mode']} {row['view']}: "
    if row["status"] != "ok":
        return f"{start}{row['status']} ({row.get('reason', '')})"
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 1e6:.1f} MB"
    return f"{start}{1e3 * row['seconds_median']:.2f} ms{peak}, error {row['relative_error']:.3g}"


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `bench attention` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; default the same folder.")] = None,
) -> None:
    """Make one page of a benchmark: growth with n, crossover lengths, the paper's table beside, error for time."""
    from rankscope.bench.store import load
    from rankscope.report.bench_page import write_bench

    print(write_bench(load(folder), out or folder))
