"""The Linformer layer for decoders, from a layer's input to its output, in training and step by step.

What a model does with this module::

    chunks = ChunkProjection(rule, num_heads=12, width=768, kind="dynamic", generator=None)   # one a layer
    hidden = attend_causal(hidden, weights, chunks, num_heads=12, key_padding_mask=mask)      # training
    cache = chunks.cache()                                                                    # decoding
    hidden = attend_causal(prompt, weights, chunks, num_heads=12, key_padding_mask=mask, cache=cache)
    hidden = attend_causal(token, weights, chunks, num_heads=12, cache=cache)                 # one token a row
"""

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.attention.linformer_causal import CausalCache, ChunkRule, Compression, linformer_causal
from rankscope.models.linformer_attention import Weights, merge_heads, split_heads

CHUNK_KINDS: Registry[str] = Registry(
    "projection",
    {
        "dynamic": "softmax, inside the chunk, of weights read off the layer's input",
        "learned": "one E and one F for every chunk, shared by the heads",
        "mean": "means of equal runs, nothing to train",
    },
)


class ChunkProjection(nn.Module):
    """What compresses the chunks of one layer.

    Args:
        rule: How the sequence is cut.
        num_heads: Heads of the layer; ``"dynamic"`` has weights for each.
        width: Channels of the layer's input.
        kind: A row of ``CHUNK_KINDS``.
        generator: Source of the starting values; ``None`` takes PyTorch's default generator.

    Raises:
        RankscopeError: An unknown kind.

    Example:
        >>> chunks = ChunkProjection(ChunkRule(16, 1, 64), num_heads=2, width=8, kind="dynamic", generator=None)
        >>> chunks.weight.shape
        torch.Size([2, 8])
    """

    def __init__(
        self, rule: ChunkRule, *, num_heads: int, width: int, kind: str, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        CHUNK_KINDS[kind]
        self.rule, self.kind, self.num_heads = rule, kind, num_heads
        if kind == "dynamic":
            self.weight = nn.Parameter(torch.empty(num_heads * rule.rank, width))
        elif kind == "learned":
            self.E = nn.Parameter(torch.empty(rule.rank, rule.chunk))
            self.F = nn.Parameter(torch.empty(rule.rank, rule.chunk))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw the values so that logits (dynamic) or compressed keys (learned) keep the scale of their source."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)

    def compression(self) -> Compression:
        """Return the matrices, where there are any."""
        return Compression(self.E, self.F) if self.kind == "learned" else Compression()

    def pooling_logits(self, hidden: Tensor) -> Tensor | None:
        """Return the tokens' logits ``(b, h, n, r)``, where the kind reads them."""
        return (
            split_heads(nn.functional.linear(hidden, self.weight), self.num_heads) if self.kind == "dynamic" else None
        )

    def cache(self) -> CausalCache:
        """Return an empty cache for one generation."""
        return CausalCache(self.rule, self.compression())


def attend_causal(
    hidden: Tensor,
    weights: Weights,
    chunks: ChunkProjection,
    *,
    num_heads: int,
    key_padding_mask: Tensor | None = None,
    cache: CausalCache | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal Linformer attention from a layer's input to its output.

    Args:
        hidden: ``(b, n, d)``; with a filled cache one token, ``n = 1``.
        weights: The four linear maps.
        chunks: What compresses the chunks.
        num_heads: Number of heads.
        key_padding_mask: bool ``(b, n)`` of these tokens, True = padding; decoded tokens are never padding.
        cache: Taken in and extended; ``None`` in training.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        dropout: Probability with which a probability is dropped; pass 0 in evaluation.

    Returns:
        ``(b, n, d_out)``; at padded positions what ``output`` makes of zeros.

    Raises:
        RankscopeError: A mask or several tokens beside a filled cache.

    Example:
        >>> rule = ChunkRule(chunk=2, rank=1, window=2)
        >>> chunks = ChunkProjection(rule, num_heads=2, width=8, kind="dynamic", generator=None)
        >>> weights = Weights(*(nn.Linear(8, 8) for _ in range(4)))
        >>> x, cache = torch.randn(1, 7, 8), chunks.cache()
        >>> with torch.no_grad():
        ...     whole = attend_causal(x, weights, chunks, num_heads=2)
        ...     prompt = attend_causal(x[:, :6], weights, chunks, num_heads=2, cache=cache)
        ...     last = attend_causal(x[:, 6:], weights, chunks, num_heads=2, cache=cache)
        >>> torch.testing.assert_close(torch.cat([prompt, last], dim=1), whole)
    """
    query, key, value = (split_heads(linear(hidden), num_heads) for linear in weights[:3])
    pooling = chunks.pooling_logits(hidden)
    if cache is not None and cache.tokens:
        if key_padding_mask is not None:
            raise RankscopeError("`key_padding_mask` belongs to the prompt: leave it out beside a filled cache")
        if scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)
        return weights.output(merge_heads(cache.step(query, key, value, pooling_logits=pooling)))
    if cache is not None:
        cache.prefill(key, value, pooling_logits=pooling, key_padding_mask=key_padding_mask)
    compression, rule = chunks.compression(), chunks.rule
    attended = linformer_causal(
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        scaling=scaling,
        chunk=rule.chunk,
        rank=rule.rank,
        window=rule.window,
        E=compression.E,
        F=compression.F,
        pooling_logits=pooling,
        dropout=dropout,
    )
    return weights.output(merge_heads(attended))
