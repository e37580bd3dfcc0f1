"""One case in a process of its own: ``python -m rankscope.bench.child`` reads it as JSON, and prints what it found."""

import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankscope.bench.cases import DTYPES, Case
from rankscope.bench.subject import gaussian, prepare, relative_error

WARM_UP = 2
STATUS = Path("/proc/self/status")
#: What PyTorch says in a RuntimeError when an allocation is refused.
REFUSED = ("allocate memory", "out of memory")


def main() -> None:
    """Run the case of standard input."""
    order = json.load(sys.stdin)
    case = Case(**order["case"])
    try:
        found = {"status": "ok", **run(case, order.get("captured"), order.get("memory_bytes"))}
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error).lower() for words in REFUSED):
            raise
        found = {"status": out_of_memory(case), "reason": str(error).splitlines()[0] if str(error) else "MemoryError"}
    print(json.dumps(found))


def out_of_memory(case: Case) -> str:
    """Return the status of a case that does not fit."""
    return f"out of memory at n = {case.n}"


def run(case: Case, captured: str | None, memory_bytes: int | None) -> dict[str, Any]:
    """Time the case, then look at its memory, then at its error."""
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    if memory_bytes is not None:
        limit_memory(memory_bytes)
    call = prepare(case)
    seconds = timed(call, case)
    peak = peak_bytes(call, case.device)
    del call
    gc.collect()
    middle = statistics.median(seconds)
    return {
        "seconds_median": middle,
        "seconds_spread": spread(seconds),
        "seconds": seconds,
        "threads_used": torch.get_num_threads(),
        "peak_bytes": peak,
        **errors(case, captured),
    }


def spread(seconds: list[float]) -> float:
    """Return the distance between the quartiles; 0 for a single call.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 5.0]), spread([1.0])
        (2.0, 0.0)
    """
    if len(seconds) < 2:
        return 0.0
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return third - first


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], None], case: Case) -> list[float]:
    """Return the seconds of each repeat after the warm-up."""
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(case.repeats):
        synchronize(case.device)
        start = time.perf_counter()
        call()
        synchronize(case.device)
        seconds.append(time.perf_counter() - start)
    return seconds


def peak_bytes(call: Callable[[], None], device: str) -> int | None:
    """Return the peak of a further call above what inputs, weights and warm libraries hold.

    On a GPU by the allocator; else by the process's resident size (Linux). ``None`` where neither tells.
    """
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # What earlier calls freed goes back to the system first, so that this call is seen whole.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)


def resident(field: str) -> int:
    """Return a size of this process in bytes, as the system counts it."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def limit_memory(memory_bytes: int) -> None:
    """Let the system refuse an allocation beyond the limit, rather than end the process (Linux)."""
    if not STATUS.exists():
        return
    import resource

    ceiling = resident("VmData") + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or ceiling < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard))


def errors(case: Case, captured: str | None) -> dict[str, Any]:
    """Return the error on Gaussian tensors, and on captured ones where there are any, which is then *the* error."""
    on_gaussian = relative_error(case, *gaussian(case))
    found = {"relative_error": on_gaussian, "relative_error_gaussian": on_gaussian, "relative_error_on": "gaussian"}
    if captured is None:
        return found
    from safetensors import safe_open

    with safe_open(captured, framework="pt") as file:
        words = (file.metadata() or {})["words"]
        tensors = [
            file.get_slice(name)[:, :, : case.n].to(device=case.device, dtype=DTYPES[case.dtype])
            for name in ("query", "key", "value")
        ]
    single = Case(**{**case.__dict__, "batch": 1})
    return found | {"relative_error": relative_error(single, *tensors), "relative_error_on": words}


if __name__ == "__main__":
    main()
