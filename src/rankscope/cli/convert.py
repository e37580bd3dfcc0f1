"""``rankscope convert``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rankscope._errors import RankscopeError

if TYPE_CHECKING:
    from rankscope.models.conversion import Conversion
    from rankscope.pretrained import Pretrained

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# Relative difference beyond which the written model is not the calibrated one in float32.
SAME = 1e-4


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or minilm: BERT, RoBERTa, ELECTRA or their kin.")],
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint; new or empty.")],
    k: Annotated[int, typer.Option(help="Projected length.")] = 128,
    n: Annotated[int, typer.Option(help="Longest sequence, and tokens a calibration window.")] = 512,
    positions: Annotated[
        int | None,
        typer.Option(help="Longest sequence, if more than n: positions are tiled, E and F stretched."),
    ] = None,
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
    """Turn an encoder into a Linformer checkpoint, E and F fitted to its own attention, and say what that costs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with console.status("loading model and text"):
        import torch

        from rankscope.corpora import open_corpus
        from rankscope.models.checkpoint import check_free, relative_difference, to_linformer, whole_folder
        from rankscope.models.checkpoint import save_checkpoint as save
        from rankscope.models.conversion import calibration_windows, linformerize_calibrated
        from rankscope.models.in_place import save_projections

        check_free(out)
        loaded = load_encoder(model, n, positions)
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
    made = to_linformer(loaded.model, found.bank, positions=positions)
    difference = relative_difference(made, loaded.model, ids[-1:])
    if (positions or n) % n == 0 and not difference < SAME:
        raise RankscopeError(
            f"`model` {model!r}: the Linformer model made of it differs from it by {difference:.1e}, so nothing was "
            "written: please report this"
        )
    with whole_folder(out) as part:
        save(made, part, loaded.tokenizer)
        save_projections(loaded.model, part / "projections.safetensors")
        write_report(found, part / "report.json", loaded.name, calibrate, positions or n, difference)
    print_report(found, loaded.name, calibrate)
    name = type(made).__name__
    print(f"checkpoint: {out}   (rankscope.{name}.from_pretrained({str(out)!r}), at most {positions or n} tokens)")
    file = out / "projections.safetensors"
    print(f"projections: {file}   (rankscope.load_projections(model, {str(file)!r}) puts them into the model itself)")


def load_encoder(model: str, n: int, positions: int | None) -> "Pretrained":
    """Load an encoder that can become a Linformer checkpoint, able to take n tokens.

    Args:
        model: What the user called it.
        n: Tokens a window.
        positions: What the user asks for; the model's own positions are tiled only where this allows it.

    Raises:
        RankscopeError: It can't be converted, or takes fewer tokens.
    """
    from rankscope.attention._modules import unwrapped
    from rankscope.models.checkpoint import family_of, longest
    from rankscope.models.positions import extend_positions
    from rankscope.pretrained import load
    from rankscope.pretrained.checkpoint import configuration, locate

    checkpoint, head = locate(model), False
    if checkpoint.source != "peft":
        config = configuration(checkpoint)
        family_of(config, model)
        # ELECTRA's own pretraining is no masked-language model.
        endings = ("ForMaskedLM",) if config.model_type == "electra" else ("ForMaskedLM", "ForPreTraining")
        head = any(name.endswith(endings) for name in config.architectures or [])
    loaded = load(model, head=head)
    family_of(loaded.model.config, model)
    if positions is not None and positions < n:
        raise RankscopeError(f"`positions` must be at least `n`={n}, got {positions}")
    if n > longest(loaded.model):
        if positions is None:
            raise RankscopeError(
                f"`n` is {n}, but {model!r} takes at most {longest(loaded.model)} tokens: pass a smaller --n, or "
                f"--positions {n} to tile its position embeddings"
            )
        extend_positions(loaded.model, positions)
    if any("pooler." in name for name in loaded.untrained):
        # A pooler the checkpoint lacks holds random numbers; the written one shall lack it too.
        unwrapped(loaded.model).base_model.pooler = None  # type: ignore[union-attr]
    return loaded


def write_report(found: "Conversion", path: Path, model: str, corpus: str, positions: int, difference: float) -> None:
    """Write errors and effects, with the settings and the environment they were made in, as JSON."""
    from rankscope._environment import environment

    report = {
        "model": model,
        "corpus": corpus,
        "settings": asdict(found.bank.settings),
        "positions": positions,
        "difference_from_in_place": difference,
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
