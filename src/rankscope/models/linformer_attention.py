"""The Linformer layer: four exact orders of the same products, and the choice of the fastest.

What a model does with this module::

    weights = Weights(query, key, value, output)          # its own nn.Linear modules, whatever their names
    pair = bank[layer]                                    # rankscope.models.projections
    layout = token_layout(key_padding_mask, batch, n)     # once for all layers; True = padding
    hidden = attend(hidden, weights, pair, num_heads=12, layout=layout, dropout=p if self.training else 0.0)

``attend`` ends with ``output``; dropout, residual and norm after it are the model's. Cross-attention passes
``context=`` (then ``layout`` is the context's). :class:`LinformerSelfAttention` is the same as a module of its
own. ``choose_plan`` / ``layer.plan(n)`` say which order runs and why.

The orders ("forms"), with X the input, E shared by the heads or not:

- ``textbook``: keys X W_k and values X W_v at length n, then E and F. Any kind.
- ``folded``: E (X W + 1 bᵀ) = (E X) W + (E 1) bᵀ, so keys and values exist at length k only.
- ``absorbed``: W_q moves into the keys and W_o into the values; per token two products of width h · k instead
  of four of width d and k.

Without gradients either of the last two runs over rows of queries at a time (``rows``), which keeps memory at
the output plus one block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError, did_you_mean
from rankscope.attention._layout import TokenLayout, compact, drop_absent, token_layout, valid_ones
from rankscope.attention.linformer import compressed_attention
from rankscope.models.projections import LinformerProjections, Projection, ProjectionPair

FORMS = ("textbook", "folded", "absorbed")

# Query rows a block holds, over the batch, and from how many blocks on their saving is worth the cut.
BLOCK_ROWS = 768
MIN_BLOCKS = 8
# What one entry of a written-out softmax costs, in multiplications of a matrix product.
SOFTMAX_COST = 40


class Weights(NamedTuple):
    """A layer's four linear maps; ``output`` ends the layer."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module

    @property
    def plain(self) -> bool:
        """Whether all are plain ``nn.Linear``: an adapter or a quantised map has no single weight to move."""
        return all(type(module) is nn.Linear for module in self)


@dataclass(frozen=True)
class Plan:
    """Which order runs.

    Args:
        form: ``"textbook"``, ``"folded"`` or ``"absorbed"``.
        rows: Query rows a block; ``None`` for all at once.
        why: The reason, with the counted multiplications.
    """

    form: str
    rows: int | None = None
    why: str = "asked for"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise RankscopeError(f"`form` has no {self.form!r}: {did_you_mean(self.form, FORMS)}")
        if self.rows is not None and self.rows < 1:
            raise RankscopeError(f"`rows` must be at least 1, got {self.rows}")

    def __str__(self) -> str:
        rows = f" in blocks of {self.rows} query rows" if self.rows else ""
        return f"{self.form}{rows}: {self.why}"


def multiplications(form: str, n: int, m: int, d: int, num_heads: int, head_dim: int, pair: ProjectionPair) -> int:
    """Count the multiplications of one row of a batch, forward.

    Args:
        form: One of ``FORMS``.
        n: Number of queries.
        m: Number of keys.
        d: Channels of the input.
        num_heads: Number of heads.
        head_dim: Channels of a head.
        pair: The projections.

    Returns:
        Multiplications of all matrix products; a written-out softmax counts ``SOFTMAX_COST`` an entry.
    """
    inner = num_heads * head_dim
    k, k_heads = pair.E.shape.k, pair.E.heads or 1
    matrices = 1 if pair.E is pair.F else 2
    compress = m * (k if pair.E.dense else 1)
    operator = matrices * m * k * k_heads * d if pair.E.reads_input else 0
    if form == "textbook":
        key_value = 2 * m * d * inner + 2 * compress * inner
    else:
        key_value = matrices * compress * d * k_heads + 2 * k * d * inner
    if form == "absorbed":
        query_output = 2 * k * d * inner + n * num_heads * k * (2 * d + SOFTMAX_COST)
    else:
        query_output = 2 * n * d * inner + 2 * n * k * inner
    return operator + key_value + query_output


def choose_plan(
    weights: Weights,
    pair: ProjectionPair,
    *,
    num_heads: int,
    n: int,
    m: int | None = None,
    batch: int = 1,
    grad: bool | None = None,
    dtype: torch.dtype = torch.float32,
    symbolic: bool = False,
) -> Plan:
    """Pick the fastest exact order.

    Args:
        weights: The layer's linear maps.
        pair: Its projections.
        num_heads: Number of heads.
        n: Number of queries.
        m: Number of keys; default n.
        batch: Rows in the batch.
        grad: Whether gradients will be taken; default: whether they are enabled now.
        dtype: The tensors' dtype.
        symbolic: Whether lengths may be symbols (under ``torch.compile`` and export): the choice is then made
            for the longest sequence, once, and nothing runs in blocks.

    Returns:
        The plan, which says why.
    """
    grad = torch.is_grad_enabled() if grad is None else grad
    if not pair.E.folds:
        return Plan("textbook", None, f"{type(pair.E).__name__.lower()} is not linear, so no product may move")
    if not weights.plain:
        return Plan("textbook", None, "a linear map that is no plain nn.Linear (adapter, quantised) is left whole")
    query = weights.query
    assert isinstance(query, nn.Linear)
    d, inner = query.in_features, query.out_features
    if symbolic:
        n = m = pair.E.shape.n
        batch = 1
    forms = list(FORMS)
    if dtype not in (torch.float32, torch.float64):
        # Logits summed over d channels and stored in half precision would lose what head_dim sums in float32 keep.
        forms.remove("absorbed")
    cost = {form: multiplications(form, n, m or n, d, num_heads, inner // num_heads, pair) for form in forms}
    form = min(cost, key=cost.__getitem__)
    counted = ", ".join(f"{name} {count / 1e6:.4g}" for name, count in cost.items())
    why = f"fewest multiplications (millions a row: {counted})"
    rows = max(BLOCK_ROWS // batch, 128)
    if grad or symbolic or form == "textbook" or n < MIN_BLOCKS * rows:
        return Plan(form, None, why)
    return Plan(form, rows, why + "; without gradients, query rows in blocks keep memory at the output")


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """``(b, n, h · head_dim)`` to ``(b, h, n, head_dim)``."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """``(b, h, n, head_dim)`` to ``(b, n, h · head_dim)``."""
    return x.transpose(1, 2).flatten(2)


def _textbook_side(
    linear: nn.Module, projection: Projection, operator: Tensor | None, x: Tensor, layout: TokenLayout, num_heads: int
) -> Tensor:
    """Project, then compress; the bias a padded token got is dropped before it meets the projection."""
    tokens = drop_absent(linear(x), layout)
    if projection.heads is None:
        return split_heads(projection.compress(operator, tokens[:, None], layout).squeeze(1), num_heads)
    return projection.compress(operator, split_heads(tokens, num_heads), layout)


def _folded_side(
    linear: nn.Module,
    projection: Projection,
    operator: Tensor | None,
    compressed: Tensor,
    ones: Tensor | None,
    num_heads: int,
) -> Tensor:
    """Turn E X ``(b, 1 or h, k, d)`` into (E X) W + (E 1) bᵀ ``(b, h, k, head_dim)``."""
    assert isinstance(linear, nn.Linear)
    if projection.heads is None:
        tokens = nn.functional.linear(compressed.squeeze(1), linear.weight)
        if ones is not None:
            tokens = torch.addcmul(tokens, ones.squeeze(1), linear.bias)
        return split_heads(tokens, num_heads)
    heads = compressed @ linear.weight.unflatten(0, (num_heads, -1)).mT
    if ones is not None:
        heads = torch.addcmul(heads, ones, linear.bias.view(1, num_heads, 1, -1))
    return heads


def _keys_values(
    form: str, context: Tensor, weights: Weights, pair: ProjectionPair, layout: TokenLayout, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Compressed keys and values ``(b, h, k, head_dim)``."""
    x = compact(context, layout)
    sides = ((weights.key, pair.E), (weights.value, pair.F))
    results: list[Tensor] = []
    operator = compressed = ones = None
    for linear, projection in sides:
        fresh = not results or pair.E is not pair.F
        if fresh:
            operator = projection.operator(x, layout)
        if form == "textbook":
            results.append(_textbook_side(linear, projection, operator, x, layout, num_heads))
        else:
            if fresh:
                compressed = projection.compress(operator, x[:, None], layout)
                ones = None
            assert compressed is not None
            if ones is None and linear.bias is not None:
                ones = projection.compress(operator, valid_ones(x, layout), layout).to(compressed.dtype)
            bias = ones if linear.bias is not None else None
            results.append(_folded_side(linear, projection, operator, compressed, bias, num_heads))
        if pair.normalize and len(results) == 1:
            results[0] = results[0] / projection.row_norm(operator, layout, x).to(results[0].dtype)
    return results[0], results[1]


def _absorb(weights: Weights, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Move W_q into the keys, W_o into the values: ``(b, d, h · k)``, offsets ``(b, 1, h · k)``, ``(b, h · k, d)``."""
    query, output = weights.query, weights.output
    assert isinstance(query, nn.Linear)
    assert isinstance(output, nn.Linear)
    num_heads = keys.shape[1]
    scaled = keys * scaling
    wide = (scaled @ query.weight.unflatten(0, (num_heads, -1))).flatten(1, 2).mT
    if query.bias is None:
        offset = wide.new_zeros(wide.shape[0], 1, wide.shape[-1])
    else:
        offset = (scaled @ query.bias.view(num_heads, -1, 1)).flatten(1).unsqueeze(1)
    out = (values @ output.weight.unflatten(1, (num_heads, -1)).permute(1, 2, 0)).flatten(1, 2)
    return wide, offset, out


def _absorbed_rows(
    hidden: Tensor,
    wide: tuple[Tensor, Tensor, Tensor],
    output: nn.Module,
    absent: Tensor | None,
    num_heads: int,
    dropout: float,
) -> Tensor:
    into, offset, out = wide
    logits = torch.baddbmm(offset, hidden, into).unflatten(-1, (num_heads, -1))
    if absent is not None:
        logits = logits.masked_fill(absent.transpose(1, 2), torch.finfo(logits.dtype).min)
    P = logits.softmax(dim=-1)
    if dropout:
        P = nn.functional.dropout(P, dropout)
    assert isinstance(output, nn.Linear)
    P = P.flatten(-2)
    return P @ out if output.bias is None else torch.baddbmm(output.bias, P, out)


def attend(
    hidden: Tensor,
    weights: Weights,
    pair: ProjectionPair,
    *,
    num_heads: int,
    context: Tensor | None = None,
    layout: TokenLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: Plan | None = None,
) -> Tensor:
    r"""Linformer attention from a layer's input to its output.

    .. math::
        \mathrm{output}\big(\mathrm{softmax}(\text{scaling} \cdot Q (E K)^\top) (F V)\big), \quad
        Q = X W_q + b_q, \; K = C W_k + b_k, \; V = C W_v + b_v

    Args:
        hidden: X, ``(b, n, d)``.
        weights: The four linear maps.
        pair: The projections.
        num_heads: Number of heads.
        context: C, ``(b, m, d_context)``; default X.
        layout: The :func:`token_layout` of C; default: every token is valid.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        dropout: Probability with which a probability is dropped; pass 0 in evaluation.
        plan: An order to run instead of the chosen one.

    Returns:
        ``(b, n, d_out)``; zeros for a row whose context has no valid token.

    Raises:
        RankscopeError: More tokens than the projections hold, or a plan the layer cannot follow.
    """
    context = hidden if context is None else context
    batch, n, _ = hidden.shape
    m = context.shape[1]
    layout = TokenLayout(m) if layout is None else layout
    symbolic = torch.compiler.is_compiling()
    if plan is None:
        plan = choose_plan(
            weights, pair, num_heads=num_heads, n=n, m=m, batch=batch, dtype=hidden.dtype, symbolic=symbolic
        )
    else:
        _check_plan(plan, weights, pair)
    keys, values = _keys_values(plan.form, context, weights, pair, layout, num_heads)
    absent = pair.E.absent(layout, hidden.device)
    scaling = keys.shape[-1] ** -0.5 if scaling is None else scaling
    wide = _absorb(weights, keys, values, scaling) if plan.form == "absorbed" else None

    def rows(part: Tensor) -> Tensor:
        if wide is not None:
            return _absorbed_rows(part, wide, weights.output, absent, num_heads, dropout)
        # Nested, so that a block's queries are freed before its output is made.
        return weights.output(
            merge_heads(
                compressed_attention(
                    split_heads(weights.query(part), num_heads), keys, values, absent, scaling, dropout
                )
            )
        )

    output = rows(hidden) if plan.rows is None or plan.rows >= n else _in_blocks(rows, hidden, plan.rows)
    if layout.lengths is not None:
        output = output.masked_fill((layout.lengths == 0)[:, None, None], 0)
    return output


def compressed_map(
    hidden: Tensor,
    weights: Weights,
    pair: ProjectionPair,
    *,
    num_heads: int,
    layout: TokenLayout | None = None,
    scaling: float | None = None,
) -> Tensor:
    r"""Write down the map that :func:`attend` applies, which it never does itself.

    .. math:: \bar P = \mathrm{softmax}(\text{scaling} \cdot Q (E K)^\top)

    Args:
        hidden: X, ``(b, n, d)``.
        weights: The four linear maps.
        pair: The projections.
        num_heads: Number of heads.
        layout: The :func:`token_layout` of X; default: every token is valid.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.

    Returns:
        ``(b, h, n, k)``, softmax in float32 or better; zero in places that hold nothing.

    References:
        Wang et al. 2020, arXiv 2006.04768, equation 7.
    """
    layout = TokenLayout(hidden.shape[1]) if layout is None else layout
    keys, _ = _keys_values("textbook", hidden, weights, pair, layout, num_heads)
    wide = torch.promote_types(keys.dtype, torch.float32)
    query = split_heads(weights.query(hidden), num_heads).to(wide)
    logits = (keys.shape[-1] ** -0.5 if scaling is None else scaling) * (query @ keys.to(wide).mT)
    absent = pair.E.absent(layout, hidden.device)
    if absent is not None:
        logits = logits.masked_fill(absent, torch.finfo(wide).min)
    return logits.softmax(dim=-1)


def _in_blocks(function: Callable[[Tensor], Tensor], hidden: Tensor, size: int) -> Tensor:
    """Apply a map of single tokens to ``size`` tokens at a time, holding one block beside the result."""
    block = function(hidden[:, :size])
    output = block.new_empty(*hidden.shape[:2], block.shape[-1])
    output[:, :size] = block
    for start in range(size, hidden.shape[1], size):
        del block
        block = function(hidden[:, start : start + size])
        output[:, start : start + size] = block
    return output


def _check_plan(plan: Plan, weights: Weights, pair: ProjectionPair) -> None:
    if plan.form != "textbook" and not (pair.E.folds and weights.plain):
        raise RankscopeError(
            f"`plan`={plan.form!r} needs a linear projection kind and plain nn.Linear weights: take 'textbook'"
        )
    if plan.rows is not None and torch.is_grad_enabled():
        raise RankscopeError("`plan.rows` writes its blocks in place: run it under torch.no_grad(), or leave it out")


class LinformerSelfAttention(nn.Module):
    """One Linformer layer that owns its weights and projections; also serves cross-attention.

    Args:
        hidden_size: d, channels of the input.
        num_heads: Number of heads; divides ``hidden_size``.
        max_length: n, the longest context.
        projected_length: k, or one for each head (sharing ``"none"``).
        sharing: ``"none"``, ``"headwise"`` or ``"key_value"`` (``"layerwise"`` equals it in one layer).
        kind: A row of ``PROJECTIONS``.
        length_rule: ``"slice"`` or ``"interpolate"``.
        normalize: See :class:`LinformerProjections`.
        dropout: Probability with which an attention probability is dropped in training.
        bias: Whether the linear maps have biases.
        generator: Source of the projections' starting values; ``None`` takes PyTorch's default generator.

    Raises:
        RankscopeError: Sizes or names that do not fit.

    Example:
        >>> layer = LinformerSelfAttention(16, 2, max_length=32, projected_length=4, generator=None)
        >>> layer(torch.zeros(1, 20, 16)).shape
        torch.Size([1, 20, 16])
        >>> layer.plan(32).form
        'folded'
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        max_length: int,
        projected_length: int | list[int],
        sharing: str = "headwise",
        kind: str = "learned",
        length_rule: str = "slice",
        normalize: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise RankscopeError(f"`num_heads` must divide `hidden_size`={hidden_size}, got {num_heads}")
        if not 0 <= dropout < 1:
            raise RankscopeError(f"`dropout` must be in [0, 1), got {dropout}")
        self.num_heads, self.dropout = num_heads, dropout
        self.query = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.key = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.value = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.output = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.projections = LinformerProjections(
            num_layers=1,
            num_heads=num_heads,
            max_length=max_length,
            projected_length=projected_length if isinstance(projected_length, int) else [projected_length],
            sharing=sharing,
            kind=kind,
            width=hidden_size,
            length_rule=length_rule,
            normalize=normalize,
            generator=generator,
        )

    @property
    def weights(self) -> Weights:
        """The four linear maps."""
        return Weights(self.query, self.key, self.value, self.output)

    def plan(self, n: int, m: int | None = None, *, batch: int = 1, grad: bool | None = None) -> Plan:
        """Say which order runs for n queries and m keys (default n), and why; ``grad`` as in :func:`choose_plan`."""
        pair = self.projections[0]
        dtype = self.query.weight.dtype
        return choose_plan(self.weights, pair, num_heads=self.num_heads, n=n, m=m, batch=batch, grad=grad, dtype=dtype)

    def forward(
        self,
        hidden: Tensor,
        context: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """Attend from ``hidden (b, n, d)`` over ``context (b, m, d)`` (default: itself).

        Args:
            hidden: The layer's input.
            context: What is attended to.
            key_padding_mask: bool ``(b, m)``, True = padding.
            plan: An order to run instead of the chosen one.

        Returns:
            ``(b, n, d)``.

        Raises:
            RankscopeError: Wrong shapes, a wrong mask, more tokens than the layer holds.
        """
        d = self.query.in_features
        for name, tensor in (("hidden", hidden), ("context", context)):
            if tensor is not None and (tensor.ndim != 3 or tensor.shape[-1] != d or tensor.shape[0] != hidden.shape[0]):
                raise RankscopeError(
                    f"`{name}` must have shape (batch={hidden.shape[0]}, n, {d}), got {tuple(tensor.shape)}"
                )
        source = hidden if context is None else context
        layout = token_layout(key_padding_mask, source.shape[0], source.shape[1])
        return attend(
            hidden,
            self.weights,
            self.projections[0],
            num_heads=self.num_heads,
            context=context,
            layout=layout,
            dropout=self.dropout if self.training else 0.0,
            plan=plan,
        )
