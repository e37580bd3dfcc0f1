"""Heads whose map is never written down: from a captured head to an operator, and its bands."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope.linalg.context_map import ContextMap
from rankscope.linalg.lanczos import MatrixFreeSpectrum, fingerprint, matrix_free_spectrum
from rankscope.spectrum.heads import NO_MASK, Head, MaskRule
from rankscope.spectrum.parts import disk_error, write_whole

MATRIX_FREE = "matrix-free"
SHARES = (90, 95, 99)
# Curves of long maps are kept at every number up to this and at a fixed number of places per octave beyond.
EVERY = 512
PER_OCTAVE = 64
WEIGHTS_ONLY = (
    "`method` matrix-free needs query and key, and this model hands out only its weights "
    "(it does not use the attention interface): use a dense method at a shorter n"
)

# Curves, scalars and counters of one head.
Bands = tuple[dict[str, Tensor], dict[str, float], dict[str, float]]


def head_bands(head: Head, *, width: float, generator: torch.Generator, keep: Path | None = None) -> Bands:
    """Curves with bands, scalars and counters of one head, in O(n · block) memory.

    Args:
        head: A head with query and key.
        width: Stop when the bands are nowhere wider.
        generator: Draws the starting vectors.
        keep: How the head's files begin: its Lanczos run every half minute, then its result. With them there, a
            head goes on where it was, or is read back, with the same values; whoever keeps the result elsewhere
            removes them.

    Returns:
        Curves ``(r,)`` by name with ``_low`` and ``_high`` twins; scalars: what is known exactly, or the middle
        of its band; counters.

    Raises:
        RankscopeError: The head has only weights, or a mask that is neither causal nor a causal window; a file
            can't be written.
    """
    P = operator_of(head)
    if keep is None:
        return bands_of(P, matrix_free_spectrum(P, width=width, generator=generator))
    state, path = (keep.with_name(f"{keep.name}.{kind}") for kind in ("lanczos", "bands"))
    known = read_bands(path, P)
    if known is None:
        try:
            spectrum = matrix_free_spectrum(P, width=width, generator=generator, state=state)
        except (OSError, SafetensorError) as error:
            raise disk_error(state, error) from None
        known = bands_of(P, spectrum)
        curves, numbers, notes = known
        metadata = {"map": fingerprint(P), "numbers": json.dumps(numbers), "notes": json.dumps(notes)}
        write_whole(path, save({name: curve.contiguous() for name, curve in curves.items()}, metadata=metadata))
        state.unlink(missing_ok=True)
    return known


def read_bands(path: Path, P: ContextMap) -> Bands | None:
    """Read a kept result back, or ``None`` where there is none of this map."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            if metadata["map"] != fingerprint(P):
                return None
            curves = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
            return curves, json.loads(metadata["numbers"]), json.loads(metadata["notes"])
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError):
        return None


def bands_of(P: ContextMap, spectrum: MatrixFreeSpectrum) -> Bands:
    """Turn a spectrum into curves, scalars and counters."""
    n, m = P.shape
    r = min(n, m)
    curves = {
        f"{kind}_fraction{edge}": getattr(spectrum, f"{kind}_fraction{edge}")
        for kind in ("nuclear", "energy")
        for edge in ("", "_low", "_high")
    }
    numbers = {
        "effective_rank": spectrum.effective_rank[1],
        "effective_rank_low": spectrum.effective_rank[0],
        "effective_rank_high": spectrum.effective_rank[2],
        "stable_rank": spectrum.stable_rank[1],
        "sigma_1": float(spectrum.sigma[0]),
        "sigma_ratio": float(spectrum.sigma[1] / spectrum.sigma[0]) if len(spectrum.sigma) > 1 else math.nan,
        "sink_share": float(P.column_sums().max()) / n,
        **{f"nuclear_rank_{share}": reached(spectrum.nuclear_fraction, share) for share in SHARES},
        **{f"energy_rank_{share}": reached(spectrum.energy_fraction, share) for share in SHARES},
        "nuclear_fraction_at_quarter": float(spectrum.nuclear_fraction[max(1, r // 4) - 1]),
        "energy_fraction_at_quarter": float(spectrum.energy_fraction[max(1, r // 4) - 1]),
    }
    return curves, numbers, counters(spectrum)


def counters(spectrum: MatrixFreeSpectrum) -> dict[str, float]:
    """What a result says about its numerics: passes made, widest band."""
    return {"passes": float(spectrum.passes), "band_width_max": spectrum.width}


def reached(curve: Tensor, share: int) -> float:
    """How many values the middle of a band needs to reach a share in per cent.

    Example:
        >>> reached(torch.tensor([0.5, 0.91, 1.0]), 90)
        2.0
    """
    return float(min(int((curve < share / 100 - 1e-12).sum()) + 1, len(curve)))


def operator_of(head: Head) -> ContextMap:
    """Turn a captured head into an operator, its dense mask into a rule.

    Raises:
        RankscopeError: As :func:`head_bands`.
    """
    if head.query is None or head.key is None:
        raise RankscopeError(WEIGHTS_ONLY)
    rule = mask_rule(head.bias) if head.bias is not None else head.rule
    return ContextMap(
        head.query,
        head.key,
        scaling=head.scaling,
        is_causal=rule.is_causal,
        window=rule.window,
        softcap=head.softcap,
        sinks=None if head.sink is None else float(head.sink),
    )


def mask_rule(bias: Tensor | None) -> MaskRule:
    """Read the rule off an additive mask.

    Raises:
        RankscopeError: The mask is neither empty, nor causal, nor a causal window; or it carries a position bias.

    Example:
        >>> shut = torch.finfo(torch.float32).min
        >>> mask_rule(torch.tensor([[0.0, shut], [0.0, 0.0]]))
        MaskRule(is_causal=True, window=None)
    """
    if bias is None:
        return NO_MASK
    allowed = bias > torch.finfo(bias.dtype).min / 2
    n, m = bias.shape
    counts = allowed.sum(dim=-1)
    if bool((counts == m).all()) and not bool(bias.any()):
        return NO_MASK
    window = int(counts.max())
    place = torch.arange(n, device=bias.device)
    known = n == m and bool((counts == torch.clamp(place + 1, max=window)).all())
    # With the counts of a causal window, its two edges hold exactly if nothing lies outside them.
    outside = allowed.triu(1).any() | allowed.tril(-window).any() if known else True
    if outside or bool(bias.masked_fill(~allowed, 0.0).any()):
        raise RankscopeError(
            "`method` matrix-free knows causal masks and causal windows, and this attention has another mask or a "
            "position bias: use a dense method at a shorter n"
        )
    return MaskRule(is_causal=True, window=None if window == n else window)


def long_index(n: int) -> NDArray[np.int64]:
    """Numbers of singular values at which a long map's curves are kept; always holds n // 4 and n.

    Example:
        >>> len(long_index(512)), len(long_index(16384))
        (512, 832)
    """
    if n <= EVERY:
        return np.arange(1, n + 1)
    octaves = math.log2(n / EVERY)
    beyond = EVERY * 2 ** (np.arange(1, math.ceil(octaves * PER_OCTAVE) + 1) / PER_OCTAVE)
    numbers = np.concatenate([np.arange(1, EVERY + 1), beyond.round(), [n // 4, n]])
    return np.unique(numbers[numbers <= n]).astype(np.int64)
