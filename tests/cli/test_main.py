"""The command line: one line and exit code 2 for a user's mistake, real runs on a model in a folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope
from rankscope.cli.__main__ import COMMANDS, main
from tiny_measure import DOCUMENTS, tiny_bert, word_tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_bert().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": document}) for document in DOCUMENTS))
    return path


def call(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_every_command(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(capsys, name):
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    assert f"rankscope {name}" in out


def test_version(capsys):
    assert call(capsys, "--version")[1].strip() == rankscope.__version__


def test_a_misspelt_command_gets_the_nearest(capsys):
    code, _, err = call(capsys, "mesure")
    assert code == 2
    assert "did you mean 'measure'" in err


def test_measure_then_report(capsys, model_folder, text, tmp_path):
    out = tmp_path / "run"
    code, printed, err = call(
        capsys, "measure", model_folder, text, "--n", 24, "--windows", 5, "--null-windows", 2, "--out", out
    )
    assert code == 0, err
    assert "self-check: passed" in printed
    assert sorted(path.name for path in out.iterdir()) == ["description.json", "parts", "settings.json", "spectrum.nc"]
    dataset = rankscope.load(out)
    assert dataset.sizes["window"] == 5
    code, printed, err = call(capsys, "report", out)
    assert code == 0, err
    assert Path(printed.strip()) == out / "report.html"
    assert (out / "report.html").stat().st_size > 10_000
    assert list(out.glob("*.png"))


def test_doctor_reads_a_linformers_maps(capsys, tmp_path):
    import torch

    from rankscope import LinformerConfig, LinformerForMaskedLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LinformerForMaskedLM(
            LinformerConfig(
                vocab_size=45,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=24,
                projected_length=6,
            )
        )
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    code, printed, _ = call(capsys, "doctor", str(tmp_path))
    assert code == 0
    assert printed.count("24 × 6") == 2


def test_doctor_tells_how_each_attention_is_reached_and_checks_itself(capsys, model_folder):
    code, printed, err = call(capsys, "doctor", model_folder)
    assert code == 0, err
    assert printed.count("routed") >= 2
    assert re.search(r"passed\W+yes", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL", "TEXT", "--n", "9999"], "positions: choose --n"),
        (["MODEL", "TEXT", "--nulls", "gausian"], "did you mean 'gaussian'"),
        (["MODEL", "TEXT", "--layers", "first"], "`layers` must be numbers"),
        (["MODEL", "TEXT", "--heads", "3-1"], "from the lower to the higher"),
        (["MODEL", "TEXT", "--heads", "0-999999999999"], "below 10000"),
        (["MODEL", "no/such/file.txt"], "no/such/file.txt"),
        (["no/such/model", "TEXT"], "no/such/model"),
        (["MODEL", "TEXT", "--column", "body"], "body"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_two(capsys, model_folder, text, tmp_path, arguments, message):
    given = [str({"MODEL": model_folder, "TEXT": text}.get(a, a)) for a in arguments]
    code, _, err = call(capsys, "measure", *given, "--out", tmp_path / "run")
    line = [row for row in err.splitlines() if row.startswith("error: ")]
    assert code == 2
    assert len(line) == 1
    assert message in line[0]
    assert "Traceback" not in err


def test_a_refused_setting_can_be_corrected_in_the_same_folder(capsys, model_folder, text, tmp_path):
    given = ["measure", model_folder, text, "--n", 24, "--windows", 1, "--nulls", "none", "--out", tmp_path / "run"]
    assert call(capsys, *given, "--heads", "999")[0] == 2
    code, _, err = call(capsys, *given, "--heads", "0")
    assert code == 0, err


def test_an_unknown_option_is_refused(capsys, model_folder, text, tmp_path):
    code, _, err = call(capsys, "measure", model_folder, text, "--out", tmp_path / "run", "--windws", 3)
    assert code == 2
    assert "windws" in err


def test_a_damaged_result_is_one_line(capsys, tmp_path):
    (tmp_path / "spectrum.nc").write_bytes(b"not netcdf")
    code, _, err = call(capsys, "report", tmp_path)
    assert (code, err.count("\n")) == (2, 1)


def test_the_module_runs_as_a_program():
    run = subprocess.run([sys.executable, "-m", "rankscope", "--version"], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == rankscope.__version__
