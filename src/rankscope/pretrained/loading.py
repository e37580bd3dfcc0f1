"""Loading a model ready to measure, building its untrained twin, and how many positions it holds."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.pretrained.adapter import adapted
from rankscope.pretrained.checkpoint import cached_commit, head_class, load_tokenizer, load_weights, locate

DTYPES = Registry("dtype", {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})


@dataclass(frozen=True)
class Pretrained:
    """A model ready to measure, in eval mode, and where it came from.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        name: What the user called it.
        revision: The hub's commit; ``None`` for what does not come from the hub.
        source: ``hub``, ``folder``, ``gguf``, ``peft``, ``package`` or ``module``.
        fingerprint: SHA-256 over each weight's name, shape, dtype and up to 256 of its values, evenly
            spaced: another checkpoint has another hash, at a small part of the cost of hashing all.
        untrained: Weights the checkpoint lacks, which hold random numbers; they come after the attention
            (poolers), so they change no spectrum.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    revision: str | None
    source: str
    fingerprint: str
    untrained: tuple[str, ...] = ()


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
    checkpoint = locate(str(model))
    revision = None
    # Seeded, so that weights the checkpoint lacks are the same at every load, and so is the fingerprint.
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if checkpoint.source == "peft":
            loaded, untrained, words = adapted(checkpoint, wanted, head)
        else:
            auto = head_class(checkpoint) if head else AutoModel
            loaded, untrained = load_weights(checkpoint, auto, wanted)
            words = checkpoint
            revision = cached_commit(checkpoint) if checkpoint.source == "hub" else None
        tokenizer = load_tokenizer(words) if tokenizer is None else tokenizer
    check_vocabulary(loaded, tokenizer, checkpoint.name)
    loaded = nn.Module.to(loaded, place).eval()
    return Pretrained(
        loaded, tokenizer, checkpoint.name, revision, checkpoint.source, fingerprint(loaded), tuple(sorted(untrained))
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
        >>> fingerprint(one) == fingerprint(other)
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


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 over each weight's name, shape, dtype and up to 256 evenly spaced values.

    Args:
        model: A model.
    """
    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().flatten()
        values = flat[:: max(1, -(-flat.numel() // 256))]
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
    check_vocabulary(model, tokenizer, name)
    return Pretrained(model.eval(), tokenizer, name, None, "module", fingerprint(model))


def check_vocabulary(model: nn.Module, tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer that is empty, or whose ordinary tokens go beyond the model's embeddings.

    Args:
        model: A model.
        tokenizer: What it is to be used with.
        name: What the user called the model.

    Raises:
        RankscopeError: They do not fit.
    """
    # Without the special tokens: some tokenizers have a padding token that the model never sees.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = set(tokenizer.get_vocab().values()) - special - set(tokenizer.all_special_ids)
    # A folder without tokenizer files gives an empty tokenizer of the model's kind, and no error.
    if not ids:
        raise RankscopeError(
            f"`model` {name!r} has no tokenizer files: save its tokenizer beside it, or pass `tokenizer`"
        )
    embeddings = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    if isinstance(embeddings, nn.Embedding) and max(ids) >= embeddings.num_embeddings:
        raise RankscopeError(
            f"`tokenizer` has ids up to {max(ids)}, but {name!r} embeds only {embeddings.num_embeddings}: pass the "
            f"tokenizer that the model was trained with"
        )


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
