"""``rankscope recommend``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def recommend(
    run: Annotated[Path, typer.Argument(help="A folder that measure wrote, or its spectrum.nc.")],
    bench: Annotated[Path | None, typer.Option(help="A folder that `bench attention` wrote on this machine.")] = None,
    keep: Annotated[float, typer.Option(help="Share of the sum of singular values that k must hold.")] = 0.9,
    mode: Annotated[str, typer.Option(help="forward or train: whose time counts.")] = "forward",
) -> None:
    """At your n, with your spectra, on this machine: keep exact attention, or Linformer with which k, and why."""
    from rankscope.bench.store import load as load_rows
    from rankscope.report.recommend import recommend as advise
    from rankscope.spectrum.dataset import load

    advice = advise(load(run), load_rows(bench) if bench else None, keep=keep, mode=mode)
    print("\n".join(advice.lines))
