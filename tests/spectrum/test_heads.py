import math

import pytest
import torch

from rankscope.spectrum import heads as heads_module
from rankscope.spectrum.heads import Head, deviation
from rankscope.spectrum.nulls import masked_softmax
from reference.heads import logit_deviation_loop, softmax_map_loop

FLOOR = torch.finfo(torch.float32).min


def draw(n=7, m=9, d=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(n, d, generator=generator), torch.randn(m, d, generator=generator)
    allowed = torch.rand(n, m, generator=generator) < 0.6
    allowed[:, 0] = True
    return query, key, allowed


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sink", [None, 0.7])
def test_context_map_equals_the_loops(masked, softcap, sink):
    query, key, allowed = draw()
    bias = torch.where(allowed, 0.0, FLOOR) if masked else None
    head = Head(query, key, 0.5, bias, softcap, None if sink is None else torch.tensor(sink), None, 4)
    expected = softmax_map_loop(query, key, 0.5, allowed if masked else None, softcap, sink)
    torch.testing.assert_close(head.context_map().double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("strip", [2, 1024])
def test_deviation_equals_the_loops_in_strips_of_any_height(masked, strip, monkeypatch):
    monkeypatch.setattr(heads_module, "STRIP", strip)
    query, key, allowed = draw()
    bias = torch.where(allowed, 0.0, FLOOR) if masked else None
    head = Head(query, key, 0.5, bias, None, None, None, 4)
    expected = logit_deviation_loop(0.5 * query @ key.T, allowed if masked else None)
    assert deviation(head, content=True) == pytest.approx(expected, rel=1e-6)
    assert deviation(head, content=False) == pytest.approx(expected, rel=1e-6)


def test_position_bias_counts_for_the_logits_but_not_for_the_content():
    query, key, _ = draw()
    head = Head(query, key, 0.5, torch.arange(63.0).reshape(7, 9).remainder(5), None, None, None, 4)
    plain = Head(query, key, 0.5, None, None, None, None, 4)
    assert deviation(head, content=True) == pytest.approx(deviation(plain, content=True))
    assert deviation(head, content=False) > 1.2 * deviation(head, content=True)


def test_a_rows_offset_is_ignored_and_a_row_without_entries_is_left_out():
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    assert deviation(Head(None, None, 1.0, None, None, None, weights, 4), content=True) == pytest.approx(0, abs=1e-6)


def test_a_non_finite_logit_makes_the_deviation_nan():
    query, key, _ = draw()
    query[3, 0] = float("inf")
    assert math.isnan(deviation(Head(query, key, 1.0, None, None, None, None, 4), content=True))


def test_weights_alone_give_back_their_map_through_their_logarithm():
    query, key, allowed = draw()
    weights = Head(query, key, 0.5, torch.where(allowed, 0.0, FLOOR), None, None, None, 4).context_map()
    head = Head(None, None, 1.0, None, None, None, weights, 4)
    back = masked_softmax(head.content_logits(), head.allowed())
    torch.testing.assert_close(back, weights, rtol=0, atol=1e-6)
    assert torch.equal(head.allowed(), allowed)
