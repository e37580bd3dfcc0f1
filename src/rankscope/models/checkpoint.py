"""From a pretrained encoder and its projections to a Linformer checkpoint: names, positions, E and F, files."""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention._modules import unwrapped
from rankscope.models.in_place import HOME, InPlaceProjections
from rankscope.models.positions import position_table, stretched, tiled

BERT_HEAD = {
    r"cls\.predictions\.transform\.dense\.": "lm_head.dense.",
    r"cls\.predictions\.transform\.LayerNorm\.": "lm_head.layer_norm.",
    r"cls\.predictions\.decoder\.": "lm_head.decoder.",
    r"cls\.predictions\.bias$": "lm_head.bias",
}
ELECTRA_HEAD = {
    r"generator_predictions\.dense\.": "lm_head.dense.",
    r"generator_predictions\.LayerNorm\.": "lm_head.layer_norm.",
    r"generator_lm_head\.": "lm_head.decoder.",
}
ROBERTA_HEAD = {r"lm_head\.": "lm_head."}


@dataclass(frozen=True)
class Family:
    """An architecture whose encoder is RoBERTa's under another prefix.

    Args:
        prefix: Of the encoder in a model with a head.
        head: Names of the masked-language-model head, as regular expressions, and ours.
    """

    prefix: str
    head: Mapping[str, str]


FAMILIES = {
    "bert": Family("bert", BERT_HEAD),
    "roberta": Family("roberta", ROBERTA_HEAD),
    "xlm-roberta": Family("roberta", ROBERTA_HEAD),
    "camembert": Family("roberta", ROBERTA_HEAD),
    "electra": Family("electra", ELECTRA_HEAD),
}
REASONS = {
    "linformer": "it is one already",
    "deberta": "its logits hold relative-position terms, which have no place among projected keys",
    "deberta-v2": "its logits hold relative-position terms, which have no place among projected keys",
    "mpnet": "its logits hold a relative-position bias, which has no place among projected keys",
    "albert": "its layers share one set of weights",
    "distilbert": "its layers have other names and no token types",
    "modernbert": "its positions are rotary: a projected key mixes positions",
}


COPIED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
)


def family_of(config: Any, name: str = "model") -> Family:
    """Tell how an encoder's weights are named, or why it can't become a Linformer checkpoint.

    Args:
        config: The model's configuration.
        name: What the user calls the model.

    Raises:
        RankscopeError: A decoder, another architecture, positions or embeddings that Linformer models lack.
    """
    kind = getattr(config, "model_type", None)
    classes = getattr(config, "architectures", None) or []
    if getattr(config, "is_decoder", False) or any(c.endswith(("ForCausalLM", "LMHeadModel")) for c in classes):
        reason = "it is a decoder, and a projected key mixes all positions, later ones too"
    elif kind not in FAMILIES:
        reason = REASONS.get(str(kind), f"its type {kind!r} is none of {', '.join(FAMILIES)}")
    elif getattr(config, "embedding_size", config.hidden_size) != config.hidden_size:
        reason = (
            f"its embeddings of {config.embedding_size} channels are projected to {config.hidden_size}, which "
            "Linformer models have no layer for"
        )
    elif getattr(config, "position_embedding_type", "absolute") != "absolute":
        reason = f"its positions are {config.position_embedding_type!r}, and only absolute ones can be kept"
    else:
        return FAMILIES[kind]
    raise RankscopeError(
        f"`model` {name!r} can't become a Linformer checkpoint: {reason} (rankscope.linformerize works in place, "
        "on any encoder that uses the attention interface)"
    )


def to_linformer(model: nn.Module, bank: InPlaceProjections, *, positions: int | None = None) -> nn.Module:
    """Build the Linformer model that has an encoder's weights and given projections.

    Args:
        model: BERT, RoBERTa, XLM-RoBERTa, CamemBERT or ELECTRA, with or without its masked-language-model head;
            another head is left behind. Replaced attention or not, it stays as it is.
        bank: Projections of all its layers, from :func:`~rankscope.models.in_place.linformerize`.
        positions: The longest sequence, default the projections' n. Positions beyond the model's own are
            :func:`~rankscope.models.positions.tiled`, E and F are
            :func:`~rankscope.models.positions.stretched`.

    Returns:
        ``LinformerForMaskedLM`` or ``LinformerModel``, in eval mode.

    Raises:
        RankscopeError: A model of another kind, projections that leave layers out, or that can't be stretched.
    """
    from rankscope.models.configuration_linformer import LinformerConfig

    source: Any = unwrapped(model)
    config, encoder = source.config, source.base_model
    family = family_of(config, type(source).__name__)
    if len(bank) != config.num_hidden_layers:
        raise RankscopeError(f"`bank` holds {len(bank)} of {config.num_hidden_layers} layers: replace all of them")
    n = bank.settings.n if positions is None else positions
    if n < bank.settings.n:
        raise RankscopeError(f"`positions` must be at least the projections' n={bank.settings.n}, got {n}")
    state = {name: tensor for name, tensor in encoder.state_dict().items() if not name.startswith(HOME)}
    head = _head_state(source, family)
    if head and config.model_type == "bert" and config.hidden_act != "gelu":
        raise RankscopeError(
            f"`model` has a head with activation {config.hidden_act!r}, and Linformer's, as RoBERTa's, has 'gelu': "
            "convert the encoder alone (model.base_model)"
        )
    k, projections = _projections(bank, state, n)
    state |= {f"encoder.projections.{name}": tensor for name, tensor in projections.items()}
    ours = LinformerConfig(
        **{name: getattr(config, name) for name in COPIED if hasattr(config, name)},
        max_position_embeddings=n,
        projected_length=k,
        projection_sharing=bank.settings.sharing,
        projection=bank.settings.kind,
        length_rule=bank.settings.length_rule,
    )
    made = built(ours, head=bool(head), pooler=any(name.startswith("pooler.") for name in state))
    _, table, skip = position_table(encoder)
    _, _, offset = position_table(made)
    state["embeddings.position_embeddings.weight"] = tiled(table.weight.detach(), n, skip=skip, offset=offset)
    if head:
        state = {f"{made.base_model_prefix}.{k}": v for k, v in state.items() if not k.startswith("pooler.")} | head
    made.to(table.weight.dtype).load_state_dict(state)
    return made.eval()


def built(config: Any, *, head: bool, pooler: bool) -> Any:
    """A fresh LinformerForMaskedLM, or LinformerModel with or without a pooler; no random state is moved."""
    import rankscope.models as models

    with torch.random.fork_rng(devices=[]):
        return models.LinformerForMaskedLM(config) if head else models.LinformerModel(config, add_pooling_layer=pooler)


def convert_checkpoint(
    model: nn.Module,
    folder: str | Path,
    bank: InPlaceProjections,
    *,
    tokenizer: Any = None,
    positions: int | None = None,
) -> Path:
    """Write the Linformer checkpoint of an encoder and its projections, which ``from_pretrained`` loads.

    Args:
        model: See :func:`to_linformer`.
        folder: Where config.json, model.safetensors and the tokenizer's files go; new or empty.
        bank: See :func:`to_linformer`.
        tokenizer: The model's, saved beside it.
        positions: See :func:`to_linformer`.

    Returns:
        The folder.

    Raises:
        RankscopeError: The folder holds something, or can't be written; and as :func:`to_linformer`.

    Example:
        >>> import tempfile
        >>> from rankscope import LinformerModel, linformerize
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        ...     intermediate_size=8, max_position_embeddings=16))
        >>> bank = linformerize(model, k=4, generator=torch.Generator().manual_seed(0))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     folder = convert_checkpoint(model, Path(place) / "linformer", bank)
        ...     LinformerModel.from_pretrained(folder).projection_count
        4
    """
    made = to_linformer(model, bank, positions=positions)
    with whole_folder(folder) as part:
        save_checkpoint(made, part, tokenizer)
    return Path(folder)


def relative_difference(model: nn.Module, other: nn.Module, windows: Tensor) -> float:
    """Norm of the difference of two models' last hidden states over the norm of the second's."""
    with torch.no_grad():
        one, two = (getattr(m, "base_model", m)(windows).last_hidden_state.double() for m in (model, other))
    return float((one - two).norm() / two.norm())


def save_checkpoint(model: Any, folder: Path, tokenizer: Any = None) -> None:
    """Save a Linformer model, and a tokenizer that cuts at its longest sequence."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["model_max_length"] = longest(model)
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def longest(model: nn.Module) -> int:
    """The longest sequence a model's position table holds."""
    _, table, skip = position_table(model)
    return table.num_embeddings - skip


def check_free(folder: str | Path) -> None:
    """Refuse a folder that holds something: nothing is overwritten.

    Raises:
        RankscopeError: It is a file, or not empty.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RankscopeError(
            f"`out` {str(folder)!r} exists and is not an empty folder: choose another, or remove it first"
        )


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """Give a folder to write to, that gets its name only when all is written.

    Args:
        folder: The name; nothing may be there, or an empty folder.

    Raises:
        RankscopeError: Something is there, or the disk refuses.
    """
    folder = Path(folder).absolute()
    check_free(folder)
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        yield part
        check_free(folder)
        part.replace(folder)
    except OSError as error:
        raise RankscopeError(f"could not write {str(folder)!r}: {error}; nothing was left there") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _head_state(model: nn.Module, family: Family) -> dict[str, Tensor]:
    """The masked-language-model head under our names; empty where there is none."""
    if not type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining")):
        return {}
    found = {}
    for name, tensor in model.state_dict().items():
        for theirs, ours in family.head.items():
            if re.match(theirs, name):
                found[re.sub(theirs, ours, name, count=1)] = tensor
    if "lm_head.decoder.bias" in found:
        found.setdefault("lm_head.bias", found["lm_head.decoder.bias"])
    return found


def _projections(
    bank: InPlaceProjections, encoder: Mapping[str, Tensor], n: int
) -> tuple[int | list[int] | list[list[int]], dict[str, Tensor]]:
    """The bank's k and values for n tokens, reading the layers' inputs where they read keys in place."""
    settings = bank.settings
    state, k = dict(bank.state_dict()), settings.k
    if settings.kind == "dynamic":
        if settings.sharing == "layerwise":
            raise RankscopeError(
                "`bank` of kind 'dynamic' under sharing 'layerwise' reads every layer's own keys with one matrix, "
                "which no matrix for the layers' inputs does: take 'key_value' or 'headwise'"
            )
        # Wᴾ (W_k x + b) is (Wᴾ W_k) x and a constant, which the softmax over the sequence ignores.
        for name in state:
            layer = int(name.split(".")[1])
            state[name] = state[name] @ encoder[f"encoder.layer.{layer}.attention.self.key.weight"]
    if n == settings.n:
        return k, state
    if settings.kind in ("learned", "gaussian"):
        if settings.length_rule != "interpolate":
            raise RankscopeError(
                f"`positions` {n} is more than the projections' n={settings.n}, and under length rule 'slice' a matrix "
                "says nothing of further tokens: take 'interpolate', or projections for as many"
            )
        return k, {name: stretched(tensor, n) for name, tensor in state.items()}
    if settings.kind == "convolution":
        lengths = k if isinstance(k, list) else [k]
        strides = {math.ceil(settings.n / one) for one in lengths if isinstance(one, int)}
        if any(n % stride for stride in strides):
            raise RankscopeError(
                f"`positions` must be a multiple of the kernels' lengths {sorted(strides)}, got {n}: a convolution "
                "keeps its stride"
            )
        longer = [n // math.ceil(settings.n / one) for one in lengths if isinstance(one, int)]
        return (longer if isinstance(k, list) else longer[0]), state
    return k, state
