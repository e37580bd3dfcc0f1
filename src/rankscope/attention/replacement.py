"""Another attention in the place of a model's own, through transformers' attention interface, and its undoing.

A uniquely named attention function is registered together with a mask function: without one transformers hands
``None`` for a mask without a word. The mask function never builds an n × n mask; it returns the two-dimensional
padding together with a note of how the model wanted its mask, from which layers that keep exact attention get theirs.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rankscope._errors import RankscopeError, did_you_mean
from rankscope._masks import padding_from_attention_mask
from rankscope.attention._modules import (
    attention_modules,
    class_eager,
    configurations,
    eager_function,
    implementation_attribute,
    unwrapped,
)
from rankscope.attention.capture import HARMLESS, OWN_PREFIX, module_sinks

# The mask functions of transformers whose meaning is known: name, whether causal.
MASK_PARTS = {
    "causal_mask_function": True,
    "bidirectional_mask_function": False,
    "sliding_window_overlay.<locals>.inner_mask": None,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": None,
}
NOTE = "_rankscope_mask"
MASKS = ("padding", "none")

_numbers = itertools.count()
_replacements: "WeakKeyDictionary[nn.Module, Replacement]" = WeakKeyDictionary()


@dataclass(frozen=True)
class MaskNote:
    """How the model asked for a mask.

    Args:
        causal: Whether keys after the query are shut.
        window: The sliding window if it is shorter than the keys, else ``None``.
        padding: bool ``(b, m)``, True = padding; ``None`` where nothing is padded.
        arguments: What the mask function was called with.
    """

    causal: bool
    window: int | None
    padding: Tensor | None
    arguments: dict[str, Any]

    def dense(self, implementation: str) -> Tensor | None:
        """The mask as the implementation of that name takes it."""
        make: Any = AttentionMaskInterface._global_mapping[implementation]
        return make(**self.arguments)


@dataclass(eq=False)
class Replacement:
    """What :func:`replace_attention` did to a model; a context manager that undoes it on leaving.

    Args:
        model: The model.
        name: The attention implementation its configurations name meanwhile.
        modules: Paths of the modules whose attention is replaced.
        held: Each configuration with the attribute and the value to put back.
        cleanup: What else is to be done on undoing, by whoever added more to the model.
    """

    model: nn.Module
    name: str
    modules: tuple[str, ...]
    held: list[tuple[Any, str, Any]]
    cleanup: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        """Put the model's own attention back and forget the registered functions."""
        for config, attribute, value in self.held:
            setattr(config, attribute, value)
        AttentionInterface._global_mapping.pop(self.name, None)
        AttentionMaskInterface._global_mapping.pop(self.name, None)
        for step in self.cleanup:
            step()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _replacements.get(self.model) is self:
            restore(self.model)


def replace_attention(
    model: nn.Module, forward: Callable[..., Tensor], *, mask: str = "padding", modules: Iterable[str] | None = None
) -> Replacement:
    """Let ``forward`` do the attention of a model's modules, in place, until :func:`restore`.

    ``forward(module, query, key, value, *, key_padding_mask, is_causal, scaling, dropout)`` receives query
    ``(b, h, n, d)``, key and value ``(b, h, m, …)`` repeated to the query's heads, the padding as bool ``(b, m)``
    with True = padding (``None`` where nothing is padded), and returns ``(b, h, n, d_v)``. What else an attention may
    need (``softcap``, ``sinks``, ``position_bias``, ``sliding_window``) it receives if its signature names it; if it
    does not and the model needs it, the forward is refused.

    Args:
        model: A transformers model whose attention calls the attention interface, or a PEFT model around one.
        forward: The attention.
        mask: ``"padding"``; or ``"none"`` for a ``forward`` that takes no ``key_padding_mask``: padded batches are
            then refused.
        modules: Paths of the modules to replace, as :func:`~rankscope.attention.route.inspect_model` lists them;
            default all. The others keep the attention they had.

    Returns:
        The replacement; as a context manager it restores the model on leaving.

    Raises:
        RankscopeError: Replaced already, no module that calls the interface, an unknown path or ``mask``; in the
            model's forward: something that ``forward`` does not take.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     intermediate_size=8))
        >>> def uniform(module, query, key, value, *, key_padding_mask, is_causal, scaling, dropout):
        ...     return value.mean(dim=-2, keepdim=True).expand_as(query)
        >>> with replace_attention(model, uniform) as replacement:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> replacement.modules
        ('encoder.layer.0.attention.self',)
    """
    if mask not in MASKS:
        raise RankscopeError(f"`mask` has no {mask!r}: {did_you_mean(mask, MASKS)}")
    base = unwrapped(model)
    if any(str(config._attn_implementation).startswith(OWN_PREFIX) for config in configurations(base)):
        raise RankscopeError("`model` holds replaced attention already: call restore(model) first")
    paths = {path: module for path, module in attention_modules(model).items() if eager_function(type(module))}
    if not paths:
        raise RankscopeError(
            f"{type(base).__name__} has no attention that calls transformers' attention interface: "
            "its attention can't be replaced"
        )
    chosen = tuple(paths) if modules is None else tuple(modules)
    for path in chosen:
        if path not in paths:
            raise RankscopeError(f"`modules` has {path!r}: {did_you_mean(path, paths)}")
    name = f"{OWN_PREFIX}{next(_numbers)}"
    held = [(config, implementation_attribute(config), config._attn_implementation) for config in configurations(base)]
    before = {id(config): value for config, _, value in held}
    selected = {id(paths[path]) for path in chosen}
    known = {id(module) for module in paths.values()}
    named = frozenset(inspect.signature(forward).parameters)
    takes_padding = mask == "padding"

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kw: Any
    ) -> tuple[Tensor, Tensor | None]:
        if id(module) not in known:
            raise RankscopeError(
                f"a {type(module).__name__} of another model uses the replaced attention (a copy?): "
                "copy before replacing, or replace in the copy too"
            )
        if id(module) not in selected:
            return _own_attention(before[id(module.config)], module, query, key, value, attention_mask, kw)
        given = _arguments(module, query, key, attention_mask, kw, named, takes_padding)
        groups = query.shape[1] // key.shape[1]
        key, value = (x if groups == 1 else x.repeat_interleave(groups, dim=1) for x in (key, value))
        return forward(module, query, key, value, **given).transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, note_mask)
    for config, attribute, _ in held:
        setattr(config, attribute, name)
    replacement = Replacement(model, name, chosen, held)
    _replacements[model] = replacement
    return replacement


def restore(model: nn.Module) -> None:
    """Undo :func:`replace_attention`.

    Raises:
        RankscopeError: Nothing was replaced in this model.
    """
    replacement = _replacements.pop(model, None)
    if replacement is None:
        raise RankscopeError(
            "`model` has no replaced attention: restore the very model that was given to replace_attention"
        )
    replacement.undo()


def note_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor:
    """Transformers' mask function for replaced attention: bool ``(b, m)``, True = keep, carrying a :class:`MaskNote`.

    Raises:
        RankscopeError: A mask that is neither causal nor bidirectional with padding and a window.
    """
    causal = _is_causal_function(mask_function)
    if attention_mask is None:
        keep = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        keep = attention_mask[:, kv_offset : kv_offset + kv_length].to(device=device, dtype=torch.bool)
        keep = nn.functional.pad(keep, (0, kv_length - keep.shape[1]))
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "local_size": local_size,
        "device": device,
        **options,
    }
    window = local_size if local_size is not None and local_size < kv_length else None
    padding = None if bool(keep.all()) else padding_from_attention_mask(keep)
    mask = keep.clone()
    setattr(mask, NOTE, MaskNote(causal, window, padding, arguments))
    return mask


def _is_causal_function(function: Any) -> bool:
    causal = False
    for part in _parts(function):
        if part not in MASK_PARTS:
            raise RankscopeError(
                f"the model asks for a mask that replaced attention does not know ({part}): packed sequences, prefixes "
                "and overlays can't be replaced; pass a 2-D attention_mask and no restarting position_ids"
            )
        causal = causal or MASK_PARTS[part] is True
    return causal


def _parts(function: Any) -> list[str]:
    if function.__qualname__ != "and_masks.<locals>.and_mask":
        return [function.__qualname__]
    cells = inspect.getclosurevars(function).nonlocals["mask_functions"]
    return [part for inner in cells for part in _parts(inner)]


def _own_attention(
    implementation: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kw: Any
) -> Any:
    note = getattr(mask, NOTE, None)
    if note is not None:
        mask = note.dense(implementation)
    own = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, class_eager(module))
    return own(module, query, key, value, mask, **kw)


def _arguments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    keywords: dict[str, Any],
    named: frozenset[str],
    takes_padding: bool,
) -> dict[str, Any]:
    """What the replacing function is called with, or a refusal that names what it lacks."""
    owner = type(module).__name__
    note: MaskNote | None = getattr(mask, NOTE, None)
    if mask is not None and note is None:
        raise RankscopeError(
            f"{owner} has a mask of its own, {tuple(mask.shape)}, which replaced attention can't read: "
            "pass a 2-D attention_mask"
        )
    own = keywords.get("is_causal")
    causal = note.causal if note is not None else bool(getattr(module, "is_causal", False) if own is None else own)
    n, m = query.shape[-2], key.shape[-2]
    causal = causal and n > 1
    if causal and n != m:
        raise RankscopeError(f"{owner}: causal attention of {n} queries over {m} keys: pass use_cache=False")
    given: dict[str, Any] = {"is_causal": causal, "dropout": keywords.get("dropout") or 0.0}
    scaling = keywords.get("scaling")
    given["scaling"] = query.shape[-1] ** -0.5 if scaling is None else scaling
    padding = None if note is None else note.padding
    if takes_padding:
        given["key_padding_mask"] = padding
    elif padding is not None:
        raise RankscopeError("`mask` is 'none', but the batch is padded: the replacing attention takes no padding")
    needed = {
        "sinks": module_sinks(module, keywords),
        "sliding_window": None if note is None else note.window,
        **{name: x for name, x in keywords.items() if name not in HARMLESS | {"scaling", "sinks", "s_aux"}},
    }
    needed = {name: x for name, x in needed.items() if x is not None}
    if missing := [repr(name) for name in needed if name not in named]:
        raise RankscopeError(f"{owner} needs {', '.join(missing)}, which the replacing attention does not take")
    return given | needed
