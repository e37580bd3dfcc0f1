"""Pretraining: one curve however it is computed, spectra of the model itself, mistakes that cost nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.cli.__main__ import main
from rankscope.models.modeling_linformer import LinformerForMaskedLM
from rankscope.training import args as settings
from rankscope.training.args import load_args, shipped_configs
from rankscope.training.build import build_config
from rankscope.training.mlm_trainer import only_at, summed_loss
from rankscope.training.pretrain import pretrain
from rankscope.training.spectra import load_steps

SMALL = {
    "corpus": "pydoc",
    "n": 32,
    "vocab_size": 300,
    "batch_size": 8,
    "max_steps": 12,
    "warmup_steps": 2,
    "log_every": 2,
    "eval_every": 4,
    "eval_windows": 5,
    "save_every": 4,
    "device": "cpu",
}
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "projected_length": 8,
}


def small(model=None, **changes):
    return load_args("tiny", {**SMALL, **changes, "model": {**MODEL, **(model or {})}})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished Linformer run, with dropout, so that a resumption must bring the random state back."""
    out = tmp_path_factory.mktemp("whole")
    return pretrain(small({"hidden_dropout_prob": 0.1}, measure_every=6, measure_windows=1), out), out


def curves(result):
    return np.array([row[1] for row in result["curves"]["loss"]]), np.array([r[1] for r in result["curves"]["eval"]])


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_shipped_configs_are_read_and_their_models_built(name):
    args = load_args(name, {"corpus": "pydoc"})
    for k in (args.model["projected_length"], None):
        args = load_args(name, {"corpus": "pydoc", "model": {"projected_length": k}})
        with torch.device("meta"):
            model = LinformerForMaskedLM(build_config(args, args.vocab_size))
        assert model.config.max_position_embeddings == args.n
        assert model.config.exact == (k is None)
    if name == "paper-base":
        assert (model.config.num_hidden_layers, model.config.hidden_size, args.n) == (12, 768, 512)


def test_the_loss_at_masked_tokens_is_the_whole_models():
    torch.manual_seed(0)
    model = LinformerForMaskedLM(build_config(small(), 300)).eval()
    ids = torch.randint(5, 300, (3, 32))
    labels = torch.where(torch.rand(3, 32) < 0.2, ids, -100)
    expected = model(input_ids=ids, labels=labels).loss * (labels != -100).sum()
    with only_at(model.lm_head, labels != -100):
        logits = model(input_ids=ids).logits
    assert logits.shape == (int((labels != -100).sum()), 300)
    torch.testing.assert_close(summed_loss(logits, labels), expected, rtol=2e-6, atol=0)
    assert model(input_ids=ids).logits.shape == (3, 32, 300)


def test_a_run_learns_and_says_what_it_was(whole):
    result, out = whole
    loss, held_out = curves(result)
    assert loss[-1] < loss[0]
    assert held_out[-1] < held_out[0]
    assert abs(held_out[0] - result["data"]["uniform_loss"]) < 0.2
    assert result["tokens"] == 12 * 8 * 32
    assert result["metrics"]["perplexity"] == pytest.approx(np.exp(held_out[-1]))
    assert {"seed", "steps", "tokens", "loss", "metrics", "environment"} <= set(result)
    assert json.loads((out / "result.json").read_text()) == result
    assert sorted(p.suffix for p in (out / "model").iterdir()) == [".json", ".json", ".json", ".safetensors"]
    model = LinformerForMaskedLM.from_pretrained(out / "model")
    assert model.config.projected_length == 8
    # The same command again gives what is there.
    args = small({"hidden_dropout_prob": 0.1}, measure_every=6, measure_windows=1)
    assert pretrain(args, out) == result


def test_spectra_of_a_linformer_are_of_its_n_by_k_map(whole):
    _, out = whole
    steps = load_steps(out / "spectra")
    assert list(steps) == [0, 6, 12]
    last = steps[12]
    assert last.sizes["index"] == 8
    assert "n × k" in last.attrs["map"]
    assert last.attrs["rank_relative_to"].startswith("k")
    assert last.baseline.values.tolist() == ["trained", "gaussian"]
    curve = last.nuclear_fraction.sel(baseline="trained").values
    assert np.allclose(curve[..., -1], 1, atol=1e-6)
    assert not np.allclose(steps[0].nuclear_fraction.values, last.nuclear_fraction.values, atol=1e-4)


def test_measuring_changes_nothing(whole, tmp_path):
    result, _ = whole
    unmeasured = pretrain(small({"hidden_dropout_prob": 0.1}), tmp_path / "run")
    for ours, theirs in zip(curves(unmeasured), curves(result), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_micro_batches_change_nothing(tmp_path):
    one = pretrain(small(), tmp_path / "one")
    four = pretrain(small(micro_batch_size=2), tmp_path / "four")
    for ours, theirs in zip(curves(four), curves(one), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_a_stopped_run_goes_on_as_if_it_had_not(whole, tmp_path):
    result, _ = whole

    class Stop(Exception):
        pass

    def stop(at):
        if at.step >= 10:
            raise Stop

    args = small({"hidden_dropout_prob": 0.1}, measure_every=6, measure_windows=1)
    with pytest.raises(Stop):
        pretrain(args, tmp_path / "run", progress=stop)
    # A checkpoint that was cut short has no mark, and is passed over.
    (tmp_path / "run" / "checkpoints" / "checkpoint-11").mkdir()
    resumed = pretrain(args, tmp_path / "run")
    assert resumed["starts"] == 2
    for ours, theirs in zip(curves(resumed), curves(result), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


SCRIPT = """
import json, os, signal, sys
from rankscope.training.args import load_args
from rankscope.training.pretrain import pretrain
out, kill, given = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
def progress(at):
    if kill and at.step >= kill:
        os.kill(os.getpid(), signal.SIGKILL)
pretrain(load_args("tiny", given), out, progress=progress)
"""


def run_script(tmp_path, out, kill, given, launcher=()):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script), str(out), str(kill), json.dumps(given)]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250
    )


@pytest.mark.slow  # its in-process twin is test_a_stopped_run_goes_on_as_if_it_had_not
def test_a_killed_process_goes_on(whole, tmp_path):
    result, _ = whole
    given = {**SMALL, "model": {**MODEL, "hidden_dropout_prob": 0.1}}
    killed = run_script(tmp_path, tmp_path / "run", 10, given)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "result.json").exists()
    again = run_script(tmp_path, tmp_path / "run", 0, given)
    assert again.returncode == 0, again.stderr
    resumed = json.loads((tmp_path / "run" / "result.json").read_text())
    for ours, theirs in zip(curves(resumed), curves(result), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow  # two processes start torch: some 25 s on two cores
def test_two_processes_give_the_curve_of_one(tmp_path):
    given = {**SMALL, "micro_batch_size": 2, "model": MODEL}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = run_script(tmp_path, tmp_path / "two", 0, given, launcher)
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "two" / "result.json").read_text())
    assert two["processes"] == 2
    one = pretrain(small(), tmp_path / "one")
    for ours, theirs in zip(curves(two), curves(one), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_exact_attention_is_measured_as_any_transformer(tmp_path):
    args = small({"projected_length": None}, max_steps=2, measure_every=2, measure_windows=1, save_every=2)
    result = pretrain(args, tmp_path / "run")
    assert result["model"]["kind"] == "Transformer"
    steps = load_steps(tmp_path / "run" / "spectra")
    assert steps[2].sizes["index"] == 32
    assert "map" not in steps[2].attrs
    assert result["loss"] < 10


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"warmup_step": 3}, "unknown key 'warmup_step': did you mean 'warmup_steps'"),
        ({"n": 2}, "`n` must be at least 8"),
        ({"save_every": 3}, "`save_every` must be a multiple of `log_every`"),
        ({"precision": "float16"}, "`precision` has no 'float16'"),
        ({"learning_rate": 0.0}, "`learning_rate` must be above 0"),
        ({"batch_size": "8"}, "`batch_size` must be int, got '8'"),
        ({"seed": -1}, "`seed` must be at least 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(overrides, words):
    with pytest.raises(RankscopeError) as error:
        load_args("tiny", {**SMALL, **overrides})
    assert words in str(error.value)


def test_every_setting_reaches_the_check_of_its_type():
    assert {item.name for item in settings.fields(settings.PretrainArgs)} >= set(SMALL)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"projected_lenght": 8}, "no keyword 'projected_lenght': did you mean 'projected_length'"),
        ({"vocab_size": 8}, "`model.vocab_size` follows from"),
        ({"projection_sharing": "headwize"}, "did you mean 'headwise'"),
        ({"projected_length": 64}, "64"),
    ],
)
def test_a_refused_model_gives_the_folder_back(tmp_path, model, words):
    with pytest.raises(RankscopeError) as error:
        pretrain(small(model), tmp_path / "run")
    assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_another_config_in_the_same_folder_is_refused(whole, capsys):
    _, out = whole
    before = sorted(out.rglob("*"))
    options = ["--config", "tiny", "--corpus", "pydoc", "--out", str(out)]
    assert main(["pretrain", *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "model.projected_length is 128, there it is 8" in lines[-1]
    assert "n is 512, there it is 32" in lines[-1]
    assert sorted(out.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--config", "tinny"], "did you mean 'tiny'"),
        (["--corpus", "nowhere.txt"], "neither a file"),
        (["--projected-length", "many"], "`projected_length` must be none"),
        (["--tokenizer", "nowhere"], "`tokenizer` 'nowhere' can't be loaded"),
        (["--report-to", "tensorbord"], "`report_to`"),
        (["--beside", "nowhere"], "`beside` 'nowhere' holds no finished run"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys, change, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = {"--config": "tiny", "--corpus": "pydoc", "--out": "run", change[0]: change[1]}
    assert main(["pretrain", *[word for pair in options.items() for word in pair]]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "Traceback" not in error
    assert not Path("run").exists()


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    with pytest.raises(RankscopeError, match=r"loss is nan at step|loss is inf at step"):
        pretrain(small(learning_rate=1e30, max_grad_norm=0.0, warmup_steps=0), tmp_path / "run")


def test_the_command_draws_and_prints(tmp_path, capsys):
    config = tmp_path / "own.toml"
    table = "\n".join(f"{name} = {json.dumps(value)}" for name, value in MODEL.items())
    flat = "\n".join(f"{name} = {json.dumps(value)}" for name, value in {**SMALL, "max_steps": 4}.items())
    config.write_text(f"{flat}\n[model]\n{table}\n")
    base = ["pretrain", "--config", str(config)]
    assert main([*base, "--out", str(tmp_path / "a")]) == 0
    more = ["--projected-length", "none", "--measure-every", "4", "--measure-windows", "1"]
    assert main([*base, *more, "--beside", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert "Linformer, k = 8, learned, shared headwise" in printed
    assert "held-out perplexity" in printed
    assert (tmp_path / "b" / "perplexity.png").stat().st_size > 5000
    assert (tmp_path / "b" / "spectra.png").stat().st_size > 5000
