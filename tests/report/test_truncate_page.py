import json

import numpy as np
import pytest
import xarray as xr

from rankscope._errors import RankscopeError
from rankscope.cli.__main__ import main
from rankscope.report.truncate_page import figures, page_of, write_truncation
from rankscope.spectrum.truncate import marked_ranks

KS = [4, 8, 16]


def result(*, head: bool, marked: bool = False) -> xr.Dataset:
    """Three windows, two layers, two heads; the price at k is 1 / k, in every window alike but for a step."""
    variants = ["best", "random", "remasked"] if head else ["best", "random"]
    step = np.arange(3)[:, None, None] * 1e-3
    fall = 1 / np.array(KS) + step + np.zeros((3, len(variants), 1))
    layers = fall[..., None] * np.array([1.0, 0.5])
    heads = layers[..., None] * np.ones(2)
    own = {"cosine": 1 - fall, "cosine_by_layer": 1 - layers}
    loss = {"loss": 3 + fall, "loss_increase": fall, "loss_increase_by_layer": layers} if head else {}
    dims = ("window", "variant", "k", "layer", "head")
    variables = {name: (dims[: values.ndim], values) for name, values in {**own, **loss}.items()}
    variables |= {
        "pv_error": (dims, heads),
        "predicted_error": (("window", "k", "layer", "head"), heads[:, 0]),
        "leaked_mass": (("window", "k", "layer", "head"), heads[:, 0] / 2),
        "energy_rank_90": (("window", "layer", "head"), np.full((3, 2, 2), 5.0)),
    }
    if head:
        variables["own_loss"] = (("window",), np.full(3, 3.0))
    coords = {"variant": variants, "k": KS, "layer": [0, 1], "document": ("window", [0, 1, 2])}
    if marked:
        coords["baseline"] = ["trained", "gaussian"]
        variables["marked_rank"] = (("baseline",), np.array([6.0, 12.0]))
    attributes = {"model": "<tiny>", "corpus": "text", "n": 16, "interval": "t", "seed": 0, "why_no_loss": ""}
    attributes |= {"objective": "causal" if head else "cosine", "variants": json.dumps(dict.fromkeys(variants, "x"))}
    return xr.Dataset(variables, coords=coords, attrs=attributes)


@pytest.mark.parametrize("head", [True, False])
def test_the_curve_is_the_mean_price_with_its_interval(head):
    lines = {mark.label: mark for mark in figures(result(head=head))[0].panels[0].marks}
    best = lines["best rank k"]
    np.testing.assert_allclose(best.x, np.log2(KS))
    np.testing.assert_allclose(best.y, 1 / np.array(KS) + 1e-3)
    assert all(low < y < high for low, y, high in zip(best.low, best.y, best.high, strict=True))
    assert ("best rank k, re-masked" in lines) is head


def test_uprights_stand_at_the_marked_ranks_or_at_the_runs_own():
    marks = {m.label: m.x[0] for m in figures(result(head=True, marked=True))[0].panels[0].marks if m.dash}
    assert marks == {
        "90 % of σ²: trained, k = 6": pytest.approx(np.log2(6)),
        "90 % of σ²: gaussian, k = 12": pytest.approx(np.log2(12)),
    }
    own = [m for m in figures(result(head=False))[0].panels[0].marks if m.dash]
    assert [m.label for m in own] == ["90 % of σ²: this run’s P, k = 5"]


def test_leaked_mass_is_drawn_only_for_a_masked_model():
    assert [len(figures(result(head=head))[1].panels) for head in (True, False)] == [2, 1]


def test_files_are_whole_and_the_page_escapes_names(tmp_path):
    page = write_truncation(result(head=True), tmp_path / "new")
    names = sorted(path.name for path in page.parent.iterdir())
    assert names == [
        "truncation-layers.png",
        "truncation-output.png",
        "truncation-values.png",
        "truncation.html",
        "truncation.nc",
    ]
    words = page.read_text()
    assert "<tiny>" not in words
    assert "&lt;tiny&gt;" in words
    assert words.count("<tr>") == 1 + 3 * len(KS)
    with xr.open_dataset(page.parent / "truncation.nc") as kept:
        xr.testing.assert_allclose(kept.load(), result(head=True))


def test_a_result_without_layers_has_a_page_too():
    ds = result(head=False).drop_vars("cosine_by_layer")
    drawn = figures(ds)
    assert len(drawn) == 2
    assert "One layer at a time" not in page_of(ds, drawn)


def test_marks_of_another_length_are_refused(tmp_path):
    measured = result(head=False).expand_dims(baseline=["trained"])
    measured["nuclear_fraction"] = measured.cosine
    measured.attrs["n"] = 16
    measured.to_netcdf(tmp_path / "spectrum.nc", engine="h5netcdf")
    assert marked_ranks(tmp_path, 16) == {"trained": 5.0}
    with pytest.raises(RankscopeError, match="give --n 16"):
        marked_ranks(tmp_path, 32)


def test_the_command_writes_the_page_and_names_a_bad_rank(tmp_path, capsys):
    out = str(tmp_path / "run")
    options = ["--n", "16", "--windows", "1", "--no-layerwise", "--out", out]
    assert main(["truncate", "minilm", "pydoc", "--ranks", "4,16", *options]) == 0
    assert capsys.readouterr().out.strip().endswith("truncation.html")
    assert main(["truncate", "minilm", "pydoc", "--ranks", "4,17", *options]) == 2
    assert "`ranks` must be numbers from 1 to n=16" in capsys.readouterr().err


def test_the_command_refuses_ranks_without_numbers_and_a_file_in_the_folders_place_before_it_loads(tmp_path, capsys):
    place = tmp_path / "file"
    place.write_text("mine")
    for ranks, out, words in (("all", tmp_path / "run", "`ranks` must be numbers"), ("4", place, "it is a file")):
        assert main(["truncate", "minilm", "pydoc", "--ranks", ranks, "--out", str(out)]) == 2
        shown = capsys.readouterr().err
        assert words in shown
        assert "windows" not in shown
    assert place.read_text() == "mine"
    assert not (tmp_path / "run").exists()
