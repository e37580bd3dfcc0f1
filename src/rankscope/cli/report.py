"""``rankscope report``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Folders that measure wrote, or spectrum.nc files.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; default the first result's folder.")] = None,
) -> None:
    """Make one self-contained HTML page, and PNGs, from one or more results."""
    from rankscope.report.html import write_report
    from rankscope.spectrum.dataset import load

    datasets = [load(path) for path in results]
    first = results[0] if results[0].is_dir() else results[0].parent
    page = write_report(datasets, out or first)
    print(page)
