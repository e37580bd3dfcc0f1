"""A pool of single-threaded workers that decompose attention matrices beside the next forward pass.

Why threads: LAPACK called by pointer (:mod:`rankscope.linalg._lapack`) and torch both let go of the interpreter's
lock, so threads fill the cores, and they read ``P`` where it lies: nothing is pickled, copied or put into named
shared memory. Why one thread for each worker: two BLAS threads on one 512 x 512 matrix gain a quarter at best, two
matrices at once gain all of it. torch's thread count belongs to the thread that sets it, so each worker sets its own.

What threads cannot do is die alone: when the system kills the process (out of memory), workers and forward pass go
together, and what is left is whatever the caller had finished and written. So there is no half-dead state to detect;
the caller redoes the part. The pool keeps that unlikely by holding at most ``limit`` matrices at a time.

Laws (tested): results come in the order of submission; they are bitwise the same for any number of workers, since
the cut into tasks does not look at the workers; an exception in a task is raised where its result is asked for.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from rankscope._errors import RankscopeError
from rankscope.linalg.decompose import METHODS, Decomposition, choose, decompose

T = TypeVar("T")
Arguments = ParamSpec("Arguments")

# Multiplications in one task: four matrices of 512, so that Python's part (0.2 ms a task) stays below one per cent.
TASK = 4 * 512**3
# A float32 method is compared with float64 on one matrix in so many, in the order of submission. A prime, so that
# the turn comes to every head of a model in the course of the windows.
AUDIT_EVERY = 97


@dataclass(frozen=True)
class Statistics:
    """What happened to all matrices whose results were asked for.

    Args:
        matrices: How many.
        retries: Those redone by float64 SVD because an identity failed or the iteration did not converge.
        refined: Those redone by float64 SVD because their error could not be bounded by the tolerance.
        residual: Worst residual of the trace and Frobenius identities.
        audited: Those compared with float64.
        audit_error: Worst difference of a nuclear-fraction curve among them.
    """

    matrices: int = 0
    retries: int = 0
    refined: int = 0
    residual: float = 0.0
    audited: int = 0
    audit_error: float = 0.0

    def plus(self, one: Decomposition) -> "Statistics":
        """Return the sum of these and one more decomposition."""
        return Statistics(
            matrices=self.matrices + one.sigma[..., 0].numel(),
            retries=self.retries + one.retries,
            refined=self.refined + one.refined,
            residual=max(self.residual, one.residual),
            audited=self.audited + one.audited,
            audit_error=max(self.audit_error, one.audit_error),
        )


class Pending:
    """A batch being decomposed; :meth:`result` waits for it."""

    def __init__(self, pool: "SpectrumPool", lead: torch.Size, tasks: list[Future[Decomposition]]) -> None:
        self._pool = pool
        self._lead = lead
        self._tasks = tasks
        self._result: Decomposition | None = None

    def done(self) -> bool:
        """Return whether :meth:`result` would not wait."""
        return all(task.done() for task in self._tasks)

    def result(self) -> Decomposition:
        """Return the decomposition of the whole batch.

        Raises:
            RankscopeError: What :func:`~rankscope.linalg.decompose.decompose` raised for a part of it.
        """
        if self._result is None:
            parts = [task.result() for task in self._tasks]
            for part in parts:
                self._pool.statistics = self._pool.statistics.plus(part)
            sigma = torch.cat([part.sigma for part in parts])
            self._result = replace(
                parts[0],
                sigma=sigma.view(*self._lead, sigma.shape[-1]),
                retries=sum(part.retries for part in parts),
                refined=sum(part.refined for part in parts),
                residual=max(part.residual for part in parts),
                audited=sum(part.audited for part in parts),
                audit_error=max(part.audit_error for part in parts),
            )
        return self._result


class SpectrumPool:
    """Single-threaded workers; use it as a context manager.

    Args:
        workers: How many; ``None`` takes the cores this process may use.
        limit: Most matrices waiting or being decomposed at a time; :meth:`submit` blocks beyond it. ``None`` takes
            64. A single larger submission is let in when nothing else is in flight.

    Raises:
        RankscopeError: ``workers`` or ``limit`` is below 1.

    Example:
        >>> with SpectrumPool(workers=2) as pool:
        ...     pending = pool.decompose(torch.eye(3).expand(4, 2, 3, 3))
        ...     pending.result().sigma.shape
        torch.Size([4, 2, 3])
    """

    def __init__(self, workers: int | None = None, *, limit: int | None = None) -> None:
        workers = _cores() if workers is None else workers
        limit = 64 if limit is None else limit
        for name, value in (("workers", workers), ("limit", limit)):
            if value < 1:
                raise RankscopeError(f"`{name}` must be at least 1, got {value}: leave it out for the default")
        self.workers = workers
        self.limit = limit
        self.statistics = Statistics()
        # Asking fixes the caller's own thread count before a worker sets the default for threads yet to come.
        self._torch_threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(workers, "rankscope-spectrum", initializer=_single_threaded)
        self._room = threading.Condition()
        self._in_flight = 0
        self._submitted = 0

    def __enter__(self) -> "SpectrumPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close(cancel=kind is not None)

    def close(self, *, cancel: bool = False) -> None:
        """End the workers after the running tasks, and after the waiting ones unless they are cancelled."""
        self._executor.shutdown(wait=True, cancel_futures=cancel)
        torch.set_num_threads(self._torch_threads)

    def submit(self, function: Callable[Arguments, T], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Future[T]:
        """Run ``function(*args, **kwargs)`` in a worker; block while more than ``limit`` matrices are in flight.

        It counts as many matrices as its first tensor holds in its leading dimensions, else one. Room is made when
        a task ends, not when its result is asked for, so a caller that collects late cannot block itself.

        Returns:
            Its future; an exception is raised by ``result()``.
        """
        size = _matrices(args)
        with self._room:
            self._room.wait_for(lambda: not self._in_flight or self._in_flight + size <= self.limit)
            self._in_flight += size
        try:
            future = self._executor.submit(function, *args, **kwargs)
        except BaseException:
            self._leave(size)
            raise
        future.add_done_callback(lambda _: self._leave(size))
        return future

    def decompose(self, P: Tensor, *, method: str = "auto", tolerance: float = 1e-6) -> Pending:
        """Decompose a batch in the workers: :func:`~rankscope.linalg.decompose.decompose`, cut into tasks.

        ``P`` is read where it lies, so it must not be written to until the result is there. Of the float32 methods
        one matrix in 97, counted over all submissions, is also decomposed in float64 and compared; see
        :attr:`statistics`.

        Args:
            P: ``(*lead, n, m)``.
            method: As there.
            tolerance: As there.

        Returns:
            A handle whose ``result()`` is the :class:`~rankscope.linalg.decompose.Decomposition`.

        Raises:
            RankscopeError: The method is unknown or none is exact enough; anything wrong with the values of ``P``
                is raised by ``result()``.
        """
        if P.dim() < 2 or not P.numel():
            raise RankscopeError(f"`P` must hold at least one matrix (*lead, n, m), got {tuple(P.shape)}")
        n, m = P.shape[-2:]
        name = choose(n, m, tolerance) if method == "auto" else method
        is_float32 = METHODS[name].dtype == torch.float32
        matrices = P.detach().reshape(-1, n, m)
        step = max(1, TASK // (n * m * min(n, m)))
        tasks = []
        for part in matrices.split(step):
            audit = [i for i in range(len(part)) if not (self._submitted + i) % AUDIT_EVERY] if is_float32 else []
            self._submitted += len(part)
            tasks.append(self.submit(decompose, part, method=method, tolerance=tolerance, audit=audit))
        return Pending(self, P.shape[:-2], tasks)

    def _leave(self, size: int) -> None:
        with self._room:
            self._in_flight -= size
            self._room.notify_all()


def _single_threaded() -> None:
    torch.set_num_threads(1)


def _cores() -> int:
    """Return the cores this process may use, which a container or a job's affinity can make fewer than exist."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _matrices(args: tuple[Any, ...]) -> int:
    tensors = (arg for arg in args if isinstance(arg, Tensor) and arg.dim() > 2)
    first = next(tensors, None)
    return 1 if first is None else first.shape[:-2].numel()
