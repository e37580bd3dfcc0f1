"""Linformer's two constructions with the random matrix drawn, as plain float64 loops."""

import math

import numpy as np


def theorem_1_error(P, w, R):
    """‖P RᵀR w − P w‖ / ‖P w‖ and the largest |(P RᵀR w − P w)_i| / (‖P_i‖ ‖w‖)."""
    n, m = P.shape
    k = R.shape[0]
    u = [sum(R[a, j] * w[j] for j in range(m)) for a in range(k)]
    v = [sum(R[a, j] * u[a] for a in range(k)) for j in range(m)]
    square = exact_square = worst = 0.0
    w_norm = math.sqrt(sum(w[j] ** 2 for j in range(m)))
    for i in range(n):
        exact = sum(P[i, j] * w[j] for j in range(m))
        error = sum(P[i, j] * (v[j] - w[j]) for j in range(m))
        row_norm = math.sqrt(sum(P[i, j] ** 2 for j in range(m)))
        square += error**2
        exact_square += exact**2
        worst = max(worst, abs(error) / (row_norm * w_norm))
    return math.sqrt(square / exact_square), worst


def theorem_2_output(A, V, R, delta):
    """softmax(A Eᵀ) F V with E = δR and F = e^(−δ) R."""
    n, d = V.shape
    k = R.shape[0]
    output = np.zeros((A.shape[0], d))
    for i in range(A.shape[0]):
        logits = [sum(A[i, j] * delta * R[a, j] for j in range(n)) for a in range(k)]
        top = max(logits)
        weights = [math.exp(z - top) for z in logits]
        for c in range(d):
            for a in range(k):
                pooled = sum(math.exp(-delta) * R[a, j] * V[j, c] for j in range(n))
                output[i, c] += weights[a] / sum(weights) * pooled
    return output
