"""More positions than a model was trained with: its table of embeddings tiled, its projections stretched."""

from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention._layout import TokenLayout
from rankscope.models.projections import resample


def tiled(table: Tensor, n: int, *, skip: int = 0, offset: int | None = None) -> Tensor:
    r"""Position embeddings for n tokens, the trained ones again and again.

    .. math:: \text{row}_{\text{offset} + i} = \text{trained}_{\text{skip} + (i \bmod L)}, \quad i < n

    Args:
        table: The trained table, ``(skip + L, d)``.
        n: Number of tokens.
        skip: Rows before the first token's; RoBERTa's are ``padding_idx + 1``, BERT has none.
        offset: Rows to put before the first token's, default ``skip``: copies of the trained ones as far as there
            are any, then zeros.

    Returns:
        ``(offset + n, d)``.

    References:
        Beltagy et al. 2020, arXiv 2004.05150, section 5 (Longformer starts from RoBERTa's, copied).

    Example:
        >>> tiled(torch.tensor([[9.0], [0.0], [1.0], [2.0]]), 5, skip=1).flatten().tolist()
        [9.0, 0.0, 1.0, 2.0, 0.0, 1.0]
    """
    offset = skip if offset is None else offset
    rows = skip + torch.arange(n, device=table.device) % (table.shape[0] - skip)
    head = table[: min(skip, offset)]
    return torch.cat([head, table.new_zeros(offset - head.shape[0], table.shape[1]), table[rows]])


def position_table(model: nn.Module) -> tuple[nn.Module, nn.Embedding, int]:
    """The embeddings of an encoder, their position table, and the number of rows before the first token's.

    Raises:
        RankscopeError: No such table: positions are relative, rotary or none.
    """
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding):
            return module, table, 0 if table.padding_idx is None else table.padding_idx + 1
    raise RankscopeError(
        f"`model` ({type(model).__name__}) has no table of absolute position embeddings, so there is none to tile"
    )


def extend_positions(model: nn.Module, n: int) -> None:
    """Let an encoder take n tokens, in place, by :func:`tiled`; one that holds as many already stays as it is.

    Args:
        model: BERT, RoBERTa, ELECTRA or another with a table of absolute positions.
        n: Number of tokens.

    Raises:
        RankscopeError: No such table.
    """
    embeddings, table, skip = position_table(model)
    if table.num_embeddings - skip >= n:
        return
    weight = tiled(table.weight.detach(), n, skip=skip)
    longer = nn.Embedding(weight.shape[0], weight.shape[1], padding_idx=table.padding_idx, _weight=weight)
    longer.weight.requires_grad_(table.weight.requires_grad)
    embeddings.position_embeddings = longer
    rows = weight.shape[0]
    for name, values in (("position_ids", torch.arange(rows)), ("token_type_ids", torch.zeros(rows, dtype=torch.long))):
        if name in embeddings._buffers:
            embeddings.register_buffer(name, values[None].to(weight.device), persistent=False)
    config: Any = getattr(model, "config", None)
    config.max_position_embeddings = rows


def stretched(E: Tensor, n: int) -> Tensor:
    """A matrix for n tokens that does to every text what E does, by ``resample``; exact where E's length divides n.

    Args:
        E: ``(..., k, N)``, of length rule ``"interpolate"``.
        n: At least N.

    Returns:
        ``(..., k, n)``.

    Example:
        >>> stretched(torch.tensor([[0.5, 0.5]]), 4)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return resample(E, TokenLayout(n))
