"""E and F fitted to captured attention: the start, the least-squares law, never worse, floors, the whole run."""

import pytest
import torch
from transformers import BertForMaskedLM, BertModel

from rankscope import restore
from rankscope._errors import RankscopeError
from rankscope.attention.interface import inspect_model
from rankscope.models.calibration import (
    Samples,
    calibrate,
    capture_samples,
    floors,
    mean_pooling,
    relative_error,
    solve_values,
    start_at_mean_pooling,
)
from rankscope.models.conversion import linformerize_calibrated
from rankscope.models.in_place import projected_attention
from rankscope.models.projections import LinformerProjections
from tiny_words import bert_config
from zoo import spread_weights


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bank(k: int, n: int, sharing: str = "headwise", kind: str = "learned", layers: int = 1) -> LinformerProjections:
    return LinformerProjections(
        num_layers=layers, num_heads=2, max_length=n, projected_length=k, sharing=sharing, kind=kind, width=6,
        generator=seeded(),
    )  # fmt: skip


def samples(w: int = 6, n: int = 12, dtype: torch.dtype = torch.float64) -> Samples:
    return Samples(*torch.randn(3, w, 2, n, 3, generator=seeded(), dtype=dtype), 0.7)


@pytest.fixture
def model():
    made = BertForMaskedLM(bert_config())
    spread_weights(made)
    return made.eval()


def windows(count: int = 8, n: int = 16) -> torch.Tensor:
    return torch.randint(5, 45, (count, n), generator=seeded())


def test_mean_pooling_where_k_does_not_divide_n():
    E = mean_pooling(2, 3)
    assert torch.allclose(E, torch.tensor([[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]]))
    assert torch.equal(mean_pooling(5, 5), torch.eye(5))


@pytest.mark.parametrize("sharing", ["headwise", "none"])
def test_solved_values_are_the_least_squares_solution(sharing):
    seen, made = samples(), bank(3, 12, sharing).double()
    start_at_mean_pooling(made)
    pair = made[0]
    E, F0 = pair.E.weight.detach().clone(), pair.F.weight.detach().clone()
    solve_values(seen, pair, ridge=0.1, iterations=200)
    share = sharing == "headwise"
    A = (0.7 * seen.query @ (E @ seen.key).mT).softmax(-1)
    exact = seen.exact()
    for head in [slice(None)] if share else [slice(0, 1), slice(1, 2)]:
        # Every equation (A ⊗ Vᵀ) vec(F) = vec(PV) written out.
        a, v, o = A[:, head].flatten(0, 1), seen.value[:, head].flatten(0, 1), exact[:, head].flatten(0, 1)
        design = torch.einsum("wik,wjc->wickj", a, v).reshape(-1, 3 * 12)
        gram = A.mT @ A
        mean = gram.diagonal(dim1=-2, dim2=-1).mean() * seen.value.square().sum(-1).mean()
        weight = 0.1 * mean * len(a)
        start = (F0 if share else F0[head.start]).reshape(-1)
        system = design.T @ design + weight * torch.eye(36, dtype=torch.float64)
        expected = torch.linalg.solve(system, design.T @ o.reshape(-1) + weight * start)
        got = (pair.F.weight if share else pair.F.weight[head.start]).detach().reshape(-1)
        assert torch.allclose(got, expected, atol=1e-6)


def test_relative_error_is_zero_for_the_identity_and_one_for_nothing():
    seen, made = samples(), bank(12, 12).double()
    start_at_mean_pooling(made)
    assert relative_error(seen, made[0]) < 1e-12
    with torch.no_grad():
        made[0].F.weight.zero_()
    assert relative_error(seen, made[0]) == pytest.approx(1)


def test_floors_are_the_errors_of_the_truncations_written_out():
    seen = samples(2)
    P = (0.7 * seen.query @ seen.key.mT).softmax(-1)
    exact = P @ seen.value
    for k, (floor, truncated) in zip((1, 2, 5), floors(seen, (1, 2, 5)), strict=True):
        for matrix, times, got in ((exact, None, floor), (P, seen.value, truncated)):
            U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
            near = (U[..., :k] * s[..., None, :k]) @ Vh[..., :k, :]
            near = near if times is None else near @ times
            assert got == pytest.approx(float((near - exact).norm() / exact.norm()), abs=1e-9)
    assert floors(seen, (3,))[0][0] < 1e-12


def test_no_projection_beats_the_floor():
    seen, made = samples(), bank(2, 12).double()
    solve_values(seen, made[0], ridge=1e-6)
    assert relative_error(seen, made[0]) >= floors(seen, (2,))[0][0]


def test_captured_samples_give_the_models_own_output(model):
    ids = windows(3)
    path = inspect_model(model)[1].module
    seen = capture_samples(model, ids, [path], batch=2)
    outputs = []
    hook = model.get_submodule(path).register_forward_hook(lambda _m, _a, out: outputs.append(out[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    assert torch.allclose(seen.exact().transpose(1, 2).flatten(2), outputs[0], atol=1e-6)


@pytest.mark.parametrize("method", ["least-squares", "distill"])
@pytest.mark.parametrize("sharing", ["none", "headwise"])
def test_fitting_brings_outputs_closer(model, method, sharing):
    paths = [item.module for item in inspect_model(model)]
    made = LinformerProjections(
        num_layers=2, num_heads=2, max_length=16, projected_length=4, sharing=sharing, generator=seeded()
    )
    report = calibrate(model, [made], windows(24), paths=paths, method=method, steps=50, generator=seeded())
    assert [row.layer for row in report] == [0, 1]
    assert all(row.floor <= row.after for row in report)
    assert sum(row.after for row in report) < 0.97 * sum(row.before for row in report)


@pytest.mark.parametrize(
    ("sharing", "kind"), [("key_value", "learned"), ("layerwise", "learned"), ("headwise", "convolution")]
)
def test_distillation_serves_shared_matrices_and_other_kinds(model, sharing, kind):
    found = linformerize_calibrated(
        model, windows(16), k=4, sharing=sharing, kind=kind, steps=40, generator=seeded(), mask_token=4
    )
    assert [(row.layer, row.k) for row in found.layers] == [(0, 2), (0, 4), (0, 8), (1, 2), (1, 4), (1, 8)]
    assert sum(row.after for row in found.layers) < sum(row.before for row in found.layers)
    assert found.effect.masked_loss is not None
    assert found.effect.masked_loss[0] == found.start.masked_loss[0]


def test_at_full_length_nothing_changes_end_to_end(model):
    found = linformerize_calibrated(
        model, windows(), k=16, method="mean", around=False, mask_token=4, generator=seeded()
    )
    assert found.start.embedding_cosine == pytest.approx(1, abs=1e-6)
    exact, replaced = found.effect.masked_loss
    assert exact == pytest.approx(replaced, abs=1e-5)
    restore(model)


def test_a_model_without_a_head_has_no_masked_loss():
    model = BertModel(bert_config()).eval()
    spread_weights(model)
    found = linformerize_calibrated(model, windows(), k=4, method="mean", mask_token=4, generator=seeded())
    assert found.effect.masked_loss is None
    assert found.effect.embedding_cosine < 1


def test_what_a_method_cannot_fit_is_refused(model):
    paths = [item.module for item in inspect_model(model)]
    options = {"paths": paths, "generator": seeded()}
    with pytest.raises(RankscopeError, match="did you mean 'distill'"):
        calibrate(model, [bank(4, 16, layers=2)], windows(), method="distil", **options)
    with pytest.raises(RankscopeError, match="distill"):
        calibrate(model, [bank(4, 16, "key_value", layers=2)], windows(), method="least-squares", **options)
    with pytest.raises(RankscopeError, match="needs a kind with parameters"):
        calibrate(model, [bank(4, 16, kind="mean", layers=2)], windows(), method="distill", **options)
    with pytest.raises(RankscopeError, match="held out"):
        calibrate(model, [bank(4, 16, layers=2)], windows(1), method="mean", **options)


def test_projected_attention_agrees_with_the_formula():
    seen, made = samples(), bank(4, 12, "none").double()
    got = projected_attention(seen.query, seen.key, seen.value, made[0], scaling=0.7)
    E, F = made[0].E.weight, made[0].F.weight
    expected = (0.7 * seen.query @ (E @ seen.key).mT).softmax(-1) @ (F @ seen.value)
    assert torch.allclose(got, expected)
