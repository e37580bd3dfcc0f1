"""Sliding-window attention: each query looks at the keys at most ``window`` places away."""

from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope.attention._blocks import pattern_attention
from rankscope.attention._contract import Mechanism, register
from rankscope.attention._layout import compact, restore, token_layout
from rankscope.attention.exact import check_shapes

DEFAULT_WINDOW = 128


def check_self_attention(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse two lengths and two widths, where a pattern over positions has no meaning.

    Raises:
        RankscopeError: Shapes, or ``n != m``, or values of another width.
    """
    check_shapes(query, key, value)
    if query.shape[-2] != key.shape[-2]:
        raise RankscopeError(
            f"`{name}` needs query and key of one length, got n={query.shape[-2]} and m={key.shape[-2]}: "
            "its pattern is one of self-attention; use an exact mechanism for cross-attention"
        )
    if value.shape != key.shape:
        raise RankscopeError(
            f"`value` must have the key's shape {tuple(key.shape)}, got {tuple(value.shape)}: "
            "pad the narrower of the two with zeros"
        )


def check_at_least_one(name: str, number: int) -> None:
    """Refuse a size below one.

    Raises:
        RankscopeError: The number is below one.
    """
    if number < 1:
        raise RankscopeError(f"`{name}` must be at least 1, got {number}")


def positional_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    scaling: float | None,
    pattern: str,
    sizes: list[int],
) -> Tensor:
    """Apply a pattern to each row's own tokens, positions counted from its first valid one; zeros at the padding."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layout = token_layout(key_padding_mask, key.shape[0], key.shape[-2])
    query, key, value = (compact(x, layout) for x in (query, key, value))
    return restore(pattern_attention(query, key, value, layout.absent, pattern, sizes, scaling), layout)


def local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int = DEFAULT_WINDOW,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    r"""Softmax attention over a sliding window.

    .. math:: \mathrm{softmax}_{j : |i - j| \le w}(\text{scaling} \cdot q_i^\top k_j) \, v_j

    With ``window >= n - 1`` this is softmax attention. Time and memory grow as n · window: keys beyond the
    window are never multiplied.

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, n, head_dim)``.
        value: ``(b, h, n, head_dim)``.
        window: The furthest distance looked at, in tokens of the row itself, >= 1; causal: back only.
        key_padding_mask: bool ``(b, n)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        is_causal: Whether query i sees keys ``i - window`` … i only.

    Returns:
        ``(b, h, n, head_dim)``; zeros at the padding.

    Raises:
        RankscopeError: Shapes, mask, or a window below 1.

    References:
        Beltagy et al. 2020, arXiv 2004.05150 (without its global tokens).

    Example:
        >>> import torch
        >>> x = torch.eye(3).view(1, 1, 3, 3)
        >>> local(x, x, x, window=1, scaling=0.0)[0, 0]
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333],
                [0.0000, 0.5000, 0.5000]])
    """
    check_self_attention("local", query, key, value)
    check_at_least_one("window", window)
    n = query.shape[-2]
    window = min(window, max(n - 1, 1))
    block = min(max(32, (window + 1) // 2), 256)
    lower = 0 if is_causal else -window
    return positional_attention(query, key, value, key_padding_mask, scaling, "band", [block, lower, window])


register(
    Mechanism(
        name="local",
        function=local,
        exact=False,
        cost="n",
        knob="window",
        source="Beltagy et al. 2020, arXiv 2004.05150",
        self_attention_only=True,
    )
)
