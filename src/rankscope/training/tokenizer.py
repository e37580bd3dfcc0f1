"""The tokenizer of a run: one that is given, or a byte-level BPE trained on the run's own text."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rankscope._errors import RankscopeError
from rankscope._hub import hub_problem

# RoBERTa's, at RoBERTa's ids 0 … 3; its <mask> is the vocabulary's last there, and 4 here.
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
LEAST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
# What the merges are learnt from: 64 MiB of English is far beyond where the first 50,000 merges change.
SAMPLE_CHARACTERS = 2**26


def train_tokenizer(corpus: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE on the first 2²⁶ characters of a corpus.

    Every byte is a token, so no text is unknown. Sequences are wrapped as RoBERTa's are: ``<s> A </s>``, pairs
    ``<s> A </s></s> B </s>``. The same text gives the same tokenizer.

    Args:
        corpus: Documents.
        vocab_size: Tokens at most, the 256 bytes and 5 special tokens included; a short text gives fewer.

    Returns:
        A ``PreTrainedTokenizerFast``; ``save_pretrained`` makes a folder that ``AutoTokenizer`` reads.

    Raises:
        RankscopeError: ``vocab_size`` leaves no room for bytes and special tokens.

    Example:
        >>> tokenizer = train_tokenizer(["low lower lowest low low"], 270)
        >>> tokenizer.decode(tokenizer("low", add_special_tokens=False)["input_ids"])
        'low'
        >>> tokenizer("lower")["input_ids"][0] == tokenizer.bos_token_id == 0
        True
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < LEAST_VOCABULARY:
        raise RankscopeError(
            f"`vocab_size` must be at least {LEAST_VOCABULARY} (256 bytes and {len(SPECIAL_TOKENS)} special tokens), "
            f"got {vocab_size}"
        )
    specials = list(SPECIAL_TOKENS.values())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample(corpus), trainer=trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(token, specials.index(token)) for token in ("<s>", "</s>")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, cls_token="<s>", sep_token="</s>", **SPECIAL_TOKENS)


def _sample(corpus: Iterable[str]) -> Iterator[str]:
    left = SAMPLE_CHARACTERS
    for document in corpus:
        yield document[:left]
        left -= len(document)
        if left <= 0:
            return


def load_tokenizer(path: str | Path) -> Any:
    """Load a tokenizer that can serve masked language models.

    Args:
        path: A folder that holds one, or a hub id.

    Returns:
        The tokenizer.

    Raises:
        RankscopeError: There is none, or it has no mask token.
    """
    from transformers import AutoTokenizer

    # Without a network only the cache is asked: the hub library would try again for most of a minute.
    cached_only = not Path(path).is_dir() and hub_problem() is not None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=cached_only)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RankscopeError(
            f"`tokenizer` {str(path)!r} can't be loaded ({reason}): give a folder written by save_pretrained, or leave "
            "it out to train one on the corpus"
        ) from None
    if tokenizer.mask_token_id is None:
        raise RankscopeError(
            f"`tokenizer` {str(path)!r} has no mask token, which masked language modelling needs: give another one, or "
            "leave it out to train one on the corpus"
        )
    return tokenizer
