"""Truncated attention as plain float64 loops: the best map of rank k from an SVD, and its causal repair."""

import numpy as np


def best_map(P: np.ndarray, k: int) -> np.ndarray:
    """Sum of the k leading terms sigma_i u_i v_iᵀ."""
    u, sigma, vt = np.linalg.svd(P)
    total = np.zeros_like(P)
    for i in range(k):
        for row in range(P.shape[0]):
            for column in range(P.shape[1]):
                total[row, column] += sigma[i] * u[row, i] * vt[i, column]
    return total


def causal_map(approximation: np.ndarray) -> np.ndarray:
    """Drop the future and negative entries, scale rows to 1; a row with nothing left is even over its past."""
    n = len(approximation)
    repaired = np.zeros_like(approximation)
    for row in range(n):
        kept = [max(approximation[row, column], 0.0) for column in range(row + 1)]
        total = sum(kept)
        for column in range(row + 1):
            repaired[row, column] = kept[column] / total if total > 0 else 1 / (row + 1)
    return repaired


def future_share(approximation: np.ndarray) -> float:
    """Absolute mass above the diagonal over all absolute mass."""
    future = whole = 0.0
    for row in range(len(approximation)):
        for column in range(len(approximation)):
            whole += abs(approximation[row, column])
            if column > row:
                future += abs(approximation[row, column])
    return future / whole


def tail_share(P: np.ndarray, k: int) -> float:
    """Root of the share of squared singular values beyond the k largest."""
    squares = [value**2 for value in np.linalg.svd(P, compute_uv=False)]
    return float(np.sqrt(sum(squares[k:]) / sum(squares)))
