"""One layer's captured heads, and what a Linformer head in their place gives."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """One layer's heads on some windows.

    Args:
        query: ``(windows, h, n, head_dim)``.
        key: ``(windows, h, n, head_dim)``.
        value: ``(windows, h, n, value width)``.
        scaling: Factor of the logits.
    """

    query: Float[Tensor, "windows h n head_dim"]
    key: Float[Tensor, "windows h n head_dim"]
    value: Float[Tensor, "windows h n width"]
    scaling: float

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.query.shape[2]

    def at(self, windows: slice) -> "Heads":
        """Return the heads on some of the windows."""
        return Heads(self.query[windows], self.key[windows], self.value[windows], self.scaling)

    def P(self, window: int) -> Float[Tensor, "h n n"]:
        """Return the context mapping matrices of one window."""
        return (self.scaling * self.query[window] @ self.key[window].mT).softmax(-1)

    def outputs(self) -> Float[Tensor, "windows h n width"]:
        """Return PV of every window."""
        return torch.stack([self.P(window) @ self.value[window] for window in range(len(self.query))])

    def shares(self, E: Float[Tensor, "h k n"]) -> Float[Tensor, "windows h n k"]:
        """Return softmax(scaling · Q (E K)ᵀ) of every window."""
        return (self.scaling * self.query @ (E @ self.key).mT).softmax(-1)


def linformer_output(heads: Heads, window: int, E: Float[Tensor, "#h k n"], F: Float[Tensor, "#h k n"]) -> Tensor:
    """Return softmax(scaling · Q (E K)ᵀ) F V on one window, ``(h, n, width)``."""
    logits = heads.scaling * heads.query[window] @ (E @ heads.key[window]).mT
    return logits.softmax(-1) @ (F @ heads.value[window])


def relative_error(output: Tensor, exact: Tensor) -> Tensor:
    """Return ‖output − exact‖ / ‖exact‖ over the last two axes."""
    return (output - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
