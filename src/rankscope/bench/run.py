"""Running cases: each in a fresh process, its row on disk before the next begins."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.bench import store
from rankscope.bench.cases import Case
from rankscope.bench.child import out_of_memory
from rankscope.bench.cost_model import Rates, measure_rates, predict
from rankscope.bench.store import Row

MEMORY_LEFT_FREE = 0.9
Progress = Callable[[Case, Row, bool], None]


def available_bytes(device: str = "cpu") -> int | None:
    """Return the memory a case may take on a device, ``None`` where the system does not tell."""
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(device)[0] * MEMORY_LEFT_FREE)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return int(free * MEMORY_LEFT_FREE)


def run_cases(
    cases: Iterable[Case],
    out: Path,
    *,
    captured: Path | None = None,
    memory_bytes: int | None = None,
    timeout: float = 600.0,
    rates: Rates | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Run every case that has no row in ``out`` yet, one after another.

    A row is written before the next case begins, whole or not at all: a benchmark that is killed keeps them.

    Args:
        cases: What to run.
        out: The folder; made if absent.
        captured: A file of :func:`rankscope.bench.captured.captured`; without it errors are on Gaussian tensors.
        memory_bytes: What a case may take; default what is free when it starts.
        timeout: Seconds after which a case is given up and recorded so.
        rates: This machine's speeds, stamped on each row; default measured now, if anything is to be run.
        progress: Called after each case with its row and whether it was skipped.

    Returns:
        The rows, in order.

    Raises:
        RankscopeError: ``out`` cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RankscopeError(f"`out` {str(out)!r} can't be used as a folder: {error.strerror}") from None
    rows = []
    for case in cases:
        row = store.finished(case, out)
        skipped = row is not None
        if row is None:
            rates = measure_rates(case.device) if rates is None else rates
            row = run_case(case, rates, captured=captured, memory_bytes=memory_bytes, timeout=timeout)
            store.save(case, row, out)
        rows.append(row)
        if progress is not None:
            progress(case, row, skipped)
    return rows


def run_case(
    case: Case,
    rates: Rates,
    *,
    captured: Path | None = None,
    memory_bytes: int | None = None,
    timeout: float = 600.0,
) -> Row:
    """Run one case in a process of its own and return its row; what does not fit or fails is a row too."""
    predicted = predict(case, rates)
    # Of the last minute: what else kept the processors busy while this case was timed.
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    free = available_bytes(case.device) if memory_bytes is None else memory_bytes
    if free is not None and predicted.peak_bytes > free:
        found: Row = {
            "status": out_of_memory(case),
            "reason": f"needs about {predicted.peak_bytes / 1e9:.2g} GB, {free / 1e9:.2g} GB are free; not started",
        }
    else:
        found = in_child(case, captured, free if case.device == "cpu" else None, timeout)
    empty = dict.fromkeys(("seconds_median", "seconds_spread", "peak_bytes", "relative_error"))
    return {
        **asdict(case),
        **empty,
        **found,
        "load_average": load,
        "predicted": asdict(predicted),
        "rates": asdict(rates),
        "environment": environment(),
    }


def in_child(case: Case, captured: Path | None, memory_bytes: int | None, timeout: float) -> Row:
    """Return what the child found, or why it found nothing."""
    order = {
        "case": asdict(case),
        "captured": None if captured is None else str(captured),
        "memory_bytes": memory_bytes,
    }
    try:
        child = subprocess.run(
            [sys.executable, "-m", "rankscope.bench.child"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": f"longer than {timeout:g} s", "reason": "given up; --timeout allows more"}
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1])
    if child.returncode in (-9, 137):
        return {"status": out_of_memory(case), "reason": "the system ended the process"}
    last = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
    return {"status": store.FAILED, "reason": last[0]}
