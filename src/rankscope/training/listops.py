r"""Long ListOps of the Long Range Arena: nested lists of digits under MIN, MAX, MED and SM, labelled by their value.

Our own generator of the published grammar: a tree begins at depth 1; below depth 10 it is a digit with probability .75
and else an operator over 2 to 10 trees, at depth 10 always a digit. Kept are trees longer than 500 and shorter than
2,000 tokens, each once. Only 8 % of the drawn trees are that long.

The draws use nothing but ``random.Random.random``, whose sequence Python promises to keep for a seed.

References:
    Tay et al. 2020, arXiv 2011.04006, §2.2.1; Nangia and Bowman 2018, arXiv 1804.06028.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rankscope._errors import RankscopeError
from rankscope.spectrum.parts import disk_error, publish, temporary_name

OPERATORS = ("MIN", "MAX", "MED", "SM")
DIGITS = tuple("0123456789")
CLOSE = "]"
#: RoBERTa's special tokens at RoBERTa's ids.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
VOCABULARY = (*SPECIAL_TOKENS, *DIGITS, *(f"[{name}" for name in OPERATORS), CLOSE)
COLUMNS = ("Source", "Target")
#: In this order an expression that two splits would share goes to the first, so that `train` never moves the others.
SPLITS = ("test", "dev", "train")
#: Draws in a row without a new expression, after which the bounds are taken to be exhausted.
PATIENCE = 100_000


@dataclass(frozen=True)
class Grammar:
    """The published grammar's numbers.

    Args:
        max_depth: At this depth every tree is a digit.
        max_arguments: Trees below an operator: 2 to this many, uniform.
        digit_share: Probability of a digit above ``max_depth``.
        min_length: Kept trees have more tokens than this (1 for a digit, 2 for an operator beside its children).
        max_length: Kept trees have fewer tokens than this.
    """

    max_depth: int = 10
    max_arguments: int = 10
    digit_share: float = 0.75
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self) -> None:
        for name, value, least in (("max_depth", self.max_depth, 2), ("max_arguments", self.max_arguments, 2)):
            if value < least:
                raise RankscopeError(f"`{name}` must be at least {least}, got {value}")
        if not 0 <= self.digit_share < 1:
            raise RankscopeError(f"`digit_share` must be in [0, 1), got {self.digit_share}")
        if self.min_length < 0 or self.max_length < self.min_length + 2:
            raise RankscopeError(
                f"`max_length` must be at least `min_length` + 2 (lengths strictly between are kept), got "
                f"{self.min_length} and {self.max_length}"
            )


@dataclass(frozen=True)
class Expression:
    """An expression and its value.

    Args:
        source: Tokens with single spaces, as ``[MAX 2 9 [MIN 4 7 ] 0 ]``.
        target: Its value, 0 to 9.
    """

    source: str
    target: int


def apply(operator: str, values: Sequence[int]) -> int:
    """Value of an operator; MED of an even count is truncated, SM is the sum modulo 10.

    Example:
        >>> apply("MED", [1, 2, 5, 9]), apply("SM", [7, 8])
        (3, 5)
    """
    if operator == "MIN":
        return min(values)
    if operator == "MAX":
        return max(values)
    if operator == "SM":
        return sum(values) % 10
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def draw(random: Random, grammar: Grammar) -> Expression | None:
    """Draw one tree; ``None`` if its length is outside the bounds.

    Example:
        >>> draw(Random(3), Grammar(min_length=4, max_length=30)) is None
        True
    """
    tokens: list[str] = []
    value = _tree(random, grammar, tokens, 1)
    if value is None or not grammar.min_length < len(tokens) < grammar.max_length:
        return None
    return Expression(" ".join(tokens), value)


def _tree(random: Random, grammar: Grammar, tokens: list[str], depth: int) -> int | None:
    """Append a tree's tokens and return its value, ``None`` once they are too many."""
    if depth >= grammar.max_depth or random.random() < grammar.digit_share:
        digit = int(random.random() * 10)
        tokens.append(DIGITS[digit])
        return digit
    operator = OPERATORS[int(random.random() * len(OPERATORS))]
    tokens.append(f"[{operator}")
    values = []
    for _ in range(2 + int(random.random() * (grammar.max_arguments - 1))):
        value = _tree(random, grammar, tokens, depth + 1)
        if value is None or len(tokens) >= grammar.max_length:
            return None
        values.append(value)
    tokens.append(CLOSE)
    return apply(operator, values)


def expressions(split: str, count: int, *, seed: int, grammar: Grammar | None = None) -> Iterator[Expression]:
    """Stream a split's expressions, no two equal.

    Laws: a split is a function of its name, the seed and the grammar, and a shorter one begins a longer one.

    Args:
        split: ``train``, ``dev`` or ``test``.
        count: How many.
        seed: Of the draws.
        grammar: LRA's by default.

    Yields:
        The expressions.

    Raises:
        RankscopeError: ``split`` is unknown, or the grammar has not so many expressions within its bounds.

    Example:
        >>> [e.source for e in expressions("dev", 2, seed=0, grammar=Grammar(min_length=3, max_length=8))]
        ['[MIN 9 3 6 ]', '[SM 2 2 6 ]']
    """
    if split not in SPLITS:
        raise RankscopeError(f"`split` must be one of {', '.join(SPLITS)}, got {split!r}")
    grammar = grammar or Grammar()
    random, seen, misses = Random(f"listops {split} {seed}"), set[str](), 0
    while len(seen) < count:
        found = draw(random, grammar)
        if found is None or found.source in seen:
            misses += 1
            if misses > PATIENCE:
                raise RankscopeError(
                    f"`count` is {count}, but after {len(seen)} expressions {PATIENCE} draws gave no new one longer "
                    f"than {grammar.min_length} and shorter than {grammar.max_length}: widen the bounds or ask for less"
                )
            continue
        misses = 0
        seen.add(found.source)
        yield found


def write_listops(folder: Path, counts: dict[str, int], *, seed: int, grammar: Grammar | None = None) -> dict[str, int]:
    """Write ``train.tsv``, ``dev.tsv`` and ``test.tsv`` with the columns Source and Target, each whole or not at all.

    No expression is in two splits: one that would be is left out of the later of test, dev, train.

    Args:
        folder: Where to write; made if absent.
        counts: Expressions of each split, as ``{"train": 96_000, "dev": 2_000, "test": 2_000}`` in LRA.
        seed: Of the draws.
        grammar: LRA's by default.

    Returns:
        How many each split holds.

    Raises:
        RankscopeError: Too many are asked for, or the disk can't hold them.
    """
    taken, written = set[str](), {}
    for split in (name for name in SPLITS if name in counts):
        path = folder / f"{split}.tsv"
        temporary = temporary_name(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.write("\t".join(COLUMNS) + "\n")
                written[split] = 0
                for found in expressions(split, counts[split], seed=seed, grammar=grammar):
                    if found.source not in taken:
                        taken.add(found.source)
                        written[split] += 1
                        file.write(f"{found.source}\t{found.target}\n")
            publish(temporary, path)
        except OSError as error:
            raise disk_error(path, error) from None
        finally:
            temporary.unlink(missing_ok=True)
    return written


def listops_tokenizer() -> Any:
    """Build ListOps' own tokenizer: one token a digit, an opened operator or a bracket, ``<s>`` and ``</s>`` around.

    LRA's own files may have the parentheses of the binary tree; they are dropped, as LRA's reader does.

    Returns:
        A ``PreTrainedTokenizerFast`` of 19 tokens.

    Example:
        >>> tokenizer = listops_tokenizer()
        >>> tokenizer.convert_ids_to_tokens(tokenizer("( ( [MAX 2 ) 9 ) ]")["input_ids"])
        ['<s>', '[MAX', '2', '9', ']', '</s>']
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: number for number, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Replace("(", " "), normalizers.Replace(")", " ")])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", ids["<s>"]), ("</s>", ids["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
    )
