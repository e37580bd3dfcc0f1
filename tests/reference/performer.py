"""FAVOR+ with given directions as plain float64 loops."""

import torch


def performer_loop(query, key, value, omega, scaling, present, causal):
    """One head ``(n, d)``, ``(m, d)``: the kernel's estimate pair by pair."""
    root = scaling**0.5

    def features(x):
        return torch.exp(omega @ (root * x) - (root * x).square().sum() / 2)

    phi_key = [features(k) for k in key]
    rows = []
    for i, q in enumerate(query):
        phi = features(q)
        numerator, denominator = torch.zeros_like(value[0]), 0.0
        for j in range(len(key)):
            if present[j] and not (causal and j > i):
                weight = (phi * phi_key[j]).sum()
                numerator, denominator = numerator + weight * value[j], denominator + weight
        rows.append(numerator / denominator if isinstance(denominator, torch.Tensor) else numerator)
    return torch.stack(rows)
