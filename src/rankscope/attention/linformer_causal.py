"""Linformer for decoders: a window seen exactly, every chunk before it compressed to a few keys.

The plain form mixes all positions into each compressed key, so it cannot be causal. Here chunk j (tokens
c j … c (j+1) − 1) is compressed on its own and shown only to queries it lies wholly before::

    query in chunk g sees   exactly:      the tokens of chunks g − a … g up to itself
                            compressed:   chunks 0 … g − a − 1, r keys each          (one softmax over both)

so every earlier token is represented once, and a window as long as the text is causal softmax attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rankscope._errors import RankscopeError
from rankscope.attention._contract import Mechanism, register
from rankscope.attention._layout import TokenLayout, compact, restore, token_layout
from rankscope.attention.exact import check_causal, check_shapes


@dataclass(frozen=True)
class ChunkRule:
    """How a sequence is cut.

    Args:
        chunk: c, tokens a chunk.
        rank: r, keys a chunk outside the window leaves, ``1 <= r <= c``.
        window: Tokens every query sees exactly, itself included, at least; rounded up to whole chunks.

    Raises:
        RankscopeError: A size out of range.

    Example:
        >>> ChunkRule(chunk=16, rank=1, window=33).past
        2
    """

    chunk: int = 16
    rank: int = 1
    window: int = 128

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise RankscopeError(f"`chunk` must be at least 1, got {self.chunk}")
        if not 1 <= self.rank <= self.chunk:
            raise RankscopeError(f"`rank` must be in 1..chunk={self.chunk}, got {self.rank}")
        if self.window < 1:
            raise RankscopeError(f"`window` must be at least 1 (the token itself), got {self.window}")

    @property
    def past(self) -> int:
        """a, how many whole chunks before a query's own are seen exactly."""
        return -(-(self.window - 1) // self.chunk)

    @property
    def span(self) -> int:
        """Tokens the exact part holds, ``(a + 1) c``."""
        return (self.past + 1) * self.chunk


@dataclass(frozen=True)
class Compression:
    """What turns a chunk into r keys and r values.

    Args:
        E: ``(r, c)`` or ``(h, r, c)``, the same for every chunk; ``None``: means of r equal runs.
        F: The same for the values; default E.
    """

    E: Tensor | None = None
    F: Tensor | None = None

    def check(self, rule: ChunkRule, heads: int, pooling: bool) -> None:
        """Refuse matrices that do not fit ``rule``, and matrices beside ``pooling_logits``.

        Raises:
            RankscopeError: Which one, what came.
        """
        if self.E is None and self.F is not None:
            raise RankscopeError("`F` was given without `E`: give both, or `E` alone to serve keys and values")
        if pooling and self.E is not None:
            raise RankscopeError("`E` and `pooling_logits` both say how a chunk is compressed: give one")
        wanted = (rule.rank, rule.chunk)
        for name, matrix in (("E", self.E), ("F", self.F)):
            if matrix is not None and tuple(matrix.shape) not in (wanted, (heads, *wanted)):
                raise RankscopeError(
                    f"`{name}` must have shape (rank, chunk) = {wanted} or (heads={heads}, rank, chunk), "
                    f"got {tuple(matrix.shape)}"
                )

    def matrices(self, rule: ChunkRule, pooling: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return what multiplies chunks ``(b, h, G, c, head_dim)`` of keys and of values from the left.

        Args:
            rule: How the sequence is cut.
            pooling: ``(b, 1 or h, G, c, r)``, logits of the tokens of each chunk, or ``None``.
            like: Gives dtype and device.
        """
        if pooling is not None:
            dtype = torch.promote_types(pooling.dtype, torch.float32)
            weights = pooling.softmax(dim=-2, dtype=dtype).to(like.dtype).mT
            return weights, weights
        if self.E is None:
            mean = _mean_matrix(rule.rank, rule.chunk, like)
            return mean, mean
        F = self.E if self.F is None else self.F
        return _for_chunks(self.E).to(like.dtype), _for_chunks(F).to(like.dtype)


def _mean_matrix(rank: int, chunk: int, like: Tensor) -> Tensor:
    """``(r, c)``: row i is the mean of tokens ⌊i c / r⌋ … ⌈(i+1) c / r⌉ − 1."""
    row = torch.arange(rank, device=like.device)[:, None]
    token = torch.arange(chunk, device=like.device)
    member = (token >= row * chunk // rank) & (token < ((row + 1) * chunk + rank - 1) // rank)
    return member.to(like.dtype) / member.sum(dim=-1, keepdim=True)


def _for_chunks(matrix: Tensor) -> Tensor:
    """``(h, r, c)`` to ``(h, 1, r, c)``; ``(r, c)`` stays."""
    return matrix if matrix.ndim == 2 else matrix[:, None]


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """``(b, h, n, c)`` to ``(b, h, G, chunk, c)``, zeros at the end of the last."""
    return pad(x, (0, 0, 0, -x.shape[-2] % chunk)).unflatten(-2, (-1, chunk))


def _local(chunks: Tensor, past: int) -> Tensor:
    """Each chunk behind its ``past`` predecessors, ``(b, h, G, (past + 1) chunk, c)``."""
    count = chunks.shape[2]
    padded = pad(chunks, (0, 0, 0, 0, past, 0))
    return torch.cat([padded[:, :, i : i + count] for i in range(past + 1)], dim=-2)


def _visible(rule: ChunkRule, count: int, device: torch.device) -> Tensor:
    """Bool ``(G, c, G r + span)``: which compressed and which exact keys each query sees."""
    block = torch.arange(count, device=device)
    far = block[None, :] < block[:, None] - rule.past
    far = far.repeat_interleave(rule.rank, dim=-1)[:, None, :].expand(-1, rule.chunk, -1)
    place = torch.arange(rule.span, device=device)
    own = torch.arange(rule.chunk, device=device)[:, None] + rule.past * rule.chunk
    there = place + (block[:, None, None] - rule.past) * rule.chunk >= 0
    return torch.cat([far, (place <= own) & there], dim=-1)


def linformer_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = True,
    chunk: int = 16,
    rank: int = 1,
    window: int = 128,
    E: Tensor | None = None,
    F: Tensor | None = None,
    pooling_logits: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    r"""Causal attention with an exact window and compressed chunks before it, cost O(n (n r / c + window)).

    .. math:: o_t = \mathrm{softmax}\big(\text{scaling} \cdot q_t [\bar K_{<}; K_{local}]^\top\big)
              [\bar V_{<}; V_{local}], \qquad \bar K_j = E_j K_j

    Chunks are counted from each row's first valid token. Anchors: with ``window >= n``, or ``rank = chunk`` and
    E the identity, it is causal softmax attention.

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, n, head_dim)``.
        value: ``(b, h, n, head_dim)``.
        key_padding_mask: bool ``(b, n)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        is_causal: True; for attention that looks ahead take ``linformer``.
        chunk: c, tokens a chunk.
        rank: r, keys and values a compressed chunk leaves.
        window: Tokens seen exactly, at least; rounded up to whole chunks.
        E: ``(r, c)`` or ``(h, r, c)``, compresses the keys of every chunk. Without it and ``pooling_logits``:
            means of r equal runs.
        F: The same for values; default E.
        pooling_logits: ``(b, 1 or h, n, r)``, one row a token; their softmax over a chunk's tokens compresses
            its keys and values.
        dropout: Probability with which a probability is dropped.

    Returns:
        ``(b, h, n, head_dim)``; zeros at padded positions.

    Raises:
        RankscopeError: Shapes, sizes, ``is_causal=False``, query and key of two lengths.

    References:
        Zhu et al. 2021, arXiv 2107.02192 (chunks compressed by a softmax inside each; there the window and the
        compressed chunks overlap, here they do not).

    Example:
        >>> x = torch.randn(1, 2, 40, 4, generator=torch.Generator().manual_seed(0))
        >>> exact = scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.testing.assert_close(linformer_causal(x, x, x, window=40), exact)
    """
    check_shapes(query, key, value)
    if not is_causal:
        raise RankscopeError("`is_causal`=False: this form is causal by construction; take `linformer` instead")
    batch, heads, n, head_dim = query.shape
    check_causal(n, key.shape[-2])
    rule, compression = ChunkRule(chunk, rank, window), Compression(E, F)
    compression.check(rule, heads, pooling_logits is not None)
    _check_pooling(pooling_logits, rule, batch, heads, n)
    layout = token_layout(key_padding_mask, batch, n)
    query, key, value = (_chunks(compact(x, layout), chunk) for x in (query, key, value))
    pooling = None if pooling_logits is None else _chunks(compact(pooling_logits, layout), chunk)
    far_key, far_value = _compress(compression, rule, key, value, pooling)
    scaling = head_dim**-0.5 if scaling is None else scaling
    scaled = query * scaling
    logits = torch.cat([scaled @ far_key.unsqueeze(2).mT, scaled @ _local(key, rule.past).mT], dim=-1)
    seen = _visible(rule, query.shape[2], query.device)
    P = logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(dim=-1)
    if dropout:
        P = torch.nn.functional.dropout(P, dropout)
    far, near = P.split([far_key.shape[-2], rule.span], dim=-1)
    output = far @ far_value.unsqueeze(2) + near @ _local(value, rule.past)
    return restore(output.flatten(2, 3)[:, :, :n], layout)


def _check_pooling(pooling_logits: Tensor | None, rule: ChunkRule, batch: int, heads: int, n: int) -> None:
    if pooling_logits is None:
        return
    wanted = [(batch, h, n, rule.rank) for h in (1, heads)]
    if tuple(pooling_logits.shape) not in wanted:
        raise RankscopeError(
            f"`pooling_logits` must have shape (batch={batch}, 1 or heads={heads}, n={n}, rank={rule.rank}), "
            f"got {tuple(pooling_logits.shape)}"
        )


def _compress(
    compression: Compression, rule: ChunkRule, key: Tensor, value: Tensor, pooling: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compressed keys and values of chunks ``(b, h, G, c, head_dim)``, each ``(b, h, G r, head_dim)``."""
    for_keys, for_values = compression.matrices(rule, pooling, key)
    return (for_keys @ key).flatten(2, 3), (for_values @ value).flatten(2, 3)


class CausalCache:
    """What step-by-step decoding keeps: the exact window and r keys for each chunk before it.

    Law: prefilling with n tokens equals n steps, and every step's output equals the last row of
    :func:`linformer_causal` on the text so far, for each row of a batch by its own tokens.

    Args:
        rule: How the sequence is cut.
        compression: What compresses a chunk that leaves the window.

    Example:
        >>> x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
        >>> cache = CausalCache(ChunkRule(chunk=2, rank=1, window=3))
        >>> cache.prefill(x[:, :, :8], x[:, :, :8])
        >>> step = cache.step(x[:, :, 8:], x[:, :, 8:], x[:, :, 8:])
        >>> whole = linformer_causal(x, x, x, chunk=2, rank=1, window=3)
        >>> torch.testing.assert_close(step, whole[:, :, 8:])
    """

    def __init__(self, rule: ChunkRule, compression: Compression | None = None) -> None:
        self.rule = rule
        self.compression = Compression() if compression is None else compression
        self.tokens = 0
        self._exact: list[Tensor] = []
        self._far: list[Tensor] = []
        self._fill = self._count = torch.zeros(0)

    def prefill(
        self,
        key: Tensor,
        value: Tensor,
        *,
        pooling_logits: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> None:
        """Take in a prompt, whose outputs :func:`linformer_causal` gives.

        Args:
            key: ``(b, h, n, head_dim)``.
            value: ``(b, h, n, head_dim)``.
            pooling_logits: As in :func:`linformer_causal`; then every step needs them too.
            key_padding_mask: bool ``(b, n)``, True = padding.

        Raises:
            RankscopeError: The cache holds tokens already, or shapes do not fit.
        """
        if self.tokens:
            raise RankscopeError(f"`prefill` needs an empty cache, this one holds {self.tokens} tokens: make a new one")
        check_shapes(key, key, value)
        rule, (batch, heads, n, _) = self.rule, key.shape
        self.compression.check(rule, heads, pooling_logits is not None)
        _check_pooling(pooling_logits, rule, batch, heads, n)
        layout = token_layout(key_padding_mask, batch, n)
        parts = [compact(x, layout) for x in (key, value, pooling_logits) if x is not None]
        cut = [_chunks(x, rule.chunk) for x in parts]
        self._far = list(_compress(self.compression, rule, cut[0], cut[1], cut[2] if len(cut) > 2 else None))
        lengths = _lengths(layout, batch, key.device)
        self._count = ((lengths - 1) // rule.chunk - rule.past).clamp(min=0)
        self._fill = lengths - self._count * rule.chunk
        place = self._count[:, None] * rule.chunk + torch.arange(rule.span, device=key.device)
        self._exact = [_rows(x, place.clamp(max=n - 1)) for x in parts]
        self.tokens = n

    def step(self, query: Tensor, key: Tensor, value: Tensor, *, pooling_logits: Tensor | None = None) -> Tensor:
        """Add one token to every row and attend from it.

        Args:
            query: ``(b, h, 1, head_dim)``.
            key: ``(b, h, 1, head_dim)``.
            value: ``(b, h, 1, head_dim)``.
            pooling_logits: ``(b, 1 or h, 1, r)`` where the prompt had them.

        Returns:
            ``(b, h, 1, head_dim)``.

        Raises:
            RankscopeError: More than one token, or ``pooling_logits`` given once and not again.
        """
        if query.shape[-2] != 1 or key.shape[-2] != 1:
            raise RankscopeError(f"`query` and `key` must hold one token, got {query.shape[-2]} and {key.shape[-2]}")
        if not self.tokens:
            self.prefill(key, value, pooling_logits=pooling_logits)
        else:
            self._push([x for x in (key, value, pooling_logits) if x is not None])
        rule = self.rule
        far = torch.arange(self._far[0].shape[-2], device=key.device) < self._count[:, None] * rule.rank
        near = torch.arange(rule.span, device=key.device) < self._fill[:, None]
        seen = torch.cat([far, near], dim=-1)[:, None, None, :]
        keys, values = (torch.cat([f, e], dim=-2) for f, e in zip(self._far, self._exact, strict=False))
        return scaled_dot_product_attention(query, keys, values, attn_mask=seen)

    def reorder(self, index: Tensor) -> None:
        """Keep the rows ``index (b',)``, as beam search asks."""
        self._exact = [x.index_select(0, index) for x in self._exact]
        self._far = [x.index_select(0, index) for x in self._far]
        self._fill, self._count = self._fill.index_select(0, index), self._count.index_select(0, index)

    def _push(self, token: list[Tensor]) -> None:
        """Append a token; where the window is full its oldest chunk is compressed first."""
        if len(token) != len(self._exact):
            raise RankscopeError("`pooling_logits` must be given at every step or at none")
        rule = self.rule
        full = self._fill == rule.span
        oldest = [x[:, :, None, : rule.chunk] for x in self._exact]
        new = _compress(self.compression, rule, oldest[0], oldest[1], oldest[2] if len(oldest) > 2 else None)
        if (self._most_chunks() + 1) * rule.rank > self._far[0].shape[-2]:
            # Doubling, so that a long text copies each compressed key a bounded number of times.
            self._far = [torch.cat([x, torch.zeros_like(x)], dim=-2) for x in self._far]
        slot = self._count[:, None] * rule.rank + torch.arange(rule.rank, device=full.device)
        where = full[:, None, None, None]
        self._far = [
            torch.where(where, _put(x, slot.clamp(max=x.shape[-2] - 1), y), x)
            for x, y in zip(self._far, new, strict=True)
        ]
        self._exact = [torch.where(where, x.roll(-rule.chunk, dims=-2), x) for x in self._exact]
        self._count = self._count + full
        self._fill = self._fill - full * rule.chunk
        self._exact = [_put(x, self._fill[:, None], y) for x, y in zip(self._exact, token, strict=True)]
        self._fill = self._fill + 1
        self.tokens += 1

    def _most_chunks(self) -> int:
        """The largest number of chunks any row can have compressed, known without asking the device."""
        return max((self.tokens - 1) // self.rule.chunk - self.rule.past, 0)


def _lengths(layout: TokenLayout, batch: int, device: torch.device) -> Tensor:
    if layout.lengths is not None:
        return layout.lengths
    return torch.full((batch,), layout.n, device=device)


def _rows(x: Tensor, place: Tensor) -> Tensor:
    """Take tokens ``place (b, t)`` of ``x (b, h, n, c)``."""
    return x.gather(-2, place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def _put(x: Tensor, place: Tensor, token: Tensor) -> Tensor:
    """Write ``token (b, h, t, c)`` at ``place (b, t)`` of ``x (b, h, n, c)``."""
    return x.scatter(-2, place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]), token.to(x.dtype))


register(
    Mechanism(
        name="linformer_causal",
        function=linformer_causal,
        exact=False,
        cost="n^2",
        knob="window",
        source="Zhu et al. 2021, arXiv 2107.02192 (Transformer-LS), after Wang et al. 2020, arXiv 2006.04768",
        self_attention_only=True,
    )
)
