"""E and F fitted to a pretrained model's own attention: mean pooling, least squares, or layerwise distillation."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.attention._call import AttentionCall
from rankscope.attention._layout import TokenLayout
from rankscope.attention.interface import run_captured
from rankscope.attention.route import Route, find_route
from rankscope.models.in_place import projected_attention
from rankscope.models.projections import Convolution, Learned, LinformerProjections, ProjectionPair, resample

# Shares of the mean diagonal of the normal equations; the one that does best on windows not solved for is taken.
RIDGES = (3e-2, 0.5)
# Gradient steps between two looks at the windows that are not fitted.
LOOK = 25


@dataclass(frozen=True)
class Samples:
    """What attention modules saw on some windows, and the output they gave.

    Args:
        query: ``(w, h, n, head_dim)``, one entry a window (and, where layers share a matrix, a layer).
        key: The same shape.
        value: The same shape.
        scaling: Factor of the logits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float

    def exact(self) -> Tensor:
        """PV, ``(w, h, n, head_dim)``."""
        return nn.functional.scaled_dot_product_attention(self.query, self.key, self.value, scale=self.scaling)

    def part(self, index: slice | Tensor) -> "Samples":
        """Some of the windows."""
        return Samples(self.query[index], self.key[index], self.value[index], self.scaling)

    def __len__(self) -> int:
        return self.query.shape[0]


@dataclass(frozen=True)
class LayerError:
    """Relative errors of one layer's attention output at one k, on windows that were not fitted.

    Args:
        layer: Number of the layer.
        k: Projected length.
        before: With mean pooling.
        after: With the fitted E and F.
        floor: Of the best rank-k approximation of PV itself, head by head; no method with k keys can be below.
        truncated: Of the rank-k truncated SVD of P, times V: a reference, not a floor, since PV has rank at most
            head_dim while truncation of P knows nothing of V.
    """

    layer: int
    k: int
    before: float
    after: float
    floor: float
    truncated: float


def capture_samples(
    model: nn.Module, windows: Tensor, paths: Sequence[str], *, batch: int = 4, route: Route | None = None
) -> Samples:
    """Run a model that has its own attention over windows, and keep what some modules saw.

    Args:
        model: The model.
        windows: Token ids, ``(w, n)``, without padding.
        paths: The attention modules; several where one matrix serves them all.
        batch: Windows a forward.
        route: What ``find_route`` found; found first by default.

    Returns:
        ``len(paths) · w`` entries.

    Raises:
        RankscopeError: A module that gives no query, key and value, or attention with a bias, cap or sinks.
    """
    inputs = {"input_ids": windows[:1]}
    route = find_route(model, inputs) if route is None else route
    kept: list[AttentionCall] = []

    def keep(call: AttentionCall) -> None:
        if call.module in paths:
            if call.value is None or call.position_bias is not None or call.softcap or call.sinks is not None:
                raise RankscopeError(f"`model`: {call.module} is no plain softmax attention: it can't be calibrated")
            kept.append(call)

    for some in windows.split(batch):
        run_captured(model, {"input_ids": some}, keep, route=route)
    if not kept:
        raise RankscopeError(f"`paths` {list(paths)} were not seen in the model's forward")
    query, key, value = (
        torch.cat([tensor for call in kept if (tensor := take(call)) is not None])
        for take in (lambda c: c.query, AttentionCall.key_expanded, AttentionCall.value_expanded)
    )
    return Samples(query, key, value, float(kept[0].scaling or 1.0))


def mean_pooling(k: int, n: int) -> Tensor:
    r"""Means of k equal segments of n tokens, cut within a token where k does not divide n.

    .. math:: E_{ij} = \frac{k}{n} \, \big|[j, j + 1) \cap [i n / k, (i + 1) n / k)\big|

    Args:
        k: Number of segments.
        n: Number of tokens.

    Returns:
        ``(k, n)``, rows sum to 1; the identity where k = n.

    Example:
        >>> mean_pooling(2, 4)
        tensor([[0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    return resample(torch.eye(k, dtype=torch.float64), TokenLayout(n)).float()


def start_at_mean_pooling(modules: nn.Module, *, anchored: bool = False) -> None:
    """Set every learned E and F to :func:`mean_pooling`, every convolution to its mean; others keep their values.

    Args:
        modules: A bank, or any module that holds projections.
        anchored: Give the first and the last token a row of their own and pool what is between: encoders send much
            attention to the special tokens that stand there. Needs k > 2.
    """
    with torch.no_grad():
        for module in modules.modules():
            if isinstance(module, Learned):
                n = module.shape.n
                rows = module.shape.head_k or (module.shape.k,)
                for head, k in enumerate(rows):
                    target = module.weight[head] if len(rows) > 1 else module.weight
                    start = _anchored(k, n) if anchored and 2 < k < n else mean_pooling(k, n)
                    target[..., :k, :] = start.to(module.weight)
            elif isinstance(module, Convolution):
                module.weight.fill_(1 / module.stride)


def _anchored(k: int, n: int) -> Tensor:
    return torch.block_diag(torch.ones(1, 1), mean_pooling(k - 2, n - 2), torch.ones(1, 1))


def relative_error(samples: Samples, pair: ProjectionPair) -> float:
    """Norm of the output's error over the norm of the exact output, over all entries of the samples."""
    wrong = total = 0.0
    with torch.no_grad():
        for at in range(len(samples)):
            one = samples.part(slice(at, at + 1))
            exact = one.exact()
            wrong += float((_projected(one, pair) - exact).square().sum())
            total += float(exact.square().sum())
    return (wrong / total) ** 0.5


def _projected(samples: Samples, pair: ProjectionPair) -> Tensor:
    return projected_attention(samples.query, samples.key, samples.value, pair, scaling=samples.scaling)


def floors(samples: Samples, ks: Sequence[int]) -> list[tuple[float, float]]:
    """Relative errors of the best rank-k approximation of PV, and of the rank-k truncated P times V.

    Args:
        samples: Few windows: each head of each costs one decomposition of an n × n matrix.
        ks: Projected lengths.

    Returns:
        For each k the floor and the reference.
    """
    P = (samples.scaling * samples.query @ samples.key.mT).softmax(dim=-1)
    exact = P @ samples.value
    total = exact.square().sum()
    sigma = torch.linalg.svdvals(exact)
    _, tail, Vh = torch.linalg.svd(P)
    parts = Vh @ samples.value
    found = []
    for k in ks:
        floor = sigma[..., k:].square().sum() / total
        # The columns of U are orthonormal, so what truncation leaves out has the norm of its coefficients.
        rest = (tail[..., k:, None] * parts[..., k:, :]).square().sum() / total
        found.append((float(floor.sqrt()), float(rest.sqrt())))
    return found


def solve_values(samples: Samples, pair: ProjectionPair, *, ridge: float, iterations: int = 20) -> None:
    r"""Set F to the least-squares solution for the given E, in place.

    .. math:: \min_F \sum \| A F V - P V \|^2 + \lambda \| F - F_0 \|^2, \qquad
        A = \mathrm{softmax}(\text{scaling} \cdot Q (E K)^\top)

    The sum is over windows, and over the heads that share F. It is linear in F; the normal equations
    :math:`\sum A^\top A\, F\, V V^\top` are solved by conjugate gradients, without ever being written out.

    Args:
        samples: What the layer saw.
        pair: A learned F that is not E; :math:`F_0` is what it holds.
        ridge: :math:`\lambda` as a share of the mean diagonal.
        iterations: Conjugate gradient steps at most.

    Raises:
        RankscopeError: F is not learned, or is E itself.
    """
    if pair.F is pair.E or not isinstance(pair.F, Learned) or pair.F.shape.head_k is not None:
        raise RankscopeError(
            "least squares needs a learned F of its own and one k for all heads (sharing 'none' or 'headwise', kind "
            "'learned'): take method 'distill'"
        )
    n, shared = samples.value.shape[-2], pair.F.heads is None
    layout = TokenLayout(n)
    with torch.no_grad():
        keys = pair.E.compress(pair.E.operator(None, layout), samples.key, layout)
        A = (samples.scaling * samples.query @ keys.mT).softmax(dim=-1)
        gram, value = A.mT @ A, samples.value
        start = pair.F.weight[..., :n].expand(value.shape[1] if not shared else 1, -1, -1).clone()
        over = (0, 1) if shared else (0,)

        def apply(F: Tensor) -> Tensor:
            return _summed(gram @ (F @ value), value, over)

        diagonal = gram.diagonal(dim1=-2, dim2=-1).mean() * value.square().sum(-1).mean()
        weight = ridge * diagonal * value.shape[0] * (value.shape[1] if shared else 1)
        residual = _summed(A.mT @ samples.exact(), value, over) - apply(start)
        step = _conjugate_gradients(lambda x: apply(x) + weight * x, residual, iterations)
        solved = start + step
        pair.F.weight[..., :n] = solved.squeeze(0) if shared else solved


def _summed(left: Tensor, value: Tensor, over: tuple[int, ...]) -> Tensor:
    """Sum of ``left @ valueᵀ`` over windows (and heads) as ``(g, k, n)``, as one product for each g."""
    if over == (0, 1):
        return (left.flatten(0, 1).transpose(0, 1).flatten(1) @ value.flatten(0, 1).transpose(0, 1).flatten(1).T)[None]
    return left.permute(1, 2, 0, 3).flatten(2) @ value.permute(1, 2, 0, 3).flatten(2).mT


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], target: Tensor, iterations: int) -> Tensor:
    """Solve ``apply(x) = target`` for each leading index by itself."""
    x = torch.zeros_like(target)
    residual, direction = target.clone(), target.clone()
    norm = residual.square().sum((-2, -1), keepdim=True)
    stop = 1e-12 * norm
    for _ in range(iterations):
        if bool((norm <= stop).all()):
            break
        moved = apply(direction)
        length = norm / (direction * moved).sum((-2, -1), keepdim=True).clamp(min=torch.finfo(norm.dtype).tiny)
        x += length * direction
        residual -= length * moved
        after = residual.square().sum((-2, -1), keepdim=True)
        direction = residual + after / norm.clamp(min=torch.finfo(norm.dtype).tiny) * direction
        norm = after
    return x


def distill(
    samples: Samples,
    pair: ProjectionPair,
    *,
    check: Samples,
    steps: int = 200,
    learning_rate: float = 2e-2,
    windows: int = 2,
    generator: torch.Generator,
) -> None:
    """Move the projections by Adam so that the layer's output comes close to the exact one, in place.

    What did best on ``check`` is kept, so they never end worse there than they began.

    Args:
        samples: What the layer saw.
        pair: The projections, of any kind that has parameters.
        check: What it saw on windows that are not fitted.
        steps: Number of steps.
        learning_rate: Of the first step, as a share of a matrix's largest entry; it falls to zero on a cosine.
        windows: Windows a step.
        generator: Draws them.

    Raises:
        RankscopeError: The kind has nothing to learn.
    """
    parameters = _parameters(pair)
    if not parameters:
        raise RankscopeError("`method` 'distill' needs a kind with parameters: learned, convolution or dynamic")
    groups = [{"params": [p], "lr": learning_rate * max(1e-3, float(p.detach().abs().max()))} for p in parameters]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    exact = samples.exact()
    scale = exact.square().mean()
    best = _Best(pair, check)
    for number in range(steps):
        chosen = torch.randperm(len(samples), generator=generator)[:windows]
        with torch.enable_grad():
            output = _projected(samples.part(chosen), pair)
            loss = (output - exact[chosen]).square().mean() / scale
            gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
        if (number + 1) % LOOK == 0 or number + 1 == steps:
            best.look()
    for parameter in parameters:
        parameter.grad = None
    best.put()


def _parameters(pair: ProjectionPair) -> list[nn.Parameter]:
    return list({id(p): p for side in (pair.E, pair.F) for p in side.parameters()}.values())


class _Best:
    """The values of a pair's parameters that gave the smallest error on some samples so far."""

    def __init__(self, pair: ProjectionPair, check: Samples) -> None:
        self.pair, self.check, self.error = pair, check, float("inf")
        self.values: list[Tensor] = []
        self.look()

    def look(self) -> None:
        """Keep the present values if they are the best."""
        error = relative_error(self.check, self.pair)
        if error < self.error:
            self.error, self.values = error, [p.detach().clone() for p in _parameters(self.pair)]

    def put(self) -> None:
        """Set the best values."""
        with torch.no_grad():
            for parameter, value in zip(_parameters(self.pair), self.values, strict=True):
                parameter.copy_(value)


def _solvable(pair: ProjectionPair) -> bool:
    return pair.F is not pair.E and isinstance(pair.F, Learned) and pair.F.shape.head_k is None


def _best_solution(samples: Samples, check: Samples, pair: ProjectionPair, best: _Best) -> None:
    """Try the ridges for the E and F at hand; leave the best of them, or what was best before."""
    held = pair.F.weight.detach().clone()  # type: ignore[union-attr, operator]
    for ridge in RIDGES:
        with torch.no_grad():
            pair.F.weight.copy_(held)  # type: ignore[union-attr, operator]
        solve_values(samples, pair, ridge=ridge)
        best.look()


def _fit_mean(samples: Samples, check: Samples, pair: ProjectionPair, steps: int, generator: torch.Generator) -> None:
    """Leave mean pooling as it is."""


def _fit_least_squares(
    samples: Samples, check: Samples, pair: ProjectionPair, steps: int, generator: torch.Generator
) -> None:
    """From either start solve for F; the best of all is kept."""
    best = _Best(pair, check)
    for anchored in (False, True):
        for side in (pair.E, pair.F):
            start_at_mean_pooling(side, anchored=anchored)
        best.look()
        _best_solution(samples, check, pair, best)
    best.put()


def _fit_distill(
    samples: Samples, check: Samples, pair: ProjectionPair, steps: int, generator: torch.Generator
) -> None:
    """Least squares where it applies, then gradients for E and F, then least squares for the E that was found."""
    if _solvable(pair):
        _fit_least_squares(samples, check, pair, steps, generator)
    distill(samples, pair, check=check, steps=steps, generator=generator)
    if _solvable(pair):
        best = _Best(pair, check)
        _best_solution(samples, check, pair, best)
        best.put()


METHODS: Registry[Callable[[Samples, Samples, ProjectionPair, int, torch.Generator], None]] = Registry(
    "method", {"mean": _fit_mean, "least-squares": _fit_least_squares, "distill": _fit_distill}
)


def calibrate(
    model: nn.Module,
    banks: Sequence[LinformerProjections],
    windows: Tensor,
    *,
    paths: Sequence[str],
    method: str = "distill",
    steps: int = 200,
    held_out: int | None = None,
    reference_windows: int = 1,
    generator: torch.Generator,
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerError]:
    """Fit E and F of every layer to the model's own attention, each layer by itself, in place.

    Args:
        model: The model, with its own attention.
        banks: The projections to fit, one bank for each k that the report is wanted at; one sharing in all.
        windows: Token ids, ``(w, n)``, without padding.
        paths: The attention module of each layer.
        method: ``"mean"`` (mean pooling), ``"least-squares"`` (E mean pooling, F solved) or ``"distill"``
            (both by gradient steps between two solutions for F).
        steps: Gradient steps a layer.
        held_out: Windows kept for the report; default a quarter, at least one.
        reference_windows: Held-out windows whose P is decomposed for the reference.
        generator: Draws windows for the gradient steps.
        progress: Called with fits done and fits in all.

    Returns:
        For each layer and bank the errors before and after, floor and reference.

    Raises:
        RankscopeError: Unknown method, too few windows, or a kind that the method can't fit.
    """
    fit = METHODS[method]
    held = max(1, len(windows) // 4) if held_out is None else held_out
    if not 1 <= held < len(windows):
        raise RankscopeError(f"`windows` must be more than the {held} held out, got {len(windows)}")
    for bank in banks:
        start_at_mean_pooling(bank)
    starts = copy.deepcopy(list(banks))
    route = find_route(model, {"input_ids": windows[:1]})
    shared = banks[0].sharing == "layerwise"
    fitted, kept = windows[:-held], windows[-held:]
    report, done = [], 0
    whole = capture_samples(model, fitted, paths, route=route) if shared else None
    for layer, path in enumerate(paths):
        test = capture_samples(model, kept, [path], route=route)
        train = None if shared else capture_samples(model, fitted, [path], route=route)
        limits = floors(test.part(slice(0, reference_windows)), [bank[layer].E.shape.k for bank in banks])
        for bank, start, (floor, truncated) in zip(banks, starts, limits, strict=True):
            pair = bank[layer]
            seen = train if not shared else whole if layer == 0 else None
            if seen is not None:
                fit(*_split(seen), pair, steps, generator)
            done += 1
            if progress is not None:
                progress(done, len(paths) * len(banks))
            before, after = relative_error(test, start[layer]), relative_error(test, pair)
            report.append(LayerError(layer, pair.E.shape.k, before, after, floor, truncated))
    return report


def _split(samples: Samples) -> tuple[Samples, Samples]:
    """Three of four entries to fit, every fourth to choose by."""
    at = torch.arange(len(samples))
    chosen = at % 4 == 3 if len(samples) > 3 else at == len(samples) - 1
    return (samples.part(at[~chosen]) if len(samples) > 1 else samples), samples.part(at[chosen])
