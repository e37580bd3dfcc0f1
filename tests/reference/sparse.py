"""Attention over sets of positions as plain float64 loops: window, strided, fixed."""

import torch


def window_set(i, n, window, causal):
    return [j for j in range(n) if abs(i - j) <= window and not (causal and j > i)]


def strided_set(i, n, stride, causal):
    return [j for j in range(n) if (abs(i - j) <= stride or (i - j) % stride == 0) and not (causal and j > i)]


def fixed_set(i, n, stride, summary, causal):
    return [
        j for j in range(n) if (j // stride == i // stride or j % stride >= stride - summary) and not (causal and j > i)
    ]


def set_attention_loop(query, key, value, scaling, sets):
    """One head ``(n, d)``; ``sets[i]`` lists the positions query i looks at."""
    rows = []
    for i, targets in enumerate(sets):
        weight = torch.stack([scaling * (query[i] * key[j]).sum() for j in targets]).softmax(dim=0)
        rows.append(sum(w * value[j] for w, j in zip(weight, targets, strict=True)))
    return torch.stack(rows)
