"""Classifiers to finetune: a checkpoint with a new head, or fresh weights of an architecture."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from rankscope._errors import RankscopeError
from rankscope.pretrained.checkpoint import Checkpoint, configuration, load_tokenizer, load_weights, locate, one_line
from rankscope.pretrained.loading import check_vocabulary, fingerprint, max_positions
from rankscope.training.listops import listops_tokenizer
from rankscope.training.pretrain import quiet
from rankscope.training.tasks import Task

#: The learning rate at BERT's width; narrower models take it larger, in proportion, as published small models do.
RATE, WIDTH = 2e-5, 768
SCRATCH_RATE = 5e-4
DEFAULT_N = 512


@dataclass(frozen=True)
class Source:
    """Where a classifier's weights and tokenizer come from.

    Args:
        name: What the user called the model.
        tokenizer: The tokenizer.
        n: Tokens a row at most.
        classes: Of the task.
        config: Of fresh weights; ``None``: the checkpoint's weights are loaded.
    """

    name: str
    tokenizer: Any
    n: int
    classes: int
    config: PretrainedConfig | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the weights are drawn, not loaded."""
        return self.config is not None

    def build(self, seed: int) -> Any:
        """Build the classifier; ``seed`` decides its head, and all of its weights where they are fresh.

        Raises:
            RankscopeError: The checkpoint can't be read, has no such head, or its tokenizer does not fit it.
        """
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.config is not None:
                # The configuration is the model's from then on, and is written to.
                return from_config(copy.deepcopy(self.config), self.name)
            model, _ = load_weights(
                locate(self.name),
                AutoModelForSequenceClassification,
                torch.float32,
                backbone_only=True,
                num_labels=self.classes,
            )
        check_vocabulary(model, self.tokenizer, self.name)
        check_padding(model, self.tokenizer, self.name)
        return model

    def rate(self, model: Any) -> float:
        """Learning rate where none is given: 5e-4 for fresh weights, else 2e-5 · 768 / width.

        References:
            Devlin et al. 2019, arXiv 1810.04805, §A.3 (2e-5 to 5e-5 at width 768); Clark et al. 2020, arXiv 2003.10555,
            §C (1e-4 at 768, 3e-4 at 256).
        """
        return SCRATCH_RATE if self.is_fresh else RATE * WIDTH / model.config.get_text_config().hidden_size

    def fingerprint(self, model: Any) -> str:
        """Hash of the loaded weights, or of the configuration of fresh ones."""
        return repr(self.config.to_dict()) if self.config is not None else fingerprint(model.base_model)


def resolve(
    task: Task,
    model: str | Path | PretrainedConfig,
    *,
    n: int | None = None,
    tokenizer: str | Path | None = None,
    fresh: bool = False,
) -> Source:
    """Find out what a model is and check that it can do the task at this length.

    Args:
        task: ListOps has a vocabulary of its own, so its weights are always fresh and only the architecture is taken.
        model: A folder of ``save_pretrained`` (this project's checkpoints, or any encoder's), a hub id, ``minilm``, or
            a configuration. Where only the architecture is taken, a folder needs no more than its ``config.json``.
        n: Tokens a row at most; 512 or what the model holds, if that is less.
        tokenizer: Folder or hub id, used instead of the model's own.
        fresh: Draw the weights of the model's architecture anew.

    Returns:
        The source, whose weights are not loaded yet.

    Raises:
        RankscopeError: No such model or tokenizer, one that has no padding, or ``n`` beyond the model's positions.
    """
    if n is not None and n < 8:
        raise RankscopeError(f"`n` must be at least 8 tokens, got {n}")
    is_listops = task.name == "listops"
    if is_listops and tokenizer is not None:
        raise RankscopeError("`tokenizer` has no meaning for listops, which has a vocabulary of its own: leave it out")
    if isinstance(model, PretrainedConfig):
        config, name = copy.deepcopy(model), type(model).__name__
    else:
        checkpoint = architecture_of(str(model)) if is_listops or fresh else locate(str(model))
        if checkpoint.source not in ("folder", "hub", "package"):
            raise RankscopeError(f"`model` {str(model)!r} is a {checkpoint.source} checkpoint, which is not finetuned")
        config, name = copy.deepcopy(configuration(checkpoint)), str(model)
    if is_listops:
        words = listops_tokenizer()
    elif tokenizer is not None:
        words = load_tokenizer(locate_tokenizer(tokenizer))
    elif isinstance(model, PretrainedConfig):
        raise RankscopeError("`tokenizer` is needed with a configuration: give a folder that holds one")
    else:
        words = load_tokenizer(checkpoint)
    if words.pad_token_id is None:
        raise RankscopeError(f"`tokenizer` of {name!r} has no padding token, which batches need: give another one")
    config.num_labels = len(task.labels)
    draws = is_listops or fresh or isinstance(model, PretrainedConfig)
    if draws:
        config.vocab_size = len(words)
        for kind in ("pad", "bos", "eos"):
            setattr(config, f"{kind}_token_id", getattr(words, f"{kind}_token_id"))
    holds = held_positions(config)
    wanted = min(DEFAULT_N, holds or DEFAULT_N) if n is None else n
    if holds is not None and wanted > holds:
        raise RankscopeError(f"`n` is {wanted}, but {name!r} holds {holds} positions: choose --n up to that")
    return Source(name, words, wanted, len(task.labels), config if draws else None)


def architecture_of(name: str) -> Checkpoint:
    """Find a checkpoint of which the configuration is all that is wanted."""
    path = Path(name).expanduser()
    if (path / "config.json").is_file() and not (path / "adapter_config.json").exists():
        return Checkpoint(name, str(path), "folder")
    return locate(name)


def from_config(config: PretrainedConfig, name: str) -> Any:
    """Draw fresh weights; the global random state decides them."""
    try:
        return AutoModelForSequenceClassification.from_config(config)
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise RankscopeError(f"`model` {name!r} can't be built as a classifier: {one_line(error)}") from None


def locate_tokenizer(name: str | Path) -> Any:
    """Find a tokenizer's folder or hub id."""
    path = Path(name).expanduser()
    if path.is_dir():
        return Checkpoint(str(name), str(path), "folder")
    return locate(str(name))


def held_positions(config: PretrainedConfig) -> int | None:
    """Return how many tokens the architecture holds, ``None`` without a limit; found without allocating weights."""
    with quiet(), torch.device("meta"):
        return max_positions(from_config(copy.deepcopy(config), config.model_type))


def check_padding(model: Any, tokenizer: Any, name: str) -> None:
    """Refuse a padding token that the model has no row for."""
    embeddings = model.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding) and tokenizer.pad_token_id >= embeddings.num_embeddings:
        raise RankscopeError(
            f"`tokenizer` pads with id {tokenizer.pad_token_id}, but {name!r} embeds only {embeddings.num_embeddings}: "
            f"pass the tokenizer that the model was trained with"
        )
