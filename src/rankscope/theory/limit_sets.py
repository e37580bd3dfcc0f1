r"""Where a flow's tokens end, as a set that can be drawn: a polytope, moved along a space of directions.

Every limit of :data:`rankscope.theory.cluster_limits.THEOREMS` has this form: a polytope alone (Theorem 3.1; in d = 1
the two extreme places of 2.1; the point 0 of 8.5), some parallel hyperplanes (4.2: their places on the leading
eigenvector, moved along the others), a polytope times a space (5.2). The theorems say that there is such a set, not
which one: it is read off the last tokens of a run.
"""

from dataclasses import dataclass

import numpy as np

from rankscope.theory.cluster_limits import TOLERANCE, leading, leading_space
from rankscope.theory.hulls import Array, hull, points


@dataclass(frozen=True)
class LimitSet:
    """A polytope, moved along some directions.

    Args:
        words: What it is.
        vertices: ``(p, d)``.
        edges: Pairs of vertices that an edge joins.
        along: Orthonormal directions that belong to the set, as rows, ``(g, d)``; g is 0 for a polytope alone.
    """

    words: str
    vertices: Array
    edges: list[tuple[int, int]]
    along: Array


def limit_set(theorem: str, tokens: Array, value: Array, *, tolerance: float = TOLERANCE) -> LimitSet:
    """Return the set that a theorem promises, read off a run's last tokens.

    Args:
        theorem: A name of :data:`rankscope.theory.cluster_limits.THEOREMS` whose hypotheses are met.
        tokens: The last ones, in the theorem's own form, ``(n, d)``.
        value: V.
        tolerance: How near two places are one, relative to the largest.

    Returns:
        The set.

    Example:
        >>> found = limit_set("polytope", np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.2, 0.2]]), np.eye(2))
        >>> found.vertices.tolist()
        [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    d = len(value)
    nothing = np.zeros((0, d))
    if theorem == "collapse":
        return LimitSet("limit: 0", np.zeros((1, d)), [], nothing)
    if theorem == "hyperplanes":
        _, _, vector, dual = leading(value)
        levels = tokens @ dual
        places = points(levels[:, None], tolerance * np.abs(levels).max())
        return LimitSet("hyperplanes of the last tokens", places * vector, [], _kernel(dual[None]))
    if theorem == "polytope_times_space":
        coordinates = leading_space(value)[1]
        vertices, edges = _polytope(tokens @ coordinates.T, tolerance)
        return LimitSet(
            "polytope of the last tokens × a space",
            vertices @ np.linalg.pinv(coordinates).T,
            edges,
            _kernel(coordinates),
        )
    vertices, edges = _polytope(tokens, tolerance)
    words = "extreme tokens" if theorem == "boolean" else "polytope of the last tokens"
    return LimitSet(words, vertices, [] if theorem == "boolean" else edges, nothing)


def _polytope(tokens: Array, tolerance: float) -> tuple[Array, list[tuple[int, int]]]:
    distance = tolerance * np.abs(tokens).max()
    places = points(tokens, distance)
    numbers, edges = hull(places, 2 * distance)
    position = {int(number): i for i, number in enumerate(numbers)}
    return places[numbers], [(position[one], position[other]) for one, other in edges]


def _kernel(rows: Array) -> Array:
    """Return an orthonormal basis of what all rows are perpendicular to, as rows."""
    return np.linalg.svd(rows)[2][np.linalg.matrix_rank(rows) :]
