"""From a pretrained encoder to calibrated projections, and what replacing its attention costs."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention.interface import restore
from rankscope.models.calibration import LayerError, calibrate, start_at_mean_pooling
from rankscope.models.in_place import InPlaceProjections, Settings, linformerize
from rankscope.models.projections import LinformerProjections
from rankscope.windows import packed_windows

# BERT's share of masked tokens.
MASKED = 0.15


@dataclass(frozen=True)
class Effect:
    """What replacing the attention did to the model's outputs, on windows that were not fitted.

    Args:
        embedding_cosine: Mean cosine between the mean-pooled last hidden states, before and after replacing.
        masked_loss: Cross-entropy in nats at masked tokens with exact attention and with the replaced one; ``None``
            without a masked-language-model head.
    """

    embedding_cosine: float
    masked_loss: tuple[float, float] | None = None


@dataclass(frozen=True)
class Conversion:
    """A model with calibrated projections in place, and the report.

    Args:
        bank: The projections, in the model.
        layers: Errors for each layer and k: the chosen one, its half and its double.
        start: The effect with mean pooling.
        effect: The effect with the fitted projections.
    """

    bank: InPlaceProjections
    layers: list[LayerError]
    start: Effect
    effect: Effect


def calibration_windows(corpus: Any, tokenizer: Any, n: int, windows: int, *, seed: int = 0) -> Tensor:
    """Token ids ``(windows, n)`` of a corpus, packed.

    Raises:
        RankscopeError: The corpus is shorter.
    """
    ids = [window.input_ids for window in islice(packed_windows(corpus, tokenizer, n, seed=seed), windows)]
    if len(ids) < windows:
        raise RankscopeError(
            f"`corpus` gives only {len(ids)} of {windows} windows of {n} tokens: take fewer windows or more text"
        )
    return torch.tensor(ids)


def linformerize_calibrated(
    model: nn.Module,
    windows: Tensor,
    *,
    k: int,
    sharing: str = "headwise",
    kind: str = "learned",
    length_rule: str | None = None,
    method: str = "distill",
    steps: int = 200,
    around: bool = True,
    mask_token: int | None = None,
    generator: torch.Generator,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Put Linformer into an encoder in place, with E and F fitted to its own attention.

    Args:
        model: The encoder, with its own attention.
        windows: Token ids, ``(w, n)``, w at least 4; n becomes the longest sequence. The last quarter is kept for
            the report.
        k: Projected length.
        sharing: As for :func:`~rankscope.models.in_place.linformerize`.
        kind: As there.
        length_rule: As there; by default ``"interpolate"`` for kinds with a matrix, so that pooling keeps its
            meaning in shorter sequences.
        method: ``"mean"``, ``"least-squares"`` or ``"distill"``.
        steps: Gradient steps a layer of ``"distill"``.
        around: Fit at k/2 and 2k too, for the report.
        mask_token: Id of the mask token, for the masked-language-model loss.
        generator: Draws starting values, windows and masked tokens.
        progress: Called with fits done and fits in all.

    Returns:
        The conversion; ``rankscope.restore(model)`` undoes it.

    Raises:
        RankscopeError: As :func:`linformerize` and :func:`calibrate`.
    """
    n = windows.shape[1]
    rule = length_rule or ("interpolate" if kind in ("learned", "gaussian") else "slice")
    chosen = linformerize(model, k=k, sharing=sharing, kind=kind, length_rule=rule, n=n, generator=generator)
    settings = chosen.settings
    restore(model)
    banks: list[LinformerProjections] = [chosen]
    if around:
        others = sorted({max(k // 2, 1), min(2 * k, n)} - {k})
        banks += [
            InPlaceProjections(replace(settings, k=size), generator=generator).to(windows.device) for size in others
        ]
    held_out = max(1, len(windows) // 4)
    kept = windows[-held_out:]
    masked, places = _masked(kept, mask_token, generator)
    exact = _outcome(model, kept, masked, places)
    start_at_mean_pooling(chosen)
    pooled = copy.deepcopy(chosen.state_dict())
    layers = calibrate(
        model,
        banks,
        windows,
        paths=settings.modules,
        method=method,
        steps=steps,
        held_out=held_out,
        generator=generator,
        progress=progress,
    )
    layers.sort(key=lambda row: (row.layer, row.k))
    fitted = copy.deepcopy(chosen.state_dict())
    bank = _put(model, settings, pooled)
    start = _effect(exact, _outcome(model, kept, masked, places))
    bank.load_state_dict(fitted)
    return Conversion(bank, layers, start, _effect(exact, _outcome(model, kept, masked, places)))


def _put(model: nn.Module, settings: Settings, state: dict[str, Tensor]) -> InPlaceProjections:
    bank = linformerize(
        model,
        k=settings.k,
        sharing=settings.sharing,
        kind=settings.kind,
        length_rule=settings.length_rule,
        n=settings.n,
        modules=settings.modules,
        generator=torch.Generator().manual_seed(0),
    )
    bank.load_state_dict(state)
    return bank


def _masked(windows: Tensor, mask_token: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Windows with mask tokens at drawn places, and the places."""
    if mask_token is None:
        return windows, None
    places = torch.rand(windows.shape, generator=generator) < MASKED
    places[:, [0, -1]] = False
    return windows.masked_fill(places, mask_token), places


def _outcome(model: nn.Module, windows: Tensor, masked: Tensor, places: Tensor | None) -> tuple[Tensor, float | None]:
    """Mean-pooled last hidden states ``(w, d)``, and the masked-language-model loss where the model has that head."""
    base = getattr(model, "base_model", model)
    embeddings, losses = [], []
    with torch.no_grad():
        for at in range(len(windows)):
            embeddings.append(base(windows[at : at + 1]).last_hidden_state.mean(dim=1))
            if places is None or base is model:
                continue
            logits = getattr(model(masked[at : at + 1]), "logits", None)
            if logits is not None and logits.ndim == 3 and bool(places[at].any()):
                chosen = logits[0, places[at]], windows[at, places[at]]
                losses.append(nn.functional.cross_entropy(*chosen, reduction="none"))
    return torch.cat(embeddings), float(torch.cat(losses).mean()) if losses else None


def _effect(exact: tuple[Tensor, float | None], found: tuple[Tensor, float | None]) -> Effect:
    cosine = float(nn.functional.cosine_similarity(exact[0], found[0]).mean())
    losses = None if exact[1] is None or found[1] is None else (exact[1], found[1])
    return Effect(cosine, losses)
