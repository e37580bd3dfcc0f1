"""The paper's Table 2 as printed, and the same form with our runs beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COLUMNS = {"sst2": "SST-2", "imdb": "IMDB", "qnli": "QNLI", "qqp": "QQP"}


@dataclass(frozen=True)
class Printed:
    """A row of the paper's Table 2: accuracies on the dev sets in percent, of one run each."""

    n: int
    model: str
    scores: tuple[float, float, float, float]
    average: float

    @property
    def by_task(self) -> dict[str, float]:
        """Task to accuracy in percent."""
        return dict(zip(COLUMNS, self.scores, strict=True))


#: Wang et al. 2020, arXiv 2006.04768v3, Table 2. The paper gives neither seeds nor errors.
TABLE_2 = (
    Printed(512, "RoBERTa-base (BERT's corpus)", (93.1, 94.1, 90.9, 90.9), 92.25),
    Printed(512, "Linformer, k = 128", (92.4, 94.0, 90.4, 90.2), 91.75),
    Printed(512, "Linformer, k = 128, shared kv", (93.4, 93.4, 90.3, 90.3), 91.85),
    Printed(512, "Linformer, k = 128, shared kv, layer", (93.2, 93.8, 90.1, 90.2), 91.83),
    Printed(512, "Linformer, k = 256", (93.2, 94.0, 90.6, 90.5), 92.08),
    Printed(512, "Linformer, k = 256, shared kv", (93.3, 93.6, 90.6, 90.6), 92.03),
    Printed(512, "Linformer, k = 256, shared kv, layer", (93.1, 94.1, 91.2, 90.8), 92.30),
    Printed(512, "BERT-base", (92.7, 93.5, 91.8, 89.6), 91.90),
    Printed(512, "DistilBERT", (91.3, 92.8, 89.2, 88.5), 90.45),
    Printed(1024, "Linformer, k = 256", (93.0, 93.8, 90.4, 90.4), 91.90),
    Printed(1024, "Linformer, k = 256, shared kv", (93.0, 93.6, 90.3, 90.4), 91.83),
    Printed(1024, "Linformer, k = 256, shared kv, layer", (93.2, 94.2, 90.8, 90.5), 92.18),
)
#: What the printed rows were made with, as far as the paper says.
PRINTED_SCALE = "12 layers of width 768, pretrained on 3.3 G words in 250,000 updates on 64 V100; one run a cell"


@dataclass(frozen=True)
class Ours:
    """A row of our own.

    Args:
        n: Tokens a row at most.
        model: In words.
        scores: Task to mean accuracy and its standard error over seeds, in [0, 1]; the error ``None`` of one seed.
    """

    n: int
    model: str
    scores: Mapping[str, tuple[float, float | None]]


def table_2(ours: Sequence[Ours], scale: str, tasks: Sequence[str] = tuple(COLUMNS)) -> str:
    """Write the table as Markdown: our rows, then the printed ones, with the scale of both.

    The average is given where a row has every task of the table.

    Args:
        ours: Our rows.
        scale: What ours were made with.
        tasks: Which columns.

    Returns:
        The table and a line below it.

    Example:
        >>> print(table_2([Ours(128, "tiny", {"sst2": (0.75, 0.01)})], "2 layers", ["sst2"]).splitlines()[2])
        | 128 | tiny (ours) | 75.0 ± 1.0 |
    """
    tasks = [task for task in COLUMNS if task in tasks]
    whole = len(tasks) > 1
    head = ["n", "model", *(COLUMNS[task] for task in tasks), *(["average"] if whole else [])]
    rows = [head, ["---"] * len(head)]
    for row in ours:
        cells = [_cell(row.scores.get(task)) for task in tasks]
        means = [row.scores[task][0] for task in tasks if task in row.scores]
        average = [f"{100 * sum(means) / len(means):.1f}" if len(means) == len(tasks) else "–"] if whole else []
        rows.append([str(row.n), f"{row.model} (ours)", *cells, *average])
    for printed in TABLE_2:
        cells = [f"{printed.by_task[task]:.1f}" for task in tasks]
        last = [f"{printed.average:.2f}" if len(tasks) == len(COLUMNS) else f"{_mean(printed, tasks):.1f}"]
        rows.append([str(printed.n), printed.model, *cells, *(last if whole else [])])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    note = (
        f"Accuracy in percent on the evaluated split. Ours: mean ± standard error over seeds; {scale}. "
        f"The other rows: Table 2 as printed ({PRINTED_SCALE}). The two scales differ, so only differences between "
        f"rows of one kind can be compared."
    )
    return "\n".join([*lines, "", note]) + "\n"


def _mean(printed: Printed, tasks: Sequence[str]) -> float:
    return sum(printed.by_task[task] for task in tasks) / len(tasks)


def _cell(score: tuple[float, float | None] | None) -> str:
    if score is None:
        return "–"
    mean, error = score
    return f"{100 * mean:.1f}" if error is None else f"{100 * mean:.1f} ± {100 * error:.1f}"
