"""From documents to windows of tokens: packed to exactly n, or one sentence each; and their random twins."""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any

import torch

from rankscope._errors import RankscopeError

# Characters of a passage for each token of a window: about four windows of English, so that a sample of a few
# dozen windows reaches many documents while most windows still lie within one.
PASSAGE_CHARACTERS_PER_TOKEN = 16
# Characters held while shuffling. IMDB, WikiText's test articles or two dozen novels fit whole.
SHUFFLE_CHARACTERS = 2**25

_SENTENCE_END = re.compile(r"""[.!?]["'”’)\]]* (?=["'“‘(\[]*[A-Z0-9])""")
_ABBREVIATIONS = frozenset(
    [
        "Mr",
        "Mrs",
        "Ms",
        "Dr",
        "St",
        "Prof",
        "Rev",
        "Gen",
        "Col",
        "Capt",
        "Lt",
        "Sgt",
        "Jr",
        "vs",
        "e.g",
        "i.e",
        "cf",
    ]
)


@dataclass(frozen=True)
class Window:
    """One run of tokens, special tokens included, as the model gets it.

    Args:
        index: Its place in the stream, from 0.
        input_ids: The token ids.
        document: Number in the corpus, from 0, of the document in which it starts.
    """

    index: int
    input_ids: list[int]
    document: int

    @property
    def length(self) -> int:
        """The number of tokens, special tokens included."""
        return len(self.input_ids)


class WindowStream(Iterator[Window]):
    """Windows one after another, with what was left out so far and a hash of what was given out.

    Attributes:
        left_out: Why something was left out → how often.
    """

    def __init__(self, windows: Iterator[Window], left_out: Counter[str]) -> None:
        self._windows = windows
        self._hash = sha256()
        self.left_out = left_out

    def __next__(self) -> Window:
        window = next(self._windows)
        self._hash.update(f"{window.input_ids}".encode())
        return window

    @property
    def corpus_hash(self) -> str:
        """SHA-256, in hexadecimal, over the token ids of the windows given out so far, in order."""
        return self._hash.hexdigest()


def packed_windows(
    corpus: Iterable[str], tokenizer: Any, n: int, *, limit: int | None = None, seed: int = 0, shuffle: bool = True
) -> WindowStream:
    """Windows of exactly ``n`` tokens, packed across documents without a gap or a separator.

    Each window is the tokenizer's special tokens for one sequence around the next tokens of the text; both
    count towards ``n``. What is left at the end of the text, shorter than a window, is left out and counted.

    Law: without ``shuffle`` the windows' contents, joined, are the documents' token ids, joined, up to that
    rest. In any case window ``i`` does not depend on ``limit``, so a longer run begins with a shorter one's
    windows.

    With ``shuffle``, documents are cut at white space into passages of about ``16 n`` characters (some four
    windows), and the passages are drawn at random from a buffer of 2²⁵ characters: neighbouring windows of
    one document are correlated, and files are often sorted (IMDB by label), so the first windows of a corpus
    in order are a poor sample of it. A corpus larger than the buffer is sampled from its beginning first.

    Args:
        corpus: Documents, iterable more than once if several passes are wanted.
        tokenizer: A ``transformers`` tokenizer.
        n: Tokens a window.
        limit: The largest number of windows; all if ``None``.
        seed: Of the shuffling; it has no effect where ``shuffle`` is false.
        shuffle: Sample passages at random rather than read in order.

    Returns:
        The windows, once over.

    Raises:
        RankscopeError: ``n`` leaves no room for text, or (while iterating) the corpus is shorter than a
            window.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
        >>> [w.input_ids for w in packed_windows(["a a a", "b b"], tokenizer, 2, shuffle=False)]
        [[0, 0], [0, 1]]
    """
    prefix, suffix = special_tokens(tokenizer)
    room = n - len(prefix) - len(suffix)
    if room < 1:
        raise RankscopeError(
            f"`n` must be more than the tokenizer's {len(prefix) + len(suffix)} special tokens, got {n}: "
            f"take a larger n"
        )
    left_out: Counter[str] = Counter()

    def windows() -> Iterator[Window]:
        pieces: Iterator[tuple[int, str]] = enumerate(corpus)
        if shuffle:
            pieces = _shuffled(_passages(pieces, PASSAGE_CHARACTERS_PER_TOKEN * n), seed)
        ids: list[int] = []
        starts: list[tuple[int, int]] = []  # (place in ids, document) of every piece that is in ids
        index = 0
        for document, text in pieces:
            starts.append((len(ids), document))
            ids += token_ids(tokenizer, text)
            used = 0
            while len(ids) - used >= room:
                while len(starts) > 1 and starts[1][0] <= used:
                    del starts[0]
                yield Window(index, [*prefix, *ids[used : used + room], *suffix], starts[0][1])
                index += 1
                used += room
            if used:
                del ids[:used]
                starts = [(max(place - used, 0), number) for place, number in starts]
        if not index:
            raise RankscopeError(
                f"`corpus` has {len(ids) + len(prefix) + len(suffix)} tokens with special tokens, a window needs "
                f"n={n}: give more text, or a smaller n"
            )
        left_out["tokens after the last whole window"] += len(ids)

    return WindowStream(islice(windows(), limit), left_out)


def sentence_windows(
    corpus: Iterable[str],
    tokenizer: Any,
    n: int,
    *,
    limit: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    min_length: int = 16,
) -> WindowStream:
    """Windows that hold one sentence each, with special tokens, of ``min_length`` to ``n`` tokens.

    Shorter and longer sentences are left out and counted, none is cut. Sentences are found by
    :func:`sentences`. With ``shuffle`` they are drawn at random from a buffer of 2²⁵ characters. Window ``i``
    does not depend on ``limit``.

    Args:
        corpus: Documents.
        tokenizer: A ``transformers`` tokenizer.
        n: The most tokens of a sentence, special tokens included.
        limit: The largest number of windows; all if ``None``.
        seed: Of the shuffling; it has no effect where ``shuffle`` is false.
        shuffle: Sample sentences at random rather than read in order.
        min_length: The fewest tokens of a sentence, special tokens included.

    Returns:
        The windows, once over.

    Raises:
        RankscopeError: ``n`` is below ``min_length``, or (while iterating) no sentence is fit.
    """
    if n < min_length:
        raise RankscopeError(f"`n` must be at least `min_length`={min_length}, got {n}: take a larger n")
    prefix, suffix = special_tokens(tokenizer)
    left_out: Counter[str] = Counter()

    def windows() -> Iterator[Window]:
        pieces = ((number, sentence) for number, text in enumerate(corpus) for sentence in sentences(text))
        index = 0
        for document, sentence in _shuffled(pieces, seed) if shuffle else pieces:
            ids = [*prefix, *token_ids(tokenizer, sentence), *suffix]
            if len(ids) < min_length:
                left_out[f"sentences shorter than {min_length} tokens"] += 1
            elif len(ids) > n:
                left_out[f"sentences longer than {n} tokens"] += 1
            else:
                yield Window(index, ids, document)
                index += 1
        if not index:
            raise RankscopeError(
                f"`corpus` has no sentence of {min_length} to {n} tokens among its {left_out.total()}: give other "
                f"text, or a larger n"
            )

    return WindowStream(islice(windows(), limit), left_out)


def sentences(text: str) -> Iterator[str]:
    r"""Split text into sentences by a simple rule.

    Blank lines end a sentence, single line ends are white space. Within a paragraph a sentence ends at a full
    stop, question or exclamation mark (and closing quotes or brackets) before white space and a capital,
    digit or opening quote, unless the word before a full stop is a single letter or a usual abbreviation.

    Args:
        text: A document.

    Yields:
        The sentences, white space made single.

    Example:
        >>> list(sentences("Dr. Who ran. He was\nlate!\n\nThe end"))
        ['Dr. Who ran.', 'He was late!', 'The end']
    """
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        start = 0
        for match in _SENTENCE_END.finditer(flat):
            end = match.start()
            word = flat[max(start, flat.rfind(" ", start, end) + 1) : end].lstrip("\"'“‘([")
            if flat[end] == "." and (word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha())):
                continue
            yield flat[start : match.end()].rstrip()
            start = match.end()
        if start < len(flat):
            yield flat[start:]


def random_token_window(window: Window, tokenizer: Any, generator: torch.Generator) -> Window:
    """The window with other tokens: special tokens stay, the rest is drawn uniformly from the ordinary ids.

    Args:
        window: The window to copy.
        tokenizer: Its tokenizer, whose vocabulary without special tokens is drawn from.
        generator: On the CPU; what the ids are drawn with.

    Returns:
        A window of the same index, document and length.
    """
    # all_special_ids leaves out special tokens without a role, such as a chat template's.
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    special = {*tokenizer.all_special_ids, *added, *(token for part in special_tokens(tokenizer) for token in part)}
    ordinary = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special))
    drawn = ordinary[torch.randint(len(ordinary), (window.length,), generator=generator)].tolist()
    ids = [old if old in special else new for old, new in zip(window.input_ids, drawn, strict=True)]
    return Window(window.index, ids, window.document)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text without special tokens, however long it is.

    Args:
        tokenizer: A ``transformers`` tokenizer; truncation or padding that it was saved with is not applied.
        text: The text.
    """
    # verbose=False: a whole document is meant to be longer than the model takes.
    return tokenizer(text, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids the tokenizer puts before and after one sequence.

    Read off an encoded sequence, since not every tokenizer can tell them in another way.

    Args:
        tokenizer: A ``transformers`` tokenizer.

    Raises:
        RankscopeError: They stand within the text or change it.
    """
    probe = "a b c"
    bare = token_ids(tokenizer, probe)
    full = tokenizer(probe, padding=False, truncation=False)["input_ids"]
    for before in range(len(full) - len(bare) + 1):
        if full[before : before + len(bare)] == bare:
            return full[:before], full[before + len(bare) :]
    raise RankscopeError(
        f"the tokenizer {type(tokenizer).__name__} changes a text's own tokens when it adds special ones, so windows "
        f"cannot be packed: give a tokenizer that adds them before and after"
    )


def _passages(documents: Iterator[tuple[int, str]], size: int) -> Iterator[tuple[int, str]]:
    for number, text in documents:
        start = 0
        while len(text) - start > 1.5 * size:
            space = re.compile(r"\s").search(text, start + size, start + 2 * size)
            end = space.start() if space else start + size
            yield number, text[start:end]
            start = end
        yield number, text[start:]


def _shuffled(pieces: Iterator[tuple[int, str]], seed: int) -> Iterator[tuple[int, str]]:
    # random() is the one draw that Python promises to keep the same for a seed.
    draw = random.Random(seed).random
    held: list[tuple[int, str]] = []
    characters = 0

    def take() -> tuple[int, str]:
        place = int(draw() * len(held))
        held[place], held[-1] = held[-1], held[place]
        return held.pop()

    for piece in pieces:
        held.append(piece)
        characters += len(piece[1])
        while characters > SHUFFLE_CHARACTERS:
            taken = take()
            characters -= len(taken[1])
            yield taken
    while held:
        yield take()
