import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.spectrum.heads import Head, deviation
from rankscope.spectrum.nulls import NULLS, choose_nulls, generator_for, normal_like, shuffle_allowed

FLOOR = torch.finfo(torch.float32).min
N = 33


def make_head(mask: str = "none", *, scale: float = 1.7, weights: bool = False) -> Head:
    generator = torch.Generator().manual_seed(5)
    query = scale * torch.randn(N, 8, generator=generator) + torch.linspace(0, 1, 8)
    key = torch.randn(N, 8, generator=generator)
    i, j = torch.arange(N).unsqueeze(1), torch.arange(N)
    allowed = {"none": None, "causal": j <= i, "window": (j <= i) & (j > i - 7)}[mask]
    bias = None if allowed is None else torch.where(allowed, 0.0, FLOOR)
    head = Head(query, key, 8**-0.5, bias, None, None, None, 8)
    return Head(None, None, 1.0, None, None, None, head.context_map(), 8) if weights else head


def null_map(name, head, target=1.3, window=0):
    return NULLS[name].head(head, target, generator_for(0, name, window, 0, 0)).context_map()


@pytest.mark.parametrize("name", NULLS)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_every_null_keeps_the_mask_and_the_row_sums(name, mask):
    head = make_head(mask)
    P = null_map(name, head)
    torch.testing.assert_close(P.sum(dim=-1), torch.ones(N), rtol=0, atol=1e-5)
    if mask != "none":
        assert P[~head.allowed()].abs().max() == 0


@pytest.mark.parametrize("name", ["untrained_scaled", "gaussian"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("weights", [False, True])
def test_scaled_nulls_have_exactly_the_wanted_deviation(name, mask, weights):
    head = make_head(mask, weights=weights)
    null = head.with_map(null_map(name, head, target=0.8))
    assert deviation(null, content=True) == pytest.approx(0.8, rel=1e-4)


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_shuffled_rows_keep_each_rows_entries(mask):
    head = make_head(mask)
    P, shuffled = head.context_map(), null_map("shuffled_rows", head)
    assert torch.equal(P.sort(dim=-1).values, shuffled.sort(dim=-1).values)
    assert not torch.equal(P, shuffled)


def test_shuffled_columns_keep_column_sums_before_the_rows_are_renormalised():
    head = make_head()
    P = head.context_map()
    shuffled = shuffle_allowed(P.mT, None, torch.Generator().manual_seed(0)).mT
    torch.testing.assert_close(shuffled.sum(dim=0), P.sum(dim=0))
    null = null_map("shuffled_columns", head)
    assert torch.corrcoef(torch.stack([null.sum(dim=0), P.sum(dim=0)]))[0, 1] > 0.9


def test_shuffling_is_uniform_over_places():
    row = torch.arange(4.0).expand(40_000, 4)
    places = shuffle_allowed(row, None, torch.Generator().manual_seed(1))
    counts = torch.stack([(places == value).float().mean(dim=0) for value in range(4)])
    # each cell is a binomial mean with s.d. .0022
    assert (counts - 0.25).abs().max() < 0.01


def test_normal_tokens_have_the_tokens_moments():
    generator = torch.Generator().manual_seed(2)
    mixing = torch.randn(5, 5, generator=generator)
    tokens = torch.randn(400, 5, generator=generator) @ mixing + 3
    drawn = torch.cat([normal_like(tokens, generator) for _ in range(200)])
    torch.testing.assert_close(drawn.mean(dim=0), tokens.mean(dim=0), rtol=0.02, atol=0.02)
    torch.testing.assert_close(drawn.T.cov(), tokens.T.cov(correction=0), rtol=0.05, atol=0.1)


def test_normal_tokens_of_a_single_direction_stay_in_it():
    tokens = torch.arange(6.0).unsqueeze(1) * torch.tensor([[1.0, 2.0]])
    drawn = normal_like(tokens, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn[:, 1], 2 * drawn[:, 0])


def test_a_draw_depends_on_its_place_and_not_on_what_was_drawn_before():
    head = make_head()
    again = null_map("gaussian", head)
    null_map("gaussian", head, window=1)
    assert torch.equal(null_map("gaussian", head), again)
    assert not torch.equal(null_map("gaussian", head, window=1), again)


def test_moments_null_is_refused_without_query_and_key():
    with pytest.raises(RankscopeError, match="gaussian_moments"):
        null_map("gaussian_moments", make_head(weights=True))


def test_choices():
    assert choose_nulls(None) == ("untrained_scaled", "gaussian", "shuffled_rows")
    assert set(choose_nulls("all")) == set(NULLS)
    assert choose_nulls("none") == ()
    with pytest.raises(RankscopeError, match="did you mean 'gaussian'"):
        choose_nulls("gausian")
