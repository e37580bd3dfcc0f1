"""How a model's attention is reached: by the interface, by its own weights, or not at all, and the run by that way."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention._call import AttentionCall
from rankscope.attention._modules import (
    attention_modules,
    check_inputs,
    eager_function,
    forward_parameters,
    kind_of,
    stack_of,
    unwrapped,
)
from rankscope.attention.capture import Sink, capture, eager_attention, observe
from rankscope.attention.fallback import (
    check_weights,
    fallback_call,
    no_map_reason,
    returned_attentions,
    streamed,
)

# P against the model's own eager function on the same float32 tensors; more is another formula.
SAME_FORMULA = 1e-4


@dataclass(frozen=True)
class AttentionModule:
    """One attention module of a model and how it is reached.

    Args:
        module: Dotted path.
        class_name: The module's class.
        kind: ``"self"`` or ``"cross"``.
        stack: ``"encoder"`` or ``"decoder"``.
        reached: ``"routed"``, ``"fallback"`` or ``"refused"``.
        reason: Why it is refused, or what the fallback is; ``""`` when routed.
    """

    module: str
    class_name: str
    kind: str
    stack: str
    reached: str
    reason: str = ""


@dataclass(frozen=True)
class Route:
    """How a model's attentions are reached, found by one forward and good for all later ones.

    Args:
        reached: ``"routed"`` or ``"fallback"``.
        modules: The model's attention modules, each with how it is reached.
        places: By fallback: where each module's output holds its weights; empty when they are taken from the
            model's outputs at the end.
    """

    reached: str
    modules: tuple[AttentionModule, ...]
    places: tuple[tuple[str, int], ...] = ()


def inspect_model(model: nn.Module, inputs: dict[str, Any] | None = None) -> list[AttentionModule]:
    """List the model's attention modules and how each is reached.

    Args:
        model: A transformers model, or a PEFT model around one.
        inputs: One batch. With it the forward tells how each module is reached; without, the code of its class.

    Returns:
        The modules in the model's order. By the class alone a fallback is a hope: the weights are checked when
        they come.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=8))
        >>> [(m.module, m.kind, m.stack, m.reached) for m in inspect_model(model)]
        [('h.0.attn', 'self', 'decoder', 'routed')]
    """
    if inputs is not None:
        return list(find_route(model, inputs).modules)
    refused = no_map_reason(model)
    found = []
    for path, module in attention_modules(model).items():
        routed = eager_function(type(module)) is not None and not refused
        reached = "refused" if refused else "routed" if routed else "fallback"
        reason = refused or ("" if routed else "does not call the attention interface: the model's own weights")
        found.append(_described(path, module, reached, reason))
    return found


def _described(path: str, module: nn.Module, reached: str, reason: str = "") -> AttentionModule:
    return AttentionModule(path, type(module).__name__, kind_of(path, module), stack_of(path, module), reached, reason)


def find_route(model: nn.Module, inputs: dict[str, Any]) -> Route:
    """Find out, by one forward (two or three where the interface is not called), how the model is reached.

    Every attention module that runs must call the interface as often as it runs, and the map made from query and
    key must be the one that the model's own eager function makes.

    Args:
        model: A transformers model, or a PEFT model around one.
        inputs: Keyword arguments of its forward, one batch.

    Returns:
        The route, to pass to :func:`run_captured`.

    Raises:
        RankscopeError: An input the forward does not take, or a model that can be reached neither way.
    """
    if reason := no_map_reason(model):
        raise RankscopeError(f"{type(unwrapped(model)).__name__} can't be measured: {reason}")
    check_inputs(model, inputs)
    modules = attention_modules(model)
    ran: Counter[str] = Counter()
    called: Counter[str] = Counter()

    def compare(call: AttentionCall, own: Callable[[], Tensor | None]) -> None:
        called[call.module] += 1
        difference = map_difference(call, own())
        if difference > SAME_FORMULA:
            raise RankscopeError(
                f"{call.module}: P differs from the model's own eager weights by {difference:.2g}: "
                "its attention has a term that is not known, so it can't be measured"
            )

    with _counting(modules, ran), observe(model, compare):
        run_forward(model, inputs)
    missed = {path for path in ran if called[path] != ran[path]}
    listed = [_described(path, module, "routed") for path, module in modules.items() if path in ran]
    if called and not missed:
        return Route("routed", tuple(listed))
    try:
        route = _fallback_route(model, inputs, {path: modules[path] for path in ran}, ran)
    except RankscopeError as error:
        # A hybrid model: its softmax layers call the interface, others (a pooling head, linear attention) have no map.
        if called and all(called[path] == 0 for path in missed):
            reason = f"never calls the attention interface, and by its weights: {error}"
            return Route(
                "routed",
                tuple(
                    replace(item, reached="refused", reason=reason) if item.module in missed else item
                    for item in listed
                ),
            )
        raise RankscopeError(
            f"{type(unwrapped(model)).__name__} can't be measured: it does not call the attention interface for "
            f"{len(missed) or 'any'} of {len(modules)} attention modules, and by its weights: {error}"
        ) from None
    return route


@contextmanager
def _counting(modules: dict[str, nn.Module], ran: Counter[str]) -> Any:
    def counter(path: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            ran[path] += 1

        return count

    handles = [module.register_forward_pre_hook(counter(path)) for path, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fallback_route(
    model: nn.Module, inputs: dict[str, Any], modules: dict[str, nn.Module], ran: Counter[str]
) -> Route:
    outputs: dict[str, Any] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[path] = output

        return hook

    with eager_attention(model):
        handles = [module.register_forward_hook(keep(path)) for path, module in modules.items()]
        try:
            result = run_forward(model, inputs, output_attentions=True)
        finally:
            for handle in handles:
                handle.remove()
    found = returned_attentions(result)
    if not found:
        raise RankscopeError("the model returns no attentions")
    for number, (kind, _, weights) in enumerate(found):
        check_weights(weights, f"attention {number}")
        if kind == "self" and weights.shape[-2] != weights.shape[-1]:
            n, m = weights.shape[-2:]
            raise RankscopeError(
                f"attention {number} is {n} × {m}: a band or pooled tokens, not a self-attention's map"
            )
    if modules and len(found) != sum(ran.values()):
        raise RankscopeError(f"{sum(ran.values())} attentions ran, but the model returns {len(found)}")
    reason = "does not call the attention interface: the model's own weights"
    listed = tuple(_described(path, module, "fallback", reason) for path, module in modules.items())
    places = {}
    for path, output in outputs.items():
        for place, element in enumerate(output if isinstance(output, tuple) else ()):
            if any(element is weights for _, _, weights in found):
                places[path] = place
    whole = len(places) == len(found)
    return Route("fallback", listed, tuple(places.items()) if whole else ())


def run_captured(model: nn.Module, inputs: dict[str, Any], sink: Sink, *, route: Route | None = None) -> Any:
    """Run one forward, without gradients or cache, and hand each attention to ``sink`` as it runs.

    Args:
        model: A transformers model, or a PEFT model around one.
        inputs: Keyword arguments of its forward.
        sink: Called with an :class:`AttentionCall` for each attention, in the order they run.
        route: What :func:`find_route` found; without it, it is found first, which costs further forwards.

    Returns:
        The model's outputs. By fallback they hold no attentions.

    Raises:
        RankscopeError: As :func:`find_route`.

    Example:
        >>> from transformers import MPNetConfig, MPNetModel
        >>> model = MPNetModel(MPNetConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     intermediate_size=8))
        >>> ids = torch.tensor([[0, 4, 5, 2]])
        >>> _ = run_captured(model, {"input_ids": ids}, lambda call: print(call.module, call.reached))
        encoder.layer.0.attention.attn fallback
    """
    route = find_route(model, inputs) if route is None else route
    check_inputs(model, inputs)
    if route.reached == "routed":
        with capture(model, sink) as session:
            outputs = run_forward(model, inputs)
        if session.total == 0:
            raise RankscopeError("`route` says routed, but the model never called the attention interface")
        return outputs
    return _run_fallback(model, inputs, sink, route)


def _run_fallback(model: nn.Module, inputs: dict[str, Any], sink: Sink, route: Route) -> Any:
    named = dict(model.named_modules())
    counts: Counter[str] = Counter()

    def deliver(path: str, weights: Tensor, kind: str = "self", stack: str = "") -> None:
        sink(fallback_call(path, counts[path], named.get(path), kind, stack, weights))
        counts[path] += 1

    with ExitStack() as stack:
        stack.enter_context(eager_attention(model))
        if route.places:
            stack.enter_context(streamed(model, dict(route.places), deliver))
        outputs = run_forward(model, inputs, output_attentions=True)
    if not route.places:
        found = returned_attentions(outputs)
        paths = [item.module for item in route.modules]
        paths = paths if len(paths) == len(found) else [f"attentions.{number}" for number in range(len(found))]
        for path, (kind, side, weights) in zip(paths, found, strict=True):
            deliver(path, weights, kind, side)
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        if getattr(outputs, name, None) is not None:
            setattr(outputs, name, None)
    return outputs


def run_forward(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
    """One forward without gradients and without a cache, whose presence would change masks."""
    parameters = forward_parameters(model)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "use_cache" in parameters:
        options["use_cache"] = False
    if options.get("output_attentions") and not takes_any and "output_attentions" not in parameters:
        raise RankscopeError("the model's forward takes no output_attentions")
    if takes_any or "return_dict" in parameters:
        options["return_dict"] = True
    with torch.no_grad():
        return model(**{**inputs, **options})


def map_difference(call: AttentionCall, own: Tensor | None) -> float:
    """Largest difference between P and the model's own eager weights; 0 where it returns none.

    With sinks some models return rows already scaled, others not: rows are then compared divided by their sums.
    """
    if own is None:
        return 0.0
    P = call.context_map()
    if P.shape != own.shape:
        return float("inf")
    if call.sinks is not None:
        P, own = (x / x.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) for x in (P, own))
    return float((P - own).abs().max())
