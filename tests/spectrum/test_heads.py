import pytest
import torch

from rankscope.spectrum.heads import Head, logit_deviation
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
def test_logit_deviation_equals_the_loops(masked):
    query, key, allowed = draw()
    content = query @ key.T
    expected = logit_deviation_loop(content, allowed if masked else None)
    assert logit_deviation(content, allowed if masked else None) == pytest.approx(expected, rel=1e-6)


def test_logit_deviation_ignores_a_rows_offset():
    query, key, _ = draw()
    content = query @ key.T
    shifted = content + torch.arange(7.0).unsqueeze(1) * 10
    assert logit_deviation(shifted, None) == pytest.approx(logit_deviation(content, None), rel=1e-5)


def test_a_row_without_allowed_entries_has_no_deviation():
    allowed = torch.tensor([[True, True], [False, False]])
    assert logit_deviation(torch.tensor([[1.0, -1.0], [9.0, 0.0]]), allowed) == pytest.approx(1.0)


def test_weights_alone_give_back_their_map_through_their_logarithm():
    query, key, allowed = draw()
    weights = Head(query, key, 0.5, torch.where(allowed, 0.0, FLOOR), None, None, None, 4).context_map()
    head = Head(None, None, 1.0, None, None, None, weights, 4)
    torch.testing.assert_close(head.map_of(head.content_logits()), weights, rtol=0, atol=1e-6)
    assert torch.equal(head.allowed(), allowed)
