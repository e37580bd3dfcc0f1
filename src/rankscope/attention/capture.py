"""Capture of attention as a model's forward runs, through transformers' attention interface.

Our function is registered over the key ``"eager"`` and ``"eager"`` set on every configuration: masks are then made
as for eager attention and model files that branch on the name do what they do for eager. A name of our own would be
silently wrong for such files. The output still comes from the class's own eager function.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rankscope._errors import RankscopeError
from rankscope.attention._call import AttentionCall, masked_entries
from rankscope.attention._modules import (
    class_eager,
    configurations,
    eager_function,
    implementation_attribute,
    kind_of,
    stack_of,
)

Sink = Callable[[AttentionCall], object]
Observer = Callable[[AttentionCall, Callable[[], Tensor | None]], object]

OWN_PREFIX = "rankscope_"
# Keywords of attention calls that leave P as it is under eager attention: dropout is off in eval mode, causality
# and windows are in the mask already, the rest is bookkeeping that models hand down.
HARMLESS = frozenset(
    {"dropout", "is_causal", "sliding_window", "deterministic", "position_ids", "cache_position", "use_cache"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", "logits_to_keep"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "token_type_ids", "labels"}
)
USED = frozenset({"scaling", "softcap", "position_bias", "s_aux", "sinks"})

_lock = threading.Lock()


@dataclass
class CaptureSession:
    """What a running capture knows.

    Args:
        calls: How often each module has called so far in the running forward, by path.
        total: Calls since the start.
    """

    calls: Counter[str] = field(default_factory=Counter)
    total: int = 0


@contextmanager
def capture(model: nn.Module, sink: Sink) -> Iterator[CaptureSession]:
    """Hand every attention call of the model's forwards to ``sink``; restore the model at the end.

    The model is in eval mode meanwhile. Nothing is kept: a call's tensors live until the sink lets go of them and
    the layer is done. Modules that never call the interface are not seen; :func:`run_captured` knows what to do
    about them.

    Args:
        model: A transformers model, or a PEFT model around one; any attention implementation.
        sink: Called with an :class:`AttentionCall` as each attention module runs, in order. A tensor that it
            returns, ``(b, h, n, d_v)``, is the output that the layer goes on with instead of its own.

    Yields:
        The session, which counts calls.

    Raises:
        RankscopeError: Another capture is running, a model holds replaced attention, or a module passes a keyword
            whose effect on P is not known.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        ...     intermediate_size=8))
        >>> with capture(model, lambda call: print(call.module, tuple(call.context_map().shape))):
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        encoder.layer.0.attention.self (1, 2, 3, 3)
        encoder.layer.1.attention.self (1, 2, 3, 3)
    """
    with observe(model, lambda call, _: sink(call)) as session:
        yield session


@contextmanager
def observe(model: nn.Module, observer: Observer) -> Iterator[CaptureSession]:
    """:func:`capture` whose observer also gets a function that returns eager's own weights in float32."""
    session = CaptureSession()
    paths = {module: path for path, module in model.named_modules()}
    with eager_attention(model):
        mapping = AttentionInterface._global_mapping
        original: Any = mapping.get("eager")

        def forward(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            **kw: Any,
        ) -> Any:
            eager = original or class_eager(module)
            path = paths.get(module)
            if path is not None:
                call = make_call(path, session.calls[path], module, query, key, value, attention_mask, kw)
                session.calls[path] += 1
                session.total += 1
                output = observer(call, lambda: eager_weights(eager, module, call, kw))
                del call
                if isinstance(output, Tensor):
                    return output.transpose(1, 2).contiguous(), None
            return eager(module, query, key, value, attention_mask, **kw)

        # A forward starts anew whenever the outermost module is entered.
        hook = model.register_forward_pre_hook(lambda *_: session.calls.clear())
        try:
            mapping["eager"] = forward
            yield session
        finally:
            hook.remove()
            if original is None:
                mapping.pop("eager", None)
            else:
                mapping["eager"] = original


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Run the model with eager attention, without a cache and in eval mode; one at a time in a process."""
    if not _lock.acquire(blocking=False):
        raise RankscopeError(
            "another capture is running in this process (the attention interface is shared by all models): "
            "finish it first, or capture in another process"
        )
    undo: list[Callable[[], None]] = []
    try:
        for config in configurations(model):
            if str(config._attn_implementation).startswith(OWN_PREFIX):
                raise RankscopeError(
                    "`model` holds replaced attention, which has no n × n map: call restore(model) before capturing"
                )
            _set(undo, config, implementation_attribute(config), "eager")
        for module in model.modules():
            if module.training:
                _set(undo, module, "training", False)
        yield
    finally:
        for step in reversed(undo):
            step()
        _lock.release()


def _set(undo: list[Callable[[], None]], owner: Any, name: str, value: object) -> None:
    old = getattr(owner, name)
    undo.append(lambda: setattr(owner, name, old))
    setattr(owner, name, value)


def make_call(
    path: str,
    count: int,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keywords: dict[str, Any],
) -> AttentionCall:
    """Turn one call of the attention interface into an :class:`AttentionCall`.

    Raises:
        RankscopeError: A keyword or a mask whose effect on P is not known.
    """
    for name, given in keywords.items():
        if given is not None and name not in HARMLESS and name not in USED:
            raise RankscopeError(
                f"{path} ({type(module).__name__}) passes {name!r} to its attention, whose effect on P is not known: "
                "this model can't be captured"
            )
    if mask is not None and not mask.is_floating_point():
        raise RankscopeError(
            f"{path}: the attention mask must be additive floats, got {mask.dtype}: pass the tokenizer's 2-D mask"
        )
    return AttentionCall(
        module=path,
        call=count,
        kind=kind_of(path, module),
        stack=stack_of(path, module),
        reached="routed",
        query=query,
        key=key,
        value=value,
        scaling=_scaling(path, keywords.get("scaling"), query),
        mask=mask,
        softcap=keywords.get("softcap"),
        position_bias=keywords.get("position_bias"),
        sinks=_sinks(path, module, keywords, query.shape[1]),
    )


def _scaling(path: str, scaling: Any, query: Tensor) -> float:
    if scaling is None:
        return query.shape[-1] ** -0.5
    if isinstance(scaling, Tensor) and scaling.numel() != 1:
        raise RankscopeError(f"{path}: scaling differs by head or token, {tuple(scaling.shape)}: it can't be captured")
    return float(scaling)


def _sinks(path: str, module: nn.Module, keywords: dict[str, Any], heads: int) -> Tensor | None:
    sinks = module_sinks(module, keywords)
    if sinks is None:
        return None
    if sinks.numel() != heads:
        raise RankscopeError(f"{path}: sinks must be one logit a head ({heads}), got {tuple(sinks.shape)}")
    return sinks.detach().reshape(heads)


def module_sinks(module: nn.Module, keywords: dict[str, Any]) -> Tensor | None:
    """Attention sinks that a call names, or that the module's own eager function reads from the module."""
    for name in ("s_aux", "sinks"):
        if keywords.get(name) is not None:
            return keywords[name]
    code = getattr(eager_function(type(module)), "__code__", None)
    return getattr(module, "sinks", None) if code is not None and "sinks" in code.co_names else None


def eager_weights(
    eager: Callable[..., Any], module: nn.Module, call: AttentionCall, keywords: dict[str, Any]
) -> Tensor | None:
    """P by the model's own eager function on the same query and key, taken to float32 first.

    In half precision eager rounds P; from float32 tensors it is the float32 formula, written by the model's authors.
    """
    assert call.query is not None
    assert call.key is not None
    assert call.value is not None
    mask = call.mask
    if mask is not None and mask.dtype != torch.float32:
        mask = mask.float().masked_fill(masked_entries(mask), torch.finfo(torch.float32).min)
    floats = {
        name: given.float() if isinstance(given, Tensor) and given.is_floating_point() else given
        for name, given in keywords.items()
    }
    weights = eager(module, call.query.float(), call.key.float(), call.value.float(), mask, **floats)[1]
    return weights if isinstance(weights, Tensor) and weights.ndim == 4 else None
