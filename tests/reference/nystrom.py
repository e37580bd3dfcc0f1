"""Nyström attention of one unpadded head as plain float64 loops."""

import torch


def segment_means_loop(x, landmarks):
    n, k = len(x), min(landmarks, len(x))
    means = []
    for i in range(k):
        start, end = i * n // k, -(-(i + 1) * n // k)
        means.append(sum(x[j] for j in range(start, end)) / (end - start))
    return torch.stack(means)


def softmax_rows_loop(left, right, scaling):
    return torch.stack([torch.stack([scaling * (a * b).sum() for b in right]).softmax(dim=0) for a in left])


def pseudo_inverse_loop(A, iterations):
    column = max(sum(abs(A[i][j]) for i in range(len(A))) for j in range(len(A[0])))
    row = max(sum(abs(a) for a in A[i]) for i in range(len(A)))
    Z, one = A.T / (column * row), torch.eye(len(A), dtype=A.dtype)
    for _ in range(iterations):
        Z = Z @ (13 * one - A @ Z @ (15 * one - A @ Z @ (7 * one - A @ Z))) / 4
    return Z


def nystrom_loop(query, key, value, landmarks, scaling, iterations):
    rows, columns = segment_means_loop(query, landmarks), segment_means_loop(key, landmarks)
    inverse = pseudo_inverse_loop(softmax_rows_loop(rows, columns, scaling), iterations)
    return softmax_rows_loop(query, columns, scaling) @ (inverse @ (softmax_rows_loop(rows, key, scaling) @ value))
