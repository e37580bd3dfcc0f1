r"""How often Linformer's theorems hold: their events counted over draws of the random projection.

Theorem 1 replaces P by :math:`\tilde P = P R^\top R` and claims :math:`\|\tilde P w - P w\| < \varepsilon \|P w\|`.
For one fixed w the vector :math:`R^\top R w` has a law that needs no R: with :math:`s \sim \chi^2_k / k`, g standard
normal and :math:`\Pi` the projection away from w,

.. math:: R^\top R w - w \;\overset{d}{=}\; (s - 1)\, w + \sqrt{s / k}\; \|w\|\, \Pi g ,

because :math:`R w` is Gaussian and independent of what R does to the complement of w. So the error of every k comes
from one product :math:`P \Pi g` a draw, exactly in law and at a cost free of k (tests compare it with drawing R).
Draws are shared between the k's and ε's of a grid; each count is still a binomial one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.theory.johnson_lindenstrauss import exponent, failure_bound

# Numbers held at once: 2²⁴ float32 errors are 64 MiB.
_HELD = 2**24
_MEAN = 5.0


@dataclass(frozen=True)
class Theorem1Counts:
    """Failures of Theorem 1's two readings, over draws of R.

    Args:
        k: Projected lengths.
        eps: Allowed errors.
        draws: Draws of R behind each count.
        bound: ``failure_bound`` for each, ``(k, eps)``.
        relative: Draws that miss the printed ``‖P̃w − Pw‖ < ε‖Pw‖``, ``(k, eps, h, c)``.
        additive: Draws that miss ``|(P̃w − Pw)_i| ≤ ε‖P_i‖‖w‖`` in some row, ``(k, eps, h, c)``.
        relative_error: Mean over draws of ``‖P̃w − Pw‖ / ‖Pw‖``, ``(k, h, c)``.
    """

    k: tuple[int, ...]
    eps: tuple[float, ...]
    draws: int
    bound: Float[Tensor, "k eps"]
    relative: Int[Tensor, "k eps h c"]
    additive: Int[Tensor, "k eps h c"]
    relative_error: Float[Tensor, "k h c"]


@dataclass(frozen=True)
class Theorem2Errors:
    """What Theorem 2's construction gives, over draws of R.

    Args:
        delta: The δ of E = δR and F = e^{−δ}R.
        draws: Draws of R behind each number.
        relative_error: Mean of ``‖output − PV‖ / ‖PV‖`` (Frobenius), ``(delta, h)``.
        missed: Share of draws and rows that miss ``‖output_i − (PV)_i‖ ≤ ε‖P_i‖‖V‖``, ``(delta, h)``.
        missed_by_zero: Share of rows that an output of nothing but zeros misses, ``(h,)``: how much the event asks.
        query_dependence: Mean of ``‖output − its mean over queries‖ / ‖output‖``, ``(delta, h)``.
        exact_query_dependence: The same of PV itself, ``(h,)``.
    """

    delta: tuple[float, ...]
    draws: int
    relative_error: Float[Tensor, "delta h"]
    missed: Float[Tensor, "delta h"]
    missed_by_zero: Float[Tensor, "h"]
    query_dependence: Float[Tensor, "delta h"]
    exact_query_dependence: Float[Tensor, "h"]


def count_theorem_1(
    P: Float[Tensor, "h n m"],
    w: Float[Tensor, "h m c"],
    *,
    k: Sequence[int],
    eps: Sequence[float],
    draws: int,
    generator: torch.Generator,
) -> Theorem1Counts:
    r"""Count how often :math:`\tilde P = P R^\top R` misses Theorem 1's printed event and the lemma's additive one.

    Args:
        P: Context mapping matrices, or any others: the theorem uses nothing of softmax.
        w: Vectors for each of them, none of them zero: columns of V W^V, or of :func:`vectors`.
        k: Projected lengths; more than m is allowed.
        eps: Allowed errors, each between 0 and 1.
        draws: Draws of R.
        generator: On ``P``'s device; what R is drawn with.

    Returns:
        The counts. Counts of the same draws for several w, k or ε are dependent.

    Raises:
        RankscopeError: Shapes that don't match, nothing to draw, a zero w, an ε outside (0, 1).

    References:
        Wang et al. 2020, arXiv 2006.04768, Theorem 1.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> P = torch.eye(64)[None]
        >>> w = vectors("gaussian", P, count=2, generator=generator)
        >>> counts = count_theorem_1(P, w, k=[16], eps=[0.5], draws=100, generator=generator)
        >>> counts.relative.tolist()  # the identity has full rank: the relative event never happens
        [[[[100, 100]]]]
    """
    _check(P, w, k, draws)
    heads, n, m = P.shape
    columns = w.shape[2]
    bound = torch.tensor([[failure_bound(n, length, e) for e in eps] for length in k])
    norm = w.norm(dim=1)
    exact = P @ w
    exact_norm = exact.norm(dim=1)
    row_norm = P.norm(dim=2)
    shape = (len(k), len(eps), heads, columns)
    relative, additive = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    total = torch.zeros(len(k), heads, columns, dtype=torch.float64)
    batch = max(1, min(draws, _HELD // (heads * max(n, m) * columns)))
    for start in range(0, draws, batch):
        size = min(batch, draws - start)
        g = torch.randn(heads, m, columns, size, generator=generator, device=P.device, dtype=P.dtype)
        along = torch.einsum("hmc,hmcb->hcb", w, g) / norm[..., None].square()
        across = (P @ (g - w[..., None] * along[:, None]).flatten(2)).unflatten(2, (columns, size))
        across *= norm[:, None, :, None]
        for i, length in enumerate(k):
            s = _chi_square(length, (heads, 1, columns, size), generator, P)
            error = (s - 1) * exact[..., None] + (s / length).sqrt() * across
            share = error.norm(dim=1) / exact_norm[..., None]
            worst = (error.abs() / row_norm[..., None, None]).amax(dim=1) / norm[..., None]
            total[i] += share.double().sum(-1).cpu()
            for j, e in enumerate(eps):
                # Not `share >= e`: where Pw is zero the share is no number, and the printed event does not happen.
                relative[i, j] += (~(share < e)).sum(-1).cpu()
                additive[i, j] += (worst > e).sum(-1).cpu()
    return Theorem1Counts(tuple(k), tuple(eps), draws, bound, relative, additive, total / draws)


def measure_theorem_2(
    logits: Float[Tensor, "h n n"],
    value: Float[Tensor, "h n head_dim"],
    *,
    k: int,
    delta: Sequence[float],
    eps: float,
    draws: int,
    generator: torch.Generator,
) -> Theorem2Errors:
    r"""Run Theorem 2's construction :math:`\mathrm{softmax}(A E^\top) F V` with E = δR and F = e^{−δ}R.

    As δ falls the logits :math:`\delta A R^\top` go to zero and the softmax to 1/k: the output no longer depends on
    the query, and its error stays. The proof bounds the exponential without its normaliser, not the softmax.

    Args:
        logits: A, already scaled.
        value: V W^V.
        k: Projected length.
        delta: The δ's to try.
        eps: Allowed error ε, between 0 and 1.
        draws: Draws of R.
        generator: On ``logits``'s device; what R is drawn with. One R serves every δ of a draw.

    Returns:
        Means over the draws.

    Raises:
        RankscopeError: Shapes that don't match, nothing to draw, an ε outside (0, 1).

    References:
        Wang et al. 2020, arXiv 2006.04768, Theorem 2 and Appendix B.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> logits, value = (torch.randn(1, 32, 32, generator=generator) for _ in range(2))
        >>> found = measure_theorem_2(logits, value, k=8, delta=[1, 1e-6], eps=0.5, draws=4, generator=generator)
        >>> found.query_dependence[1].item() < 1e-4 < found.query_dependence[0].item()
        True
    """
    exponent(eps)
    _check(logits, value, [k], draws)
    P = logits.softmax(-1)
    exact = P @ value
    allowed = eps * P.norm(dim=2) * value.flatten(1).norm(dim=1)[:, None]
    heads, n, _ = logits.shape
    sums = torch.zeros(3, len(delta), heads, dtype=torch.float64)
    for _ in range(draws):
        R = torch.randn(k, n, generator=generator, device=logits.device, dtype=logits.dtype) / k**0.5
        projected, pooled = logits @ R.mT, R @ value
        for i, d in enumerate(delta):
            output = (d * projected).softmax(-1) @ pooled * exp(-d)
            error = output - exact
            sums[0, i] += (_norm(error) / _norm(exact)).double().cpu()
            sums[1, i] += (error.norm(dim=2) > allowed).double().mean(-1).cpu()
            sums[2, i] += _query_dependence(output).double().cpu()
    error, missed, dependence = sums / draws
    by_zero = (exact.norm(dim=2) > allowed).double().mean(-1).cpu()
    return Theorem2Errors(
        tuple(delta), draws, error, missed, by_zero, dependence, _query_dependence(exact).double().cpu()
    )


def vectors(
    kind: str, P: Float[Tensor, "h n m"], *, count: int, generator: torch.Generator
) -> Float[Tensor, "h m count"]:
    """Draw w's of one kind for each matrix.

    Args:
        kind: ``gaussian``: N(0, I). ``mean_dominated``: the same around a mean of 5, where averaging rows make
            ‖Pw‖ large and the relative event easy. ``adversarial``: the right singular vectors of the smallest
            singular values, where ‖Pw‖ is small and the relative event hardest; nothing is drawn.
        P: The matrices.
        count: Vectors for each.
        generator: On ``P``'s device.

    Returns:
        ``(h, m, count)``.

    Raises:
        RankscopeError: No such kind.

    Example:
        >>> P = torch.eye(4)[None]
        >>> vectors("mean_dominated", P, count=2, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([1, 4, 2])
    """
    return VECTORS[kind](P, count, generator)


def binomial_interval(successes: int, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper–Pearson interval of a binomial probability: never covers less often than it says.

    Args:
        successes: How often it happened.
        trials: Out of how many independent trials.
        confidence: Between 0 and 1.

    Returns:
        Both ends, within [0, 1].

    Raises:
        RankscopeError: Not ``0 ≤ successes ≤ trials`` with at least one trial.

    References:
        Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
        Biometrika 26, 1934.

    Example:
        >>> [round(end, 4) for end in binomial_interval(0, 1000)]
        [0.0, 0.0037]
    """
    from scipy.stats import beta

    if not 0 <= successes <= trials or trials < 1:
        raise RankscopeError(f"`successes` must be between 0 and `trials` ≥ 1, got {successes} of {trials}")
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, successes, trials - successes + 1)) if successes else 0.0
    high = float(beta.ppf(1 - tail, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high


def _gaussian(P: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(P.shape[0], P.shape[2], count, generator=generator, device=P.device, dtype=P.dtype)


def _adversarial(P: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.svd(P.double(), full_matrices=False).Vh[:, -count:].mT.to(P.dtype)


VECTORS = Registry(
    "kind",
    {
        "gaussian": _gaussian,
        "mean_dominated": lambda P, count, generator: _MEAN + _gaussian(P, count, generator),
        "adversarial": _adversarial,
    },
)


def _chi_square(k: int, shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """Draw χ²_k / k."""
    concentration = torch.full(shape, k / 2, dtype=torch.float64, device=like.device)
    return torch._standard_gamma(concentration, generator=generator).to(like.dtype) * (2 / k)


def _query_dependence(output: Tensor) -> Tensor:
    return _norm(output - output.mean(1, keepdim=True)) / _norm(output)


def _norm(matrices: Tensor) -> Tensor:
    return matrices.flatten(1).norm(dim=1)


def _check(P: Tensor, w: Tensor, k: Sequence[int], draws: int) -> None:
    if P.ndim != 3 or w.ndim != 3 or (w.shape[0], w.shape[1]) != (P.shape[0], P.shape[2]):
        raise RankscopeError(
            f"the matrix must be (heads, n, m) and its vectors (heads, m, count), got {tuple(P.shape)} and "
            f"{tuple(w.shape)}: put the heads first in both"
        )
    if not w.shape[2]:
        raise RankscopeError(f"there must be a vector or more for each matrix, got {tuple(w.shape)}")
    if not bool(P.isfinite().all() and w.isfinite().all()):
        raise RankscopeError("the matrix or its vectors hold a number that is not finite: leave that window out")
    if draws < 1:
        raise RankscopeError(f"`draws` must be 1 or more, got {draws}")
    if not k or min(k) < 1:
        raise RankscopeError(f"`k` must hold projected lengths of 1 or more, got {list(k)}")
    if not bool((w.norm(dim=1) > 0).all()):
        raise RankscopeError("a vector is all zero, so no error is relative to it: leave it out")
