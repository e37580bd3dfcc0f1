"""A benchmark's cases as data: which mechanism, at which length and size, how it is run."""

import hashlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.attention.mechanisms import MECHANISMS

#: Knobs that count keys, landmarks or features, so that one k means about the same to each.
LENGTH_KNOBS = frozenset({"k", "landmarks", "features", "window"})
DTYPES = Registry("dtype", {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64})
CHOICES = {
    "mode": Registry("mode", {"forward": "output only", "train": "output and the gradients"}),
    "view": Registry("view", {"attention": "from query, key, value", "layer": "with the four projections"}),
}


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Args:
        mechanism: A row of ``MECHANISMS``.
        n: Tokens, queries and keys alike.
        k: Size of the mechanism's length-like knob (:data:`LENGTH_KNOBS`); ``None`` where it has none.
        mode: ``"forward"``, without gradients, or ``"train"``, forward and backward.
        view: ``"attention"`` or ``"layer"``: hidden states of width heads · head_dim to hidden states.
        heads: Number of heads.
        head_dim: Width of each.
        batch: Rows.
        repeats: Timed calls after warm-up, >= 1.
        dtype: Of the tensors.
        device: ``"cpu"`` or a CUDA device.
        causal: Whether a query sees only what came before it.
        padding: Share of each row's tokens that are padding, at its end, in [0, 1).
        threads: Processor threads; ``None`` leaves PyTorch's choice.
        seed: Of inputs, weights and draws.

    Raises:
        RankscopeError: A name that is not known, a number out of range, or a mechanism that cannot do it.
    """

    mechanism: str
    n: int
    k: int | None = None
    mode: str = "forward"
    view: str = "attention"
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    repeats: int = 5
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = False
    padding: float = 0.0
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        tables: dict[str, Registry[Any]] = {**CHOICES, "mechanism": MECHANISMS, "dtype": DTYPES}
        for argument, table in tables.items():
            table[getattr(self, argument)]
        for argument in ("n", "heads", "head_dim", "batch", "repeats", "threads", "k"):
            number = getattr(self, argument)
            if number is not None and number < 1:
                raise RankscopeError(f"`{argument}` must be at least 1, got {number}")
        if not 0 <= self.padding < 1:
            raise RankscopeError(f"`padding` must be a share in [0, 1), got {self.padding}")
        if self.k is not None and self.k > self.n:
            raise RankscopeError(f"`k` must be at most n={self.n}, got {self.k}")
        if (self.k is None) == has_length_knob(self.mechanism):
            raise RankscopeError(f"`k`={self.k} does not fit {self.mechanism!r}: {knob_words(self.mechanism)}")
        if self.causal not in causalities(self.mechanism):
            able, other = ("causal", "without") if self.causal else ("non-causal", "with")
            raise RankscopeError(f"`mechanism` {self.mechanism!r} has no {able} form: run it {other} causal")

    @property
    def valid(self) -> int:
        """Tokens of each row that are not padding, at least one."""
        return max(1, round(self.n * (1 - self.padding)))

    @property
    def name(self) -> str:
        """Name that no case with other settings has; stem of its file."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        size = "" if self.k is None else f"-k{self.k}"
        return f"{self.mechanism}-n{self.n}{size}-{self.mode}-{self.view}-{digest}"

    def knobs(self) -> dict[str, int]:
        """Keywords that hand k to the mechanism.

        A window looks to both sides, so without causality each side gets half of k.
        """
        knob = MECHANISMS[self.mechanism].knob
        if self.k is None or knob is None:
            return {}
        return {knob: max(1, self.k // 2) if knob == "window" and not self.causal else self.k}


def has_length_knob(mechanism: str) -> bool:
    """Tell whether k means something to a mechanism.

    Example:
        >>> has_length_knob("nystrom"), has_length_knob("sdpa")
        (True, False)
    """
    return MECHANISMS[mechanism].knob in LENGTH_KNOBS


def knob_words(mechanism: str) -> str:
    """Say what k is to a mechanism."""
    knob = MECHANISMS[mechanism].knob
    return f"it is its {knob!r}" if has_length_knob(mechanism) else "it has no such size, leave k out"


def causalities(mechanism: str) -> frozenset[bool]:
    """Return which values of ``causal`` a mechanism can do: a default of True means it can do nothing else.

    Example:
        >>> sorted(causalities("sdpa")), sorted(causalities("linformer")), sorted(causalities("linformer_causal"))
        ([False, True], [False], [True])
    """
    parameter = inspect.signature(MECHANISMS[mechanism].function).parameters.get("is_causal")
    if parameter is None:
        return frozenset({False})
    return frozenset({True}) if parameter.default is True else frozenset({False, True})


def choose_mechanisms(choice: str, *, causal: bool) -> list[str]:
    """Read ``all`` (those that can do it) or names with commas.

    Raises:
        RankscopeError: An unknown name, with the nearest known one.

    Example:
        >>> choose_mechanisms("sdpa,linformer", causal=False)
        ['sdpa', 'linformer']
        >>> "nystrom" in choose_mechanisms("all", causal=True)
        False
    """
    if choice == "all":
        return [name for name in MECHANISMS if causal in causalities(name)]
    names = [name.strip() for name in choice.split(",") if name.strip()]
    for name in names:
        MECHANISMS[name]
    if not names:
        raise RankscopeError(f"`mechanisms` must be all or names with commas, got {choice!r}")
    return list(dict.fromkeys(names))


def grid(mechanisms: Iterable[str], lengths: Iterable[int], sizes: Iterable[int], **settings: object) -> list[Case]:
    """Return every combination that makes sense, shortest first: k < n, and k only where it means something.

    Args:
        mechanisms: Names.
        lengths: Values of n.
        sizes: Values of k.
        **settings: The other fields of :class:`Case`.

    Raises:
        RankscopeError: No case is left, or a setting is wrong.

    Example:
        >>> [(case.mechanism, case.n, case.k) for case in grid(["sdpa", "linformer"], [64, 128], [64])]
        [('sdpa', 64, None), ('sdpa', 128, None), ('linformer', 128, 64)]
    """
    mechanisms, lengths, sizes = list(mechanisms), sorted(set(lengths)), sorted(set(sizes))
    for argument, numbers in (("n", lengths), ("k", sizes)):
        if any(number < 1 for number in numbers):
            raise RankscopeError(f"`{argument}` must be at least 1, got {min(numbers)}")
    cases = []
    for n in lengths:
        for name in mechanisms:
            wanted: list[int | None] = [k for k in sizes if k < n] if has_length_knob(name) else [None]
            cases += [Case(name, n, k, **settings) for k in wanted]  # type: ignore[arg-type]
    if not cases:
        raise RankscopeError(f"no case is left: every `k` of {sizes} is at least every `n` of {lengths}")
    return cases
