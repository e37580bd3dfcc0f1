"""``rankscope compare``: a table, a user's mistake in one line."""

import json

from rankscope.cli.__main__ import main
from rankscope.training import child, compare

SIZES = {
    "--n": 32,
    "--k": 4,
    "--max-steps": 2,
    "--seeds": 1,
    "--batch-size": 4,
    "--hidden-size": 16,
    "--layers": 1,
    "--train-rows": 20,
    "--eval-rows": 20,
    "--seconds": 1e-6,
    "--device": "cpu",
}


def test_listops_from_nothing(capsys, tmp_path, monkeypatch):
    # A process of its own is tests/training/test_compare.py's; four of them take half a minute to start.
    monkeypatch.setattr(compare, "in_child", lambda name, order: child.OBJECTIVES[order["objective"]](order))
    given = [str(word) for pair in SIZES.items() for word in pair]
    code = main(["compare", "listops", *given, "--out", str(tmp_path / "run")])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == {"tokens": 2, "time": {"transformer": 1, "linformer": 1}}
    for words in ("accuracy, equal tokens", "accuracy, equal time", "tokens per second", "peak memory bytes"):
        assert f"| {words} |" in printed.out
    assert "one pair: no interval" in printed.out
    assert printed.err.count("budget: ") == 4


def test_a_mistake_is_one_line_and_exit_code_two(capsys, tmp_path):
    code = main(["compare", "listops", "--n", "64", "--k", "65", "--out", str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert "`k` must be at most `n` = 64, got 65" in err
    assert not (tmp_path / "run").exists()
