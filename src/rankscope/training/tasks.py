"""The tasks a classifier is finetuned on: a table of columns, labels and metrics; read from files or the hub."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope._errors import MissingExtraError, RankscopeError, did_you_mean
from rankscope._hub import hub_problem
from rankscope._registry import Registry
from rankscope.training.data import keyed_uniform
from rankscope.training.listops import COLUMNS, Grammar, expressions

#: Official QQP has a handful of rows with fields missing; a file with more of them than this is another kind of file.
MOST_BROKEN_ROWS = 0.001
# LRA's own numbers of expressions.
LISTOPS_ROWS = {"train": 96_000, "eval": 2_000}
SUBSET = 3
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SPLITS = ("train", "eval")


@dataclass(frozen=True)
class Task:
    """One row of the table.

    Args:
        name: As on the command line.
        texts: One column, or two for a pair of sentences.
        label: The label's column.
        labels: The labels as files spell them; the place of each is the class number, as on the hub.
        metrics: The first is the one the paper prints.
        folders: Names of its folder in a download of the whole benchmark.
        files: File names of each split, the first that exists is taken; ``eval`` is what results are about.
        hub: Repository, configuration and split names; ``None``: it is generated.
    """

    name: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    folders: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    hub: tuple[str, str | None, Mapping[str, str]] | None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns it needs."""
        return (*self.texts, self.label)


@dataclass(frozen=True)
class Split:
    """Labelled texts.

    Args:
        texts: One or two strings a row.
        labels: Class numbers ``(rows,)``.
        source: Where they come from, in words.
        left_out: Rows of the file whose fields did not match its header.
    """

    texts: Sequence[tuple[str, ...]]
    labels: NDArray[np.int64]
    source: str
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def majority(self) -> float:
        """Accuracy of always answering the most frequent label."""
        return float(np.bincount(self.labels).max() / len(self.labels))

    @property
    def data_hash(self) -> str:
        """SHA-256 over texts and labels, in order."""
        digest = sha256(self.labels.tobytes())
        for texts in self.texts:
            digest.update("\t".join(texts).encode() + b"\n")
        return digest.hexdigest()


def _glue(
    name: str,
    folder: str,
    texts: tuple[str, ...],
    label: str = "label",
    labels: tuple[str, ...] = ("0", "1"),
    metrics: tuple[str, ...] = ("accuracy",),
) -> Task:
    files = {"train": ("train.tsv",), "eval": ("dev.tsv",)}
    hub = ("nyu-mll/glue", name, {"train": "train", "eval": "validation"})
    return Task(name, texts, label, labels, metrics, (folder, name), files, hub)


TASKS: Registry[Task] = Registry(
    "task",
    {
        "sst2": _glue("sst2", "SST-2", ("sentence",)),
        "qnli": _glue("qnli", "QNLI", ("question", "sentence"), labels=("entailment", "not_entailment")),
        # GLUE names both metrics for QQP; its two labels are unevenly frequent.
        "qqp": _glue("qqp", "QQP", ("question1", "question2"), label="is_duplicate", metrics=("accuracy", "f1")),
        "imdb": Task(
            "imdb",
            ("text",),
            "label",
            ("0", "1"),
            ("accuracy",),
            ("imdb", "IMDB"),
            {"train": ("train.tsv",), "eval": ("test.tsv", "dev.tsv")},
            ("stanfordnlp/imdb", None, {"train": "train", "eval": "test"}),
        ),
        "listops": Task(
            "listops",
            COLUMNS[:1],
            COLUMNS[1],
            tuple("0123456789"),
            ("accuracy",),
            ("listops", "listops-1000"),
            {"train": ("train.tsv", "basic_train.tsv"), "eval": ("test.tsv", "basic_test.tsv")},
            None,
        ),
    },
)


def load_split(
    task: Task, data: str | Path | None, split: str, *, limit: int | None = None, n: int = 2048, seed: int = 0
) -> Split:
    """Read one split of a task.

    Args:
        task: A row of :data:`TASKS`.
        data: A folder with the task's TSV files in GLUE's form (a header, tabs, no quoting), or one that holds the
            task's folder; else a hub repository. ``None``: the task's own on the hub; ListOps is then generated.
        split: ``train`` or ``eval``.
        limit: So many rows at most, drawn without replacement by a fixed key: the same rows for every model and
            seed, in the file's order.
        n: Tokens a row, which bounds generated ListOps (:func:`grammar_for`); files are not cut here.
        seed: Of generated ListOps.

    Returns:
        The split.

    Raises:
        RankscopeError: No such folder, file or column, a label that the task does not have, no row at all, or a hub
            that does not answer.
    """
    if split not in SPLITS:
        raise RankscopeError(f"`split` must be one of {', '.join(SPLITS)}, got {split!r}")
    if limit is not None and limit < 1:
        raise RankscopeError(f"`limit` must be at least 1 row, got {limit}")
    if data is None and task.hub is None:
        return _generated(split, limit or LISTOPS_ROWS[split], n, seed)
    folder = None if data is None else Path(data).expanduser()
    if folder is not None and folder.is_dir():
        read = _from_file(task, _file_of(task, folder, split))
    else:
        read = _from_hub(task, None if data is None else str(data), split)
    if not len(read):
        raise RankscopeError(f"{read.source} holds no row of `task` {task.name!r}: give a {split} split with rows")
    if limit is None or limit >= len(read):
        return read
    chosen = np.sort(np.argsort(keyed_uniform(0, SUBSET, 0, 0, len(read)), kind="stable")[:limit])
    texts = [read.texts[row] for row in chosen]
    return Split(texts, read.labels[chosen], f"{limit} of {len(read)} rows of {read.source}", read.left_out)


def grammar_for(n: int) -> Grammar:
    """ListOps' bounds for sequences of ``n`` tokens, ``<s>`` and ``</s>`` among them, so that none is cut.

    LRA's own (500 to 2,000) from n = 2,001 on; shorter ones end at n, and begin at a quarter of it where 500 would
    leave less than half of the range.

    Example:
        >>> [(g.min_length, g.max_length) for g in map(grammar_for, (2048, 1024, 64))]
        [(500, 2000), (500, 1023), (15, 63)]
    """
    if n < 16:
        raise RankscopeError(f"`n` must be at least 16 for listops, got {n}")
    longest = min(2000, n - 1)
    return Grammar(min_length=500 if longest >= 1000 else longest // 4, max_length=longest)


def score(task: Task, labels: NDArray[np.int64], predicted: NDArray[np.int64]) -> dict[str, float]:
    """Score predictions by the task's metrics, as scikit-learn computes them; F1 is that of class 1.

    Args:
        task: A row of :data:`TASKS`.
        labels: True classes ``(rows,)``.
        predicted: Predicted classes ``(rows,)``.

    Returns:
        Each metric, in [0, 1].

    Raises:
        MissingExtraError: scikit-learn is not installed.

    Example:
        >>> score(TASKS["qqp"], np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]))
        {'accuracy': 0.75, 'f1': 0.67}
    """
    try:
        from sklearn.metrics import accuracy_score, f1_score
    except ModuleNotFoundError:
        raise MissingExtraError("scikit-learn", "train", "Scoring a task") from None
    measures = {
        "accuracy": lambda: accuracy_score(labels, predicted),
        "f1": lambda: f1_score(labels, predicted, pos_label=1, zero_division=0.0),
    }
    return {name: float(measures[name]()) for name in task.metrics}


def _generated(split: str, rows: int, n: int, seed: int) -> Split:
    grammar, held_out = grammar_for(n), LISTOPS_ROWS["eval"]
    if split == "eval" and rows > held_out:
        raise RankscopeError(
            f"`limit` is {rows}, but generated listops holds {held_out} expressions out, as LRA does: ask for fewer, "
            f"or write files with rankscope.training.listops.write_listops and give their folder as `data`"
        )
    kept = [(e.source, e.target) for e in expressions("test", held_out, seed=seed, grammar=grammar)]
    if split == "train":
        # What any run may be evaluated on is trained on by none, however few rows it evaluates.
        sources = {source for source, _ in kept}
        found = ((e.source, e.target) for e in expressions("train", rows, seed=seed, grammar=grammar))
        kept = [pair for pair in found if pair[0] not in sources]
    words = f"generated listops, {grammar.min_length} < length < {grammar.max_length}, seed {seed}"
    return Split([(source,) for source, _ in kept[:rows]], np.array([t for _, t in kept[:rows]], np.int64), words)


def _file_of(task: Task, folder: Path, split: str) -> Path:
    places = [folder, *(folder / name for name in task.folders)]
    for place in places:
        for name in task.files[split]:
            if (place / name).is_file():
                return place / name
    wanted = " or ".join(task.files[split])
    raise RankscopeError(
        f"`data` folder {str(folder)!r} has no {wanted} for `task` {task.name!r}, nor has a folder "
        f"{' or '.join(task.folders)} in it: give the folder that holds them"
    )


def _from_file(task: Task, path: Path) -> Split:
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as stream:
            lines = [line.rstrip("\r\n") for line in stream]
    except UnicodeDecodeError:
        raise RankscopeError(
            f"{str(path)!r} is not UTF-8 text: convert it, as with `iconv -f latin1 -t utf-8`"
        ) from None
    except OSError as error:
        raise RankscopeError(f"{str(path)!r} can't be read ({error.strerror or error})") from None
    header = lines[0].split("\t") if lines else []
    places = [_place(task, header, column, repr(str(path))) for column in task.columns]
    rows, broken = [], []
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) == len(header):
            rows.append((number, [fields[place] for place in places]))
        elif line:
            broken.append(number)
    if len(broken) > MOST_BROKEN_ROWS * max(1, len(lines) - 1):
        raise RankscopeError(
            f"{str(path)!r} line {broken[0]} does not have the {len(header)} fields of the header, and so "
            f"{len(broken)} lines in all: mend the file (tabs between fields, no quoting)"
        )
    where = repr(str(path))
    labels = [_label(task, row[-1], f"{where} line {number}") for number, row in rows]
    return Split([tuple(row[:-1]) for _, row in rows], np.array(labels, np.int64), where, len(broken))


def _place(task: Task, header: Sequence[str], column: str, where: str) -> int:
    if column not in header:
        if not header:
            raise RankscopeError(
                f"{where} is empty: `task` {task.name!r} wants a header with {', '.join(task.columns)}"
            )
        raise RankscopeError(
            f"{where} has no column {column!r}, which `task` {task.name!r} wants: {did_you_mean(column, header)}"
        )
    return list(header).index(column)


def _label(task: Task, value: object, where: str) -> int:
    try:
        return task.labels.index(str(value))
    except ValueError:
        kind = "no label" if value in ("", None) else f"the label {value!r}"
        raise RankscopeError(
            f"{where} has {kind}, which `task` {task.name!r} does not know: wanted one of {', '.join(task.labels)}"
        ) from None


def _from_hub(task: Task, repository: str | None, split: str) -> Split:
    cure = (
        f"give --data DIR, a folder with {' and '.join(names[0] for names in task.files.values())} "
        f"(columns {', '.join(task.columns)})"
    )
    if task.hub is None:
        raise RankscopeError(
            f"`data` {repository!r} is no folder here, and {task.name!r} is not read from a hub: {cure}"
        )
    if repository is not None and not HUB_ID.fullmatch(repository):
        raise RankscopeError(f"`data` {repository!r} does not exist: {cure}, or a hub repository")
    own, configuration, splits = task.hub
    name = repository or own
    problem = hub_problem()
    if problem is not None:
        here = "" if repository is None else f"`data` {repository!r} is no folder here; "
        raise RankscopeError(f"{here}`task` {task.name!r} would come from the hub's {name!r}, but {problem}: {cure}")
    import datasets

    try:
        rows: Any = datasets.load_dataset(name, configuration, split=splits[split])
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RankscopeError(f"`data` {name!r} can't be had from the hub ({reason}): {cure}") from None
    return from_rows(task, rows.column_names, rows, f"the hub's {name!r}, split {splits[split]!r}")


def from_rows(task: Task, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], where: str) -> Split:
    """Take a split from rows in the hub's form, where labels are class numbers and the label's column is ``label``.

    Args:
        task: A row of :data:`TASKS`.
        columns: The rows' columns.
        rows: Column to value.
        where: For messages.

    Returns:
        The split.

    Raises:
        RankscopeError: A column is missing, or a label is outside the task.
    """
    for column in (*task.texts, "label"):
        _place(task, columns, column, where)

    def read() -> Iterator[tuple[tuple[str, ...], int]]:
        for number, row in enumerate(rows):
            label = row["label"]
            if not isinstance(label, int) or not 0 <= label < len(task.labels):
                raise RankscopeError(
                    f"{where} row {number} has the label {label!r}, wanted 0 to {len(task.labels) - 1}: choose a split "
                    f"with labels"
                )
            yield tuple(row[column] for column in task.texts), label

    found = list(read())
    return Split([texts for texts, _ in found], np.array([label for _, label in found], np.int64), where)
