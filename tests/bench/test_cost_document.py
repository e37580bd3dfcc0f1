"""The cost page is written from its result file, and its verdict is that of the numbers."""

import json
import math
import re
import runpy
from pathlib import Path

import pytest

from rankscope.report.bench_reading import groups
from report.bench_rows import rows

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "experiments" / "attention_cost.py"
PAGE, RESULT = ROOT / "docs" / "cost.md", ROOT / "benchmarks" / "results" / "attention_cost.json"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no benchmarks")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.mark.skipif(not RESULT.exists(), reason="the experiment has not been run")
def test_page_holds_the_result_files_numbers(script):
    assert PAGE.read_text() == script["document"](json.loads(RESULT.read_text()))


def test_times_made_by_one_premise_give_it_the_verdict(script):
    rates = {"operations": 1e11, "bytes": 1e10}
    made = rows(rates=rates)
    for row in made:
        guess = script["predict"](script["case_of"](row), script["Rates"](**rates))
        row["seconds_median"] = guess.seconds_by_operations
        row["seconds"] = [guess.seconds_by_operations] * 3
    result = json.loads(json.dumps(script["analyse"](groups(made)), allow_nan=False))
    assert all(row["operations"] == pytest.approx(1) for row in result["times"])
    for row in result["verdict"]:
        if row["premise"] == "operations":
            assert row["agrees"] == row["of"] == 2
    page = script["document"](result)
    # Linformer's 8 n k d operations meet exact attention's 4 n² d at n = 2 k.
    assert "| linformer, k = 256 | forward | exact fused attention | from n = 512 or earlier |" in page
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_a_predicted_crossover_is_where_the_premise_says(script):
    case = script["Case"]("linformer", 4096, 256)
    rates = script["Rates"](1e11, 1e10)
    found = script["predicted_crossover"](case, "sdpa", "operations", rates, (300, 8192))
    assert found == pytest.approx(512, rel=0.02)
    assert script["predicted_crossover"](case, "sdpa", "operations", rates, (300, 400)) == math.inf
    assert script["predicted_crossover"](case, "sdpa", "operations", rates, (600, 8192)) == -math.inf
