"""The token equation's right-hand side as plain float64 loops."""

import math

import numpy as np


def velocity(x, heads):
    """Σ over heads and j of P_ij V x_j, for heads given as (Q, K, V)."""
    n, d = x.shape
    out = np.zeros((n, d))
    for Q, K, V in heads:
        for i in range(n):
            scores = [float((Q @ x[i]) @ (K @ x[j])) for j in range(n)]
            top = max(scores)
            total = sum(math.exp(s - top) for s in scores)
            for j in range(n):
                out[i] += math.exp(scores[j] - top) / total * (V @ x[j])
    return out
