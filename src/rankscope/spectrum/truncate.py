"""What the rank is worth: a model's forward with every head's P replaced by its best rank-k map."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.attention.interface import AttentionCall, Route, find_route, run_captured
from rankscope.corpora import open_corpus
from rankscope.linalg.rank import energy_rank
from rankscope.pretrained import Pretrained, load, max_positions
from rankscope.spectrum.dataset import load as load_spectrum
from rankscope.spectrum.dataset import plain
from rankscope.spectrum.intervals import mean_interval
from rankscope.spectrum.low_rank import (
    exact_map,
    leaked_mass,
    projected,
    random_basis,
    remasked,
    right_basis,
    tail_error,
)
from rankscope.spectrum.nulls import generator_for
from rankscope.windows import Window, packed_windows

FILE_NAME = "truncation.nc"
# Tokens of the first window by which the model's route is found.
CHECKED_TOKENS = 128
# What the result's file holds as one number, and numpy's seeds take no negative ones.
SEEDS = 2**63
MASKED_SHARE = 0.15
VARIANTS = {
    "best": "P's best approximation of rank k (Eckart and Young)",
    "random": "P Q Qᵀ with Q random, k orthonormal columns",
    "remasked": "the best of rank k without its masked and negative entries, rows scaled back to P's sums",
}
INTERVALS = (
    "loss_increase",
    "loss_increase_by_layer",
    "cosine",
    "cosine_by_layer",
    "pv_error",
    "predicted_error",
    "leaked_mass",
)


def truncate(
    model: str | Path | nn.Module,
    texts: str | Path | Iterable[str],
    *,
    ranks: Sequence[int],
    n: int = 128,
    windows: int = 8,
    layerwise: bool = True,
    spectrum: str | Path | None = None,
    column: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    tokenizer: object | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    r"""Replace every head's P by its best rank-k map and see what that does to P V and to the model's output.

    All heads at once, where later layers' P are those of the truncated run, and one layer at a time. A model
    with a language model head gives its loss: causal, or masked with 15 % of a window's tokens masked, the same
    tokens at every k. The cosine of the final states to the model's own, a mean over tokens, is always there.

    It is no measurement of what a model trained at this rank would lose, and a rank that P needs for white values
    (:math:`\sqrt{\sum_{i>k} \sigma_i^2 / \sum_i \sigma_i^2}`, ``predicted_error``) is not what the real V needs.

    Args:
        model: As for :func:`rankscope.measure`.
        texts: As for :func:`rankscope.measure`.
        ranks: The k, each in ``1..n``.
        n: Tokens a window, special tokens included.
        windows: How many at most.
        layerwise: Truncate one layer at a time too: a forward for each layer, variant and k.
        spectrum: A result of ``rankscope measure`` at the same n, whose ``energy_rank_90`` of the trained model and
            of its nulls are kept as ``marked_rank``.
        column: The text's column in a table.
        dtype: The model's dtype; P is truncated in float64.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        seed: Of the documents' order, the masked tokens and the random control.
        tokenizer: For a model in memory.
        progress: Called as ``progress(windows_done, windows_wanted)``.

    Returns:
        Dims ``window, variant, k, layer, head``; variants ``best``, ``random`` and, where the model has a mask,
        ``remasked``. ``pv_error``, ``predicted_error``, ``leaked_mass`` (of ``best``), ``energy_rank_90``;
        ``loss``, ``own_loss``, ``loss_increase``, ``cosine``, the last two also ``_by_layer``; each with ``_ci_low``
        and ``_ci_high`` over windows.

    Raises:
        RankscopeError: An argument that can't serve, an encoder–decoder, or a model whose attention can be read but
            not replaced.

    Example:
        >>> result = truncate("minilm", "pydoc", ranks=[4, 16], n=16, windows=2, layerwise=False)
        >>> result.cosine.dims, bool((result.cosine.sel(variant="best", k=16) > 0.9999).all())
        (('window', 'variant', 'k'), True)
    """
    ranks = sorted(set(ranks))
    if n < 8 or windows < 1:
        raise RankscopeError(f"`n` must be at least 8 and `windows` at least 1, got {n} and {windows}")
    if not ranks or ranks[0] < 1 or ranks[-1] > n:
        raise RankscopeError(f"`ranks` must be numbers from 1 to n={n}, got {ranks}: a map of n tokens has rank n")
    if not 0 <= seed < SEEDS:
        raise RankscopeError(f"`seed` must lie between 0 and 2**63 - 1, got {seed}")
    marks = marked_ranks(spectrum, n)
    pretrained, why_no_loss = with_head(model, dtype=dtype, device=device, tokenizer=tokenizer)
    limit = max_positions(pretrained.model)
    if limit is not None and n > limit:
        raise RankscopeError(f"`n` is {n}, but {pretrained.name!r} has {limit} positions: choose --n {limit} or less")
    corpus = open_corpus(texts, column=column)
    stream = packed_windows(corpus, pretrained.tokenizer, n, limit=windows, seed=seed)
    found: list[dict[str, np.ndarray]] = []
    seen: list[Window] = []
    truncator: Truncator | None = None
    for window in stream:
        truncator = truncator or Truncator(pretrained, window, ranks, layerwise, seed)
        found.append(truncator.run(window))
        seen.append(window)
        if progress:
            progress(len(seen), windows)
    if truncator is None:
        raise RankscopeError(f"`texts` gave no window of {n} tokens: choose a smaller n")
    variables = {name: (DIMS[name], np.stack([row[name] for row in found])) for name in found[0]}
    documents = [window.document for window in seen]
    for name in INTERVALS:
        if name in variables:
            dims, values = variables[name]
            _, low, high = mean_interval(values, documents)
            variables |= {f"{name}_ci_low": (dims[1:], low), f"{name}_ci_high": (dims[1:], high)}
    heads = found[0]["energy_rank_90"].shape[1]
    coords: dict[str, Any] = {
        "window": [window.index for window in seen],
        "document": ("window", documents),
        "variant": list(truncator.variants),
        "k": ranks,
        "layer": np.arange(len(truncator.modules)),
        "module": ("layer", truncator.modules),
        "head": np.arange(heads),
    }
    if marks:
        coords["baseline"] = list(marks)
        variables["marked_rank"] = (("baseline",), np.array(list(marks.values())))
    attributes = {
        "title": "A model whose context maps are truncated to rank k",
        "model": pretrained.name,
        "revision": pretrained.revision,
        "weights": pretrained.fingerprint,
        "corpus": corpus.name,
        "corpus_hash": stream.corpus_hash,
        "n": n,
        "windows_wanted": windows,
        "dtype": dtype,
        "seed": seed,
        "objective": truncator.objective,
        "why_no_loss": why_no_loss,
        "variants": {name: VARIANTS[name] for name in truncator.variants},
        "interval": "95 % t-interval over windows, clustered by the document a window starts in",
        "environment": environment(),
    }
    return xr.Dataset(variables, coords=coords, attrs={name: plain(value) for name, value in attributes.items()})


DIMS: dict[str, tuple[str, ...]] = {
    "pv_error": ("window", "variant", "k", "layer", "head"),
    "predicted_error": ("window", "k", "layer", "head"),
    "leaked_mass": ("window", "k", "layer", "head"),
    "energy_rank_90": ("window", "layer", "head"),
    "own_loss": ("window",),
    "loss": ("window", "variant", "k"),
    "loss_increase": ("window", "variant", "k"),
    "loss_increase_by_layer": ("window", "variant", "k", "layer"),
    "cosine": ("window", "variant", "k"),
    "cosine_by_layer": ("window", "variant", "k", "layer"),
}


def with_head(model: str | Path | nn.Module, **options: Any) -> tuple[Pretrained, str]:
    """Load a model with its language model head, or without one and the reason why."""
    try:
        return load(model, head=True, **options), ""
    except RankscopeError as error:
        # Whatever else is wrong is wrong without the head too, and is raised here.
        return load(model, **options), str(error)


def marked_ranks(spectrum: str | Path | None, n: int) -> dict[str, float]:
    """Return ``energy_rank_90`` of each baseline of a measurement: its mean over windows, layers and heads."""
    if spectrum is None:
        return {}
    ds = load_spectrum(spectrum)
    if int(ds.attrs["n"]) != n:
        raise RankscopeError(
            f"`spectrum` was measured at n={ds.attrs['n']}, got n={n}: ranks compare at one length only; "
            f"give --n {ds.attrs['n']}, or measure again"
        )
    if "energy_rank_90" not in ds:
        raise RankscopeError("`spectrum` has no energy_rank_90: measure with a dense method")
    means = ds.energy_rank_90.mean(("window", "layer", "head"))
    return {str(name): float(means.sel(baseline=name)) for name in ds.baseline.values}


def objective_of(model: nn.Module) -> str:
    """``masked``, ``causal`` or ``cosine`` (no head that predicts tokens), by the name of the model's class."""
    name = type(model).__name__
    if re.search(r"ForMaskedLM$", name):
        return "masked"
    return "causal" if re.search(r"(ForCausalLM|LMHeadModel)$", name) else "cosine"


class Truncator:
    """A model, its route, and the truncated forwards of one window.

    Args:
        pretrained: Model and tokenizer.
        first: A window by which the route is found.
        ranks: The k, ascending.
        layerwise: Whether each layer is truncated alone too.
        seed: Of masked tokens and the random control.

    Raises:
        RankscopeError: The model has an encoder and a decoder, its attention can't be replaced, or its tokenizer
            has no mask token where one is needed.
    """

    def __init__(self, pretrained: Pretrained, first: Window, ranks: Sequence[int], layerwise: bool, seed: int) -> None:
        self.model, self.tokenizer, self.ranks, self.layerwise, self.seed = (
            pretrained.model,
            pretrained.tokenizer,
            ranks,
            layerwise,
            seed,
        )
        self.device = next(self.model.parameters()).device
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            raise RankscopeError(
                f"`model` {pretrained.name!r} has an encoder and a decoder: truncate takes one stack; give its encoder"
            )
        self.objective = objective_of(self.model)
        if self.objective == "masked" and self.tokenizer.mask_token_id is None:
            raise RankscopeError("`tokenizer` has no mask token, which a masked loss needs: give the model's own")
        start = torch.tensor([first.input_ids[:CHECKED_TOKENS]], device=self.device)
        self.route: Route = find_route(self.model, {"input_ids": start})
        fixed = [item.module for item in self.route.modules if item.reached != "routed"]
        if self.route.reached != "routed" or fixed:
            raise RankscopeError(
                f"`model` {pretrained.name!r} does not call the attention interface in {', '.join(fixed[:3])}: its P "
                "can be measured but not replaced; choose a model that `rankscope doctor` calls routed"
            )
        self.modules: list[str] = []
        self.variants: tuple[str, ...] = ("best", "random")

    def run(self, window: Window) -> dict[str, np.ndarray]:
        """All numbers of one window, by the names of :data:`DIMS` without their window."""
        ids, targets = self.inputs(window)
        layers: list[LayerTruncation] = []

        def observe(call: AttentionCall) -> None:
            layers.append(self.truncation(call, window, len(layers)))

        own_state, own_loss = self.forward(ids, targets, observe)
        if not self.modules:
            self.modules = [layer.module for layer in layers]
            self.variants = layers[0].variants
        result = stacked(layers)
        shape = (len(self.variants), len(self.ranks))
        cosine, loss = np.full(shape, np.nan), np.full(shape, np.nan)
        by_layer = np.full((2, *shape, len(layers)), np.nan)
        for v, variant in enumerate(self.variants):
            for i, k in enumerate(self.ranks):
                state, loss[v, i] = self.forward(ids, targets, self.everywhere(window, layers[0], variant, k))
                cosine[v, i] = mean_cosine(state, own_state)
                for at in range(len(layers) if self.layerwise else 0):
                    state, value = self.forward(ids, targets, only(at, layers[at].outputs[variant, k]))
                    by_layer[:, v, i, at] = mean_cosine(state, own_state), value - own_loss
        result["cosine"] = cosine
        if self.layerwise:
            result["cosine_by_layer"] = by_layer[0]
        if self.objective != "cosine":
            result |= {"own_loss": np.array(own_loss), "loss": loss, "loss_increase": loss - own_loss}
            if self.layerwise:
                result["loss_increase_by_layer"] = by_layer[1]
        return result

    def inputs(self, window: Window) -> tuple[Tensor, Tensor]:
        """Token ids ``(1, n)`` and targets ``(1, n)``, −100 where nothing is predicted."""
        ids = torch.tensor([window.input_ids], device=self.device)
        targets = torch.full_like(ids, -100)
        if self.objective == "causal":
            targets[:, :-1] = ids[:, 1:]
        elif self.objective == "masked":
            special = torch.isin(ids.cpu(), torch.tensor(self.tokenizer.all_special_ids))
            open_ = (~special[0]).nonzero()[:, 0]
            order = torch.randperm(len(open_), generator=generator_for(self.seed, "masked", window.index, 0, 0))
            chosen = open_[order[: max(1, round(MASKED_SHARE * len(open_)))]].to(self.device)
            targets[0, chosen] = ids[0, chosen]
            ids[0, chosen] = self.tokenizer.mask_token_id
        return ids, targets

    def forward(
        self, ids: Tensor, targets: Tensor, sink: Callable[[AttentionCall], Tensor | None]
    ) -> tuple[Tensor, float]:
        """Final states ``(n, width)`` and mean loss in nats a token (NaN without a head) of one forward."""
        states: list[Tensor] = []
        base = getattr(self.model, "base_model", self.model)
        hook = base.register_forward_hook(lambda _m, _a, output: states.append(output[0]))
        try:
            outputs = run_captured(self.model, {"input_ids": ids}, sink, route=self.route)
        finally:
            hook.remove()
        if self.objective == "cosine":
            return states[-1][0].double(), float("nan")
        loss = nn.functional.cross_entropy(outputs.logits[0].double(), targets[0], ignore_index=-100)
        return states[-1][0].double(), float(loss)

    def truncation(self, call: AttentionCall, window: Window, layer: int) -> "LayerTruncation":
        """One layer's truncated maps' numbers and outputs."""
        P = exact_map(call)
        if not bool(torch.isfinite(P).all()):
            head = int((~torch.isfinite(P[0]).all(-1).all(-1)).nonzero()[0])
            raise RankscopeError(
                f"{call.module} gives no finite attention (window {window.index}, head {head}): check the weights, "
                "or try --dtype float32"
            )
        return LayerTruncation(call, P, self.ranks, self.control(call, window, layer))

    def control(self, call: AttentionCall, window: Window, layer: int) -> Tensor:
        """The random basis of a layer's heads, the same in every forward of a window."""
        assert call.query is not None
        heads, m = call.query.shape[1], call.key_expanded().shape[2]
        generator = generator_for(self.seed, "truncate", window.index, layer, 0)
        return random_basis(heads, m, self.ranks[-1], generator=generator).to(call.query.device)

    def everywhere(
        self, window: Window, first: "LayerTruncation", variant: str, k: int
    ) -> Callable[[AttentionCall], Tensor]:
        """A sink that truncates each layer's map as it runs, in what the layers before made of the input."""
        seen = 0

        def sink(call: AttentionCall) -> Tensor:
            nonlocal seen
            seen += 1
            if seen == 1:
                return first.outputs[variant, k]
            P = exact_map(call)
            basis = self.control(call, window, seen - 1) if variant == "random" else right_basis(P).vectors
            return output_of(call, truncated(P, basis, variant, k, call.allowed()))

        return sink


class LayerTruncation:
    """One layer's truncated maps in the model's own forward: outputs by ``(variant, k)`` and numbers.

    Args:
        call: The layer's call.
        P: Its maps, float64 ``(1, h, n, m)``.
        ranks: The k.
        control: Random bases ``(h, m, k)``.
    """

    def __init__(self, call: AttentionCall, P: Tensor, ranks: Sequence[int], control: Tensor) -> None:
        allowed = call.allowed()
        self.module = call.module
        self.variants = tuple(name for name in VARIANTS if name != "remasked" or allowed is not None)
        basis = right_basis(P)
        value = call.value_expanded().double()
        exact = P @ value
        scale = exact.norm(dim=(-2, -1)).clamp_min(torch.finfo(torch.float64).tiny)
        self.outputs: dict[tuple[str, int], Tensor] = {}
        errors: dict[str, list[Tensor]] = {name: [] for name in self.variants}
        leaks = []
        for k in ranks:
            best = projected(P, basis.vectors[..., :k])
            leaks.append(torch.zeros_like(scale[0]) if allowed is None else leaked_mass(best, allowed)[0])
            for name in self.variants:
                vectors = control if name == "random" else basis.vectors
                output = truncated(P, vectors, name, k, allowed, best=best) @ value
                errors[name].append(((output - exact).norm(dim=(-2, -1)) / scale)[0])
                self.outputs[name, k] = output.to(call.value_expanded().dtype)
        self.numbers = {
            "pv_error": torch.stack([torch.stack(errors[name]) for name in self.variants]),
            "predicted_error": torch.stack([tail_error(basis.sigma, k)[0] for k in ranks]),
            "leaked_mass": torch.stack(leaks),
            "energy_rank_90": energy_rank(basis.sigma, 0.9)[0].double(),
        }


def truncated(
    P: Tensor, basis: Tensor, variant: str, k: int, allowed: Tensor | None, *, best: Tensor | None = None
) -> Tensor:
    """The map that a variant puts in P's place, ``(1, h, n, m)``."""
    low = projected(P, basis[..., :k]) if best is None or variant == "random" else best
    if variant != "remasked":
        return low
    assert allowed is not None
    return remasked(low, P, allowed)


def output_of(call: AttentionCall, weights: Tensor) -> Tensor:
    """What a layer gives with other weights, in its own dtype."""
    value = call.value_expanded()
    return (weights @ value.double()).to(value.dtype)


def only(layer: int, output: Tensor) -> Callable[[AttentionCall], Tensor | None]:
    """A sink that replaces one layer's output."""
    seen = -1

    def sink(_: AttentionCall) -> Tensor | None:
        nonlocal seen
        seen += 1
        return output if seen == layer else None

    return sink


def mean_cosine(state: Tensor, own: Tensor) -> float:
    """Mean over tokens of the cosine of two runs' final states ``(n, width)``."""
    return float(nn.functional.cosine_similarity(state, own, dim=-1).mean())


def stacked(layers: list[LayerTruncation]) -> dict[str, np.ndarray]:
    """Layers' numbers beside each other, heads last, NaN where a layer has fewer."""
    heads = max(layer.numbers["energy_rank_90"].shape[-1] for layer in layers)
    result = {}
    for name, first in layers[0].numbers.items():
        values = np.full((*first.shape[:-1], len(layers), heads), np.nan)
        for at, layer in enumerate(layers):
            numbers = layer.numbers[name].cpu().numpy()
            values[..., at, : numbers.shape[-1]] = numbers
        result[name] = values
    return result
