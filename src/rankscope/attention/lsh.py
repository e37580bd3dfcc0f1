"""Reformer's attention: tokens sorted by a hash of their direction, each chunk attends to itself and one chunk back.

The rounds' sets are united: one softmax over all keys that any round offers, each key once (a later round leaves
out the pairs of the earlier ones). A query's own key is always offered; in the shared form, where it would win
every time, it only counts where there is no other.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope._masks import check_key_padding_mask
from rankscope.attention._blocks import (
    SoftmaxState,
    absorb,
    budget,
    empty_state,
    finish,
    tile_gradients,
    working_dtype,
)
from rankscope.attention._contract import Mechanism, register
from rankscope.attention.local import check_at_least_one, check_self_attention

DEFAULT_ROUNDS = 4
DEFAULT_CHUNK = 64
# So low that any other key wins, so high that a float32 softmax over it alone is 1 (Reformer's section 2).
OWN_LOGIT = -5e4


def bucket_factors(buckets: int) -> list[int]:
    """Split a number of buckets into even factors, so that hashing does not grow as n².

    Args:
        buckets: At least how many.

    Returns:
        One even number, or two whose product is at least ``buckets``.

    Example:
        >>> bucket_factors(5), bucket_factors(500)
        ([6], [24, 22])
    """
    if buckets <= 64:
        return [max(2, buckets + buckets % 2)]
    first = 2 * math.ceil(math.sqrt(buckets) / 2)
    return [first, 2 * math.ceil(buckets / first / 2)]


def draw_rotations(n: int, head_dim: int, rounds: int, chunk: int, generator: torch.Generator) -> list[Tensor]:
    """Draw the directions that hash n tokens: 2 n / chunk buckets a round.

    Returns:
        For each factor of the number of buckets float64 ``(rounds, head_dim, factor / 2)``.

    Example:
        >>> [R.shape for R in draw_rotations(64, 8, 2, 16, torch.Generator().manual_seed(0))]
        [torch.Size([2, 8, 4])]
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=generator.device, generator=generator)

    return [normal(rounds, head_dim, factor // 2) for factor in bucket_factors(2 * math.ceil(n / chunk))]


def hash_buckets(x: Tensor, rotations: list[Tensor]) -> Tensor:
    r"""Bucket of each token: :math:`\arg\max [x R; -x R]`, factors combined as digits.

    Args:
        x: ``(g, n, head_dim)``.
        rotations: As :func:`draw_rotations` gives them.

    Returns:
        int64 ``(rounds, g, n)``.

    Example:
        >>> hash_buckets(torch.tensor([[[1.0], [-1.0]]]), [torch.ones(1, 1, 1)])
        tensor([[[0, 1]]])
    """
    rounds = rotations[0].shape[0]
    bucket = torch.zeros(rounds, *x.shape[:-1], dtype=torch.int64, device=x.device)
    for R in rotations:
        half = R.shape[-1]
        for round_, directions in enumerate(R.to(x)):
            # The largest of [y; -y] without writing the second half.
            y = x @ directions
            high, low = y.max(dim=-1), y.min(dim=-1)
            digit = torch.where(high.values >= -low.values, high.indices, half + low.indices)
            bucket[round_] = bucket[round_] * (2 * half) + digit
    return bucket


def _rank_order(bucket: Tensor, absent: Tensor | None) -> Tensor:
    """Positions by bucket, then by position; those without a token last. ``(rounds, g, n)``."""
    n = bucket.shape[-1]
    code = bucket * n + torch.arange(n, device=bucket.device)
    if absent is not None:
        code = code + absent * (code.amax() + 1)
    return code.argsort(dim=-1).to(torch.int32)


class _Rounds:
    """One group of heads: tokens in each round's order, and which pairs a round adds."""

    def __init__(self, orders: tuple[Tensor, Tensor], absent: Tensor | None, chunk: int, causal: bool) -> None:
        self.query_order, self.key_order = orders
        rounds, self.group, self.n = self.query_order.shape
        self.absent, self.chunk, self.causal = absent, chunk, causal
        self.chunks = math.ceil(self.n / chunk)
        self.device = self.query_order.device
        if rounds > 1:
            rank = torch.arange(self.n, device=self.device).div(chunk, rounding_mode="floor").to(torch.int32)
            rank = rank.expand(self.query_order.shape)
            self.query_chunk = torch.empty_like(rank).scatter_(-1, self.query_order, rank)
            self.key_chunk = self.query_chunk
            if self.key_order is not self.query_order:
                self.key_chunk = torch.empty_like(rank).scatter_(-1, self.key_order, rank)
        self.offset = torch.arange(self.group, device=self.device)[:, None] * self.n

    def sort(self, x: Tensor, order: Tensor, fill: float = 0) -> Tensor:
        """``(g, n, *)`` to ``(g, chunks, chunk, *)`` in that order, ``fill`` after n."""
        moved = x.flatten(0, 1).index_select(0, (order + self.offset).flatten()).view(x.shape)
        if self.chunks * self.chunk == self.n:
            return moved.unflatten(1, (self.chunks, self.chunk))
        sorted_ = x.new_full((self.group, self.chunks * self.chunk, *x.shape[2:]), fill)
        sorted_[:, : self.n] = moved
        return sorted_.unflatten(1, (self.chunks, self.chunk))

    def unsort(self, x: Tensor, order: Tensor) -> Tensor:
        back = torch.empty_like(order).scatter_(-1, order, torch.arange(self.n, device=x.device).expand_as(order))
        flat = x.flatten(1, 2)
        offset = torch.arange(self.group, device=x.device)[:, None] * flat.shape[1]
        return flat.flatten(0, 1).index_select(0, (back + offset).flatten()).view(self.group, self.n, *x.shape[3:])

    def tiles(self, round_: int, most: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield chunks of queries, chunks of keys, and the pairs that this round does not add."""
        query_order, key_order = self.query_order[round_], self.key_order[round_]
        identity = torch.arange(self.n, device=self.device, dtype=torch.int32).expand(self.group, -1)
        query_place, key_place = self.sort(identity, query_order, -1), self.sort(identity, key_order, -2)
        gone = None if self.absent is None else self.sort(self.absent, key_order, True)
        earlier = [
            (self.sort(self.query_chunk[r], query_order, -9), self.sort(self.key_chunk[r], key_order, -1))
            for r in range(round_)
        ]
        step = max(1, most // (self.group * self.chunk * self.chunk))
        for back in range(2):
            for start in range(back, self.chunks, step):
                q = slice(start, min(start + step, self.chunks))
                k = slice(q.start - back, q.stop - back)
                rows, columns = query_place[:, q, :, None], key_place[:, k, None, :]
                forbidden = rows <= columns if self.causal else rows == columns
                forbidden |= columns < 0
                if gone is not None:
                    forbidden |= gone[:, k, None, :]
                for query_chunk, key_chunk in earlier:
                    distance = query_chunk[:, q, :, None] - key_chunk[:, k, None, :]
                    # Only 0 and 1 have no bit but the last.
                    forbidden |= distance.bitwise_and_(-2) == 0
                yield q, k, forbidden


def _own_logits(query: Tensor, key: Tensor, shared: bool, scaling: float) -> Tensor:
    return query.new_full(query.shape[:-1], OWN_LOGIT) if shared else (query * key).sum(dim=-1) * scaling


def _normalised(query: Tensor) -> tuple[Tensor, Tensor]:
    length = query.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(query.dtype).tiny)
    return query / length, length


def _heads(query: Tensor) -> Iterator[slice]:
    total, n = query.shape[0] * query.shape[1], query.shape[2]
    step = max(1, budget(query.device).tokens // max(n, 1))
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


class _Group:
    """The tensors of a group of heads in the working dtype, and its rounds."""

    def __init__(
        self,
        where: slice,
        query: Tensor,
        key: Tensor | None,
        value: Tensor,
        absent: Tensor | None,
        query_order: Tensor,
        key_order: Tensor,
        chunk: int,
        causal: bool,
    ) -> None:
        dtype, heads = working_dtype(query), query.shape[1]
        self.query = query.flatten(0, 1)[where].to(dtype)
        self.shared = key is None
        self.key = _normalised(self.query)[0] if key is None else key.flatten(0, 1)[where].to(dtype)
        self.value = value.flatten(0, 1)[where].to(dtype)
        row = torch.arange(where.start, where.stop, device=query.device) // heads
        self.absent = None if absent is None else absent[row]
        orders = query_order[:, where].long(), key_order[:, where].long()
        self.rounds = _Rounds((orders[0], orders[0]) if self.shared else orders, self.absent, chunk, causal)
        self.most = budget(query.device).logits // 2


def _round_sums(g: _Group, round_: int, scaling: float) -> list[Tensor]:
    """Peak, total and weighted values of one round in the tokens' own order; its sorted copies end with the call."""
    rounds = g.rounds
    q_order, k_order = rounds.query_order[round_], rounds.key_order[round_]
    q = rounds.sort(g.query, q_order).mul_(scaling)
    k, v = rounds.sort(g.key, k_order), rounds.sort(g.value, k_order)
    part = empty_state(q)
    for rows, columns, forbidden in rounds.tiles(round_, g.most):
        logits = (q[:, rows] @ k[:, columns].mT).masked_fill_(forbidden, -torch.inf)
        absorb(SoftmaxState(*(x[:, rows] for x in part)), logits, v[:, columns])
    del q, k, v
    return [rounds.unsort(x, q_order) for x in part]


@torch.library.custom_op("rankscope::lsh_attention", mutates_args=())
def _lsh_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor,
    absent: Tensor | None,
    query_order: Tensor,
    key_order: Tensor,
    chunk: int,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:-1], dtype=working_dtype(query), device=query.device)
    for where in _heads(query):
        g = _Group(where, query, key, value, absent, query_order, key_order, chunk, causal)
        present = 1.0 if g.absent is None else (~g.absent).to(g.query.dtype)
        state = SoftmaxState(
            _own_logits(g.query, g.key, g.shared, scaling), torch.ones_like(g.query[..., 0]) * present, g.value.clone()
        )
        for round_ in range(query_order.shape[0]):
            peak, total, weighted = _round_sums(g, round_, scaling)
            both = torch.maximum(state.peak, peak)
            old, new = (state.peak - both).exp_(), (peak - both).exp_()
            state.output.mul_(old[..., None]).add_(weighted.mul_(new[..., None]))
            state.total.mul_(old).add_(total.mul_(new))
            state.peak.copy_(both)
            del weighted
        result, row_lse = finish(state)
        output.flatten(0, 1)[where] = result.to(output.dtype)
        lse.flatten(0, 1)[where] = row_lse
        del g, state, result  # else they would stay until the next group has made its own
    return output, lse


@_lsh_attention.register_fake
def _(
    query: Tensor,
    key: Tensor | None,
    value: Tensor,
    absent: Tensor | None,
    query_order: Tensor,
    key_order: Tensor,
    chunk: int,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), query.new_empty(
        query.shape[:-1], dtype=working_dtype(query)
    )


@torch.library.custom_op("rankscope::lsh_attention_backward", mutates_args=())
def _lsh_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor,
    absent: Tensor | None,
    query_order: Tensor,
    key_order: Tensor,
    output: Tensor,
    lse: Tensor,
    chunk: int,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [torch.empty(query.shape, dtype=query.dtype, device=query.device) for _ in range(3)]
    for where in _heads(query):
        g = _Group(where, query, key, value, absent, query_order, key_order, chunk, causal)
        rounds = g.rounds
        grad, out, row_lse = (x.flatten(0, 1)[where].to(g.query.dtype) for x in (grad_output, output, lse))
        delta = (out * grad).sum(dim=-1)
        own = (_own_logits(g.query, g.key, g.shared, scaling) - row_lse).exp_()
        grad_value = own[..., None] * grad
        grad_query, grad_key = torch.zeros_like(g.query), torch.zeros_like(g.key)
        if not g.shared:
            slope = (own * ((grad * g.value).sum(dim=-1) - delta))[..., None]
            grad_query, grad_key = slope * g.key, slope * g.query * scaling
        for round_ in range(query_order.shape[0]):
            q_order, k_order = rounds.query_order[round_], rounds.key_order[round_]
            q, grad_s = rounds.sort(g.query, q_order).mul_(scaling), rounds.sort(grad, q_order)
            lse_s, delta_s = rounds.sort(row_lse, q_order, torch.inf), rounds.sort(delta, q_order)
            k, v = rounds.sort(g.key, k_order), rounds.sort(g.value, k_order)
            sums = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for rows, columns, forbidden in rounds.tiles(round_, g.most):
                logits = (q[:, rows] @ k[:, columns].mT).masked_fill_(forbidden, -torch.inf)
                added = tile_gradients(
                    logits, q[:, rows], k[:, columns], v[:, columns], lse_s[:, rows], grad_s[:, rows], delta_s[:, rows]
                )
                sums[0][:, rows] += added.query
                sums[1][:, columns] += added.key
                sums[2][:, columns] += added.value
            grad_query += rounds.unsort(sums[0], q_order)
            grad_key += rounds.unsort(sums[1], k_order)
            grad_value += rounds.unsort(sums[2], k_order)
        grad_query *= scaling
        if g.shared:
            unit, length = _normalised(g.query)
            grad_query += (grad_key - unit * (unit * grad_key).sum(dim=-1, keepdim=True)) / length
        for whole, part in zip(grads, (grad_query, grad_key, grad_value), strict=True):
            whole.flatten(0, 1)[where] = part.to(whole.dtype)
    return grads[0], grads[1], grads[2]


@_lsh_attention_backward.register_fake
def _(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor,
    absent: Tensor | None,
    query_order: Tensor,
    key_order: Tensor,
    output: Tensor,
    lse: Tensor,
    chunk: int,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    made = [torch.empty(query.shape, dtype=query.dtype, device=query.device) for _ in range(3)]
    return made[0], made[1], made[2]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.chunk, ctx.causal, ctx.scaling = inputs
    ctx.shared = inputs[1] is None
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad_output, _grad_lse):  # type: ignore[no-untyped-def]
    grad_query, grad_key, grad_value = _lsh_attention_backward(
        grad_output, *ctx.saved_tensors, ctx.chunk, ctx.causal, ctx.scaling
    )
    return grad_query, None if ctx.shared else grad_key, grad_value, None, None, None, None, None, None


_lsh_attention.register_autograd(_differentiate, setup_context=_save)


def lsh_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor,
    rotations: list[Tensor],
    *,
    chunk: int = DEFAULT_CHUNK,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Reformer's attention with given rotations; the rest as :func:`lsh`.

    Args:
        query: ``(b, h, n, head_dim)``.
        key: The same shape, or ``None`` for the shared form.
        value: The same shape.
        rotations: As :func:`draw_rotations` gives them; all heads share them.
        chunk: Tokens in a chunk, >= 1.
        key_padding_mask: bool ``(b, n)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        is_causal: Whether query i sees keys 0 … i only.

    Returns:
        ``(b, h, n, head_dim)``; zeros at the padding.

    Raises:
        RankscopeError: Shapes, mask, chunk.

    Example:
        >>> x = torch.ones(1, 1, 4, 2)
        >>> lsh_attention(x, None, x, draw_rotations(4, 2, 1, 4, torch.Generator().manual_seed(0)), chunk=4).shape
        torch.Size([1, 1, 4, 2])
    """
    check_self_attention("lsh", query, query if key is None else key, value)
    check_at_least_one("chunk", chunk)
    batch, heads, n, head_dim = query.shape
    check_key_padding_mask(key_padding_mask, batch, n)
    if any(R.ndim != 3 or R.shape[1] != head_dim or R.shape[0] != rotations[0].shape[0] for R in rotations):
        raise RankscopeError(
            f"`rotations` must have shapes (rounds, head_dim={head_dim}, buckets / 2), "
            f"got {[tuple(R.shape) for R in rotations]}"
        )
    scaling = head_dim**-0.5 if scaling is None else scaling
    gone = None
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        query, value = query.masked_fill(padded, 0), value.masked_fill(padded, 0)
        key = None if key is None else key.masked_fill(padded, 0)
        gone = key_padding_mask.repeat_interleave(heads, dim=0)

    def order(x: Tensor) -> Tensor:
        return _rank_order(hash_buckets(x.detach().flatten(0, 1), rotations), gone)

    query_order = order(query)
    key_order = query_order if key is None else order(key)
    output = _lsh_attention(query, key, value, key_padding_mask, query_order, key_order, chunk, is_causal, scaling)[0]
    return output if key_padding_mask is None else output.masked_fill(padded, 0)


def lsh(
    query: Tensor,
    key: Tensor | None,
    value: Tensor,
    *,
    generator: torch.Generator,
    rounds: int = DEFAULT_ROUNDS,
    chunk: int = DEFAULT_CHUNK,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    r"""Softmax attention over the keys that fall near a query in at least one of several hashings.

    .. math:: h(x) = \arg\max [x R; -x R], \quad
        \mathcal P_i = \{i\} \cup \bigcup_r \{j : c_r(i) - 1 \le c_r(j) \le c_r(i)\}

    with :math:`c_r` the chunk of a token after sorting by bucket, then by position. Buckets are 2 n / chunk; many
    are made as pairs of two smaller hashes, so that hashing does not grow as n². A chunk >= n gives softmax attention
    (separate form).

    Args:
        query: ``(b, h, n, head_dim)``.
        key: The same shape; ``None`` for Reformer's shared form: keys are the queries at length one, and a token
            attends to itself only where it has no other target.
        value: The same shape.
        generator: Draws the rotations, whose number depends on the padded length.
        rounds: How many hashings, >= 1.
        chunk: Tokens in a chunk, >= 1.
        key_padding_mask: bool ``(b, n)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        is_causal: Whether query i sees keys 0 … i only.

    Returns:
        ``(b, h, n, head_dim)``; zeros at the padding.

    Raises:
        RankscopeError: Shapes, mask, rounds or chunk below 1.

    References:
        Kitaev et al. 2020, arXiv 2001.04451, section 2.

    Example:
        >>> x = torch.randn(1, 1, 5, 2, generator=torch.Generator().manual_seed(0))
        >>> exact = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> torch.testing.assert_close(lsh(x, x, x, generator=torch.Generator().manual_seed(0)), exact)
    """
    check_self_attention("lsh", query, query if key is None else key, value)
    check_at_least_one("rounds", rounds)
    check_at_least_one("chunk", chunk)
    rotations = draw_rotations(query.shape[-2], query.shape[-1], rounds, chunk, generator)
    return lsh_attention(
        query,
        key,
        value,
        rotations,
        chunk=chunk,
        key_padding_mask=key_padding_mask,
        scaling=scaling,
        is_causal=is_causal,
    )


register(
    Mechanism(
        name="lsh",
        function=lsh,
        exact=False,
        cost="n log n",
        knob="rounds",
        source="Kitaev et al. 2020, arXiv 2001.04451",
        self_attention_only=True,
    )
)
