"""Write ``docs/theorems.md`` from ``benchmarks/results/theory_*.json``: no number of the page is typed.

python benchmarks/experiments/theory_document.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Result = dict[str, Any]


def main() -> None:
    (ROOT / "docs" / "theorems.md").write_text(document())


def document() -> str:
    """Return the page."""
    results = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"theory_{name}.json").read_text())
        for name in ("jl", "draws", "clusters", "collapse", "projections", "fit", "speed")
    }
    parts = [first(results["jl"]), flow(results["draws"], results["clusters"]), collapse(results["collapse"])]
    parts += [projections(results["projections"], results["fit"]), again(results["speed"])]
    return "# What the theorems give you\n\n" + "\n\n".join(parts) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def first(result: Result) -> str:
    by_n: dict[int, list[Result]] = {}
    for size in result["sizes"]:
        by_n.setdefault(size["n"], []).append(size)
    eps = [f"ε = {size['eps']:.2g}" for size in next(iter(by_n.values()))]
    rows = [
        [
            f"{n:,}",
            *(f"{s['k']:,}" if s["k"] < n else f"**{s['k']:,}** (k ≥ n)" for s in sizes),
            f"{2 * n**-0.25:.3f}",
        ]
        for n, sizes in by_n.items()
    ]
    starts = ", ".join(f"{n:,} (ε = {float(e):.2g})" for e, n in result["first_n_with_k_below_n"].items())
    identity = result["identity_n_512"]
    errors = "; ".join(f"{found['relative_error']:.2f} at k = {k}" for k, found in identity.items())
    missed, trials = sum(f["missed"] for f in identity.values()), sum(f["of"] for f in identity.values())
    counts, two = result["counts"], result["theorem_2"]
    data, k = counts["data_vars"], counts["coords"]["k"]["data"]
    at = counts["coords"]["eps"]["data"].index(0.5)
    chosen = [k.index(length) for length in (128, 250, 512, 1024)]
    kinds = counts["coords"]["vector"]["data"]
    failures = [
        [matrix, kind.replace("_", " "), *(f"{data['relative_failure']['data'][i][j][c][at]:.3f}" for c in chosen)]
        for i, matrix in enumerate(counts["coords"]["matrix"]["data"])
        for j, kind in enumerate(kinds)
    ]
    worst = [max(data["additive_failure"]["data"][i][j][c][at] for i in range(4) for j in range(4)) for c in chosen]
    failures.append(["*additive event,*", "*the worst of all*", *(f"{value:.3f}" for value in worst)])
    failures.append(["*its bound*", "", *(f"{data['bound']['data'][c][at]:.3g}" for c in chosen)])
    attrs, delta = counts["attrs"], "theorem_2_relative_error"
    missed_2 = data["theorem_2_missed"]["data"]
    errors_2, dependence = data[delta]["data"], data["theorem_2_query_dependence"]["data"]
    return f"""Both halves of "attention is low rank" run here: Linformer's Theorems 1 and 2
([arXiv 2006.04768](https://arxiv.org/abs/2006.04768)) and the clustering of tokens under attention alone
([arXiv 2305.05465](https://arxiv.org/abs/2305.05465)). Every number on this page is read from
`benchmarks/results/theory_*.json`.

## Linformer's Theorem 1

**As printed:** for any column w of V Wⱽ there is a P̃ of rank Θ(log n) with ‖P̃w − Pw‖ < ε‖Pw‖ with probability
1 − o(1). The construction is P̃ = P RᵀR with a Gaussian R of k = ⌈5 ln n / (ε² − ε³)⌉ rows.

**The statement is stronger than its lemma supports.** The Johnson–Lindenstrauss lemma bounds the error of a product
*additively*, |x RᵀR y − x·y| ≤ ε‖x‖‖y‖. The theorem prints it *relative to the product*, ε|x·y|. Where x·y is small
against ‖x‖‖y‖, as it is for most pairs of vectors in many dimensions, the second does not follow from the first.

**Counter-example: P = I.** Nothing in the proof uses softmax or the spectrum of P, so it would hold for the identity,
which has no low-rank approximation. At n = 512 with Gaussian w the mean relative error is {errors}: it is √(n/k), and
the printed event at ε = 0.5 failed in {missed:,} of {trials:,} trials.
(And for one fixed w the existence alone is trivial: (Pw)wᵀ/‖w‖² has rank one and no error.)

### The k it asks for

{table(["n", *eps, "failure bound 2n^(−1/4)"], rows)}

k < n first holds at n = {starts}. The formula is smallest at ε = 2/3, so no choice of ε gives less than the last
column of k.

### How often it holds

Share of {attrs["draws"]:,} draws that miss the printed event at n = {attrs["n"]}, ε = 0.5: one MiniLM layer
(`{attrs["module"]}`), softmax of unit Gaussian logits, of logits four times as large, and the identity; the worst of
the heads, each with its own w.

{table(["P", "w", *(f"k = {k[c]}" for c in chosen)], failures)}

![Failures against k](images/theory_jl_failures.png)

The additive event never failed more often than its bound allows, and the bound is far from tight. The printed event
holds where w has a large mean that averaging rows preserve, and fails where Pw is small beside ‖P‖‖w‖.

## Theorem 2

The printed k is the smaller of two branches. At n = 65,536, d = 64, ε = 0.5 they are {two["by_width"]:,} (free of n)
and {two["by_length"]:,} (from ln n): the branch that is free of n, the one that makes attention linear, wins from
ln n = {two["ln_n_crossover"]:.0f} on, a length no input has.

The proof takes E = δR and F = e^(−δ)R with a small δ, and bounds the exponential without its normaliser. At
k = {attrs["theorem_2_k"]} on the same layer:

{
        table(
            [
                "δ",
                "relative error of PV",
                "query dependence (exact: " + f"{attrs['theorem_2_exact_query_dependence']:.2f})",
                "rows that miss the printed event",
            ],
            [
                [f"{d:g}", f"{e:.3f}", f"{q:.2g}", f"{m:.2%}"]
                for d, e, q, m in zip(counts["coords"]["delta"]["data"], errors_2, dependence, missed_2, strict=True)
            ],
        )
    }

![Theorem 2's construction](images/theory_jl_theorem_2.png)

As δ falls the output stops depending on the query, and the error stays near that of an output of zeros, 1. The event
that Theorem 2 prints, an error below ε‖softmax(w)‖‖V Wⱽ‖, was missed by
{attrs["theorem_2_missed_by_zero"]:.1%} of the rows of an output of *zeros* at ε = 0.5: it asks for little. It says
nothing about trained E and F."""


def flow(draws: Result, clusters: Result) -> str:
    rows = [
        [f"{t:g}", str(loose), str(strict)]
        for t, loose, strict in zip(
            draws["times"], draws["rank_at_most_2"], draws["rank_at_most_2_strict"], strict=True
        )
    ]
    verdicts = [
        [name, run["verdicts"][name].partition(": ")[2], f"{run['times'][-1]:g}"]
        for name, run in clusters["runs"].items()
    ]
    return f"""## Tokens under attention alone

The flow ẋᵢ = Σⱼ Pᵢⱼ V xⱼ, with attention acting (not ẋ = V x with P computed beside it). Theorem 2.1: for d = 1,
V > 0, QK > 0 and distinct tokens, every row of P but at most one becomes one-hot on the smallest or largest token, so
P's rank falls to 2 for almost all starts, at a doubly exponential rate.

In {draws["draws"]} random draws at n = {draws["n"]} ({draws["solver"]}) the conclusion was reached in
{draws["conclusion_reached"]} at t = {draws["times"][-1]:g} (rows one-hot to {draws["row_tolerance"]:g}). The slope of
ln(−ln(1 − max P)), 1 for a doubly exponential rate e^(−c eᵗ), has the median {draws["rate"]["median"]:.3f} and lies
between {draws["rate"]["low"]:.3f} and {draws["rate"]["high"]:.3f}. It takes its time, until the gap between the leading
tokens has settled it:

{table(["t", f"draws of rank ≤ 2 (σ > {draws['rank_tolerance']:g} σ₁)", "the same at σ > n · 2⁻⁵² σ₁"], rows)}

The other theorems, each on one run of {clusters["n"]} tokens, hypotheses checked first:

{table(["theorem", "verdict", "last time"], verdicts)}

The collapse to 0 under V = −I is algebraic, like t^(−1/2): at t = {clusters["runs"]["collapse"]["times"][-1]:g} the
largest token still has the norm {clusters["runs"]["collapse"]["largest_token"]:.3f}.

![P over time, d = 1](images/theory_clusters_boolean_P.png)
![P over time, animated](images/theory_clusters_boolean.gif)
![Rank over time, d = 1](images/theory_clusters_boolean_rank.png)
![Tokens, d = 1](images/theory_clusters_boolean_tokens.png)
![Tokens, d = 2: vertices of a polytope](images/theory_clusters_polytope_tokens.png)
![Tokens, d = 3: two of at most three planes](images/theory_clusters_hyperplanes_tokens.png)
![Tokens, d = 3: a polygon times a line](images/theory_clusters_polytope_times_space_tokens.png)

The limit sets are those of the last tokens: the theorems say that there is one, not which. Rescaled tokens of one
cluster come nearer than float64 and the solver can tell, so `end` may be at most 16 over V's growth rate; a file with
Q, K, V (`--weights`) gets each theorem's verdict, `hypotheses not met: …` where one fails.

The theorems are about constant Q, K, V without layer normalisation, feed-forward parts or more than one head. The
higher-dimensional version of Theorem 2.1 is not proved."""


def collapse(result: Result) -> str:
    rows = [
        [
            name,
            f"{run['residual'][0]:.2f}",
            f"{run['residual'][-1]:.2g}",
            *(f"{rank:.1f}" for rank in run["effective_rank"]),
        ]
        for name, run in result["variants"].items()
    ]
    whole = result["variants"]["whole"]
    layers = [f"layer {i}" for i in range(len(whole["effective_rank"]))]
    ranks = [
        ["effective rank (entropy of σ)", *(f"{rank:.1f}" for rank in whole["effective_rank"])],
        ["rank at 90 % of σ²", *(f"{rank:.1f}" for rank in whole["energy_rank_90"])],
        ["residual of X after it", *(f"{residual:.2f}" for residual in whole["residual"][1:])],
    ]
    return f"""## Rank collapse is about tokens, not about P

Dong and others ([arXiv 2103.03404](https://arxiv.org/abs/2103.03404)) prove that attention without skips and
feed-forward parts brings the *tokens X* near one common row. In MiniLM on {result["windows"]} windows of
{result["n"]} tokens, before the first layer and after the last (float32, so about 1e−7 is rounding),
and the effective rank of each P:

{table(["what runs", "residual of X, first", "last", *(f"P, {layer}" for layer in layers)], rows)}

![Residual and rank by depth](images/theory_collapse.png)

With skips alone the tokens stay apart and P is nearly of rank one: the two are different things. *Does P's rank fall
with depth as the flow suggests?* The measured spectra of the whole model, mean over windows and heads:

{table(["P of the whole model", *layers], ranks)}

From first to last it does fall, though not at every layer, and so it does in one layer run again and again with its
skips and normalisation. That is an observation on one trained model, not a proof: its layers differ, and training
chose them."""


def projections(result: Result, fit: Result) -> str:
    k = result["k"]
    rows = [
        [name.replace("_", " "), *("–" if v != v else f"{v:.3f}" for v in found["mean"])]
        for name, found in result["error"].items()
    ]
    overlap = result["overlap"]
    rows_2 = [
        ["measured", *(f"{v:.3f}" for v in overlap["mean"])],
        ["by chance, k/n", *(f"{v:.3f}" for v in overlap["chance"])],
    ]
    own, fixed = result["error"]["svd_of_P"]["mean"], result["error"]["fixed_subspace_of_P"]["mean"]
    output = result["error"]["fixed_subspace_of_PV"]["mean"]
    mean, convolution = (result["error"][name]["mean"] for name in ("mean_pooling", "convolution"))
    learned, settings = result["error"]["learned"]["mean"], result["settings"]
    calibrated = result["error"]["calibrated"]["mean"]
    turns = [
        [f"k = {length}", which, *(f"{square**0.5:.3f}" for square in run[key])]
        for length, run in fit["mean_squared_error"].items()
        for which, key in (("fitted on", "fitted_on"), ("others", "others"))
    ]
    rounds = ["mean pooling", *(f"round {i + 1}" for i in range(len(turns[0]) - 3))]
    slope = max(max(run["slope_of_F"]) for run in fit["mean_squared_error"].values())
    at = -1
    return f"""## At equal k: what a head's output loses

‖output − PV‖ / ‖PV‖, mean over MiniLM's layers and heads (head width {settings["head_dim"]}), n = {result["n"]};
what is fitted is fitted on {settings["train_windows"]} windows and judged on {settings["test_windows"]} others.

{table(["projection", *(f"k = {length}" for length in k)], rows)}

`gaussian theorem 1` is P RᵀR V; `gaussian`, `mean pooling`, `calibrated`, `convolution` and `learned` are Linformer
heads softmax(Q(EK)ᵀ)FV. `calibrated` keeps E at mean pooling and solves for F (ridge regression, a quadratic form);
`convolution` fits one kernel each for E and F by Adam; `learned` frees all k·n numbers of both from there, then solves
for F. Ridges and iterates are chosen on a quarter of the windows held out. `fixed subspace of P` is P UUᵀV with the
one U that is best for P over the windows fitted on; `fixed subspace of PV` is UUᵀPV with the one U that is best for
the outputs themselves, in closed form; `svd of P` gives each window its own U; `best of PV` is the floor, zero from
k = head width on.

![Error at equal k](images/theory_projections.png)

**Is a fixed E enough, or does each input need its own subspace?** Mean squared cosine of the principal angles between
two windows' leading right subspaces of P:

{table(["overlap", *(f"k = {length}" for length in k)], rows_2)}

![Overlap of subspaces](images/theory_projections_overlap.png)

At k = {k[0]} they share {overlap["mean"][0]:.3f} where chance gives {overlap["chance"][0]:.3f}, at k = {k[at]}
{overlap["mean"][at]:.3f} against {overlap["chance"][at]:.3f}. At k = {k[at]} a window's own subspace leaves an error of
{own[at]:.3f}, the best fixed one {fixed[at]:.3f} (fixed for the outputs: {output[at]:.3f}),
mean pooling {mean[at]:.3f}, calibrated {calibrated[at]:.3f}, a convolution {convolution[at]:.3f} and a learned
Linformer head {learned[at]:.3f}, in an otherwise unchanged model. So what P's low rank offers lies mostly in each
input's own subspace, and a fixed E is far from it on this model as it was trained. Training the whole model around E
and F is another matter, not measured.

**Does a better optimiser close the gap?** The F of `calibrated` and `learned` is the optimum of its ridge regression,
but in E the problem is not convex: no optimum is proved, and another start or rate may end elsewhere. What more fitting
brings was measured on `{fit["module"]}`: on all {fit["train_windows"]} windows, without regard for others, F solved to
a gradient of at most {slope:.1g} of that at F = 0, then 50 Adam steps of E, in turn. Root of the mean
squared relative error:

{table(["", "windows", *rounds], turns)}

On the windows it is fitted to the error keeps falling and has not come to its end; on the others it stays near where
it began, or above. So the figures above are of fits that mind other windows, not of the least error a fixed E and F can
have on given ones; fits to more windows were not tried."""


def again(result: Result) -> str:
    rows = [[name, f"{found['wall']:.1f}", f"{found['processor']:.1f}"] for name, found in result["found"].items()]
    return f"""## Run it yourself

```
rankscope theory jl --out runs/jl
rankscope theory clusters --flow polytope --out runs/polytope
rankscope theory clusters --weights head.safetensors --out runs/own   # keys Q, K, V and perhaps tokens
rankscope theory collapse --out runs/collapse
rankscope theory projections --out runs/projections
python benchmarks/experiments/theory.py && python benchmarks/experiments/theory_document.py
```

Times at {result["threads"]} thread(s), on a machine that other work shared:

{table(["task", "seconds", "processor seconds"], rows)}"""


if __name__ == "__main__":
    main()
