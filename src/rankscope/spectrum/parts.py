"""The run's folder: its settings, and parts of at most four windows written whole or not at all."""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rankscope._errors import RankscopeError
from rankscope.spectrum.accumulate import Moments
from rankscope.windows import Window

PART_WINDOWS = 4
# May differ between a run and its continuation: they do not change any window's values.
FREE_SETTINGS = frozenset({"windows", "workers", "batch_size"})


@dataclass
class Part:
    """The measured windows ``start <= w < stop`` of a run.

    Args:
        start: First window.
        stop: One past the last window.
        scalars: ``{baseline: {name: (windows measured, layer, head)}}``; NaN where a head does not exist.
        curves: ``{baseline: {name: Moments over (layer, head, index)}}``.
        measured: ``{baseline: indices of the windows it holds}``, ascending.
        documents: The document each window ``start … stop − 1`` starts in.
        hashes: A hash of each window's token ids.
        left_out: ``{window: why}`` for windows that gave no finite numbers.
        notes: Counters of the numerics (retries, sampled checks).
    """

    start: int
    stop: int
    scalars: dict[str, dict[str, NDArray[np.float64]]]
    curves: dict[str, dict[str, Moments]]
    measured: dict[str, list[int]]
    documents: list[int]
    hashes: list[str]
    left_out: dict[int, str]
    notes: dict[str, float]


class RunFolder:
    """Where a run keeps its settings and finished parts.

    Args:
        path: The folder; made when missing.

    Raises:
        RankscopeError: The path is a file, or can't be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts_path = path / "parts"
        try:
            self.parts_path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RankscopeError(f"`out` {str(path)!r} can't be used as a folder: {error.strerror}") from None
        for leftover in [*path.glob("*.tmp-*"), *self.parts_path.glob("*.tmp-*")]:
            if abandoned(leftover):
                leftover.unlink(missing_ok=True)

    def give_back(self) -> None:
        """Remove the folder again where nothing was put into it."""
        for place in (self.parts_path, self.path):
            with suppress(OSError):  # it holds something
                place.rmdir()

    def claim(self, settings: dict[str, object]) -> None:
        """Write the run's settings, or check that the folder's run has the same ones.

        Raises:
            RankscopeError: Another run is in the folder; the message names every difference.
        """
        path = self.path / "settings.json"
        text = json.dumps(settings, indent=1, sort_keys=True, default=str)
        settings = json.loads(text)
        if path.exists():
            before = read_settings(self.path)
            differences = [
                f"{name} is {settings.get(name)!r}, there it is {before.get(name)!r}"
                for name in sorted(set(before) | set(settings))
                if name not in FREE_SETTINGS and before.get(name) != settings.get(name)
            ]
            if isinstance(before.get("windows"), int) and int(str(settings["windows"])) < before["windows"]:
                differences.append(
                    f"windows is {settings['windows']}, there it is {before['windows']} (it may only grow)"
                )
            if differences:
                raise RankscopeError(
                    f"`out` {str(self.path)!r} holds a run with other settings: {'; '.join(differences)}. "
                    "Use the same settings to go on with it, or another --out"
                )
        write_whole(path, text.encode())

    def finished(self) -> list[tuple[int, int]]:
        """Return the window ranges that are on disk, ascending."""
        ranges = []
        for path in self.parts_path.glob("part-*-*.safetensors"):
            _, start, stop = path.stem.split("-")
            ranges.append((int(start), int(stop)))
        return sorted(ranges)

    def part_path(self, start: int, stop: int) -> Path:
        """Return the file of the windows ``start <= w < stop``."""
        return self.parts_path / f"part-{start:07d}-{stop:07d}.safetensors"

    def save(self, part: Part) -> None:
        """Write one part atomically."""
        arrays: dict[str, NDArray] = {}
        for baseline, scalars in part.scalars.items():
            for name, values in scalars.items():
                arrays[f"scalar/{baseline}/{name}"] = np.ascontiguousarray(values)
        for baseline, curves in part.curves.items():
            for name, moments in curves.items():
                arrays[f"mean/{baseline}/{name}"] = np.ascontiguousarray(moments.mean)
                arrays[f"m2/{baseline}/{name}"] = np.ascontiguousarray(moments.m2)
        header = {
            "start": part.start,
            "stop": part.stop,
            "counts": {b: next(iter(c.values())).count for b, c in part.curves.items() if c},
            "measured": part.measured,
            "documents": part.documents,
            "hashes": part.hashes,
            "left_out": {str(window): why for window, why in part.left_out.items()},
            "notes": part.notes,
        }
        path = self.part_path(part.start, part.stop)
        temporary = temporary_name(path)
        try:
            save_file(arrays or {"empty": np.zeros(1)}, temporary, metadata={"part": json.dumps(header)})
            publish(temporary, path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise disk_error(path, error) from None
        for window in range(part.start, part.stop):
            for kept in self.parts_path.glob(f"{head_prefix(window)}*"):
                kept.unlink(missing_ok=True)

    def load(self, start: int, stop: int) -> Part:
        """Read one part back.

        Raises:
            RankscopeError: The file is damaged.
        """
        path = self.part_path(start, stop)
        scalars: dict[str, dict[str, NDArray]] = {}
        means: dict[str, dict[str, NDArray]] = {}
        curves: dict[str, dict[str, Moments]] = {}
        try:
            with safe_open(path, framework="numpy") as file:
                header = json.loads(file.metadata()["part"])
                for key in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                    kind, _, rest = key.partition("/")
                    baseline, _, name = rest.partition("/")
                    if kind == "scalar":
                        scalars.setdefault(baseline, {})[name] = file.get_tensor(key)
                    elif kind == "mean":
                        means.setdefault(baseline, {})[name] = file.get_tensor(key)
                for baseline, named in means.items():
                    for name, mean in named.items():
                        moments = Moments(header["counts"][baseline], mean, file.get_tensor(f"m2/{baseline}/{name}"))
                        curves.setdefault(baseline, {})[name] = moments
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise RankscopeError(f"{str(path)!r} is damaged ({error}): remove it and run the command again") from None
        return Part(
            start,
            stop,
            scalars,
            curves,
            header["measured"],
            header["documents"],
            header["hashes"],
            {int(window): why for window, why in header["left_out"].items()},
            header["notes"],
        )

    def load_all(self, windows: int) -> Iterator[Part]:
        """Read the finished parts that lie within the first ``windows`` windows, in order."""
        for start, stop in self.finished():
            if stop <= windows:
                yield self.load(start, stop)

    def missing(self, windows: int) -> tuple[int, int] | None:
        """Return the range of windows in which some of the first ``windows`` are not measured, or ``None``."""
        return gap(0, windows, self.finished())

    def describe(self, description: dict[str, object]) -> None:
        """Keep what the result needs beside the parts, so that merging needs neither model nor text."""
        write_whole(self.path / "description.json", json.dumps(description, indent=1, default=str).encode())

    def description(self) -> dict[str, Any]:
        """Read it back.

        Raises:
            RankscopeError: No run of this folder has come to its end.
        """
        path = self.path / "description.json"
        try:
            return json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            raise RankscopeError(
                f"{str(self.path)!r} holds no finished run or shard: give its `rankscope measure` command again"
            ) from None


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of the run in a folder.

    Raises:
        RankscopeError: They are damaged.
    """
    path = folder / "settings.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise RankscopeError(f"{str(path)!r} is damaged ({error}): choose another --out") from None


def head_prefix(window: int) -> str:
    """How the files of a window's single heads begin; they are kept until the part that holds it is written.

    Example:
        >>> head_prefix(12)
        'head-0000012-'
    """
    return f"head-{window:07d}-"


def gap(start: int, stop: int, finished: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the windows of ``start <= w < stop`` that no finished part holds, or ``None``.

    Example:
        >>> gap(4, 8, [(0, 4), (4, 6)]), gap(0, 4, [(0, 4)])
        ((6, 8), None)
    """
    missing = set(range(start, stop)).difference(*(range(a, b) for a, b in finished))
    return (min(missing), max(missing) + 1) if missing else None


def add_notes(total: dict[str, float], more: dict[str, float]) -> None:
    """Add counters into a running total; a name that ends in ``_max`` keeps the larger.

    Example:
        >>> total = {"retries": 1.0, "error_max": 0.5}
        >>> add_notes(total, {"retries": 2.0, "error_max": 0.1})
        >>> total
        {'retries': 3.0, 'error_max': 0.5}
    """
    for name, value in more.items():
        before = total.get(name, 0.0)
        total[name] = max(before, value) if name.endswith("_max") else before + value


def window_hash(window: Window) -> str:
    """Hash a window's token ids: by it a continued run knows its text again."""
    return sha256(f"{window.input_ids}".encode()).hexdigest()[:16]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: temporary name, fsync, rename.

    Raises:
        RankscopeError: The disk is full or the place can't be written; nothing half-written stays.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from None


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that tells who writes it."""
    return path.with_name(f"{path.name}.tmp-{socket.gethostname()}-{os.getpid()}")


def abandoned(temporary: Path) -> bool:
    """Whether the process that wrote a temporary file is gone; another machine's can't be told and stays."""
    host, _, process = temporary.name.rpartition(".tmp-")[2].rpartition("-")
    if host != socket.gethostname() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(process) == os.getpid()


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its name, surviving a crash of the machine."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def disk_error(path: Path, error: Exception) -> RankscopeError:
    """Say in one line why a file could not be written and what is safe."""
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    cause = "the disk is full" if full else str(error)
    return RankscopeError(
        f"could not write {str(path)!r}: {cause}. Finished parts are kept: make room and run the same command again"
    )
