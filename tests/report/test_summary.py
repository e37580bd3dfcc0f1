import re

import numpy as np
import pytest
import xarray as xr

from rankscope._errors import RankscopeError
from rankscope.report.summary import statements
from report.synthetic import RISING, result

NULL = (("gaussian", 0.66),)


def said(ds):
    return "\n".join(statements(ds))


def test_the_headline_names_model_text_share_interval_and_every_null():
    first = statements(result())[0]
    assert first.startswith("all-MiniLM-L6-v2 on pydoc, averaged over 6 layers and 72 heads: the 128 largest of 512")
    assert "82.8 % of the sum of all (95 % interval 82.7 to 82.9 %, 32 windows)" in first
    assert "untrained scaled 82.9 %, gaussian 66.0 %, shuffled rows 55.6 %" in first


def test_above_below_and_untold_follow_the_interval():
    high = said(result(nulls=NULL))
    assert re.search(r"Against the null “gaussian”: 1[67]\.\d points more \(95 % interval 1[67]", high)
    low = said(result(nulls=(("gaussian", 0.95),)))
    assert "points less" in low
    same = said(result(layers=RISING[:5], nulls=(("gaussian", RISING[:5]),)))
    assert "no difference can be told on average" in same
    assert "points more" not in same
    assert "points less" not in same


def test_layers_are_counted_by_side():
    assert "above in 3 and below in 3 of 6 layers" in said(result(nulls=(("untrained_scaled", 0.83),)))


def test_layers_with_fewer_directions_than_every_null_are_named_with_the_nulls_numbers():
    words = said(result(nulls=(("untrained_scaled", 0.83), ("gaussian", 0.66))))
    line = next(line for line in words.splitlines() if "fewer than in every null" in line)
    assert line.startswith("Layers 3–5 hold 90 % of σ in 78 to 151 of 512 directions")
    assert "the nulls need: untrained scaled 16" in line
    assert "between the nulls" in words


def test_layers_with_more_directions_than_every_null_are_said_to_need_more():
    words = said(result(nulls=(("gaussian", 0.99),)))
    assert "Layers 0–5 hold" in words
    assert "more than in every null" in words
    assert "fewer than in every null" not in words


def test_a_depth_trend_is_claimed_when_p_allows():
    words = said(result(layers=RISING))
    assert "Deeper layers are more concentrated: Spearman’s ρ = 1.00" in words
    assert "p < .001 over 8 layers" in words
    assert "Deeper layers are less concentrated" in said(result(layers=RISING[::-1]))


def test_minilms_own_layers_do_not_support_a_depth_trend():
    words = said(result())
    assert "No depth trend can be claimed: Spearman’s ρ = .83" in words
    assert "p = .058 over 6 layers" in words
    assert "Deeper" not in words


def test_a_null_that_rises_with_depth_is_named():
    words = said(result(layers=RISING, nulls=(("gaussian", RISING), ("shuffled_rows", RISING[::-1]))))
    assert "gaussian the same way (ρ = 1.00)" in words
    assert "shuffled rows the opposite way (ρ = −1.00)" in words


def test_fewer_than_three_layers_say_nothing_of_depth():
    assert "depth" not in said(result(layers=(0.5, 0.9)))


def test_without_nulls_nothing_is_claimed_of_training():
    words = said(result(nulls=()))
    assert "No null was measured" in words
    assert "no null says how many noise would need" in words
    assert "every null" not in words


def test_one_window_claims_no_interval_and_no_side():
    words = said(result(windows=1, null_windows=1))
    assert "interval 8" not in words
    assert "without an interval" in words
    assert "nothing is claimed beyond that window" in words
    assert "fewer than in every null" not in words


def test_single_window_nulls_are_owned_up_to():
    assert "A null was measured on fewer than two windows" in said(result(windows=8, null_windows=1))


def test_many_layers_share_one_confidence():
    # No truth in it: every layer equals its null, so a layer that differs would be a false claim.
    flat = (0.7,) * 60
    claims = [
        said(result(layers=flat, nulls=(("gaussian", flat),), windows=12, n=32, heads=2, seed=s)) for s in range(8)
    ]
    assert sum("above in 0 and below in 0 of 60 layers" in words for words in claims) >= 7


def test_heads_that_differ_more_than_layers_are_pointed_out():
    assert "Heads of one layer differ more" in said(result(head_spread=0.2))
    assert "Heads of one layer differ more" not in said(result(head_spread=0.01))


def test_energy_warns_of_a_single_direction_only_when_it_carries_much():
    ds = result()
    assert "part of the energy figure is one direction" not in said(ds)
    ds["energy_fraction_at_quarter_deflated"] = ds["energy_fraction_at_quarter"] - 0.2
    assert "part of the energy figure is one direction" in said(ds)


def test_kinds_are_spoken_of_apart():
    kinds = ["self/encoder"] * 4 + ["cross/decoder"] * 4
    words = said(result(layers=RISING, kinds=kinds, nulls=NULL))
    assert "in encoder self-attention" in words
    assert "cross-attention" in words


def test_bounds_are_called_bounds():
    words = said(result(bands_only=True))
    assert "Curves are bounds from a matrix-free method" in words
    assert "no interval can be given" in words


def test_sentences_are_measured_by_their_own_length():
    words = said(result(sentences=True))
    assert "the largest quarter of a sentence's singular values" in words
    assert "% of a sentence's directions" in words
    assert "of 512" not in words


def test_a_linformer_is_relative_to_its_projected_length():
    ds = result(n=64, rank_relative_to=64, model="linformer").isel(index=slice(0, 64))
    assert "the 16 largest of 64" in said(ds)


@pytest.mark.parametrize("kwargs", [{}, {"nulls": ()}, {"windows": 1}, {"bands_only": True}, {"sentences": True}])
def test_no_statement_calls_attention_low_rank_and_each_ends_as_a_sentence(kwargs):
    for sentence in statements(result(**kwargs)):
        assert "low rank" not in sentence
        assert "low-rank" not in sentence
        assert "nan" not in sentence
        assert sentence.endswith(".")


def test_a_head_count_that_differs_by_layer_is_counted_right():
    assert "and 69 heads" in said(result(absent_heads=3))


def test_something_else_is_refused_with_the_reason():
    with pytest.raises(RankscopeError, match="lacks the dimension 'baseline'"):
        statements(result().isel(baseline=0, drop=True))
    with pytest.raises(RankscopeError, match="must hold the baseline 'trained'"):
        statements(result().isel(baseline=slice(1, None)))


def test_the_order_of_dimensions_does_not_matter():
    ds = result()
    assert statements(ds.transpose(*reversed(list(ds.dims)))) == statements(ds)


def test_clusters_widen_the_headlines_interval():
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(8), 4)
    ds = result(documents=documents)
    shift = xr.DataArray(rng.normal(0, 0.02, 8)[documents], dims="window")
    ds = ds.assign(nuclear_fraction_at_quarter=ds["nuclear_fraction_at_quarter"] + shift)
    apart = ds.assign_coords(document=("window", np.arange(32)))
    assert width(statements(ds)[0]) > 1.5 * width(statements(apart)[0])


def width(sentence):
    low, high = re.search(r"interval ([\d.]+) to ([\d.]+)", sentence).groups()
    return float(high) - float(low)
