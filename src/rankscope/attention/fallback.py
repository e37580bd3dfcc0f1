"""Attention by the model's own eager weights, for models that never call the attention interface.

The weights are what the model returns for ``output_attentions``. Some return something else under that name
(logits, a band), so they are accepted only as a stochastic map: four dimensions, finite, non-negative, rows that
sum to one.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention._call import AttentionCall
from rankscope.attention._modules import kind_of, stack_of, unwrapped

# By how much a row may miss 1: the sum of n rounded probabilities.
ROW_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# What models return as attentions that is no full map, though some of it would pass for one.
NO_MAP = {
    "squeezebert": "it returns logits as attentions",
    "prophetnet": "it returns logits as attentions",
    "xlm-prophetnet": "it returns logits as attentions",
    "longformer": "it returns a band of its attention, not a map",
    "led": "its encoder returns a band of its attention, not a map",
    "funnel": "it pools the tokens between layers",
    "yoso": "its attention is a sampled kernel, not a softmax",
    "rwkv": "it has no attention",
    "reformer": "its attention is hashed or chunked",
    "fnet": "it mixes tokens by a Fourier transform and has no attention",
    "mamba": "it is a state-space model and has no attention",
    "mamba2": "it is a state-space model and has no attention",
}


def no_map_reason(model: nn.Module) -> str:
    """Why the kind of model has no map to measure, or ``""``."""
    config = getattr(unwrapped(model), "config", None)
    if getattr(config, "attention_type", None) == "block_sparse":
        return "its block-sparse attention draws blocks at random: load it with attention_type='original_full'"
    return NO_MAP.get(getattr(config, "model_type", ""), "")


def check_weights(weights: Any, place: str) -> Tensor:
    """Return the weights if they are a context map ``(b, h, n, m)``.

    Raises:
        RankscopeError: Not four-dimensional, not finite, negative, or rows that do not sum to one.

    Example:
        >>> check_weights(-torch.ones(1, 1, 2, 2), "layer 0")
        Traceback (most recent call last):
            ...
        rankscope._errors.RankscopeError: layer 0: the model's attentions are logits, some negative: no map
    """
    if not isinstance(weights, Tensor) or weights.ndim != 4:
        came = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise RankscopeError(f"{place}: the model's attentions must be (batch, heads, n, m), got {came}: no map")
    if not bool(weights.isfinite().all()):
        raise RankscopeError(f"{place}: the model's attentions are not finite: check its weights and its dtype")
    if bool((weights < 0).any()):
        raise RankscopeError(f"{place}: the model's attentions are logits, some negative: no map")
    sums = weights.sum(dim=-1, dtype=torch.float32)
    if bool(((sums - 1).abs() > ROW_TOLERANCE.get(weights.dtype, 1e-4)).any()):
        raise RankscopeError(
            f"{place}: rows of the model's attentions sum to {sums.min():.4g} … {sums.max():.4g}, not to 1: "
            "it can't be measured"
        )
    return weights


def returned_attentions(outputs: Any) -> list[tuple[str, str, Tensor]]:
    """Kind, stack and weights of each attention in a model's outputs, in the order they ran.

    Encoder first, then of each decoder layer the self- and the cross-attention. A stack without a name is
    ``""``: encoder or decoder is told by the weights.
    """

    def field(name: str) -> tuple[Any, ...]:
        return tuple(weights for weights in getattr(outputs, name, None) or () if weights is not None)

    encoder, decoder, plain, cross = (field(f"{name}attentions") for name in ("encoder_", "decoder_", "", "cross_"))
    found = [("self", "encoder", weights) for weights in encoder]
    own = [("self", "decoder", weights) for weights in decoder] or [("self", "", weights) for weights in plain]
    for number in range(max(len(own), len(cross))):
        found += own[number : number + 1]
        found += [("cross", "decoder", weights) for weights in cross[number : number + 1]]
    return found


def is_causal(weights: Tensor) -> bool:
    """Whether no row looks past its own place."""
    n, m = weights.shape[-2:]
    return n == m and n > 1 and not bool(weights.triu(1).any())


def fallback_call(path: str, count: int, module: nn.Module | None, kind: str, stack: str, P: Tensor) -> AttentionCall:
    """An :class:`AttentionCall` that holds the model's own weights."""
    P = check_weights(P, path)
    if not stack:
        stack = "decoder" if is_causal(P) or (module is not None and stack_of(path, module) == "decoder") else "encoder"
    if module is not None and kind_of(path, module) == "cross":
        kind, stack = "cross", "decoder"
    return AttentionCall(path, count, kind, stack, reached="fallback", weights=P)


@contextmanager
def streamed(model: nn.Module, places: dict[str, int], deliver: Callable[[str, Tensor], None]) -> Any:
    """Hand out each attention module's weights as it returns and put an empty tensor in their place.

    So no more than one layer's weights are alive, though the model collects what its layers return.

    Args:
        model: The model.
        places: For each attention module's path the place of the weights in the tuple it returns.
        deliver: Called with the path and the weights.
    """
    named = dict(model.named_modules())

    def hook(path: str, place: int) -> Callable[..., Any]:
        def take(_module: nn.Module, _args: Any, output: Any) -> Any:
            weights = output[place]
            deliver(path, weights)
            empty = weights.new_empty(0)
            return (*output[:place], empty, *output[place + 1 :])

        return take

    handles = [named[path].register_forward_hook(hook(path, place), prepend=True) for path, place in places.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
