"""The settings of a pretraining run: a dataclass, and the TOML files that fill it."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from rankscope._errors import RankscopeError, did_you_mean

PRECISIONS = ("float32", "bfloat16")
SCHEDULES = ("linear", "cosine", "constant_with_warmup")
DEVICES = ("auto", "cpu")
# What may differ between a run and its continuation: neither changes what is computed, but for rounding.
FREE_SETTINGS = frozenset({"micro_batch_size", "workers", "device", "report_to"})


@dataclass(frozen=True)
class PretrainArgs:
    """What a pretraining run is, whatever machine it runs on.

    Args:
        corpus: A name or path that :func:`rankscope.corpora.open_corpus` takes.
        column: The text's column in a table.
        eval_corpus: Text that perplexity is measured on; ``None`` holds a twentieth of the corpus out.
        tokenizer: A folder or hub id; ``None`` trains one on the corpus.
        vocab_size: Of a trained tokenizer, at most.
        n: Tokens a window.
        batch_size: Windows an update, over all processes.
        micro_batch_size: Windows a forward on one process; ``None``: the batch in one.
        max_steps: Updates.
        learning_rate: At its peak.
        schedule: From the peak on, one of :data:`SCHEDULES`.
        warmup_steps: Updates over which the rate rises to its peak.
        weight_decay: AdamW's.
        adam_beta1: AdamW's.
        adam_beta2: AdamW's.
        adam_epsilon: AdamW's.
        max_grad_norm: Gradients are clipped to this norm; 0 clips nothing.
        precision: ``"bfloat16"`` computes by autocast, weights stay float32.
        log_every: Updates between two points of the loss curve, each a mean over them.
        eval_every: Updates between two held-out perplexities.
        eval_windows: On how many windows, at most.
        save_every: Updates between checkpoints.
        measure_every: Updates between two measurements of the spectra; ``None``: none.
        measure_windows: On how many held-out windows.
        seed: Of weights, order, masks and dropout.
        workers: Processes that prepare windows, for each training process.
        device: ``"auto"`` or ``"cpu"``.
        report_to: Trainer's own switch, as ``"tensorboard"``; ``"none"``.
        model: Keywords of :class:`rankscope.models.configuration_linformer.LinformerConfig`.
    """

    corpus: str
    column: str | None = None
    eval_corpus: str | None = None
    tokenizer: str | None = None
    vocab_size: int = 8192
    n: int = 512
    batch_size: int = 16
    micro_batch_size: int | None = None
    max_steps: int = 1000
    learning_rate: float = 1e-3
    schedule: str = "linear"
    warmup_steps: int = 100
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-6
    max_grad_norm: float = 1.0
    precision: str = "float32"
    log_every: int = 10
    eval_every: int = 100
    eval_windows: int = 64
    save_every: int = 100
    measure_every: int | None = None
    measure_windows: int = 4
    seed: int = 0
    workers: int = 0
    device: str = "auto"
    report_to: str = "none"
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            check_type(item.name, getattr(self, item.name), item.type)
        for name in ("vocab_size", "batch_size", "max_steps", "log_every", "eval_every", "eval_windows", "save_every"):
            at_least(name, getattr(self, name), 1)
        for name in ("micro_batch_size", "measure_every", "measure_windows"):
            at_least(name, getattr(self, name), 1)
        at_least("n", self.n, 8)
        for name in ("seed", "warmup_steps", "workers", "weight_decay", "max_grad_norm"):
            at_least(name, getattr(self, name), 0)
        if not self.learning_rate > 0:
            raise RankscopeError(f"`learning_rate` must be above 0, got {self.learning_rate}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise RankscopeError(f"`{name}` must lie in [0, 1), got {getattr(self, name)}")
        for name, choices in (("precision", PRECISIONS), ("schedule", SCHEDULES), ("device", DEVICES)):
            if getattr(self, name) not in choices:
                raise RankscopeError(f"`{name}` has no {getattr(self, name)!r}: choose one of {', '.join(choices)}")
        if self.save_every % self.log_every:
            # A checkpoint between two points of the curve would lose the losses since the last one.
            raise RankscopeError(
                f"`save_every` must be a multiple of `log_every`, got {self.save_every} and {self.log_every}"
            )

    def settings(self) -> dict[str, Any]:
        """Return all fields, as JSON takes them."""
        return asdict(self)


def check_type(name: str, value: object, wanted: Any) -> None:
    """Refuse a value of another type than the field's; an int serves as a float, a bool as nothing.

    Example:
        >>> check_type("n", "512", int)
        Traceback (most recent call last):
            ...
        rankscope._errors.RankscopeError: `n` must be int, got '512'
    """
    kinds = tuple(get_origin(kind) or kind for kind in get_args(wanted) or (wanted,))
    if get_origin(wanted) is dict:
        kinds = (dict,)
    allowed = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, allowed) or isinstance(value, bool):
        words = " or ".join("nothing" if kind is NoneType else kind.__name__ for kind in kinds)
        raise RankscopeError(f"`{name}` must be {words}, got {value!r}")


def at_least(name: str, value: float | None, least: int) -> None:
    """Refuse a number below the least."""
    if value is not None and value < least:
        raise RankscopeError(f"`{name}` must be at least {least}, got {value}")


def shipped_configs() -> dict[str, Path]:
    """Return the configurations that come with the package, by name."""
    folder = resources.files("rankscope.training") / "configs"
    return {Path(item.name).stem: Path(str(item)) for item in folder.iterdir() if item.name.endswith(".toml")}


def load_args(config: str | Path, overrides: Mapping[str, Any] | None = None) -> PretrainArgs:
    """Read a configuration and put the command line's settings over it.

    Args:
        config: The name of a shipped configuration, or the path of a TOML file: its keys are fields of
            :class:`PretrainArgs`, its table ``[model]`` keywords of ``LinformerConfig``.
        overrides: Fields, and ``model`` for keywords of the model; they win.

    Returns:
        The settings.

    Raises:
        RankscopeError: No such configuration, a broken file, or a key or value that can't serve.

    Example:
        >>> load_args("tiny", {"corpus": "pydoc", "model": {"projected_length": 64}}).model["projected_length"]
        64
    """
    values = read_config(config)
    over = dict(overrides or {})
    model = {**values.pop("model", {}), **over.pop("model", {})}
    known = [item.name for item in fields(PretrainArgs)]
    for name in (*values, *over):
        if name not in known:
            raise RankscopeError(f"`config` {str(config)!r} has an unknown key {name!r}: {did_you_mean(name, known)}")
    values = {**values, **over}
    if "corpus" not in values:
        raise RankscopeError(f"`corpus` is not given, and `config` {str(config)!r} names none: give --corpus")
    return PretrainArgs(**values, model=model)


def read_config(config: str | Path) -> dict[str, Any]:
    """Read a shipped configuration or a TOML file as it is."""
    shipped = shipped_configs()
    path = shipped.get(str(config), Path(config))
    if not path.is_file():
        raise RankscopeError(
            f"`config` {str(config)!r} is neither a file nor a shipped configuration: "
            f"{did_you_mean(str(config), shipped)}"
        )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RankscopeError(f"`config` {str(path)!r} is no TOML file: {error}") from None
    if not isinstance(values.get("model", {}), dict):
        raise RankscopeError(f"`config` {str(path)!r}: model must be a table, [model], got {values['model']!r}")
    return values


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Say what differs between two runs' settings, but for the free ones.

    Example:
        >>> differences({"n": 512, "model": {"k": 1}}, {"n": 256, "model": {"k": 2}})
        ['model.k is 1, there it is 2', 'n is 512, there it is 256']
    """
    flat_now, flat_before = flat(now), flat(before)
    return [
        f"{name} is {flat_now.get(name)!r}, there it is {flat_before.get(name)!r}"
        for name in sorted(set(flat_now) | set(flat_before))
        if name not in FREE_SETTINGS and flat_now.get(name) != flat_before.get(name)
    ]


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the model's keywords beside the other settings, as ``model.name``."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        result |= (
            {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return result
