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


def run_compressed(model: nn.Module, inputs: dict[str, Tensor], sink: Callable[[str, Tensor], None]) -> None:
    """Run one forward and hand each layer's P̄ to ``sink`` as the layer runs.

    A layer that has such a map says it by a method ``compressed_map``, of its forward's own arguments.

    Args:
        model: A Linformer; it is in eval mode meanwhile.
        inputs: Keyword arguments of its forward.
        sink: Called with the module's path and P̄ ``(b, h, n, k)``.

    Raises:
        RankscopeError: No layer has such a map, or one's rows are not stochastic.
    """
    met = 0

    def observe(path: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            nonlocal met
            met += 1
            sink(path, check_weights(module.compressed_map(*args, **keywords), path))

        return hook

    handles = [
        module.register_forward_pre_hook(observe(path), with_kwargs=True)
        for path, module in model.named_modules()
        if hasattr(module, "compressed_map")
    ]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    if not met:
        raise RankscopeError(
            f"{type(model).__name__} has a projected length, but no layer that tells its n × k map: can't be measured"
        )


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
        found: list[LayerInfo] = []
        lengths: list[int] = []

        def note(path: str, P: Tensor) -> None:
            found.append(LayerInfo(len(found), path, 0, "self", "encoder", COMPRESSED, P.shape[1]))
            lengths.append(P.shape[-1])

        run_compressed(self.pretrained.model, inputs, note)
        heads = max(layer.heads for layer in found)
        self.draw(len(found), heads)
        chosen = self.chosen_layers
        for name, numbers, count in (("layers", chosen, len(found)), ("heads", self.chosen_heads, heads)):
            outside = [number for number in numbers or [] if not 0 <= number < count]
            if outside:
                raise RankscopeError(f"`{name}` has {outside}, but {self.pretrained.name!r} has 0 … {count - 1}")
        wanted = range(len(found)) if chosen is None else sorted(set(chosen))
        self.position = {number: place for place, number in enumerate(wanted)}
        self.layers = [found[number] for number in wanted]
        return {
            "reached": [COMPRESSED],
            "modules": [layer.module for layer in self.layers],
            "model_layers": len(found),
            "forward": "the model's own",
            "map": "the n × k map softmax(Q (E K)^T / sqrt(d)) of a Linformer",
            "projected_lengths": [lengths[number] for number in wanted],
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
            layer = -1

            def sink(_: str, P: Tensor, batch: list[Window] = batch, valid: list[Tensor | None] = valid) -> None:
                nonlocal layer
                layer += 1
                for row, window in enumerate(batch if layer in self.position else []):
                    tokens = valid[row]
                    for number in range(P.shape[1]) if self.chosen_heads is None else self.chosen_heads:
                        weights = P[row, number] if tokens is None else P[row, number][tokens]
                        place = Place(window.index, layer, number)
                        known = None if deviations is None else deviations.get(place)
                        head = Head(None, None, 1.0, None, None, None, weights.clone(), self.head_width())
                        job = self.pool.submit(head_spectra, head, place, names(window), self.plan, known)
                        started.append((place, job))

            run_compressed(model, inputs, sink)
        return started


def compressed_index(model: nn.Module) -> int:
    """The largest projected length of a Linformer: how many singular values its curves are kept at."""
    config: Any = model.config
    return int(np.max(np.concatenate([np.ravel(k) for k in np.atleast_1d(np.array(config.projected_length, object))])))
