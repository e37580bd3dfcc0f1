import pytest
import torch
from transformers import BertConfig

from rankscope._errors import RankscopeError
from rankscope.pretrained import fresh
from rankscope.theory.fitted_heads import alternate, best_values, fit_values, loss
from rankscope.theory.heads import Heads
from rankscope.theory.projections import METHODS, collect, compare, segment_means
from rankscope.windows import Window


def bert_config(**changes):
    sizes = {
        "vocab_size": 45,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 24,
    }
    return BertConfig(**{**sizes, **changes})


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def heads(windows, n=24, seed=0, common=2.0):
    """Heads that share a pattern between windows, as positions do in real text."""
    source = generator(seed)
    pattern = common * torch.randn(3, 1, 2, n, 4, generator=generator(99))
    return Heads(*(pattern + torch.randn(3, windows, 2, n, 4, generator=source)), 0.5)


@pytest.fixture(scope="module")
def comparison():
    return compare(heads(12, seed=1), heads(3, seed=2), k=[2, 4, 12, 24], generator=generator())


def test_no_rank_k_output_is_below_the_floor(comparison):
    assert set(comparison.error) == set(METHODS)
    for name, error in comparison.error.items():
        assert (error >= comparison.error["best_of_PV"] - 1e-5).all(), name


def test_floor_is_zero_from_the_head_width_on(comparison):
    floor = comparison.error["best_of_PV"]
    assert (floor[0] > 0.1).all()
    assert (floor[1:] < 1e-5).all()


def test_whole_length_is_exact_where_the_projection_is_the_identity(comparison):
    for name in ("mean_pooling", "fixed_subspace_of_P", "fixed_subspace_of_PV", "svd_of_P"):
        assert (comparison.error[name][-1] < 1e-5).all(), name


def test_own_subspaces_keep_more_of_P_than_a_fixed_one():
    test = heads(2, seed=2)
    P = test.P(0).double()
    U = torch.linalg.svd(P).Vh[:, :4].mT
    kept = (P @ U @ U.mT - P).norm()
    from rankscope.theory.projections import _right_vectors

    fixed = _right_vectors([heads(6, seed=1).P(i) for i in range(6)])[..., :4].double()
    assert kept < (P @ fixed @ fixed.mT - P).norm()
    own = _right_vectors([test.P(0)])[..., :4].double()
    assert (P @ own @ own.mT - P).norm().item() == pytest.approx(kept.item(), rel=1e-5)


def test_fixed_subspace_of_the_output_is_the_best_of_its_kind_for_the_windows_it_was_fitted_on():
    # One window: the best k-dimensional subspace of PV is the one of its own truncated SVD, the floor.
    both = heads(2, seed=3)
    same = Heads(*(part[:1].repeat(2, 1, 1, 1) for part in (both.query, both.key, both.value)), 0.5)
    error = compare(same, same, k=[2], generator=generator(), methods=["fixed_subspace_of_PV", "best_of_PV"]).error
    torch.testing.assert_close(error["fixed_subspace_of_PV"], error["best_of_PV"], rtol=1e-4, atol=1e-5)


def test_fitting_helps_on_windows_it_did_not_see(comparison):
    learned, mean = comparison.error["learned"], comparison.error["mean_pooling"]
    assert (learned[1:3] < mean[1:3]).all()
    assert (learned[2] < 0.9 * mean[2]).all()


def test_overlap_is_one_for_equal_windows_and_near_chance_for_unrelated_ones(comparison):
    assert comparison.overlap[-1].tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    one = heads(1)
    same = Heads(one.query.repeat(2, 1, 1, 1), one.key.repeat(2, 1, 1, 1), one.value.repeat(2, 1, 1, 1), 0.5)
    found = compare(heads(2), same, k=[3], generator=generator(), methods=["svd_of_P"])
    assert found.overlap[0].tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    unrelated = compare(heads(2), heads(4, common=0.0), k=[12], generator=generator(), methods=["svd_of_P"])
    assert (unrelated.overlap[0] - unrelated.chance[0]).abs().max() < 0.15


def test_segments_are_as_even_as_they_can_be():
    sizes = (segment_means(10, 4) > 0).sum(1)
    assert sizes.sum() == 10
    assert sizes.max() - sizes.min() <= 1
    assert torch.equal(segment_means(5, 5), torch.eye(5))


def test_convolution_needs_a_length_that_divides_n():
    error = compare(heads(2), heads(2), k=[5], generator=generator(), methods=["convolution"]).error["convolution"]
    assert error.isnan().all()


def test_captured_heads_give_the_models_own_maps():
    model = fresh(bert_config(), seed=0)
    windows = [Window(i, list(range(5 + i, 21 + i)), 0) for i in range(3)]
    found = collect(model, windows)
    assert list(found) == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(torch.tensor([windows[2].input_ids]), output_attentions=True).attentions
    for layer, attention in zip(found.values(), own, strict=True):
        torch.testing.assert_close(layer.P(2), attention[0], rtol=1e-5, atol=1e-6)


def test_mistakes_are_refused():
    with pytest.raises(RankscopeError, match="from 1 to n=24"):
        compare(heads(2), heads(2), k=[25], generator=generator())
    with pytest.raises(RankscopeError, match="two windows or more"):
        compare(heads(2), heads(1), k=[2], generator=generator())
    with pytest.raises(RankscopeError, match="did you mean 'gaussian'"):
        compare(heads(2), heads(2), k=[2], generator=generator(), methods=["gausian"])


def test_a_fit_that_only_learns_by_heart_falls_back_to_mean_pooling():
    # Unrelated windows have nothing in common to learn: without the windows held out, the fit would do harm.
    source = generator(7)
    train, test = (Heads(*torch.randn(3, windows, 2, 24, 4, generator=source), 0.5) for windows in (8, 6))
    error = compare(train, test, k=[12], generator=generator(), methods=["learned", "mean_pooling"]).error
    assert (error["learned"] < 1.05 * error["mean_pooling"]).all()


def test_exact_values_are_those_of_the_normal_equations():
    train, E = heads(5, seed=8), torch.randn(2, 4, 24, generator=generator(9))
    exact, ridge = train.outputs(), 0.3
    F, slope = best_values(train, exact, E, start=E, centre=E, ridge=ridge, steps=2000, tolerance=1e-6)
    assert (slope < 1e-6).all()
    shares = train.shares(E).double()
    for h in range(2):
        rows, targets = [], []
        for w in range(5):
            # vec(S F V) = (S ⊗ Vᵀ) vec(F), rows first; each window counts by 1/‖PV‖².
            scale = exact[w, h].norm().double() * 5**0.5
            rows.append(torch.kron(shares[w, h], train.value[w, h].double().mT.contiguous()) / scale)
            targets.append(exact[w, h].double().flatten() / scale)
        A, y = torch.cat(rows), torch.cat(targets)
        rho = ridge * A.square().sum() / A.shape[1]
        identity = rho * torch.eye(A.shape[1], dtype=torch.float64)
        closed = torch.linalg.solve(A.mT @ A + identity, A.mT @ y + rho * E[h].double().flatten())
        torch.testing.assert_close(F[h].double().flatten(), closed, rtol=1e-3, atol=1e-4)


def test_fitted_values_do_no_worse_than_those_given_on_the_windows_held_out():
    train, E = heads(8, seed=1), segment_means(24, 4).repeat(2, 1, 1)
    F = fit_values(train, E, E)
    others = train.at(slice(6, None))
    exact = others.outputs()
    assert (loss(others, exact, E, F) <= loss(others, exact, E, E)).all()
    assert (loss(others, exact, E, F) < 0.95 * loss(others, exact, E, E)).all()


def test_alternating_fit_lowers_the_loss_every_round_and_says_what_others_pay():
    train, others, E = heads(3, seed=1), heads(3, seed=2), segment_means(24, 4).repeat(2, 1, 1)
    fit = alternate(train, others, E, E, rounds=5)
    assert len(fit.losses) == len(fit.others) == 6
    assert all(after < before for before, after in zip(fit.losses, fit.losses[1:], strict=False))
    assert fit.losses[-1] < 0.5 * fit.losses[0]
    assert max(fit.slopes) < 1e-2


def test_learned_starts_from_the_convolution_where_k_divides_n_and_from_means_elsewhere():
    train, test = heads(8, seed=1), heads(3, seed=2)
    error = compare(train, test, k=[4, 5], generator=generator(), methods=["convolution", "learned", "mean_pooling"])
    assert (error.error["learned"][0] < 1.05 * error.error["convolution"][0]).all()
    assert error.error["convolution"][1].isnan().all()
    assert (error.error["learned"][1] < error.error["mean_pooling"][1]).all()
