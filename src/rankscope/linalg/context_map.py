r"""The context mapping matrix P of one head as an operator: products and sums without ever writing P down.

.. math:: P_{ij} = \frac{\exp(\ell_{ij})}{\exp(s) + \sum_{j'} \exp(\ell_{ij'})},
          \qquad \ell = \mathrm{scaling} \cdot QK^\top + \mathrm{bias}

over the entries that the mask allows (s is the sink's logit, absent by default). The logarithm of each row's
denominator is computed once; a later pass makes a strip of rows with one matrix product and one exponential, uses
it and drops it. Time is O(n m d) a pass, memory O(n) and one strip.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope._errors import RankscopeError

# Entries of a strip of rows, 8 MiB in float32. Measured at 16,384 keys: 2^18 costs half again as much, 2^22 gains 3 %.
STRIP_ENTRIES = 2**21
# More rows than this gain nothing, fewer make the matrix products slow.
STRIP_ROWS = (16, 512)


@dataclass(frozen=True)
class _Moments:
    """What one pass over P sums up, float64."""

    row_sums: Tensor
    row_squares: Tensor
    row_entropy: Tensor
    column_sums: Tensor
    column_squares: Tensor


class ContextMap:
    r"""P of one head, ``(n, m)``, over the tokens that are not padding.

    Laws, to rounding: ``matmul(X)`` is ``dense() @ X``; ``rmatmul(Y)`` is ``dense().T @ Y``; they are adjoint,
    :math:`\langle PX, Y\rangle = \langle X, P^\top Y\rangle`; ``gram_matmul(X)`` is ``rmatmul(matmul(X))`` at the
    price of one exponential; rows sum to 1, with a sink to less.

    Padded rows and columns are *cut out*: ``shape`` counts valid tokens, and every argument and result is indexed
    by them. Causal and window distances are those of the original positions.

    Args:
        query: ``(n, d)``.
        key: ``(m, d)``; grouped heads pass the key of their group.
        scaling: Factor on the products; ``d ** -0.5`` by default.
        key_padding_mask: bool ``(m,)``, True = padding.
        query_padding_mask: bool ``(n,)``, True = padding; self-attention passes one mask for both.
        is_causal: Whether query i sees only keys j <= i.
        window: Sliding window: key j is seen if ``i - window < j``, and, unless causal, ``j < i + window``.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, before ``bias``.
        sinks: A logit that takes part in each row's denominator only.
        bias: Added to the logits, ``(n, m)``; itself O(n m), so for short inputs. Minus infinity forbids an entry.

    float64 inputs are computed in float64, all others in float32. An operand in float64 makes the products float64
    too, with the same entries of P: sums over a row then add no rounding to that of the entries.

    Raises:
        RankscopeError: Shapes, dtypes or values do not fit together; at the first pass, a row that sees no key, or
            logits that are not finite.

    Example:
        >>> query, key = torch.zeros(3, 2), torch.zeros(3, 2)
        >>> ContextMap(query, key, is_causal=True).matmul(torch.tensor([[1.0], [3.0], [5.0]])).flatten().tolist()
        [1.0, 2.0, 3.0]
    """

    def __init__(
        self,
        query: Float[Tensor, "n d"],
        key: Float[Tensor, "m d"],
        *,
        scaling: float | None = None,
        key_padding_mask: Bool[Tensor, " m"] | None = None,
        query_padding_mask: Bool[Tensor, " n"] | None = None,
        is_causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        sinks: float | None = None,
        bias: Float[Tensor, "n m"] | None = None,
    ) -> None:
        _check(query, key, is_causal, window, softcap, bias)
        rows = _kept("query_padding_mask", query_padding_mask, len(query), query.device)
        columns = _kept("key_padding_mask", key_padding_mask, len(key), key.device)
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.device = query.device
        self.is_causal, self.window, self.softcap = is_causal, window, softcap
        self.sinks = None if sinks is None else float(sinks)
        scaling = query.shape[1] ** -0.5 if scaling is None else float(scaling)
        # Products of float32 numbers: half precision is widened first, as fused kernels do inside.
        self._query = query[rows].to(self.dtype) * scaling
        self._key = key[columns].to(self.dtype)
        self._bias = None if bias is None else bias[rows][:, columns].to(self.dtype)
        self._rows, self._columns = rows.cpu(), columns.cpu()
        self._row_positions, self._column_positions = rows, columns
        self.shape = (len(rows), len(columns))
        if 0 in self.shape:
            raise RankscopeError("`key_padding_mask` and `query_padding_mask` leave no token: P would be empty")

    def double(self) -> "ContextMap":
        """Return the same map computed in float64, from the same query and key."""
        twin = copy(self)
        twin.__dict__.pop("_log_denominator", None)
        twin.__dict__.pop("_moments", None)
        twin.dtype = torch.float64
        twin._query, twin._key = self._query.double(), self._key.double()
        twin._bias = None if self._bias is None else self._bias.double()
        return twin

    def matmul(self, X: Float[Tensor, "m r"]) -> Float[Tensor, "n r"]:
        """Return ``P @ X``."""
        X = self._operand("X", X, self.shape[1])
        out = X.new_empty(self.shape[0], X.shape[1])
        for rows, columns, strip in self._strips():
            torch.mm(strip.to(X.dtype), X[columns], out=out[rows])
        return out

    def rmatmul(self, Y: Float[Tensor, "n r"]) -> Float[Tensor, "m r"]:
        """Return ``P.T @ Y``."""
        # Transposed: BLAS takes up to four times as long to write a few long columns as a few long rows.
        Y = self._operand("Y", Y, self.shape[0]).mT.contiguous()
        out = Y.new_zeros(len(Y), self.shape[1])
        for rows, columns, strip in self._strips():
            out[:, columns].addmm_(Y[:, rows], strip.to(Y.dtype))
        return out.mT.contiguous()

    def gram_matmul(self, X: Float[Tensor, "m r"]) -> Float[Tensor, "m r"]:
        """Return ``P.T @ P @ X`` in one pass: each strip of P is made once and used twice."""
        X = self._operand("X", X, self.shape[1]).mT.contiguous()
        out = torch.zeros_like(X)
        for _, columns, strip in self._strips():
            wide = strip.to(X.dtype)
            out[:, columns].addmm_(X[:, columns] @ wide.mT, wide)
        return out.mT.contiguous()

    def rows(self, rows: slice) -> Float[Tensor, "r m"]:
        """Return some rows of P, ``(r, m)``."""
        chosen = range(self.shape[0])[rows]
        if chosen.step != 1:
            raise RankscopeError(f"`rows` must be a slice of step 1, got step {chosen.step}: take rows of the result")
        out = self._query.new_zeros(len(chosen), self.shape[1])
        for part, columns, strip in self._strips(chosen.start, chosen.stop):
            out[part.start - chosen.start : part.stop - chosen.start, columns] = strip
        return out

    def dense(self) -> Float[Tensor, "n m"]:
        """Return P itself, ``(n, m)``: O(n m) memory, for short inputs."""
        return self.rows(slice(None))

    def row_sums(self) -> Float[Tensor, " n"]:
        """Return ``P @ 1``, float64: 1, or less with a sink."""
        return self._moments.row_sums

    def column_sums(self) -> Float[Tensor, " m"]:
        """Return ``P.T @ 1``, float64: the attention each key receives."""
        return self._moments.column_sums

    def row_norms_squared(self) -> Float[Tensor, " n"]:
        """Return the squared Euclidean norm of each row, float64."""
        return self._moments.row_squares

    def column_norms_squared(self) -> Float[Tensor, " m"]:
        """Return the squared Euclidean norm of each column, float64: the diagonal of ``P.T @ P``."""
        return self._moments.column_squares

    def row_entropy(self) -> Float[Tensor, " n"]:
        r"""Return :math:`-\sum_j P_{ij} \ln P_{ij}` of each row in nats, float64; a sink's share is left out."""
        return self._moments.row_entropy

    def frobenius_squared(self) -> float:
        r"""Return :math:`\|P\|_F^2 = \sum_i \sigma_i^2`, exact to rounding.

        Example:
            >>> ContextMap(torch.zeros(4, 1), torch.zeros(4, 1)).frobenius_squared()
            1.0
        """
        return float(self._moments.row_squares.sum())

    def diagonal(self) -> Float[Tensor, " r"]:
        """Return ``P[i, i]`` for ``i < min(n, m)``: how much each token attends to itself, if both have one mask."""
        count = min(self.shape)
        logits = (self._query[:count] * self._key[:count]).sum(-1)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self._bias is not None:
            logits = logits + self._bias.diagonal()[:count]
        i, j = self._row_positions[:count], self._column_positions[:count]
        return torch.where(self._allowed(i, j), (logits - self._log_denominator[:count]).exp(), 0.0)

    @cached_property
    def _log_denominator(self) -> Tensor:
        """Logarithm of each row's denominator, ``(n,)``."""
        out = self._query.new_empty(self.shape[0])
        for rows, _, logits in self._logits():
            torch.logsumexp(logits, dim=-1, out=out[rows])
        if bool(torch.isneginf(out).any()):
            row = int(self._rows[int(torch.isneginf(out).nonzero()[0])])
            raise RankscopeError(f"query {row} sees no key: cut it out with `query_padding_mask`, or mend the mask")
        if not bool(out.isfinite().all()):
            row = int(self._rows[int((~out.isfinite()).nonzero()[0])])
            raise RankscopeError(f"logits of query {row} are not finite: look for NaN or overflow in `query` and `key`")
        return out if self.sinks is None else torch.logaddexp(out, out.new_tensor(self.sinks))

    @cached_property
    def _moments(self) -> _Moments:
        n, m = self.shape
        row_sums, row_squares, row_entropy = (torch.zeros(n, dtype=torch.float64, device=self.device) for _ in range(3))
        column_sums, column_squares = (torch.zeros(m, dtype=torch.float64, device=self.device) for _ in range(2))
        for rows, columns, strip in self._strips():
            row_sums[rows] = strip.sum(-1)
            column_sums[columns] += strip.sum(0)
            row_entropy[rows] = torch.special.entr(strip).sum(-1)
            strip.mul_(strip)
            row_squares[rows] = strip.sum(-1)
            column_squares[columns] += strip.sum(0)
        return _Moments(row_sums, row_squares, row_entropy, column_sums, column_squares)

    @property
    def _reach(self) -> int:
        """Most keys that one query can see."""
        m = self.shape[1]
        return m if self.window is None else min(m, self.window if self.is_causal else 2 * self.window - 1)

    def _strips(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield strips of rows of P with the columns they can reach; the memory is used again for the next one."""
        denominator = self._log_denominator
        for rows, columns, logits in self._logits(start, stop):
            yield rows, columns, logits.sub_(denominator[rows].unsqueeze(-1)).exp_()

    def _logits(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        stop = self.shape[0] if stop is None else stop
        height = max(STRIP_ROWS[0], min(STRIP_ROWS[1], STRIP_ENTRIES // (self._reach + STRIP_ROWS[0])))
        # One buffer a pass, so that a map at rest holds none; gaps of padding can make a window's strip wider.
        buffer = self._query.new_empty(min(STRIP_ENTRIES, self.shape[0] * self.shape[1]))
        while start < stop:
            rows = slice(start, min(start + height, stop))
            columns = self._reachable(rows)
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            if shape[0] * shape[1] > len(buffer):
                buffer = self._query.new_empty(shape[0] * shape[1])
            logits = buffer[: shape[0] * shape[1]].view(shape)
            torch.mm(self._query[rows], self._key[columns].mT, out=logits)
            if self.softcap is not None:
                logits.div_(self.softcap).tanh_().mul_(self.softcap)
            if self._bias is not None:
                logits += self._bias[rows, columns]
            self._mask(logits, rows, columns)
            yield rows, columns, logits
            start = rows.stop

    def _reachable(self, rows: slice) -> slice:
        """Columns that at least one of these rows may see, as one run."""
        if not self.is_causal and self.window is None:
            return slice(0, self.shape[1])
        first, last = int(self._rows[rows.start]), int(self._rows[rows.stop - 1])
        low = 0 if self.window is None else first - self.window + 1
        high = last if self.is_causal else last + (self.window or 0) - 1
        begin = int(torch.searchsorted(self._columns, low))
        return slice(begin, max(begin, int(torch.searchsorted(self._columns, high, right=True))))

    def _mask(self, logits: Tensor, rows: slice, columns: slice) -> None:
        """Forbid entries at the edges of the strip; between the edges every row sees every column."""
        if not self.is_causal and self.window is None:
            return
        first, last = int(self._rows[rows.start]), int(self._rows[rows.stop - 1])
        positions = self._columns[columns]
        # [left, right) is seen by every row of the strip.
        left = 0 if self.window is None else int(torch.searchsorted(positions, last - self.window + 1))
        high = first if self.is_causal else first + (self.window or 0) - 1
        right = max(left, int(torch.searchsorted(positions, high, right=True)))
        i = self._row_positions[rows].unsqueeze(-1)
        j = self._column_positions[columns]
        for edge in (slice(0, left), slice(right, len(positions))):
            if edge.start < edge.stop:
                logits[:, edge].masked_fill_(~self._allowed(i, j[edge]), -torch.inf)

    def _allowed(self, i: Tensor, j: Tensor) -> Tensor:
        distance = i - j
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if self.is_causal:
            allowed &= distance >= 0
        if self.window is not None:
            allowed &= distance.abs() < self.window
        return allowed

    def _operand(self, name: str, X: Tensor, length: int) -> Tensor:
        if X.ndim != 2 or len(X) != length:
            raise RankscopeError(
                f"`{name}` must have shape ({length}, r) for P of shape {self.shape}, got {tuple(X.shape)}: "
                "padded tokens are cut out"
            )
        return X.to(torch.promote_types(X.dtype, self.dtype))


def _kept(name: str, padding: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Positions that are not padding."""
    if padding is None:
        return torch.arange(length, device=device)
    if padding.dtype != torch.bool or tuple(padding.shape) != (length,):
        raise RankscopeError(
            f"`{name}` must be bool of shape ({length},) with True = padding, "
            f"got {padding.dtype} of shape {tuple(padding.shape)}: pass one example's row"
        )
    return (~padding).nonzero().squeeze(-1).to(device)


def _check(
    query: Tensor, key: Tensor, is_causal: bool, window: int | None, softcap: float | None, bias: Tensor | None
) -> None:
    if query.ndim != 2 or key.ndim != 2 or query.shape[1] != key.shape[1]:
        raise RankscopeError(
            f"`query` and `key` must have shapes (n, d) and (m, d), got {tuple(query.shape)} and "
            f"{tuple(key.shape)}: a context map is one head of one example"
        )
    if not (query.is_floating_point() and query.dtype == key.dtype and query.device == key.device):
        raise RankscopeError(
            f"`query` and `key` must be floats of one dtype on one device, got {query.dtype} on {query.device} and "
            f"{key.dtype} on {key.device}: convert one of them"
        )
    if (is_causal or window is not None) and len(query) != len(key):
        raise RankscopeError(
            f"`is_causal` and `window` need as many queries as keys, got {len(query)} and {len(key)}: "
            "pass the whole sequence's query, or a `bias`"
        )
    if window is not None and window < 1:
        raise RankscopeError(f"`window` must be at least 1, got {window}: 1 lets a token see itself only")
    if softcap is not None and not softcap > 0:
        raise RankscopeError(f"`softcap` must be positive, got {softcap}: None leaves the logits as they are")
    if bias is not None and tuple(bias.shape) != (len(query), len(key)):
        raise RankscopeError(
            f"`bias` must have shape (n={len(query)}, m={len(key)}), got {tuple(bias.shape)}: pass one head's"
        )
