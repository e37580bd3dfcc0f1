"""Softmax attention over a set of blocks of the n × m matrix, one tile at a time: the engine of the sparse mechanisms.

Forward is the online softmax: each tile of logits is *absorbed* into a running state (largest logit, sum of
exponentials, weighted sum of values), so blocks of different shape share one softmax and no more than a tile is
alive. Backward recomputes each tile from the saved log-sum-exp. Half precision is computed in float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Below every real logit, yet finite: exp(-inf - FLOOR) is 0 where exp(-inf + inf) would be NaN.
FLOOR = -1e30


class Budget(NamedTuple):
    """How much is computed at once.

    Attributes:
        tokens: Rows of query, key and value copied at once.
        logits: Entries of one tile.
    """

    tokens: int
    logits: int


def budget(device: torch.device) -> Budget:
    """Return tiles that stay in a processor's second-level cache, or large ones for an accelerator.

    Example:
        >>> budget(torch.device("cpu")).tokens
        16384
    """
    return Budget(1 << 14, 1 << 19) if device.type == "cpu" else Budget(1 << 20, 1 << 26)


def working_dtype(x: Tensor) -> torch.dtype:
    """Return float32 for half precision, else the tensor's own dtype."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


class SoftmaxState(NamedTuple):
    """A softmax-weighted sum in the making, ``(*rows)``, ``(*rows)`` and ``(*rows, c)``.

    Attributes:
        peak: Largest logit so far, at least ``FLOOR``.
        total: Sum of ``exp(logit - peak)``.
        output: Sum of ``exp(logit - peak) * value``.
    """

    peak: Tensor
    total: Tensor
    output: Tensor


def empty_state(query: Tensor) -> SoftmaxState:
    """Return the state of queries ``(*rows, c)`` that have seen no key."""
    rows = query.shape[:-1]
    return SoftmaxState(query.new_full(rows, FLOOR), query.new_zeros(rows), torch.zeros_like(query))


def absorb(state: SoftmaxState, logits: Tensor, value: Tensor) -> None:
    """Add a tile to the state, in place; ``logits (*rows, w)`` is overwritten, ``value`` is ``(*, w, c)``."""
    peak = torch.maximum(state.peak, logits.amax(dim=-1).view(state.peak.shape))
    decay = (state.peak - peak).exp_()
    P = logits.sub_(peak.view(logits.shape[:-1])[..., None]).exp_()
    state.total.mul_(decay).add_(P.sum(dim=-1).view(decay.shape))
    state.output.mul_(decay[..., None]).add_((P @ value).view(state.output.shape))
    state.peak.copy_(peak)


def finish(state: SoftmaxState) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp; for rows without a key zeros and ``inf`` (so that P is 0 backward)."""
    nothing = state.total == 0
    total = state.total.masked_fill(nothing, 1)
    return state.output.div_(total[..., None]), (state.peak + total.log()).masked_fill_(nothing, torch.inf)


class TileGradients(NamedTuple):
    """What one tile adds to the gradients of its scaled queries, its keys and its values."""

    query: Tensor
    key: Tensor
    value: Tensor


def tile_gradients(
    logits: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, grad_output: Tensor, delta: Tensor
) -> TileGradients:
    """Differentiate one tile; ``logits`` is overwritten, ``delta`` is the row sum of output times its gradient."""
    P = logits.sub_(lse[..., None]).exp_()
    grad_value = P.mT @ grad_output
    grad_logits = (grad_output @ value.mT).sub_(delta[..., None]).mul_(P)
    return TileGradients(grad_logits @ key, grad_logits.mT @ query, grad_value)


class Tile(NamedTuple):
    """Which queries meet which keys, in a head laid out as ``(g, blocks, block)``.

    Attributes:
        queries: Slices of blocks and of places within them.
        keys: The same for the keys.
        forbidden: bool, broadcastable to the tile's logits, True where a query may not look.
        transposed: Whether the batch runs over places (columns of a stride) rather than blocks.
        merged: Whether all its queries meet all its keys, as one matrix.
    """

    queries: tuple[slice, slice]
    keys: tuple[slice, slice]
    forbidden: Tensor | None
    transposed: bool = False
    merged: bool = False

    def view(self, x: Tensor, where: tuple[slice, slice]) -> Tensor:
        """Return a view ``(g, batch, rows, c)`` of ``x (g, blocks, block, c)``."""
        taken = x[:, where[0], where[1]]
        return taken.transpose(1, 2) if self.transposed else taken

    def matrix(self, x: Tensor, where: tuple[slice, slice]) -> Tensor:
        """Return that view as the operand of a product: one matrix if merged."""
        taken = self.view(x, where)
        return taken.flatten(1, 2)[:, None] if self.merged else taken

    def logits(self, query: Tensor, key: Tensor, absent: Tensor | None) -> Tensor:
        """Return the tile's logits, ``-inf`` where a query may not look or no key is."""
        logits = self.matrix(query, self.queries) @ self.matrix(key, self.keys).mT
        if self.forbidden is not None:
            logits.masked_fill_(self.forbidden, -torch.inf)
        if absent is not None:
            logits.masked_fill_(self.matrix(absent[..., None], self.keys).mT, -torch.inf)
        return logits


def _pieces(count: int, size: int, most: int) -> Iterator[slice]:
    """Cut ``count`` things of ``size`` entries into runs of at most ``most`` entries."""
    step = max(1, most // size)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


ALL = slice(None)


def band_tiles(blocks: int, block: int, bounds: tuple[int, int], most: int, device: torch.device) -> Iterator[Tile]:
    """Yield the tiles in which ``bounds[0] <= i - j <= bounds[1]``.

    Args:
        blocks: Number of blocks.
        block: Tokens in one.
        bounds: Smallest and largest distance from key to query; negative ones look ahead.
        most: Largest number of logits at once.
        device: Where the masks live.
    """
    lower, upper = bounds
    place = torch.arange(block, device=device)
    furthest_back = min((upper + block - 1) // block, blocks - 1)
    furthest_ahead = min((-lower + block - 1) // block, blocks - 1)
    for back in range(-furthest_ahead, furthest_back + 1):
        distance = back * block + place[:, None] - place
        forbidden: Tensor | None = (distance < lower) | (distance > upper)
        if (back - 1) * block + 1 >= lower and (back + 1) * block - 1 <= upper:
            forbidden = None
        for run in _pieces(blocks - abs(back), block * block, most):
            queries = slice(run.start + max(back, 0), run.stop + max(back, 0))
            keys = slice(run.start + max(-back, 0), run.stop + max(-back, 0))
            yield Tile((queries, ALL), (keys, ALL), forbidden)


def own_tiles(blocks: int, block: int, causal: bool, most: int, device: torch.device) -> Iterator[Tile]:
    """Yield the tiles in which queries meet the keys of their own block."""
    forbidden = torch.ones(block, block, dtype=torch.bool, device=device).triu(1) if causal else None
    for run in _pieces(blocks, block * block, most):
        yield Tile((run, ALL), (run, ALL), forbidden)


def column_tiles(blocks: int, block: int, causal: bool, most: int, device: torch.device) -> Iterator[Tile]:
    """Yield the tiles of keys a whole number of strides away, the query's own place left out."""
    forbidden = torch.ones(blocks, blocks, dtype=torch.bool, device=device)
    forbidden = forbidden.triu() if causal else forbidden.triu() & forbidden.tril()
    for run in _pieces(block, blocks * blocks, most):
        yield Tile((ALL, run), (ALL, run), forbidden, transposed=True)


def summary_tiles(
    blocks: int, block: int, summary: int, causal: bool, most: int, device: torch.device
) -> Iterator[Tile]:
    """Yield the tiles of the last ``summary`` keys of the other blocks (of earlier ones, if causal)."""
    own = torch.arange(blocks, device=device)
    for run in _pieces(blocks, block * blocks * summary, most):
        last = run.stop - 1 if causal else blocks
        if last == 0:
            continue
        query_block = own[run].repeat_interleave(block)[:, None]
        key_block = own[:last].repeat_interleave(summary)
        forbidden = key_block >= query_block if causal else key_block == query_block
        yield Tile((run, ALL), (slice(0, last), slice(block - summary, block)), forbidden, merged=True)


def _tiles(pattern: str, sizes: list[int], blocks: int, most: int, device: torch.device) -> Iterator[Tile]:
    if pattern == "band":
        block, lower, upper = sizes
        yield from band_tiles(blocks, block, (lower, upper), most, device)
    elif pattern == "strided":
        block, causal = sizes
        yield from band_tiles(blocks, block, (0 if causal else 1 - block, block - 1), most, device)
        yield from column_tiles(blocks, block, bool(causal), most, device)
    else:
        block, causal, summary = sizes
        yield from own_tiles(blocks, block, bool(causal), most, device)
        yield from summary_tiles(blocks, block, summary, bool(causal), most, device)


class _Heads:
    """Heads in groups of a bounded number of tokens, each copied into whole blocks."""

    def __init__(self, query: Tensor, pattern: str, sizes: list[int]) -> None:
        self.pattern, self.sizes, self.block = pattern, sizes, sizes[0]
        batch, self.heads, self.n, self.width = query.shape
        self.blocks = (self.n + self.block - 1) // self.block
        self.total = batch * self.heads
        self.dtype, self.budget = working_dtype(query), budget(query.device)
        self.group = max(1, self.budget.tokens // max(1, self.blocks * self.block))

    def groups(self) -> Iterator[slice]:
        return (slice(start, min(start + self.group, self.total)) for start in range(0, self.total, self.group))

    def cut(self, x: Tensor, group: slice) -> Tensor:
        """Return ``(g, blocks, block, *)`` of a tensor ``(b * h, n, *)``, zeros after n."""
        part = x[group]
        padded = x.new_zeros(part.shape[0], self.blocks * self.block, *x.shape[2:], dtype=self.dtype)
        padded[:, : self.n] = part
        return padded.unflatten(1, (self.blocks, self.block))

    def uncut(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)[:, : self.n]

    def tiles(self, group: slice, device: torch.device) -> Iterator[Tile]:
        most = self.budget.logits // (group.stop - group.start)
        return _tiles(self.pattern, self.sizes, self.blocks, most, device)

    def absent(self, absent: Tensor | None, group: slice, device: torch.device) -> Tensor | None:
        """Return bool ``(g, blocks, block)``: where no key is; ``None`` where no query would look there."""
        causal = self.sizes[1] >= 0 if self.pattern == "band" else bool(self.sizes[1])
        if causal or (absent is None and self.blocks * self.block == self.n):
            return None  # keys that are absent come after every query whose output is kept
        width = self.blocks * self.block
        gone = torch.ones(group.stop - group.start, width, dtype=torch.bool, device=device)
        row = torch.arange(group.start, group.stop, device=device) // self.heads
        gone[:, : self.n] = False if absent is None else absent[row]
        return gone.unflatten(1, (self.blocks, self.block))


@torch.library.custom_op("rankscope::pattern_attention", mutates_args=())
def _pattern_attention(
    query: Tensor, key: Tensor, value: Tensor, absent: Tensor | None, pattern: str, sizes: list[int], scaling: float
) -> tuple[Tensor, Tensor]:
    layout = _Heads(query, pattern, sizes)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:-1], dtype=layout.dtype, device=query.device)
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    for group in layout.groups():
        q, k, v = (layout.cut(x, group) for x in flat)
        q.mul_(scaling)
        gone = layout.absent(absent, group, query.device)
        state = empty_state(q)
        for tile in layout.tiles(group, query.device):
            rows = (tile.view(x, tile.queries) for x in (state.peak[..., None], state.total[..., None], state.output))
            peak, total, weighted = rows
            absorb(
                SoftmaxState(peak[..., 0], total[..., 0], weighted), tile.logits(q, k, gone), tile.matrix(v, tile.keys)
            )
        result, row_lse = finish(state)
        output.flatten(0, 1)[group] = layout.uncut(result).to(output.dtype)
        lse.flatten(0, 1)[group] = layout.uncut(row_lse)
    return output, lse


@_pattern_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, absent: Tensor | None, pattern: str, sizes: list[int], scaling: float
) -> tuple[Tensor, Tensor]:
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return output, torch.empty(query.shape[:-1], dtype=working_dtype(query), device=query.device)


@torch.library.custom_op("rankscope::pattern_attention_backward", mutates_args=())
def _pattern_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    absent: Tensor | None,
    output: Tensor,
    lse: Tensor,
    pattern: str,
    sizes: list[int],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _Heads(query, pattern, sizes)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    flat = [x.flatten(0, 1) for x in (query, key, value, grad_output, output, lse)]
    for group in layout.groups():
        q, k, v, grad, out, row_lse = (layout.cut(x, group) for x in flat)
        q.mul_(scaling)
        gone = layout.absent(absent, group, query.device)
        delta = out.mul_(grad).sum(dim=-1)
        sums = [torch.zeros_like(q) for _ in range(3)]
        for tile in layout.tiles(group, query.device):
            added = tile_gradients(
                tile.logits(q, k, gone),
                tile.matrix(q, tile.queries),
                tile.matrix(k, tile.keys),
                tile.matrix(v, tile.keys),
                tile.matrix(row_lse[..., None], tile.queries)[..., 0],
                tile.matrix(grad, tile.queries),
                tile.matrix(delta[..., None], tile.queries)[..., 0],
            )
            for total, part, where in zip(sums, added, (tile.queries, tile.keys, tile.keys), strict=True):
                target = tile.view(total, where)
                target.add_(part.view(target.shape))
        sums[0].mul_(scaling)
        for whole, total in zip(grads, sums, strict=True):
            whole.flatten(0, 1)[group] = layout.uncut(total).to(whole.dtype)
    return grads[0], grads[1], grads[2]


@_pattern_attention_backward.register_fake
def _(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    absent: Tensor | None,
    output: Tensor,
    lse: Tensor,
    pattern: str,
    sizes: list[int],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    return made[0], made[1], made[2]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, absent, ctx.pattern, ctx.sizes, ctx.scaling = inputs
    ctx.save_for_backward(query, key, value, absent, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad_output, _grad_lse):  # type: ignore[no-untyped-def]
    grads = _pattern_attention_backward(grad_output, *ctx.saved_tensors, ctx.pattern, ctx.sizes, ctx.scaling)
    return *grads, None, None, None, None


_pattern_attention.register_autograd(_differentiate, setup_context=_save)


def pattern_attention(
    query: Tensor, key: Tensor, value: Tensor, absent: Tensor | None, pattern: str, sizes: list[int], scaling: float
) -> Tensor:
    """Softmax attention over a pattern of blocks.

    Args:
        query: ``(b, h, n, head_dim)``.
        key: The same shape.
        value: The same shape.
        absent: bool ``(b, n)``, True where there is no key; such keys must follow all others.
        pattern: ``"band"`` with sizes ``block, lower, upper``; ``"strided"`` with ``block, causal``; ``"fixed"``
            with ``block, causal, summary``.
        sizes: Its integers.
        scaling: Factor of the logits.

    Returns:
        ``(b, h, n, head_dim)``; zeros for a query that may look nowhere.

    Example:
        >>> x = torch.ones(1, 1, 5, 2)
        >>> pattern_attention(x, x, x, None, "band", [2, 0, 1], 1.0).shape
        torch.Size([1, 1, 5, 2])
    """
    return _pattern_attention(query, key, value, absent, pattern, sizes, scaling)[0]
