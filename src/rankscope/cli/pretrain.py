"""``rankscope pretrain``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rankscope._errors import MissingExtraError, RankscopeError

if TYPE_CHECKING:
    from rankscope.training.mlm_trainer import Progress as Standing

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def projected(text: str | None) -> dict[str, int | list[int] | None]:
    """Read ``--projected-length``: ``none`` for the exact Transformer, a number, or one a layer with commas.

    Example:
        >>> projected("none"), projected("128"), projected("128,64"), projected(None)
        ({'projected_length': None}, {'projected_length': 128}, {'projected_length': [128, 64]}, {})
    """
    if text is None:
        return {}
    if text == "none":
        return {"projected_length": None}
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise RankscopeError(
            f"`projected_length` must be none, a number, or numbers with commas, got {text!r}"
        ) from None
    return {"projected_length": lengths if len(lengths) > 1 else lengths[0]}


@app.command()
def pretrain(
    config: Annotated[str, typer.Option(help="tiny, small, paper-base, paper-large, or a TOML file.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command goes on where a killed run stopped.")],
    corpus: Annotated[
        str | None, typer.Option(help="pydoc, wikipedia, bookcorpus, wiki103, imdb, or a file or folder of text.")
    ] = None,
    eval_corpus: Annotated[
        str | None, typer.Option(help="Held-out text; default a twentieth of the corpus, kept from training.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="The text's column in a table.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id; default a byte-level BPE trained on the corpus.")
    ] = None,
    projected_length: Annotated[
        str | None, typer.Option(help="k; numbers with commas for one a layer; none for the exact Transformer.")
    ] = None,
    sharing: Annotated[str | None, typer.Option(help="none, headwise, key_value or layerwise.")] = None,
    kind: Annotated[str | None, typer.Option(help="learned, mean, max, convolution, gaussian or dynamic.")] = None,
    n: Annotated[int | None, typer.Option(help="Tokens a window.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of a trained tokenizer, at most.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Updates.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows an update, over all processes.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Windows a forward on one process.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its peak.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Updates up to the peak.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    log_every: Annotated[int | None, typer.Option(help="Updates between two points of the loss curve.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Updates between two held-out perplexities.")] = None,
    eval_windows: Annotated[int | None, typer.Option(help="Held-out windows at most.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Updates between checkpoints.")] = None,
    measure_every: Annotated[
        int | None, typer.Option(help="Updates between measurements of the spectra, from fresh weights on.")
    ] = None,
    measure_windows: Annotated[int | None, typer.Option(help="On how many held-out windows.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order, masks and dropout.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that prepare windows, a training process.")] = None,
    device: Annotated[str | None, typer.Option(help="auto or cpu.")] = None,
    report_to: Annotated[str | None, typer.Option(help="Trainer's own loggers: tensorboard, trackio, none.")] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Folders of finished runs to draw in the same picture; repeatable.")
    ] = None,
) -> None:
    """Pretrain a Linformer, or the exact Transformer of the same configuration, by masked language modelling.

    One command at any size: several processes by `accelerate launch -m rankscope pretrain ...`. What the configuration
    says, the options override.
    """
    given = {
        "corpus": corpus,
        "eval_corpus": eval_corpus,
        "column": column,
        "tokenizer": tokenizer,
        "n": n,
        "vocab_size": vocab_size,
        "max_steps": max_steps,
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "precision": precision,
        "log_every": log_every,
        "eval_every": eval_every,
        "eval_windows": eval_windows,
        "save_every": save_every,
        "measure_every": measure_every,
        "measure_windows": measure_windows,
        "seed": seed,
        "workers": workers,
        "device": device,
        "report_to": report_to,
    }
    model: dict[str, Any] = projected(projected_length)
    model |= {name: x for name, x in (("projection_sharing", sharing), ("projection", kind)) if x is not None}
    lead = int(os.environ.get("RANK", "0")) == 0
    others = [read_result(folder) for folder in beside or []]
    console = Console(stderr=True, quiet=not lead)
    with console.status("loading"):
        from rankscope.training.args import load_args
        from rankscope.training.pretrain import pretrain as run

        args = load_args(config, {**{name: x for name, x in given.items() if x is not None}, "model": model})
    result = with_bar(console, args.max_steps, lambda progress: run(args, out, progress=progress))
    if lead:
        draw(result, others, out)
        print_result(result, out)


def read_result(folder: Path) -> dict[str, Any]:
    """Read a finished run's result."""
    import json

    path = folder / "result.json"
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        raise RankscopeError(f"`beside` {str(folder)!r} holds no finished run of rankscope pretrain") from None
    if result.get("command") != "pretrain":
        raise RankscopeError(f"`beside` {str(folder)!r} holds another kind of run: give a folder of rankscope pretrain")
    return result


def with_bar(console: Console, steps: int, run: Any) -> dict[str, Any]:
    """Run with a progress bar: steps, loss, perplexity and tokens a second."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("updates"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("updates", total=steps, words="")

        def progress(at: "Standing") -> None:
            words = "" if at.loss is None else f"loss {at.loss:.3f}"
            words += "" if at.perplexity is None else f"  perplexity {at.perplexity:,.1f}"
            words += "" if at.tokens_per_second is None else f"  {at.tokens_per_second:,.0f} tokens/s"
            bar.update(task, completed=at.step, total=at.steps, words=words)

        return run(progress)


def draw(result: dict[str, Any], others: list[dict[str, Any]], out: Path) -> None:
    """Write the run's pictures; without matplotlib say so and go on, since the result is there."""
    from rankscope.report.html import write_picture
    from rankscope.report.training_figures import perplexity_figure, spectra_figure

    figures = [perplexity_figure({str(result["data"]["corpus"]): [result, *others]})]
    if result["spectra"]:
        from rankscope.training.spectra import load_steps

        figures.append(spectra_figure(load_steps(out / "spectra")))
    try:
        for figure in figures:
            write_picture(figure, out / f"{figure.name}.png")
    except MissingExtraError as error:
        print(f"no picture: {error}")


def print_result(result: dict[str, Any], out: Path) -> None:
    """Print what the run reached and what it cost."""
    model, data = result["model"], result["data"]
    kind = model["kind"]
    if model["projected_length"] is not None:
        kind += f", k = {model['projected_length']}, {model['projection']}, shared {model['projection_sharing']}"
    print(f"{kind}: {model['parameters']:,} parameters, {result['tokens']:,} tokens, {data['epochs']:.2f} epochs")
    print(
        f"held-out perplexity {result['metrics']['perplexity']:,.2f} on {data['held_out_windows']} windows, "
        f"training loss {result['loss']:.4f} (knowing nothing: {data['uniform_loss']:.2f})"
    )
    print(
        f"{result['tokens_per_second']:,.0f} tokens/s, {result['wall_seconds']:,.0f} s, "
        f"{result['cpu_seconds'] / 3600:.2f} CPU hours, {result['peak_memory_bytes'] / 2**20:,.0f} MiB at most"
    )
    if result["spectra"] and model["projected_length"] is not None:
        print("spectra: of the n × k map of a Linformer, ranks relative to k")
    print(f"result: {out / 'result.json'}   model: {out / 'model'}   picture: {out / 'perplexity.png'}")
