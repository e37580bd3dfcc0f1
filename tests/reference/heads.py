"""A head's map and its logit deviation as plain float64 loops."""

import math

import torch


def softmax_map_loop(query, key, scaling, allowed, softcap, sink):
    n, m = len(query), len(key)
    P = torch.zeros(n, m, dtype=torch.float64)
    for i in range(n):
        exponentials = []
        for j in range(m):
            logit = scaling * sum(float(a) * float(b) for a, b in zip(query[i], key[j], strict=True))
            if softcap is not None:
                logit = softcap * math.tanh(logit / softcap)
            open_ = allowed is None or bool(allowed[i, j])
            exponentials.append(math.exp(logit) if open_ else 0.0)
        total = sum(exponentials) + (0.0 if sink is None else math.exp(sink))
        for j in range(m):
            P[i, j] = exponentials[j] / total
    return P


def logit_deviation_loop(content, allowed):
    variances = []
    for i in range(len(content)):
        row = [float(x) for j, x in enumerate(content[i]) if allowed is None or bool(allowed[i, j])]
        if row:
            mean = sum(row) / len(row)
            variances.append(sum((x - mean) ** 2 for x in row) / len(row))
    return math.sqrt(sum(variances) / len(variances))
