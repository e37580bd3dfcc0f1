"""A model's attention modules: which call transformers' attention interface, and what each of them is."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from rankscope._errors import RankscopeError, did_you_mean

CROSS = re.compile(r"cross_?att|encoder_attn|enc_?dec_?att|encoder_decoder_att", re.IGNORECASE)


def unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


_eager_functions: dict[type, Callable[..., Any] | None] = {}


def eager_function(cls: type) -> Callable[..., Any] | None:
    """The class's own eager attention: the second argument of its ``get_interface(..., eager)`` call.

    Returns:
        The function, or ``None`` when no method of the class calls the attention interface.

    Example:
        >>> from transformers.models.bert.modeling_bert import BertSelfAttention
        >>> eager_function(BertSelfAttention).__name__
        'eager_attention_forward'
    """
    if cls not in _eager_functions:
        _eager_functions[cls] = next(_named_functions(cls), None)
    return _eager_functions[cls]


def class_eager(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of a module that has just called the attention interface."""
    function = eager_function(type(module))
    if function is None:
        raise RankscopeError(f"{type(module).__name__} names no eager attention in its code: it can't be captured")
    return function


def _named_functions(cls: type) -> Iterator[Callable[..., Any]]:
    for owner in cls.__mro__:
        for method in vars(owner).values():
            function = inspect.unwrap(method) if callable(method) else None
            if not inspect.isfunction(function) or "get_interface" not in function.__code__.co_names:
                continue
            for name in function.__code__.co_names:
                if name.endswith("eager_attention_forward") and name in function.__globals__:
                    yield function.__globals__[name]


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost attention modules by path: those that call the interface, and others named Attention.

    A module that several paths share (tied layers) appears once, under its first path.
    """
    named = dict(model.named_modules())
    candidates = {path: module for path, module in named.items() if _looks_like_attention(module)}
    return {
        path: module
        for path, module in candidates.items()
        if eager_function(type(module)) is not None
        or not any(other.startswith(f"{path}.") or (path == "" and other) for other in candidates)
    }


def _looks_like_attention(module: nn.Module) -> bool:
    cls = type(module)
    return eager_function(cls) is not None or bool(re.search(r"Attention$|Attention[A-Z0-9]|Attn$", cls.__name__))


def kind_of(path: str, module: nn.Module) -> str:
    """``"cross"`` when the module's flag, class or path says so, else ``"self"``."""
    named_so = CROSS.search(path) is not None or "Cross" in type(module).__name__
    return "cross" if named_so or getattr(module, "is_cross_attention", False) is True else "self"


def stack_of(path: str, module: nn.Module) -> str:
    """``"decoder"`` for cross-attention, causal modules and those below a decoder, else ``"encoder"``."""
    for part in path.split("."):
        if CROSS.search(part):
            return "decoder"
        if "decoder" in part.lower():
            return "decoder"
        if "encoder" in part.lower():
            break
    causal = getattr(module, "is_causal", False) is True
    is_decoder = getattr(getattr(module, "config", None), "is_decoder", False) is True
    return "decoder" if causal or is_decoder or kind_of(path, module) == "cross" else "encoder"


def configurations(model: nn.Module) -> list[Any]:
    """Every distinct configuration that a module of the model, or another configuration, holds."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if id(config) in found or not hasattr(config, "_attn_implementation"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or {}:
            visit(getattr(config, name, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(found.values())


def implementation_attribute(config: Any) -> str:
    """Where the configuration holds its own implementation's name, without setting its sub-configurations'."""
    return (
        "_attn_implementation_internal" if "_attn_implementation_internal" in vars(config) else "_attn_implementation"
    )


def check_inputs(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Refuse an input that the model's forward does not name: a misspelt mask would be lost without a word.

    Raises:
        RankscopeError: Which input, with the nearest known name.
    """
    parameters = forward_parameters(model)
    named = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    if not named - {"args"}:
        return
    for name in inputs:
        if name not in named and not (name == "position_ids" and len(named) < len(parameters)):
            raise RankscopeError(
                f"`inputs` has {name!r}, which {type(unwrapped(model)).__name__}.forward does not take: "
                f"{did_you_mean(name, named)}"
            )


def forward_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of the forward of the model itself, not of a wrapper's."""
    return dict(inspect.signature(unwrapped(model).forward).parameters)
