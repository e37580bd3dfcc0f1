"""Nyström attention: softmax attention through landmarks, at any length and with masks."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rankscope._errors import RankscopeError
from rankscope.attention._blocks import working_dtype
from rankscope.attention._contract import Mechanism, register
from rankscope.attention._layout import TokenLayout, compact, pool_mean, pooled_absent, token_layout
from rankscope.attention.exact import check_shapes

DEFAULT_LANDMARKS = 128
DEFAULT_ITERATIONS = 6


def iterative_pseudo_inverse(A: Tensor, iterations: int = DEFAULT_ITERATIONS) -> Tensor:
    r"""Approximate Moore–Penrose inverse by products alone.

    .. math:: Z \leftarrow \tfrac14 Z (13 I - A Z (15 I - A Z (7 I - A Z))), \quad
        Z_0 = A^\top / (\lVert A \rVert_1 \lVert A \rVert_\infty)

    Each matrix has its own norms, so a row of a batch does not depend on the others.

    Args:
        A: ``(*lead, m, r)``.
        iterations: Number of steps.

    Returns:
        ``(*lead, r, m)``; zeros for a zero matrix.

    References:
        Xiong et al. 2021, arXiv 2102.03902, equation 11.

    Example:
        >>> iterative_pseudo_inverse(torch.tensor([[2.0, 0.0], [0.0, 1.0]])).round(decimals=4)
        tensor([[0.5000, 0.0000],
                [0.0000, 1.0000]])
    """
    size = A.abs()
    norms = size.sum(dim=-2).amax(dim=-1) * size.sum(dim=-1).amax(dim=-1)
    Z = A.mT / norms.clamp(min=torch.finfo(A.dtype).tiny)[..., None, None]
    identity = torch.eye(A.shape[-2], dtype=A.dtype, device=A.device)
    for _ in range(iterations):
        AZ = A @ Z
        Z = 0.25 * Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ)))
    return Z


def _keys_at(layout: TokenLayout) -> Tensor | None:
    """Return bool ``(b, 1, 1, m)``: where compacted keys are; everywhere (at zeros) in a row without any."""
    absent = layout.absent
    return None if absent is None else (~absent | absent.all(dim=-1, keepdim=True))[:, None, None, :]


def nystrom(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    landmarks: int = DEFAULT_LANDMARKS,
    exact: bool = False,
    iterations: int = DEFAULT_ITERATIONS,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    r"""Softmax attention through landmarks, the means of equal segments of a row's own tokens.

    .. math:: \mathrm{softmax}(s Q \tilde K^\top) \, \mathrm{softmax}(s \tilde Q \tilde K^\top)^{+} \,
        \mathrm{softmax}(s \tilde Q K^\top) V

    With n landmarks and the exact pseudo-inverse this is softmax attention. Each landmark mixes all positions of
    its segment, so there is no causal form, hence no ``is_causal``. The paper's convolution of the values is a
    layer of its own and not part of this function.

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, m, head_dim)``.
        value: ``(b, h, m, head_dim)``.
        landmarks: Number of segments, >= 1; a row of at most that many tokens keeps each as its own.
        exact: Whether the pseudo-inverse is that of the singular values instead of the iteration. With fewer
            landmarks than tokens the iteration is often nearer to softmax attention: it stops before the
            smallest singular values, whose inverses amplify what the landmarks miss.
        iterations: Steps of the iteration; not used by ``exact``, hence refused beside it unless the default.
        key_padding_mask: bool ``(b, m)``, True = padding.
        query_padding_mask: bool ``(b, n)``, queries that are left out of the landmarks; default: the key's
            mask where n = m, else none. Cross-attention between equal lengths should give it.
        scaling: Factor s of the logits; default ``head_dim ** -0.5``.

    Returns:
        ``(b, h, n, head_dim)``; zeros for a row without a valid token.

    Raises:
        RankscopeError: Shapes, masks, no landmark, no iteration, ``iterations`` beside ``exact``.

    References:
        Xiong et al. 2021, arXiv 2102.03902, equation 15.

    Example:
        >>> x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).double()
        >>> approximate = nystrom(x, x, x, landmarks=6, exact=True)
        >>> torch.testing.assert_close(approximate, scaled_dot_product_attention(x, x, x))
    """
    check_shapes(query, key, value)
    if landmarks < 1 or iterations < 1:
        name, number = ("landmarks", landmarks) if landmarks < 1 else ("iterations", iterations)
        raise RankscopeError(f"`{name}` must be at least 1, got {number}")
    if exact and iterations != DEFAULT_ITERATIONS:
        raise RankscopeError(f"`iterations`={iterations} was given beside `exact`, which has none: leave one out")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    batch, n, m = query.shape[0], query.shape[-2], key.shape[-2]
    if query_padding_mask is None and n == m:
        query_padding_mask = key_padding_mask
    rows, columns = token_layout(query_padding_mask, batch, n), token_layout(key_padding_mask, batch, m)
    key, value = compact(key, columns), compact(value, columns)
    query_marks = pool_mean(compact(query, rows), rows, landmarks)
    key_marks = pool_mean(key, columns, landmarks)
    no_row, no_column = pooled_absent(rows, landmarks, key.device), pooled_absent(columns, landmarks, key.device)

    logits = scaling * (query_marks @ key_marks.mT).to(working_dtype(query))
    if no_column is not None:
        logits = logits.masked_fill(no_column, -torch.inf)
    A = logits.softmax(dim=-1)
    if no_row is not None:
        A = A.masked_fill(no_row.mT, 0)
    inverse = torch.linalg.pinv(A) if exact else iterative_pseudo_inverse(A, iterations)
    read = scaled_dot_product_attention(query_marks, key, value, attn_mask=_keys_at(columns), scale=scaling)
    weighted = (inverse @ read.to(A.dtype)).to(value.dtype)
    allowed = None if no_column is None else ~no_column
    return scaled_dot_product_attention(query, key_marks, weighted, attn_mask=allowed, scale=scaling)


register(
    Mechanism(
        name="nystrom",
        function=nystrom,
        exact=False,
        cost="n",
        knob="landmarks",
        source="Xiong et al. 2021, arXiv 2102.03902",
    )
)
