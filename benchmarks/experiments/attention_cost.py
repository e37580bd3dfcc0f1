"""Which premise predicts where an approximate attention pays: operations, or bytes moved.

    python benchmarks/experiments/attention_cost.py [--bench runs/bench] [--n 512,…,16384] [--document-only]

Runs `rankscope bench attention`'s cases (finished ones are skipped) forward and with backward, each in a process of
its own, then compares measured times and crossover lengths with those of `rankscope.bench.cost_model`, once by
operations alone and once by bytes alone, at the machine's measured rates. Writes
`benchmarks/results/attention_cost.json`, and from it alone `docs/cost.md`: no number of the page is typed.

- ``times``: per mechanism, k and mode: measured over predicted, median over lengths, for either premise.
- ``crossovers``: measured (95 % interval over repeats) and predicted, against attention written out and fused.
- ``exponents``: fitted powers of n, time and memory, over n >= 1,024.
- ``verdict``: for either premise and yardstick, on how many mechanisms it agrees whether there is a crossover within
  the measured lengths, and the median factor by which predicted and measured crossovers differ where both exist.
"""

import argparse
import json
import math
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rankscope._environment import environment
from rankscope.bench import store
from rankscope.bench.captured import captured
from rankscope.bench.cases import Case, choose_mechanisms, grid
from rankscope.bench.cost_model import Rates, fast_memory, predict
from rankscope.bench.run import run_cases
from rankscope.report.bench_reading import CONDITIONS, YARDSTICKS, Group, Series, groups
from rankscope.report.growth import Crossover, Exponent

ROOT = Path(__file__).parents[2]
PREMISES = ("operations", "bytes")
NAMES = {"exact_naive": "attention written out", "sdpa": "exact fused attention"}
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--n", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--k", default="128,256")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=float, default=8.0, help="GB a case may take")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "attention_cost.json")
    parser.add_argument("--document-only", action="store_true", help="write docs/cost.md from the result file again")
    arguments = parser.parse_args()
    if not arguments.document_only:
        measure(arguments)
        result = analyse(groups(store.load(arguments.bench)))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    (ROOT / "docs" / "cost.md").write_text(document(json.loads(arguments.out.read_text())))


def measure(arguments: argparse.Namespace) -> None:
    lengths, sizes = ([int(x) for x in text.split(",")] for text in (arguments.n, arguments.k))
    real = captured(arguments.bench, max(lengths), model="minilm", corpus="pydoc")
    names = choose_mechanisms("all", causal=False)
    settings = {"repeats": arguments.repeats, "threads": arguments.threads}
    for mode in ("forward", "train"):
        run_cases(
            grid(names, lengths, sizes, mode=mode, **settings),
            arguments.bench,
            captured=real,
            memory_bytes=int(arguments.memory * 1e9),
            progress=lambda case, row, skipped: print(case.name, row["status"], row["seconds_median"], flush=True),
        )


def analyse(found: list[Group]) -> Result:
    """Return everything the page is written from."""
    found = [group for group in found if group.view == "attention" and group.series]
    rows = [row for group in found for series in group.series for row in series.rows]
    lost = [row for group in found for row in group.lost]
    rates = {key: statistics.median(row["rates"][key] for row in rows) for key in ("operations", "bytes")}
    result: Result = {
        "environment": environment(),
        "conditions": {group.mode: group.conditions for group in found},
        "rates": rates,
        "fast_memory_bytes": fast_memory(),
        "load_average_median": statistics.median(row.get("load_average") or 0.0 for row in rows),
        "error_on": sorted({row["relative_error_on"] for row in rows}),
        "rows": [
            {key: row[key] for key in ("mechanism", "n", "k", "mode", "seconds_median", "seconds_spread", "peak_bytes")}
            | {"relative_error": row["relative_error"], "predicted": predict(case_of(row), Rates(**rates)).__dict__}
            for row in rows
        ],
        "not_measured": [{key: row[key] for key in ("mechanism", "n", "k", "mode", "status")} for row in lost],
    }
    result["times"] = [times(series, group, Rates(**rates)) for group in found for series in group.series]
    result["exponents"] = [
        {**named(series, group), **{field: asdict(series.exponent(key)) for field, key in FIELDS.items()}}
        for group in found
        for series in group.series
    ]
    result["crossovers"] = [
        crossing
        for group in found
        for series in group.series
        for yardstick in YARDSTICKS
        if (crossing := crossovers(series, group, yardstick, Rates(**rates))) is not None
    ]
    result["verdict"] = verdict(result["crossovers"])
    return plain(result)


FIELDS = {"time": "seconds_median", "memory": "peak_bytes"}


def plain(value: Any) -> Any:
    """Make infinities words and NaN nothing: JSON has neither."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "never" if value > 0 else "always"
    return value


def case_of(row: Result) -> Case:
    fields = ("mechanism", "n", "k", "mode", "view", *CONDITIONS)
    return Case(**{key: row[key] for key in fields})


def named(series: Series, group: Group) -> Result:
    return {"mechanism": series.mechanism, "k": series.k, "mode": group.mode}


def times(series: Series, group: Group, rates: Rates) -> Result:
    """Return measured over predicted, by either premise."""
    ratios: dict[str, list[float]] = {premise: [] for premise in PREMISES}
    for row in series.rows:
        guess = predict(case_of(row), rates)
        for premise in PREMISES:
            ratios[premise].append(row["seconds_median"] / getattr(guess, f"seconds_by_{premise}"))
    return {**named(series, group), **{premise: statistics.median(found) for premise, found in ratios.items()}}


def predicted_crossover(case: Case, yardstick: str, premise: str, rates: Rates, lengths: tuple[int, int]) -> float:
    """Return the first n from which a mechanism stays cheaper by one premise, within the measured lengths."""
    first, last = lengths
    steps = [round(first * (last / first) ** (i / 400)) for i in range(401)]

    def seconds(name: str, k: int | None, n: int) -> float:
        return getattr(predict(replace(case, mechanism=name, k=k, n=n), rates), f"seconds_by_{premise}")

    cheaper = [seconds(case.mechanism, case.k, n) < seconds(yardstick, None, n) for n in steps]
    if not cheaper[-1]:
        return math.inf
    dearer = [i for i, flag in enumerate(cheaper) if not flag]
    return float(steps[dearer[-1] + 1]) if dearer else -math.inf


def crossovers(series: Series, group: Group, yardstick: str, rates: Rates) -> Result | None:
    measured = group.crossover(series, yardstick)
    if measured is None or series.mechanism == "exact_naive":
        return None
    case, ends = case_of(series.rows[0]), (measured.first, measured.last)
    return {
        **named(series, group),
        "yardstick": yardstick,
        "measured": asdict(measured),
        **{premise: predicted_crossover(case, yardstick, premise, rates, ends) for premise in PREMISES},
    }


def verdict(found: list[Result]) -> list[Result]:
    """Return how well either premise predicts the crossovers."""
    rows = []
    for yardstick in YARDSTICKS:
        for premise in PREMISES:
            own = [c for c in found if c["yardstick"] == yardstick and c["mechanism"] not in YARDSTICKS]
            agree = [(c["measured"]["n"] == math.inf) == (c[premise] == math.inf) for c in own]
            pairs = [(c["measured"]["n"], c[premise]) for c in own]
            factors = [
                math.exp(abs(math.log(guess / n))) for n, guess in pairs if math.isfinite(n) and math.isfinite(guess)
            ]
            rows.append(
                {
                    "yardstick": yardstick,
                    "premise": premise,
                    "agrees": sum(agree),
                    "of": len(agree),
                    "median_factor": statistics.median(factors) if factors else math.nan,
                    "compared": len(factors),
                }
            )
    return rows


def document(result: Result) -> str:
    """Return the page."""
    rates, conditions = result["rates"], next(iter(result["conditions"].values()))
    shape = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in conditions.items() if value)
    parts = [
        f"""# What attention costs, and which premise predicts it

Linformer and its rivals count *operations*; FlashAttention ([arXiv 2205.14135](https://arxiv.org/abs/2205.14135))
counts *bytes moved*. Both are in closed form in `rankscope.bench.cost_model`; this page holds them against times
measured on one machine. Every number is read from `benchmarks/results/attention_cost.json`, which
`benchmarks/experiments/attention_cost.py` writes.

Machine: {result["environment"]["processor"]}, {result["environment"]["cores"]} cores; {shape}. Measured rates:
{rates["operations"] / 1e9:.0f} billion operations a second (a 2048 × 2048 float32 product),
{rates["bytes"] / 1e9:.1f} GB a second (a large copy), {result["fast_memory_bytes"] / 2**20:.3g} MiB of second-level
cache. Median load average before a case: {result["load_average_median"]:.2g}.""",
        "## Which premise predicts the crossover\n\n" + verdict_words(result) + "\n\n" + verdict_table(result),
        "## Crossover lengths\n\nFrom which n a mechanism stays faster; in brackets the 95 % interval over repeats.\n\n"
        + crossover_table(result),
        "## Measured over predicted time\n\nThe median over lengths; 1 is a perfect prediction, and a premise that is "
        "wrong for a mechanism is far above it.\n\n" + times_table(result),
        "## Fitted powers of n\n\nWith 95 % intervals, over n ≥ 1,024.\n\n" + exponent_table(result),
        f"Errors in the result file are on: {'; '.join(result['error_on'])}.",
    ]
    if result["not_measured"]:
        lost = ", ".join(f"{row['mechanism']} {row['mode']} ({row['status']})" for row in result["not_measured"])
        parts.append(f"Not measured: {lost}.")
    return "\n\n".join(parts) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def label(row: Result) -> list[str]:
    return [row["mechanism"] if row["k"] is None else f"{row['mechanism']}, k = {row['k']}", row["mode"]]


def back(value: Any) -> float:
    """Read what :func:`plain` wrote."""
    words = {"never": math.inf, "always": -math.inf, None: math.nan}
    return words[value] if value is None or isinstance(value, str) else float(value)


def length_words(value: Any, measured: Result) -> str:
    n = back(value)
    if n == math.inf:
        return f"not up to {measured['last']:,}"
    return f"{measured['first']:,} or earlier" if n == -math.inf else f"{n:,.0f}"


def verdict_words(result: Result) -> str:
    lines = []
    for yardstick in YARDSTICKS:
        own = {row["premise"]: row for row in result["verdict"] if row["yardstick"] == yardstick}
        counts = {premise: own[premise]["agrees"] for premise in PREMISES}
        best = max(PREMISES, key=lambda premise: counts[premise])
        tie = counts["operations"] == counts["bytes"]
        who = "both premises do equally well" if tie else f"*{best}* do better"
        lines.append(
            f"Against {NAMES[yardstick]} {who} at telling which mechanisms cross within the measured lengths: "
            f"operations are right for {counts['operations']} of {own['operations']['of']}, "
            f"bytes for {counts['bytes']}."
        )
    return "\n".join(lines)


def verdict_table(result: Result) -> str:
    rows = [
        [
            NAMES[row["yardstick"]],
            row["premise"],
            f"{row['agrees']} of {row['of']}",
            "–" if row["median_factor"] is None else f"{row['median_factor']:.2g} (of {row['compared']})",
        ]
        for row in result["verdict"]
    ]
    return table(
        ["against", "premise", "right on whether there is one", "median factor off, where both have one"], rows
    )


def crossover_table(result: Result) -> str:
    rows = []
    for row in result["crossovers"]:
        measured = row["measured"]
        found = Crossover(*(back(measured[key]) for key in ("n", "low", "high")), measured["first"], measured["last"])
        guesses = [length_words(row[premise], measured) for premise in PREMISES]
        rows.append([*label(row), NAMES[row["yardstick"]], found.words(), *guesses])
    return table(["mechanism", "mode", "faster than", "measured", "by operations", "by bytes"], rows)


def times_table(result: Result) -> str:
    rows = [[*label(row), *(f"{row[premise]:.2g}" for premise in PREMISES)] for row in result["times"]]
    return table(["mechanism", "mode", "over operations' time", "over bytes' time"], rows)


def exponent_table(result: Result) -> str:
    def words(found: Result) -> str:
        e = Exponent(*(back(found[key]) for key in ("value", "low", "high")), found["lengths"])
        if math.isnan(e.value):
            return "–"
        return f"{e.value:.2f}" if math.isnan(e.low) else f"{e.value:.2f} [{e.low:.2f}, {e.high:.2f}]"

    rows = [[*label(row), words(row["time"]), words(row["memory"])] for row in result["exponents"]]
    return table(["mechanism", "mode", "time", "memory"], rows)


if __name__ == "__main__":
    main()
