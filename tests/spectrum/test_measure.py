"""The measurement end to end, on tiny random models and on the real one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import rankscope
from rankscope._errors import RankscopeError
from rankscope.spectrum import runner as runner_module
from rankscope.spectrum.nulls import NULLS
from tiny_measure import DOCUMENTS, tiny_bert, tiny_causal, tiny_t5, word_tokenizer
from zoo import tiny_model

SMALL = {"n": 24, "windows": 6, "null_windows": 2, "workers": 2}


def run(model=None, texts=DOCUMENTS, **options):
    return rankscope.measure(model or tiny_bert(), texts, tokenizer=word_tokenizer(), **{**SMALL, **options})


def same_values(a: xr.Dataset, b: xr.Dataset) -> None:
    assert set(a.data_vars) == set(b.data_vars)
    for name in a.data_vars:
        np.testing.assert_array_equal(a[name].values, b[name].values, err_msg=name)


def test_the_dataset_has_the_promised_form():
    result = run()
    assert list(result.baseline.values) == ["trained", "untrained_scaled", "gaussian", "shuffled_rows"]
    assert result.nuclear_fraction.dims == ("baseline", "layer", "head", "index")
    assert result.effective_rank.dims == ("baseline", "window", "layer", "head")
    assert list(result.index.values) == list(range(1, 25))
    assert result.window_count.values.tolist() == [6, 2, 2, 2]
    assert np.isnan(result.effective_rank.sel(baseline="gaussian", window=2)).all()
    curve = result.nuclear_fraction.values
    assert (np.diff(curve, axis=-1) >= -1e-6).all()
    np.testing.assert_allclose(curve[..., -1], 1, atol=1e-6)
    for name in ("logit_sd", "sink_share", "nuclear_rank_90_deflated", "numerical_rank", "sigma_ratio"):
        assert np.isfinite(result[name].sel(baseline="trained")).all()
    assert json.loads(result.attrs["self_check"])["passed"] is True
    assert result.attrs["corpus_hash"]
    frame = result.to_dataframe()
    assert len(frame) > 0


def test_the_real_models_spectra_are_those_of_a_plain_float64_svd():
    """Two windows, every head, every index, against eager weights and numpy alone."""
    from transformers import AutoModel, AutoTokenizer

    from rankscope.corpora import open_corpus
    from rankscope.pretrained import minilm_folder
    from rankscope.windows import packed_windows

    folder = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    result = rankscope.measure("minilm", "pydoc", n=512, windows=2, nulls="none")
    curves = np.zeros((2, 6, 12, 512))
    for window in packed_windows(open_corpus("pydoc"), tokenizer, 512, limit=2):
        ids = torch.as_tensor(window.input_ids).unsqueeze(0)
        with torch.no_grad():
            attentions = model(ids, output_attentions=True).attentions
        sigma = np.linalg.svd(np.stack([a[0].double().numpy() for a in attentions]), compute_uv=False)
        curves[window.index] = np.cumsum(sigma, axis=-1) / sigma.sum(axis=-1, keepdims=True)
    compared = np.abs(result.nuclear_fraction.sel(baseline="trained").values - curves.mean(axis=0))
    assert compared.shape == (6, 12, 512)
    assert compared.max() < 1e-4


@pytest.mark.parametrize("name", NULLS)
def test_every_null_can_be_measured_alone(name):
    result = run(nulls=name, windows=2)
    assert list(result.baseline.values) == ["trained", name]
    assert np.isfinite(result.nuclear_fraction.sel(baseline=name)).all()


def test_scaled_nulls_match_each_trained_heads_deviation():
    result = run(windows=2)
    deviation = result.logit_sd
    for name in ("untrained_scaled", "gaussian"):
        np.testing.assert_allclose(deviation.sel(baseline=name), deviation.sel(baseline="trained"), rtol=1e-3)


def test_values_do_not_depend_on_the_workers():
    same_values(run(workers=1), run(workers=3))


def test_values_do_not_depend_on_the_batch_size():
    """The forward's products round differently with the batch; draws and windows are the same."""
    one, four = run(batch_size=1, nulls="all"), run(batch_size=4, nulls="all")
    for name in ("nuclear_fraction", "effective_rank", "logit_sd", "sink_share"):
        np.testing.assert_allclose(one[name], four[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_sentence_batches_give_what_single_sentences_give():
    """Padding is cut out, never counted: in a batch the shorter sentences are padded."""
    options = {"packing": "sentence", "n": 64, "windows": 5, "nulls": "none"}
    one, many = run(batch_size=1, **options), run(batch_size=5, **options)
    assert len(np.unique(one.nuclear_rank_99)) > 1
    np.testing.assert_allclose(one.nuclear_fraction, many.nuclear_fraction, atol=1e-5)
    np.testing.assert_allclose(one.effective_rank, many.effective_rank, rtol=1e-4)
    assert one.attrs["rank_relative_to"] == "the sentence's own length"
    assert one.index.values[-1] == 1.0


def test_causal_and_encoder_decoder_models_are_measured_with_their_kinds():
    causal = run(tiny_causal(), windows=2)
    assert set(causal.kind.values) == {"self/decoder"}
    both = run(tiny_t5(), windows=2, nulls="gaussian,shuffled_rows")
    assert set(both.kind.values) == {"self/encoder", "self/decoder", "cross/decoder"}
    assert np.isfinite(both.nuclear_fraction).all()


def test_layers_and_heads_by_choice_have_the_whole_runs_values():
    whole, some = run(nulls="all"), run(nulls="all", layers=[1], heads=[0, 2])
    assert some.layer.values.tolist() == [1]
    assert np.isnan(some.effective_rank.sel(head=1)).all()
    part = whole.isel(layer=[1]).effective_rank
    np.testing.assert_allclose(some.effective_rank.sel(head=[0, 2]), part.sel(head=[0, 2]), rtol=1e-6)


def test_a_half_width_stops_the_run_early_but_not_before_sixteen_windows():
    result = run(n=12, windows=40, half_width=0.4, nulls="none")
    assert result.sizes["window"] == 16
    tight = run(n=12, windows=24, half_width=1e-6, nulls="none")
    assert tight.sizes["window"] == 24


def test_more_windows_extend_a_finished_run(tmp_path):
    run(out=tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    longer = run(out=tmp_path, windows=9)
    assert longer.sizes["window"] == 9
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    assert before.items() <= after.items()
    whole = run(windows=9)
    np.testing.assert_allclose(longer.nuclear_fraction, whole.nuclear_fraction, rtol=1e-6)
    np.testing.assert_array_equal(longer.effective_rank, whole.effective_rank)


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from tiny_measure import DOCUMENTS, tiny_bert, word_tokenizer
import rankscope
options = dict(n=24, windows=20, null_windows=8, workers=2)
rankscope.measure(tiny_bert(), DOCUMENTS, tokenizer=word_tokenizer(), out={out!r}, **options)
"""


def test_a_killed_run_goes_on_where_it_stopped_with_identical_values(tmp_path):
    code = KILLED.format(tests=str(Path(__file__).parents[1]), out=str(tmp_path / "killed"))
    parts = tmp_path / "killed" / "parts"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    kept: dict[str, int] = {}
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            now = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.safetensors")} if parts.exists() else {}
            if len(now) > len(kept):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        process.wait()
        now = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.safetensors")}
        assert kept.items() <= now.items(), "a finished part was rewritten"
        kept = now
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert kept.items() <= {p.name: p.stat().st_mtime_ns for p in parts.iterdir()}.items()
    subprocess.run([sys.executable, "-c", code.replace("/killed", "/whole")], env=environment, check=True)
    same_values(rankscope.load(tmp_path / "killed"), rankscope.load(tmp_path / "whole"))


def test_another_text_in_the_same_folder_is_refused(tmp_path):
    run(out=tmp_path)
    with pytest.raises(RankscopeError, match="parts of another text"):
        run(out=tmp_path, texts=[text[::-1] for text in DOCUMENTS])


def test_other_weights_in_the_same_folder_are_refused(tmp_path):
    run(out=tmp_path)
    with pytest.raises(RankscopeError, match="weights is"):
        run(tiny_bert(seed=1), out=tmp_path)


def test_nan_weights_are_one_clear_line_and_leave_no_result(tmp_path):
    model = tiny_bert()
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[0, 0] = float("nan")
    with pytest.raises(RankscopeError, match="layer 1, head 0: non-finite logits"):
        run(model, out=tmp_path)
    assert not (tmp_path / "spectrum.nc").exists()


def test_a_window_of_non_finite_logits_is_left_out_and_counted(monkeypatch):
    original = runner_module.head_spectra

    def faulty(head, place, *rest):
        if (place.window, place.layer, place.head) == (3, 0, 1):
            head = type(head)(
                head.query * float("inf"), *[getattr(head, f) for f in list(head.__dataclass_fields__)[1:]]
            )
        return original(head, place, *rest)

    monkeypatch.setattr(runner_module, "head_spectra", faulty)
    result = run(windows=12, n=12)
    assert 3 not in result.window.values
    assert result.sizes["window"] == 11
    assert json.loads(result.attrs["left_out"]) == {"3": "layer 0, head 1: non-finite logits"}
    clean = run(windows=12, n=12)
    kept = clean.effective_rank.sel(window=result.window)
    np.testing.assert_array_equal(result.effective_rank, kept)


def test_a_null_the_model_can_not_serve_is_refused_before_the_folder_is_taken(tmp_path):
    with pytest.raises(RankscopeError, match="gaussian_moments"):
        run(tiny_model("mpnet"), nulls="all", out=tmp_path)
    assert run(tiny_model("mpnet"), nulls="gaussian", out=tmp_path).reached.values.tolist() == ["fallback"] * 2


def test_an_n_too_large_for_memory_is_refused_before_anything_runs_and_names_the_way():
    with pytest.raises(RankscopeError, match="--method matrix-free"):
        run(tiny_t5(), n=200_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 4096}, "positions: choose --n"),
        ({"n": 2}, "`n` must be at least 8"),
        ({"windows": 0}, "`windows` must be at least 1"),
        ({"packing": "sentences"}, "did you mean 'sentence'"),
        ({"nulls": "gausian"}, "did you mean 'gaussian'"),
        ({"method": "grem"}, "did you mean 'gram'"),
        ({"layers": [9]}, r"`layers` has \[9\]"),
        ({"heads": [4]}, r"`heads` has \[4\]"),
        ({"half_width": 0}, "`half_width` must lie"),
        ({"heads": []}, "`heads` must hold at least one"),
        ({"workers": 0}, "`workers` must be at least 1"),
        ({"seed": -1}, "`seed` must lie between"),
        ({"seed": 2**63}, "`seed` must lie between"),
        ({"texts": []}, "holds no text"),
        ({"texts": ["a short text"]}, "window"),
    ],
)
def test_bad_input_is_one_clear_line(options, message):
    with pytest.raises(RankscopeError, match=message) as caught:
        run(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "match"),
    [({"width": 0.0}, r"`width` must lie in \(0, 1\], got 0"), ({"tolerance": 0.0}, "`tolerance` must be at least")],
)
def test_arguments_are_refused_before_a_model_is_looked_for(given, match, tmp_path):
    with pytest.raises(RankscopeError, match=match):
        rankscope.measure("no such model", "pydoc", out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_refusal_leaves_no_folder_behind(tmp_path):
    with pytest.raises(RankscopeError, match="a window needs"):
        run(out=tmp_path / "short", texts=["w1 w2"])
    with pytest.raises(RankscopeError, match="layers"):
        run(out=tmp_path / "layers", layers=[99])
    assert list(tmp_path.iterdir()) == []
