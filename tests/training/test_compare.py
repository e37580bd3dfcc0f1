"""Comparing: the same rows for both models, budgets kept, pairs and intervals right, finished runs kept."""

import errno
import json
import os
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy import stats

from rankscope._errors import RankscopeError
from rankscope.training import child
from rankscope.training.compare import (
    MODELS,
    CompareArgs,
    compare,
    in_child,
    quality,
    ratio,
    share,
    steps_within,
)
from rankscope.training.listops import write_listops
from rankscope.training.tasks import grammar_for

TINY = CompareArgs(
    "listops",
    n=48,
    k=8,
    max_steps=4,
    seeds=2,
    batch_size=4,
    hidden_size=16,
    intermediate_size=16,
    train_rows=40,
    eval_rows=30,
    device="cpu",
)
MLM = replace(TINY, objective="pretrain", n=32, pretrain={"corpus": "pydoc", "vocab_size": 300, "eval_windows": 4})


def in_process(name, order):
    """As in a process of its own, but for the memory."""
    return child.OBJECTIVES[order["objective"]](order)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return compare(TINY, tmp_path_factory.mktemp("compare"), runner=in_process)


def test_both_models_see_the_same_rows_and_as_many_tokens(result):
    for one, other in zip(*(result["runs"]["tokens"][kind] for kind in MODELS), strict=True):
        for name in ("seed", "steps", "tokens", "data_hash", "plan"):
            assert one[name] == other[name]
        assert one["truncated"] == {"train": 0, "eval": 0}
        assert one["loss_curve"] != other["loss_curve"]
    seeds = [row["loss_curve"] for row in result["runs"]["tokens"]["linformer"]]
    assert seeds[0] != seeds[1]


def test_only_the_projections_differ(result):
    """E of each of 2 layers, k × n, and F as large: headwise sharing."""
    sizes = result["parameters"]
    assert sizes["linformer"] - sizes["transformer"] == 2 * 2 * TINY.k * TINY.n


def test_equal_time_gives_each_the_steps_its_speed_allows(result):
    budget = result["seconds_budget"]
    rows = result["runs"]["tokens"]
    assert budget == pytest.approx(np.mean([row["seconds"] for row in rows["transformer"]]))
    assert result["steps"]["time"] == {"transformer": 4, "linformer": steps_within(budget, rows["linformer"])}
    assert result["runs"]["time"]["transformer"] == rows["transformer"]
    for row in result["runs"]["time"]["linformer"]:
        assert row["steps"] == result["steps"]["time"]["linformer"]


def test_the_summary_is_of_its_runs(result):
    for budget, words in (("tokens", "equal_tokens"), ("time", "equal_time")):
        values = {kind: [row["metrics"]["accuracy"] for row in result["runs"][budget][kind]] for kind in MODELS}
        found = result[words]["accuracy"]
        assert found["linformer"]["mean"] == pytest.approx(np.mean(values["linformer"]))
        assert found["difference"]["mean"] == pytest.approx(
            np.mean(np.subtract(values["linformer"], values["transformer"]))
        )


def test_finished_runs_are_kept_and_other_settings_refused(tmp_path):
    seen = []

    def counted(name, order):
        seen.append(name)
        return in_process(name, order)

    args = replace(TINY, seeds=1, seconds=1e-3)
    first = compare(args, tmp_path, runner=counted)
    assert len(seen) == len(set(seen)) == len(list((tmp_path / "runs").iterdir())) >= 2
    before = list(seen)
    again = compare(args, tmp_path, runner=counted)
    assert seen == before
    assert again["runs"] == first["runs"]
    broken = next(iter((tmp_path / "runs").glob("linformer-steps-4-*")))
    broken.write_text("{")
    compare(args, tmp_path, runner=counted)
    assert broken.stem in seen[len(before) :]
    with pytest.raises(RankscopeError, match="k is 4, there it is 8"):
        compare(replace(args, k=4), tmp_path, runner=counted)


def test_a_run_in_a_process_of_its_own_gives_the_same_curve_and_knows_its_memory(tmp_path, result):
    kept = result["runs"]["tokens"]["linformer"][0]
    write_listops(tmp_path / "data", {"train": 40, "test": 30}, seed=0, grammar=grammar_for(TINY.n))
    order = {
        "objective": "listops",
        "model": TINY.model("linformer"),
        "n": TINY.n,
        "steps": TINY.max_steps,
        "seed": 0,
        "threads": 1,
        "settings": asdict(TINY),
        "data": str(tmp_path / "data"),
        "folder": str(tmp_path),
    }
    row = in_child("one", order)
    assert [loss for _, loss in row["loss_curve"]] == pytest.approx([loss for _, loss in kept["loss_curve"]], rel=1e-4)
    assert row["environment"]["torch_threads"] == 1
    assert 50e6 < row["memory_before_bytes"] < row["peak_memory_bytes"] < 4e9


def test_pretraining_is_compared_by_perplexity_on_the_same_windows(tmp_path):
    result = compare(replace(MLM, seeds=1), tmp_path, runner=in_process)
    rows = [result["runs"]["tokens"][kind][0] for kind in MODELS]
    assert rows[0]["data_hash"] == rows[1]["data_hash"]
    assert rows[0]["tokens"] == rows[1]["tokens"] == 4 * 4 * 32
    found = result["equal_tokens"]["perplexity"]
    assert found["difference"] == {
        "mean": pytest.approx(rows[1]["metrics"]["perplexity"] - rows[0]["metrics"]["perplexity"]),
        "low": None,
        "high": None,
    }
    # Four steps from nothing: still about as good as knowing nothing of 300 tokens.
    assert 100 < found["transformer"]["mean"] < 400
    assert result == json.loads((tmp_path / "result.json").read_text())


def test_a_full_disk_is_one_line_and_leaves_no_half(tmp_path, monkeypatch):
    for part in ("tokenizer", "data"):
        (tmp_path / "data" / part).mkdir(parents=True)

    def full(source, target):
        target.mkdir(parents=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(RankscopeError, match="the disk is full"):
        share(tmp_path / "data", tmp_path / "run")
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_intervals_are_students_over_pairs():
    rng = np.random.default_rng(0)
    values = {kind: rng.normal(size=5) for kind in MODELS}
    rows = {kind: [{"metrics": {"accuracy": v}, "cost": float(np.exp(v))} for v in values[kind]] for kind in MODELS}
    test = stats.ttest_rel(values["linformer"], values["transformer"]).confidence_interval(0.95)
    found = quality(rows)["accuracy"]["difference"]
    assert (found["low"], found["high"]) == pytest.approx((test.low, test.high))
    times = ratio(rows, lambda row: row["cost"])["ratio"]
    assert (times["low"], times["high"]) == pytest.approx((np.exp(test.low), np.exp(test.high)))
    assert ratio(rows, lambda row: 0.0)["ratio"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "glue"}, "`objective` must be listops or pretrain"),
        ({"k": 49}, "`k` must be at most `n` = 48"),
        ({"seeds": 0}, "`seeds` must be at least 1"),
        ({"seconds": 0.0}, "`seconds` must be above 0"),
        ({"sharing": "heads"}, "heads"),
        ({"hidden_size": 15}, "num_attention_heads"),
        ({"n": 12, "k": 4}, "at least 16 for listops"),
        ({"pretrain": {"corpus": "pydoc"}}, "`pretrain` has no meaning for listops"),
        ({"objective": "pretrain"}, "`corpus` is needed"),
        ({"objective": "pretrain", "pretrain": {"corpus": "pydoc", "seed": 1}}, "which the comparison sets itself"),
        ({"objective": "pretrain", "pretrain": {"corpus": "pydoc", "vocabsize": 1}}, "did you mean 'vocab_size'"),
        ({"data": "/no/such/folder"}, "does not exist|not read from a hub"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, changes, message):
    with pytest.raises(RankscopeError, match=message) as caught:
        compare(replace(TINY, **changes), tmp_path / "run", runner=in_process)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("runs/*"))
