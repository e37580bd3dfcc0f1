"""The Linformer layer against two public ones and against exact fused attention, forward and with backward.

    pip install --no-deps --target PEERS linformer==0.2.3 linformer-pytorch==0.19.3
    python benchmarks/experiments/linformer_layer.py --peers PEERS [--out benchmarks/results/linformer_layer.json]

One layer from hidden states to hidden states: d = 512, 8 heads, batch 1, float32, 2 threads; query, key and value
without bias and an output with one, as the peers have them. Everything that is compared runs in one process,
interleaved, after two rounds to warm up; a figure is the median over rounds, a ratio the median of the rounds'
ratios; processor time is given beside wall time, since on a shared machine they part.

- ``speed``: milliseconds for each (n, k, sharing), forward (no gradients) and forward + backward, and how many times
  longer each peer and exact attention take than ours.
  Where E = F, `linformer` has no counterpart: it is given E and F of its own, which any model of this kind may have,
  and beside it stands its ``share_kv``, a smaller model without a value map.
- ``crossover``: forward times against exact fused attention at short n, and the n from which ours is faster
  (log-log interpolation).
- ``peak_share``: multiplications and additions of the plan's matrix products over time, over the measured speed of
  a 4096 x 4096 matrix product in the same run.
- ``memory``: peak resident size over that before the call, MB, at n = 16,384, for the second call of a fresh process.
- ``bars``: what was wanted and what came.
"""

import argparse
import ctypes
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn

from rankscope._environment import environment
from rankscope.models import linformer_attention
from rankscope.models.linformer_attention import LinformerSelfAttention

D, HEADS, THREADS = 512, 8, 2
SPEED_CASES = [
    (4096, 256, "headwise"),
    (8192, 256, "headwise"),
    (16384, 256, "headwise"),
    (4096, 256, "key_value"),
    (8192, 256, "key_value"),
    (4096, 64, "headwise"),
    (4096, 32, "headwise"),
    (8192, 32, "headwise"),
]
CROSSOVER_LENGTHS = (256, 320, 384, 448, 512, 640, 768)
MEMORY_N = 16384
# What `linformer` offers as sharing: no value map at all, the compressed keys serve as values.
VALUES_ARE_KEYS = "linformer, values = keys"
Run = Callable[[], Tensor]


class Exact(nn.Module):
    """The same layer with PyTorch's fused softmax attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.output = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from ``x (b, n, d)`` over itself."""
        query, key, value = (
            linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.output(attended.transpose(1, 2).flatten(2))


def build(name: str, n: int, k: int, sharing: str) -> nn.Module:
    if name == "exact":
        return Exact()
    if name == "linformer":
        from linformer import LinformerSelfAttention as Peer

        return Peer(D, n, k=k, heads=HEADS)
    if name == VALUES_ARE_KEYS:
        from linformer import LinformerSelfAttention as Peer

        return Peer(D, n, k=k, heads=HEADS, share_kv=True)
    if name == "linformer-pytorch":
        from linformer_pytorch.linformer_pytorch import MHAttention

        shared = {"headwise": "headwise", "key_value": "kv"}[sharing]
        return MHAttention(n, D // HEADS, D, k, HEADS, 0.0, "C0", shared, None, None, False, None)
    layer = LinformerSelfAttention(
        D, HEADS, max_length=n, projected_length=k, sharing=sharing, bias=False, generator=None
    )
    layer.output = nn.Linear(D, D)
    return layer


def forward(layer: nn.Module, x: Tensor) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return run


def train(layer: nn.Module, x: Tensor) -> Run:
    x = x.clone().requires_grad_()

    def run() -> Tensor:
        output = layer(x)
        output.sum().backward()
        return output

    return run


def interleave(runs: dict[str, Run], rounds: int) -> dict[str, dict[str, float]]:
    """Time each run once a round; ``times_ours`` is the median of the rounds' ratios."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for lap in range(rounds + 2):
        for name, run in runs.items():
            start, used = time.perf_counter(), time.process_time()
            run()
            if lap >= 2:
                wall[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - used)
    return {
        name: {
            "ms": 1e3 * statistics.median(wall[name]),
            "processor_ms": 1e3 * statistics.median(processor[name]),
            "times_ours": statistics.median(a / b for a, b in zip(wall[name], wall["ours"], strict=True)),
            "processor_times_ours": statistics.median(
                a / b for a, b in zip(processor[name], processor["ours"], strict=True)
            ),
        }
        for name in runs
    }


def matmul_peak() -> float:
    """Operations a second of a large float32 matrix product, the best of five."""
    a, b = torch.randn(4096, 4096), torch.randn(4096, 4096)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 4096**3 / best


def operations(layer: LinformerSelfAttention, n: int) -> float:
    """Multiplications and additions of the matrix products of one forward pass."""
    plan = layer.plan(n, grad=False)
    pair = layer.projections[0]
    products = linformer_attention.multiplications(plan.form, n, n, D, HEADS, D // HEADS, pair)
    if plan.form == "absorbed":
        products -= n * HEADS * pair.E.shape.k * linformer_attention.SOFTMAX_COST
    return 2.0 * products


def speed(cases: list[tuple[int, int, str]], rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for n, k, sharing in cases:
        x = torch.randn(1, n, D)
        extra = (VALUES_ARE_KEYS,) if sharing == "key_value" else ()
        names = ("ours", "linformer", "linformer-pytorch", *extra, "exact")
        layers = {name: build(name, n, k, sharing) for name in names}
        ours = layers["ours"]
        assert isinstance(ours, LinformerSelfAttention)
        for mode, wrap in (("forward", forward), ("train", train)):
            # Exact attention's backward at the longest n would be most of the whole run.
            names = [name for name in layers if not (name == "exact" and mode == "train" and n > 8192)]
            timed = interleave({name: wrap(layers[name], x) for name in names}, rounds if n < 16384 else min(rounds, 5))
            row = {"n": n, "k": k, "sharing": sharing, "mode": mode, "plan": str(ours.plan(n, grad=mode == "train"))}
            if mode == "forward":
                row["operations_a_second"] = operations(ours, n) / (timed["ours"]["ms"] / 1e3)
                row["peak_share"] = row["operations_a_second"] / matmul_peak()
            rows.append({**row, "times": timed})
            print(n, k, sharing, mode, {name: round(t["times_ours"], 2) for name, t in timed.items()}, flush=True)
    return rows


def crossover(rounds: int) -> dict[str, object]:
    ratios: dict[int, float] = {}
    for n in CROSSOVER_LENGTHS:
        x = torch.randn(1, n, D)
        k = min(256, n // 2)
        runs = {name: forward(build(name, n, k, "headwise"), x) for name in ("ours", "exact")}
        ratios[n] = interleave(runs, 5 * rounds)["exact"]["times_ours"]
    lengths = list(ratios)
    first: float | None = float(lengths[0]) if ratios[lengths[0]] >= 1 else None
    for low, high in itertools.pairwise(lengths):
        if first is None and ratios[low] < 1 <= ratios[high]:
            part = -math.log(ratios[low]) / (math.log(ratios[high]) - math.log(ratios[low]))
            first = low * (high / low) ** part
    return {"k": "min(256, n / 2)", "exact_times_ours": ratios, "crossover_n": first}


def resident(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def memory_child(name: str, k: int, sharing: str, mode: str) -> None:
    """Print the MB a second call needs beyond weights, input, gradients and a warm library (Linux, glibc)."""
    torch.set_num_threads(THREADS)
    layer, x = build(name, MEMORY_N, k, sharing), torch.randn(1, MEMORY_N, D)
    if mode == "train":
        x.requires_grad_()
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x.grad = torch.zeros_like(x)

    def call() -> None:
        if mode == "train":
            layer(x).sum().backward()
        else:
            forward(layer, x)()

    # The first call loads kernels and their work space; what it freed goes back, so that the second is seen whole.
    call()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    print(resident("VmHWM") - before)


def memory(peers: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for mode in ("forward", "train"):
        for name in ("ours", "linformer", "linformer-pytorch", "exact"):
            command = [sys.executable, __file__, "--peers", peers, "--memory-child", name, "256", "headwise", mode]
            found = [
                float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3)
            ]
            rows.append({"mode": mode, "layer": name, "n": MEMORY_N, "k": 256, "mb": statistics.median(found)})
            print(mode, name, round(statistics.median(found), 1), "MB", flush=True)
    return rows


def bars(result: dict) -> list[dict[str, object]]:
    """Compare what was wanted with what came."""

    def slowest(wanted: float, name: str, peers: tuple[str, ...], **where: object) -> dict[str, object]:
        rows = [row for row in result["speed"] if all(row[key] == value for key, value in where.items())]
        found = min(row["times"][peer]["times_ours"] for row in rows for peer in peers)
        return {"bar": name, "wanted": f">= {wanted}", "found": found, "held": found >= wanted}

    peers = ("linformer", "linformer-pytorch")
    at = {(row["mode"], row["layer"]): row["mb"] for row in result["memory"]}
    share = min(row["peak_share"] for row in result["speed"] if row["mode"] == "forward" and row["n"] >= 8192)
    training = at["train", "ours"] / min(at["train", peer] for peer in peers)
    cross = result["crossover"]["crossover_n"]
    return [
        slowest(1.6, "forward, k = 256", peers, mode="forward", k=256, sharing="headwise"),
        slowest(1.9, "forward, E = F, k = 256", peers, mode="forward", k=256, sharing="key_value"),
        slowest(3.0, "forward, k = 32", peers, mode="forward", k=32),
        slowest(1.45, "forward + backward, k = 256", peers, mode="train", k=256),
        slowest(10, "exact, n = 8192", ("exact",), mode="forward", k=256, n=8192, sharing="headwise"),
        slowest(18, "exact, n = 16384", ("exact",), mode="forward", k=256, n=16384),
        {"bar": "crossover n", "wanted": "< 450", "found": cross, "held": cross is not None and cross < 450},
        {
            "bar": "forward MB",
            "wanted": "<= 45",
            "found": at["forward", "ours"],
            "held": at["forward", "ours"] <= 45,
        },
        {"bar": "training MB over the peers' least", "wanted": "<= 0.45", "found": training, "held": training <= 0.45},
        {"bar": "share of matmul peak, n >= 8192", "wanted": ">= 0.8", "found": share, "held": share >= 0.8},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True, help="folder the two packages were installed into")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/linformer_layer.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory-child", nargs=4, metavar=("LAYER", "K", "SHARING", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.peers)
    if arguments.memory_child:
        name, k, sharing, mode = arguments.memory_child
        memory_child(name, int(k), sharing, mode)
        return
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    result: dict = {
        "environment": environment(),
        "peers": {
            next(iter(found)).metadata["Name"]: next(iter(found)).version
            for name in ("linformer", "linformer-pytorch")
            if (found := list(metadata.distributions(name=name, path=[arguments.peers])))
        },
        "settings": {"d": D, "heads": HEADS, "batch": 1, "dtype": "float32", "rounds": arguments.rounds, "seed": 0},
        "memory": memory(arguments.peers),
        "speed": speed(SPEED_CASES, arguments.rounds),
        "crossover": crossover(arguments.rounds),
    }
    result["bars"] = bars(result)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for bar in result["bars"]:
        print("held" if bar["held"] else "MISSED", bar["bar"], bar["wanted"], bar["found"])


if __name__ == "__main__":
    main()
