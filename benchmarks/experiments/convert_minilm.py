"""What replacing attention in MiniLM costs: all figures of ``docs/gallery/replace-attention-in-minilm.md``.

    python benchmarks/experiments/convert_minilm.py [--n 128,512] [--windows 16] [--steps 100] [--draw-only]

Writes ``benchmarks/results/convert_minilm.json`` and ``docs/images/replace_attention_*.png``. Model ``minilm``, text
``pydoc``, float32 on the processor, seed 0, sharing headwise, learned E and F; a quarter of the windows is kept apart
and everything reported is of those.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from rankscope import restore
from rankscope._environment import environment
from rankscope.corpora import open_corpus
from rankscope.models.conversion import calibration_windows, linformerize_calibrated
from rankscope.pretrained import load

ROOT = Path(__file__).parents[2]
RESULT, IMAGES = ROOT / "benchmarks" / "results" / "convert_minilm.json", ROOT / "docs" / "images"
KS = (64, 128, 256)
CURVES = (("cosine_mean_pooling", "mean pooling", "s", "#888888"), ("cosine_fitted", "fitted", "o", "#2b6cb5"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", default="128,512")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--draw-only", action="store_true")
    options = parser.parse_args()
    if not options.draw_only:
        rows = []
        for n in map(int, options.n.split(",")):
            for k in (k for k in KS if k <= n):
                rows.append(measure(n, k, options.windows * 512 // n, options.steps))
                settings = {"windows_at_512": options.windows, "steps": options.steps, "seed": 0, "sharing": "headwise"}
                result = {"settings": settings, "rows": rows, "environment": environment()}
                RESULT.write_text(json.dumps(result, indent=1) + "\n")
    draw(json.loads(RESULT.read_text())["rows"])


def measure(n: int, k: int, windows: int, steps: int) -> dict:
    started = time.time()
    loaded = load("minilm")
    ids = calibration_windows(open_corpus("pydoc"), loaded.tokenizer, n, windows)
    generator = torch.Generator().manual_seed(0)
    found = linformerize_calibrated(loaded.model, ids, k=k, steps=steps, around=False, generator=generator)
    restore(loaded.model)
    row = {"n": n, "k": k, "windows": windows, "layers": [asdict(layer) for layer in found.layers]}
    row |= {"cosine_mean_pooling": found.start.embedding_cosine, "cosine_fitted": found.effect.embedding_cosine}
    print(n, k, row["cosine_mean_pooling"], row["cosine_fitted"], flush=True)
    return row | {"seconds": time.time() - started}


def draw(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths = sorted({row["n"] for row in rows})
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    colours = {64: "#b5522b", 128: "#2b6cb5", 256: "#2b8a57"}
    figure, axes = plt.subplots(1, len(lengths), figsize=(4.6 * len(lengths), 3.6), sharey=True, squeeze=False)
    for axis, n in zip(axes[0], lengths, strict=True):
        for row in (row for row in rows if row["n"] == n and row["k"] < n):
            colour = colours[row["k"]]
            layers = [layer["layer"] + 1 for layer in row["layers"]]
            axis.plot(layers, [x["before"] for x in row["layers"]], "--", color=colour, alpha=0.6)
            axis.plot(layers, [x["after"] for x in row["layers"]], "o-", color=colour, label=f"k = {row['k']}")
            axis.plot(layers, [x["truncated"] for x in row["layers"]], ":", color=colour)
        axis.set(title=f"n = {n}", xlabel="layer", ylim=(0, 1))
        axis.legend(frameon=False, loc="upper right")
    axes[0, 0].set_ylabel("relative error of the attention output")
    figure.suptitle("dashed: mean pooling · solid: fitted E and F · dotted: truncated SVD of P (reference)", fontsize=9)
    figure.tight_layout()
    figure.savefig(IMAGES / "replace_attention_layers.png", dpi=140)
    figure, axis = plt.subplots(figsize=(5.2, 3.4))
    for n, style in zip(lengths, ("-", "--", ":"), strict=False):
        some = [row for row in rows if row["n"] == n]
        ratio = [row["k"] / n for row in some]
        for key, name, marker, colour in CURVES:
            curve = [row[key] for row in some]
            axis.plot(ratio, curve, marker + style, color=colour, label=f"n = {n}, {name}")
    axis.set(xlabel="k / n", ylabel="cosine with MiniLM's own embedding")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGES / "replace_attention_embedding.png", dpi=140)


if __name__ == "__main__":
    main()
