"""Null models: what a head's spectrum would be without the thing one wants to credit.

A long tail alone says little: softmax and scale make one out of noise. Each null keeps a head's mask, bias and
sinks and gives up one thing more, on the same windows as the trained measurement. A null is a row of
:data:`NULLS`: which forward its heads come from, and how such a head becomes the null's.
"""

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.spectrum.heads import Head, row_variance
from rankscope.spectrum.heads import deviation as deviation_of

DEFAULT_NULLS = ("untrained_scaled", "gaussian", "shuffled_rows")
QUERY_AND_KEY_NEEDED = (
    "null 'gaussian_moments' needs each head's query and key, and this model hands out only its weights "
    "(it does not use the attention interface): leave it out of --nulls"
)
MATRIX_FREE_NULLS = ("untrained_scaled", "gaussian")


@dataclass(frozen=True)
class Null:
    """One row of the table.

    Args:
        forward: Whose heads the null starts from: ``"trained"`` (the measured model on the measured text),
            ``"untrained"`` (fresh weights, same text) or ``"random_tokens"`` (trained weights, random ids).
        head: ``(head, deviation, generator) -> head of the null``; ``deviation`` is the trained head's
            content-logit deviation in the same window.
        meaning: What the null gives up, in words a reader of a report understands.
        dense: Whether it needs P written down.
    """

    forward: str
    head: Callable[[Head, float, torch.Generator], Head]
    meaning: str
    dense: bool = False


def as_is(head: Head, deviation: float, generator: torch.Generator) -> Head:
    """The head itself: the null lies in the forward it comes from."""
    return head


def rescaled(head: Head, deviation: float, generator: torch.Generator) -> Head:
    """The head with its content logits brought to the trained head's deviation."""
    own = deviation_of(head, content=True)
    factor = deviation / own if own > 0 else 1.0
    if head.weights is None and head.softcap is None:
        return replace(head, scaling=head.scaling * factor)
    if head.weights is None:
        content = factor * head.content_logits()
        return head.with_map(head.map_of(content if head.bias is None else content + head.bias))
    return head.with_map(masked_softmax(factor * head.content_logits(), head.allowed()))


def gaussian(head: Head, deviation: float, generator: torch.Generator) -> Head:
    """Independent standard normal query and key of the head's own width, at the trained deviation."""
    n, m = head.shape
    query = torch.randn(n, head.width, generator=generator).to(head.device)
    key = torch.randn(m, head.width, generator=generator).to(head.device)
    if head.weights is not None:
        noise = query @ key.mT
        own = math.sqrt(float(row_variance(noise, head.allowed()).mean()))
        return head.with_map(masked_softmax(noise * (deviation / own), head.allowed()))
    return rescaled(replace(head, query=query, key=key, scaling=1.0, softcap=None), deviation, generator)


def gaussian_moments(head: Head, deviation: float, generator: torch.Generator) -> Head:
    """Normal query and key with the means and covariances that the head's tokens have in this window."""
    if head.query is None or head.key is None:
        raise RankscopeError(QUERY_AND_KEY_NEEDED)
    query = normal_like(head.query, generator)
    return replace(head, query=query, key=normal_like(head.key, generator))


def shuffled_rows(head: Head, deviation: float, generator: torch.Generator) -> Head:
    """Every row's allowed entries in random order: row histograms kept, alignment between rows gone."""
    return head.with_map(shuffle_allowed(head.context_map(), head.allowed(), generator))


def shuffled_columns(head: Head, deviation: float, generator: torch.Generator) -> Head:
    """Every column's allowed entries in random order, rows brought back to their sums: sinks are kept."""
    P = head.context_map()
    allowed = head.allowed()
    shuffled = shuffle_allowed(P.mT, None if allowed is None else allowed.mT, generator).mT
    sums = shuffled.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(P.dtype).tiny)
    return head.with_map(shuffled / sums * P.sum(dim=-1, keepdim=True))


NULLS: Registry[Null] = Registry(
    "nulls",
    {
        "untrained": Null("untrained", as_is, "fresh weights of the same architecture"),
        "untrained_scaled": Null(
            "untrained", rescaled, "fresh weights, logits scaled to each trained head's deviation"
        ),
        "gaussian": Null("trained", gaussian, "independent Gaussian query and key at the same logit deviation"),
        "gaussian_moments": Null(
            "trained", gaussian_moments, "Gaussian query and key with the head's own means and covariances"
        ),
        "shuffled_rows": Null("trained", shuffled_rows, "the trained map with each row's entries shuffled", dense=True),
        "shuffled_columns": Null(
            "trained",
            shuffled_columns,
            "the trained map with each column's entries shuffled (column sums kept)",
            dense=True,
        ),
        "random_tokens": Null("random_tokens", as_is, "trained weights fed random tokens"),
    },
)


def choose_nulls(choice: str | Iterable[str] | None, *, matrix_free: bool = False) -> tuple[str, ...]:
    """Resolve ``--nulls``: ``all``, ``none``, names with commas, a sequence of names, or ``None`` (the default).

    Args:
        choice: What the user said.
        matrix_free: Whether P is never written down: nulls that shuffle its entries are then refused.

    Raises:
        RankscopeError: An unknown name, or a null that needs P.

    Example:
        >>> choose_nulls("gaussian,shuffled_rows")
        ('gaussian', 'shuffled_rows')
        >>> choose_nulls("none")
        ()
    """
    if choice is None:
        return MATRIX_FREE_NULLS if matrix_free else DEFAULT_NULLS
    names = [part.strip() for part in choice.split(",")] if isinstance(choice, str) else list(choice)
    if names == ["all"]:
        return tuple(name for name, null in NULLS.items() if not (matrix_free and null.dense))
    if names in (["none"], [""], []):
        return ()
    for name in names:
        if NULLS[name].dense and matrix_free:
            raise RankscopeError(
                f"null {name!r} shuffles entries of P, which matrix-free never writes down: leave it out"
            )
    return tuple(name for name in NULLS if name in names)


def generator_for(seed: int, name: str, window: int, layer: int, head: int) -> torch.Generator:
    """A generator for one draw, the same whatever the batch, the worker or the part it happens in."""
    words = np.random.SeedSequence([seed, zlib.crc32(name.encode()), window, layer, head]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(words[0]) << 31 ^ int(words[1]))


def masked_softmax(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over allowed entries."""
    floor = torch.finfo(logits.dtype).min
    return torch.softmax(logits if allowed is None else logits.masked_fill(~allowed, floor), dim=-1)


def normal_like(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Draw as many normal tokens as given, with their mean and covariance; ``(n, d)`` to ``(n, d)``."""
    tokens = tokens.double()
    mean = tokens.mean(dim=0)
    centred = tokens - mean
    # eigh, not Cholesky: a head whose tokens span fewer than d directions has a singular covariance.
    variance, directions = torch.linalg.eigh(centred.mT @ centred / len(tokens))
    factor = directions * variance.clamp_min(0).sqrt()
    normal = torch.randn(tokens.shape, generator=generator, dtype=torch.float64).to(tokens.device)
    return (mean + normal @ factor.mT).float()


def shuffle_allowed(P: Tensor, allowed: Tensor | None, generator: torch.Generator) -> Tensor:
    """Permute the allowed entries of every row independently; disallowed ones stay where they are."""
    keys = torch.rand(P.shape, generator=generator).to(P.device)
    if allowed is None:
        return P.gather(-1, keys.argsort(dim=-1))
    allowed = allowed.expand_as(P)
    keys = keys.masked_fill(~allowed, 2.0)
    places = (~allowed).to(torch.uint8).argsort(dim=-1, stable=True)
    drawn = P.gather(-1, keys.argsort(dim=-1, stable=True))
    return torch.empty_like(P).scatter_(-1, places, drawn)
