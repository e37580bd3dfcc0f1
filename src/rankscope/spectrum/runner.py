"""Windows through the model, heads to the pool, spectra into parts."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention.interface import AttentionCall, find_route, run_captured, self_check
from rankscope.linalg.workers import SpectrumPool
from rankscope.pretrained import Pretrained, fresh
from rankscope.spectrum.accumulate import Moments
from rankscope.spectrum.dataset import TRAINED, LayerInfo
from rankscope.spectrum.heads import NO_MASK, MaskRule, fused_output, heads_of
from rankscope.spectrum.job import HeadSpectrum, Place, Plan, head_spectra
from rankscope.spectrum.matrix_free import MATRIX_FREE, mask_rule
from rankscope.spectrum.nulls import NULLS, QUERY_AND_KEY_NEEDED, generator_for
from rankscope.spectrum.parts import Part, add_notes, window_hash
from rankscope.spectrum.sample import drawn
from rankscope.windows import Window, random_token_window

# Tokens of the first window that the route and the self-check look at.
CHECKED_TOKENS = 128
# Relative RMS between the model's outputs by fused and by its own eager attention: rounding, through all layers.
FUSED_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}
# By baseline, window and place.
Found = dict[str, dict[int, dict[Place, HeadSpectrum]]]


class Runner:
    """A model ready to be measured: its route, its layers, its nulls' models and the worker pool.

    Args:
        pretrained: Model and tokenizer.
        nulls: Names of :data:`rankscope.spectrum.nulls.NULLS`.
        null_windows: Nulls are measured on windows below this number.
        plan: Numerics.
        layers: Attentions to measure, by number or ``random:K``, or ``None``.
        heads: Heads to measure in each, by number or ``random:K`` (the same in every layer), or ``None``.
        workers: Decompositions at a time.
        batch_size: Windows a forward.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        nulls: tuple[str, ...],
        null_windows: int,
        plan: Plan,
        layers: Sequence[int] | str | None,
        heads: Sequence[int] | str | None,
        workers: int,
        batch_size: int,
    ) -> None:
        self.pretrained = pretrained
        self.nulls = nulls
        self.null_windows = null_windows
        self.plan = plan
        self.batch_size = batch_size
        self.wanted = {"layers": layers, "heads": heads}
        self.drawn: dict[str, list[int]] = {}
        self.chosen_layers = None if isinstance(layers, str) else layers
        self.chosen_heads = None if isinstance(heads, str) else heads
        self.layers: list[LayerInfo] = []
        # A few heads a worker: enough to bridge a layer, few enough to hold little of it.
        self.pool = SpectrumPool(workers, limit=6 * workers)
        self.untrained: nn.Module | None = None
        self.known_rule: tuple[Tensor | None, MaskRule] | None = None

    def __enter__(self) -> "Runner":
        self.pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.__exit__(kind, error, trace)

    def inspect(self, window: Window) -> dict[str, object]:
        """Find out how the model is reached and what attentions it has, and run the self-check.

        Returns:
            Facts for the result's attributes.

        Raises:
            RankscopeError: The model can't be measured, or a chosen layer or head does not exist.
        """
        # A part of a long window tells as much, and eager attention can write its map down.
        short = replace(window, input_ids=window.input_ids[:CHECKED_TOKENS])
        inputs, _ = self.inputs([short])
        self.route = find_route(self.pretrained.model, inputs)
        if self.route.reached == "fallback" and "gaussian_moments" in self.nulls:
            raise RankscopeError(QUERY_AND_KEY_NEEDED)
        met: list[LayerInfo] = []

        def note(call: AttentionCall) -> None:
            seen = call.weights if call.query is None else call.query
            assert seen is not None
            met.append(LayerInfo(len(met), call.module, call.call, call.kind, call.stack, call.reached, seen.shape[1]))

        own = run_captured(self.pretrained.model, inputs, note, route=self.route)
        self.fused = self.route.reached == "routed" and self.same_output(inputs, own)
        if self.plan.method == MATRIX_FREE and not self.fused:
            raise RankscopeError(
                "`method` matrix-free runs the model by fused attention, and this model's own attention gives another "
                "output (a soft cap, sinks, or weights that it does not hand out): use a dense method at a shorter n"
            )
        self.draw(len(met), max((layer.heads for layer in met), default=0))
        wanted = range(len(met)) if self.chosen_layers is None else self.chosen_layers
        for name, numbers, count in (
            ("layers", wanted, len(met)),
            ("heads", self.chosen_heads or [], max((layer.heads for layer in met), default=0)),
        ):
            wrong = [number for number in numbers if not 0 <= number < count]
            if wrong:
                raise RankscopeError(f"`{name}` has {wrong}, but {self.pretrained.name!r} has 0 … {count - 1}")
        self.position = {number: place for place, number in enumerate(sorted(set(wanted)))}
        self.layers = [met[number] for number in self.position]
        return {
            "reached": sorted({layer.reached for layer in self.layers}),
            "modules": [layer.module for layer in self.layers],
            "model_layers": len(met),
            "forward": "fused attention" if self.fused else "the model's own eager attention",
            "self_check": self_check(self.pretrained.model, inputs, self.route),
        }

    def draw(self, layers: int, heads: int) -> None:
        """Draw the samples that were asked for, by the run's seed, of so many layers and heads."""
        for name, count in (("layers", layers), ("heads", heads)):
            wanted = self.wanted[name]
            if isinstance(wanted, str):
                self.drawn[name] = drawn(wanted, name, count, generator_for(self.plan.seed, name, 0, 0, 0))
        self.chosen_layers = self.drawn.get("layers", self.chosen_layers)
        self.chosen_heads = self.drawn.get("heads", self.chosen_heads)

    def same_output(self, inputs: dict[str, Tensor], own: Any) -> bool:
        """Whether the model puts out the same when fused attention stands in for its own, as it does for most.

        Then no layer of a forward writes P out; only the worker that decomposes a head does, for that head.
        """
        fused = run_captured(self.pretrained.model, inputs, fused_output, route=self.route)
        expected, given = own[0].double(), fused[0].double()
        allowed = FUSED_DIFFERENCE[own[0].dtype]
        return bool((given - expected).norm() <= allowed * expected.norm())

    def inputs(self, windows: list[Window]) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Batch windows: the model's inputs, and each row's real tokens (``None`` when all are)."""
        longest = max(window.length for window in windows)
        pad = self.pretrained.tokenizer.pad_token_id or 0
        ids = torch.full((len(windows), longest), pad)
        mask = torch.zeros_like(ids)
        for row, window in enumerate(windows):
            ids[row, : window.length] = torch.as_tensor(window.input_ids)
            mask[row, : window.length] = 1
        valid = [None if window.length == longest else mask[row].bool() for row, window in enumerate(windows)]
        device = next(self.pretrained.model.parameters()).device
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        config: Any = self.pretrained.model.config
        if config.is_encoder_decoder:
            # The decoder reads the same window one place to the right, as in teacher forcing.
            start = config.decoder_start_token_id
            inputs["decoder_input_ids"] = inputs["input_ids"].roll(1, dims=1)
            inputs["decoder_input_ids"][:, 0] = pad if start is None else start
            inputs["decoder_attention_mask"] = inputs["attention_mask"]
        return inputs, valid

    def measure_part(self, windows: list[Window]) -> Part:
        """Measure a few windows and their nulls."""
        with_nulls = [window for window in windows if window.index < self.null_windows]
        found: Found = {}
        left_out: dict[int, str] = {}
        started = self.submit(self.pretrained.model, windows, lambda w: (TRAINED, *self.nulls_of("trained", w)), None)
        deviations = self.collect(started, found, left_out)
        for forward in ("untrained", "random_tokens"):
            if with_nulls and self.nulls_of(forward, with_nulls[0]):
                model, fed = self.null_forward(forward, with_nulls)
                started = self.submit(model, fed, partial(self.nulls_of, forward), deviations)
                self.collect(started, found, left_out)
        return self.assemble(windows, found, left_out)

    def nulls_of(self, forward: str, window: Window) -> tuple[str, ...]:
        """The run's nulls that start from a forward and are wanted in this window."""
        if window.index >= self.null_windows:
            return ()
        return tuple(name for name in self.nulls if NULLS[name].forward == forward)

    def null_forward(self, forward: str, windows: list[Window]) -> tuple[nn.Module, list[Window]]:
        """The model and the windows of a null's own forward."""
        if forward == "untrained":
            if self.untrained is None:
                self.untrained = fresh(self.pretrained, seed=self.plan.seed)
            return self.untrained, windows
        tokenizer = self.pretrained.tokenizer
        return self.pretrained.model, [
            random_token_window(w, tokenizer, generator_for(self.plan.seed, forward, w.index, 0, 0)) for w in windows
        ]

    def submit(
        self,
        model: nn.Module,
        windows: list[Window],
        names: Callable[[Window], tuple[str, ...]],
        deviations: dict[Place, float] | None,
    ) -> list[tuple[Place, Future]]:
        """Run forwards and hand each head to the pool as its layer runs; the pool holds back the forward."""
        started: list[tuple[Place, Future]] = []
        for at in range(0, len(windows), self.batch_size):
            batch = windows[at : at + self.batch_size]
            inputs, valid = self.inputs(batch)
            layer = -1

            def sink(
                call: AttentionCall, batch: list[Window] = batch, valid: list[Tensor | None] = valid
            ) -> Tensor | None:
                nonlocal layer
                layer += 1
                rule = self.rules(call) if self.plan.method == MATRIX_FREE else None
                for row, window in enumerate(batch if layer in self.position else []):
                    taken = heads_of(
                        call, row, valid[row], self.chosen_heads, fallback_width=self.head_width(), rule=rule
                    )
                    for number, head in taken:
                        place = Place(window.index, layer, number)
                        known = None if deviations is None else deviations.get(place)
                        job = self.pool.submit(head_spectra, head, place, names(window), self.plan, known)
                        started.append((place, job))
                return fused_output(call, rule) if self.fused else None

            run_captured(model, inputs, sink, route=self.route)
        return started

    def rules(self, call: AttentionCall) -> MaskRule:
        """A call's mask as a rule; layers share masks, so each shape and place in memory is read once a forward."""
        if call.mask is None and call.position_bias is None:
            return NO_MASK
        known = self.known_rule
        if known is None or known[0] is not call.mask or call.position_bias is not None:
            bias = call.bias()
            assert bias is not None
            known = (call.mask, mask_rule(bias[0, 0]))
            self.known_rule = known
        return known[1]

    def head_width(self) -> int:
        """The head dimension by the model's configuration, for heads of which only weights are seen."""
        config: Any = self.pretrained.model.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def collect(
        self, started: list[tuple[Place, Future]], found: Found, left_out: dict[int, str]
    ) -> dict[Place, float]:
        """Wait for the pool, sort results by baseline and window, and return the heads' deviations."""
        deviations = {}
        for place, job in started:
            result = job.result()
            if isinstance(result, str):
                left_out.setdefault(place.window, result)
                continue
            deviations[place], spectra = result
            for name, spectrum in spectra.items():
                found.setdefault(name, {}).setdefault(place.window, {})[place] = spectrum
        return deviations

    def assemble(self, windows: list[Window], found: Found, left_out: dict[int, str]) -> Part:
        """Turn per-head results into the arrays of a part."""
        shape = (len(self.layers), max(layer.heads for layer in self.layers))
        part = Part(
            start=windows[0].index,
            stop=windows[-1].index + 1,
            scalars={},
            curves={},
            measured={},
            documents=[window.document for window in windows],
            hashes=[window_hash(window) for window in windows],
            left_out=left_out,
            notes={},
        )
        for baseline, by_window in found.items():
            kept = sorted(set(by_window) - set(left_out))
            part.measured[baseline] = kept
            scalars: dict[str, np.ndarray] = {}
            curves: dict[str, Moments] = {}
            for row, window in enumerate(kept):
                sheets: dict[str, np.ndarray] = {}
                for place, spectrum in by_window[window].items():
                    at = (self.position[place.layer], place.head)
                    for name, number in spectrum.scalars.items():
                        scalars.setdefault(name, np.full((len(kept), *shape), np.nan))[row][at] = number
                    for name, curve in spectrum.curves.items():
                        sheets.setdefault(name, np.full((*shape, len(curve)), np.nan))[at] = curve
                    add_notes(part.notes, spectrum.notes)
                for name, sheet in sheets.items():
                    curves[name] = curves.get(name, Moments()).merge(Moments.of(sheet))
            if kept:
                part.scalars[baseline], part.curves[baseline] = scalars, curves
        return part
