"""Rank measures as plain float64 loops over a list of singular values, largest first."""

import math


def nuclear_fraction(sigma, k):
    return sum(sigma[:k]) / sum(sigma)


def energy_fraction(sigma, k):
    return nuclear_fraction([s * s for s in sigma], k)


def effective_rank(sigma):
    total = sum(sigma)
    entropy = 0.0
    for s in sigma:
        if s > 0:
            entropy -= s / total * math.log(s / total)
    return math.exp(entropy)


def stable_rank(sigma):
    return sum(s * s for s in sigma) / sigma[0] ** 2


def participation_ratio(sigma):
    return sum(s**2 for s in sigma) ** 2 / sum(s**4 for s in sigma)


def nuclear_rank(sigma, share):
    total, running = sum(sigma), 0.0
    for index, s in enumerate(sigma):
        running += s
        if running >= share * total:
            return index + 1
    return len(sigma)


def energy_rank(sigma, share):
    return nuclear_rank([s * s for s in sigma], share)


def numerical_rank(sigma, n, m):
    eps = 2.0**-23
    count = 0
    for s in sigma:
        if s > max(n, m) * eps * sigma[0]:
            count += 1
    return count


def scalars(sigma, n, m):
    quarter = max(1, min(n, m) // 4)

    def twinned(values):
        return {
            "effective_rank": effective_rank(values),
            "stable_rank": stable_rank(values),
            "participation_ratio": participation_ratio(values),
            **{f"nuclear_rank_{share}": nuclear_rank(values, share / 100) for share in (90, 95, 99)},
            **{f"energy_rank_{share}": energy_rank(values, share / 100) for share in (90, 95, 99)},
            "sigma_ratio": values[1] / values[0],
            "nuclear_fraction_at_quarter": nuclear_fraction(values, quarter),
            "energy_fraction_at_quarter": energy_fraction(values, quarter),
        }

    whole = {**twinned(sigma), "numerical_rank": numerical_rank(sigma, n, m), "sigma_1": sigma[0]}
    return whole | {f"{name}_deflated": value for name, value in twinned(sigma[1:]).items()}
