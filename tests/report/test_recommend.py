"""The advice follows the spectrum and the times, and says which of the two decided."""

import pytest

from rankscope._errors import RankscopeError
from rankscope.bench.cost_model import Rates
from rankscope.report.recommend import EXACT, LINFORMER, needed_k, recommend
from report.bench_rows import rows
from report.synthetic import result

RATES = Rates(1e11, 1e10)
STEEP, FLAT = (0.992, 0.994), (0.95, 0.3)


def spectrum(layers, n=2048, **more):
    return result(layers=layers, heads=4, n=n, windows=3, head_spread=0.0, window_sd=1e-4, **more)


def test_each_layers_k_is_where_its_curve_reaches_the_share():
    ds = spectrum(STEEP)
    found = needed_k(ds, "trained", 0.9, 2048)
    for layer, k in found.items():
        curve = ds["nuclear_fraction"].sel(baseline="trained", layer=layer).mean("head").values
        assert curve[k - 1] >= 0.9
        assert curve[k - 1 - 8] < 0.9
        assert k % 8 == 0
    assert found[0] > found[1]
    assert needed_k(ds, "trained", 0.99, 2048)[0] > found[0]


def test_linformer_where_k_is_small_and_its_time_measured_below_exact():
    advice = recommend(spectrum(STEEP), rows(sizes=(256, 512)))
    assert advice.choice == LINFORMER
    assert advice.k == advice.needed
    assert max(advice.k.values()) <= 256
    assert "measured at k = 256" in " ".join(advice.lines)
    assert "another machine" not in " ".join(advice.lines)


def test_exact_where_the_measured_time_says_so():
    advice = recommend(spectrum(STEEP, n=1024), rows(sizes=(512,)))
    assert advice.choice == EXACT
    assert advice.k == {}
    assert "is not faster" in advice.lines[0]


def test_exact_where_the_spectrum_leaves_no_small_k():
    advice = recommend(spectrum(FLAT), rows(), keep=0.999)
    assert advice.choice == EXACT
    assert "no k below n" in advice.lines[0] or "is not faster" in advice.lines[0]


def test_exact_for_a_decoder():
    advice = recommend(spectrum(STEEP, kinds=["self/decoder"] * 2), rows())
    assert advice.choice == EXACT
    assert "no causal form" in advice.lines[0]


def test_without_a_benchmark_the_cost_model_decides_and_says_so():
    advice = recommend(spectrum(STEEP), rates=RATES)
    assert any("predicted from operations and bytes" in line for line in advice.lines)
    beyond = recommend(spectrum(STEEP, n=16384), rows(), rates=RATES)
    assert any("does not reach this n and k" in line for line in beyond.lines)


def test_times_of_another_machine_are_named_so():
    advice = recommend(spectrum(STEEP), rows(sizes=(512,), environment={"processor": "other", "cores": 1}))
    assert any("another machine" in line for line in advice.lines)


def test_nulls_stand_beside_the_spectrum():
    (line,) = (line for line in recommend(spectrum(STEEP), rows()).lines if "The nulls need" in line)
    assert line.count("null: ") == 3


def test_a_band_counts_by_its_lower_end():
    ds, band = spectrum(STEEP), spectrum(STEEP, bands_only=True)
    assert all(needed_k(band, "trained", 0.9, 2048)[i] > needed_k(ds, "trained", 0.9, 2048)[i] for i in (0, 1))


@pytest.mark.parametrize("wrong", [{"keep": 1.0}, {"keep": 0.0}, {"mode": "trian"}])
def test_choices_that_make_no_sense_are_refused(wrong):
    with pytest.raises(RankscopeError, match=r"keep|did you mean 'train'"):
        recommend(spectrum(STEEP), rows(), **wrong)
