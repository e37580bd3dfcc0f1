"""Shards measured in folders of their own, joined into one result."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import xarray as xr

from rankscope._errors import RankscopeError
from rankscope.spectrum.dataset import FILE_NAME, build, save
from rankscope.spectrum.parts import RunFolder, read_settings, temporary_name


def merge(folders: Sequence[str | Path], out: str | Path) -> xr.Dataset:
    """Join the parts of a run's shards and write the result, without model or text.

    The same code merges the parts of an unbroken run, so values do not depend on who measured which part.

    Args:
        folders: Folders that ``measure`` wrote with one set of settings.
        out: A folder for the whole run; may be one of them.

    Returns:
        The dataset, also written to ``out/spectrum.nc``.

    Raises:
        RankscopeError: A folder holds no run, the runs' settings differ (the message names every difference), or
            windows are missing.
    """
    if not folders:
        raise RankscopeError("`folders` must name at least one run: give the shards' folders")
    whole = RunFolder(Path(out))
    descriptions = []
    for path in map(Path, folders):
        if not (path / "settings.json").exists():
            raise RankscopeError(f"{str(path)!r} holds no run: give folders that `rankscope measure` wrote")
        whole.claim(read_settings(path))
        shard = RunFolder(path)
        if (path / "description.json").exists():
            descriptions.append(shard.description())
        for start, stop in shard.finished():
            there = whole.part_path(start, stop)
            if not there.exists():
                temporary = temporary_name(there)
                shutil.copyfile(shard.part_path(start, stop), temporary)
                temporary.replace(there)
    if not descriptions:
        raise RankscopeError("none of the shards has come to its end: give their `rankscope measure` commands again")
    description = max(descriptions, key=lambda one: one["windows"])
    missing = whole.missing(description["windows"])
    if missing is not None:
        raise RankscopeError(
            f"windows are missing between {missing[0]} and {missing[1] - 1} of {description['windows']}: give the "
            "folders of all shards, or measure the missing shard"
        )
    whole.describe(description)
    dataset = build(whole)
    save(dataset, whole.path / FILE_NAME)
    return dataset
