r"""Rank collapse of token representations with depth, as Dong and others measure it, and P's own rank beside it.

The statement is about the tokens X: attention layers alone, without skips and feed-forward parts, bring them near one
common row,

.. math:: \frac{\|X - \mathbf 1 \bar x^\top\|_{1,\infty}}{\|X\|_{1,\infty}}, \qquad
          \|A\|_{1,\infty} = \sqrt{\|A\|_1 \|A\|_\infty}.

It says nothing of P's rank, which is counted here of the same forwards. A model's own layers are run, in its own
order or one layer again and again, the discrete twin of the flow in :mod:`rankscope.theory.clusters`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.linalg.decompose import singular_values
from rankscope.linalg.rank import effective_rank, energy_rank


@dataclass(frozen=True)
class Parts:
    """Which parts of a layer run beside attention.

    Args:
        skip: Both residual connections.
        mlp: The feed-forward part.
        norm: Layer normalisation, where the layer has it.
    """

    skip: bool
    mlp: bool
    norm: bool = True


#: Dong and others' four networks, and attention without its normalisation.
VARIANTS: Registry[Parts] = Registry(
    "variant",
    {
        "attention without norm": Parts(skip=False, mlp=False, norm=False),
        "attention": Parts(skip=False, mlp=False),
        "attention, mlp": Parts(skip=False, mlp=True),
        "attention, skip": Parts(skip=True, mlp=False),
        "whole": Parts(skip=True, mlp=True),
    },
)


@dataclass(frozen=True)
class Depth:
    """What happens along a run of layers.

    Args:
        residual: Of the tokens before the first layer and after each, ``(layers + 1, b)``.
        effective_rank: Of P (entropy of σ), ``(layers, b, heads)``.
        energy_rank_90: Of P (90 % of σ²), ``(layers, b, heads)``.
        tokens: After the last layer, ``(b, n, width)``.
    """

    residual: Float[Tensor, "layers+1 b"]
    effective_rank: Float[Tensor, "layers b heads"]
    energy_rank_90: Float[Tensor, "layers b heads"]
    tokens: Float[Tensor, "b n width"]


def relative_residual(X: Float[Tensor, "*lead n width"]) -> Float[Tensor, "*lead"]:
    r"""How far tokens are from one common row, :math:`\|X - \mathbf 1 \bar x^\top\|_{1,\infty} / \|X\|_{1,\infty}`.

    The row is the mean over tokens, as in the authors' experiments; their theorem takes the nearest row.

    Args:
        X: Tokens.

    Returns:
        0 where all tokens are equal; NaN where all are zero.

    References:
        Dong, Cordonnier and Loukas 2021, arXiv 2103.03404.

    Example:
        >>> relative_residual(torch.tensor([[1.0, 2.0], [1.0, 2.0]])).item()
        0.0
        >>> relative_residual(torch.tensor([[1.0], [-1.0]])).item()
        1.0
    """
    return _mixed_norm(X - X.mean(-2, keepdim=True)) / _mixed_norm(X)


@torch.no_grad()
def along_depth(
    model: nn.Module, input_ids: Int[Tensor, "b n"], parts: Parts, *, order: Sequence[int] | None = None
) -> Depth:
    """Run a BERT-like encoder's layers with or without their parts, and look at tokens and P after each.

    Args:
        model: An encoder whose layers are ``encoder.layer[i]`` with BERT's names, in eval mode.
        input_ids: Whole windows, without padding.
        parts: What runs beside attention.
        order: Numbers of the layers to run, one may come again and again; the model's own order if ``None``.

    Returns:
        Residuals, ranks and the last tokens.

    Raises:
        RankscopeError: The model has other layers, or ``order`` names one that is not there.
    """
    layers = _layers(model)
    order = range(len(layers)) if order is None else order
    wrong = [i for i in order if not 0 <= i < len(layers)]
    if wrong:
        raise RankscopeError(f"`order` names layer {wrong[0]}, the model has layers 0 to {len(layers) - 1}")
    was_training = model.training
    model.eval()
    embeddings: Any = model.embeddings
    X = embeddings(input_ids)
    residuals, effective, energy = [relative_residual(X)], [], []
    for i in order:
        X, P = _run_layer(layers[i], X, parts)
        sigma = singular_values(P)
        residuals.append(relative_residual(X))
        effective.append(effective_rank(sigma))
        energy.append(energy_rank(sigma, 0.9))
    model.train(was_training)
    return Depth(torch.stack(residuals), torch.stack(effective), torch.stack(energy), X)


def _run_layer(layer: Any, X: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    attention = layer.attention.self
    heads = attention.num_attention_heads
    query, key, value = (
        part(X).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (attention.query, attention.key, attention.value)
    )
    P = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    out = layer.attention.output
    X = _finish(out.dense((P @ value).transpose(1, 2).flatten(2)), X, out.LayerNorm, parts)
    if parts.mlp:
        inner = layer.intermediate.intermediate_act_fn(layer.intermediate.dense(X))
        X = _finish(layer.output.dense(inner), X, layer.output.LayerNorm, parts)
    return X, P


def _finish(new: Tensor, old: Tensor, norm: nn.Module, parts: Parts) -> Tensor:
    new = new + old if parts.skip else new
    return norm(new) if parts.norm else new


def _layers(model: Any) -> Any:
    try:
        first = model.encoder.layer[0]
        for part in (first.attention.self.query, first.attention.output.LayerNorm, first.intermediate.dense):
            assert isinstance(part, nn.Module)
        assert first.output.LayerNorm is not None
        assert getattr(model.config, "position_embedding_type", "absolute") == "absolute"
    except (AttributeError, AssertionError, IndexError, TypeError):
        raise RankscopeError(
            f"`model` must be a BERT-like encoder (encoder.layer[i].attention.self.query …), got "
            f"{type(model).__name__}: take the base model of BERT, RoBERTa or ELECTRA, or minilm"
        ) from None
    return model.encoder.layer


def _mixed_norm(X: Tensor) -> Tensor:
    size = X.abs()
    return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()
