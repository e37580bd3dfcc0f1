r"""Spectra of a Linformer: its map P̄ = softmax(Q (E K)ᵀ / √d) is n × k, so ranks are counted against k, not n.

A Linformer writes no n × n map down, and its singular values say nothing of how many tokens matter: k of them are all
there is. They say how much of the k that it was given a head uses.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention.fallback import check_weights
from rankscope.spectrum.dataset import LayerInfo
from rankscope.spectrum.heads import Head
from rankscope.spectrum.job import Place, head_spectra
from rankscope.spectrum.matrix_free import MATRIX_FREE
from rankscope.spectrum.runner import Runner
from rankscope.windows import Window

COMPRESSED = "compressed"


def is_compressed(model: nn.Module) -> bool:
    """Whether a model's maps are n × k by its configuration: an encoder with a projected length."""
    config = getattr(model, "config", None)
    return getattr(config, "projected_length", None) is not None and not getattr(config, "is_decoder", False)


def compressed_maps(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return each layer's P̄ ``(b, h, n, k)``, as the model's own forward gives it.

    Args:
        model: A Linformer.
        inputs: Keyword arguments of its forward.

    Raises:
        RankscopeError: It returns none, or something that is no map.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs: Any = model(**inputs, output_attentions=True)
    finally:
        model.train(was_training)
    maps = getattr(outputs, "attentions", None)
    if not maps:
        raise RankscopeError(f"{type(model).__name__} returns no attentions, so its n × k maps can't be measured")
    return tuple(check_weights(P, f"layer {number}") for number, P in enumerate(maps))


class CompressedRunner(Runner):
    """A runner whose heads are the n × k maps that a Linformer's forward returns."""

    def inspect(self, window: Window) -> dict[str, object]:
        """Find the layers and check that their maps are n × k and stochastic.

        Raises:
            RankscopeError: The plan needs n × n maps, or a chosen layer or head does not exist.
        """
        if self.plan.method == MATRIX_FREE:
            raise RankscopeError("`method` matrix-free is for n × n maps; a Linformer's n × k maps are small: use auto")
        wrong = [name for name in self.nulls if name == "gaussian_moments"]
        if wrong:
            raise RankscopeError("null 'gaussian_moments' needs each head's query and key: leave it out of --nulls")
        inputs, _ = self.inputs([window])
        maps = compressed_maps(self.pretrained.model, inputs)
        self.layers, chosen = [], self.chosen_layers
        for number, P in enumerate(maps):
            self.layers.append(LayerInfo(number, f"layer.{number}", 0, "self", "encoder", COMPRESSED, P.shape[1]))
        heads = max(layer.heads for layer in self.layers)
        for name, numbers, count in (("layers", chosen, len(maps)), ("heads", self.chosen_heads, heads)):
            outside = [number for number in numbers or [] if not 0 <= number < count]
            if outside:
                raise RankscopeError(f"`{name}` has {outside}, but {self.pretrained.name!r} has 0 … {count - 1}")
        wanted = range(len(maps)) if chosen is None else sorted(set(chosen))
        self.position = {number: place for place, number in enumerate(wanted)}
        self.layers = [self.layers[number] for number in wanted]
        lengths = [P.shape[-1] for P in maps]
        return {
            "reached": [COMPRESSED],
            "modules": [layer.module for layer in self.layers],
            "model_layers": len(maps),
            "forward": "the model's own",
            "map": "the n × k map softmax(Q (E K)^T / sqrt(d)) of a Linformer",
            "projected_lengths": lengths,
            "rank_relative_to": "k, the projected length of each layer",
            "self_check": {"passed": True, "checked": "rows of the n × k maps are finite, non-negative and sum to 1"},
        }

    def submit(
        self,
        model: nn.Module,
        windows: list[Window],
        names: Callable[[Window], tuple[str, ...]],
        deviations: dict[Place, float] | None,
    ) -> list[tuple[Place, Future]]:
        """Run forwards and hand each layer's heads to the pool."""
        started: list[tuple[Place, Future]] = []
        for at in range(0, len(windows), self.batch_size):
            batch = windows[at : at + self.batch_size]
            inputs, valid = self.inputs(batch)
            for layer, P in enumerate(compressed_maps(model, inputs)):
                if layer not in self.position:
                    continue
                plan = self.plan
                for row, window in enumerate(batch):
                    tokens = valid[row]
                    for head in range(P.shape[1]) if self.chosen_heads is None else self.chosen_heads:
                        weights = P[row, head] if tokens is None else P[row, head][tokens]
                        place = Place(window.index, layer, head)
                        known = None if deviations is None else deviations.get(place)
                        job = Head(None, None, 1.0, None, None, None, weights.clone(), self.head_width())
                        started.append((place, self.pool.submit(head_spectra, job, place, names(window), plan, known)))
        return started


def compressed_index(model: nn.Module) -> int:
    """The largest projected length of a Linformer: how many singular values its curves are kept at."""
    config: Any = model.config
    return int(np.max(np.concatenate([np.ravel(k) for k in np.atleast_1d(np.array(config.projected_length, object))])))
