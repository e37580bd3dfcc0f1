"""Linformer in the place of a pretrained encoder's own attention, with E and F as its only new parameters.

The keys and values arrive projected by the model's own weights, so only the textbook order can run here: folding E
into the layer's input (:mod:`rankscope.models.linformer_attention`) needs the layer itself. What is saved is the
n × n map; for the rest of the speed, convert the checkpoint (:mod:`rankscope.models.conversion`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention._layout import TokenLayout, compact, token_layout
from rankscope.attention._modules import attention_modules, eager_function, kind_of, stack_of, unwrapped
from rankscope.attention.capture import module_sinks
from rankscope.attention.interface import replace_attention
from rankscope.attention.linformer import compressed_attention
from rankscope.models.projections import LinformerProjections, ProjectionPair
from rankscope.pretrained import max_positions

HOME = "rankscope_projections"
FORMAT = "rankscope projections 1"


@dataclass(frozen=True)
class Settings:
    """What the projections of a model were made with: enough to make them again.

    Args:
        n: The longest sequence.
        k: Projected length, as it was given.
        sharing: As in :class:`~rankscope.models.projections.LinformerProjections`.
        kind: As there.
        length_rule: As there.
        num_heads: Heads of a layer.
        head_dim: Channels of a head.
        modules: Paths of the replaced attention modules, in the order of the projections.
    """

    n: int
    k: int | list[int] | list[list[int]]
    sharing: str
    kind: str
    length_rule: str
    num_heads: int
    head_dim: int
    modules: list[str]


class InPlaceProjections(LinformerProjections):
    """The projections that :func:`linformerize` put into a model, as its submodule ``rankscope_projections``.

    Args:
        settings: What they are made with.
        generator: Source of the starting values; ``None`` takes PyTorch's default generator.
    """

    def __init__(self, settings: Settings, *, generator: torch.Generator | None) -> None:
        super().__init__(
            num_layers=len(settings.modules),
            num_heads=settings.num_heads,
            max_length=settings.n,
            projected_length=settings.k,
            sharing=settings.sharing,
            kind=settings.kind,
            width=settings.num_heads * settings.head_dim,
            length_rule=settings.length_rule,
            generator=generator,
        )
        self.settings = settings


def projected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pair: ProjectionPair,
    *,
    key_padding_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    r"""Attention over keys and values compressed by a pair of projections, of any kind.

    .. math:: \mathrm{softmax}(\text{scaling} \cdot Q (E K)^\top) (F V)

    Args:
        query: ``(b, h, n, head_dim)``.
        key: ``(b, h, m, head_dim)``; a data-dependent kind reads its weights off them, all heads side by side.
        value: ``(b, h, m, head_dim)``.
        pair: The projections.
        key_padding_mask: bool ``(b, m)``, True = padding.
        scaling: Factor of the logits; default ``head_dim ** -0.5``.
        dropout: Probability with which a probability is dropped.

    Returns:
        ``(b, h, n, head_dim)``; zeros for a row without a valid token.

    Example:
        >>> bank = LinformerProjections(num_layers=1, num_heads=2, max_length=6, projected_length=3,
        ...                             sharing="key_value", kind="mean", generator=None)
        >>> x = torch.ones(1, 2, 6, 4)
        >>> projected_attention(x, x, x, bank[0]).unique()
        tensor([1.])
    """
    layout = token_layout(key_padding_mask, key.shape[0], key.shape[-2])
    key, value = compact(key, layout), compact(value, layout)
    source = key.transpose(1, 2).flatten(2) if pair.E.reads_input else None
    operator = pair.E.operator(source, layout)
    keys = pair.E.compress(operator, key, layout)
    values = pair.F.compress(operator if pair.F is pair.E else pair.F.operator(source, layout), value, layout)
    output = compressed_attention(query, keys, values, pair.E.absent(layout, key.device), scaling, dropout)
    return _empty_rows_zero(output, layout)


def _empty_rows_zero(output: Tensor, layout: TokenLayout) -> Tensor:
    if layout.lengths is None:
        return output
    return output.masked_fill((layout.lengths == 0).view(-1, 1, 1, 1), 0)


def linformerize(
    model: nn.Module,
    *,
    k: int | Sequence[int] | Sequence[Sequence[int]],
    sharing: str = "headwise",
    kind: str = "learned",
    length_rule: str = "slice",
    n: int | None = None,
    modules: Iterable[str] | None = None,
    generator: torch.Generator | None,
) -> InPlaceProjections:
    r"""Put Linformer into an encoder, in place, until ``rankscope.restore(model)``.

    Each attention becomes :func:`projected_attention` of the model's own query, key and value. E and F are the only
    new parameters, a submodule of the model named ``rankscope_projections``: optimisers, ``.to()`` and state dicts
    see them. Folding cannot act here, since keys and values arrive projected. Layers with a sliding window are
    linear in n already and keep their exact attention.

    Args:
        model: An encoder whose attention calls transformers' attention interface (BERT, RoBERTa, ELECTRA,
            ModernBERT, ViT, Whisper's encoder …), or a PEFT model around one.
        k: Projected length; or one for each replaced layer; or for each layer one for each head.
        sharing: ``"none"``, ``"headwise"``, ``"key_value"`` or ``"layerwise"``.
        kind: ``"learned"``, ``"mean"``, ``"max"``, ``"convolution"``, ``"gaussian"`` or ``"dynamic"``.
        length_rule: What E and F do at n' < n: ``"slice"`` or ``"interpolate"``.
        n: The longest sequence; default what the model's positions hold.
        modules: Paths of the attentions to replace; default every self-attention over the whole sequence.
        generator: Source of the starting values; ``None`` takes PyTorch's default generator.

    Returns:
        The projections.

    Raises:
        RankscopeError: A causal or cross-attention is among the modules, attention sinks, heads that differ by
            layer, sizes that do not fit, or a model that holds replaced attention already.

    References:
        Wang et al. 2020, arXiv 2006.04768.

    Example:
        >>> from rankscope import restore
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        ...     intermediate_size=8, max_position_embeddings=16))
        >>> bank = linformerize(model, k=4, generator=torch.Generator().manual_seed(0))
        >>> bank.count, model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        (4, torch.Size([1, 3, 8]))
        >>> restore(model)
        >>> sum("rankscope" in name for name, _ in model.named_parameters())
        0
    """
    reachable = {path: module for path, module in attention_modules(model).items() if eager_function(type(module))}
    chosen = _global_layers(reachable) if modules is None else list(modules)
    for path in chosen:
        if path in reachable:
            _check_module(path, reachable[path])
    sizes = {_head_sizes(path, reachable[path]) for path in chosen if path in reachable}
    if len(sizes) > 1:
        raise RankscopeError(
            f"`model` has layers of different heads × head_dim, {sorted(sizes)}: choose layers of one size by `modules`"
        )
    length = _longest(model) if n is None else n
    entries = k if isinstance(k, int) else [entry if isinstance(entry, int) else list(entry) for entry in k]
    heads, head_dim = sizes.pop() if sizes else (1, 1)
    settings = Settings(length, entries, sharing, kind, length_rule, heads, head_dim, chosen)  # type: ignore[arg-type]
    bank = InPlaceProjections(settings, generator=generator)
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is not None:
        bank = bank.to(device=like.device, dtype=like.dtype)
    index = {id(reachable[path]): number for number, path in enumerate(chosen) if path in reachable}

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        if is_causal:
            raise RankscopeError(_causal_reason(type(module).__name__))
        pair = bank[index[id(module)]]
        return projected_attention(
            query, key, value, pair, key_padding_mask=key_padding_mask, scaling=scaling, dropout=dropout
        )

    replacement = replace_attention(model, forward, modules=chosen)
    model.add_module(HOME, bank)
    replacement.cleanup.append(lambda: delattr(model, HOME))
    return bank


def projections_of(model: nn.Module) -> InPlaceProjections:
    """The projections that :func:`linformerize` put into this very model.

    Raises:
        RankscopeError: There are none.
    """
    bank = getattr(model, HOME, None)
    if not isinstance(bank, InPlaceProjections):
        raise RankscopeError("`model` holds no Linformer projections: call linformerize(model, k=…) first")
    return bank


def save_projections(model: nn.Module, path: str | Path) -> Path:
    """Save the projections of a model, and what they were made with, as one safetensors file.

    Args:
        model: A model given to :func:`linformerize`.
        path: The file.

    Returns:
        The path.

    Raises:
        RankscopeError: The model holds none.
    """
    bank, path = projections_of(model), Path(path)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in bank.state_dict().items()}
    metadata = {"format": FORMAT, "settings": json.dumps(asdict(bank.settings))}
    save_file(tensors, path, metadata=metadata)
    return path


def load_projections(model: nn.Module, path: str | Path) -> InPlaceProjections:
    """Load a file of :func:`save_projections` into a model: its attention is replaced if it is not yet.

    Args:
        model: The model they were made for: one of :func:`linformerize` with the same settings, or one that still
            has its own attention. It may have another head, or none.
        path: The file.

    Returns:
        The projections.

    Raises:
        RankscopeError: No such file, a broken or foreign one, or settings that differ, naming each.
    """
    settings, tensors = _read(Path(path))
    known = attention_modules(model)
    settings = replace(settings, modules=_relocated(settings.modules, known))
    if getattr(model, HOME, None) is None:
        if missing := [module for module in settings.modules if module not in known]:
            raise RankscopeError(
                f"`path` {str(path)!r} is for attention modules that {type(unwrapped(model)).__name__} lacks "
                f"({missing[0]}, {len(missing)} in all): load it into the model it was saved from"
            )
        sizes = _head_sizes(settings.modules[0], known[settings.modules[0]]) if settings.modules else None
        if sizes is not None and sizes != (settings.num_heads, settings.head_dim):
            raise RankscopeError(
                f"`path` {str(path)!r} is for {settings.num_heads} heads of {settings.head_dim} channels, the model "
                f"has {sizes[0]} of {sizes[1]}: load it into the model it was saved from"
            )
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
    else:
        bank = projections_of(model)
        differing = [
            f"{field.name}: file {theirs!r}, model {ours!r}"
            for field in fields(Settings)
            if (theirs := getattr(settings, field.name)) != (ours := getattr(bank.settings, field.name))
        ]
        if differing:
            raise RankscopeError(
                f"`path` {str(path)!r} does not fit the model's projections ({'; '.join(differing)}): "
                "restore(model) and load again, which builds them as the file says"
            )
    bank.load_state_dict(tensors)
    return bank


def _relocated(paths: list[str], known: Iterable[str]) -> list[str]:
    """The paths in a model with another head, or none, where the encoder has a prefix more or less."""
    known = set(known)
    if not paths or known.issuperset(paths):
        return paths
    first = paths[0]
    for place in sorted(known):
        if place.endswith(f".{first}"):
            prefix = place.removesuffix(first)
            moved = [prefix + path for path in paths]
        elif first.endswith(f".{place}"):
            prefix = first.removesuffix(place)
            moved = [path.removeprefix(prefix) for path in paths]
        else:
            continue
        if known.issuperset(moved):
            return moved
    return paths


def _read(path: Path) -> tuple[Settings, dict[str, Tensor]]:
    if not path.is_file():
        raise RankscopeError(f"`path` {str(path)!r} is no file: give one that save_projections wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RankscopeError(f"`path` {str(path)!r} is truncated or no safetensors file: save it again") from error
    if metadata.get("format") != FORMAT:
        raise RankscopeError(
            f"`path` {str(path)!r} holds no projections ({FORMAT!r} expected, got {metadata.get('format')!r}): "
            "give a file that save_projections wrote"
        )
    return Settings(**json.loads(metadata["settings"])), tensors


def _global_layers(modules: dict[str, nn.Module]) -> list[str]:
    """Attentions over the whole sequence; where all have a window, all, so that the refusal names it."""
    whole = [path for path, module in modules.items() if not _windowed(module)]
    return whole or list(modules)


def _windowed(module: nn.Module) -> bool:
    window = getattr(module, "sliding_window", None)
    return isinstance(window, int | tuple) and window != (-1, -1)


def _check_module(path: str, module: nn.Module) -> None:
    if kind_of(path, module) == "cross":
        raise RankscopeError(
            f"`model`: {path} is cross-attention, whose keys are another sequence's: replace the encoder alone "
            "(linformerize(model.get_encoder(), …)), or name its layers by `modules`"
        )
    if stack_of(path, module) == "decoder":
        raise RankscopeError(_causal_reason(path))
    if _windowed(module):
        raise RankscopeError(
            f"`model`: {path} has a sliding window, which projections over the whole sequence can't keep: it is "
            "linear in n as it is; leave it out of `modules`"
        )
    if module_sinks(module, {}) is not None:
        raise RankscopeError(f"`model`: {path} has attention sinks, which no projected key stands for")


def _causal_reason(path: str) -> str:
    return (
        f"`model`: {path} is causal, but a projected key mixes all positions, later ones too: take an encoder, or "
        "LinformerForCausalLM, whose attention is chunked"
    )


def _head_sizes(path: str, module: nn.Module) -> tuple[int, int]:
    """Number of query heads and channels of a head."""
    config: Any = getattr(module, "config", None)
    places = [(module, "num_attention_heads"), (module, "num_heads"), (module, "n_heads")]
    places += [(config, "num_attention_heads")]
    heads = next((found for place, name in places if isinstance(found := getattr(place, name, None), int)), None)
    names = ("attention_head_size", "head_dim")
    size = next((found for name in names if isinstance(found := getattr(module, name, None), int)), None)
    if size is None and heads:
        width = getattr(config, "hidden_size", None)
        size = width // heads if isinstance(width, int) else None
    if not heads or not size:
        raise RankscopeError(f"`model`: can't tell the heads of {path} ({type(module).__name__})")
    return heads, size


def _longest(model: nn.Module) -> int:
    config: Any = getattr(unwrapped(model), "config", None)
    source = getattr(config, "max_source_positions", None)
    if isinstance(source, int):
        return source
    for name, parameter in model.named_parameters():
        # ViT's kind: one learned vector for each patch and special token, (1, n, d).
        if name.endswith("position_embeddings") and parameter.ndim == 3:
            return parameter.shape[1]
    positions = max_positions(model)
    if positions is None:
        raise RankscopeError("`n` must be given: the model's positions have no limit that could be read")
    return positions
