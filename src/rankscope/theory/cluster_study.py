"""The flow of tokens as a labelled dataset: the settings of a theorem by name, or matrices from a file."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from rankscope._errors import RankscopeError
from rankscope.theory import cluster_limits, clusters
from rankscope.theory.clusters import Array
from rankscope.theory.studies import attributes

#: Settings of the flow by name, Q = K = I and a V each: examples of the theorems they are named after.
FLOWS = ("boolean", "polytope", "hyperplanes", "polytope_times_space", "collapse")
#: At most so many tokens, since P's singular values are taken at every frame, and so many frames.
MOST_TOKENS, MOST_FRAMES = 4096, 1000
# Times between frames that the tokens' ways are drawn through, half of them even, half dense at the start.
_WAY = 400


@dataclass(frozen=True)
class Setting:
    """What a flow starts from.

    Args:
        name: A name of :data:`FLOWS`, or ``weights``.
        query: Q, ``(d', d)``.
        key: K, ``(d', d)``.
        value: V, ``(d, d)``.
        tokens: At time 0, ``(n, d)``.
    """

    name: str
    query: Array
    key: Array
    value: Array
    tokens: Array


def named_setting(flow: str, *, n: int, d: int, generator: torch.Generator) -> Setting:
    """Return a flow of :data:`FLOWS` with uniform tokens.

    Args:
        flow: Its name.
        n: Tokens.
        d: Their width; 1 for ``boolean``, 2 or more for the others.
        generator: What V, where it is drawn, and then the tokens are drawn with.

    Returns:
        Matrices and tokens.

    Raises:
        RankscopeError: No such flow, or sizes that it can't have.
    """
    if flow not in FLOWS:
        raise RankscopeError(f"`flow` must be one of {', '.join(FLOWS)}, got {flow!r}")
    if d < 1:
        raise RankscopeError(f"`d` must be 1 or more, got {d}")
    if (flow == "boolean") != (d == 1):
        raise RankscopeError(f"`d` must be 1 for the flow 'boolean' and more for the others, got {d} for {flow!r}")
    _check_tokens(n)
    value = {"collapse": -np.eye(d), "polytope_times_space": np.diag([*[1.0] * (d - 1), -0.5])}.get(flow, np.eye(d))
    if flow == "hyperplanes":
        value = torch.rand(d, d, generator=generator, dtype=torch.float64).numpy()
        value /= np.abs(np.linalg.eigvals(value)).max()
    return Setting(flow, np.eye(d), np.eye(d), value, clusters.uniform_tokens(n, d, generator=generator))


def setting_from_file(path: Path, *, n: int | None, generator: torch.Generator) -> Setting:
    """Read one head's matrices, and the initial tokens where the file has them.

    Args:
        path: A safetensors file with ``Q`` and ``K`` of shape (d', d), ``V`` of shape (d, d) and, if wanted,
            ``tokens`` of shape (n, d).
        n: How many tokens to draw where the file has none, 40 if ``None``.
        generator: What they are drawn with, uniformly from [−1, 1]ᵈ.

    Returns:
        Matrices and tokens in float64.

    Raises:
        RankscopeError: No such file, other keys, shapes that don't match, numbers that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RankscopeError(f"`weights` {str(path)!r} is no safetensors file that can be read: {error}") from None
    wanted = {"Q", "K", "V"}
    if not wanted <= set(found) <= wanted | {"tokens"}:
        raise RankscopeError(
            f"`weights` must hold Q, K, V and perhaps tokens, got {', '.join(sorted(found)) or 'nothing'}: "
            "save one head's matrices under these names"
        )
    arrays = {name: tensor.double().numpy() for name, tensor in found.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    d = shapes["V"][-1] if shapes["V"] else 0
    right = all(len(shape) == 2 and 0 not in shape and shape[1] == d for shape in shapes.values())
    if not right or shapes["V"] != (d, d) or shapes["Q"] != shapes["K"]:
        words = ", ".join(f"{name} {shapes[name]}" for name in sorted(shapes))
        raise RankscopeError(f"`weights` must be Q and K (d', d), V (d, d) and tokens (n, d), got {words}")
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise RankscopeError(f"`weights` must be finite, {name} is not: leave nan and infinity out")
    tokens = arrays.get("tokens")
    if tokens is None:
        count = 40 if n is None else n
        _check_tokens(count)
        tokens = clusters.uniform_tokens(count, d, generator=generator)
    elif n not in (None, len(tokens)):
        raise RankscopeError(f"`n` is {n}, but `weights` brings {len(tokens)} tokens: leave `n` out")
    _check_tokens(len(tokens))
    return Setting("weights", arrays["Q"], arrays["K"], arrays["V"], tokens)


def clusters_study(setting: Setting, *, end: float, frames: int, seed: int) -> xr.Dataset:
    """Follow tokens to their limit and judge it by every theorem.

    The rescaled form is followed, or the tokens themselves where no eigenvalue of V has a real part above 0.

    Args:
        setting: Of :func:`named_setting` or :func:`setting_from_file`.
        end: The last time.
        frames: How many times P is looked at, from 0 to ``end``.
        seed: What the setting was drawn with, kept as an attribute.

    Returns:
        ``tokens (time, token, axis)``, ``way (moment, token, axis)`` at many more times, ``P (shown, token, other)``
        at four of the times, ``sigma (time, index)``, ``rank (time,)``, ``rank_strict (time,)``, ``Q``, ``K``, ``V``;
        attributes hold the verdicts, and as ``limit`` the first theorem whose hypotheses are met.

    Raises:
        RankscopeError: A last time at which the numbers would mean nothing or that would take for ever; tokens that
            leave float64's range.
    """
    if not 2 <= frames <= MOST_FRAMES:
        raise RankscopeError(f"`frames` must be from 2 to {MOST_FRAMES:,}, got {frames}")
    value = setting.value
    rescaled = bool(np.linalg.eigvals(value).real.max() > 0)
    _check_end(end, value, rescaled)
    n, d = setting.tokens.shape
    dynamics = clusters.Dynamics.single(setting.query, setting.key, value)
    times = np.array([end * i / (frames - 1) for i in range(frames)])
    way = np.unique([0.0, *np.linspace(0, end, _WAY // 2), *np.geomspace(1e-4 * end, end, _WAY // 2)])
    way[-1] = end
    every = np.union1d(times, way)
    whole = clusters.integrate(dynamics, setting.tokens, times=every.tolist(), rescaled=rescaled)
    run = whole.at(np.searchsorted(every, times))
    verdicts = cluster_limits.classify(run)
    met = [verdict.theorem for verdict in verdicts if not verdict.unmet]
    sigma = run.sigma()
    shown = np.unique(np.linspace(0, frames - 1, 4).astype(int))
    ranks = [clusters.numerical_rank(row, cluster_limits.RANK_TOLERANCE) for row in sigma]
    strict = [clusters.numerical_rank(row, n * np.finfo(float).eps) for row in sigma]
    return xr.Dataset(
        {
            "tokens": (("time", "token", "axis"), run.tokens),
            "way": (("moment", "token", "axis"), whole.at(np.searchsorted(every, way)).tokens.astype(np.float32)),
            "P": (("shown", "token", "other"), np.stack([run.P(i).astype(np.float32) for i in shown])),
            "sigma": (("time", "index"), sigma),
            "rank": ("time", ranks),
            "rank_strict": ("time", strict),
            "Q": (("score", "axis"), setting.query),
            "K": (("score", "axis"), setting.key),
            "V": (("row", "axis"), value),
        },
        coords={"time": times, "moment": way, "shown": times[shown], "index": np.arange(1, n + 1)},
        attrs=attributes(
            "clusters",
            flow=setting.name,
            n=n,
            d=d,
            seed=seed,
            solver=run.solver,
            evaluations=run.evaluations,
            form="z = exp(-tV) x" if rescaled else "x",
            rank_tolerance=cluster_limits.RANK_TOLERANCE,
            tolerance=cluster_limits.TOLERANCE,
            limit=met[0] if met else "",
            verdicts=json.dumps({verdict.theorem: str(verdict) for verdict in verdicts}, ensure_ascii=False),
            leaders=json.dumps(clusters.leaders(run.P(-1)).tolist()),
        ),
    )


def map_at(ds: xr.Dataset, i: int) -> Array:
    """Return P at a study's ``time[i]``, from its tokens and matrices, ``(n, n)``."""
    dynamics = clusters.Dynamics.single(ds.Q.values, ds.K.values, ds.V.values)
    times, tokens = ds.time.values, ds.tokens.values
    return clusters.Trajectory(dynamics, times, tokens, ds.attrs["form"] != "x", "", 0).P(i)


def _check_tokens(n: int) -> None:
    if not 2 <= n <= MOST_TOKENS:
        raise RankscopeError(f"`n` must be from 2 to {MOST_TOKENS:,} tokens, got {n}")


def _check_end(end: float, value: Array, rescaled: bool) -> None:
    if not 0 < end < float("inf"):
        raise RankscopeError(f"`end` must be a time above 0, got {end}")
    if rescaled:
        last = clusters.RANGE / clusters.growth(value)
        why = "later, tokens of one cluster are nearer than float64 and the solver can tell"
    else:
        # An explicit solver takes about two velocities per unit of ‖V‖t however slow the tokens are.
        last = clusters.MOST_EVALUATIONS / (2 * max(float(np.linalg.norm(value, 2)), 1e-12))
        why = f"later, it would take more than {clusters.MOST_EVALUATIONS:,} velocities"
    if end > last:
        raise RankscopeError(f"`end` must be at most {last:.6g} with this V, got {end:g}: {why}")
