"""What a run trains on: its text split, its tokenizer, and as many packed windows as it needs."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.corpora import Corpus, open_corpus
from rankscope.spectrum.parts import disk_error, temporary_name
from rankscope.training.args import PretrainArgs
from rankscope.training.data import Windows, pack, split_text
from rankscope.training.tokenizer import load_tokenizer, train_tokenizer


@dataclass(frozen=True)
class RunData:
    """Tokenizer and windows of a run."""

    tokenizer: Any
    train: Windows
    held_out: Windows
    held_out_text: list[str]


def prepare_data(args: PretrainArgs, out: Path) -> RunData:
    """Open the text, load or train the tokenizer, and pack as many windows as the run needs."""
    corpus = open_corpus(args.corpus, column=args.column)
    if args.eval_corpus is None:
        training: Iterable[str] = Again(corpus, held_out=False)
        held_out: Iterable[str] = Again(corpus, held_out=True)
    else:
        training, held_out = corpus, open_corpus(args.eval_corpus, column=args.column)
    tokenizer = kept_tokenizer(args, training, out / "tokenizer")
    eval_windows = first(
        pack(held_out, tokenizer, args.n, out / "data" / "held_out.bin", least=args.eval_windows), args.eval_windows
    )
    train_windows = pack(
        training, tokenizer, args.n, out / "data" / "train.bin", least=args.max_steps * args.batch_size
    )
    return RunData(tokenizer, train_windows, eval_windows, sample_text(held_out, args.n * args.measure_windows))


class Again:
    """A corpus's training or held-out text, as often as it is iterated."""

    def __init__(self, corpus: Corpus, *, held_out: bool) -> None:
        self.corpus, self.held_out = corpus, held_out

    def __iter__(self) -> Iterator[str]:
        return split_text(self.corpus, held_out=self.held_out)


def first(windows: Windows, count: int) -> Windows:
    """Take the first windows."""
    return Windows(windows.ids[:count], windows.corpus_hash, windows.whole, windows.tokens_left_out)


def sample_text(documents: Iterable[str], tokens: int) -> list[str]:
    """Take documents from the beginning, with four times the characters that so many tokens have in English."""
    taken: list[str] = []
    left = 16 * tokens
    for document in documents:
        if left <= 0:
            break
        taken.append(document)
        left -= len(document)
    return taken


def kept_tokenizer(args: PretrainArgs, corpus: Iterable[str], folder: Path) -> Any:
    """Return the run's tokenizer: the kept one, the given one or one trained now, which is then kept."""
    if (folder / "tokenizer_config.json").exists():
        return load_tokenizer(folder)
    tokenizer = train_tokenizer(corpus, args.vocab_size) if args.tokenizer is None else load_tokenizer(args.tokenizer)
    temporary = temporary_name(folder)
    try:
        tokenizer.save_pretrained(temporary)
        temporary.replace(folder)
    except OSError as error:
        raise disk_error(folder, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return tokenizer
