"""From a model and a corpus to the labelled dataset, part by part."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import xarray as xr
from torch import nn

from rankscope._errors import RankscopeError, did_you_mean
from rankscope.corpora import open_corpus
from rankscope.linalg.decompose import METHODS, choose
from rankscope.pretrained import load, max_positions
from rankscope.spectrum.compressed import CompressedRunner, compressed_index, is_compressed
from rankscope.spectrum.dataset import FILE_NAME, TRAINED, build, save
from rankscope.spectrum.intervals import mean_interval
from rankscope.spectrum.job import SENTENCE_GRID, Plan
from rankscope.spectrum.matrix_free import MATRIX_FREE, long_index
from rankscope.spectrum.nulls import NULLS, choose_nulls
from rankscope.spectrum.parts import PART_WINDOWS, Part, RunFolder, gap, window_hash
from rankscope.spectrum.runner import Runner
from rankscope.spectrum.sample import sample_size
from rankscope.windows import Window, packed_windows, sentence_windows

PACKINGS = ("packed", "sentence")
LEAST_WINDOWS_TO_STOP = 16
LEFT_OUT_SHARE = 0.1
# What the result's file holds as one number, and numpy's seeds take no negative ones.
SEEDS = 2**63
# P in float32, its float64 copy, the Gram matrix and its workspace.
BYTES_PER_ENTRY = 28
MEMORY_SHARE = 0.8
STOPPING_SCALAR = "nuclear_fraction_at_quarter"


def measure(
    model: str | Path | nn.Module,
    texts: str | Path | Iterable[str],
    *,
    n: int = 512,
    windows: int = 64,
    half_width: float | None = None,
    packing: str = "packed",
    column: str | None = None,
    nulls: str | Sequence[str] | None = None,
    null_windows: int = 16,
    layers: Sequence[int] | str | None = None,
    heads: Sequence[int] | str | None = None,
    method: str = "auto",
    tolerance: float = 1e-6,
    width: float = 0.02,
    workers: int | None = None,
    batch_size: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    tokenizer: object | None = None,
    out: str | Path | None = None,
    shard: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """Measure how low-rank a model's attention is on a text, with its nulls beside it.

    For every window, layer and head the singular values of the context mapping matrix P are taken; curves are
    kept as means over windows, scalars for each window. A Linformer's map is n × k: its ranks are relative to k, and
    the attributes ``map`` and ``rank_relative_to`` say so.

    Args:
        model: A hub id, folder, ``.gguf`` file, PEFT adapter's folder, ``"minilm"``, or a model in memory (then
            give its ``tokenizer``).
        texts: ``"pydoc"``, ``"wiki103"``, ``"imdb"``, a path, or documents as strings.
        n: Tokens a window, special tokens included.
        windows: How many windows at most; a shorter corpus gives fewer.
        half_width: Stop early, from 16 windows on, once every layer's 95 % interval of
            ``nuclear_fraction_at_quarter`` (mean over heads) is at most this wide to each side.
        packing: ``"packed"`` (windows of exactly n tokens, across documents) or ``"sentence"``.
        column: The text's column in a table.
        nulls: ``"all"``, ``"none"``, or names of :data:`rankscope.spectrum.nulls.NULLS`; default three.
        null_windows: On how many of the first windows the nulls are measured.
        layers: Which attentions, by number, or ``"random:K"`` for a sample of K by the seed; default all.
        heads: Which heads of each, by number, or ``"random:K"`` (the same K in every layer); default all. What was
            drawn is in the attribute ``drawn`` and in the run's settings.
        method: A method of :data:`rankscope.linalg.decompose.METHODS`, ``"auto"``, or ``"matrix-free"``, which
            never writes P down: curves then come with bands ``_low`` and ``_high``.
        tolerance: Largest error of a nuclear fraction that ``auto`` may leave.
        width: Band width at which ``"matrix-free"`` stops making passes.
        workers: Decompositions at a time; default the machine's cores.
        batch_size: Windows in one forward.
        dtype: The model's dtype; spectra are always taken in float32 or better.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        seed: Of the documents' order, the nulls' draws and fresh weights.
        tokenizer: For a model in memory.
        out: A folder that keeps finished parts, so that the same call resumes; ``None`` keeps nothing.
        shard: ``(index, count)``: measure only every ``count``-th part, from the ``index``-th on. Shards may share
            ``out`` at the same time; the one that ends last writes the result. In folders of their own they are
            joined by :func:`rankscope.spectrum.merge.merge`.
        progress: Called as ``progress(windows_done, windows_wanted)``.

    Returns:
        The dataset: dims ``baseline, layer, head, index, window``; also written to ``out/spectrum.nc``. Of a shard
        while others are missing: what the parts in ``out`` hold, and no file is written.

    Raises:
        RankscopeError: Any argument, file or model that can't serve; finished parts stay in ``out``.

    References:
        Wang et al. 2020, arXiv 2006.04768, Figure 1.

    Example:
        >>> import rankscope
        >>> result = rankscope.measure("minilm", "pydoc", n=64, windows=2, nulls="none", layers=[0, 5])
        >>> result.nuclear_fraction.dims, result.sizes["layer"], result.sizes["index"]
        (('baseline', 'layer', 'head', 'index'), 2, 64)
    """
    check_choices(n=n, windows=windows, null_windows=null_windows, batch_size=batch_size, packing=packing)
    if half_width is not None and not 0 < half_width < 1:
        raise RankscopeError(f"`half_width` must lie between 0 and 1, got {half_width}")
    if not 0 < width <= 1:
        raise RankscopeError(f"`width` must lie in (0, 1], got {width}")
    if method == "auto":
        choose(n, n, tolerance)
    elif method != MATRIX_FREE:
        METHODS[method]
    check_shard(shard, half_width)
    for name, chosen in (("layers", layers), ("heads", heads)):
        if isinstance(chosen, str):
            sample_size(chosen, name)
        elif chosen is not None and len(chosen) == 0:
            raise RankscopeError(f"`{name}` must hold at least one number, got none: leave it out for all")
    if not 0 <= seed < SEEDS:
        raise RankscopeError(f"`seed` must lie between 0 and 2**63 - 1, got {seed}")
    if workers is None:
        workers = os.cpu_count() or 1
    elif workers < 1:
        raise RankscopeError(f"`workers` must be at least 1, got {workers}: leave it out for the machine's cores")
    chosen_nulls = choose_nulls(nulls, matrix_free=method == MATRIX_FREE)
    pretrained = load(model, dtype=dtype, device=device, tokenizer=tokenizer)
    limit = max_positions(pretrained.model)
    if limit is not None and n > limit:
        raise RankscopeError(f"`n` is {n}, but {pretrained.name!r} has {limit} positions: choose --n {limit} or less")
    if method != MATRIX_FREE:
        check_memory(n, workers)
    corpus = open_corpus(texts, column=column)
    settings: dict[str, object] = {
        "model": pretrained.name,
        "revision": pretrained.revision,
        "weights": pretrained.fingerprint,
        "corpus": corpus.name,
        "column": column,
        "n": n,
        "windows": windows,
        "half_width": half_width,
        "packing": packing,
        "nulls": list(chosen_nulls),
        "null_windows": null_windows,
        "layers": layers if layers is None or isinstance(layers, str) else list(layers),
        "heads": heads if heads is None or isinstance(heads, str) else list(heads),
        "method": method,
        "tolerance": tolerance,
        "width": width,
        "workers": workers,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "seed": seed,
    }
    make = packed_windows if packing == "packed" else sentence_windows
    stream = make(corpus, pretrained.tokenizer, n, limit=windows, seed=seed)
    with tempfile.TemporaryDirectory() as scratch:
        first = next(stream)
        folder = RunFolder(Path(scratch if out is None else out))
        compressed = is_compressed(pretrained.model)
        most = compressed_index(pretrained.model) if compressed else n
        index = (long_index(n) if method == MATRIX_FREE else np.arange(1, most + 1)) if packing == "packed" else None
        plan = Plan(method, tolerance, width, seed, index, None if out is None else folder.parts_path)
        kind = CompressedRunner if compressed else Runner
        with kind(pretrained, chosen_nulls, null_windows, plan, layers, heads, workers, batch_size) as runner:
            try:
                facts = runner.inspect(first)
                # Not before the model has taken them: a refused setting must not bar the folder to its correction.
                folder.claim(settings | runner.drawn)
            except RankscopeError:
                folder.give_back()
                raise
            done = run_parts(folder, runner, chain_first(first, stream), windows, half_width, shard, progress)
        description = {
            "windows": done,
            "layers": [asdict(layer) for layer in runner.layers],
            "baselines": [TRAINED, *chosen_nulls],
            "index": (SENTENCE_GRID if index is None else index).tolist(),
            "attributes": {
                "title": "Singular values of the context mapping matrix P",
                **{name: settings[name] for name in ("model", "revision", "corpus", "n", "packing", "dtype", "seed")},
                "source": pretrained.source,
                "method": method,
                "tolerance": tolerance,
                "width": width,
                "nulls_meaning": {name: NULLS[name].meaning for name in chosen_nulls},
                "mask_policy": "padded rows and columns are cut out before the decomposition",
                "special_tokens": "added as the tokenizer does for one sequence, counted towards n",
                "rank_relative_to": "n" if packing == "packed" else "the sentence's own length",
                "corpus_hash": stream.corpus_hash,
                "skipped_text": dict(stream.left_out),
                "half_width": half_width,
                "windows_wanted": windows,
                **({"drawn": runner.drawn} if runner.drawn else {}),
                **facts,
            },
        }
        folder.describe(description)
        dataset = build(folder)
        if out is not None and folder.missing(done) is None:
            save(dataset, folder.path / FILE_NAME)
    return dataset


def check_choices(*, n: int, windows: int, null_windows: int, batch_size: int, packing: str) -> None:
    """Refuse numbers and names that can't be meant."""
    for name, value, least in (
        ("n", n, 8),
        ("windows", windows, 1),
        ("null_windows", null_windows, 1),
        ("batch_size", batch_size, 1),
    ):
        if value < least:
            raise RankscopeError(f"`{name}` must be at least {least}, got {value}")
    if packing not in PACKINGS:
        raise RankscopeError(f"`packing` has no {packing!r}: {did_you_mean(packing, PACKINGS)}")


def check_memory(n: int, workers: int) -> None:
    """Refuse an n whose maps can't be written down on this machine, before anything is measured.

    Raises:
        RankscopeError: P, its Gram matrix and their copies need more than the machine's memory, for each worker.
    """
    needed = BYTES_PER_ENTRY * n**2 * workers
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > MEMORY_SHARE * there:
        raise RankscopeError(
            f"`n` is {n}: writing P down takes about {needed / 2**30:.0f} GiB with {workers} workers, and this machine "
            f"has {there / 2**30:.0f} GiB: use --method matrix-free, or fewer --workers"
        )


def check_shard(shard: tuple[int, int], half_width: float | None) -> None:
    """Refuse a shard outside its count, and early stopping, which must see every part in order."""
    index, count = shard
    if count < 1 or not 0 <= index < count:
        raise RankscopeError(f"`shard` must be (index, count) with 0 <= index < count, got {shard}")
    if count > 1 and half_width is not None:
        raise RankscopeError("`half_width` needs every part in order, so it can't be combined with `shard`: drop one")


def chain_first(first: Window, rest: Iterator[Window]) -> Iterator[Window]:
    """Put a peeked window back in front of its stream."""
    yield first
    yield from rest


def run_parts(
    folder: RunFolder,
    runner: Runner,
    stream: Iterator[Window],
    windows: int,
    half_width: float | None,
    shard: tuple[int, int],
    progress: Callable[[int, int], None] | None,
) -> int:
    """Measure what the folder lacks of a shard, in order, and return how many windows the whole result covers."""
    finished = folder.finished()
    series: list[np.ndarray] = []
    documents: list[int] = []
    left_out: dict[int, str] = {}
    done = 0
    if progress:
        progress(0, windows)
    while cell := list(islice(stream, PART_WINDOWS)):
        start, stop = cell[0].index, cell[-1].index + 1
        missing = gap(start, stop, finished)
        ours = start // PART_WINDOWS % shard[1] == shard[0]
        parts = [folder.load(a, b) for a, b in finished if start <= a and b <= stop]
        for part in parts:
            check_same_text(part, cell)
        if missing is not None and ours:
            part = runner.measure_part([window for window in cell if missing[0] <= window.index < missing[1]])
            folder.save(part)
            parts.append(part)
        for part in parts:
            left_out |= part.left_out
            if STOPPING_SCALAR in part.scalars.get(TRAINED, {}):
                series.append(np.nanmean(part.scalars[TRAINED][STOPPING_SCALAR], axis=-1))
                documents += [d for w, d in enumerate(part.documents, part.start) if w not in part.left_out]
        done = stop
        check_left_out(left_out, windows, done)
        if progress:
            progress(done, windows)
        if half_width is not None and tight_enough(series, documents, half_width):
            break
    return done


def tight_enough(series: list[np.ndarray], documents: list[int], half_width: float) -> bool:
    """Whether every layer's interval is within ``half_width`` of its mean, from 16 windows on."""
    if len(documents) < LEAST_WINDOWS_TO_STOP:
        return False
    mean, low, _ = mean_interval(np.concatenate(series), documents)
    return bool(np.all(mean - low <= half_width))


def check_same_text(part: Part, cell: list[Window]) -> None:
    """Refuse to go on when the corpus no longer gives the windows a finished part was made of."""
    for window in cell:
        if part.start <= window.index < part.stop and part.hashes[window.index - part.start] != window_hash(window):
            raise RankscopeError(
                f"`out` holds parts of another text: window {window.index} of the corpus has changed since. "
                "Restore the corpus, or use another --out"
            )


def check_left_out(left_out: dict[int, str], windows: int, done: int) -> None:
    """Stop when more than a tenth of the windows gave no finite numbers, or all of them so far."""
    if left_out and (len(left_out) > LEFT_OUT_SHARE * windows or len(left_out) == done):
        window, why = next(iter(sorted(left_out.items())))
        raise RankscopeError(
            f"the model gives no finite attention in {len(left_out)} of {done} windows (first: window {window}, "
            f"{why}); at most {LEFT_OUT_SHARE:.0%} may be left out: check the weights, or try --dtype float32"
        )
