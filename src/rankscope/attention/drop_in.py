"""Any row of the table of mechanisms in the place of a model's own attention, by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError, did_you_mean
from rankscope.attention import replacement
from rankscope.attention._contract import Mechanism
from rankscope.attention.mechanisms import MECHANISMS
from rankscope.attention.replacement import Replacement, restore

# What the model's call decides.
GIVEN = frozenset({"query", "key", "value", "key_padding_mask", "scaling", "is_causal", "dropout", "generator"})


def replace_attention(
    model: nn.Module,
    mechanism: str | Callable[..., Tensor],
    *,
    modules: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Replacement:
    """Put a mechanism in the place of a model's attention, until :func:`restore`.

    Padding reaches the mechanism through a mask function of its own; scaling and causality are the module's.

    Args:
        model: A transformers model whose attention calls the attention interface, or a PEFT model around one.
        mechanism: A row of ``MECHANISMS``, or a function as
            :func:`rankscope.attention.replacement.replace_attention` takes it.
        modules: Paths of the modules to replace; default all. The others keep the attention they had.
        generator: Source of the numbers that ``lsh`` and ``performer`` draw at each call; required for them.
        options: The mechanism's own keywords, as ``window=64`` or ``k=128``.

    Returns:
        The replacement; as a context manager it restores the model on leaving.

    Raises:
        RankscopeError: Unknown mechanism or option, a causal module and a mechanism that cannot be causal, a
            generator that is missing or has no use; in the model's forward: attention dropout, or
            something the mechanism does not take (softcap, sinks, position bias).

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     intermediate_size=8)).eval()
        >>> with replace_attention(model, "local", window=2):
        ...     model(torch.tensor([[1, 2, 3, 4, 5]])).last_hidden_state.shape
        torch.Size([1, 5, 8])
    """
    if callable(mechanism):
        if options or generator is not None:
            raise RankscopeError("`options` and `generator` belong to a mechanism given by name: bind them yourself")
        return replacement.replace_attention(model, mechanism, modules=modules)
    row = MECHANISMS[mechanism]
    own = row.parameters - GIVEN
    for name in options:
        if name not in own:
            raise RankscopeError(f"{row.name!r} has no option {name!r}: {did_you_mean(name, own)}")
    if row.random and generator is None:
        raise RankscopeError(f"{row.name!r} draws numbers: give `generator`, as torch.Generator().manual_seed(0)")
    if generator is not None and not row.random:
        raise RankscopeError(f"{row.name!r} draws no numbers: leave `generator` out")
    drawn = {"generator": generator} if row.random else {}
    replaced = replacement.replace_attention(model, _forward(row, options | drawn), modules=modules)
    named = dict(model.named_modules())
    if not row.causal and (causal := [path for path in replaced.modules if getattr(named[path], "is_causal", False)]):
        restore(model)
        raise _not_causal(row, causal[0])
    return replaced


def _not_causal(row: Mechanism, where: str) -> RankscopeError:
    able = ", ".join(sorted(name for name, other in MECHANISMS.items() if other.causal))
    return RankscopeError(f"{where} is causal, and {row.name!r} has no causal form: choose one of {able}")


def _forward(row: Mechanism, options: dict[str, Any]) -> Callable[..., Tensor]:
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
        # A single token over itself is causal too, though there is nothing to hide.
        is_causal = is_causal or (query.shape[-2] == key.shape[-2] == 1 and getattr(module, "is_causal", False))
        if is_causal and not row.causal:
            raise _not_causal(row, type(module).__name__)
        if dropout and "dropout" not in row.parameters:
            raise RankscopeError(
                f"{type(module).__name__} drops attention probabilities, which {row.name!r} does not have: set the "
                "configuration's attention dropout to 0, or call model.eval()"
            )
        causal = {"is_causal": is_causal} if row.causal else {}
        dropped = {"dropout": dropout} if dropout else {}
        return row.function(
            query, key, value, key_padding_mask=key_padding_mask, scaling=scaling, **causal, **dropped, **options
        )

    return forward
