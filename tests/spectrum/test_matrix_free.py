"""Measurement where P is never written down, against the dense one on the same heads."""

import numpy as np
import pytest
import torch

import rankscope
from rankscope._errors import RankscopeError
from rankscope.linalg import lanczos
from rankscope.linalg.context_map import ContextMap
from rankscope.spectrum.heads import MaskRule
from rankscope.spectrum.matrix_free import long_index, mask_rule
from tiny_measure import documents, tiny_bert, tiny_causal, tiny_t5, word_tokenizer
from zoo import tiny_model

SHUT = torch.finfo(torch.float32).min
TEXTS = documents(120)


def run(model, **options):
    given = {"n": 200, "windows": 2, "null_windows": 1, "method": "matrix-free", **options}
    return rankscope.measure(model, TEXTS, tokenizer=word_tokenizer(), **given)


@pytest.mark.parametrize("build", [tiny_bert, tiny_causal])
def test_the_band_holds_the_dense_curve_and_known_scalars_agree(build):
    free, dense = run(build(), nulls="gaussian"), run(build(), nulls="gaussian", method="svd")
    for kind in ("nuclear", "energy"):
        exact = dense[f"{kind}_fraction"].values
        low, high = free[f"{kind}_fraction_low"].values, free[f"{kind}_fraction_high"].values
        assert (low - 1e-5 <= exact).all()
        assert (exact <= high + 1e-5).all()
    for name in ("sigma_1", "stable_rank", "sink_share", "logit_sd"):
        np.testing.assert_allclose(free[name], dense[name], rtol=1e-3, err_msg=name)


def test_the_models_own_output_by_fused_attention_leaves_later_layers_as_they_are():
    """Layer 1 reads what layer 0 put out; its logits would move if the fused output differed."""
    free, dense = run(tiny_causal(), nulls="none"), run(tiny_causal(), nulls="none", method="svd")
    np.testing.assert_allclose(free.logit_sd.sel(layer=1), dense.logit_sd.sel(layer=1), rtol=1e-4)


def test_a_killed_run_goes_on_within_its_part_with_identical_values(tmp_path, monkeypatch):
    monkeypatch.setattr(lanczos, "SAVE_EVERY", 0.0)
    options = {"nulls": "gaussian", "workers": 1}
    whole = run(tiny_causal(), **options)
    made, allowed, original = [], [8], ContextMap.gram_matmul

    def product(self, X):
        if len(made) >= allowed[0]:
            raise MemoryError
        made.append(1)
        return original(self, X)

    monkeypatch.setattr(ContextMap, "gram_matmul", product)
    with pytest.raises(MemoryError):
        run(tiny_causal(), out=tmp_path, **options)
    # Three passes exhaust a map of 200 tokens: two heads are whole, one has made two passes.
    kept = sorted(path.name.rpartition(".")[2] for path in (tmp_path / "parts").iterdir())
    assert kept == ["bands", "bands", "lanczos"]
    total, allowed[0] = 3 * 2 * 2 * 4 + 3 * 2 * 4, 10**6
    again = run(tiny_causal(), out=tmp_path, **options)
    assert len(made) == total
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["part-0000000-0000002.safetensors"]
    for name, values in whole.data_vars.items():
        np.testing.assert_array_equal(again[name], values, err_msg=str(name))


def test_nulls_that_shuffle_entries_are_refused_and_left_out_of_all():
    with pytest.raises(RankscopeError, match="shuffles entries of P"):
        run(tiny_bert(), nulls="shuffled_rows")
    assert list(run(tiny_bert(), nulls="all", windows=1).baseline.values) == [
        "trained",
        "untrained",
        "untrained_scaled",
        "gaussian",
        "gaussian_moments",
        "random_tokens",
    ]


def test_a_position_bias_and_a_model_without_the_interface_are_refused_with_the_reason():
    with pytest.raises(RankscopeError, match="position bias"):
        run(tiny_t5())
    with pytest.raises(RankscopeError, match="weights that it does not hand out"):
        run(tiny_model("mpnet"), n=24)


@pytest.mark.parametrize(("n", "window"), [(5, None), (9, 3), (9, 1)])
def test_causal_masks_and_windows_are_read_as_rules(n, window):
    i, j = torch.arange(n).unsqueeze(1), torch.arange(n)
    allowed = (j <= i) & (j > i - (window or n))
    assert mask_rule(torch.where(allowed, 0.0, SHUT)) == MaskRule(is_causal=True, window=window)


def test_any_other_mask_is_refused():
    i, j = torch.arange(6).unsqueeze(1), torch.arange(6)
    for allowed in (j >= i, (j <= i) & (j != 2), (j - i).abs() < 2):
        with pytest.raises(RankscopeError, match="another mask"):
            mask_rule(torch.where(allowed, 0.0, SHUT))
    with pytest.raises(RankscopeError, match="position bias"):
        mask_rule(torch.where(j <= i, 0.5, SHUT))


@pytest.mark.parametrize("n", [100, 512, 513, 3000, 8192])
def test_long_axes_hold_the_quarter_and_the_end(n):
    index = long_index(n)
    assert {n // 4, n} <= set(index.tolist())
    assert (np.diff(index) > 0).all()
    assert (np.diff(index)[index[:-1] >= 512] <= np.ceil(index[:-1][index[:-1] >= 512] / 64) + 1).all()
