"""Singular values by one-sided Jacobi rotations in float64: slow, simple, and accurate in the small values too."""

import math

import numpy as np


def singular_values(P):
    columns = np.array(P, dtype=np.float64)
    if columns.shape[0] < columns.shape[1]:
        columns = columns.T.copy()
    m = columns.shape[1]
    for _ in range(60):
        largest = 0.0
        for i in range(m):
            for j in range(i + 1, m):
                a, b = columns[:, i], columns[:, j]
                alpha, beta, gamma = a @ a, b @ b, a @ b
                if gamma == 0.0:
                    continue
                largest = max(largest, abs(gamma) / math.sqrt(alpha * beta))
                zeta = (beta - alpha) / (2 * gamma)
                t = math.copysign(1.0, zeta) / (abs(zeta) + math.sqrt(1 + zeta * zeta))
                c = 1 / math.sqrt(1 + t * t)
                columns[:, i], columns[:, j] = c * a - c * t * b, c * t * a + c * b
        if largest < 1e-15:
            break
    return np.sort(np.sqrt((columns * columns).sum(0)))[::-1]
