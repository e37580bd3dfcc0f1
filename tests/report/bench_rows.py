"""Rows of a made-up benchmark whose times are exact powers of n."""

from rankscope._environment import environment


def rows(lengths=(512, 1024, 2048, 4096), sizes=(128, 256), mode="forward", **changes):
    stamp = environment()
    found = []
    for n in lengths:
        times = {("exact_naive", None): (n**2 * 4e-8, 8 * n**2), ("sdpa", None): (n**2 * 1e-8, 512 * n)}
        times |= {("linformer", k): (n * k * 4e-8, 256 * n) for k in sizes}
        for (mechanism, k), (seconds, peak) in times.items():
            error = 1e-7 if k is None else 1 / k
            found.append(
                {
                    "mechanism": mechanism,
                    "n": n,
                    "k": k,
                    "mode": mode,
                    "view": "attention",
                    "heads": 8,
                    "head_dim": 64,
                    "batch": 1,
                    "dtype": "float32",
                    "device": "cpu",
                    "causal": False,
                    "padding": 0.0,
                    "threads": 2,
                    "status": "ok",
                    "seconds_median": seconds,
                    "seconds_spread": 0.01 * seconds,
                    "seconds": [seconds] * 3,
                    "peak_bytes": peak,
                    "relative_error": error,
                    "relative_error_gaussian": 2 * error,
                    "relative_error_on": "a <model>",
                    "environment": stamp,
                    **changes,
                }
            )
    return found
