import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.spectrum.accumulate import Moments

streams = st.integers(1, 12).flatmap(
    lambda count: arrays(np.float64, (count, 3), elements=st.floats(-100, 100, allow_subnormal=False))
)


def moments_of(stream):
    total = Moments()
    for value in stream:
        total = total.merge(Moments.of(value))
    return total


@given(streams, st.data())
def test_merging_equals_one_pass_for_every_cut(stream, data):
    cut = data.draw(st.integers(0, len(stream)))
    merged = moments_of(stream[:cut]).merge(moments_of(stream[cut:]))
    assert merged.count == len(stream)
    np.testing.assert_allclose(merged.mean, stream.mean(axis=0), rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(merged.m2, ((stream - stream.mean(axis=0)) ** 2).sum(axis=0), rtol=1e-9, atol=1e-8)


@given(streams)
def test_sd_is_the_sample_deviation(stream):
    sd = moments_of(stream).sd()
    if len(stream) == 1:
        assert np.isnan(sd).all()
    else:
        np.testing.assert_allclose(sd, stream.std(axis=0, ddof=1), rtol=1e-7, atol=1e-5)


def test_merging_does_not_touch_its_pieces():
    first, second = Moments.of(np.array([1.0])), Moments.of(np.array([3.0]))
    first.merge(second)
    assert (first.count, first.mean.item(), first.m2.item()) == (1, 1.0, 0.0)
