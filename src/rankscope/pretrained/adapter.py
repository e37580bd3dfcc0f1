"""PEFT adapters: found, put on their base model and merged into it."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel

from rankscope._errors import MissingExtraError, RankscopeError
from rankscope.pretrained.checkpoint import HEADS, READ_ERRORS, Checkpoint, load_weights, locate, one_line

_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model")


def adapted(adapter: Checkpoint, dtype: torch.dtype, head: bool) -> tuple[PreTrainedModel, set[str], Checkpoint]:
    """Load an adapter's base model and merge the adapter into it.

    Args:
        adapter: The adapter's folder.
        dtype: Of the base model and the merged weights.
        head: Keep the language model's head.

    Returns:
        The merged model, its weights that no file holds, and where its tokenizer is.
    """
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
            names = list(tensors.keys())
            endings = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
            labels = [tensors.get_slice(key).get_shape()[0] for key in names if key.endswith(endings)]
    except READ_ERRORS as error:
        raise RankscopeError(f"`model` {adapter.name!r} is a broken PEFT adapter: {one_line(error)}") from None
    base = _base_of(adapter, config)
    # An adapter's weights are named after the class it was trained on, so the base is loaded as that class.
    if config.task_type is not None:
        auto = getattr(transformers, _TASKS.get(str(getattr(config.task_type, "value", config.task_type)), "AutoModel"))
    else:
        auto = getattr(transformers, (config.auto_mapping or {}).get("base_model_class", "AutoModel"), None)
        auto = auto or transformers.AutoModel
    if head and auto.__name__ not in HEADS.values() and not auto.__name__.endswith(tuple(HEADS)):
        raise RankscopeError(
            f"`model` {adapter.name!r} adapts an {auto.__name__}, which has no language model head: load it "
            f"without `head`"
        )
    overrides = {"num_labels": labels[0]} if labels else {}
    model, missing = load_weights(base, auto, dtype, backbone_only=not head, **overrides)
    try:
        # peft warns where the two differ, as they do when the base was found beside the adapter.
        config.base_model_name_or_path = model.name_or_path
        wrapped = peft.get_peft_model(model, config)
        lacking = wrapped.load_adapter(str(folder), "default").missing_keys
        if lacking:
            raise RankscopeError(
                f"`model` {adapter.name!r} lacks {len(lacking)} of its adapter's weights ({lacking[0]}): its base "
                f"model {base.location!r} is not the one it was trained on, or the file is incomplete"
            )
        merged = wrapped.merge_and_unload()
    except (AttributeError, NotImplementedError) as error:
        raise RankscopeError(
            f"`model` {adapter.name!r} is a {config.peft_type} adapter, which cannot be merged into the weights "
            f"({one_line(error)}): only adapters that change weights, such as LoRA, are measured"
        ) from None
    except RankscopeError:
        raise
    except READ_ERRORS as error:
        raise RankscopeError(
            f"`model` {adapter.name!r} does not fit its base {base.location!r}: {one_line(error)}"
        ) from None
    words = adapter if any((folder / file).exists() for file in _TOKENIZER_FILES) else base
    if head:
        return merged, missing, words
    backbone = merged.base_model
    within = {key.removeprefix(f"{merged.base_model_prefix}.") for key in missing}
    return backbone, within & set(backbone.state_dict()), words


def _base_of(adapter: Checkpoint, config: Any) -> Checkpoint:
    named = config.base_model_name_or_path
    if not named:
        raise RankscopeError(
            f"`model` {adapter.name!r} is a PEFT adapter that names no base model: set it in its config"
        )
    beside = Path(adapter.location) / named
    try:
        base = locate(str(beside) if beside.is_dir() else named)
    except RankscopeError as error:
        raise RankscopeError(f"the base of the PEFT adapter {adapter.name!r} was not found: {error}") from None
    revision = config.revision if base.source == "hub" else None
    return Checkpoint(base.name, base.location, base.source, base.gguf_file, base.local_only, revision)
