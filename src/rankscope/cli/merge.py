"""``rankscope merge``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders of the shards of one run.")],
    out: Annotated[Path, typer.Option(help="Folder for the whole run.")],
) -> None:
    """Join shards that were measured in folders of their own."""
    from rankscope.spectrum.merge import merge as join

    dataset = join(folders, out)
    print(f"{dataset.sizes['window']} windows: {out / 'spectrum.nc'}")
