"""The one signature of every attention mechanism, and the table that tests and benchmarks read.

A mechanism is a function ::

    mechanism(query, key, value, *, key_padding_mask=None, scaling=None, is_causal=False, ...) -> output

with ``query (b, h, n, head_dim)``, ``key`` and ``value (b, h, m, head_dim)``, bool ``key_padding_mask (b, m)``
(True = padding) and ``output (b, h, n, head_dim)``. ``scaling`` defaults to ``head_dim ** -0.5``. A mechanism
that cannot be causal has no ``is_causal`` in its signature: what it cannot do is refused, not ignored. Its own
knobs (``k``, ``window``, ``rounds``, …) are further keywords with defaults; where numbers are drawn,
``generator`` is a required keyword.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from rankscope._registry import Registry


@dataclass(frozen=True)
class Mechanism:
    """One row of the table.

    Args:
        name: How the user calls it.
        function: The mechanism.
        exact: Whether its output is softmax attention (over its own pattern, if it has one).
        cost: Its claimed growth in n, as in "n", "n log n", "n sqrt(n)", "n^2".
        knob: The keyword that trades error for time, if there is one.
        source: Where the mechanism was published.
        self_attention_only: Whether query and key must have one length.
    """

    name: str
    function: Callable[..., Tensor]
    exact: bool
    cost: str
    knob: str | None
    source: str
    self_attention_only: bool = False

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The keywords its signature has."""
        return frozenset(inspect.signature(self.function).parameters)

    @property
    def causal(self) -> bool:
        """Whether it can be causal: it has ``is_causal`` in its signature."""
        return "is_causal" in self.parameters

    @property
    def random(self) -> bool:
        """Whether it draws numbers: it asks for a ``generator``."""
        return "generator" in self.parameters


MECHANISMS: Registry[Mechanism] = Registry("mechanism")


def register(mechanism: Mechanism) -> Mechanism:
    """Add a mechanism to the table."""
    return MECHANISMS.register(mechanism.name, mechanism)
