import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention.exact import sdpa
from rankscope.attention.nystrom import iterative_pseudo_inverse, nystrom
from reference.nystrom import nystrom_loop, pseudo_inverse_loop
from rivals import TOLERANCE, assert_all_close, draw, heads, peak_bytes, relative_error, with_gradients


@pytest.mark.parametrize(("n", "m"), [(1, 1), (63, 63), (64, 64), (20, 63)])
def test_equals_the_slow_twin_in_output_and_every_gradient(n, m):
    tensors = [draw(1, 2, n, 4, count=1)[0], *draw(1, 2, m, 4, count=2, seed=1)]
    wanted = with_gradients(lambda *x: heads(lambda _, q, k, v: nystrom_loop(q, k, v, 8, 0.5, 6), *x), *tensors)
    fast = with_gradients(lambda q, k, v: nystrom(q, k, v, landmarks=8), *tensors)
    assert_all_close(fast, wanted, TOLERANCE[torch.float64])


@pytest.mark.parametrize("n", [63, 128])
def test_as_many_landmarks_as_tokens_and_the_exact_inverse_are_softmax_attention(n):
    tensors = draw(2, 2, n, 16)
    wanted = with_gradients(sdpa, *tensors)
    fast = with_gradients(lambda q, k, v: nystrom(q, k, v, landmarks=n, exact=True), *tensors)
    # The inverse loses what its condition number says, about 1e4 here.
    assert_all_close(fast[:1], wanted[:1], 1e-10)
    assert_all_close(fast[1:], wanted[1:], 1e-6)


def test_six_steps_leave_the_iterations_own_error_and_more_steps_remove_it():
    tensors = draw(2, 4, 128, 64)
    exact = sdpa(*tensors)
    errors = [relative_error(nystrom(*tensors, landmarks=128, iterations=i), exact) for i in (6, 9, 12, 20)]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert 1e-3 < errors[0] < 0.2
    assert errors[3] < 1e-8


def test_pseudo_inverse_equals_its_loop_for_each_matrix_of_a_batch():
    A = torch.stack([x.softmax(dim=-1) for x in draw(1, 3, 9, 6, count=1)[0][0]]) * torch.tensor(
        [1.0, 10.0, 100.0], dtype=torch.float64
    ).view(3, 1, 1)
    together = iterative_pseudo_inverse(A)
    for one, whole in zip(A, together, strict=True):
        assert_all_close([whole], [pseudo_inverse_loop(one, 6)], TOLERANCE[torch.float64])
    assert not iterative_pseudo_inverse(torch.zeros(3, 3)).any()


@pytest.mark.parametrize("keep", [slice(13, None), slice(None, 37), slice(45, None)])
@pytest.mark.parametrize("exact", [False, True])
def test_a_padded_row_gives_the_numbers_of_the_row_alone(keep, exact):
    tensors = draw(2, 2, 50, 8)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[0] = True
    mask[0, keep] = False
    spoilt = [x.clone() for x in tensors]
    for x in spoilt[1:]:
        x[0, :, mask[0]] = float("nan")
    spoilt[0][0, :, mask[0]] = 1e3
    output = nystrom(*spoilt, landmarks=10, exact=exact, key_padding_mask=mask)
    alone = nystrom(*(x[:1, :, keep] for x in tensors), landmarks=10, exact=exact)
    torch.testing.assert_close(output[:1, :, keep], alone, rtol=1e-9, atol=1e-10)
    other = nystrom(*(x[1:] for x in tensors), landmarks=10, exact=exact)
    torch.testing.assert_close(output[1:], other, rtol=1e-9, atol=1e-10)


def test_queries_have_a_mask_of_their_own_in_cross_attention():
    query, (key, value) = draw(1, 2, 40, 8, count=1)[0], draw(1, 2, 40, 8, count=2, seed=1)
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[:, 30:] = True
    none = torch.zeros_like(mask)
    output = nystrom(query, key, value, landmarks=8, key_padding_mask=mask, query_padding_mask=none)
    alone = nystrom(query, key[:, :, :30], value[:, :, :30], landmarks=8)
    torch.testing.assert_close(output, alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("exact", [False, True])
def test_a_fully_padded_row_gives_zeros_and_finite_gradients(exact):
    mask = torch.tensor([[True] * 20, [False] * 20])
    results = with_gradients(
        lambda q, k, v: nystrom(q, k, v, landmarks=5, exact=exact, key_padding_mask=mask), *draw(2, 2, 20, 8)
    )
    for result in results:
        assert result.isfinite().all()
        assert not result[0].any()
        assert result[1].any()


def test_single_and_half_precision_and_compilation_agree_with_float64():
    tensors = [x.bfloat16().double() for x in draw(1, 2, 100, 8)]
    wanted = with_gradients(lambda q, k, v: nystrom(q, k, v, landmarks=8), *tensors)
    single = with_gradients(lambda q, k, v: nystrom(q, k, v, landmarks=8), *(x.float() for x in tensors))
    assert_all_close([single[0].double()], wanted[:1], 2e-5)
    half = nystrom(*(x.bfloat16() for x in tensors), landmarks=8)
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    compiled = torch.compile(lambda q, k, v: nystrom(q, k, v, landmarks=8), fullgraph=True, backend="aot_eager")
    assert_all_close(with_gradients(compiled, *tensors), wanted, 1e-11)


def test_mean_error_falls_with_landmarks_under_the_iteration_which_also_bounds_the_exact_inverses_noise():
    tensors = draw(4, 4, 256, 16)
    exact = sdpa(*tensors)
    errors = [relative_error(nystrom(*tensors, landmarks=k), exact) for k in (8, 32, 128, 256)]
    assert errors == sorted(errors, reverse=True)
    # Landmarks of patternless tokens are nearly alike: the exact inverse of their map amplifies what it misses.
    assert relative_error(nystrom(*tensors, landmarks=32, exact=True), exact) > 3 * errors[1]


def test_memory_grows_with_n_only():
    def used(n):
        x = draw(1, 1, n, 16, dtype=torch.float32)
        return peak_bytes(lambda: nystrom(*x, landmarks=32))

    small, large = used(2048), used(8192)
    assert large < 4 * 8192**2 / 8
    assert large < 4.8 * small


def test_bad_input_is_refused_in_one_line():
    x = torch.zeros(1, 1, 4, 2)
    for call in (
        lambda: nystrom(x, x, x, landmarks=0),
        lambda: nystrom(x, x, x, iterations=0),
        lambda: nystrom(x, x, x, exact=True, iterations=3),
    ):
        with pytest.raises(RankscopeError, match=r"landmarks|iterations") as error:
            call()
        assert "\n" not in str(error.value)
