"""Softmax attention's map, one entry at a time, in float64."""

import math


def attention_map(query, key, scaling, allowed=None, bias=None, softcap=None, sink=None):
    """Rows of P for one head: lists of query and key vectors, ``allowed[i][j]`` and ``bias[i][j]`` if given."""
    rows = []
    for i, q in enumerate(query):
        logits = []
        for j, k in enumerate(key):
            x = scaling * sum(a * b for a, b in zip(q, k, strict=True))
            if softcap is not None:
                x = softcap * math.tanh(x / softcap)
            if bias is not None:
                x += bias[i][j]
            logits.append(x if allowed is None or allowed[i][j] else -math.inf)
        if all(x == -math.inf for x in logits):
            rows.append([1 / len(key)] * len(key))
            continue
        top = max([*logits, *([] if sink is None else [sink])])
        powers = [math.exp(x - top) for x in logits]
        total = sum(powers) + (0 if sink is None else math.exp(sink - top))
        rows.append([p / total for p in powers])
    return rows
