r"""Linformers of other libraries: their state dicts, told apart by names and shapes, as our layers.

========================  ===================================================  =======================================
layout                    a name only it has                                   what differs from ours
========================  ===================================================  =======================================
fairseq                   ``…self_attn.compress_k.weight``, ``…q_proj.weight``  E meets the input before the weights
(Jargon: the same names   ``…attention.compress_k.weight``                      the same; its layers are pre-norm
in ``attention``)
fairseq in transformers   ``…attention.self.compress_k.weight``, ``…query…``    the same
lucidrains                ``…proj_k``, ``…to_q.weight``                         E stored ``(n, k)``, no q, k, v biases
tatp22                    ``…heads.0.E.weight``, ``…to_q.0.weight``             one map a head; E and F have biases
mlpen                     ``….mha.attn.E``, ``….mha.W_q.weight``                one E a head, F = E, all layers share it
========================  ===================================================  =======================================

Where E meets the input first, a bias is added after compressing, E X W + 1 bᵀ, and not (E 1) bᵀ. On the keys it adds
the same to all logits of a query, which softmax ignores; on the values, as the rows of P sum to one, it is a bias of
the output. So such a layer is ours with zero key and value biases and b_o + W_o b_v: exactly, but for dropout on P.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention._layout import TokenLayout
from rankscope.models.linformer_attention import LinformerSelfAttention
from rankscope.models.projections import Learned

State = Mapping[str, Tensor]


class Biased(Learned):
    """A learned matrix with a number for each compressed place, added to every channel: linformer-pytorch's E.

    No row of the table of kinds: it is here to hold what was trained elsewhere.
    """

    folds = False

    def __init__(self, like: Learned) -> None:
        super().__init__(like.shape)
        self.bias = nn.Parameter(self.weight.new_empty(self.weight.shape[:-1]))

    def compress(self, operator: Tensor | None, x: Tensor, layout: TokenLayout) -> Tensor:
        """Multiply by the matrix, then add."""
        return super().compress(operator, x, layout) + self.bias[..., None].to(x.dtype)


@dataclass(frozen=True)
class AttentionState:
    """One attention layer's weights in our sense.

    Args:
        layout: Whose they were.
        num_heads: Number of heads.
        query: Weight ``(d, d)`` and bias ``(d,)``; so ``key``, ``value``, ``output``.
        key: See ``query``.
        value: See ``query``.
        output: See ``query``.
        E: ``(k, n)``, or ``(heads, k, n)``.
        F: The same; ``E`` itself where keys and values share it.
        E_bias: ``(k,)`` or ``(heads, k)``, where E has one.
        F_bias: So for F.
    """

    layout: str
    num_heads: int
    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor]
    E: Tensor
    F: Tensor
    E_bias: Tensor | None = None
    F_bias: Tensor | None = None

    @property
    def sharing(self) -> str:
        """``"none"``, ``"headwise"`` or ``"key_value"``."""
        if self.E.ndim == 3:
            return "none"
        return "key_value" if self.E is self.F else "headwise"

    def state_dict(self) -> dict[str, Tensor]:
        """The state dict of :class:`~rankscope.models.linformer_attention.LinformerSelfAttention`."""
        state = {}
        for name in ("query", "key", "value", "output"):
            state[f"{name}.weight"], state[f"{name}.bias"] = getattr(self, name)
        sides = {"E": (self.E, self.E_bias), "F": (self.F, self.F_bias)}
        for name in ("E",) if self.sharing == "key_value" else ("E", "F"):
            weight, bias = sides[name]
            state[f"projections.layers.0.{name}.weight"] = weight
            if bias is not None:
                state[f"projections.layers.0.{name}.bias"] = bias
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def module(self) -> LinformerSelfAttention:
        """The layer itself, in the dtype of the weights, with no dropout."""
        with torch.device("meta"):
            layer = LinformerSelfAttention(
                self.query[0].shape[1],
                self.num_heads,
                max_length=self.E.shape[-1],
                projected_length=self.E.shape[-2],
                sharing=self.sharing,
                generator=None,
            )
            if self.E_bias is not None:
                sides = layer.projections.layers[0]
                assert isinstance(sides, nn.ModuleDict)
                for name, side in list(sides.items()):
                    assert isinstance(side, Learned)
                    sides[name] = Biased(side)
        layer.load_state_dict(self.state_dict(), assign=True)
        return layer


class _Names:
    """The tensors below a prefix, by the rest of their names; what nothing asked for is an error."""

    def __init__(self, state: State, layout: str, prefix: str) -> None:
        self.layout, self.prefix, self._state = layout, prefix, state
        self._left = {name for name in state if name.startswith(prefix)}

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._state

    def __getitem__(self, name: str) -> Tensor:
        full = self.prefix + name
        if full not in self._state:
            raise RankscopeError(f"`state` has the layout {self.layout!r}, but lacks {full!r}: give the whole of it")
        self._left.discard(full)
        return self._state[full]

    def get(self, name: str, default: Tensor) -> Tensor:
        """Take a tensor that may be missing."""
        return default if self.prefix + name not in self._state else self[name]

    def linear(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and bias of a linear map; zeros where it has none."""
        weight = self[f"{name}.weight"]
        return weight, self.get(f"{name}.bias", weight.new_zeros(weight.shape[0]))

    def ignore(self, *names: str) -> None:
        """Name tensors that their library stores and does not use."""
        self._left -= {self.prefix + name for name in names}

    def finish(self) -> None:
        """Refuse what was not asked for: it would be lost."""
        if self._left:
            raise RankscopeError(
                f"`state` has the layout {self.layout!r} and, beside it, {_some(self._left)}, which has no place in "
                "a Linformer layer here"
            )


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")


def _heads(asked: int | None, found: int | None, width: int, layout: str) -> int:
    if asked is not None and found is not None and asked != found:
        raise RankscopeError(f"`num_heads` is {asked}, but `state` ({layout}) has {found} heads")
    heads = found or asked
    if heads is None:
        raise RankscopeError(f"`num_heads` must be given: a state dict of {layout} does not say it")
    if heads < 1 or width % heads:
        raise RankscopeError(f"`num_heads` must divide the width {width}, got {heads}")
    return heads


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def _compressed_input(
    names: _Names, asked: int | None, maps: tuple[str, str, str], output: tuple[Tensor, Tensor]
) -> AttentionState:
    """Read a layer where E meets the input: biases of keys and values move (see the module's text)."""
    query, key, value = (names.linear(name) for name in maps)
    E = names["compress_k.weight"]
    F = names.get("compress_v.weight", E)
    # Their layer shared by all others has a bias that their forward never adds.
    names.ignore("compress_k.bias", "compress_v.bias")
    names.finish()
    zero = torch.zeros_like(key[1])
    moved = output[0], output[1] + output[0] @ value[1]
    heads = _heads(asked, None, query[0].shape[0], names.layout)
    F = E if _same(E, F) else F
    return AttentionState(names.layout, heads, query, (key[0], zero), (value[0], zero), moved, E, F)


def _fairseq(state: State, prefix: str, asked: int | None) -> AttentionState:
    names = _Names(state, "fairseq", prefix)
    return _compressed_input(names, asked, ("q_proj", "k_proj", "v_proj"), names.linear("out_proj"))


def _fairseq_in_transformers(state: State, prefix: str, asked: int | None) -> AttentionState:
    layout = "fairseq in transformers"
    output = _Names(state, layout, prefix.removesuffix("self.") + "output.").linear("dense")
    return _compressed_input(_Names(state, layout, prefix), asked, ("query", "key", "value"), output)


def _lucidrains(state: State, prefix: str, asked: int | None) -> AttentionState:
    names = _Names(state, "lucidrains", prefix)
    query, key, output = names.linear("to_q"), names.linear("to_k"), names.linear("to_out")
    E = names["proj_k"].T
    if "to_v.weight" in names:
        value, F = names.linear("to_v"), names["proj_v"].T
    else:
        value, F = key, E
    names.finish()
    width = query[0].shape[0]
    single = key[0].shape[0] < width
    heads = _heads(asked, width // key[0].shape[0] if single else None, width, names.layout)
    if single:
        key, value = ((weight.repeat(heads, 1), bias.repeat(heads)) for weight, bias in (key, value))
    return AttentionState(names.layout, heads, query, key, value, output, E, F)


def _tatp22(state: State, prefix: str, asked: int | None) -> AttentionState:
    names = _Names(state, "tatp22", prefix)
    heads = 0
    while f"to_q.{heads}.weight" in names:
        heads += 1
    query, key, value = (
        _joined([names.linear(f"{name}.{head}") for head in range(heads)]) for name in ("to_q", "to_k", "to_v")
    )
    heads = _heads(asked, heads, query[0].shape[0], names.layout)
    if "w_o.weight" in names:
        output = names.linear("w_o")
    else:
        (first, a), (second, b) = names.linear("w_o_1"), names.linear("w_o_2")
        output = second @ first, second @ a + b
    sides = {name: [names.linear(f"heads.{head}.{name}") for head in range(heads)] for name in ("E", "F")}
    names.finish()
    for name, each in sides.items():
        if each[0][0].ndim != 2:
            raise RankscopeError(
                f"`state` has the layout 'tatp22' with method 'convolution' ({prefix}heads.0.{name}.weight is "
                f"{tuple(each[0][0].shape)}): its kernels mix channels, which no projection of the sequence does"
            )
    # Modules that heads share are stored under each of them.
    shared = all(_same(each[0][part], one[part]) for each in sides.values() for one in each for part in (0, 1))
    (E, E_bias), (F, F_bias) = (each[0] if shared else _stacked(each) for each in sides.values())
    if shared and _same(E, F) and _same(E_bias, F_bias):
        F, F_bias = E, E_bias
    biases = (E_bias, F_bias) if bool(E_bias.any()) or bool(F_bias.any()) else (None, None)
    return AttentionState(names.layout, heads, query, key, value, output, E, F, *biases)


def _joined(maps: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([weight for weight, _ in maps]), torch.cat([bias for _, bias in maps])


def _stacked(maps: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([weight for weight, _ in maps]), torch.stack([bias for _, bias in maps])


def _mlpen(state: State, prefix: str, asked: int | None) -> AttentionState:
    names = _Names(state, "mlpen", prefix)
    query, key, value, output = (names.linear(name) for name in ("W_q", "W_k", "W_v", "ff"))
    E = names["attn.E"]
    names.finish()
    heads = _heads(asked, E.shape[0], query[0].shape[0], names.layout)
    return AttentionState(names.layout, heads, query, key, value, output, E, E)


@dataclass(frozen=True)
class Layout:
    """How one library names a layer: ``marks`` are two names below the layer's prefix."""

    marks: tuple[str, str]
    read: Callable[[State, str, int | None], AttentionState]


LAYOUTS = {
    "fairseq": Layout(("compress_k.weight", "q_proj.weight"), _fairseq),
    "fairseq in transformers": Layout(("compress_k.weight", "query.weight"), _fairseq_in_transformers),
    "lucidrains": Layout(("proj_k", "to_q.weight"), _lucidrains),
    "tatp22": Layout(("heads.0.E.weight", "to_q.0.weight"), _tatp22),
    "mlpen": Layout(("attn.E", "W_q.weight"), _mlpen),
}


def layers_of(state: State) -> tuple[str, list[str]]:
    """Tell whose layout a state dict has, and the prefixes of its attention layers, in order.

    Raises:
        RankscopeError: No known layout, or several; the message lists what was seen.
    """
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise RankscopeError(
                f"`state` must map names to tensors, got a {type(tensor).__name__} under {name!r}: give the part of "
                "the checkpoint that holds the tensors (often state['model'])"
            )
    found = {}
    for layout, row in LAYOUTS.items():
        first, second = row.marks
        prefixes = [name.removesuffix(first) for name in state if re.search(rf"(^|\.){re.escape(first)}$", name)]
        if prefixes := [prefix for prefix in prefixes if prefix + second in state]:
            found[layout] = sorted(prefixes, key=lambda prefix: [int(x) for x in re.findall(r"\d+", prefix)])
    if len(found) > 1:
        seen = "; ".join(f"{layout}: {_some(prefixes)}" for layout, prefixes in found.items())
        raise RankscopeError(f"`state` mixes {len(found)} layouts ({seen}): give one model's")
    if not found:
        shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in state.items()]
        hint = (
            "; it looks like tatp22's method 'no_params', which does not store E and F"
            if any(name.endswith("to_q.0.weight") for name in state)
            else ""
        )
        raise RankscopeError(
            f"`state` has none of the Linformer layouts {', '.join(LAYOUTS)}{hint}. Seen: {_some(shapes) or 'nothing'}"
        )
    return found.popitem()


def read_attention(state: State, *, num_heads: int | None = None) -> list[AttentionState]:
    """Read the attention layers of another library's Linformer.

    Padding apart, ``.module()`` of each gives what that library's layer gives in evaluation; where a batch has
    padding, only mlpen's leaves it out, as ours does.

    Args:
        state: Its state dict, or any part that holds whole attention layers.
        num_heads: Number of heads, where the tensors do not say it (fairseq, and lucidrains without
            ``one_kv_head``).

    Returns:
        The layers, in order.

    Raises:
        RankscopeError: An unknown or mixed layout, missing or unknown tensors, heads × head_dim that is not the
            width, E and F that are not stored or mix channels.

    Example:
        >>> state = {f"{name}_proj.{part}": torch.zeros((8, 8) if part == "weight" else 8)
        ...          for name in ("q", "k", "v", "out") for part in ("weight", "bias")}
        >>> state["compress_k.weight"] = torch.zeros(4, 16)
        >>> (layer,) = read_attention(state, num_heads=2)
        >>> layer.layout, layer.sharing, layer.module()(torch.zeros(1, 10, 8)).shape
        ('fairseq', 'key_value', torch.Size([1, 10, 8]))
    """
    layout, prefixes = layers_of(state)
    layers = [LAYOUTS[layout].read(state, prefix, num_heads) for prefix in prefixes]
    for prefix, layer in zip(prefixes, layers, strict=True):
        inner, width = layer.query[0].shape
        if inner != width:
            raise RankscopeError(
                f"`state`: {prefix or 'the layer'} has heads × head_dim = {inner} at width {width}, and our layer "
                "has no head_dim of its own"
            )
    return layers
