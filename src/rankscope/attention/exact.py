"""Softmax attention itself, written out and fused: the yardsticks of every other mechanism."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rankscope._errors import RankscopeError
from rankscope._masks import check_key_padding_mask
from rankscope.attention._contract import Mechanism, register


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse tensors that are not ``(b, h, n, head_dim)`` and ``(b, h, m, head_dim)`` twice.

    Raises:
        RankscopeError: Which tensor, what came.
    """
    if query.ndim != 4:
        raise RankscopeError(
            f"`query` must have shape (batch, heads, n, head_dim), got {tuple(query.shape)}: "
            "split the heads off before the call"
        )
    batch, heads, _, head_dim = query.shape
    if key.ndim != 4 or (*key.shape[:2], key.shape[3]) != (batch, heads, head_dim):
        raise RankscopeError(
            f"`key` must have shape (batch={batch}, heads={heads}, m, head_dim={head_dim}), got {tuple(key.shape)}: "
            "repeat grouped key heads to the number of query heads"
        )
    if value.ndim != 4 or value.shape[:3] != key.shape[:3]:
        raise RankscopeError(
            f"`value` must have the key's batch, heads and length {tuple(key.shape[:3])}, got {tuple(value.shape)}"
        )


def check_causal(n: int, m: int) -> None:
    """Refuse causality between two lengths, where "before" has no meaning.

    Raises:
        RankscopeError: ``n != m``.
    """
    if n != m:
        raise RankscopeError(
            f"`is_causal` needs query and key of one length, got n={n} and m={m}: "
            "in cross-attention no key lies before or after a query"
        )


def _allowed(query: Tensor, key: Tensor, key_padding_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Bool ``(b or 1, 1, n or 1, m)``: True where a query may look; ``None`` for everywhere."""
    n, m = query.shape[-2], key.shape[-2]
    check_key_padding_mask(key_padding_mask, key.shape[0], m)
    allowed = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
    if is_causal:
        check_causal(n, m)
        lower = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
        allowed = lower[None, None] if allowed is None else allowed & lower
    return allowed


def exact_naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    r"""Softmax attention with the n × m matrix written out.

    .. math:: \mathrm{softmax}(\text{scaling} \cdot Q K^\top) V

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, m, head_dim)``.
        value: ``(b, h, m, head_dim)``.
        key_padding_mask: bool ``(b, m)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        is_causal: Whether query i sees keys 0 … i only (``n == m``).

    Returns:
        ``(b, h, n, head_dim)``; zeros for a query that may look nowhere.

    Raises:
        RankscopeError: Shapes, mask, or causality between two lengths.

    Example:
        >>> x = torch.eye(2).view(1, 1, 2, 2)
        >>> exact_naive(x, x, x, is_causal=True)[0, 0, 0]
        tensor([1., 0.])
    """
    check_shapes(query, key, value)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    allowed = _allowed(query, key, key_padding_mask, is_causal)
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        key, value = key.masked_fill(padded, 0), value.masked_fill(padded, 0)
    logits = scaling * query @ key.mT
    if allowed is None:
        return logits.softmax(dim=-1) @ value
    P = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(dim=-1).masked_fill(~allowed, 0)
    return P @ value


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """PyTorch's fused softmax attention behind the contract; arguments and result as :func:`exact_naive`.

    Example:
        >>> x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
        >>> torch.testing.assert_close(sdpa(x, x, x), exact_naive(x, x, x))
    """
    check_shapes(query, key, value)
    if key_padding_mask is None:
        if is_causal:
            check_causal(query.shape[-2], key.shape[-2])
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scaling)
    allowed = _allowed(query, key, key_padding_mask, is_causal)
    assert allowed is not None
    # A softmax over nothing is NaN: such a query is let look everywhere, at zeros, and its output then dropped.
    nowhere = ~allowed.any(dim=-1, keepdim=True)
    padded = key_padding_mask[:, None, :, None]
    output = scaled_dot_product_attention(
        query, key.masked_fill(padded, 0), value.masked_fill(padded, 0), attn_mask=allowed | nowhere, scale=scaling
    )
    return output.masked_fill(nowhere, 0)


register(
    Mechanism(
        name="exact_naive",
        function=exact_naive,
        exact=True,
        cost="n^2",
        knob=None,
        source="Vaswani et al. 2017, arXiv 1706.03762",
    )
)
register(
    Mechanism(
        name="sdpa",
        function=sdpa,
        exact=True,
        cost="n^2",
        knob=None,
        source="torch.nn.functional.scaled_dot_product_attention; Dao et al. 2022, arXiv 2205.14135",
    )
)
