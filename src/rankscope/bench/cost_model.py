r"""Operations and bytes of each mechanism in closed form, and this machine's rates.

For one head of n tokens and width d; k the mechanism's size, c a chunk, r rounds or keys a chunk, M the elements of
fast memory. Constants are kept, so that times can be predicted: a matrix product of (a, b) and (b, c) is 2abc
operations, and an array that does not fit fast memory is moved once each time a kernel reads or writes it.
Elementwise operations are counted by the bytes they move.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

import torch

from rankscope._registry import Registry
from rankscope.attention.local import DEFAULT_WINDOW
from rankscope.attention.lsh import DEFAULT_CHUNK, DEFAULT_ROUNDS
from rankscope.attention.nystrom import DEFAULT_ITERATIONS
from rankscope.attention.sparse import DEFAULT_SUMMARY, default_stride
from rankscope.bench.cases import DTYPES, Case

FAST_MEMORY = 1 << 20
#: Products of the backward pass over the forward's; fused kernels make the logits once more.
BACKWARD, BACKWARD_FUSED = 2.0, 2.5


@dataclass(frozen=True)
class Shape:
    """One head's sizes: tokens, width, the knob, whether causal, elements of fast memory."""

    n: int
    d: int
    k: int = 0
    causal: bool = False
    fast: int = FAST_MEMORY // 4


@dataclass(frozen=True)
class Cost:
    """What one head costs, in operations and elements.

    Args:
        operations: Multiplications and additions of matrix products.
        moved: Elements read from and written to main memory.
        kept: Elements alive at the peak beside query, key and value.
        fused: Whether backward makes the logits again instead of keeping them.
    """

    operations: float
    moved: float
    kept: float
    fused: bool = False


@dataclass(frozen=True)
class Rates:
    """This machine's speeds.

    Args:
        operations: Multiplications and additions a second of a large float32 product.
        bytes: Bytes a second of a large copy, read and written.
    """

    operations: float
    bytes: float


@dataclass(frozen=True)
class Prediction:
    """Seconds by each premise, and the peak of memory in bytes."""

    operations: float
    bytes: float
    seconds_by_operations: float
    seconds_by_bytes: float
    peak_bytes: float

    @property
    def seconds(self) -> float:
        """By the slower of the two (roofline)."""
        return max(self.seconds_by_operations, self.seconds_by_bytes)


def exact_naive(s: Shape) -> Cost:
    """Θ(nd + n²) moved: logits written, read and written by the softmax, read by the second product."""
    mask = 4 * s.n**2 if s.causal else 0
    return Cost(4 * s.n**2 * s.d, 4 * s.n * s.d + 4 * s.n**2 + mask, 2 * s.n**2 + 2 * s.n * s.d)


def sdpa(s: Shape) -> Cost:
    """Θ(n²d²/M) moved: keys and values pass once for every block of queries that fast memory holds."""
    half = 0.5 if s.causal else 1.0
    passes = max(1.0, half * 4 * s.n * s.d / s.fast)
    return Cost(half * 4 * s.n**2 * s.d, 2 * s.n * s.d * (1 + passes), s.n * s.d, fused=True)


def linformer(s: Shape) -> Cost:
    """Θ(nd + nk + kd) moved; E is shared by keys and values and read for each."""
    return Cost(8 * s.n * s.k * s.d, 4 * s.n * s.d + 2 * s.n * s.k + 4 * s.k * s.d, s.n * s.d + 2 * s.k * s.d, True)


def linformer_causal(s: Shape, chunk: int = 16, rank: int = 1) -> Cost:
    """Θ(n (n r / c + w) d): a compressed key a chunk, a window beside it; its keys are copied for each chunk."""
    span = (ceil((s.k - 1) / chunk) + 1) * chunk
    keys = s.n * rank / chunk + span
    copied = 2 * s.n / chunk * (span + s.n * rank / chunk) * s.d
    return Cost(4 * s.n * keys * s.d, 4 * s.n * s.d + 2 * copied + 4 * s.n * keys, s.n * s.d + copied + 2 * s.n * keys)


def _tiled(s: Shape, keys: float, sets: int) -> Cost:
    """Tiles of logits stay in fast memory; the running sum is read and written for each set of keys."""
    return Cost(4 * s.n * keys * s.d, s.n * s.d * (2 + 4 * sets), 3 * s.n * s.d, fused=True)


def sparse_strided(s: Shape) -> Cost:
    """Θ(n √n d): two or three blocks beside the query and every stride-th key."""
    stride = default_stride(s.n)
    return _tiled(s, stride * (2 if s.causal else 3) + s.n / stride * (0.5 if s.causal else 1), 2)


def sparse_fixed(s: Shape) -> Cost:
    """Θ(n √n d): the query's block and a summary of every other."""
    stride = max(default_stride(s.n), DEFAULT_SUMMARY)
    return _tiled(s, stride + DEFAULT_SUMMARY * s.n / stride * (0.5 if s.causal else 1), 2)


def local(s: Shape) -> Cost:
    """Θ(n w d): the query's block and its neighbours."""
    window = s.k or DEFAULT_WINDOW
    return _tiled(s, window * (2 if s.causal else 3), 1)


def lsh(s: Shape, rounds: int = DEFAULT_ROUNDS, chunk: int = DEFAULT_CHUNK) -> Cost:
    """Θ(n r c d) and a sort: every round meets two chunks, through sorted copies.

    Hashing in two factors adds Θ(n √(n / c) r d), a fifth of the whole at n = 32,768.
    """
    hashing = 2 * s.n * s.d * rounds * min(s.n / chunk, 2 * sqrt(2 * s.n / chunk))
    moved = rounds * 8 * s.n * s.d + 2 * s.n * s.d
    return Cost(rounds * 4 * s.n * 2 * chunk * s.d + hashing, moved, 4 * s.n * s.d, fused=True)


def performer(s: Shape) -> Cost:
    """Θ(n m d) for m features; features of queries and keys are written and read."""
    return Cost(8 * s.n * s.k * s.d, 4 * s.n * s.d + 4 * s.n * s.k, s.n * s.d + 2 * s.n * s.k)


def nystrom(s: Shape) -> Cost:
    """Θ(n m d + m³) for m landmarks: two thin attentions and the iteration between."""
    products = 8 * s.n * s.k * s.d + DEFAULT_ITERATIONS * 8 * s.k**3
    return Cost(products, 6 * s.n * s.d + DEFAULT_ITERATIONS * 12 * s.k**2, s.n * s.d + 6 * s.k**2, True)


COSTS: Registry[Callable[[Shape], Cost]] = Registry(
    "mechanism",
    {
        f.__name__: f
        for f in (
            exact_naive,
            sdpa,
            linformer,
            linformer_causal,
            sparse_strided,
            sparse_fixed,
            local,
            lsh,
            performer,
            nystrom,
        )
    },
)


def predict(case: Case, rates: Rates, *, fast_bytes: int | None = None) -> Prediction:
    """Return what a case should cost by operations alone and by bytes alone.

    Args:
        case: The case.
        rates: From :func:`measure_rates`.
        fast_bytes: Fast memory of one core; default what the system tells.

    Returns:
        Seconds by each premise, with the operations, bytes and peak they come from.

    Example:
        >>> short, long = (predict(Case("exact_naive", n), Rates(1e11, 1e10)) for n in (1024, 2048))
        >>> round(long.seconds_by_operations / short.seconds_by_operations, 6)
        4.0
    """
    size = DTYPES[case.dtype].itemsize
    fast = (fast_memory() if fast_bytes is None else fast_bytes) // size
    knob = next(iter(case.knobs().values()), 0)
    cost = COSTS[case.mechanism](Shape(case.n, case.head_dim, knob, case.causal, fast))
    heads = case.batch * case.heads
    operations, moved, kept = heads * cost.operations, heads * cost.moved, heads * cost.kept
    if case.mode == "train":
        operations *= 1 + (BACKWARD_FUSED if cost.fused else BACKWARD)
        moved *= 1 + (BACKWARD_FUSED if cost.fused else BACKWARD)
        kept = kept * (1 if cost.fused else 2) + heads * 4 * case.n * case.head_dim
    if case.view == "layer":
        width = case.heads * case.head_dim
        passes = 3 if case.mode == "train" else 1
        operations += passes * 8 * case.batch * case.n * width**2
        moved += passes * (8 * case.batch * case.n * width + 4 * width**2)
        kept += (3 if case.mode == "forward" else 6) * case.batch * case.n * width
    return Prediction(operations, moved * size, operations / rates.operations, moved * size / rates.bytes, kept * size)


def fast_memory() -> int:
    """Return the bytes of one core's second-level cache, or a mebibyte where the system does not tell."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0)
    except (OSError, ValueError):
        return FAST_MEMORY


def measure_rates(device: str = "cpu", *, size: int = 2048, rounds: int = 3) -> Rates:
    """Measure the machine: a ``size`` × ``size`` float32 product, and a copy of 16 times as many elements.

    Args:
        device: Where.
        size: Rows of the product.
        rounds: The best of so many.

    Returns:
        The best rates seen, both positive.

    Example:
        >>> measure_rates(size=64, rounds=1).operations > 0
        True
    """
    a = torch.ones(size, size, device=device)
    source = torch.ones(16 * size * size, device=device)
    target = torch.empty_like(source)
    product, copy = (
        min(_seconds(call, device) for _ in range(rounds)) for call in (lambda: a @ a, lambda: target.copy_(source))
    )
    return Rates(2 * size**3 / product, 2 * source.numel() * source.element_size() / copy)


def _seconds(call: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
