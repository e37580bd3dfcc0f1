"""Layers and heads by random sample: ``random:K``."""

import torch

from rankscope._errors import RankscopeError

PREFIX = "random:"


def sample_size(wanted: str, argument: str) -> int:
    """Read K of ``random:K``.

    Raises:
        RankscopeError: It is anything else.

    Example:
        >>> sample_size("random:4", "heads")
        4
    """
    number = wanted.removeprefix(PREFIX)
    if not wanted.startswith(PREFIX) or not (number.isascii() and number.isdigit()) or int(number) < 1:
        raise RankscopeError(f"`{argument}` must be numbers, or random:K with K at least 1 as random:4, got {wanted!r}")
    return int(number)


def drawn(wanted: str, argument: str, count: int, generator: torch.Generator) -> list[int]:
    """Draw K of the numbers below ``count`` without repetition, each set as likely as any other; ascending.

    Args:
        wanted: ``random:K``.
        argument: Whose value it is, for the error.
        count: How many there are.
        generator: Draws; the same one gives the same numbers.

    Raises:
        RankscopeError: There are fewer than K.

    Example:
        >>> drawn("random:3", "layers", 3, torch.Generator().manual_seed(0))
        [0, 1, 2]
    """
    size = sample_size(wanted, argument)
    if size > count:
        raise RankscopeError(f"`{argument}` asks for a sample of {size}, but there are {count}: ask for fewer, or all")
    return sorted(torch.randperm(count, generator=generator)[:size].tolist())
