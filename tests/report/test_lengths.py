import numpy as np
import pytest
import xarray as xr

from rankscope.report import html
from rankscope.report.description import Line
from rankscope.report.lengths import of_several_lengths, rank_growth
from report.synthetic import result

POWERS = {"trained": 0.75, "gaussian": 0.5}


def grown(n: int) -> xr.Dataset:
    """A result whose ranks are known powers of n for each head."""
    ds = result(n=n, nulls=(("gaussian", 0.66),))
    for name in ("effective_rank", "nuclear_rank_90"):
        values = ds[name].values.copy()
        for i, baseline in enumerate(ds.baseline.values):
            head = 1 + np.arange(values.shape[-1])
            values[i] = np.where(np.isnan(values[i]), np.nan, head * n ** POWERS[str(baseline)])
        ds[name] = (ds[name].dims, values)
    return ds


@pytest.fixture(scope="module")
def several() -> list[xr.Dataset]:
    return [grown(n) for n in (256, 64, 128)]


def test_the_fitted_powers_are_the_known_ones(several):
    figure = rank_growth(several, "none")
    lines = [mark for panel in figure.panels for mark in panel.marks if isinstance(mark, Line)]
    assert len(figure.panels) == 2
    assert len(lines) == 4
    assert sum("n^0.75" in line.label for line in lines) == 2
    assert sum("n^0.50" in line.label for line in lines) == 2
    assert all(np.all(np.diff(line.x) > 0) for line in lines), "lengths in order"
    rises = [line.y[-1] - line.y[0] for line in lines if "0.75" in line.label]
    np.testing.assert_allclose(rises, 0.75 * np.log10(256 / 64), atol=1e-6)


def test_other_collections_have_no_such_picture(several):
    assert of_several_lengths(several[:2]) == []
    assert of_several_lengths([*several[:2], several[0]]) == []
    other = several[2].assign_attrs(model="another")
    assert of_several_lengths([*several[:2], other]) == []
    assert rank_growth(several[:2], "none").panels == ()


def test_the_page_shows_it_and_a_picture_is_written(several, tmp_path):
    page = html.write_report(several, tmp_path).read_text()
    assert "Rank against n" in page
    assert (tmp_path / "rank-growth.png").stat().st_size > 5000
