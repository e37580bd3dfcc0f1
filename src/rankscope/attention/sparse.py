"""The two patterns of the Sparse Transformer, block by block, so that cost really grows as n √n.

Both of a pattern's sets share one softmax (the merged head of section 5.2). Without causality each set is made
symmetric, so that the first form is the second's lower triangle.
"""

from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope.attention._contract import Mechanism, register
from rankscope.attention.local import check_at_least_one, check_self_attention, positional_attention

# The smaller of the two the paper uses for text (8 and 32, at a stride of 128).
DEFAULT_SUMMARY = 8


def default_stride(n: int) -> int:
    """Return the power of two at or above √n: n √n is reached, and some padding seldom changes the pattern.

    Example:
        >>> default_stride(1000)
        32
    """
    return 1 << ((max(n, 1) - 1).bit_length() + 1) // 2


def sparse_strided(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    stride: int | None = None,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    r"""Softmax attention over the last ``stride`` keys and every ``stride``-th one before.

    .. math:: \{j : |i - j| \le l\} \cup \{j : (i - j) \bmod l = 0\}, \quad j \le i \text{ if causal}

    Any key reaches any later query in at most two layers.

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, n, head_dim)``.
        value: ``(b, h, n, head_dim)``.
        stride: l, in tokens of the row itself, >= 1; default :func:`default_stride` of the padded length: give
            it, where a row's output must not change with its padding. Beyond √n a larger one is nearer to softmax
            attention, and dearer.
        key_padding_mask: bool ``(b, n)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        is_causal: Whether query i sees keys 0 … i only.

    Returns:
        ``(b, h, n, head_dim)``; zeros at the padding.

    Raises:
        RankscopeError: Shapes, mask, or a stride below 1.

    References:
        Child et al. 2019, arXiv 1904.10509, section 4.2.

    Example:
        >>> import torch
        >>> x = torch.eye(5).view(1, 1, 5, 5)
        >>> sparse_strided(x, x, x, stride=2, scaling=0.0, is_causal=True)[0, 0, 4]
        tensor([0.2500, 0.0000, 0.2500, 0.2500, 0.2500])
    """
    check_self_attention("sparse_strided", query, key, value)
    stride = default_stride(query.shape[-2]) if stride is None else stride
    check_at_least_one("stride", stride)
    sizes = [stride, int(is_causal)]
    return positional_attention(query, key, value, key_padding_mask, scaling, "strided", sizes)


def sparse_fixed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    stride: int | None = None,
    summary: int | None = None,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    r"""Softmax attention over the query's own block of ``stride`` keys and the last ``summary`` of each other block.

    .. math:: \{j : \lfloor j / l \rfloor = \lfloor i / l \rfloor\} \cup \{j : j \bmod l \ge l - c\},
        \quad j \le i \text{ if causal}

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, n, head_dim)``.
        value: ``(b, h, n, head_dim)``.
        stride: l, in tokens of the row itself, >= 1; default :func:`default_stride` of the padded length, or the
            summary if that is larger: give it, where a row's output must not change with its padding.
        summary: c, in ``1..stride``; default 8, or the stride if that is less. The cost of the second set is
            proportional to it, so a c that grows with the stride would cost n² again.
        key_padding_mask: bool ``(b, n)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        is_causal: Whether query i sees keys 0 … i only.

    Returns:
        ``(b, h, n, head_dim)``; zeros at the padding.

    Raises:
        RankscopeError: Shapes, mask, a stride below 1 or a summary outside ``1..stride``.

    References:
        Child et al. 2019, arXiv 1904.10509, section 4.2.

    Example:
        >>> import torch
        >>> x = torch.eye(5).view(1, 1, 5, 5)
        >>> sparse_fixed(x, x, x, stride=2, summary=1, scaling=0.0, is_causal=True)[0, 0, 4]
        tensor([0.0000, 0.3333, 0.0000, 0.3333, 0.3333])
    """
    check_self_attention("sparse_fixed", query, key, value)
    stride = max(default_stride(query.shape[-2]), summary or 1) if stride is None else stride
    check_at_least_one("stride", stride)
    summary = min(DEFAULT_SUMMARY, stride) if summary is None else summary
    if not 1 <= summary <= stride:
        raise RankscopeError(f"`summary` must be in 1..stride={stride}, got {summary}")
    sizes = [stride, int(is_causal), summary]
    return positional_attention(query, key, value, key_padding_mask, scaling, "fixed", sizes)


for _name, _function, _knob in (
    ("sparse_strided", sparse_strided, "stride"),
    ("sparse_fixed", sparse_fixed, "summary"),
):
    register(
        Mechanism(
            name=_name,
            function=_function,
            exact=False,
            cost="n sqrt(n)",
            knob=_knob,
            source="Child et al. 2019, arXiv 1904.10509",
            self_attention_only=True,
        )
    )
