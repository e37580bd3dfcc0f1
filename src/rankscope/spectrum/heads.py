"""One head in one window: from what the attention interface hands out to numbers about its context map."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankscope.attention.interface import AttentionCall

ALL = slice(None)


@dataclass(frozen=True)
class MaskRule:
    """A mask in two words.

    Args:
        is_causal: Whether a query sees no later key.
        window: How many keys it sees at most, itself included; ``None`` for all. Only with ``is_causal``.
    """

    is_causal: bool = False
    window: int | None = None


NO_MASK = MaskRule()
# Rows of logits in hand at a time, so that a deviation needs no n × n matrix.
STRIP = 256


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
        rule: The mask as a rule instead of in ``bias``, for maps that are never written down.
    """

    query: Tensor | None
    key: Tensor | None
    scaling: float
    bias: Tensor | None
    softcap: float | None
    sink: Tensor | None
    weights: Tensor | None
    width: int
    rule: MaskRule = NO_MASK

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

    def allowed(self, rows: slice = ALL) -> Tensor | None:
        """Entries the mask lets through, bool ``(rows, m)``; ``None`` when all are."""
        if self.weights is not None:
            open_ = self.weights[rows] > 0
        elif self.rule.is_causal:
            n, m = self.shape
            ahead = torch.arange(m, device=self.device) - torch.arange(n, device=self.device)[rows].unsqueeze(1)
            open_ = ahead <= 0
            if self.rule.window is not None:
                open_ &= ahead > -self.rule.window
        elif self.bias is None:
            return None
        else:
            open_ = self.bias[rows] > torch.finfo(torch.float32).min / 2
        return None if bool(open_.all()) else open_

    def content_logits(self, rows: slice = ALL) -> Tensor:
        """Logits before mask and position bias, float32 ``(rows, m)``; from weights alone, their logarithm."""
        if self.weights is not None:
            return self.weights[rows].float().clamp_min(torch.finfo(torch.float32).tiny).log()
        assert self.query is not None
        assert self.key is not None
        logits = self.scaling * (self.query[rows].float() @ self.key.float().mT)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def logits(self, rows: slice = ALL) -> Tensor:
        """Content logits plus mask and position bias, float32 ``(rows, m)``."""
        content = self.content_logits(rows)
        allowed = self.allowed(rows) if self.rule.is_causal else None
        if allowed is not None:
            return content.masked_fill(~allowed, torch.finfo(content.dtype).min)
        return content if self.bias is None else content + self.bias[rows]

    def context_map(self) -> Tensor:
        """P, float32 ``(n, m)``."""
        if self.weights is not None:
            return self.weights.float()
        return self.map_of(self.logits())

    def map_of(self, logits: Tensor) -> Tensor:
        """Softmax of logits beside this head's sink, if it has one."""
        if self.sink is None:
            return torch.softmax(logits, dim=-1)
        column = self.sink.float().reshape(1, 1).expand(len(logits), 1)
        return torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[:, :-1]

    def with_map(self, P: Tensor) -> "Head":
        """The head that has P and nothing behind it."""
        return replace(self, query=None, key=None, bias=None, softcap=None, sink=None, weights=P, rule=NO_MASK)


def deviation(head: Head, *, content: bool) -> float:
    """Root of the mean within-row variance of a head's logits over allowed entries, in strips of rows.

    Softmax ignores a row's offset, so the mean of a row does not count.

    Args:
        head: The head.
        content: Of the logits before position bias, rather than of all.

    Returns:
        The deviation; NaN where a logit is not finite.
    """
    total, rows_counted = 0.0, 0
    n, _ = head.shape
    for start in range(0, n, STRIP):
        rows = slice(start, min(start + STRIP, n))
        allowed = head.allowed(rows)
        logits = head.content_logits(rows)
        if not bool(torch.isfinite(logits).all()):
            return math.nan
        if not content and head.bias is not None:
            logits = logits + head.bias[rows]
        variance = row_variance(logits, allowed)
        total += float(variance.sum(dtype=torch.float64))
        rows_counted += len(variance)
    return math.sqrt(total / rows_counted) if rows_counted else 0.0


def row_variance(x: Tensor, allowed: Tensor | None) -> Tensor:
    """Variance of each row over its allowed entries; rows that have none are left out.

    Example:
        >>> row_variance(torch.tensor([[1.0, -1.0], [5.0, 5.0]]), None).tolist()
        [1.0, 0.0]
    """
    if allowed is None:
        # Two plain passes are several times faster than torch's running variance, and as exact.
        return (x - x.mean(dim=-1, keepdim=True)).square_().mean(dim=-1)
    kept = allowed.any(dim=-1)
    x, allowed = x[kept].masked_fill(~allowed[kept], 0.0), allowed[kept]
    count = allowed.sum(dim=-1)
    mean = x.sum(dim=-1) / count
    return ((x - mean.unsqueeze(-1)) ** 2).masked_fill(~allowed, 0.0).sum(dim=-1) / count


def heads_of(
    call: AttentionCall,
    row: int,
    valid: Tensor | None,
    chosen: Sequence[int] | None,
    *,
    fallback_width: int,
    rule: MaskRule | None = None,
) -> Iterator[tuple[int, Head]]:
    """Take one batch row of a captured call apart into heads, padded rows and columns cut out.

    Args:
        call: What capture handed out.
        row: Which example of the batch.
        valid: bool ``(n,)``, True for real tokens, or ``None`` when all are; rows and columns are the same tokens.
        chosen: Heads to take, or ``None`` for all.
        fallback_width: The head dimension to note where the call brings only weights.
        rule: The call's mask, read before; the dense mask is then not touched.
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
    bias = call.bias() if rule is None else None
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
                rule=NO_MASK if rule is None else rule,
            ),
        )


def fused_output(call: AttentionCall, rule: MaskRule | None = None) -> Tensor | None:
    """The layer's output by fused attention, which never writes P out, ``(b, h, n, d_v)``.

    Args:
        call: What capture handed out.
        rule: The call's mask, read before; a causal one is then not touched.

    Returns:
        The output; ``None`` for a call that fused attention can't serve: only weights, a soft cap or sinks.
    """
    if call.query is None or call.softcap is not None or call.sinks is not None:
        return None
    causal = rule is not None and rule.is_causal and rule.window is None
    return torch.nn.functional.scaled_dot_product_attention(
        call.query,
        call.key_expanded(),
        call.value_expanded(),
        attn_mask=None if causal else call.bias(call.query.dtype),
        is_causal=causal,
        scale=call.scaling,
    )
