"""``rankscope theory jl|clusters|collapse|projections``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from rankscope._errors import RankscopeError

if TYPE_CHECKING:
    import xarray as xr

Number = TypeVar("Number", int, float)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="Folder for theory.nc, theory.html and the pictures.")]
Model = Annotated[str, typer.Option(help="Hub id, folder, .gguf file, PEFT adapter's folder, or minilm.")]
Corpus = Annotated[str, typer.Option(help="pydoc, wiki103, imdb, a file or a folder.")]
Seed = Annotated[int, typer.Option(help="Of every draw.")]


@app.command()
def jl(
    out: Out,
    model: Model = "minilm",
    corpus: Corpus = "pydoc",
    n: Annotated[int, typer.Option(help="Tokens.")] = 512,
    k: Annotated[
        str, typer.Option(help="Projected lengths; each ε's own dimension is added.")
    ] = "64,128,256,512,1024,2048",
    eps: Annotated[str, typer.Option(help="Allowed errors, each between 0 and 1.")] = "0.1,0.25,0.5,0.75",
    draws: Annotated[int, typer.Option(help="Draws of the projection.")] = 1000,
    vectors: Annotated[int, typer.Option(help="Vectors w of each kind for each matrix.")] = 1,
    seed: Seed = 0,
) -> None:
    """Count how often Linformer's Theorems 1 and 2 hold."""
    lengths, errors = _numbers(k, "k", int), _numbers(eps, "eps", float)
    from rankscope.theory.studies import johnson_lindenstrauss_study

    _finish(
        johnson_lindenstrauss_study(model, corpus, n=n, k=lengths, eps=errors, draws=draws, vectors=vectors, seed=seed),
        out,
    )


@app.command()
def clusters(
    out: Out,
    flow: Annotated[
        str | None,
        typer.Option(help="boolean (default), polytope, hyperplanes, polytope_times_space or collapse."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="In place of a flow: a .safetensors file with Q, K, V and perhaps tokens.")
    ] = None,
    n: Annotated[int | None, typer.Option(help="Tokens; default 40, or those of the file.")] = None,
    d: Annotated[int | None, typer.Option(help="A flow's width; default 1 for boolean, else 2.")] = None,
    end: Annotated[float, typer.Option(help="The last time.")] = 14.0,
    frames: Annotated[int, typer.Option(help="Times at which P is looked at, from 0 to the last.")] = 29,
    seed: Seed = 0,
) -> None:
    """Follow tokens under attention alone and judge the limit by each theorem."""
    if weights is not None and (flow is not None or d is not None):
        raise RankscopeError("`weights` brings its own matrices and width: leave `flow` and `d` out")
    from rankscope.theory.cluster_study import clusters_study, named_setting, setting_from_file
    from rankscope.theory.studies import seeded

    if weights is not None:
        setting = setting_from_file(weights, n=n, generator=seeded(seed))
    else:
        name = flow or "boolean"
        width = (1 if name == "boolean" else 2) if d is None else d
        setting = named_setting(name, n=40 if n is None else n, d=width, generator=seeded(seed))
    dataset = clusters_study(setting, end=end, frames=frames, seed=seed)
    _finish(dataset, out)
    import json

    for verdict in json.loads(dataset.attrs["verdicts"]).values():
        print(verdict)


@app.command()
def collapse(
    out: Out,
    model: Model = "minilm",
    corpus: Corpus = "pydoc",
    n: Annotated[int, typer.Option(help="Tokens a window.")] = 128,
    windows: Annotated[int, typer.Option(help="How many.")] = 8,
    seed: Seed = 0,
) -> None:
    """Follow the tokens' residual to rank one, and P's rank, along a BERT-like model's layers."""
    from rankscope.theory.studies import collapse_study

    _finish(collapse_study(model, corpus, n=n, windows=windows, seed=seed), out)


@app.command()
def projections(
    out: Out,
    model: Model = "minilm",
    corpus: Corpus = "pydoc",
    n: Annotated[int, typer.Option(help="Tokens a window.")] = 256,
    k: Annotated[str, typer.Option(help="Projected lengths.")] = "16,32,64,128",
    train_windows: Annotated[int, typer.Option(help="Windows to fit projections on.")] = 24,
    test_windows: Annotated[int, typer.Option(help="Other windows to judge them on, two or more.")] = 3,
    seed: Seed = 0,
) -> None:
    """Compare projections at equal k on a model's own P and V."""
    lengths = _numbers(k, "k", int)
    from rankscope.theory.studies import projections_study

    _finish(
        projections_study(
            model, corpus, n=n, k=lengths, train_windows=train_windows, test_windows=test_windows, seed=seed
        ),
        out,
    )


def _finish(dataset: "xr.Dataset", out: Path) -> None:
    from rankscope.report.theory_page import write_theory

    print(write_theory(dataset, out))


def _numbers(text: str, argument: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return sorted({kind(piece) for piece in text.split(",")})
    except ValueError:
        raise RankscopeError(f"`{argument}` must be numbers with commas, got {text!r}") from None
