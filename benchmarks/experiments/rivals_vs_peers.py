"""The rival mechanisms against their PyPI peers, forward + backward, and how time and memory grow with n.

    python benchmarks/experiments/rivals_vs_peers.py [--out benchmarks/results/rivals_vs_peers.json]

Peers are taken where they import: ``performer-pytorch``, ``reformer-pytorch``, ``nystrom-attention``. Shapes are
b = 1, h = 8, head_dim = 64, float32; 256 features, 4 rounds of chunks of 64 with shared query and key, 128
landmarks. Attention alone: the Nyström peer's two projections are replaced by the identity.

- ``against_peers``: ours and theirs alternate in one process, one warm-up, ``--repeats`` rounds; a time is the
  median, the ratio (theirs / ours) the median of the rounds' ratios. ``share_of_peak`` is the operations of our
  matrix products (recomputed ones included) over our time over the speed of a large product, measured just before.
- ``growth``: our forward time at each length (median), the exponent fitted to all of them by least squares of the
  logarithms with its standard error, and ``peak_bytes``: the largest number of bytes alive above the inputs in a
  forward call without gradients, by the allocator's record.
"""

import argparse
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rankscope._environment import environment, version_of
from rankscope.attention.mechanisms import MECHANISMS

HEADS, HEAD_DIM, FEATURES, ROUNDS, CHUNK, LANDMARKS = 8, 64, 256, 4, 64, 128
BARS = {"performer": 1.3, "lsh": 1.5, "nystrom": 1.3}
PEERS = {"performer": "performer-pytorch", "lsh": "reformer-pytorch", "nystrom": "nystrom-attention"}
EXPONENTS = {
    "sdpa": (1.85, 2.15),
    "sparse_strided": (1.35, 1.65),
    "sparse_fixed": (1.35, 1.65),
    "local": (0.85, 1.15),
    "linformer": (0.85, 1.15),
    "performer": (0.85, 1.15),
    "nystrom": (0.85, 1.15),
    "lsh": (1.0, 1.2),
}
# Products of n × (the second number) × head_dim, 2 operations each, per head and token: forward, then backward.
PRODUCTS = {"performer": (4 + 9, FEATURES), "lsh": (2 + 5, ROUNDS * 2 * CHUNK), "nystrom": (4 + 10, LANDMARKS)}

Call = Callable[[], object]


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def matmul_peak() -> float:
    """Operations a second of a 2,048-square product."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / min(seconds(lambda: a @ a) for _ in range(6))


def ours(name: str) -> Callable[..., Tensor]:
    mechanism = MECHANISMS[name]

    def call(query: Tensor, key: Tensor | None, value: Tensor) -> Tensor:
        knobs = {"generator": torch.Generator().manual_seed(0)} if mechanism.random else {}
        return mechanism.function(query, key, value, **knobs)

    return call


def peer(name: str) -> Callable[..., Tensor] | None:
    """Their attention on the same tensors, or None where the package is not installed."""
    try:
        module = importlib.import_module(PEERS[name].replace("-", "_") + "." + PEERS[name].replace("-", "_"))
    except ImportError:
        return None
    if name == "performer":
        return module.FastAttention(HEAD_DIM, nb_features=FEATURES)
    if name == "lsh":
        layer = module.LSHAttention(bucket_size=CHUNK, n_hashes=ROUNDS, causal=False)
        return lambda query, _, value: layer(query[0], value[0])[0][None]
    layer = module.NystromAttention(HEADS * HEAD_DIM, HEAD_DIM, HEADS, LANDMARKS, residual=False)
    layer.to_qkv = layer.to_out = torch.nn.Identity()
    return lambda *x: layer(torch.cat([y[0].transpose(0, 1).flatten(1) for y in x], dim=-1)[None])


def training(function: Callable[..., Tensor], n: int, shared: bool) -> Call:
    generator = torch.Generator().manual_seed(n)
    tensors = [torch.randn(1, HEADS, n, HEAD_DIM, generator=generator) for _ in range(3)]
    gradient: list[Tensor] = []

    def call() -> None:
        query, key, value = (x.detach().requires_grad_() for x in tensors)
        output = function(query, None if shared else key, value)
        if not gradient:
            gradient.append(torch.ones_like(output))
        output.backward(gradient[0])

    return call


def against_peers(lengths: list[int], repeats: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in PEERS:
        theirs = peer(name)
        for n in lengths:
            calls = [training(ours(name), n, name == "lsh")]
            if theirs is not None:
                calls.append(training(theirs, n, name == "lsh"))
            for call in calls:
                call()
            peak = matmul_peak()
            times = [[seconds(call) for call in calls] for _ in range(repeats)]
            median = statistics.median(t[0] for t in times)
            count, width = PRODUCTS[name]
            operations = count * 2 * n * width * HEAD_DIM * HEADS
            row: dict[str, object] = {
                "mechanism": name,
                "n": n,
                "seconds_median": median,
                "seconds_all": [t[0] for t in times],
                "matmul_peak": peak,
                "share_of_peak": operations / median / peak,
                "peer": PEERS[name],
                "peer_version": version_of(PEERS[name]),
            }
            if theirs is None:
                row["status"] = "peer is not installed"
            else:
                row["peer_seconds_median"] = statistics.median(t[1] for t in times)
                row["ratio_median"] = statistics.median(t[1] / t[0] for t in times)
                row["bar"], row["reached"] = BARS[name], row["ratio_median"] >= BARS[name]
                row["status"] = "ok"
            rows.append(row)
            print({key: row[key] for key in row if key not in ("seconds_all", "peer_version")}, flush=True)
    return rows


def peak_bytes(call: Call) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = call()
    del kept
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def fit(lengths: list[int], times: list[float]) -> tuple[float, float]:
    """Least squares of log time on log n: the slope and its standard error."""
    x, y = [math.log(n) for n in lengths], [math.log(t) for t in times]
    x_mean, y_mean = statistics.mean(x), statistics.mean(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - y_mean - slope * (a - x_mean)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, (rest / max(len(x) - 2, 1) / spread) ** 0.5


@torch.no_grad()
def growth(lengths: list[int], repeats: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, (low, high) in EXPONENTS.items():
        times, peaks = [], []
        for n in lengths:
            tensors = [torch.randn(1, HEADS, n, HEAD_DIM) for _ in range(3)]

            def call(tensors: list[Tensor] = tensors, name: str = name) -> Tensor:
                return ours(name)(*tensors)

            call()
            times.append(statistics.median(seconds(call) for _ in range(repeats)))
            peaks.append(peak_bytes(call))
        slope, error = fit(lengths, times)
        row: dict[str, object] = {
            "mechanism": name,
            "n": lengths,
            "seconds_median": times,
            "exponent": slope,
            "standard_error": error,
            "wanted": [low, high],
            "reached": low <= slope <= high,
            "peak_bytes": peaks,
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[4096, 16384], help="lengths against the peers")
    parser.add_argument("--growth", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rivals_vs_peers.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    result = {
        "shape": {"b": 1, "h": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"},
        "repeats": arguments.repeats,
        "threads": arguments.threads,
        "environment": environment(),
        "against_peers": against_peers(arguments.n, arguments.repeats),
        "growth": growth(arguments.growth, arguments.repeats) if arguments.growth else [],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
