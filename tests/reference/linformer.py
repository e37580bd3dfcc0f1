"""Linformer, row by row and token by token, in float64; differentiable, imports nothing of ours."""

import math

import torch


def valid_rows(x, padding):
    """List each row's valid tokens, ``x (b, n, c)``."""
    if padding is None:
        return [list(row) for row in x]
    return [
        [token for token, padded in zip(row, pads, strict=True) if not padded]
        for row, pads in zip(x, padding, strict=True)
    ]


def combine(coefficients, tokens):
    total = torch.zeros_like(tokens[0])
    for coefficient, token in zip(coefficients, tokens, strict=True):
        total = total + coefficient * token
    return total


def softmax(logits):
    top = max(x.item() for x in logits)
    exps = [torch.exp(x - top) for x in logits]
    return [x / sum(exps) for x in exps]


def attention_row(query, keys, values, scaling):
    return combine(softmax([scaling * (query * key).sum() for key in keys]), values)


def resampled(E, m):
    """Integrate E's columns, constant on unit steps, over m equal pieces."""
    k, longest = E.shape
    out = torch.zeros(k, m, dtype=E.dtype)
    for j in range(m):
        left, right = j * longest / m, (j + 1) * longest / m
        for column in range(longest):
            overlap = max(0.0, min(right, column + 1) - max(left, column))
            out[:, j] = out[:, j] + overlap * E[:, column]
    return out


def segments(m, k):
    count = min(m, k)
    return [range(i * m // count, math.ceil((i + 1) * m / count)) for i in range(count)]


def project(kind, tokens, k, n, weight=None, source=None, length_rule="slice"):
    """Compress a list of tokens; ``weight`` is the kind's own parameter, ``source`` what ``dynamic`` reads."""
    m = len(tokens)
    if kind in ("learned", "gaussian"):
        E = resampled(weight, m) if length_rule == "interpolate" else weight[:, :m]
        return [combine(row, tokens) for row in E]
    if kind == "mean":
        return [sum(tokens[j] for j in run) / len(run) for run in segments(m, k)]
    if kind == "max":
        return [torch.stack([tokens[j] for j in run]).amax(0) for run in segments(m, k)]
    if kind == "convolution":
        stride = math.ceil(n / k)
        runs = [tokens[start : start + stride] for start in range(0, m, stride)]
        return [combine(weight[: len(run)], run) for run in runs]
    if kind == "dynamic":
        return [combine(softmax([(row * token).sum() for token in source]), tokens) for row in weight]
    raise AssertionError(kind)


def row_norms(kind, m, k, n, weight=None, source=None):
    """2-norms of the rows of the projection as a matrix: its effect on unit vectors."""
    columns = list(torch.eye(m, dtype=torch.float64))
    return [row.square().sum().sqrt() for row in project(kind, columns, k, n, weight, source)]


def layer(x, params, kind, E, F, k, n, heads, padding=None, context=None, length_rule="slice", normalize=False):
    """The whole layer. ``params``: (weight, bias) of query, key, value, output; E, F: weights, one a head."""
    (wq, bq), (wk, bk), (wv, bv), (wo, bo) = params
    head_dim = wq.shape[0] // heads
    out = []
    for row, tokens in zip(x, valid_rows(x if context is None else context, padding), strict=True):
        if not tokens:
            out.append(torch.zeros(x.shape[1], wo.shape[0], dtype=x.dtype))
            continue
        keys = [wk @ token + bk for token in tokens]
        values = [wv @ token + bv for token in tokens]
        attended = []
        for h in range(heads):
            cut = slice(h * head_dim, (h + 1) * head_dim)
            sides = []
            for weight, side in ((E[h], keys), (F[h], values)):
                sides.append(project(kind, [t[cut] for t in side], k, n, weight, tokens, length_rule))
            if normalize:
                norms = row_norms(kind, len(tokens), k, n, E[h], tokens)
                sides[0] = [key / norm for key, norm in zip(sides[0], norms, strict=True)]
            queries = [(wq @ token + bq)[cut] for token in row]
            attended.append(torch.stack([attention_row(q, *sides, head_dim**-0.5) for q in queries]))
        out.append(torch.cat(attended, dim=-1) @ wo.T + bo)
    return torch.stack(out)


def causal(query, key, value, chunk, past, compress):
    """One head, ``(n, head_dim)``; ``compress(j, tokens, side)`` gives the r vectors of chunk j."""
    out = []
    for t in range(query.shape[0]):
        first = max(t // chunk - past, 0)
        keys, values = [], []
        for j in range(first):
            inside = slice(j * chunk, (j + 1) * chunk)
            keys += compress(j, list(key[inside]), "key")
            values += compress(j, list(value[inside]), "value")
        keys += list(key[first * chunk : t + 1])
        values += list(value[first * chunk : t + 1])
        out.append(attention_row(query[t], keys, values, query.shape[1] ** -0.5))
    return torch.stack(out)
