r"""What the flow of tokens is proved to end in: each theorem's hypotheses checked first, then its conclusion.

A theorem's hypotheses are of the matrices and the initial tokens; its conclusion is of t → ∞. What is tested at the
last time of a run is the conclusion with a tolerance, so a miss may mean that the run was too short: the verdict says
which numbers it saw.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope._registry import Registry
from rankscope.theory.clusters import RANGE, Array, Trajectory, growth, leaders, log_defect, numerical_rank
from rankscope.theory.hulls import outside_boundary, points

#: A row of P is one-hot, and two tokens are one point (relative to the largest token), within this.
TOLERANCE = 1e-2
#: Singular values of P below this share of the largest are not counted.
RANK_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verdict:
    """What a theorem says about a run.

    Args:
        theorem: Its name in :data:`THEOREMS`.
        unmet: Which hypothesis fails, empty if none does.
        holds: Whether the conclusion is seen at the last time; ``None`` where the hypotheses are not met.
        seen: The numbers it was judged by.
    """

    theorem: str
    unmet: str
    holds: bool | None
    seen: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line."""
        if self.unmet:
            return f"{self.theorem}: hypotheses not met: {self.unmet}"
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.seen.items())
        return f"{self.theorem}: {'reached' if self.holds else 'not reached at the last time'} ({numbers})"


@dataclass(frozen=True)
class Theorem:
    """One row of the table.

    Args:
        number: In arXiv 2305.05465.
        says: In words.
        rescaled: Whether it is about z rather than x.
        unmet: Returns the hypothesis that fails, or nothing.
        conclusion: Returns whether the conclusion is seen, and by what numbers.
    """

    number: str
    says: str
    rescaled: bool
    unmet: Callable[[Trajectory], str]
    conclusion: Callable[[Trajectory, float], tuple[bool, Mapping[str, float]]]


def judge(run: Trajectory, theorem: str, *, tolerance: float = TOLERANCE) -> Verdict:
    """Check a theorem's hypotheses on a run that starts at time 0, then its conclusion at the last time.

    Args:
        run: Tokens at rising times, the first of which is 0, of one head with constant matrices.
        theorem: A name of :data:`THEOREMS`.
        tolerance: How near one-hot, and how near two points, relative to the largest token.

    Returns:
        The verdict.

    Raises:
        RankscopeError: No such theorem.

    Example:
        >>> from rankscope.theory.clusters import Dynamics, integrate
        >>> tied = integrate(Dynamics.single([[1.0]], [[1.0]], [[1.0]]), [[1.0], [1.0]], times=[0.0, 1.0])
        >>> print(judge(tied, "boolean"))
        boolean: hypotheses not met: tokens 0 and 1 start at the same place
    """
    row = THEOREMS[theorem]
    unmet = _late(run) or _not_one_head(run) or row.unmet(run) or _wrong_form(run, row.rescaled) or _beyond(run)
    if unmet:
        return Verdict(theorem, unmet, None)
    holds, seen = row.conclusion(run, tolerance)
    return Verdict(theorem, "", holds, seen)


def classify(run: Trajectory, *, tolerance: float = TOLERANCE) -> list[Verdict]:
    """Judge a run by every theorem of the table."""
    return [judge(run, name, tolerance=tolerance) for name in THEOREMS]


def doubly_exponential_rate(run: Trajectory, first: int, last: int) -> float:
    r"""Slope of ln(−ln defect) between two times, the median over rows.

    Theorem 2.1's rate :math:`|P_{ij} - P^*_{ij}| \le \exp(-c e^{\lambda t})` makes it λ, which is V in d = 1.

    Args:
        run: Tokens at rising times.
        first: Position in ``run.times``; rows that are not within one half of one-hot there are left out.
        last: A later position.

    Returns:
        A number per unit of time; NaN where no row is near one-hot.
    """
    before, after = (log_defect(run.logits(i)) for i in (first, last))
    near = before < np.log(0.5)
    slopes = (np.log(-after[near]) - np.log(-before[near])) / (run.times[last] - run.times[first])
    return float(np.median(slopes)) if near.any() else float("nan")


def _matrices(run: Trajectory) -> tuple[Array, Array, Array]:
    head = run.dynamics.heads[0]
    return np.asarray(head.query), np.asarray(head.key), np.asarray(head.value)


def _late(run: Trajectory) -> str:
    return f"the run is kept from t = {run.times[0]:g} on, not from its start" if run.times[0] != 0 else ""


def _not_one_head(run: Trajectory) -> str:
    if len(run.dynamics.heads) != 1:
        return f"one head is needed, here are {len(run.dynamics.heads)}"
    return "" if run.dynamics.heads[0].constant else "the matrices depend on time"


def _wrong_form(run: Trajectory, rescaled: bool) -> str:
    if run.rescaled == rescaled:
        return ""
    return f"it is about {'rescaled tokens z' if rescaled else 'tokens x'}, the run holds the other form"


def _beyond(run: Trajectory) -> str:
    reach = growth(_matrices(run)[2]) * run.times[-1]
    if not run.rescaled or reach <= RANGE:
        return ""
    return f"growth times the last time is {reach:.4g}, beyond the {RANGE:g} to which float64 tells tokens apart"


def _tied(run: Trajectory) -> str:
    start = run.tokens[0]
    order = np.lexsort(start.T[::-1])
    same = np.flatnonzero((np.diff(start[order], axis=0) == 0).all(axis=1))
    if not len(same):
        return ""
    one, other = sorted((int(order[same[0]]), int(order[same[0] + 1])))
    return f"tokens {one} and {other} start at the same place"


def _not_definite(run: Trajectory) -> str:
    query, key, _ = _matrices(run)
    form = query.T @ key
    if np.abs(form - form.T).max() > 1e-9 * np.abs(form).max():
        return "QᵀK is not symmetric"
    least = np.linalg.eigvalsh((form + form.T) / 2).min()
    return "" if least > 0 else f"QᵀK has the eigenvalue {least:.3g}, not above 0"


def leading(value: Array) -> tuple[str, float, Array, Array]:
    """Return what is wrong with V's leading eigenvalue, it, and its right and left eigenvectors."""
    values, right = np.linalg.eig(value)
    first = int(np.abs(values).argmax())
    leading = values[first]
    nothing = np.zeros(len(value))
    if abs(leading.imag) > 1e-9 * abs(leading):
        return f"V's eigenvalue of largest modulus, {leading:.3g}, is not real", 0.0, nothing, nothing
    if leading.real <= 0:
        return f"V's eigenvalue of largest modulus, {leading.real:.3g}, is not above 0", 0.0, nothing, nothing
    if (np.abs(values) > (1 - 1e-9) * abs(leading)).sum() > 1:
        return f"V's eigenvalue of largest modulus, {leading.real:.3g}, is not simple", 0.0, nothing, nothing
    left_values, left = np.linalg.eig(value.T)
    dual = left[:, int(np.abs(left_values - leading).argmin())].real
    vector = right[:, first].real
    return "", float(leading.real), vector, dual / (dual @ vector)


def _boolean_unmet(run: Trajectory) -> str:
    query, key, value = _matrices(run)
    if run.tokens.shape[2] != 1:
        return f"d = 1 is needed, here d = {run.tokens.shape[2]}"
    if value[0, 0] <= 0:
        return f"V = {value[0, 0]:.3g}, not above 0"
    if (query.T @ key)[0, 0] <= 0:
        return f"QK = {(query.T @ key)[0, 0]:.3g}, not above 0"
    return _tied(run)


def _boolean(run: Trajectory, tolerance: float) -> tuple[bool, Mapping[str, float]]:
    P, start = run.P(-1), run.tokens[0][:, 0]
    extremes = [int(start.argmin()), int(start.argmax())]
    away = int((P[:, extremes].max(axis=1) < 1 - tolerance).sum())
    rank = numerical_rank(np.linalg.svd(P, compute_uv=False), RANK_TOLERANCE)
    seen = {"rows that are not one-hot on an extreme token": away, "rank": rank, "leaders": len(leaders(P))}
    return away <= 1 and rank <= 3, seen


def _identity_unmet(run: Trajectory) -> str:
    value = _matrices(run)[2]
    return "V is not the identity" if (value != np.eye(len(value))).any() else _not_definite(run)


def _polytope(run: Trajectory, tolerance: float) -> tuple[bool, Mapping[str, float]]:
    return _polytope_of(run.tokens[-1], tolerance)


def _polytope_of(tokens: Array, tolerance: float) -> tuple[bool, Mapping[str, float]]:
    distance = tolerance * np.abs(tokens).max()
    places = points(tokens, distance)
    neither, vertices = outside_boundary(places, 2 * distance)
    seen = {"places": len(places), "vertices": vertices, "places neither 0 nor on the boundary": neither}
    return neither == 0, seen


def _good_triple_unmet(run: Trajectory) -> str:
    query, key, value = _matrices(run)
    wrong, _, vector, _ = leading(value)
    if wrong:
        return wrong
    product = float((query @ vector) @ (key @ vector))
    return "" if product > 0 else f"⟨Qφ₁, Kφ₁⟩ = {product:.3g}, not above 0"


def _hyperplanes(run: Trajectory, tolerance: float) -> tuple[bool, Mapping[str, float]]:
    _, _, _, dual = leading(_matrices(run)[2])
    levels = run.tokens[-1] @ dual
    found = points(levels[:, None], tolerance * np.abs(levels).max())
    return len(found) <= 3, {"hyperplanes": len(found)}


def leading_space(value: Array) -> tuple[str, Array]:
    """Return what keeps V from being paranormal, and F's coordinates as rows: λ on F, smaller moduli on G."""
    values, right = np.linalg.eig(value)
    largest = values[int(np.abs(values).argmax())]
    if abs(largest.imag) > 1e-9 * abs(largest) or largest.real <= 0:
        return f"V's eigenvalue of largest modulus, {largest:.3g}, is not real and above 0", right.T.real
    inside = np.abs(values - largest) < 1e-9 * abs(largest)
    if (np.abs(values[~inside]) > (1 - 1e-9) * abs(largest)).any():
        return "V has another eigenvalue of the largest modulus", right.T.real
    if np.linalg.matrix_rank(right) < len(value):
        return "V has no basis of eigenvectors", right.T.real
    return "", np.linalg.inv(right)[inside].real


def _paranormal_unmet(run: Trajectory) -> str:
    return leading_space(_matrices(run)[2])[0] or _not_definite(run)


def _polytope_times_space(run: Trajectory, tolerance: float) -> tuple[bool, Mapping[str, float]]:
    coordinates = leading_space(_matrices(run)[2])[1]
    return _polytope_of(run.tokens[-1] @ coordinates.T, tolerance)


def _repelling_unmet(run: Trajectory) -> str:
    query, key, value = _matrices(run)
    identity = np.eye(len(value))
    if (value != -identity).any():
        return "V is not −I"
    return "" if np.allclose(query.T @ key, identity, rtol=0, atol=1e-12) else "QᵀK is not I"


def _collapse(run: Trajectory, tolerance: float) -> tuple[bool, Mapping[str, float]]:
    largest = float(np.linalg.norm(run.tokens[-1], axis=1).max())
    return largest <= tolerance, {"largest token": largest}


#: The theorems by name.
THEOREMS: Registry[Theorem] = Registry(
    "theorem",
    {
        "boolean": Theorem(
            "2.1",
            "d = 1, V > 0, QK > 0, distinct tokens: every row of P but at most one turns one-hot on an extreme token",
            True,
            _boolean_unmet,
            _boolean,
        ),
        "polytope": Theorem(
            "3.1",
            "V = I, QᵀK ≻ 0: each token goes to 0 or to the boundary of a polytope",
            True,
            _identity_unmet,
            _polytope,
        ),
        "hyperplanes": Theorem(
            "4.2",
            "V's leading eigenvalue real, positive, simple, ⟨Qφ₁, Kφ₁⟩ > 0: at most three parallel hyperplanes",
            True,
            _good_triple_unmet,
            _hyperplanes,
        ),
        "polytope_times_space": Theorem(
            "5.2",
            "V = λ > 0 on F and smaller on G, QᵀK ≻ 0: the parts in F go to 0 or to the boundary of a polytope",
            True,
            _paranormal_unmet,
            _polytope_times_space,
        ),
        "collapse": Theorem("8.5", "V = −I, QᵀK = I: every token goes to 0", False, _repelling_unmet, _collapse),
    },
)
