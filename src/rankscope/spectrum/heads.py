"""One head in one window: from what the attention interface hands out to numbers about its context map."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.attention.interface import AttentionCall


@dataclass(frozen=True)
class Head:
    """One head's attention in one window, padding already cut out.

    Either ``query`` and ``key`` are given (the model uses the attention interface) or ``weights``, the map as
    the model's own eager code made it.

    Args:
        query: ``(n, d)`` or ``None``.
        key: ``(m, d)`` or ``None``.
        scaling: Factor on the products.
        bias: Additive mask and position bias, float32 ``(n, m)``, or ``None``.
        softcap: The model's cap on content logits, or ``None``.
        sink: The head's sink logit, or ``None``; rows then sum to less than 1.
        weights: ``(n, m)`` or ``None``.
        width: The head's dimension, for a null that draws query and key.
    """

    query: Tensor | None
    key: Tensor | None
    scaling: float
    bias: Tensor | None
    softcap: float | None
    sink: Tensor | None
    weights: Tensor | None
    width: int

    @property
    def device(self) -> torch.device:
        """Where the head's tensors lie."""
        seen = self.weights if self.query is None else self.query
        assert seen is not None
        return seen.device

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the map: query tokens, key tokens."""
        if self.weights is not None:
            return self.weights.shape[0], self.weights.shape[1]
        assert self.query is not None
        assert self.key is not None
        return len(self.query), len(self.key)

    def allowed(self) -> Tensor | None:
        """Entries the mask lets through, bool ``(n, m)``; ``None`` when all are."""
        if self.weights is not None:
            positive = self.weights > 0
            return None if bool(positive.all()) else positive
        if self.bias is None:
            return None
        open_ = self.bias > torch.finfo(torch.float32).min / 2
        return None if bool(open_.all()) else open_

    def content_of(self, query: Tensor, key: Tensor) -> Tensor:
        """Content logits of any query and key by this head's scaling and cap, float32 ``(n, m)``."""
        logits = self.scaling * (query.float() @ key.float().mT)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def content_logits(self) -> Tensor:
        """The head's logits before mask and position bias; from weights alone, their logarithm."""
        if self.weights is not None:
            return self.weights.float().clamp_min(torch.finfo(torch.float32).tiny).log()
        assert self.query is not None
        assert self.key is not None
        return self.content_of(self.query, self.key)

    def map_of(self, content: Tensor) -> Tensor:
        """The map that given content logits make under this head's mask, bias and sink, float32 ``(n, m)``."""
        if self.weights is not None:
            allowed = self.allowed()
            floor = torch.finfo(torch.float32).min
            return torch.softmax(content if allowed is None else content.masked_fill(~allowed, floor), dim=-1)
        logits = content if self.bias is None else content + self.bias
        if self.sink is None:
            return torch.softmax(logits, dim=-1)
        column = self.sink.float().reshape(1, 1).expand(len(logits), 1)
        return torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[:, :-1]

    def context_map(self) -> Tensor:
        """P, float32 ``(n, m)``."""
        return self.weights.float() if self.weights is not None else self.map_of(self.content_logits())


def logit_deviation(content: Tensor, allowed: Tensor | None) -> float:
    """Root of the mean within-row variance over allowed entries; softmax ignores a row's offset.

    Example:
        >>> round(logit_deviation(torch.tensor([[1.0, -1.0], [5.0, 5.0]]), None), 4)
        0.7071
    """
    x = content.double()
    if allowed is None:
        return float(x.var(dim=-1, correction=0).mean().sqrt())
    count = allowed.sum(dim=-1).clamp_min(1)
    x = x.masked_fill(~allowed, 0.0)
    mean = x.sum(dim=-1) / count
    squares = ((x - mean.unsqueeze(-1)) ** 2).masked_fill(~allowed, 0.0).sum(dim=-1) / count
    kept = allowed.any(dim=-1)
    return float(squares[kept].mean().sqrt()) if bool(kept.any()) else 0.0


def heads_of(
    call: AttentionCall, row: int, valid: Tensor | None, chosen: Sequence[int] | None, *, fallback_width: int
) -> Iterator[tuple[int, Head]]:
    """Take one batch row of a captured call apart into heads, padded rows and columns cut out.

    Args:
        call: What capture handed out.
        row: Which example of the batch.
        valid: bool ``(n,)``, True for real tokens, or ``None`` when all are; rows and columns are the same tokens.
        chosen: Heads to take, or ``None`` for all.
        fallback_width: The head dimension to note where the call brings only weights.
    """

    def cut(matrix: Tensor) -> Tensor:
        return matrix if valid is None else matrix[valid][:, valid]

    if call.weights is not None:
        heads = call.weights.shape[1]
        for head in chosen if chosen is not None else range(heads):
            weights = cut(call.weights[row, head]).clone()
            yield head, Head(None, None, 1.0, None, None, None, weights, fallback_width)
        return
    assert call.query is not None
    assert call.key is not None
    assert call.scaling is not None
    bias = call.bias()
    heads = call.query.shape[1]
    groups = heads // call.key.shape[1]
    shared_bias: dict[int, Tensor] = {}
    for head in chosen if chosen is not None else range(heads):
        query, key = call.query[row, head], call.key[row, head // groups]
        head_bias = None
        if bias is not None:
            plane = head if bias.shape[1] > 1 else 0
            if plane not in shared_bias:
                whole = bias[row if bias.shape[0] > 1 else 0, plane].expand(len(query), len(key))
                shared_bias[plane] = cut(whole)
            head_bias = shared_bias[plane]
        yield (
            head,
            Head(
                query=query if valid is None else query[valid],
                key=key if valid is None else key[valid],
                scaling=float(call.scaling),
                bias=head_bias,
                softcap=call.softcap,
                sink=None if call.sinks is None else call.sinks[head],
                weights=None,
                width=query.shape[-1],
            ),
        )
