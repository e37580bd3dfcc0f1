"""Reformer's attention as plain float64 loops: the set of each query, then one softmax over it."""

import torch


def bucket_loop(x, rotations):
    bucket = 0
    for R in rotations:
        y = [sum(float(a) * float(b) for a, b in zip(x, column, strict=True)) for column in R.T]
        both = y + [-a for a in y]
        bucket = bucket * len(both) + both.index(max(both))
    return bucket


def chunk_loop(x, rotations, present, chunk):
    """The chunk of each present token after sorting by bucket, then position."""
    ranked = sorted((bucket_loop(x[i], rotations), i) for i in range(len(x)) if present[i])
    return {i: rank // chunk for rank, (_, i) in enumerate(ranked)}


def lsh_loop(query, key, value, rotations, chunk, scaling, present, causal):
    """One head: ``query (n, d)``, ``key`` the same or None for the shared form, rotations a list of (rounds, d, f)."""
    n, shared = len(query), key is None
    if shared:
        key = torch.stack([q / q.norm().clamp(min=1e-300) for q in query])
    rounds = rotations[0].shape[0]
    pairs = set()
    for r in range(rounds):
        one = [R[r] for R in rotations]
        query_chunk = chunk_loop(query.detach(), one, present, chunk)
        key_chunk = query_chunk if shared else chunk_loop(key.detach(), one, present, chunk)
        pairs |= {(i, j) for i, a in query_chunk.items() for j, b in key_chunk.items() if a - 1 <= b <= a}
    rows = []
    for i in range(n):
        if not present[i]:
            rows.append(torch.zeros_like(value[0]))
            continue
        targets = [j for j in range(n) if (i, j) in pairs and j != i and (not causal or j < i)]
        if not shared or not targets:
            targets.append(i)
        weight = torch.stack([scaling * (query[i] * key[j]).sum() for j in targets]).softmax(dim=0)
        rows.append(sum(w * value[j] for w, j in zip(weight, targets, strict=True)))
    return torch.stack(rows)
