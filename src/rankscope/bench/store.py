"""One JSON file a case, written whole or not at all."""

import json
from pathlib import Path
from typing import Any

from rankscope._errors import RankscopeError
from rankscope.bench.cases import Case
from rankscope.spectrum.parts import write_whole

Row = dict[str, Any]
FAILED = "failed"
NEEDED = ("mechanism", "n", "k", "mode", "view", "status")


def path_of(case: Case, folder: Path) -> Path:
    """Return a case's file."""
    return folder / f"{case.name}.json"


def save(case: Case, row: Row, folder: Path) -> Path:
    """Write a case's row atomically.

    Raises:
        RankscopeError: The disk is full or the place can't be written.
    """
    path = path_of(case, folder)
    write_whole(path, (json.dumps(row, indent=1) + "\n").encode())
    return path


def finished(case: Case, folder: Path) -> Row | None:
    """Return the row of a case that needs no other run; one that failed or is damaged does.

    A case out of memory is finished: delete its file to try it with more.
    """
    try:
        row = json.loads(path_of(case, folder).read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return None if str(row.get("status", FAILED)).startswith(FAILED) else row


def load(folder: str | Path) -> list[Row]:
    """Return every row of a benchmark's folder, shortest first.

    Raises:
        RankscopeError: There is none, or a file is damaged.
    """
    folder, rows = Path(folder), []
    for path in sorted(folder.glob("*.json")):
        try:
            row = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise RankscopeError(f"{str(path)!r} can't be read as a case ({error}): delete it and run again") from None
        if not isinstance(row, dict) or any(key not in row for key in NEEDED):
            raise RankscopeError(f"{str(path)!r} is no case of `rankscope bench attention`: move it elsewhere")
        rows.append(row)
    if not rows:
        raise RankscopeError(f"no case in {str(folder)!r}: give a folder that `rankscope bench attention` wrote")
    return sorted(rows, key=lambda row: (row["n"], row["mechanism"], row["k"] or 0))
