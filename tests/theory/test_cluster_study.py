import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rankscope._errors import RankscopeError
from rankscope.theory import clusters
from rankscope.theory.cluster_study import clusters_study, map_at, named_setting, setting_from_file
from rankscope.theory.studies import seeded


def study(flow="polytope", n=8, d=2, end=3.0, frames=5):
    return clusters_study(named_setting(flow, n=n, d=d, generator=seeded(0)), end=end, frames=frames, seed=0)


def saved(path, **matrices):
    save_file({name: torch.tensor(matrix, dtype=torch.float64) for name, matrix in matrices.items()}, path)
    return path


def from_file(path, n=None, **options):
    settings = {"end": 3.0, "frames": 3, **options}
    return clusters_study(setting_from_file(path, n=n, generator=seeded(0)), **settings, seed=0)


ONE = {"Q": [[1.0]], "K": [[1.0]], "V": [[1.0]]}
TWO = {"Q": np.eye(2).tolist(), "K": np.eye(2).tolist(), "V": np.eye(2).tolist()}


def test_maps_are_kept_at_the_shown_times_and_come_again_from_tokens_and_matrices():
    ds = study(frames=9)
    assert ds.P.sizes == {"shown": 4, "token": 8, "other": 8}
    for t, P in zip(ds.shown.values, ds.P.values, strict=True):
        np.testing.assert_allclose(map_at(ds, int(np.flatnonzero(ds.time == t)[0])), P, atol=1e-7)
    plain = study("collapse")
    np.testing.assert_allclose(map_at(plain, 4), plain.P.values[-1], atol=1e-7)


def test_ways_go_through_the_frames_and_have_no_kinks():
    ds = study(end=10.0, frames=3)
    at = np.searchsorted(ds.moment, 5.0)
    np.testing.assert_allclose(ds.way[-1], ds.tokens[-1], atol=1e-6)
    assert np.abs(ds.way[at - 1 : at + 1] - ds.tokens[1]).max() < 0.02
    # Neighbouring pieces of a way turn by little wherever it moves.
    steps = np.diff(ds.way.values, axis=0)
    long = np.linalg.norm(steps, axis=-1) > 1e-3
    both = long[1:] & long[:-1]
    cosine = (steps[1:] * steps[:-1]).sum(-1)[both]
    cosine /= (np.linalg.norm(steps[1:], axis=-1) * np.linalg.norm(steps[:-1], axis=-1))[both]
    assert both.sum() > 100
    assert cosine.min() > 0.9


def test_range_of_the_rescaled_form_is_where_a_stricter_solver_agrees():
    # At λt = RANGE the rows of P say the same at tolerances a hundred times as strict.
    one = clusters.Dynamics.single([[1.0]], [[1.0]], [[1.0]])
    for seed in range(5):
        x0 = clusters.uniform_tokens(20, 1, generator=seeded(seed))
        loose, strict = (
            clusters.integrate(one, x0, times=[clusters.RANGE], rtol=rtol, atol=atol)
            for rtol, atol in ((clusters.RTOL, clusters.ATOL), (1e-12, 1e-14))
        )
        np.testing.assert_allclose(loose.P(0), strict.P(0), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d": 0}, "`d` must be 1 or more"),
        ({"n": 10**6}, "`n` must be from 2 to 4,096"),
        ({"frames": 1}, "`frames` must be from 2 to 1,000"),
        ({"end": float("nan")}, "`end` must be a time above 0, got nan"),
        ({"end": float("inf")}, "`end` must be a time above 0, got inf"),
        ({"end": 0.0}, "`end` must be a time above 0"),
        ({"end": 800.0}, "`end` must be at most 16 with this V, got 800: later, tokens of one cluster"),
        ({"flow": "collapse", "end": 1e6}, "`end` must be at most 25000 with this V, got 1e.06: later, it would take"),
    ],
)
def test_a_flow_that_could_not_end_or_be_drawn_is_refused(change, words):
    with pytest.raises(RankscopeError, match=words):
        study(**change)


def test_an_integration_without_an_end_is_given_up(monkeypatch):
    monkeypatch.setattr(clusters, "MOST_EVALUATIONS", 50)
    with pytest.raises(RankscopeError, match=r"ends at 900, but 50 velocities brought the tokens to t=\d+"):
        clusters.integrate(
            clusters.Dynamics.single([[1.0]], [[1.0]], [[-1.0]]), [[1.0], [-2.0]], times=[0, 900], rescaled=False
        )


@pytest.mark.parametrize(
    ("matrices", "theorem", "words"),
    [
        ({**ONE, "tokens": [[0.5], [0.5], [-1.0]]}, "boolean", "tokens 0 and 1 start at the same place"),
        ({**ONE, "V": [[-1.0]]}, "boolean", "V = -1, not above 0"),
        ({**ONE, "Q": [[-1.0]]}, "boolean", "QK = -1, not above 0"),
        ({**TWO, "V": [[0.5, -1.0], [1.0, 0.5]]}, "hyperplanes", "is not real"),
        ({**TWO, "V": [[0.0, -1.0], [1.0, 0.0]]}, "hyperplanes", "is not real"),
        ({**TWO, "V": [[-2.0, 0.0], [0.0, 1.0]]}, "hyperplanes", "-2, is not above 0"),
        ({**TWO, "V": [[0.0, 0.0], [0.0, 0.0]]}, "polytope_times_space", "is not real and above 0"),
        ({**TWO, "Q": [[1.0, 0.0], [0.0, -1.0]]}, "polytope", "QᵀK has the eigenvalue -1, not above 0"),
        ({**TWO, "Q": [[0.0, 0.0], [0.0, 0.0]]}, "polytope", "QᵀK has the eigenvalue 0, not above 0"),
    ],
)
def test_matrices_of_a_file_that_break_a_hypothesis_get_the_verdict_that_names_it(tmp_path, matrices, theorem, words):
    ds = from_file(saved(tmp_path / "head.safetensors", **matrices))
    verdict = json.loads(ds.attrs["verdicts"])[theorem]
    assert verdict.startswith(f"{theorem}: hypotheses not met: ")
    assert words in verdict


def test_file_of_a_flow_gives_the_flow(tmp_path):
    named = named_setting("hyperplanes", n=6, d=3, generator=seeded(1))
    matrices = {"Q": named.query, "K": named.key, "V": named.value, "tokens": named.tokens}
    path = saved(tmp_path / "head.safetensors", **matrices)
    own, again = clusters_study(named, end=2.0, frames=3, seed=1), from_file(path, end=2.0)
    assert own.attrs["verdicts"] == again.attrs["verdicts"]
    np.testing.assert_array_equal(own.tokens, again.tokens)
    drawn = from_file(saved(tmp_path / "bare.safetensors", **ONE), n=7)
    assert drawn.sizes["token"] == 7


@pytest.mark.parametrize(
    ("matrices", "words"),
    [
        ({"Q": [[1.0]], "K": [[1.0]]}, "must hold Q, K, V and perhaps tokens, got K, Q"),
        ({**ONE, "bias": [[1.0]]}, "got K, Q, V, bias"),
        ({**ONE, "V": [[1.0, 2.0]]}, r"V \(1, 2\)"),
        ({**ONE, "Q": [1.0]}, r"Q \(1,\)"),
        ({**ONE, "K": [[1.0], [2.0]]}, r"K \(2, 1\)"),
        ({**ONE, "tokens": [[1.0, 2.0]]}, r"tokens \(1, 2\)"),
        ({**ONE, "tokens": [[1.0]]}, "`n` must be from 2 to 4,096 tokens, got 1"),
        ({**ONE, "V": [[float("nan")]]}, "must be finite, V is not"),
        ({**ONE, "tokens": [[1e200], [-1e200]]}, "left float64's range"),
        ({**ONE, "Q": [[1e200]], "K": [[1e200]]}, "left float64's range"),
    ],
)
def test_files_that_are_no_head_are_refused(tmp_path, matrices, words):
    with pytest.raises(RankscopeError, match=words):
        from_file(saved(tmp_path / "head.safetensors", **matrices))


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    (tmp_path / "head.safetensors").write_bytes(b"not a tensor")
    for path in (tmp_path / "head.safetensors", tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(RankscopeError, match="is no safetensors file that can be read"):
            setting_from_file(path, n=None, generator=seeded(0))
    path = saved(tmp_path / "three.safetensors", **ONE, tokens=[[1.0], [2.0], [3.0]])
    with pytest.raises(RankscopeError, match="`n` is 5, but `weights` brings 3 tokens"):
        setting_from_file(path, n=5, generator=seeded(0))


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(RankscopeError, match=r"`seed` must lie between 0 and 2\*\*63 - 1"):
        seeded(seed)
