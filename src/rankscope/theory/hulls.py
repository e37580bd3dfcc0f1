"""Distinct places among points, and the convex hull of them, whatever dimension they span."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def points(tokens: Array, tolerance: float) -> Array:
    """Return the distinct places of tokens: groups linked by steps below ``tolerance``, as their means.

    Example:
        >>> points(np.array([[0.0], [1.0], [1.0 + 1e-9]]), 1e-3).tolist()
        [[0.0], [1.0000000005]]
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(tokens) == 1:
        return tokens
    groups = fcluster(linkage(tokens, "single"), tolerance, "distance")
    places = np.stack([tokens[groups == group].mean(axis=0) for group in np.unique(groups)])
    return places[np.lexsort(places.T[::-1])]


def outside_boundary(places: Array, tolerance: float) -> tuple[int, int]:
    """Count the places that are neither 0 nor on the boundary of their convex hull, and the hull's vertices.

    Args:
        places: Distinct points, ``(p, d)``.
        tolerance: A distance.

    Returns:
        How many are neither, and the number of vertices.

    Example:
        >>> square = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [0.5, 0.0]])
        >>> outside_boundary(square, 1e-3)
        (1, 4)
    """
    flat = _flat(places, tolerance)
    dimension = flat.shape[1]
    if dimension == 0:
        return 0, 1
    if dimension == 1:
        line = flat[:, 0]
        depth, vertices = np.minimum(line - line.min(), line.max() - line), 2
    else:
        hull = _hull(flat)
        depth = -(flat @ hull.equations[:, :-1].T + hull.equations[:, -1]).max(axis=1)
        vertices = len(hull.vertices)
    neither = (depth > tolerance) & (np.linalg.norm(places, axis=1) > tolerance)
    # A hull of fewer dimensions than the space is all boundary.
    return (int(neither.sum()) if dimension == places.shape[1] else 0), vertices


def hull(places: Array, tolerance: float) -> tuple[NDArray[np.intp], list[tuple[int, int]]]:
    """Return the numbers of the places that are vertices of their convex hull, and the hull's edges.

    Args:
        places: Distinct points, ``(p, d)``.
        tolerance: A distance; a hull thinner than this is taken for one of fewer dimensions.

    Returns:
        Vertices, rising, and pairs of them that an edge joins. In three dimensions the diagonals that cut a face into
        triangles are left out.

    Example:
        >>> hull(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.2, 0.2]]), 1e-3)[1]
        [(0, 1), (0, 2), (1, 2)]
    """
    flat = _flat(places, tolerance)
    if flat.shape[1] == 0:
        return np.array([0]), []
    if flat.shape[1] == 1:
        ends = int(flat[:, 0].argmin()), int(flat[:, 0].argmax())
        return np.sort(ends), [(min(ends), max(ends))]
    found = _hull(flat)
    faces: dict[tuple[int, int], list[Array]] = {}
    for corners, normal in zip(found.simplices, found.equations, strict=True):
        for i, one in enumerate(corners):
            for other in corners[i + 1 :]:
                faces.setdefault((int(min(one, other)), int(max(one, other))), []).append(normal)
    edges = [pair for pair, normals in faces.items() if np.ptp(normals, axis=0).max() > 1e-9 or len(normals) == 1]
    return np.sort(found.vertices), sorted(edges)


def _flat(places: Array, tolerance: float) -> Array:
    """Return the places in coordinates of the directions they spread over."""
    centre = places.mean(axis=0)
    _, sigma, axes = np.linalg.svd(places - centre, full_matrices=False)
    return (places - centre) @ axes[sigma > tolerance].T


def _hull(flat: Array) -> Any:
    from scipy.spatial import ConvexHull

    return ConvexHull(flat)
