"""Studies on a model as labelled datasets: what ``rankscope theory`` writes and every picture is made from."""

import json
from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.corpora import open_corpus
from rankscope.pretrained import Pretrained, load, max_positions
from rankscope.theory import jl_counts, projections, rank_collapse
from rankscope.theory.johnson_lindenstrauss import exponent, jl_dimension
from rankscope.windows import Window, packed_windows

#: Seeds are below this, as torch's generators take them.
SEEDS = 2**63


def johnson_lindenstrauss_study(
    model: str, corpus: str, *, n: int, k: Sequence[int], eps: Sequence[float], draws: int, vectors: int, seed: int
) -> xr.Dataset:
    """Count Theorem 1's events on a model's maps, a softmax of noise and the identity; run Theorem 2's construction.

    Args:
        model: What :func:`rankscope.pretrained.load` takes; its middle attention is used, on one window.
        corpus: What :func:`rankscope.corpora.open_corpus` takes.
        n: Tokens.
        k: Projected lengths; each ε's own :func:`jl_dimension` is added.
        eps: Allowed errors.
        draws: Draws of the projection.
        vectors: Vectors w of each kind for each matrix.
        seed: Of every draw.

    Returns:
        ``relative_failure`` and ``additive_failure`` with their intervals ``(matrix, vector, k, eps)``, pooled over
        heads and vectors; ``bound (k, eps)``; ``relative_error (matrix, vector, k)``; Theorem 2's ``theorem_2_…``
        ``(delta,)``.
    """
    if vectors < 1:
        raise RankscopeError(f"`vectors` must be 1 or more, got {vectors}")
    for e in eps:
        exponent(e)
    generator = seeded(seed)
    loaded, (window,) = packed(model, corpus, n, 1, seed)
    found = projections.collect(loaded.model, [window])
    module = list(found)[len(found) // 2]
    heads = found[module]
    noise = torch.randn(heads.query.shape[1], n, n, generator=generator)
    matrices = {
        "model": heads.P(0),
        "softmax of noise": noise.softmax(-1),
        "sharp softmax of noise": (4 * noise).softmax(-1),
        "identity": torch.eye(n)[None],
    }
    lengths = sorted({*k, *(jl_dimension(n, e) for e in eps)})
    kinds = ["values", *jl_counts.VECTORS]
    shape = (len(matrices), len(kinds), len(lengths), len(eps))
    rates = {name: np.full(shape, np.nan) for name in ("relative_failure", "additive_failure")}
    ends = {f"{name}_{end}": np.full(shape, np.nan) for name in rates for end in ("low", "high")}
    error = np.full(shape[:3], np.nan)
    for i, P in enumerate(matrices.values()):
        for j, kind in enumerate(kinds):
            if kind == "values":
                # Only the model's own maps have values of their own; other matrices get the same ones.
                w = heads.value[0, : P.shape[0], :, :vectors]
            else:
                w = jl_counts.vectors(kind, P, count=vectors, generator=generator)
            counts = jl_counts.count_theorem_1(P, w, k=lengths, eps=eps, draws=draws, generator=generator)
            error[i, j] = counts.relative_error.mean((1, 2))
            for name, table in (("relative_failure", counts.relative), ("additive_failure", counts.additive)):
                # The worst of heads and vectors, each a binomial count of its own.
                worst = table.flatten(2).amax(-1)
                rates[name][i, j] = worst / draws
                for a in range(len(lengths)):
                    for b in range(len(eps)):
                        interval = jl_counts.binomial_interval(int(worst[a, b]), draws)
                        ends[f"{name}_low"][i, j, a, b], ends[f"{name}_high"][i, j, a, b] = interval
    delta = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001, 0.0001)
    logits = heads.scaling * heads.query[0] @ heads.key[0].mT
    second = jl_counts.measure_theorem_2(
        logits, heads.value[0], k=jl_dimension(n, 0.5), delta=delta, eps=0.5, draws=20, generator=generator
    )
    grid = ("matrix", "vector", "k", "eps")
    return xr.Dataset(
        {
            **{name: (grid, values) for name, values in (rates | ends).items()},
            "relative_error": (grid[:3], error),
            "bound": (grid[2:], counts.bound.numpy()),
            "theorem_2_relative_error": ("delta", second.relative_error.mean(1).numpy()),
            "theorem_2_missed": ("delta", second.missed.mean(1).numpy()),
            "theorem_2_query_dependence": ("delta", second.query_dependence.mean(1).numpy()),
        },
        coords={"matrix": list(matrices), "vector": kinds, "k": lengths, "eps": list(eps), "delta": list(delta)},
        attrs=attributes(
            "jl",
            model=model,
            corpus=corpus,
            module=module,
            n=n,
            draws=draws,
            vectors=vectors,
            seed=seed,
            theorem_2_k=jl_dimension(n, 0.5),
            theorem_2_missed_by_zero=float(second.missed_by_zero.mean()),
            theorem_2_exact_query_dependence=float(second.exact_query_dependence.mean()),
        ),
    )


def collapse_study(model: str, corpus: str, *, n: int, windows: int, seed: int) -> xr.Dataset:
    """Follow tokens' residual to rank one, and P's ranks, along a model's layers with and without their parts.

    Args:
        model: A BERT-like encoder, as :func:`rankscope.pretrained.load` takes it.
        corpus: What :func:`rankscope.corpora.open_corpus` takes.
        n: Tokens a window.
        windows: How many.
        seed: Of the windows.

    Returns:
        ``residual (variant, depth, window)``, ``effective_rank`` and ``energy_rank_90`` of P
        ``(variant, layer, window, head)``. Variants ``layer i again`` run one layer as often as the model has layers.
    """
    loaded, found = packed(model, corpus, n, windows, seed)
    ids = torch.tensor([window.input_ids for window in found])
    runs = {name: rank_collapse.along_depth(loaded.model, ids, parts) for name, parts in rank_collapse.VARIANTS.items()}
    depth = len(runs["whole"].effective_rank)
    skip = rank_collapse.VARIANTS["attention, skip"]
    for layer in (0, depth - 1):
        again = rank_collapse.along_depth(loaded.model, ids, skip, order=[layer] * depth)
        runs[f"layer {layer} again"] = again
    ranks = ("variant", "layer", "window", "head")
    return xr.Dataset(
        {
            "residual": (("variant", "depth", "window"), torch.stack([run.residual for run in runs.values()]).numpy()),
            "effective_rank": (ranks, torch.stack([run.effective_rank for run in runs.values()]).numpy()),
            "energy_rank_90": (ranks, torch.stack([run.energy_rank_90 for run in runs.values()]).numpy()),
        },
        coords={"variant": list(runs), "depth": np.arange(depth + 1), "layer": np.arange(depth)},
        attrs=attributes("collapse", model=model, corpus=corpus, n=n, windows=windows, seed=seed),
    )


def projections_study(
    model: str, corpus: str, *, n: int, k: Sequence[int], train_windows: int, test_windows: int, seed: int
) -> xr.Dataset:
    """Compare projections at equal k on a model's heads, fitted on some windows and judged on others.

    Args:
        model: A bidirectional encoder, as :func:`rankscope.pretrained.load` takes it.
        corpus: What :func:`rankscope.corpora.open_corpus` takes.
        n: Tokens a window.
        k: Projected lengths.
        train_windows: Windows to fit on.
        test_windows: Windows to judge on, two or more.
        seed: Of windows and draws.

    Returns:
        ``error (projection, layer, k, head)``, ``overlap (layer, k, head)``, ``chance (k,)``.
    """
    if train_windows < 1 or test_windows < 2:
        raise RankscopeError(
            f"`train_windows` must be 1 or more and `test_windows` 2 or more, got {train_windows} and {test_windows}"
        )
    loaded, windows = packed(model, corpus, n, train_windows + test_windows, seed)
    generator = seeded(seed)
    found = projections.collect(loaded.model, windows)
    compared = []
    for heads in found.values():
        compared.append(
            projections.compare(
                heads.at(slice(train_windows)), heads.at(slice(train_windows, None)), k=k, generator=generator
            )
        )
    methods = list(projections.METHODS)
    error = torch.stack([torch.stack([layer.error[name] for layer in compared]) for name in methods])
    return xr.Dataset(
        {
            "error": (("projection", "layer", "k", "head"), error.numpy()),
            "overlap": (("layer", "k", "head"), torch.stack([layer.overlap for layer in compared]).numpy()),
            "chance": ("k", compared[0].chance.numpy()),
        },
        coords={"projection": methods, "layer": np.arange(len(found)), "module": ("layer", list(found)), "k": list(k)},
        attrs=attributes(
            "projections",
            model=model,
            corpus=corpus,
            n=n,
            train_windows=train_windows,
            test_windows=test_windows,
            seed=seed,
            head_dim=heads.value.shape[-1],
        ),
    )


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the CPU.

    Raises:
        RankscopeError: ``seed`` is no seed.
    """
    if not 0 <= seed < SEEDS:
        raise RankscopeError(f"`seed` must lie between 0 and 2**63 - 1, got {seed}")
    return torch.Generator().manual_seed(seed)


def attributes(study: str, **settings: object) -> dict[str, object]:
    """Return a study's attributes: its name, its settings, what it was made with."""
    return {"study": study, **settings, "environment": json.dumps(environment())}


def packed(model: str, corpus: str, n: int, count: int, seed: int) -> tuple[Pretrained, list[Window]]:
    """Load a model, and windows for it.

    Raises:
        RankscopeError: Sizes that the model can't have or the corpus can't give.
    """
    seeded(seed)
    if count < 1:
        raise RankscopeError(f"`windows` must be 1 or more, got {count}")
    loaded = load(model)
    limit = max_positions(loaded.model)
    if limit is not None and n > limit:
        raise RankscopeError(f"`n` must be at most the {limit} positions of {model!r}, got {n}: take a smaller n")
    windows = list(packed_windows(open_corpus(corpus), loaded.tokenizer, n, limit=count, seed=seed))
    if len(windows) < count:
        raise RankscopeError(f"`corpus` gives {len(windows)} windows of n={n}, {count} are wanted: ask for fewer")
    return loaded, windows
