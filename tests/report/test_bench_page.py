"""A benchmark's page: groups that may be compared, the numbers it prints, everything escaped."""

import re

import pytest

from rankscope.report import bench_figures
from rankscope.report.bench_page import page_of, write_bench
from rankscope.report.bench_reading import PAPER_TABLE_3, groups, saved
from rankscope.report.drawing import to_matplotlib, to_plotly
from report.bench_rows import rows


def test_exponents_and_crossovers_are_those_the_times_were_made_with():
    (group,) = groups(rows())
    assert group.find("sdpa").exponent("seconds_median").value == pytest.approx(2)
    linformer = group.find("linformer", 256)
    assert linformer.exponent("seconds_median").value == pytest.approx(1)
    # 4e-8 · 256 n against 1e-8 n² and 4e-8 n².
    assert group.crossover(linformer, "sdpa").n == pytest.approx(1024)
    assert group.crossover(linformer, "exact_naive").n == float("-inf")
    assert group.crossover(group.find("sdpa"), "sdpa") is None


def test_rows_of_other_modes_conditions_or_machines_are_never_compared():
    other = {"processor": "another machine", "cores": 64}
    mixed = rows() + rows(mode="train") + rows(heads=12) + rows(environment=other)
    found = groups(mixed)
    assert len(found) == 4
    assert sum(len(series.rows) for group in found for series in group.series) == len(mixed)


def test_the_papers_table_stands_beside_ours():
    (group,) = groups(rows())
    assert saved(group, 2048, 128, "exact_naive") == pytest.approx((16, 64))
    assert saved(group, 2048, 128, "sdpa") == pytest.approx((4, 2))
    assert saved(group, 8192, 128, "sdpa") is None
    page = page_of(rows())
    assert re.search(r"2,048</td><td>128</td><td>2.6 / 6.1</td><td>16 / 64</td><td>4 / 2</td>", page)
    assert PAPER_TABLE_3[65536][128] == (20, 60)


def test_the_page_is_whole_escaped_and_names_what_was_not_measured(tmp_path):
    lost = rows(lengths=(8192,), sizes=())
    for row in lost:
        row |= {"status": "out of memory at n = 8192", "reason": "needs <much>", "seconds_median": None}
    page = write_bench(rows() + lost, tmp_path / "new").read_text()
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    assert "a &lt;model&gt;" in page
    assert "needs &lt;much&gt;" in page
    assert "out of memory at n = 8192" in page
    assert "linformer, k = 256 is faster than exact fused attention from n\u00a0=\u00a01,024" in page
    assert "://" not in page
    assert page.count("<svg") >= 4


def test_a_folder_where_nothing_was_measured_still_has_a_page():
    lost = [row | {"status": "failed", "seconds_median": None} for row in rows()]
    assert "no crossover is known" in page_of(lost)


def test_pictures_are_drawn_by_every_backend():
    (group,) = groups(rows())
    for figure in (bench_figures.growth(group), bench_figures.fronts(group)):
        assert len(figure.panels) == 2
        assert to_matplotlib(figure).axes
        assert to_plotly(figure).data


def test_axes_hold_every_point():
    (group,) = groups(rows())
    for figure in (bench_figures.growth(group), bench_figures.fronts(group)):
        points = 0
        for panel in figure.panels:
            for line in panel.marks:
                for x, y in zip(line.x, line.y, strict=True):
                    assert panel.x_range[0] <= x <= panel.x_range[1]
                    assert panel.y_range[0] <= y <= panel.y_range[1]
                    points += 1
        assert points > 5


def test_a_busy_machine_is_told():
    assert "busy machine" not in page_of(rows(load_average=0.1))
    assert "12 of 12 cases ran on a busy machine" in page_of(rows(lengths=(512, 1024, 2048), load_average=1e6))
