"""``rankscope finetune``: from a folder to the printed table, and a user's mistake in one line."""

import json

import pytest

from rankscope.cli.__main__ import main
from rankscope.cli.finetune import lines_of
from tiny_task import save_encoder, save_task


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    save_encoder(folder / "model")
    save_task(folder / "data" / "SST-2")
    return folder


def call(capsys, place, out, *more):
    given = ["--task", "sst2", "--data", place / "data", "--model", place / "model", "--max-steps", 3, "--n", 12]
    code = main(["finetune", *(str(word) for word in (*given, "--device", "cpu", "--out", out, *more))])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_result_is_written_and_printed_in_the_papers_form(capsys, place, tmp_path):
    code, printed, err = call(capsys, place, tmp_path / "run", "--seeds", 2)
    assert code == 0, err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    found = result["metrics"]["accuracy"]
    assert f"accuracy {100 * found['mean']:.1f} ± {100 * found['standard_error']:.1f} %   (2 seeds)" in printed
    assert "of which 50.0 % have the most frequent label" in printed
    assert "| 512 | Linformer, k = 128 | 92.4 |" in printed
    assert f"| 12 | {place / 'model'} (ours) |" in printed


def test_a_model_that_answers_always_the_same_is_said_to_have_learnt_nothing(capsys, place, tmp_path):
    code, _, err = call(capsys, place, tmp_path / "run")
    assert code == 0, err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    [run] = result["runs"]
    assert 0.5 <= run["one_answer_share"] <= 1
    words = "1 of 1 seeds give every row the same answer"
    run["one_answer_share"] = 1.0
    assert words in lines_of(result)
    run["one_answer_share"] = 0.9
    assert words not in lines_of(result)


def test_the_same_command_goes_on_and_another_is_refused(capsys, place, tmp_path):
    assert call(capsys, place, tmp_path / "run")[0] == 0
    before = (tmp_path / "run" / "seed-0.json").stat().st_mtime_ns
    assert call(capsys, place, tmp_path / "run", "--seeds", 2)[0] == 0
    assert (tmp_path / "run" / "seed-0.json").stat().st_mtime_ns == before
    code, _, err = call(capsys, place, tmp_path / "run", "--batch-size", 8)
    assert code == 2
    assert "batch_size is 8, there it is 32" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--task", "cola"], "`task` has no 'cola'"),
        (["--data", "/no/such/folder"], "does not exist: give --data DIR"),
        (["--n", "99"], "holds 24 positions"),
        (["--model", "no/such/model/x"], "no/such/model/x"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(capsys, place, tmp_path, more, message):
    code, _, err = call(capsys, place, tmp_path / "run", *more)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, len(lines)) == (2, 1)
    assert message in lines[0]
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
