"""``rankscope finetune``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def finetune(
    task: Annotated[str, typer.Option(help="sst2, qnli, qqp, imdb or listops.")],
    model: Annotated[str, typer.Option(help="Folder of save_pretrained, hub id, or minilm; listops takes its shape.")],
    out: Annotated[Path, typer.Option(help="Folder of the results; the same command goes on with it.")],
    data: Annotated[
        str | None, typer.Option(help="Folder of GLUE-form TSV files; default the hub, and generated listops.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id; default the model's own.")] = None,
    n: Annotated[int | None, typer.Option(help="Tokens a row at most; default 512 or what the model holds.")] = None,
    fresh: Annotated[bool, typer.Option(help="Draw the weights anew: what pretraining was worth.")] = False,
    seeds: Annotated[int, typer.Option(help="Runs, for mean and standard error; may be raised later.")] = 1,
    max_steps: Annotated[int | None, typer.Option(help="Updates; default by --epochs.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the training rows.")] = 3.0,
    batch_size: Annotated[int, typer.Option(help="Rows an update.")] = 32,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows a forward: less memory, the same result.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="At its peak; default 2e-5 at width 768, more where narrower.")
    ] = None,
    warmup_share: Annotated[float, typer.Option(help="Share of the steps in which the rate rises.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="AdamW's, on matrices.")] = 0.01,
    train_rows: Annotated[int | None, typer.Option(help="Draw so many training rows.")] = None,
    eval_rows: Annotated[int | None, typer.Option(help="Draw so many evaluated rows.")] = None,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    save_models: Annotated[bool, typer.Option(help="Keep each seed's classifier.")] = False,
) -> None:
    """Finetune a model on a task with several seeds; prints mean, standard error and the paper's Table 2 beside."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rankscope.training.finetune import FinetuneArgs
    from rankscope.training.finetune import finetune as run

    args = FinetuneArgs(
        task=task,
        model=model,
        data=data,
        tokenizer=tokenizer,
        n=n,
        fresh=fresh,
        seeds=seeds,
        max_steps=max_steps,
        epochs=epochs,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        learning_rate=learning_rate,
        warmup_share=warmup_share,
        weight_decay=weight_decay,
        train_rows=train_rows,
        eval_rows=eval_rows,
        precision=precision,
        device=device,
        save_models=save_models,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        result = run(args, out, progress=_watch(bar))
    print(lines_of(result))
    print(f"\nwritten: {out / 'result.json'}")


def _watch(bar: "Progress") -> Any:
    """Show one bar a seed."""
    bars: dict[int, Any] = {}

    def progress(seed: int, step: int, steps: int, loss: float) -> None:
        if seed not in bars:
            bars[seed] = bar.add_task(f"seed {seed}", total=steps)
        bar.update(bars[seed], completed=step, description=f"seed {seed}, loss {loss:.3f}")

    return progress


def lines_of(result: dict[str, Any]) -> str:
    """Return a result as it is printed: the metrics, what they were measured on, Table 2's form where it has the task.

    Args:
        result: As written to ``result.json``.
    """
    from rankscope.training.table_2 import COLUMNS, Ours, table_2

    evaluated, trained = result["data"]["eval"], result["data"]["train"]
    lines = []
    count = len(result["seeds"])
    for name, found in result["metrics"].items():
        error = "" if found["standard_error"] is None else f" ± {100 * found['standard_error']:.1f}"
        lines.append(f"{name} {100 * found['mean']:.1f}{error} %   ({count} seed{'s' if count > 1 else ''})")
    lines.append(
        f"on {evaluated['rows']} rows, of which {100 * evaluated['majority']:.1f} % have the most frequent label"
    )
    constant = sum(run["one_answer_share"] == 1 for run in result["runs"])
    if constant:
        lines.append(
            f"{constant} of {count} seeds give every row the same answer: train longer, or raise --learning-rate"
        )
    cut = sum(result["data"][split]["truncated"] for split in ("train", "eval"))
    if cut:
        lines.append(
            f"{cut} of {trained['rows'] + evaluated['rows']} rows are longer than {result['n']} tokens, and cut"
        )
    if result["task"] in COLUMNS:
        accuracy = result["metrics"]["accuracy"]
        ours = Ours(result["n"], words_of(result), {result["task"]: (accuracy["mean"], accuracy["standard_error"])})
        lines += ["", table_2([ours], scale_of(result), [result["task"]]).rstrip()]
    return "\n".join(lines)


def words_of(result: dict[str, Any]) -> str:
    """Return a result's model in words."""
    model = result["model"]
    k = model["projected_length"]
    return model["name"] if k is None else f"{model['name']}, k = {k}, {model['projection_sharing']}"


def scale_of(result: dict[str, Any]) -> str:
    """Return a result's scale in words."""
    model = result["model"]
    return (
        f"{model['layers']} layers of width {model['hidden_size']}, {model['parameters'] / 1e6:.1f} M parameters, "
        f"finetuned on {result['data']['train']['rows']} rows in {result['steps']} updates"
    )
