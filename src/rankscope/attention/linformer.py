"""Linformer's attention on given queries, keys and values: the sequence of keys compressed to k before the softmax.

The layer that also owns the weights, and so can choose the order of the products, is
:mod:`rankscope.models.linformer_attention`; the form for decoders is :mod:`rankscope.attention.linformer_causal`.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rankscope._errors import RankscopeError
from rankscope.attention._contract import Mechanism, register
from rankscope.attention._layout import TokenLayout, compact, pool_mean, pooled_absent, token_layout
from rankscope.attention.exact import check_shapes

DEFAULT_K = 128


def apply_matrix(E: Tensor, x: Tensor) -> Tensor:
    """Multiply compacted tokens by a projection from the left, without copying either.

    Args:
        E: ``(k, n)``, ``(g, k, n)`` or ``(b, g, k, n)`` with g one or the number of heads.
        x: ``(b, g, n, c)``; with g = 1 each head's matrix meets the same tokens.

    Returns:
        ``(b, g, k, c)``, g the larger of the two.

    Example:
        >>> import torch
        >>> apply_matrix(torch.ones(3, 1, 2), torch.ones(4, 1, 2, 5)).shape
        torch.Size([4, 3, 1, 5])
    """
    if E.ndim == 2:
        return E @ x
    if x.shape[1] == 1 and E.shape[-3] > 1:
        # One product with all heads' rows: broadcasting would copy x once for each head.
        stacked = E.flatten(-3, -2) @ x.squeeze(1)
        return stacked.unflatten(-2, E.shape[-3:-1])
    return E @ x


def compressed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    absent: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of ``query (b, h, n, head_dim)`` over k compressed keys and values ``(b, h, k, head_dim)``.

    Args:
        query: The queries.
        key: Compressed keys.
        value: Compressed values.
        absent: bool, broadcastable to ``(b, h, 1, k)``, True where there is no key; never a whole row.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        dropout: Probability with which a probability is dropped.

    Returns:
        ``(b, h, n, head_dim)``.
    """
    mask = None if absent is None else ~absent
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)


def check_projection(name: str, E: Tensor, heads: int, n: int) -> None:
    """Refuse a projection that is not ``(k, n)`` or ``(heads, k, n)`` or does not reach ``n`` tokens.

    Raises:
        RankscopeError: Which one, what came.
    """
    if E.ndim not in (2, 3) or (E.ndim == 3 and E.shape[0] != heads):
        raise RankscopeError(
            f"`{name}` must have shape (k, n) or (heads={heads}, k, n), got {tuple(E.shape)}: it acts from the left"
        )
    k, longest = E.shape[-2:]
    if k == 0 or k > longest:
        raise RankscopeError(f"`{name}` must have 1 <= k <= n rows, got (k, n) = ({k}, {longest})")
    if n > longest:
        raise RankscopeError(
            f"`{name}` must have shape (k, n={n}), got {tuple(E.shape)}: build it for this length, "
            "or cut the input to it"
        )


def linformer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    E: Tensor | None = None,
    F: Tensor | None = None,
    k: int | None = None,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    r"""Attention over keys and values compressed along the sequence.

    .. math:: \mathrm{softmax}(\text{scaling} \cdot Q (E K)^\top) (F V)

    Columns of E and F are taken by a token's rank among its row's valid tokens, so a row gives the same output
    padded on the left, on the right or not at all. With ``k = n`` and E = F = I this is softmax attention. It
    has no causal form (each compressed key mixes all positions), hence no ``is_causal``.

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, m, head_dim)``; m may differ from n (cross-attention).
        value: ``(b, h, m, head_dim)``.
        E: Projection of the keys, ``(k, m)`` or ``(h, k, m)``; longer ones are cut to the first m columns.
            Without it keys and values are pooled: means of k equal segments of each row's own tokens.
        F: Projection of the values; default: E.
        k: Projected length of the pooled form, ``1 <= k <= m``; default ``DEFAULT_K`` = 128. A row of at most
            k tokens keeps them all.
        key_padding_mask: bool ``(b, m)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.

    Returns:
        ``(b, h, n, head_dim)``; zeros for a row without a valid token.

    Raises:
        RankscopeError: Shapes, mask, ``k`` out of range, ``k`` beside ``E``, ``F`` without ``E``.

    References:
        Wang et al. 2020, arXiv 2006.04768, equation 7.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
        >>> identity = torch.eye(6)
        >>> exact = scaled_dot_product_attention(x, x, x)
        >>> torch.testing.assert_close(linformer(x, x, x, E=identity), exact)
        >>> torch.testing.assert_close(linformer(x, x, x, k=6), exact)
    """
    check_shapes(query, key, value)
    batch, heads, m, _ = key.shape
    layout = token_layout(key_padding_mask, batch, m)
    key, value = compact(key, layout), compact(value, layout)
    if E is None:
        if F is not None:
            raise RankscopeError("`F` was given without `E`: give both, or `E` alone to serve keys and values")
        return _pooled(query, key, value, layout, k, scaling)
    if k is not None:
        raise RankscopeError(f"`k`={k} was given beside `E`, whose shape {tuple(E.shape)} says it: leave `k` out")
    F = E if F is None else F
    check_projection("E", E, heads, m)
    check_projection("F", F, heads, m)
    if E.shape[-2] != F.shape[-2]:
        raise RankscopeError(f"`E` and `F` must have the same k, got {E.shape[-2]} and {F.shape[-2]}")
    key = apply_matrix(E[..., :m].to(key.dtype), key)
    value = apply_matrix(F[..., :m].to(value.dtype), value)
    return compressed_attention(query, key, value, None, scaling)


def _pooled(
    query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, k: int | None, scaling: float | None
) -> Tensor:
    if k is not None and not 1 <= k <= layout.n:
        raise RankscopeError(f"`k` must be in 1..m={layout.n}, got {k}")
    k = DEFAULT_K if k is None else k
    key, value = pool_mean(key, layout, k), pool_mean(value, layout, k)
    return compressed_attention(query, key, value, pooled_absent(layout, k, key.device), scaling)


register(
    Mechanism(
        name="linformer",
        function=linformer,
        exact=False,
        cost="n",
        knob="k",
        source="Wang et al. 2020, arXiv 2006.04768",
    )
)
