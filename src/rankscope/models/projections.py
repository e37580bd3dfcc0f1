"""E and F: the projections that compress a sequence, of every kind and in every sharing mode.

What a model does with this module::

    bank = LinformerProjections(num_layers=12, num_heads=12, max_length=512, projected_length=128,
                                sharing="key_value", kind="learned", width=768, generator=None)
    pair = bank[layer]            # ProjectionPair(E, F, normalize): a tuple, owns nothing
    attend(hidden, weights, pair, num_heads=12)        # rankscope.models.linformer_attention

The bank is the one owner: each distinct projection is registered once, as ``layers.{i}.E``, ``layers.{i}.F``
(``F`` only where it differs) or ``shared``, so a state dict holds it once and a layer never re-registers it.

A kind is one subclass of :class:`Projection` and one row of ``PROJECTIONS``. It works on *compacted* tokens
``x (b, g, n, c)`` (valid tokens first, zeros after; ``rankscope.attention._layout``), g = 1 or the heads, in two
steps, so that one operator may meet several tensors: ``operator(source, layout)``, then ``compress(operator, x,
layout)``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError, did_you_mean
from rankscope._registry import Registry
from rankscope.attention._layout import (
    TokenLayout,
    absent_beyond,
    pool_max,
    pool_mean,
    pooled_absent,
    segments,
    valid_ones,
)
from rankscope.attention.linformer import apply_matrix

SHARING = ("none", "headwise", "key_value", "layerwise")
LENGTH_RULES = ("slice", "interpolate")


@dataclass(frozen=True)
class ProjectionShape:
    """What a projection is built for.

    Args:
        n: The longest sequence.
        k: Projected length, ``1 <= k <= n``.
        heads: Number of heads with a matrix of their own; ``None`` where all heads share one.
        width: Channels of the tokens a data-dependent kind reads.
        length_rule: What becomes of the columns at n' < n: the first n' (``"slice"``) or the whole matrix
            resampled (``"interpolate"``).
        head_k: The heads' own projected lengths, the largest of which is ``k``; ``None`` where all are ``k``.
    """

    n: int
    k: int
    heads: int | None = None
    width: int | None = None
    length_rule: str = "slice"
    head_k: tuple[int, ...] | None = None


def resample(E: Tensor, layout: TokenLayout) -> Tensor:
    r"""Stretch the columns of E over each row's own m tokens.

    .. math:: E'_{ij} = \int_{j N / m}^{(j+1) N / m} E_i(t)\, dt, \qquad E_i(t) = E_{i, \lfloor t \rfloor}

    Row sums are kept, so mean pooling of N tokens becomes mean pooling of m, and m = N gives E back.

    Args:
        E: ``(..., k, N)``.
        layout: The tokens; without padding m = n for all rows.

    Returns:
        ``(..., k, n)`` without padding, else ``(b, g, k, n)`` with zeros past each row's tokens.

    Example:
        >>> resample(torch.tensor([[0.5, 0.5, 0.0, 0.0]]), TokenLayout(2))
        tensor([[1., 0.]])
    """
    longest = E.shape[-1]
    # Differences of running sums: in single precision they would lose what the sum has grown past.
    total = nn.functional.pad(E.double().cumsum(dim=-1), (1, 0))
    position = torch.arange(layout.n + 1, device=E.device, dtype=torch.float64)
    if layout.lengths is None:
        edge = position * (longest / layout.n)
    else:
        m = layout.lengths[:, None].double()
        edge = torch.minimum(position, m) * (longest / m.clamp(min=1))
    left = edge.floor().long().clamp(max=longest - 1)
    part = edge - left
    sums = total[..., left] * (1 - part) + total[..., left + 1] * part
    if layout.lengths is not None:
        sums = sums.movedim(-2, 0)
        sums = sums if sums.ndim == 4 else sums[:, None]
    return sums.diff(dim=-1).to(E.dtype)


class Projection(nn.Module):
    """One way to compress n tokens to k.

    Laws: a row's result depends on its own valid tokens only; where ``folds`` is True the result is linear in
    ``x``, ``E (x W) == (E x) W``, and zero tokens contribute nothing.

    Args:
        shape: What it is built for.
    """

    folds: ClassVar[bool] = True
    reads_input: ClassVar[bool] = False
    stores: ClassVar[bool] = True
    per_head: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    dense: ClassVar[bool] = True

    def __init__(self, shape: ProjectionShape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def heads(self) -> int | None:
        """Number of heads with an operator of their own, ``None`` where one serves all."""
        return self.shape.heads if self.per_head else None

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw the starting values; ``None`` takes PyTorch's default generator."""

    def operator(self, source: Tensor | None, layout: TokenLayout) -> Tensor | None:
        """Return what :meth:`compress` needs besides ``x``; ``source (b, n, width)`` are compacted tokens."""
        raise NotImplementedError

    def compress(self, operator: Tensor | None, x: Tensor, layout: TokenLayout) -> Tensor:
        """Compress ``x (b, g, n, c)`` to ``(b, g, k, c)``, or to ``(b, heads, k, c)`` where g = 1 meets heads."""
        raise NotImplementedError

    def absent(self, layout: TokenLayout, device: torch.device) -> Tensor | None:
        """bool, broadcastable to ``(b, h, 1, k)``: compressed places that hold nothing."""
        if self.shape.head_k is None:
            return None
        limit = torch.tensor(self.shape.head_k, device=device)
        return absent_beyond(limit, self.shape.k).transpose(0, 1)

    def row_norm(self, operator: Tensor | None, layout: TokenLayout, x: Tensor) -> Tensor:
        """2-norm of each row of the matrix over the valid tokens, ``(b or 1, g, k, 1)``; 1 for an empty row."""
        assert operator is not None
        square = self.compress(operator.square(), valid_ones(x, layout), layout)
        return torch.where(square > 0, square, 1.0).sqrt()

    def check_length(self, layout: TokenLayout) -> None:
        """Refuse more tokens than the projection has columns for.

        Raises:
            RankscopeError: n or, in a padded batch, the longest row exceeds the limit.
        """
        if not self.bounded or layout.n <= self.shape.n:
            return
        m = layout.n
        if layout.lengths is not None and not torch.compiler.is_compiling():
            m = int(layout.lengths.max())
        if m > self.shape.n:
            raise RankscopeError(
                f"a projection built for at most n={self.shape.n} tokens got {m}: cut the input, build it for a "
                "longer n, or take a kind without a limit (mean, max, convolution, dynamic)"
            )


class _Matrix(Projection):
    """A stored matrix, ``(k, n)`` or ``(heads, k, n)``."""

    weight: Tensor

    def _empty(self) -> Tensor:
        shape = self.shape
        return torch.empty(shape.k, shape.n) if shape.heads is None else torch.empty(shape.heads, shape.k, shape.n)

    def operator(self, source: Tensor | None, layout: TokenLayout) -> Tensor:
        self.check_length(layout)
        if self.shape.length_rule == "interpolate":
            return resample(self.weight, layout)
        if torch.compiler.is_compiling():
            # A slice is contiguous at n = N only, which would make export refuse that one length.
            return self.weight.index_select(-1, torch.arange(layout.n, device=self.weight.device))
        return self.weight[..., : layout.n]

    def compress(self, operator: Tensor | None, x: Tensor, layout: TokenLayout) -> Tensor:
        assert operator is not None
        # Only a batch padded past the limit is longer than its matrix, and nothing valid stands there.
        columns = operator.shape[-1]
        return apply_matrix(operator, x if columns == layout.n else x[..., :columns, :])


class Learned(_Matrix):
    """A trained dense matrix, started at N(0, 1/n): a compressed key has the scale of one key at every n.

    At n' < n columns under ``slice`` the scale of the compressed keys falls with √(n'/n); ``normalize`` undoes
    that.
    """

    def __init__(self, shape: ProjectionShape) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(self._empty())

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw the matrix."""
        nn.init.normal_(self.weight, std=self.shape.n**-0.5, generator=generator)


class Gaussian(_Matrix):
    """A fixed matrix N(0, 1/k), a buffer in the state dict; compressed keys grow with √(n/k)."""

    def __init__(self, shape: ProjectionShape) -> None:
        super().__init__(shape)
        self.register_buffer("weight", self._empty())

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw the matrix."""
        nn.init.normal_(self.weight, std=self.shape.k**-0.5, generator=generator)


class Dynamic(Projection):
    """Weights read off the tokens: softmax over the sequence of ``Wᴾ x``, any length (arXiv 2107.02192).

    Each compressed key is a mean of keys, so its scale falls as the weights spread.
    """

    reads_input = True
    bounded = False

    def __init__(self, shape: ProjectionShape) -> None:
        super().__init__(shape)
        if shape.width is None:
            raise RankscopeError("`width` must be given for kind 'dynamic': the channels of the tokens it reads")
        rows = shape.k * (shape.heads or 1)
        self.weight = nn.Parameter(torch.empty(rows, shape.width))

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw Wᴾ so that tokens of unit variance give logits of unit variance."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5, generator=generator)

    def operator(self, source: Tensor | None, layout: TokenLayout) -> Tensor:
        """Softmax over the valid tokens, ``(b, g, k, n)``."""
        assert source is not None, "a data-dependent projection needs its source"
        logits = self.weight @ source.mT
        absent = layout.absent
        if absent is not None:
            logits = logits.masked_fill(absent[:, None, :], torch.finfo(logits.dtype).min)
        weights = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(source.dtype)
        if absent is not None:
            weights = weights.masked_fill(absent[:, None, :], 0)
        return weights.unflatten(-2, (-1, self.shape.k))

    def compress(self, operator: Tensor | None, x: Tensor, layout: TokenLayout) -> Tensor:
        """Multiply by the weights."""
        assert operator is not None
        return apply_matrix(operator, x)


class Mean(Projection):
    """Means of min(k, m) equal segments of the row's m tokens; compressed keys shrink with √(k/n)."""

    stores = False
    per_head = False
    ragged = False
    bounded = False
    dense = False

    def operator(self, source: Tensor | None, layout: TokenLayout) -> None:
        """Nothing: the layout says it all."""
        return

    def compress(self, operator: Tensor | None, x: Tensor, layout: TokenLayout) -> Tensor:
        """Take means."""
        return pool_mean(x, layout, self.shape.k)

    def absent(self, layout: TokenLayout, device: torch.device) -> Tensor | None:
        """Places past a row's number of segments."""
        return pooled_absent(layout, self.shape.k, device)

    def row_norm(self, operator: Tensor | None, layout: TokenLayout, x: Tensor) -> Tensor:
        """One over the root of a segment's number of tokens."""
        count = segments(layout, self.shape.k, x.device).inside.sum(dim=-1)
        return count.clamp(min=1).to(x.dtype).rsqrt()[:, None, :, None]


class Max(Mean):
    """Channel-wise maxima of the segments of :class:`Mean`; not linear, so it meets keys and values themselves."""

    folds = False

    def compress(self, operator: Tensor | None, x: Tensor, layout: TokenLayout) -> Tensor:
        """Take maxima."""
        return pool_max(x, layout, self.shape.k)


class Convolution(Projection):
    """One trained kernel of s = ⌈n/k⌉ taps with stride s, the same for every segment and channel.

    As a matrix: the kernel repeated along a block diagonal. Any length: m tokens give ⌈m/s⌉. Started at
    N(0, 1/s), so that a compressed key has the scale of one key.
    """

    ragged = False
    bounded = False
    dense = False

    def __init__(self, shape: ProjectionShape) -> None:
        super().__init__(shape)
        self.stride = -(-shape.n // shape.k)
        self.weight = nn.Parameter(torch.empty(*(() if shape.heads is None else (shape.heads,)), self.stride))

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw the kernel."""
        nn.init.normal_(self.weight, std=self.stride**-0.5, generator=generator)

    def operator(self, source: Tensor | None, layout: TokenLayout) -> Tensor:
        """The kernel, ``(s,)`` or ``(heads, s)``."""
        return self.weight

    def compress(self, operator: Tensor | None, x: Tensor, layout: TokenLayout) -> Tensor:
        """Slide the kernel, its stride at a time."""
        assert operator is not None
        stride, kernel = self.stride, operator.to(x.dtype)
        if torch.compiler.is_compiling():
            # Cutting a symbolic length into blocks makes export refuse lengths that do not divide.
            filters = kernel.view(-1, 1, stride, 1)
            padded = nn.functional.pad(x, (0, 0, 0, 2 * stride - 1))
            return nn.functional.conv2d(padded, filters, stride=(stride, 1), groups=x.shape[1])
        padded = nn.functional.pad(x, (0, 0, 0, -layout.n % stride))
        blocks = padded.unflatten(-2, (-1, stride))
        if kernel.ndim == 1:
            return torch.einsum("s,bgksc->bgkc", kernel, blocks)
        if x.shape[1] == 1:
            return torch.einsum("hs,bksc->bhkc", kernel, blocks.squeeze(1))
        return torch.einsum("hs,bhksc->bhkc", kernel, blocks)

    def absent(self, layout: TokenLayout, device: torch.device) -> Tensor | None:
        """Places past a row's last segment."""
        if layout.lengths is None and not torch.compiler.is_compiling():
            return None
        lengths = torch.full((1,), layout.n, device=device) if layout.lengths is None else layout.lengths
        return absent_beyond((lengths + self.stride - 1) // self.stride, self._places(layout))

    def _places(self, layout: TokenLayout) -> int:
        """Count the compressed places; of a symbolic length never one, which would be a special case."""
        if torch.compiler.is_compiling():
            return (layout.n + self.stride - 1) // self.stride + 1
        return -(-layout.n // self.stride)


PROJECTIONS: Registry[type[Projection]] = Registry(
    "projection",
    {
        "learned": Learned,
        "mean": Mean,
        "max": Max,
        "convolution": Convolution,
        "gaussian": Gaussian,
        "dynamic": Dynamic,
    },
)


class ProjectionPair(NamedTuple):
    """The projections of one layer.

    Attributes:
        E: Projection of the keys.
        F: Projection of the values; the same object where they are shared.
        normalize: Whether compressed keys are divided by the 2-norms of E's rows.
    """

    E: Projection
    F: Projection
    normalize: bool = False


def _layer_lengths(
    projected_length: int | Sequence[int] | Sequence[Sequence[int]], num_layers: int, num_heads: int
) -> list[tuple[int, ...]]:
    """Spell out k for each layer, as one number or one for each head."""
    if isinstance(projected_length, int):
        return [(projected_length,)] * num_layers
    lengths = [(entry,) if isinstance(entry, int) else tuple(entry) for entry in projected_length]
    if len(lengths) != num_layers or any(len(entry) not in (1, num_heads) for entry in lengths):
        raise RankscopeError(
            f"`projected_length` must be one k, one for each of {num_layers} layers, or for each layer a list of "
            f"one for each of {num_heads} heads, got {projected_length}"
        )
    return lengths


class LinformerProjections(nn.Module):
    """All projections of a model, each registered once.

    Args:
        num_layers: Number of layers.
        num_heads: Heads in each layer.
        max_length: n, the longest sequence.
        projected_length: k; or one for each layer; or for each layer one for each head (sharing ``"none"``).
        sharing: ``"none"`` (E and F for each head of each layer), ``"headwise"`` (one E, one F a layer),
            ``"key_value"`` (E = F, one a layer) or ``"layerwise"`` (one E for all): 288, 24, 12 and 1 distinct
            matrices at 12 layers × 12 heads.
        kind: A row of ``PROJECTIONS``.
        width: Channels of the layer's input, for ``"dynamic"``.
        length_rule: ``"slice"`` or ``"interpolate"``; only kinds that store a matrix over positions have one.
        normalize: Divide compressed keys by the 2-norms of E's rows, so that their scale, and that of the logits,
            is that of single keys at every n and k, as far as keys are uncorrelated with each other and with E
            (``"dynamic"`` reads its weights off the tokens it compresses, so there it holds less); not for
            ``"max"``.
        generator: Source of the starting values; ``None`` takes PyTorch's default generator.

    Raises:
        RankscopeError: Unknown names, k outside 1..n, mixed k where one matrix serves several.

    Example:
        >>> bank = LinformerProjections(num_layers=12, num_heads=12, max_length=64, projected_length=8,
        ...                             sharing="key_value", kind="learned", generator=None)
        >>> bank.count, bank[3].E is bank[3].F
        (12, True)
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        max_length: int,
        projected_length: int | Sequence[int] | Sequence[Sequence[int]],
        sharing: str = "headwise",
        kind: str = "learned",
        width: int | None = None,
        length_rule: str = "slice",
        normalize: bool = False,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        projection = PROJECTIONS[kind]
        for argument, choice, known in (
            ("projection_sharing", sharing, SHARING),
            ("length_rule", length_rule, LENGTH_RULES),
        ):
            if choice not in known:
                raise RankscopeError(f"`{argument}` has no {choice!r}: {did_you_mean(str(choice), known)}")
        if length_rule == "interpolate" and not issubclass(projection, _Matrix):
            raise RankscopeError(f"`length_rule`='interpolate' needs a kind with a matrix over positions, got {kind!r}")
        if normalize and not projection.folds:
            raise RankscopeError(f"`normalize` needs a linear kind, got {kind!r}: a maximum has no row norm")
        lengths = _layer_lengths(projected_length, num_layers, num_heads)
        for k in {k for entry in lengths for k in entry}:
            if not 1 <= k <= max_length:
                raise RankscopeError(f"`projected_length` must be in 1..max_length={max_length}, got {k}")
        if sharing == "layerwise" and len(set(lengths)) > 1:
            raise RankscopeError(
                f"`projected_length` must be one k under `projection_sharing`='layerwise', got {projected_length}: "
                "one matrix serves all layers"
            )
        if any(len(entry) > 1 for entry in lengths) and (sharing != "none" or not projection.ragged):
            raise RankscopeError(
                "`projected_length` for each head needs `projection_sharing`='none' and one of the kinds learned, "
                f"gaussian, dynamic, got {sharing!r} and {kind!r}"
            )
        self.sharing, self.kind, self.normalize = sharing, kind, normalize
        self.num_layers, self.num_heads = num_layers, num_heads

        def build(entry: tuple[int, ...]) -> Projection:
            heads = num_heads if sharing == "none" else None
            head_k = entry if len(entry) > 1 else None
            return projection(ProjectionShape(max_length, max(entry), heads, width, length_rule, head_k))

        if sharing == "layerwise":
            self.shared = build(lengths[0])
        else:
            names = ("E",) if sharing == "key_value" else ("E", "F")
            self.layers = nn.ModuleList(nn.ModuleDict({name: build(entry) for name in names}) for entry in lengths)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw every projection anew."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.reset_parameters(generator)

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, layer: int) -> ProjectionPair:
        if self.sharing == "layerwise":
            return ProjectionPair(self.shared, self.shared, self.normalize)
        pair = self.layers[layer]
        assert isinstance(pair, nn.ModuleDict)
        E, F = pair["E"], pair["F" if self.sharing != "key_value" else "E"]
        assert isinstance(E, Projection)
        assert isinstance(F, Projection)
        return ProjectionPair(E, F, self.normalize)

    @property
    def count(self) -> int:
        """Number of distinct projection matrices; kinds without stored values have one for each k."""
        distinct = {id(module): module for pair in self for module in (pair.E, pair.F)}
        if not PROJECTIONS[self.kind].stores:
            return len({module.shape.k for module in distinct.values()})
        return sum(module.heads or 1 for module in distinct.values())

    def __iter__(self) -> Iterator[ProjectionPair]:
        return (self[layer] for layer in range(self.num_layers))
