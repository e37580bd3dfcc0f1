"""A context map's best approximation of rank k, its re-masked variant and a random control of the same k."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.attention.interface import AttentionCall


@dataclass(frozen=True)
class RightBasis:
    r"""Singular values and right singular vectors of P: :math:`P = \sum_i \sigma_i u_i v_i^\top`.

    Args:
        sigma: float64 ``(*lead, m)``, descending.
        vectors: float64 ``(*lead, m, m)``, a column each.
    """

    sigma: Tensor
    vectors: Tensor


def exact_map(call: AttentionCall) -> Tensor:
    """P in float64, ``(b, h, n, m)``, from the query and key of a call: the formula of ``AttentionCall``.

    Truncation is compared with the model's own output, so P must be as exact as the model, float64 ones included.
    """
    assert call.query is not None
    assert call.scaling is not None
    logits = (call.query.double() @ call.key_expanded().double().mT) * call.scaling
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    bias = call.bias(torch.float64)
    logits = logits if bias is None else logits + bias
    if call.sinks is None:
        return logits.softmax(dim=-1)
    column = call.sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]


def right_basis(P: Tensor) -> RightBasis:
    r"""Singular values and right vectors of P from the float64 Gram matrix :math:`P^\top P`.

    Small singular values are known to about :math:`10^{-8} \sigma_1`, the root of float64's precision.

    Args:
        P: ``(*lead, n, m)``.

    Example:
        >>> right_basis(torch.tensor([[3.0, 0.0], [0.0, 4.0]])).sigma.tolist()
        [4.0, 3.0]
    """
    P = P.double()
    energy, vectors = torch.linalg.eigh(P.mT @ P)
    return RightBasis(energy.clamp_min(0).sqrt().flip(-1), vectors.flip(-1))


def projected(P: Tensor, basis: Tensor) -> Tensor:
    r""":math:`P B B^\top` for a basis with orthonormal columns.

    With the k leading right singular vectors it is the best approximation of rank k in the Frobenius norm and every
    other unitarily invariant one.

    Args:
        P: ``(*lead, n, m)``.
        basis: ``(*lead, m, k)``.

    References:
        Eckart and Young 1936, Psychometrika 1.

    Example:
        >>> P = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
        >>> projected(P, right_basis(P).vectors[:, :1]).tolist()
        [[0.0, 0.0], [0.0, 4.0]]
    """
    return (P @ basis) @ basis.mT


def tail_error(sigma: Tensor, k: int) -> Tensor:
    r"""Relative Frobenius error of the best rank-k map: :math:`\sqrt{\sum_{i>k} \sigma_i^2 / \sum_i \sigma_i^2}`.

    It is the expected relative error of P V only for a white V; a real V is not white.

    Args:
        sigma: Singular values, largest first, ``(*lead, r)``.
        k: Values kept.

    Returns:
        Numbers in [0, 1], ``(*lead)``.

    Example:
        >>> tail_error(torch.tensor([4.0, 3.0]), 1).item()
        0.6000000238418579
    """
    energy = sigma**2
    return (energy[..., k:].sum(-1) / energy.sum(-1)).sqrt()


def random_basis(heads: int, m: int, k: int, *, generator: torch.Generator) -> Tensor:
    """Random orthonormal columns, uniform over subspaces, ``(heads, m, k)`` in float64.

    Leading columns are a basis of the same kind for every smaller k, so a curve over k uses nested subspaces.

    Example:
        >>> Q = random_basis(2, 6, 3, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(Q.mT @ Q, torch.eye(3, dtype=torch.float64))
        True
    """
    draws = torch.randn(heads, m, k, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(draws).Q


def remasked(approximation: Tensor, P: Tensor, allowed: Tensor) -> Tensor:
    """An approximation of P made into a map again: nothing on shut entries, nothing negative, P's row sums.

    Shut entries and negative ones become 0, then each row is scaled to the sum of P's row (1 without sinks). A
    row of which nothing is left is spread evenly over its allowed entries. A rank above k may result: it says what
    a causal map of this quality would do, not what one of rank k does.

    Args:
        approximation: ``(*lead, n, m)``.
        P: The map, ``(*lead, n, m)``.
        allowed: bool, broadcastable to ``(*lead, n, m)``: entries that the mask leaves open.

    Example:
        >>> allowed = torch.tensor([[True, False], [True, True]])
        >>> P = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> remasked(torch.tensor([[0.8, 0.3], [-0.1, 0.4]]), P, allowed).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    kept = approximation.clamp_min(0).masked_fill(~allowed, 0)
    sums = kept.sum(-1, keepdim=True)
    even = allowed.to(P.dtype) / allowed.sum(-1, keepdim=True).clamp_min(1)
    rows = torch.where(sums > 0, kept / sums.where(sums > 0, torch.ones_like(sums)), even)
    return rows * P.sum(-1, keepdim=True)


def leaked_mass(approximation: Tensor, allowed: Tensor) -> Tensor:
    """Share of an approximation's absolute mass on entries that the mask shuts, ``(*lead)``, in [0, 1).

    Example:
        >>> leaked_mass(torch.tensor([[3.0, -1.0], [2.0, 2.0]]), torch.tensor([[True, False], [True, True]])).item()
        0.125
    """
    mass = approximation.abs()
    return mass.masked_fill(allowed, 0).sum((-2, -1)) / mass.sum((-2, -1))
