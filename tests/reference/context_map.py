"""One head's context map over its valid tokens, as plain float64 loops."""

import math

import torch


def context_map_loop(
    query,
    key,
    scaling,
    *,
    key_padding_mask=None,
    query_padding_mask=None,
    is_causal=False,
    window=None,
    softcap=None,
    sinks=None,
    bias=None,
):
    query, key = query.double().tolist(), key.double().tolist()
    bias = None if bias is None else bias.double().tolist()
    rows = [i for i in range(len(query)) if query_padding_mask is None or not bool(query_padding_mask[i])]
    columns = [j for j in range(len(key)) if key_padding_mask is None or not bool(key_padding_mask[j])]
    P = []
    for i in rows:
        exponentials = []
        for j in columns:
            forbidden = (is_causal and j > i) or (window is not None and abs(i - j) >= window)
            if forbidden:
                exponentials.append(0.0)
                continue
            logit = scaling * sum(a * b for a, b in zip(query[i], key[j], strict=True))
            if softcap is not None:
                logit = softcap * math.tanh(logit / softcap)
            if bias is not None:
                logit += bias[i][j]
            exponentials.append(math.exp(logit))
        total = sum(exponentials) + (0.0 if sinks is None else math.exp(sinks))
        P.append([e / total for e in exponentials])
    return torch.tensor(P, dtype=torch.float64)
