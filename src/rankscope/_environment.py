"""What a result was made with: versions, threads, processor. Stamped on every result file."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("rankscope", "torch", "transformers", "tokenizers", "datasets", "numpy", "scipy", "xarray")


def version_of(package: str) -> str | None:
    """Return an installed package's version, or ``None``.

    Example:
        >>> version_of("no-such-package") is None
        True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """Return the processor's marketing name where the system tells it, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the git commit of the source tree that runs, or ``None`` for an installed package."""
    try:
        run = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def environment() -> dict[str, object]:
    """Return the birth certificate of a result: versions, processor, thread counts, commit.

    Example:
        >>> sorted(environment())[:3]
        ['commit', 'cores', 'device_name']
    """
    import torch

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device_name": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {package: version_of(package) for package in PACKAGES},
        "commit": commit(),
    }
