"""Where a row's own tokens are: positions counted from its first valid token, never from the padded length.

Everything that compresses a sequence works on *compacted* rows, in which the valid tokens come first, in order,
and zeros follow. So left padding, right padding and no padding give the same numbers, and a padded token's
content, NaN included, is gone before any projection sees it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankscope._masks import check_key_padding_mask


class TokenLayout(NamedTuple):
    """The valid tokens of each row of a batch.

    Attributes:
        n: The padded length.
        padding: bool ``(b, n)``, True = padding, or ``None`` where every token is valid.
        order: ``(b, n)``, the positions of the valid tokens first, in order, then those of the padding.
        lengths: ``(b,)``, how many tokens of each row are valid.
    """

    n: int
    padding: Tensor | None = None
    order: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def absent(self) -> Tensor | None:
        """Bool ``(b, n)``: True after the last valid token of a compacted row; ``None`` without padding."""
        if self.lengths is None:
            return None
        return torch.arange(self.n, device=self.lengths.device) >= self.lengths[:, None]


def token_layout(key_padding_mask: Tensor | None, batch: int, n: int) -> TokenLayout:
    """Read a padding mask once, so that several projections and layers may share it.

    Args:
        key_padding_mask: bool ``(b, n)``, True = padding, or ``None``.
        batch: Number of rows.
        n: Padded length.

    Returns:
        The layout; without a mask it costs nothing.

    Raises:
        RankscopeError: The mask is not bool or not ``(b, n)``.

    Example:
        >>> token_layout(torch.tensor([[True, True, False, False]]), 1, 4).order
        tensor([[2, 3, 0, 1]])
    """
    check_key_padding_mask(key_padding_mask, batch, n)
    if key_padding_mask is None:
        return TokenLayout(n)
    position = torch.arange(n, device=key_padding_mask.device)
    # A sum, since ONNX multiplies no tensor by a symbolic n.
    order = torch.argsort(torch.where(key_padding_mask, position + n, position), dim=-1)
    return TokenLayout(n, key_padding_mask, order, (~key_padding_mask).sum(dim=-1))


def _along_tokens(index: Tensor, x: Tensor) -> Tensor:
    """Give ``index (b, n)`` the shape of ``x (b, ..., n, c)``."""
    return index.view(index.shape[0], *(1,) * (x.ndim - 3), -1, 1).expand(*x.shape[:-2], index.shape[-1], x.shape[-1])


def compact(x: Tensor, layout: TokenLayout) -> Tensor:
    """Move the valid tokens of each row to its front and set the rest to zero.

    Args:
        x: ``(b, ..., n, c)``.
        layout: Its :func:`token_layout`.

    Returns:
        ``(b, ..., n, c)``; ``x`` itself where there is no padding.

    Example:
        >>> x = torch.tensor([[[9.0], [1.0], [2.0]]])
        >>> compact(x, token_layout(torch.tensor([[True, False, False]]), 1, 3)).flatten()
        tensor([1., 2., 0.])
    """
    if layout.order is None:
        return x
    moved = x.gather(-2, _along_tokens(layout.order, x))
    return drop_absent(moved, layout)


def drop_absent(x: Tensor, layout: TokenLayout) -> Tensor:
    """Set what follows the valid tokens of compacted rows ``x (b, ..., n, c)`` to zero."""
    absent = layout.absent
    if absent is None:
        return x
    return x.masked_fill(absent.view(absent.shape[0], *(1,) * (x.ndim - 3), -1, 1), 0)


def restore(x: Tensor, layout: TokenLayout) -> Tensor:
    """Undo :func:`compact`: each token back to its place, zeros at the padding.

    Example:
        >>> layout = token_layout(torch.tensor([[True, False, False]]), 1, 3)
        >>> restore(torch.tensor([[[1.0], [2.0], [0.0]]]), layout).flatten()
        tensor([0., 1., 2.])
    """
    if layout.order is None or layout.padding is None:
        return x
    moved = x.gather(-2, _along_tokens(torch.argsort(layout.order, dim=-1), x))
    padding = layout.padding
    return moved.masked_fill(padding.view(padding.shape[0], *(1,) * (x.ndim - 3), -1, 1), 0)


def valid_ones(x: Tensor, layout: TokenLayout) -> Tensor:
    """Return ``(b or 1, 1, n, 1)`` in the dtype of ``x``: 1 at the valid tokens of compacted rows, 0 after them."""
    absent = layout.absent
    if absent is None:
        return x.new_ones(1, 1, layout.n, 1)
    return (~absent).to(x.dtype)[:, None, :, None]


class Segments(NamedTuple):
    """``k`` runs of tokens that cover each row.

    Attributes:
        tokens: ``(b or 1, k, longest)``, which tokens of the compacted row.
        inside: bool, the same shape: False where a segment is shorter than the longest.
    """

    tokens: Tensor
    inside: Tensor


def segments(layout: TokenLayout, k: int, device: torch.device) -> Segments:
    r"""Cut each row into ``min(k, m)`` runs, ``m`` its own number of valid tokens.

    Segment i holds the tokens :math:`\lfloor i m / k \rfloor \dots \lceil (i+1) m / k \rceil - 1`, so neighbours
    share at most one token and, where k divides m, none. A row of ``m <= k`` tokens keeps every one of them.

    Args:
        layout: Where the tokens are.
        k: The largest number of segments.
        device: Where the indices live.

    Returns:
        Index and membership; segments past ``min(k, m)`` have no member.

    Example:
        >>> segments(TokenLayout(5), 2, torch.device("cpu")).tokens
        tensor([[[0, 1, 2, 3],
                 [2, 3, 4, 4]]])
    """
    lengths = torch.full((1,), layout.n, device=device) if layout.lengths is None else layout.lengths
    m = lengths[:, None]
    count = m.clamp(max=k)
    row = torch.arange(k, device=device)
    divisor = count.clamp(min=1)
    start = row * m // divisor
    end = ((row + 1) * m + divisor - 1) // divisor
    end = torch.where(row < count, end, start)
    index = start[..., None] + torch.arange(layout.n // k + 2, device=device)
    return Segments(index.clamp(max=layout.n - 1), index < end[..., None])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Gather ``x (b, g, n, c)`` at ``index (b or 1, k, longest)`` into ``(b, g, k, longest, c)``."""
    flat = index.flatten(1)
    taken = x.index_select(-2, flat[0]) if flat.shape[0] == 1 else x.gather(-2, _along_tokens(flat, x))
    return taken.unflatten(-2, index.shape[1:])


def _even(layout: TokenLayout, k: int) -> bool:
    """Whether plain reshaping does: no padding, k divides n (never asked of a symbolic length)."""
    return layout.lengths is None and not torch.compiler.is_compiling() and layout.n % k == 0


def pool_mean(x: Tensor, layout: TokenLayout, k: int) -> Tensor:
    """Mean of each of the row's own segments.

    Args:
        x: Compacted, ``(b, g, n, c)``.
        layout: Where its tokens are.
        k: Number of segments.

    Returns:
        ``(b, g, k, c)``; zeros for a segment without a token.

    Example:
        >>> pool_mean(torch.arange(4.0).view(1, 1, 4, 1), TokenLayout(4), 2).flatten()
        tensor([0.5, 2.5])
    """
    if _even(layout, k):
        return x.unflatten(-2, (k, layout.n // k)).mean(dim=-2)
    cut = segments(layout, k, x.device)
    weight = cut.inside.to(x.dtype) / cut.inside.sum(dim=-1, keepdim=True).clamp(min=1)
    weight = weight[:, None, :, None, :]
    return (weight @ _take(x, cut.tokens)).squeeze(-2)


def pool_max(x: Tensor, layout: TokenLayout, k: int) -> Tensor:
    """Largest entry of each of the row's own segments, channel by channel; arguments as :func:`pool_mean`.

    Example:
        >>> pool_max(torch.arange(4.0).view(1, 1, 4, 1), TokenLayout(4), 2).flatten()
        tensor([1., 3.])
    """
    if _even(layout, k):
        return x.unflatten(-2, (k, layout.n // k)).amax(dim=-2)
    cut = segments(layout, k, x.device)
    inside = cut.inside[:, None, :, :, None]
    largest = _take(x, cut.tokens).masked_fill(~inside, -torch.inf).amax(dim=-2)
    return torch.where(inside.any(dim=-2), largest, 0.0)


def pooled_absent(layout: TokenLayout, k: int, device: torch.device) -> Tensor | None:
    """Bool ``(b or 1, 1, 1, k)``: the segments that hold no token, ``None`` where all do.

    A row with no token at all has none absent: its pooled keys and values are zeros, and so is its output.
    """
    if layout.lengths is None and not torch.compiler.is_compiling() and layout.n >= k:
        return None
    lengths = torch.full((1,), layout.n, device=device) if layout.lengths is None else layout.lengths
    return absent_beyond(lengths, k)


def absent_beyond(count: Tensor, k: int) -> Tensor:
    """Bool ``(b, 1, 1, k)``: True from ``count (b,)`` on, save in rows whose count is 0."""
    row = torch.arange(k, device=count.device)
    absent = (row >= count[:, None]) & (count[:, None] > 0)
    return absent[:, None, None, :]
