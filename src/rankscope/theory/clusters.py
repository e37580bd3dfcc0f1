r"""Self-attention as a flow of tokens: the equation of Geshkovski and others, and its rescaled form.

With :math:`P_{ij} = \mathrm{softmax}_j \langle Q x_i, K x_j \rangle` the tokens follow

.. math:: \dot x_i = \sum_j P_{ij} V x_j, \qquad
          z_i = e^{-tV} x_i, \quad \dot z_i = \sum_j P_{ij} V (z_j - z_i),

the second having the scores :math:`\langle Q e^{tV} z_i, K e^{tV} z_j \rangle` and the same P. Tokens grow like
:math:`e^{\lambda t}`; the rescaled ones stay where limits can be seen. Attention *acts* here: integrating
:math:`\dot x_i = V x_i` and computing P beside it is another, easier equation with other limits.

Everything is float64, since the scores double every exponent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rankscope._errors import RankscopeError

Array = NDArray[Any]
Schedule = Array | Callable[[float], Array]

RTOL, ATOL = 1e-10, 1e-12
#: Rescaled tokens are trusted while growth times time stays below this: two tokens' distance e^{-16} = 1e-7 is then
#: still 1e5 times the solver's absolute tolerance.
RANGE = 16.0
#: An integration that asks for more velocities than this is given up.
MOST_EVALUATIONS = 50_000
# The largest exponent whose exponential float64 holds with room for a product.
_LARGEST = 690.0


@dataclass(frozen=True)
class Head:
    """One head's matrices, each ``(d', d)`` or a function of time that gives one.

    Args:
        query: Q.
        key: K, as tall as Q.
        value: V, ``(d, d)``.
    """

    query: Schedule
    key: Schedule
    value: Schedule

    @property
    def constant(self) -> bool:
        """Whether no matrix depends on time."""
        return not any(callable(matrix) for matrix in (self.query, self.key, self.value))


@dataclass(frozen=True)
class Trajectory:
    """Tokens at chosen times.

    Args:
        dynamics: What moved them.
        times: ``(T,)``.
        tokens: ``(T, n, d)``, rescaled or not.
        rescaled: Whether ``tokens`` are z rather than x.
        solver: How it was integrated, in words.
        evaluations: How often the right-hand side was computed.
    """

    dynamics: "Dynamics"
    times: Array
    tokens: Array
    rescaled: bool
    solver: str
    evaluations: int

    def P(self, i: int, head: int = 0) -> Array:
        """Return the context mapping matrix of one head at ``times[i]``."""
        return _softmax(self.logits(i, head))

    def logits(self, i: int, head: int = 0) -> Array:
        """Return scores at ``times[i]`` less each row's largest, so never above 0."""
        return self.dynamics.logits(float(self.times[i]), self.tokens[i], head, rescaled=self.rescaled)

    def at(self, positions: Sequence[int] | NDArray[np.intp]) -> "Trajectory":
        """Return the run at some of its times only."""
        return replace(self, times=self.times[positions], tokens=self.tokens[positions])

    def sigma(self, head: int = 0) -> Array:
        """Return the singular values of P at each time, ``(T, n)``."""
        return np.stack([np.linalg.svd(self.P(i, head), compute_uv=False) for i in range(len(self.times))])


@dataclass(frozen=True)
class Dynamics:
    """The heads whose outputs are added.

    Args:
        heads: One or more.

    Example:
        >>> one = Dynamics.single([[1.0]], [[1.0]], [[1.0]])
        >>> run = integrate(one, np.array([[-1.0], [0.3], [1.0]]), times=[0.0, 8.0])
        >>> run.P(1).round(3)
        array([[1., 0., 0.],
               [0., 0., 1.],
               [0., 0., 1.]])
    """

    heads: tuple[Head, ...]

    @classmethod
    def single(cls, query: ArrayLike, key: ArrayLike, value: ArrayLike) -> "Dynamics":
        """Return one head with constant matrices."""
        return cls((Head(*(np.asarray(matrix, dtype=np.float64) for matrix in (query, key, value))),))

    def logits(self, t: float, tokens: Array, head: int = 0, *, rescaled: bool) -> Array:
        """Return one head's scores, each row's largest taken off, ``(n, n)``."""
        chosen = self.heads[head]
        query, key = _at(chosen.query, t), _at(chosen.key, t)
        log_factor = 0.0
        if rescaled:
            # e^{tV} = e^{αt} W: the second factor never overflows, the first is put in after the maximum is off.
            alpha, W = _growth(_at(chosen.value, t), t)
            tokens = tokens @ W.T
            log_factor = 2 * t * alpha
        scores = torch.from_numpy(tokens @ query.T) @ torch.from_numpy(tokens @ key.T).T
        scores -= scores.amax(dim=1, keepdim=True)
        if log_factor:
            scores *= exp(min(max(log_factor, -_LARGEST), _LARGEST))
        return scores.numpy()

    def velocity(self, t: float, tokens: Array, *, rescaled: bool) -> Array:
        """Return the right-hand side, ``(n, d)``."""
        total = np.zeros_like(tokens)
        for number, head in enumerate(self.heads):
            P = _softmax(self.logits(t, tokens, number, rescaled=rescaled))
            mixed = P @ tokens - tokens if rescaled else P @ tokens
            total += mixed @ _at(head.value, t).T
        return total


def integrate(
    dynamics: Dynamics,
    x0: ArrayLike,
    *,
    times: Sequence[float],
    rescaled: bool = True,
    method: str = "DOP853",
    rtol: float = RTOL,
    atol: float = ATOL,
) -> Trajectory:
    r"""Follow the tokens from time 0 by one of ``scipy.integrate.solve_ivp``'s adaptive solvers.

    Two tokens' rescaled distance may shrink like :math:`e^{-\lambda t}` while their scores grow like
    :math:`e^{2\lambda t}`, so tolerances must stay well below the distance that still matters: the defaults do while
    :func:`growth` times t is below :data:`RANGE`. Times between the solver's steps come from its dense output.

    Args:
        dynamics: The heads.
        x0: Tokens at time 0, ``(n, d)``.
        times: When to keep them: rising, from 0 on.
        rescaled: Integrate z rather than x; one head with constant matrices only.
        method: A name that ``solve_ivp`` knows.
        rtol: Relative tolerance of a step.
        atol: Absolute tolerance of a step.

    Returns:
        The tokens at ``times``.

    Raises:
        RankscopeError: Shapes, times, a rescaling that does not exist, tokens that leave float64's range, or an end so
            late that the solver would need more than :data:`MOST_EVALUATIONS`.

    References:
        Geshkovski, Letrouit, Polyanskiy and Rigollet 2023, arXiv 2305.05465, equations (2) and (4).
    """
    from scipy.integrate import solve_ivp

    x0 = _tokens(dynamics, x0)
    kept_at = _times(times)
    _check_rescaling(dynamics, rescaled)

    evaluations = 0

    def velocity(t: float, flat: Array) -> Array:
        nonlocal evaluations
        evaluations += 1
        if not isfinite(t):
            # The solver's first step is no number where the first velocity is none.
            raise _left(0.0, kept_at[-1], rescaled, "the first velocity is no finite number")
        if evaluations > MOST_EVALUATIONS:
            raise RankscopeError(
                f"`times` ends at {kept_at[-1]:g}, but {MOST_EVALUATIONS:,} velocities brought the tokens to t={t:.3g} "
                "only: end earlier"
            )
        return dynamics.velocity(t, flat.reshape(x0.shape), rescaled=rescaled).ravel()

    with np.errstate(over="ignore", invalid="ignore"):
        found = solve_ivp(
            velocity, (0.0, max(kept_at[-1], 1e-12)), x0.ravel(), method=method, t_eval=kept_at, rtol=rtol, atol=atol
        )
    if not found.success or not np.isfinite(found.y).all():
        raise _left(found.t[-1] if len(found.t) else 0.0, kept_at[-1], rescaled, str(found.message))
    tokens = found.y.T.reshape(len(kept_at), *x0.shape)
    words = f"scipy solve_ivp {method}, rtol {rtol:g}, atol {atol:g}"
    return Trajectory(dynamics, kept_at, tokens, rescaled, words, found.nfev)


def euler(
    dynamics: Dynamics, x0: ArrayLike, *, step: float, times: Sequence[float], rescaled: bool = False
) -> Trajectory:
    r"""Follow the tokens by the paper's discrete time, a residual layer a step.

    .. math:: x_i(t + \Delta t) = x_i(t) + \Delta t \sum_j P_{ij} V x_j

    Args:
        dynamics: The heads.
        x0: Tokens at time 0, ``(n, d)``.
        step: Δt; an error of its order is the price.
        times: When to keep the tokens: rising, from 0 on, whole numbers of steps.
        rescaled: Integrate z rather than x; one head with constant matrices only.

    Returns:
        The tokens at ``times``.

    Raises:
        RankscopeError: As :func:`integrate`, or a time between two steps.
    """
    x0 = _tokens(dynamics, x0)
    kept_at = _times(times)
    _check_rescaling(dynamics, rescaled)
    if step <= 0 or np.abs(kept_at / step - np.rint(kept_at / step)).max() > 1e-6:
        raise RankscopeError(f"`times` must be whole numbers of steps of `step`={step}, got {kept_at.tolist()}")
    wanted = np.rint(kept_at / step).astype(int)
    kept, x = [], x0
    with np.errstate(over="ignore", invalid="ignore"):
        for count in range(wanted[-1] + 1):
            kept += [x] * int((wanted == count).sum())
            x = x + step * dynamics.velocity(count * step, x, rescaled=rescaled)
    tokens = np.stack(kept)
    if not np.isfinite(tokens).all():
        raise _left(float("nan"), kept_at[-1], rescaled, "Euler's step overflowed")
    return Trajectory(dynamics, kept_at, tokens, rescaled, f"Euler, step {step:g}", int(wanted[-1]) + 1)


def growth(value: ArrayLike) -> float:
    """Return the fastest rate at which e^{tV} grows or shrinks: the largest |Re| of V's eigenvalues.

    Example:
        >>> growth([[1.0, 0.0], [0.0, -3.0]])
        3.0
    """
    return float(np.abs(np.linalg.eigvals(np.asarray(value)).real).max())


def uniform_tokens(n: int, d: int, *, generator: torch.Generator, half_width: float = 1.0) -> Array:
    """Draw tokens uniformly from a cube around 0, ``(n, d)``.

    Example:
        >>> uniform_tokens(3, 2, generator=torch.Generator().manual_seed(0)).shape
        (3, 2)
    """
    return half_width * (2 * torch.rand(n, d, generator=generator, dtype=torch.float64) - 1).numpy()


def leaders(P: Array) -> NDArray[np.intp]:
    """Return the tokens to which some row gives more than half of its attention.

    Example:
        >>> leaders(np.array([[0.9, 0.1, 0.0], [1.0, 0.0, 0.0], [0.4, 0.3, 0.3]]))
        array([0])
    """
    return np.flatnonzero((P > 0.5).any(axis=0))


def log_defect(logits: Array) -> Array:
    r"""How far each row is from one-hot, :math:`\ln(1 - \max_j P_{ij})`, where 1 − P underflows too.

    Example:
        >>> log_defect(np.array([[0.0, -1000.0]])).tolist()
        [-1000.0]
    """
    from scipy.special import logsumexp

    rows = np.arange(len(logits))
    rest = logits.copy()
    rest[rows, logits.argmax(axis=1)] = -np.inf
    return logsumexp(rest, axis=1) - logsumexp(logits, axis=1)


def numerical_rank(sigma: Array, tolerance: float) -> int:
    """Count singular values above ``tolerance`` times the largest, largest first.

    Example:
        >>> numerical_rank(np.array([2.0, 1.0, 1e-9]), 1e-6)
        2
    """
    return int((sigma > tolerance * sigma[0]).sum())


def _growth(value: Array, t: float) -> tuple[float, Array]:
    """Return V's largest real part α and e^{t(V − αI)}."""
    from scipy.linalg import expm

    alpha = float(np.linalg.eigvals(value).real.max())
    shifted = value - alpha * np.eye(len(value))
    return alpha, expm(t * shifted) if shifted.any() else np.eye(len(value))


def _softmax(logits: Array) -> Array:
    # torch's softmax: at n = 1,024 several times as fast as numpy's exp, whose tiny results are subnormal.
    return torch.from_numpy(logits).softmax(dim=1).numpy()


def _at(matrix: Schedule, t: float) -> Array:
    return matrix(t) if callable(matrix) else matrix


def _tokens(dynamics: Dynamics, x0: ArrayLike) -> Array:
    x0 = np.asarray(x0, dtype=np.float64)
    if x0.ndim != 2 or not x0.size or not np.isfinite(x0).all():
        raise RankscopeError(f"`x0` must be finite tokens of shape (n, d), got {x0.shape}")
    d = x0.shape[1]
    for head in dynamics.heads:
        query, key, value = (_at(matrix, 0.0) for matrix in (head.query, head.key, head.value))
        if query.shape[1:] != (d,) or key.shape != query.shape or value.shape != (d, d):
            raise RankscopeError(
                f"Q and K must be (d', d={d}) and V (d, d), got {query.shape}, {key.shape} and {value.shape}: "
                "give matrices of the tokens' width"
            )
    return x0


def _times(times: Sequence[float]) -> Array:
    found = np.asarray(times, dtype=np.float64)
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all() or found[0] < 0 or (np.diff(found) <= 0).any():
        shown = [*found.flat[:3], "…", *found.flat[-1:]] if found.size > 4 else list(found.flat)
        words = ", ".join(f"{t:g}" if isinstance(t, float) else str(t) for t in shown)
        raise RankscopeError(f"`times` must rise from 0 on to a finite end, got {words or 'none'}")
    return found


def _check_rescaling(dynamics: Dynamics, rescaled: bool) -> None:
    if rescaled and not (len(dynamics.heads) == 1 and dynamics.heads[0].constant):
        raise RankscopeError(
            "`rescaled` needs one head whose matrices do not depend on time, since z = e^{-tV} x is defined by one V: "
            "pass rescaled=False"
        )


def _left(reached: float, wanted: float, rescaled: bool, message: str) -> RankscopeError:
    cure = (
        "end earlier, or scale tokens or matrices down"
        if rescaled
        else "end earlier, or integrate the rescaled form (rescaled=True)"
    )
    return RankscopeError(
        f"`times` ends at {wanted:g}, but the tokens left float64's range after t={reached:g} ({message}): {cure}"
    )
