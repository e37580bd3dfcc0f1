r"""Windows of a corpus for masked language modelling: packed once, shuffled and masked as pure functions.

What the t-th example of a run is depends on (seed, t) alone: t says epoch and place, the place a window, and
(seed, epoch, window) the mask. So the data is the same for every batch size, number of workers and number of
processes, and a resumed run goes on with the exact next example without reading anything it has read before.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from rankscope._errors import RankscopeError
from rankscope.spectrum.parts import disk_error, publish, temporary_name, write_whole
from rankscope.windows import packed_windows, special_tokens

MASK_SHARE = 0.15
# Of the chosen tokens: 80 % become the mask token, 10 % a random one, 10 % stay.
KEEP_BELOW, RANDOM_BELOW = 0.1, 0.2
IGNORED = -100
# Windows that are shuffled among each other, and the step in which a corpus is read: 4 million tokens at n = 512.
SHUFFLE_BLOCK = 8192
# Text is held out in stretches of so many characters (some 16 windows of 512 tokens), one in so many.
HELD_OUT_CHARACTERS, HELD_OUT_EVERY = 2**15, 20
ORDER, MASK = 1, 2


def keyed_uniform(seed: int, stream: int, epoch: int, index: int, count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that are a function of their key; the same on every machine and numpy.

    Philox is counter-based, so a key needs no state and no seeding; its raw output is part of its definition,
    where numpy's distributions may change.

    Args:
        seed: Of the run.
        stream: What the numbers are for.
        epoch: Counted from 0.
        index: Of the window or block.
        count: How many.

    Example:
        >>> keyed_uniform(0, 1, 0, 0, 2).round(4).tolist() == keyed_uniform(0, 1, 0, 0, 5)[:2].round(4).tolist()
        True
    """
    raw = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=np.array([0, epoch, index, 0], np.uint64))
    return (raw.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_text(documents: Iterable[str], *, held_out: bool) -> Iterator[str]:
    """The training text of a corpus, or the twentieth of it that is held out from training.

    Stretches of 2¹⁵ characters are numbered through the corpus; each twentieth, from the first on, is held out. A
    document shorter than that goes whole where it begins, so its rest is never met in training; a longer one is
    cut at white space.

    Law: the two parts share no stretch, and together they are the corpus.

    Args:
        documents: The corpus.
        held_out: Which part.

    Example:
        >>> list(split_text(["a", "b"], held_out=True)), list(split_text(["a", "b"], held_out=False))
        (['a', 'b'], [])
    """
    before = 0
    for document in documents:
        start = 0
        while start < len(document):
            end = len(document)
            if end - start > HELD_OUT_CHARACTERS:
                cut = document.rfind(" ", start + HELD_OUT_CHARACTERS // 2, start + HELD_OUT_CHARACTERS)
                end = start + HELD_OUT_CHARACTERS if cut < 0 else cut
            number = before // HELD_OUT_CHARACTERS
            if (number % HELD_OUT_EVERY == 0) == held_out:
                yield document[start:end]
            before += end - start
            start = end


@dataclass(frozen=True)
class Windows:
    """Packed windows in a file.

    Args:
        ids: Token ids ``(windows, n)``, read from disk as they are wanted.
        corpus_hash: Of the token ids.
        whole: Whether the corpus ends with them.
        tokens_left_out: Tokens after the last whole window, if it does.
    """

    ids: NDArray[np.integer]
    corpus_hash: str
    whole: bool
    tokens_left_out: int

    def __len__(self) -> int:
        return len(self.ids)


def pack(corpus: Iterable[str], tokenizer: Any, n: int, path: Path, *, least: int | None = None) -> Windows:
    """Pack a corpus to windows of ``n`` tokens in a file, reading no more of it than is needed.

    Documents follow each other as in the corpus, so that a window crosses a document's border only where the
    document ends; the windows are shuffled when they are drawn (:class:`RunOrder`). The corpus is streamed, and the
    file is written whole or not at all. An existing file of the same tokenizer and n, long enough, is taken as it is.

    Args:
        corpus: Documents.
        tokenizer: A ``transformers`` tokenizer.
        n: Tokens a window, special tokens included.
        path: The file; a ``.json`` beside it describes it.
        least: Stop once there are so many windows, rounded up to whole shuffling blocks; ``None``: read all.

    Returns:
        The windows.

    Raises:
        RankscopeError: The corpus is shorter than a window, or the disk can't hold the file.
    """
    wanted = None if least is None else -(-least // SHUFFLE_BLOCK) * SHUFFLE_BLOCK
    mark = {"n": n, "tokenizer": tokenizer_hash(tokenizer)}
    known = _described(path)
    if known is None or {name: known[name] for name in mark} != mark or not _enough(known, wanted):
        known = _write(corpus, tokenizer, n, path, wanted, mark)
    shape = (known["windows"], n)
    ids = np.memmap(path, dtype=known["dtype"], mode="r", shape=shape)
    return Windows(ids, known["corpus_hash"], known["whole"], known["tokens_left_out"])


def _enough(known: dict[str, Any], wanted: int | None) -> bool:
    return known["whole"] or (wanted is not None and known["windows"] >= wanted)


def _described(path: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(_side_file(path).read_text())
        size = path.stat().st_size
        return known if size == known["windows"] * known["n"] * np.dtype(known["dtype"]).itemsize else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _side_file(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _write(
    corpus: Iterable[str], tokenizer: Any, n: int, path: Path, wanted: int | None, mark: dict[str, Any]
) -> dict[str, Any]:
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    stream = packed_windows(corpus, tokenizer, n, limit=wanted, shuffle=False)
    temporary = temporary_name(path)
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for window in stream:
                file.write(np.asarray(window.input_ids, dtype=dtype).tobytes())
                count += 1
        publish(temporary, path)
    except OSError as error:
        raise disk_error(path, error) from None
    finally:
        temporary.unlink(missing_ok=True)
    known = {
        **mark,
        "dtype": np.dtype(dtype).name,
        "windows": count,
        "corpus_hash": stream.corpus_hash,
        "whole": wanted is None or count < wanted,
        "tokens_left_out": sum(stream.left_out.values()),
    }
    write_whole(_side_file(path), json.dumps(known, indent=1).encode())
    return known


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 over a tokenizer's vocabulary and what it puts around a sequence."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return sha256(repr((vocabulary, special_tokens(tokenizer))).encode()).hexdigest()


@dataclass(frozen=True)
class RunOrder:
    """Which window, in which epoch, the t-th example of a run is.

    Windows are shuffled within blocks of :data:`SHUFFLE_BLOCK`, anew in each epoch.

    Laws: every epoch holds each window once; the order within a block depends on the seed, the epoch and the block's
    size only, so that a corpus read further begins with the same examples.

    Args:
        seed: Of the run.
        windows: How many there are.

    Example:
        >>> order = RunOrder(seed=0, windows=3)
        >>> sorted(order(t)[1] for t in range(3, 6)), order(4)[0]
        ([0, 1, 2], 1)
    """

    seed: int
    windows: int

    def __call__(self, t: int) -> tuple[int, int]:
        """Return (epoch, window) of example ``t``."""
        epoch, place = divmod(t, self.windows)
        block, offset = divmod(place, SHUFFLE_BLOCK)
        size = min(SHUFFLE_BLOCK, self.windows - block * SHUFFLE_BLOCK)
        return epoch, block * SHUFFLE_BLOCK + int(_permutation(self.seed, epoch, block, size)[offset])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, block: int, size: int) -> NDArray[np.int64]:
    return np.argsort(keyed_uniform(seed, ORDER, epoch, block, size), kind="stable")


class Masking:
    """BERT's masking with RoBERTa's renewal: 15 % of the ordinary tokens, drawn anew for each (epoch, window).

    Each ordinary token is chosen with probability .15; of the chosen 80 % become the mask token, 10 % a token drawn
    from the ordinary ones and 10 % stay. Special tokens are never chosen. A window of which none is chosen by chance
    gets the one that was nearest to it.

    Args:
        tokenizer: A ``transformers`` tokenizer with a mask token.
        seed: Of the run.

    References:
        Devlin et al. 2019, arXiv 1810.04805, §3.1; Liu et al. 2019, arXiv 1907.11692, §4.1.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.seed = seed
        self.mask_id: int = tokenizer.mask_token_id
        added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special = np.array(sorted({*tokenizer.all_special_ids, *added}))
        self.ordinary = np.array(sorted(set(tokenizer.get_vocab().values()) - set(self.special.tolist())))

    def __call__(self, ids: NDArray[np.integer], epoch: int, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Mask one window.

        Args:
            ids: ``(n,)``.
            epoch: Counted from 0.
            index: The window's.

        Returns:
            The model's input ``(n,)``, and the labels ``(n,)``: the true id where a token was chosen, else −100.
        """
        n = len(ids)
        choice, action, token = keyed_uniform(self.seed, MASK, epoch, index, 3 * n).reshape(3, n)
        choice = np.where(np.isin(ids, self.special), 2.0, choice)
        chosen = choice < MASK_SHARE
        if not chosen.any():
            chosen = (choice == choice.min()) & (choice < 1)
        given = ids.astype(np.int64)
        labels = np.where(chosen, given, IGNORED)
        drawn = self.ordinary[(token * len(self.ordinary)).astype(np.int64)]
        given = np.where(chosen & (action < RANDOM_BELOW), drawn, given)
        given = np.where(chosen & (action < KEEP_BELOW), labels, given)
        return np.where(chosen & (action >= RANDOM_BELOW), self.mask_id, given), labels


class MaskedWindows(Dataset[dict[str, Tensor]]):
    """The examples of a whole run, in order: example t is a function of (seed, t).

    Args:
        windows: What :func:`pack` made.
        masking: How they are masked.
        order: Which window example t is; ``None`` takes them as they lie, with the masks of epoch 0.
        length: How many examples the run has; as many as windows by default.
    """

    def __init__(
        self, windows: Windows, masking: Masking, order: RunOrder | None = None, length: int | None = None
    ) -> None:
        self.windows, self.masking, self.order = windows, masking, order
        self.length = len(windows) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, t: int) -> dict[str, Tensor]:
        if not 0 <= t < self.length:
            raise IndexError(t)
        epoch, index = (0, t) if self.order is None else self.order(t)
        given, labels = self.masking(self.windows.ids[index], epoch, index)
        return {"input_ids": torch.from_numpy(given), "labels": torch.from_numpy(labels)}


def check_fits(windows: Windows, wanted: int, what: str) -> None:
    """Refuse a split that gives nothing.

    Raises:
        RankscopeError: Fewer windows than wanted.
    """
    if len(windows) < wanted:
        raise RankscopeError(f"{what} has {len(windows)} windows, wanted at least {wanted}: give more text")
