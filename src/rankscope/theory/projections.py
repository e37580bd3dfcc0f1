r"""At equal k: what a head's output loses under each projection of the sequence axis, on captured heads.

Three families, for one head with context map P and value V:

* Linformer's head, :math:`\mathrm{softmax}(\text{scaling} \cdot Q (E K)^\top)\, F V`, which never makes P;
* a projection after the softmax, :math:`P U U^\top V`, which makes P first, or of the output,
  :math:`U U^\top P V`: references, not methods;
* the best matrix of rank k in the place of PV, the floor below which nothing of rank k goes.

The error is :math:`\|\text{output} - PV\| / \|PV\|` (Frobenius, per head and window). What is fitted is fitted on
some windows and judged on others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.attention.interface import AttentionCall, capture
from rankscope.theory.fitted_heads import fit_by_adam, fit_values
from rankscope.theory.heads import Heads, linformer_output, relative_error
from rankscope.windows import Window

# Adam's rates: a kernel has few numbers and far to go, k·n free numbers learn their windows by heart when driven.
_OF_KERNEL, _FROM_MEANS, _FROM_CONVOLUTION = 0.1, 0.003, 0.001


@dataclass(frozen=True)
class Task:
    """What a projection is asked for.

    Args:
        train: Heads to fit on.
        test: Heads to judge on.
        k: Projected length.
        generator: What is drawn with.
        right: Right singular vectors of each test window's P, largest first, ``(windows, h, n, n)``.
        fixed: Eigenvectors of the sum of ``PᵀP`` over the windows to fit on, largest first, ``(h, n, n)``.
    """

    train: Heads
    test: Heads
    k: int
    generator: torch.Generator
    right: Float[Tensor, "windows h n n"]
    fixed: Float[Tensor, "h n n"]

    @cached_property
    def convolution(self) -> Float[Tensor, "2 h k n"] | None:
        """E and F as fitted kernels of width and stride n/k, ``None`` where k does not divide n."""
        n, heads = self.train.n, self.train.query.shape[1]
        if n % self.k:
            return None
        width = n // self.k

        def projections(kernel: Tensor) -> Tensor:
            each = torch.eye(self.k)[:, :, None] * kernel[..., None, None, :] / width
            return each.flatten(-2)

        return fit_by_adam(self.train, torch.ones(2, heads, width), projections, rate=_OF_KERNEL)


@dataclass(frozen=True)
class Comparison:
    """A layer's projections at each k.

    Args:
        k: Projected lengths.
        error: Method → mean error over test windows, ``(k, h)``; NaN where a method can't have that k.
        overlap: Mean squared cosine of the principal angles between two test windows' leading subspaces of k right
            singular vectors, ``(k, h)``: 1 where each window has the same, k/n by chance.
        chance: ``k / n``, ``(k,)``.
    """

    k: tuple[int, ...]
    error: dict[str, Float[Tensor, "k h"]]
    overlap: Float[Tensor, "k h"]
    chance: Float[Tensor, "k"]


@torch.no_grad()
def collect(model: nn.Module, windows: Iterable[Window]) -> dict[str, Heads]:
    """Capture query, key and value of every self-attention on windows of one length.

    Args:
        model: A transformers model whose attention is bidirectional and goes through the attention interface.
        windows: Two or more, of one length.

    Returns:
        Module path → heads, in the model's order.

    Raises:
        RankscopeError: A mask, a bias, sinks or cross-attention, which fixed projections are not defined for.
    """
    held: dict[str, list[AttentionCall]] = {}

    def keep(call: AttentionCall) -> None:
        masked = call.allowed() is not None
        if masked or call.sinks is not None or call.position_bias is not None or call.kind != "self" or call.softcap:
            raise RankscopeError(
                f"{call.module} is masked, biased or cross-attention: compare projections on a bidirectional encoder"
            )
        held.setdefault(call.module, []).append(call)

    device = next(model.parameters()).device
    with capture(model, keep):
        for window in windows:
            model(input_ids=torch.tensor([window.input_ids], device=device))
    if not held:
        raise RankscopeError("`model` made no call to the attention interface: take one that `rankscope doctor` routes")
    return {
        module: Heads(
            torch.cat([call.query.float() for call in calls if call.query is not None]),
            torch.cat([call.key_expanded().float() for call in calls]),
            torch.cat([call.value_expanded().float() for call in calls]),
            calls[0].scaling or 1.0,
        )
        for module, calls in held.items()
    }


def compare(
    train: Heads, test: Heads, *, k: Sequence[int], generator: torch.Generator, methods: Sequence[str] | None = None
) -> Comparison:
    """Measure each method's error at each k on windows it was not fitted on.

    Args:
        train: Heads on the windows to fit on.
        test: The same heads on at least two other windows.
        k: Projected lengths, each from 1 to n.
        generator: On the CPU; what projections are drawn with.
        methods: Names of :data:`METHODS`; all if ``None``.

    Returns:
        Errors, and how far the windows' own subspaces agree.

    Raises:
        RankscopeError: A k outside 1 to n, fewer than two test windows, or no such method.
    """
    n, windows = test.n, test.query.shape[0]
    if not train.query.shape[0]:
        raise RankscopeError("`train` must hold a window or more to fit on, got none")
    if windows < 2:
        raise RankscopeError(f"`test` must hold two windows or more, got {windows}: angles are between two")
    if not k or min(k) < 1 or max(k) > n:
        raise RankscopeError(f"`k` must hold projected lengths from 1 to n={n}, got {list(k)}")
    chosen = {name: METHODS[name] for name in (methods or METHODS)}
    right = torch.stack([_right_vectors([test.P(i)]) for i in range(windows)])
    fixed = _right_vectors([train.P(i) for i in range(train.query.shape[0])])
    found: dict[str, list[Tensor]] = {name: [] for name in chosen}
    overlaps = []
    for length in k:
        task = Task(train, test, length, generator, right, fixed)
        for name, method in chosen.items():
            found[name].append(method(task))
        overlaps.append(_overlap(right[..., :length]))
    error = {name: torch.stack(values) for name, values in found.items()}
    return Comparison(tuple(k), error, torch.stack(overlaps), torch.tensor([length / n for length in k]))


def segment_means(n: int, k: int) -> Float[Tensor, "k n"]:
    """Return the matrix that averages k runs of neighbouring tokens, as even as they can be.

    Example:
        >>> segment_means(4, 2).tolist()
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    place = torch.arange(n) * k // n
    means = (place == torch.arange(k)[:, None]).float()
    return means / means.sum(1, keepdim=True)


def _right_vectors(maps: list[Tensor]) -> Tensor:
    """Return the eigenvectors of ΣPᵀP, the largest eigenvalue's first, ``(h, n, n)``."""
    gram = sum(P.double().mT @ P.double() for P in maps)
    return torch.linalg.eigh(gram).eigenvectors.flip(-1).float()


def _overlap(U: Tensor) -> Tensor:
    windows, k = U.shape[0], U.shape[-1]
    pairs = [(U[a].mT @ U[b]).square().sum((-2, -1)) / k for a in range(windows) for b in range(a + 1, windows)]
    return torch.stack(pairs).mean(0)


def _judge(task: Task, output: Callable[[int, Tensor], Tensor]) -> Tensor:
    errors = []
    for window in range(task.test.query.shape[0]):
        P = task.test.P(window)
        exact = P @ task.test.value[window]
        errors.append(relative_error(output(window, P), exact))
    return torch.stack(errors).mean(0)


def _theorem_1(task: Task) -> Tensor:
    shape = (task.test.query.shape[1], task.k, task.test.n)
    R = torch.randn(shape, generator=task.generator) / task.k**0.5
    return _judge(task, lambda window, P: P @ (R.mT @ (R @ task.test.value[window])))


def _gaussian(task: Task) -> Tensor:
    shape = (2, task.test.query.shape[1], task.k, task.test.n)
    E, F = torch.randn(shape, generator=task.generator) / task.k**0.5
    return _judge(task, lambda window, P: linformer_output(task.test, window, E, F))


def _mean(task: Task) -> Tensor:
    E = segment_means(task.test.n, task.k)
    return _judge(task, lambda window, P: linformer_output(task.test, window, E, E))


def _calibrated(task: Task) -> Tensor:
    E = segment_means(task.test.n, task.k).expand(task.test.query.shape[1], -1, -1)
    F = fit_values(task.train, E, E)
    return _judge(task, lambda window, P: linformer_output(task.test, window, E, F))


def _learned(task: Task) -> Tensor:
    n, k, found = task.test.n, task.k, task.convolution
    rate = _FROM_CONVOLUTION
    if found is None:
        found, rate = segment_means(n, k).repeat(2, task.test.query.shape[1], 1, 1), _FROM_MEANS
    # Numbers of size one are free, so that one rate serves every k.
    E, F = fit_by_adam(task.train, found * (n / k), lambda free: free * (k / n), rate=rate)
    F = fit_values(task.train, E, F)
    return _judge(task, lambda window, P: linformer_output(task.test, window, E, F))


def _convolution(task: Task) -> Tensor:
    if task.convolution is None:
        return torch.full((task.test.query.shape[1],), torch.nan)
    E, F = task.convolution
    return _judge(task, lambda window, P: linformer_output(task.test, window, E, F))


def _fixed_subspace(task: Task) -> Tensor:
    U = task.fixed[..., : task.k]
    return _judge(task, lambda window, P: (P @ U) @ (U.mT @ task.test.value[window]))


def _fixed_output_subspace(task: Task) -> Tensor:
    """Keep the part of PV in the k dimensions that hold most of it over the windows fitted on: in closed form."""
    U = _right_vectors([output.mT for output in task.train.outputs()])[..., : task.k]
    return _judge(task, lambda window, P: U @ (U.mT @ (P @ task.test.value[window])))


def _own_subspace(task: Task) -> Tensor:
    def output(window: int, P: Tensor) -> Tensor:
        U = task.right[window, ..., : task.k]
        return (P @ U) @ (U.mT @ task.test.value[window])

    return _judge(task, output)


def _floor(task: Task) -> Tensor:
    def output(window: int, P: Tensor) -> Tensor:
        left, sigma, right = torch.linalg.svd(P @ task.test.value[window], full_matrices=False)
        sigma = sigma.clone()
        sigma[:, task.k :] = 0
        return (left * sigma[:, None]) @ right

    return _judge(task, output)


#: Projections by name, in the order of the picture's legend.
METHODS: Registry[Callable[[Task], Tensor]] = Registry(
    "methods",
    {
        "gaussian_theorem_1": _theorem_1,
        "gaussian": _gaussian,
        "mean_pooling": _mean,
        "calibrated": _calibrated,
        "convolution": _convolution,
        "learned": _learned,
        "fixed_subspace_of_P": _fixed_subspace,
        "fixed_subspace_of_PV": _fixed_output_subspace,
        "svd_of_P": _own_subspace,
        "best_of_PV": _floor,
    },
)
