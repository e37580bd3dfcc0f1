"""Real runs in fresh processes: rows, skipping, memory, and a benchmark that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope._errors import RankscopeError
from rankscope.bench import store
from rankscope.bench.captured import captured, held
from rankscope.bench.cases import Case
from rankscope.bench.cost_model import Rates
from rankscope.bench.run import in_child, run_case, run_cases
from tiny_measure import DOCUMENTS, tiny_bert, word_tokenizer

RATES = Rates(1e11, 1e10)
CASE = Case("linformer", 96, 16, heads=2, head_dim=8, repeats=3)


def test_a_row_holds_what_was_found_and_where(tmp_path):
    real = captured(tmp_path, 96, model=tiny_bert(), corpus=DOCUMENTS, tokenizer=word_tokenizer())
    (row,) = run_cases([CASE], tmp_path, captured=real, rates=RATES)
    assert row["status"] == "ok"
    assert (row["mechanism"], row["n"], row["k"], row["mode"], row["view"]) == (
        "linformer",
        96,
        16,
        "forward",
        "attention",
    )
    assert 0 < row["seconds_median"] < 5
    assert row["seconds_spread"] >= 0
    assert len(row["seconds"]) == 3
    assert row["peak_bytes"] >= 0
    assert 0 < row["relative_error"] < 3
    assert row["relative_error"] != row["relative_error_gaussian"]
    assert "BertModel" in row["relative_error_on"]
    assert row["environment"]["versions"]["torch"]
    assert store.load(tmp_path) == [json.loads(store.path_of(CASE, tmp_path).read_text())]


def test_a_finished_case_is_skipped_and_a_failed_or_damaged_one_is_not(tmp_path):
    row = {"mechanism": "linformer", "status": "ok", "mark": 1}
    store.save(CASE, row, tmp_path)
    seen = []
    assert run_cases([CASE], tmp_path, progress=lambda *told: seen.append(told)) == [row]
    assert seen == [(CASE, row, True)]
    store.save(CASE, {**row, "status": "failed"}, tmp_path)
    assert store.finished(CASE, tmp_path) is None
    store.path_of(CASE, tmp_path).write_text('{"mechanism": "linf')
    assert store.finished(CASE, tmp_path) is None
    with pytest.raises(RankscopeError, match="delete it and run again"):
        store.load(tmp_path)


def test_a_case_too_large_is_a_row_and_the_next_one_runs(tmp_path):
    large = Case("exact_naive", 100_000, heads=2, head_dim=8)
    rows = run_cases([large, CASE], tmp_path, rates=RATES, memory_bytes=10**9)
    assert [row["status"] for row in rows] == ["out of memory at n = 100000", "ok"]
    assert rows[0]["seconds_median"] is None
    assert "GB" in rows[0]["reason"]


def test_a_case_that_meets_the_limit_while_running_is_a_row_too():
    large = Case("exact_naive", 4096, heads=4, head_dim=8)
    found = in_child(large, None, 40_000_000, timeout=120)
    assert found["status"] == "out of memory at n = 4096"


def test_a_case_that_takes_too_long_is_a_row_too(tmp_path):
    row = run_case(CASE, RATES, timeout=0.05)
    assert row["status"] == "longer than 0.05 s"


def test_a_killed_benchmark_keeps_its_finished_cases(tmp_path):
    command = [sys.executable, "-m", "rankscope", "bench", "attention", "--n", "64", "--k", "8", "--heads", "2"]
    command += ["--head-dim", "8", "--repeats", "2", "--model", "none", "--out", str(tmp_path)]
    command += ["--mechanisms", "exact_naive,sdpa,linformer"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    assert 1 <= len(kept) < 3
    assert len(store.load(tmp_path)) == len(kept)
    subprocess.run(command, check=True, capture_output=True)
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert {row["mechanism"] for row in store.load(tmp_path)} == {"exact_naive", "sdpa", "linformer"}


def test_captured_tensors_are_reused_and_a_text_too_short_is_refused(tmp_path):
    model = tiny_bert()
    path = captured(tmp_path, 40, model=model, corpus=DOCUMENTS, tokenizer=word_tokenizer())
    before = path.stat().st_mtime_ns
    assert (
        captured(tmp_path, 30, model=model, corpus=DOCUMENTS, tokenizer=word_tokenizer()).stat().st_mtime_ns == before
    )
    assert held(path, "other") == 0
    with pytest.raises(RankscopeError, match="are needed at n=100000"):
        captured(tmp_path, 100_000, model=model, corpus=DOCUMENTS, tokenizer=word_tokenizer())


def test_a_folder_without_cases_is_refused(tmp_path):
    with pytest.raises(RankscopeError, match="no case in"):
        store.load(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(RankscopeError, match="is no case"):
        store.load(tmp_path)


def test_an_out_that_is_a_file_is_refused(tmp_path):
    file = Path(tmp_path / "file")
    file.write_text("")
    with pytest.raises(RankscopeError, match="`out`"):
        run_cases([CASE], file / "deeper")
