import itertools

import numpy as np
import pytest
import torch

from rankscope.theory.cluster_limits import judge
from rankscope.theory.clusters import Dynamics, integrate, uniform_tokens
from rankscope.theory.hulls import hull, points
from rankscope.theory.limit_sets import limit_set


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def distance_to(found, tokens):
    """Distance of each token to the nearest vertex, edge or translate of them along the set's directions."""
    out = np.eye(tokens.shape[1]) - found.along.T @ found.along
    tokens, corners = tokens @ out, found.vertices @ out
    best = np.linalg.norm(tokens[:, None] - corners, axis=-1).min(axis=1)
    for one, other in found.edges:
        step = corners[other] - corners[one]
        share = np.clip((tokens - corners[one]) @ step / (step @ step), 0, 1)
        best = np.minimum(best, np.linalg.norm(tokens - corners[one] - share[:, None] * step, axis=1))
    return best


@pytest.mark.parametrize(
    ("theorem", "value"),
    [
        ("boolean", [[1.0]]),
        ("polytope", np.eye(2)),
        ("hyperplanes", [[1.0, 0.2], [0.1, 0.3]]),
        ("polytope_times_space", np.diag([1.0, 1.0, -0.5])),
    ],
)
def test_last_tokens_lie_on_the_set_that_the_theorem_promises(theorem, value):
    value = np.array(value)
    d = len(value)
    for seed in range(3):
        x0 = uniform_tokens(20, d, generator=generator(seed))
        run = integrate(Dynamics.single(np.eye(d), np.eye(d), value), x0, times=[0, 14])
        assert judge(run, theorem).holds
        found = limit_set(theorem, run.tokens[-1], value)
        coordinates = run.tokens[-1] @ (np.eye(d) - found.along.T @ found.along)
        near = np.minimum(distance_to(found, run.tokens[-1]), np.linalg.norm(coordinates, axis=1))
        assert near.max() < 0.02 * np.abs(coordinates).max()
        # At the start they did not.
        assert distance_to(found, x0).max() > 0.1


def test_directions_of_a_set_are_those_its_theorem_leaves_free():
    value = np.diag([2.0, 2.0, 0.5])
    found = limit_set("polytope_times_space", uniform_tokens(9, 3, generator=generator()), value)
    assert np.abs(found.along).tolist() == [[0.0, 0.0, 1.0]]
    skew = np.array([[1.0, 0.7], [0.0, 0.2]])
    plane = limit_set("hyperplanes", uniform_tokens(9, 2, generator=generator()), skew).along[0]
    # Tokens move freely along V's other eigenvector, not along what is perpendicular to the leading one.
    np.testing.assert_allclose(skew @ plane, 0.2 * plane, atol=1e-12)
    assert limit_set("collapse", np.ones((2, 2)), -np.eye(2)).vertices.tolist() == [[0.0, 0.0]]


def test_a_cube_has_twelve_edges_and_a_flat_square_in_space_has_four():
    cube = np.array(list(itertools.product([0.0, 1.0], repeat=3)))
    vertices, edges = hull(np.vstack([cube, [[0.5, 0.5, 0.5]]]), 1e-6)
    assert vertices.tolist() == list(range(8))
    assert len(edges) == 12
    assert all(np.abs(cube[one] - cube[other]).sum() == 1 for one, other in edges)
    vertices, edges = hull(cube[:4], 1e-6)
    assert len(vertices) == len(edges) == 4
    assert hull(np.zeros((1, 3)), 1e-6)[1] == []
    assert hull(np.array([[0.0, 0.0], [2.0, 2.0], [1.0, 1.0]]), 1e-6)[1] == [(0, 1)]


def test_points_of_one_token_are_that_token():
    assert points(np.array([[3.0, 4.0]]), 0.1).tolist() == [[3.0, 4.0]]
