"""``rankscope convert``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rankscope.models.conversion import Conversion

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or minilm: an encoder.")],
    out: Annotated[Path, typer.Option(help="Folder for projections.safetensors and report.json.")],
    k: Annotated[int, typer.Option(help="Projected length.")] = 128,
    n: Annotated[int, typer.Option(help="Longest sequence, and tokens a calibration window.")] = 512,
    sharing: Annotated[str, typer.Option(help="none, headwise, key_value or layerwise.")] = "headwise",
    kind: Annotated[str, typer.Option(help="learned, mean, max, convolution, gaussian or dynamic.")] = "learned",
    calibrate: Annotated[str, typer.Option(help="Text to calibrate on: pydoc, wiki103, imdb, a file or folder.")] = (
        "pydoc"
    ),
    column: Annotated[str | None, typer.Option(help="The text's column in a table.")] = None,
    method: Annotated[str, typer.Option(help="mean, least-squares or distill.")] = "distill",
    windows: Annotated[int, typer.Option(help="Calibration windows; a quarter is kept for the report.")] = 16,
    steps: Annotated[int, typer.Option(help="Gradient steps a layer of distill.")] = 200,
    seed: Annotated[int, typer.Option(help="Of windows, starting values and steps.")] = 0,
) -> None:
    """Fit Linformer projections to an encoder's own attention, and say what replacing it costs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with console.status("loading model and text"):
        import torch

        from rankscope.corpora import open_corpus
        from rankscope.models.conversion import calibration_windows, linformerize_calibrated
        from rankscope.models.in_place import save_projections
        from rankscope.pretrained import load
        from rankscope.pretrained.checkpoint import configuration, locate

        names = getattr(configuration(locate(model)), "architectures", None) or []
        loaded = load(model, head=any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in names))
        ids = calibration_windows(open_corpus(calibrate, column=column), loaded.tokenizer, n, windows, seed=seed)
    columns = (TextColumn("fits"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("fits", total=None)
        found = linformerize_calibrated(
            loaded.model,
            ids,
            k=k,
            sharing=sharing,
            kind=kind,
            method=method,
            steps=steps,
            mask_token=loaded.tokenizer.mask_token_id,
            generator=torch.Generator().manual_seed(seed),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    out.mkdir(parents=True, exist_ok=True)
    file = save_projections(loaded.model, out / "projections.safetensors")
    write_report(found, out / "report.json", loaded.name, calibrate)
    print_report(found, loaded.name, calibrate)
    print(f"projections: {file}   (rankscope.load_projections(model, {str(file)!r}) puts them in place)")


def write_report(found: "Conversion", path: Path, model: str, corpus: str) -> None:
    """Write errors and effects, with the settings and the environment they were made in, as JSON."""
    from rankscope._environment import environment

    report = {
        "model": model,
        "corpus": corpus,
        "settings": asdict(found.bank.settings),
        "layers": [asdict(row) for row in found.layers],
        "mean_pooling": asdict(found.start),
        "fitted": asdict(found.effect),
        "environment": environment(),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def print_report(found: "Conversion", model: str, corpus: str) -> None:
    """Print the table of errors by layer and k, and the end-to-end effect."""
    from rich.table import Table

    table = Table(title=f"Relative error of the attention output on windows not fitted: {model} on {corpus}")
    for column in ("layer", "k", "mean pooling", "fitted", "floor (rank k of PV)", "SVD-truncated P (reference)"):
        table.add_column(column, justify="right")
    chosen = found.bank.settings.k
    for row in found.layers:
        numbers = [f"{x:.3f}" for x in (row.before, row.after, row.floor, row.truncated)]
        table.add_row(str(row.layer), str(row.k), *numbers, style="bold" if row.k == chosen else None)
    console = Console()
    console.print(table)
    start, end = found.start, found.effect
    console.print(
        f"embedding cosine with the original, mean pooling {start.embedding_cosine:.4f}, "
        f"fitted {end.embedding_cosine:.4f}"
    )
    if end.masked_loss is not None and start.masked_loss is not None:
        console.print(
            f"masked-LM loss: exact {end.masked_loss[0]:.3f}, mean pooling {start.masked_loss[1]:.3f}, "
            f"fitted {end.masked_loss[1]:.3f}"
        )
