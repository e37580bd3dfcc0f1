"""What capture hands out: one attention module's query, key and masks in one forward, and the map they make."""

from dataclasses import dataclass

import torch
from torch import Tensor


def masked_entries(mask: Tensor) -> Tensor:
    """True where an additive mask shuts an entry: at or below half its dtype's minimum.

    Example:
        >>> masked_entries(torch.tensor([0.0, -5.0, torch.finfo(torch.float32).min, float("-inf")]))
        tensor([False, False,  True,  True])
    """
    return mask <= torch.finfo(mask.dtype).min / 2


@dataclass(frozen=True)
class AttentionCall:
    r"""One call of one attention module.

    .. math:: P = \mathrm{softmax}(\mathrm{cap}(\text{scaling} \cdot Q K^\top) + \text{bias})

    Args:
        module: Dotted path of the module in the model.
        call: How often this module was called before in this forward (ALBERT: 0, 1, 2 …).
        kind: ``"self"`` or ``"cross"``.
        stack: ``"encoder"`` or ``"decoder"``.
        reached: ``"routed"`` (query and key were seen) or ``"fallback"`` (only the model's own weights).
        query: ``(b, h, n, d)``, after rotary embedding; ``None`` by fallback.
        key: ``(b, h_kv, m, d)``, not expanded; ``None`` by fallback.
        value: ``(b, h_kv, m, d_v)``; ``None`` by fallback.
        scaling: Factor on the products; ``None`` by fallback.
        mask: Additive float mask, broadcastable to ``(b, h, n, m)``, as the model made it, or ``None``.
        softcap: The cap c of :math:`c \tanh(x / c)` on the content logits, or ``None``.
        position_bias: Additive bias, as in T5, or ``None``.
        sinks: Logit of an extra column for each head, ``(h,)``; rows then sum to less than 1.
        weights: By fallback: P ``(b, h, n, m)`` as the model gives it.
    """

    module: str
    call: int
    kind: str
    stack: str
    reached: str
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    scaling: float | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    position_bias: Tensor | None = None
    sinks: Tensor | None = None
    weights: Tensor | None = None

    def key_expanded(self) -> Tensor:
        """The key each query head sees, ``(b, h, m, d)``: key head = query head // group size."""
        assert self.key is not None
        return self._expanded(self.key)

    def value_expanded(self) -> Tensor:
        """The value each query head sees, ``(b, h, m, d_v)``."""
        assert self.value is not None
        return self._expanded(self.value)

    def _expanded(self, x: Tensor) -> Tensor:
        assert self.query is not None
        groups = self.query.shape[1] // x.shape[1]
        return x if groups == 1 else x.repeat_interleave(groups, dim=1)

    def bias(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """What is added to the content logits: mask and position bias, broadcastable to ``(b, h, n, m)``.

        Entries the mask shuts are ``finfo(dtype).min``, whatever the model's dtype: a float16 minimum would let
        mass through after the softmax in float32.
        """
        bias = None if self.position_bias is None else self.position_bias.to(dtype)
        if self.mask is None:
            return bias
        mask = self.mask.to(dtype)
        whole = mask if bias is None else mask + bias
        return whole.masked_fill(masked_entries(self.mask), torch.finfo(dtype).min)

    def content_logits(self, rows: slice | None = None) -> Tensor:
        """``scaling * query @ key.mT``, capped where the model caps, without mask or bias: float32 ``(b, h, n, m)``."""
        assert self.query is not None
        assert self.scaling is not None
        query = self.query if rows is None else self.query[:, :, rows]
        logits = (query.float() @ self.key_expanded().float().mT).mul_(self.scaling)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def logits(self, rows: slice | None = None) -> Tensor:
        """Content logits plus :meth:`bias`: float32 ``(b, h, n, m)``."""
        logits, bias = self.content_logits(rows), self.bias()
        if bias is None:
            return logits
        if rows is not None and bias.ndim > 1 and bias.shape[-2] > 1:
            bias = bias[..., rows, :]
        return logits.add_(bias)

    def context_map(self, rows: slice | None = None) -> Tensor:
        """P, float32 ``(b, h, n, m)``, softmax in float32; all rows, or those of ``rows``.

        A row that may look nowhere (left padding) is uniform, as in eager attention: cut it before measuring.
        """
        if self.weights is not None:
            weights = self.weights if rows is None else self.weights[:, :, rows]
            return weights.float()
        logits = self.logits(rows)
        if self.sinks is None:
            return logits.softmax(dim=-1)
        column = self.sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]

    def allowed(self) -> Tensor | None:
        """Entries the mask leaves open, bool, broadcastable to ``(b, h, n, m)``; ``None`` when all are.

        By fallback: entries with a positive weight.
        """
        if self.weights is not None:
            open_ = self.weights > 0
        elif self.mask is not None:
            open_ = ~masked_entries(self.mask)
        else:
            return None
        return None if bool(open_.all()) else open_
