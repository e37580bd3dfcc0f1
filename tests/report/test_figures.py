import sys

import numpy as np
import pytest

from rankscope._errors import MissingExtraError, RankscopeError
from rankscope.report import figures
from rankscope.report.description import Band, Box, Cells, Figure, Line, legend
from rankscope.report.palette import COLORS
from report.synthetic import MINILM_LAYERS, RISING, result

MIXED = ["self/encoder"] * 4 + ["self/decoder", "cross/decoder"] * 2
SINGLE = [
    figures.layer_curves,
    figures.layer_panels,
    figures.heatmap,
    figures.depth_trend,
    figures.excess,
    figures.windows_distribution,
]
AWKWARD = {
    "plain": {},
    "one layer": {"layers": (0.7,)},
    "one head": {"heads": 1},
    "one window": {"windows": 1},
    "one of each": {"layers": (0.7,), "heads": 1, "windows": 1, "nulls": ()},
    "no nulls": {"nulls": ()},
    "absent heads": {"absent_heads": 4},
    "mixed kinds": {"layers": RISING, "kinds": MIXED},
    "bounds only": {"bands_only": True},
    "sentences": {"sentences": True},
    "large": {"layers": tuple(np.linspace(0.4, 0.9, 96)), "heads": 64, "windows": 2, "null_windows": 2, "n": 32},
}


@pytest.fixture(scope="module")
def awkward():
    return {name: result(**kwargs) for name, kwargs in AWKWARD.items()}


def marks(figure, kind, panel=0):
    return [mark for mark in figure.panels[panel].marks if isinstance(mark, kind)]


@pytest.mark.parametrize("draw", SINGLE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", AWKWARD)
def test_every_picture_describes_every_awkward_result(draw, case, awkward):
    figure = draw(awkward[case], backend="none")
    assert isinstance(figure, Figure)
    assert figure.reading.endswith(".")
    assert figure.panels or figure.notes
    for panel in figure.panels:
        assert panel.marks
        assert panel.x_range[0] < panel.x_range[1]
        assert panel.y_range[0] < panel.y_range[1]
        for mark in panel.marks:
            assert isinstance(mark, Cells) or mark.color in COLORS


@pytest.mark.parametrize("draw", SINGLE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", ["plain", "one of each", "mixed kinds", "bounds only", "absent heads"])
def test_plotly_draws_what_is_described(draw, case, awkward):
    described = draw(awkward[case], backend="none")
    chart = draw(awkward[case], backend="plotly")
    expected = sum(2 if isinstance(mark, Box) else 1 for panel in described.panels for mark in panel.marks)
    assert len(chart.data) == expected
    assert chart.layout.title.text == described.title
    assert chart.to_json()


def test_plotly_lines_hold_the_described_numbers():
    ds = result(nulls=())
    line = marks(figures.layer_curves(ds, backend="none"), Line)[0]
    trace = figures.layer_curves(ds, backend="plotly").data[0]
    assert tuple(trace.x) == line.x
    assert tuple(trace.y) == line.y
    assert trace.name == "layer 0"


@pytest.mark.parametrize("draw", SINGLE, ids=lambda f: f.__name__)
def test_matplotlib_draws_every_panel_without_a_warning(draw, recwarn):
    ds = result(layers=RISING, kinds=MIXED, model="$x_1 & <b>", corpus="$")
    described = draw(ds, backend="none")
    canvas = draw(ds, backend="matplotlib")
    canvas.canvas.draw()
    titles = [ax.get_title() for ax in canvas.axes if ax.get_xlabel()]
    assert titles == [panel.title for panel in described.panels]
    assert [str(w.message) for w in recwarn if "pyparsing" not in str(w.filename)] == []


def test_curves_hold_each_layers_mean_and_nulls_span_their_layers():
    nulls = (("gaussian", np.linspace(0.5, 0.7, 6)),)
    figure = figures.layer_curves(result(nulls=nulls), backend="none")
    trained = [line for line in marks(figure, Line) if line.label.startswith("layer ")]
    assert [line.label for line in trained] == [f"layer {i}" for i in range(6)]
    at_quarter = [np.interp(0.25, line.x, line.y) for line in trained]
    assert at_quarter == pytest.approx(MINILM_LAYERS, abs=0.01)
    (band,) = marks(figure, Band)
    assert np.interp(0.25, band.x, band.low) == pytest.approx(0.5, abs=0.01)
    assert np.interp(0.25, band.x, band.high) == pytest.approx(0.7, abs=0.01)
    assert [mark.label for mark in legend(figure)][:1] == ["null: gaussian"]


def test_axis_ticks_name_counts_for_windows_and_shares_for_sentences():
    counts = figures.layer_curves(result(), backend="none").panels[0]
    shares = figures.layer_curves(result(sentences=True), backend="none").panels[0]
    assert [label for _, label in counts.x_ticks] == ["0", "128", "256", "384", "512"]
    assert [label for _, label in shares.x_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_curves_are_thinned_so_that_size_does_not_grow_with_n():
    figure = figures.layer_curves(result(n=4096, heads=2, windows=2, null_windows=2), backend="none")
    assert max(len(line.x) for line in marks(figure, Line)) <= 100
    assert marks(figure, Line)[0].y[-1] == pytest.approx(1.0)


def test_numerical_bounds_are_drawn_around_their_layer():
    figure = figures.layer_curves(result(bands_only=True, nulls=()), backend="none")
    assert len(marks(figure, Band)) == 6
    band, line = marks(figure, Band)[0], marks(figure, Line)[0]
    assert np.allclose((np.array(band.low) + np.array(band.high)) / 2, line.y, atol=1e-6)


def test_heatmap_shows_each_head_at_a_quarter_and_leaves_absent_ones_out():
    ds = result(absent_heads=4)
    panel = figures.heatmap(ds, backend="none").panels[0]
    (cells,) = panel.marks
    expected = ds["nuclear_fraction"].sel(baseline="trained", index=128).values
    assert np.allclose(cells.values, expected, equal_nan=True, atol=1e-6)
    assert np.isnan(cells.values[0][-4:]).all()
    assert (len(cells.rows), len(cells.columns)) == (6, 12)


def test_heatmap_puts_nulls_on_the_same_scale():
    figure = figures.heatmap(result(), backend="none")
    titles = [panel.title for panel in figure.panels]
    assert titles == ["trained", "null: untrained scaled", "null: gaussian", "null: shuffled rows"]
    assert len({(panel.marks[0].low, panel.marks[0].high) for panel in figure.panels}) == 1


def test_a_huge_heatmap_keeps_one_null_and_says_what_it_left_out(awkward):
    figure = figures.heatmap(awkward["large"], backend="none")
    assert [panel.title for panel in figure.panels] == ["trained", "null: untrained scaled"]
    assert len(figure.notes) == 2


def test_depth_trend_has_the_files_means_intervals_and_words():
    ds = result()
    figure = figures.depth_trend(ds, backend="none")
    trained = next(line for line in marks(figure, Line) if line.label == "trained")
    values = ds["nuclear_fraction_at_quarter"].sel(baseline="trained")
    assert trained.y == pytest.approx(values.mean(["window", "head"]).values, abs=1e-5)
    assert all(low < y < high for low, y, high in zip(trained.low, trained.y, trained.high, strict=True))
    assert "ρ = .83" in figure.notes[0]


def test_layers_of_a_kind_share_a_panel_under_the_files_numbers():
    figure = figures.depth_trend(result(layers=RISING, kinds=MIXED), backend="none")
    titles = [panel.title for panel in figure.panels]
    assert titles == ["encoder self-attention", "decoder self-attention", "cross-attention"]
    assert [label for _, label in figure.panels[2].x_ticks] == ["5", "7"]


def test_excess_is_trained_minus_null_on_shared_windows():
    ds = result(nulls=(("gaussian", 0.66),))
    (line,) = marks(figures.excess(ds, backend="none"), Line)
    means = ds["nuclear_fraction_at_quarter"].isel(window=slice(0, 16)).mean(["window", "head"])
    assert line.y == pytest.approx((means.sel(baseline="trained") - means.sel(baseline="gaussian")).values, abs=1e-5)
    assert figures.excess(ds, backend="none").panels[0].zero_line


def test_without_nulls_the_excess_says_why_it_is_empty():
    figure = figures.excess(result(nulls=()), backend="none")
    assert figure.panels == ()
    assert "No null was measured" in figure.notes[0]


def test_boxes_hold_the_windows_quartiles():
    ds = result()
    box = marks(figures.windows_distribution(ds, backend="none"), Box)[2]
    own = ds["nuclear_fraction_at_quarter"].sel(baseline="trained", layer=2).mean("head").values
    assert box.quartiles == pytest.approx(np.quantile(own, (0, 0.25, 0.5, 0.75, 1)), abs=1e-6)
    assert len(box.values) == 32


def test_a_deep_model_has_few_legend_entries_and_tick_labels(awkward):
    figure = figures.layer_curves(awkward["large"], backend="none")
    assert len(legend(figure)) <= 16
    assert len(figures.depth_trend(awkward["large"], backend="none").panels[0].x_ticks) <= 12
    assert len(figures.layer_panels(awkward["large"], backend="none").panels) == 24


def test_results_of_different_length_are_compared_at_fractions():
    pair = [result(), result(layers=RISING, heads=8, n=128, model="other")]
    figure = figures.compare(pair, backend="none")
    lines = marks(figure, Line)
    assert [line.label for line in lines if line.strong] == ["all-MiniLM-L6-v2 on pydoc", "other on pydoc"]
    assert all(line.x[-1] == 1.0 for line in lines)
    ranks = [line for line in marks(figure, Line, panel=2) if line.strong]
    for ds, line in zip(pair, ranks, strict=True):
        means = ds["effective_rank"].sel(baseline="trained").mean(["window", "head"]).values / ds.attrs["n"]
        assert line.y == pytest.approx(means, rel=1e-5)
    assert len(figures.compare(pair, backend="plotly").data) == sum(len(panel.marks) for panel in figure.panels)
    assert len(figures.compare(pair).axes) == 3


def test_results_of_one_name_are_told_apart():
    labels = [m.label for m in legend(figures.compare([result(), result(n=128)], backend="none")) if m.strong]
    assert labels == ["all-MiniLM-L6-v2 on pydoc, n = 512", "all-MiniLM-L6-v2 on pydoc, n = 128"]
    labels = [m.label for m in legend(figures.compare([result(), result()], backend="none")) if m.strong]
    assert len(set(labels)) == 2


def test_an_unknown_backend_gets_the_nearest_one():
    with pytest.raises(RankscopeError, match="did you mean 'plotly'"):
        figures.heatmap(result(), backend="plotli")


@pytest.mark.parametrize(("backend", "package"), [("matplotlib", "matplotlib"), ("plotly", "plotly")])
def test_a_missing_library_names_the_extra(backend, package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"rankscope\[report\]"):
        figures.heatmap(result(heads=2, windows=2, null_windows=2, n=16), backend=backend)
    assert figures.heatmap(result(heads=2, windows=2, null_windows=2, n=16), backend="none").panels


def test_more_than_three_nulls_get_a_panel_each():
    nulls = tuple((name, 0.5) for name in ("gaussian", "untrained", "shuffled_rows", "mine"))
    figure = figures.excess(result(nulls=nulls), backend="none")
    assert [panel.title for panel in figure.panels] == [
        "null: gaussian",
        "null: untrained",
        "null: shuffled rows",
        "null: mine",
    ]
    trend = figures.depth_trend(result(nulls=nulls), backend="none")
    assert [bool(line.low) for line in marks(trend, Line)] == [False] * 4 + [True]
    assert "left out" in trend.notes[-1]
    assert len({line.color for line in marks(trend, Line)}) == 5
