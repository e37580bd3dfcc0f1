r"""Performer: softmax attention's kernel by positive orthogonal random features.

Without causality the estimate is written as two softmaxes over m pseudo-tokens ω: each ω reads the values with
logits :math:`\omega \cdot k - |k|^2 / 2`, each query reads the ω with logits :math:`\omega \cdot q` plus the
log of the first softmax's sum. That is the same fraction, it needs no ε against underflow, and a padded key is
simply a key that is not there: it is in neither numerator nor denominator.
"""

import torch
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope._masks import check_key_padding_mask
from rankscope.attention._blocks import SoftmaxState, absorb, budget, empty_state, finish, working_dtype
from rankscope.attention._contract import Mechanism, register
from rankscope.attention.exact import check_causal, check_shapes

DEFAULT_FEATURES = 256
CHUNK = 128


def orthogonal_features(features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draw Gaussian directions that are orthogonal within each block of ``head_dim``.

    Each row is distributed as N(0, I): its direction is uniform, its length that of a Gaussian vector.

    Args:
        features: How many.
        head_dim: Their width.
        generator: Source of the numbers.

    Returns:
        float64 ``(features, head_dim)``.

    Example:
        >>> omega = orthogonal_features(2, 4, torch.Generator().manual_seed(0))
        >>> abs(float(omega[0] @ omega[1])) < 1e-12
        True
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=generator.device, generator=generator)

    blocks = (features + head_dim - 1) // head_dim
    Q, R = torch.linalg.qr(normal(blocks, head_dim, head_dim))
    # The sign of R's diagonal makes Q uniform over the rotations, whatever the factorisation's convention.
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    length = normal(blocks, head_dim, head_dim).norm(dim=-1, keepdim=True)
    return (Q.mT * length).flatten(0, 1)[:features]


def _tokens(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


class _Tiles:
    """The two softmaxes of a group of heads, tile by tile along the tokens."""

    def __init__(self, query: Tensor, omega: Tensor, scaling: float) -> None:
        self.dtype, self.scaling = working_dtype(query), scaling
        # The root of the scaling goes onto the directions, so that queries and keys need no copy.
        self.omega = omega.to(query.device, self.dtype) * scaling**0.5
        self.heads = query.shape[0] * query.shape[1]
        limit = budget(query.device).logits
        self.step = max(64, limit // (omega.shape[0] * self.heads))
        self.step = min(self.step, max(64, limit // omega.shape[0]))

    def read_logits(self, key: Tensor, absent: Tensor | None) -> Tensor:
        """``(g, m, t)``: what each feature thinks of each key."""
        logits = self.omega @ key.mT - (key.square().sum(dim=-1) * (self.scaling / 2))[:, None]
        return logits if absent is None else logits.masked_fill_(absent[:, None], -torch.inf)


@torch.library.custom_op("rankscope::feature_attention", mutates_args=())
def _feature_attention(
    query: Tensor, key: Tensor, value: Tensor, omega: Tensor, absent: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tiles = _Tiles(query, omega, scaling)
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    gone = None if absent is None else absent.repeat_interleave(query.shape[1], dim=0)
    m = omega.shape[0]
    seed = torch.empty(q.shape[0], m, value.shape[-1], dtype=tiles.dtype, device=query.device)
    state = empty_state(seed)
    for t in _tokens(k.shape[1], tiles.step):
        logits = tiles.read_logits(k[:, t].to(tiles.dtype), None if gone is None else gone[:, t])
        absorb(state, logits, v[:, t].to(tiles.dtype))
    read, read_lse = finish(state)
    bias = read_lse.masked_fill(read_lse == torch.inf, -torch.inf)
    output = torch.empty(*q.shape[:2], value.shape[-1], dtype=query.dtype, device=query.device)
    lse = torch.empty(q.shape[:2], dtype=tiles.dtype, device=query.device)
    for t in _tokens(q.shape[1], tiles.step):
        logits = (q[:, t].to(tiles.dtype) @ tiles.omega.mT).add_(bias[:, None])
        rows = empty_state(torch.empty(*logits.shape[:2], value.shape[-1], dtype=tiles.dtype, device=query.device))
        absorb(rows, logits, read)
        result, lse[:, t] = finish(SoftmaxState(*rows))
        output[:, t] = result.to(query.dtype)
    lead = query.shape[:2]
    return output.unflatten(0, lead), lse.unflatten(0, lead), read, read_lse


@_feature_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, omega: Tensor, absent: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, n, _ = query.shape
    m, width, dtype = omega.shape[0], value.shape[-1], working_dtype(query)
    return (
        query.new_empty(batch, heads, n, width),
        query.new_empty(batch, heads, n, dtype=dtype),
        query.new_empty(batch * heads, m, width, dtype=dtype),
        query.new_empty(batch * heads, m, dtype=dtype),
    )


@torch.library.custom_op("rankscope::feature_attention_backward", mutates_args=())
def _feature_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Tensor,
    absent: Tensor | None,
    output: Tensor,
    lse: Tensor,
    read: Tensor,
    read_lse: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tiles = _Tiles(query, omega, scaling)
    q, k, v, grad, out, row_lse = (x.flatten(0, 1) for x in (query, key, value, grad_output, output, lse))
    gone = None if absent is None else absent.repeat_interleave(query.shape[1], dim=0)
    grad_query, grad_key, grad_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    grad_read, grad_bias = torch.zeros_like(read), torch.zeros_like(read_lse)
    bias = read_lse.masked_fill(read_lse == torch.inf, -torch.inf)
    for t in _tokens(q.shape[1], tiles.step):
        q_t, grad_t = q[:, t].to(tiles.dtype), grad[:, t].to(tiles.dtype)
        P = (q_t @ tiles.omega.mT).add_(bias[:, None]).sub_(row_lse[:, t, None]).exp_()
        delta = (out[:, t].to(tiles.dtype) * grad_t).sum(dim=-1, keepdim=True)
        grad_read += P.mT @ grad_t
        grad_logits = (grad_t @ read.mT).sub_(delta).mul_(P)
        grad_bias += grad_logits.sum(dim=1)
        grad_query[:, t] = (grad_logits @ tiles.omega).to(query.dtype)
    # The sum of the first softmax is itself read by the second: its gradient joins as minus delta does.
    delta = (read * grad_read).sum(dim=-1) - grad_bias
    for t in _tokens(k.shape[1], tiles.step):
        k_t, v_t = k[:, t].to(tiles.dtype), v[:, t].to(tiles.dtype)
        logits = tiles.read_logits(k_t, None if gone is None else gone[:, t])
        P = logits.sub_(read_lse[..., None]).exp_()
        grad_value[:, t] = (P.mT @ grad_read).to(value.dtype)
        grad_logits = (grad_read @ v_t.mT).sub_(delta[..., None]).mul_(P)
        grad_k = grad_logits.mT @ tiles.omega
        grad_key[:, t] = grad_k.sub_(grad_logits.sum(dim=1)[..., None] * (scaling * k_t)).to(key.dtype)
    lead = query.shape[:2]
    return grad_query.unflatten(0, lead), grad_key.unflatten(0, lead), grad_value.unflatten(0, lead)


@_feature_attention_backward.register_fake
def _(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Tensor,
    absent: Tensor | None,
    output: Tensor,
    lse: Tensor,
    read: Tensor,
    read_lse: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx, grad_output, *_unused):  # type: ignore[no-untyped-def]
    return *_feature_attention_backward(grad_output, *ctx.saved_tensors, ctx.scaling), None, None, None


_feature_attention.register_autograd(_differentiate, setup_context=_save)


def _causal(query: Tensor, key: Tensor, value: Tensor, omega: Tensor, absent: Tensor | None) -> Tensor:
    """The causal estimate: within chunks by the masked matrix, before them by running sums of the features."""
    n, width = query.shape[-2], value.shape[-1]
    short = -n % CHUNK

    def chunks(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, short)).unflatten(-2, (-1, CHUNK))

    queries, keys = chunks(query) @ omega.mT, chunks(key)
    keys = keys @ omega.mT - keys.square().sum(dim=-1, keepdim=True) / 2
    gone = torch.arange(n + short, device=query.device) >= n
    if absent is not None:
        gone = gone | torch.nn.functional.pad(absent, (0, short))
    gone = gone.expand(query.shape[0], -1)[:, None, :, None].unflatten(-2, (-1, CHUNK))
    keys = keys.masked_fill(gone, -torch.inf)
    # Shifts cancel in the fraction, so they carry no gradient. Each chunk's is the largest up to its end.
    shift = keys.detach().amax(dim=-2, keepdim=True).clamp(min=-1e30).cummax(dim=-3).values
    row_shift = (queries.detach() + shift).amax(dim=-1, keepdim=True)
    queries, keys = (queries + shift - row_shift).exp(), (keys - shift).exp()
    values = torch.cat([chunks(value), torch.ones_like(chunks(value)[..., :1])], dim=-1)
    values = values.masked_fill(gone, 0)
    decay = (shift[..., :-1, :, :] - shift[..., 1:, :, :]).exp().mT.unbind(dim=-3)
    gained = (keys.mT @ values).unbind(dim=-3)
    running = torch.zeros_like(gained[0])
    before = [running]
    for gain, factor in zip(gained[:-1], decay, strict=True):
        running = (running + gain) * factor
        before.append(running)
    within = (queries @ keys.mT).tril() @ values
    both = (within + queries @ torch.stack(before, dim=-3)).flatten(-3, -2)[..., :n, :]
    total = both[..., width:]
    return both[..., :width] / torch.where(total > 0, total, 1)


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    r"""Attention by the positive features of given directions.

    .. math:: \frac{\sum_j \phi(q_i)^\top \phi(k_j) v_j}{\sum_j \phi(q_i)^\top \phi(k_j)}, \quad
        \phi(x) = \exp(\omega x - |x|^2 / 2)

    Args:
        query: ``(b, h, n, head_dim)``, multiplied by the root of ``scaling`` before φ, as are the keys.
        key: ``(b, h, m, head_dim)``.
        value: ``(b, h, m, head_dim)``.
        omega: ``(features, head_dim)``, as :func:`orthogonal_features` draws them; it gets no gradient.
        key_padding_mask: bool ``(b, m)``, True = padding.
        scaling: Factor of the logits, > 0; default ``head_dim ** -0.5``.
        is_causal: Whether query i sees keys 0 … i only (``n == m``).

    Returns:
        ``(b, h, n, head_dim)``; zeros for a query that may look nowhere.

    Raises:
        RankscopeError: Shapes, mask, causality between two lengths, a scaling that is not positive.

    Example:
        >>> x = torch.ones(1, 1, 3, 2)
        >>> performer_attention(x, x, x, torch.eye(2)).squeeze()
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """
    check_shapes(query, key, value)
    check_key_padding_mask(key_padding_mask, key.shape[0], key.shape[-2])
    if omega.ndim != 2 or omega.shape[0] < 1 or omega.shape[1] != query.shape[-1]:
        raise RankscopeError(
            f"`omega` must have shape (features, head_dim={query.shape[-1]}), got {tuple(omega.shape)}"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if scaling <= 0:
        raise RankscopeError(f"`scaling` must be positive, got {scaling}: its root multiplies query and key")
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        key, value = key.masked_fill(padded, 0), value.masked_fill(padded, 0)
    if not is_causal:
        return _feature_attention(query, key, value, omega.detach(), key_padding_mask, scaling)[0]
    check_causal(query.shape[-2], key.shape[-2])
    dtype, root = working_dtype(query), scaling**0.5
    q, k, v = query.to(dtype) * root, key.to(dtype) * root, value.to(dtype)
    return _causal(q, k, v, omega.detach().to(q), key_padding_mask).to(query.dtype)


def performer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    generator: torch.Generator,
    features: int = DEFAULT_FEATURES,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Performer's attention with freshly drawn directions; the rest as :func:`performer_attention`.

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, m, head_dim)``.
        value: ``(b, h, m, head_dim)``.
        generator: Draws the directions; a generator in the same state gives the same output.
        features: How many, >= 1; numerator and denominator are unbiased, with a variance that falls as their inverse.
        key_padding_mask: bool ``(b, m)``, True = padding.
        scaling: Factor of the logits, > 0; default ``head_dim ** -0.5``.
        is_causal: Whether query i sees keys 0 … i only (``n == m``).

    Returns:
        ``(b, h, n, head_dim)``; zeros for a query that may look nowhere.

    Raises:
        RankscopeError: No feature, or as :func:`performer_attention`.

    References:
        Choromanski et al. 2020, arXiv 2009.14794.

    Example:
        >>> x = torch.ones(1, 1, 3, 2)
        >>> performer(x, x, x, generator=torch.Generator().manual_seed(0))[0, 0, 0]
        tensor([1.0000, 1.0000])
    """
    check_shapes(query, key, value)
    if features < 1:
        raise RankscopeError(f"`features` must be at least 1, got {features}")
    omega = orthogonal_features(features, query.shape[-1], generator)
    return performer_attention(
        query, key, value, omega, key_padding_mask=key_padding_mask, scaling=scaling, is_causal=is_causal
    )


register(
    Mechanism(
        name="performer",
        function=performer,
        exact=False,
        cost="n",
        knob="features",
        source="Choromanski et al. 2020, arXiv 2009.14794",
    )
)
