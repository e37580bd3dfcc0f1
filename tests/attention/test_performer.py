import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention.exact import sdpa
from rankscope.attention.performer import orthogonal_features, performer, performer_attention
from reference.performer import performer_loop
from rivals import TOLERANCE, assert_all_close, draw, heads, peak_bytes, relative_error, seeded, with_gradients

CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])
OMEGA = orthogonal_features(20, 4, seeded(1))


@CAUSAL
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("n", [1, 33, 63])
def test_equals_the_slow_twin_on_the_same_features(is_causal, is_padded, n):
    tensors = draw(2, 1, n, 4)
    mask = torch.zeros(2, n, dtype=torch.bool)
    if is_padded:
        mask[0, : n // 3] = True
        mask[1] = True

    def slow(row, q, k, v):
        return performer_loop(q, k, v, OMEGA, 0.5, (~mask[row]).tolist(), is_causal)

    def fast(q, k, v):
        return performer_attention(q, k, v, OMEGA, key_padding_mask=mask if is_padded else None, is_causal=is_causal)

    wanted = with_gradients(lambda *x: heads(slow, *x) + 0 * sum(y.sum() for y in x), *tensors)
    assert_all_close(with_gradients(fast, *tensors), wanted, TOLERANCE[torch.float64])


@CAUSAL
@pytest.mark.parametrize("n", [500, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prefix_and_tiles_equal_the_masked_matrix(is_causal, n, dtype):
    tensors = draw(2, 3, n, 8, dtype=dtype)
    omega = orthogonal_features(24, 8, seeded(1))

    def matrix(q, k, v):
        root = 8**-0.25
        phi_q, phi_k = (((x * root) @ omega.T - (x * root).square().sum(-1, keepdim=True) / 2).exp() for x in (q, k))
        kernel = phi_q @ phi_k.mT
        kernel = kernel.tril() if is_causal else kernel
        return kernel @ v / kernel.sum(dim=-1, keepdim=True)

    wanted = with_gradients(matrix, *(x.double() for x in tensors))
    fast = with_gradients(lambda q, k, v: performer_attention(q, k, v, omega, is_causal=is_causal), *tensors)
    assert_all_close([x.double() for x in fast], wanted, TOLERANCE[dtype])


def test_features_are_orthogonal_in_blocks_and_as_long_as_gaussian_vectors():
    omega = orthogonal_features(4096, 16, seeded(0)).unflatten(0, (-1, 16))
    gram = omega @ omega.mT
    off = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-12
    # Squared length is chi-squared with 16 degrees: mean 16, standard error sqrt(32 / 4096) = .088; five of them.
    assert abs(gram.diagonal(dim1=-2, dim2=-1).mean() - 16) < 5 * 0.088


def test_kernel_estimate_is_unbiased_within_five_standard_errors():
    # Blocks of orthogonal features are independent of each other, so their mean has a standard error.
    q, k = (x[0, 0, 0] / 2 for x in draw(1, 1, 1, 4, count=2, seed=5))
    omega = orthogonal_features(4 * 20_000, 4, seeded(0))
    estimates = ((omega @ q - q @ q / 2).exp() * (omega @ k - k @ k / 2).exp()).unflatten(0, (-1, 4)).mean(dim=-1)
    standard_error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - (q @ k).exp()) < 5 * standard_error
    assert standard_error < 0.05 * (q @ k).exp()


@CAUSAL
def test_converges_to_softmax_attention_as_features_grow(is_causal):
    # The variance is exponential in |q + k|²: at half length the sum is no longer ruled by a few large features.
    q, k, v = draw(2, 2, 100, 8)
    tensors = q / 2, k / 2, v
    exact = sdpa(*tensors, is_causal=is_causal)
    errors = []
    for features in (32, 512, 8192):
        draws = [performer(*tensors, generator=seeded(s), features=features, is_causal=is_causal) for s in range(8)]
        errors.append(sum(relative_error(x, exact) ** 2 for x in draws) ** 0.5)
    # Sixteen times the features: a quarter of the error, within a factor of two.
    assert errors[0] / 8 < errors[1] < errors[0] / 2
    assert errors[1] / 8 < errors[2] < errors[1] / 2


@CAUSAL
@pytest.mark.parametrize("keep", [slice(13, None), slice(None, 37)], ids=["padded left", "padded right"])
def test_padding_is_in_neither_numerator_nor_denominator(is_causal, keep):
    tensors = draw(1, 2, 50, 4)
    mask = torch.ones(1, 50, dtype=torch.bool)
    mask[0, keep] = False
    # Huge keys would own the largest feature, and any ε against underflow would drown the others.
    tensors[1][:, :, mask[0]] = 1e3
    tensors[2][:, :, mask[0]] = float("nan")
    output = performer_attention(*tensors, OMEGA, key_padding_mask=mask, is_causal=is_causal)
    alone = performer_attention(*(x[:, :, keep] for x in tensors), OMEGA, is_causal=is_causal)
    torch.testing.assert_close(output[:, :, keep], alone, rtol=1e-11, atol=1e-12)


@CAUSAL
def test_constant_values_come_back_however_large_the_logits(is_causal):
    q, k, _ = draw(1, 2, 300, 16, dtype=torch.float32)
    ones = torch.ones_like(q)
    output = performer(20 * q, 20 * k, ones, generator=seeded(0), features=64)
    torch.testing.assert_close(output, ones, rtol=1e-5, atol=1e-5)
    output = performer(3 * q, 3 * k, ones, generator=seeded(0), features=64, is_causal=is_causal)
    torch.testing.assert_close(output, ones, rtol=1e-5, atol=1e-5)


@CAUSAL
def test_a_fully_padded_row_gives_zeros_and_finite_gradients(is_causal):
    mask = torch.tensor([[True] * 20, [False] * 20])
    results = with_gradients(
        lambda q, k, v: performer_attention(q, k, v, OMEGA, key_padding_mask=mask, is_causal=is_causal),
        *draw(2, 2, 20, 4),
    )
    for result in results:
        assert result.isfinite().all()
        assert not result[0].any()
        assert result[1].any()


def test_cross_attention_of_two_lengths_and_refusal_of_its_causal_form():
    query, key = draw(1, 2, 30, 4, count=1)[0], draw(1, 2, 40, 4, count=1)[0]
    output = performer_attention(query, key, key, OMEGA)
    assert_all_close(
        [output], [heads(lambda _, q, k: performer_loop(q, k, k, OMEGA, 0.5, [True] * 40, False), query, key)], 1e-12
    )
    with pytest.raises(RankscopeError, match="one length"):
        performer_attention(query, key, key, OMEGA, is_causal=True)


@CAUSAL
def test_half_precision_and_compilation_agree_with_float64(is_causal):
    tensors = [x.bfloat16().double() for x in draw(1, 2, 200, 4)]

    def call(q, k, v):
        return performer_attention(q, k, v, OMEGA, is_causal=is_causal)

    wanted = with_gradients(call, *tensors)
    half = with_gradients(call, *(x.bfloat16() for x in tensors))
    assert half[0].dtype == torch.bfloat16
    assert_all_close([half[0].double()], wanted[:1], TOLERANCE[torch.bfloat16])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_all_close(with_gradients(compiled, *tensors), wanted, TOLERANCE[torch.float64])


@CAUSAL
def test_memory_grows_with_n_only(is_causal):
    def used(n):
        x = draw(1, 1, n, 16, dtype=torch.float32)
        return peak_bytes(lambda: performer(*x, generator=seeded(0), features=64, is_causal=is_causal))

    small, large = used(2048), used(8192)
    assert large < 4 * 8192**2 / 8
    assert large < 4.8 * small


def test_bad_input_is_refused_in_one_line():
    x = torch.zeros(1, 1, 4, 2)
    for call in (
        lambda: performer(x, x, x, generator=seeded(0), features=0),
        lambda: performer(x, x, x, generator=seeded(0), scaling=-1.0),
        lambda: performer_attention(x, x, x, torch.zeros(3, 3)),
    ):
        with pytest.raises(RankscopeError, match=r"features|scaling|omega") as error:
            call()
        assert "\n" not in str(error.value)
