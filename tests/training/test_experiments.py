"""The experiments' scripts at toy size: they run, skip what is finished, and write page and result from the runs."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from rankscope._errors import RankscopeError
from rankscope.training import child, compare
from tiny_task import save_encoder, save_task

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "experiments"
pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="an installed package has no benchmarks")


def script(name):
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def test_listops_runs_each_transformer_once_and_writes_its_page(tmp_path, monkeypatch):
    ran = []

    def in_process(name, order):
        ran.append((order["n"], name, order["model"]["projected_length"]))
        return child.OBJECTIVES[order["objective"]](order)

    monkeypatch.setattr(compare, "in_child", in_process)
    given = "--n 32 --k 4,8 --max-steps 2 --seeds 2 --batch-size 4 --train-rows 20 --eval-rows 20 --hidden-size 16"
    places = ["--work", tmp_path / "work", "--result", tmp_path / "listops.json", "--page", tmp_path / "listops.md"]
    arguments = [*given.split(), "--threads", "1", "--device", "cpu", *map(str, places)]
    main = script("listops")["main"]
    main(arguments)
    exact = [name for _, name, k in ran if k is None]
    assert len(exact) == len(set(exact)) == 2
    result = json.loads((tmp_path / "listops.json").read_text())
    assert [cell["settings"]["k"] for cell in result["cells"]] == [4, 8]
    text = (tmp_path / "listops.md").read_text()
    assert "## n = 32, k = 8, headwise" in text
    assert "| accuracy, equal tokens |" in text
    assert "| Long Range Arena, arXiv 2011.04006, Table 1 | 36.37 | 35.70 |" in text
    count = len(ran)
    main(arguments)
    assert len(ran) == count
    (tmp_path / "listops.md").unlink()
    main([*map(str, places), "--page-only"])
    assert (tmp_path / "listops.md").read_text() == text


def test_finetuning_pairs_checkpoints_and_writes_table_2(tmp_path):
    folders = [str(save_encoder(tmp_path / name)) for name in "abcd"]
    save_task(tmp_path / "data" / "SST-2")
    main = script("finetuning")["main"]
    places = ["--work", tmp_path / "work", "--result", tmp_path / "r.json", "--page", tmp_path / "page.md"]
    arguments = [
        *("--model", f"exact={folders[0]},{folders[1]}", "--model", f"linformer={folders[2]},{folders[3]}"),
        *("--glue", str(tmp_path / "data"), "--tasks", "sst2", "--n", "12", "--seeds", "2", "--max-steps", "2"),
        *("--device", "cpu", *map(str, places)),
    ]
    main(arguments)
    text = (tmp_path / "page.md").read_text()
    assert "| 12 | exact (ours) | " in text
    # No place of this machine is in what may be committed.
    assert str(tmp_path) not in text + (tmp_path / "r.json").read_text()
    assert "'GLUE/SST-2/dev.tsv'" in (tmp_path / "r.json").read_text()
    assert "| 512 | Linformer, k = 128 | 92.4 |" in text
    # All four checkpoints are the same weights.
    assert "| linformer | +0.0 (+0.0 to +0.0) |" in text
    assert "Most frequent label: SST-2 50.0 %" in text
    with pytest.raises(RankscopeError, match="as many checkpoints for each model"):
        main([*arguments, "--model", f"third={folders[0]}"])


def test_errors_and_differences_are_over_checkpoints():
    namespace = script("finetuning")
    values, checkpoints = np.array([0.5, 0.7, 0.8, 0.8]), np.array([0, 0, 1, 1])
    assert namespace["mean_and_error"](values, checkpoints) == pytest.approx((0.7, 0.1))
    assert namespace["mean_and_error"](values[:2], checkpoints[:2]) == pytest.approx((0.6, 0.1))
    runs = lambda scores: [{"metrics": {"accuracy": score}} for score in scores]  # noqa: E731
    cells = [
        {"name": name, "task": "sst2", "checkpoint": place, "runs": runs(scores)}
        for name, place, scores in (
            ("a", 0, (0.5, 0.6)),
            ("a", 1, (0.7, 0.8)),
            ("b", 0, (0.6, 0.7)),
            ("b", 1, (0.8, 0.9)),
        )
    ]
    assert namespace["difference"]({"cells": cells}, "b", "a", "sst2").startswith("+10.0 (+10.0 to")


def test_the_verdict_says_no_more_than_the_interval():
    verdict = script("listops")["verdict"]

    def cell(mean, low, high):
        return {budget: {"accuracy": {"difference": {"mean": mean, "low": low, "high": high}}} for budget in BUDGETS}

    assert "no evidence either way" in verdict(cell(0.1, None, None))
    assert "can't be told apart" in verdict(cell(0.1, -0.1, 0.3))
    assert "the Transformer is ahead: -10.0 points" in verdict(cell(-0.1, -0.2, -0.05))
    assert "Linformer is ahead: +10.0 points" in verdict(cell(0.1, 0.05, 0.2))


BUDGETS = ("equal_tokens", "equal_time")
