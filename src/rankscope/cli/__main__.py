"""``rankscope COMMAND …``: the command table; only the chosen command's module is imported."""

import sys
from dataclasses import dataclass
from importlib import import_module

from rankscope import __version__
from rankscope._errors import RankscopeError, did_you_mean


@dataclass(frozen=True)
class Command:
    """One row of the table: where the typed function (or typer app) lives, and its line in the help."""

    module: str
    help: str


COMMANDS = {
    "measure": Command("rankscope.cli.measure", "Measure a model's attention spectra on a text, nulls beside them."),
    "report": Command("rankscope.cli.report", "Turn results into one self-contained page and pictures."),
    "merge": Command("rankscope.cli.merge", "Join the shards of one measurement."),
    "truncate": Command(
        "rankscope.cli.truncate", "Truncate every head to rank k: the price in the model's own output."
    ),
    "convert": Command("rankscope.cli.convert", "Turn an encoder into a Linformer checkpoint, and say what it costs."),
    "finetune": Command("rankscope.cli.finetune", "Finetune on GLUE, IMDB or ListOps: mean and error over seeds."),
    "compare": Command("rankscope.cli.compare", "Transformer against Linformer at equal tokens and at equal time."),
    "pretrain": Command(
        "rankscope.cli.pretrain", "Pretrain a Linformer, or the exact Transformer of the same configuration."
    ),
    "theory": Command("rankscope.cli.theory", "Run the theorems: Johnson-Lindenstrauss, clusters, rank collapse."),
    "bench": Command("rankscope.cli.bench", "Time attention mechanisms on this machine, and say where each pays."),
    "recommend": Command("rankscope.cli.recommend", "Keep exact attention, or Linformer with which k, and why."),
    "doctor": Command("rankscope.cli.doctor", "Check this machine, and how a model's attentions can be reached."),
}


def usage() -> str:
    """Return the help page, made from the table."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "Usage: rankscope COMMAND [ARGUMENTS]\n\n"
        "Measure how low-rank a transformer's attention is, say what that buys, build Linformers.\n\n"
        f"Commands:\n{rows}\n\n"
        "  rankscope COMMAND --help   what a command takes\n"
        "  rankscope --version        the version\n"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a user's mistake (one line, no traceback), 130 for ^C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(usage(), end="")
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: `rankscope` has no command {name!r}: {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return run(name, rest)
    except RankscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: finished parts are kept, the same command goes on", file=sys.stderr)
        return 130


def run(name: str, arguments: list[str]) -> int:
    """Import a command's module and hand it the arguments."""
    import typer

    app = import_module(COMMANDS[name].module).app
    command = typer.main.get_command(app)
    try:
        result = command.main(arguments, prog_name=f"rankscope {name}", standalone_mode=True)
    except SystemExit as leave:
        return int(leave.code or 0)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
