import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention.exact import sdpa
from rankscope.attention.local import local
from rankscope.attention.sparse import default_stride, sparse_fixed, sparse_strided
from reference.sparse import fixed_set, set_attention_loop, strided_set, window_set
from rivals import TOLERANCE, assert_all_close, draw, heads, peak_bytes, with_gradients

PATTERNS = {
    "local": (local, {"window": 9}, lambda i, n, causal: window_set(i, n, 9, causal)),
    "strided": (sparse_strided, {"stride": 8}, lambda i, n, causal: strided_set(i, n, 8, causal)),
    "fixed": (sparse_fixed, {"stride": 8, "summary": 3}, lambda i, n, causal: fixed_set(i, n, 8, 3, causal)),
}
CASES = pytest.mark.parametrize(("function", "knobs", "targets"), PATTERNS.values(), ids=PATTERNS)
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])


def allowed(targets, n, is_causal):
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mask[i, targets(i, n, is_causal)] = True
    return mask


@CASES
@CAUSAL
@pytest.mark.parametrize("n", [1, 7, 63])
def test_equals_the_slow_twin_in_output_and_every_gradient(function, knobs, targets, is_causal, n):
    tensors = draw(1, 2, n, 4)
    sets = [targets(i, n, is_causal) for i in range(n)]
    slow = with_gradients(lambda *x: heads(lambda _, q, k, v: set_attention_loop(q, k, v, 0.5, sets), *x), *tensors)
    fast = with_gradients(lambda q, k, v: function(q, k, v, is_causal=is_causal, **knobs), *tensors)
    assert_all_close(fast, slow, TOLERANCE[torch.float64])


@CASES
@CAUSAL
@pytest.mark.parametrize("n", [500, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_block_form_equals_the_masked_dense_one(function, knobs, targets, is_causal, n, dtype):
    tensors = draw(2, 3, n, 16, dtype=dtype)
    mask = allowed(targets, n, is_causal)

    def dense(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    wanted = with_gradients(dense, *(x.double() for x in tensors))
    fast = with_gradients(lambda q, k, v: function(q, k, v, is_causal=is_causal, **knobs), *tensors)
    assert_all_close([x.double() for x in fast], wanted, TOLERANCE[dtype])


@CAUSAL
@pytest.mark.parametrize("is_padded_left", [False, True])
@CASES
def test_a_padded_row_gives_the_numbers_of_the_row_alone(function, knobs, targets, is_causal, is_padded_left):
    tensors = draw(2, 2, 50, 8)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    keep = slice(13, None) if is_padded_left else slice(None, 37)
    mask[0] = True
    mask[0, keep] = False
    for x in tensors:
        x[0, :, mask[0]] = float("nan")
    output = function(*tensors, key_padding_mask=mask, is_causal=is_causal, **knobs)
    alone = function(*(x[:1, :, keep] for x in tensors), is_causal=is_causal, **knobs)
    torch.testing.assert_close(output[:1, :, keep], alone, rtol=1e-12, atol=1e-12)
    assert not output[0, :, mask[0]].any()


@CAUSAL
@CASES
def test_a_fully_padded_row_gives_zeros_and_finite_gradients(function, knobs, targets, is_causal):
    mask = torch.tensor([[True] * 20, [False] * 20])
    results = with_gradients(
        lambda q, k, v: function(q, k, v, key_padding_mask=mask, is_causal=is_causal, **knobs), *draw(2, 2, 20, 8)
    )
    for result in results:
        assert result.isfinite().all()
        assert not result[0].any()
        assert result[1].any()


@CASES
def test_half_precision_and_compilation_agree_with_float64(function, knobs, targets):
    tensors = draw(1, 2, 70, 8)
    wanted = function(*tensors, **knobs)
    low = function(*(x.bfloat16() for x in tensors), **knobs)
    assert low.dtype == torch.bfloat16
    assert_all_close([low.double()], [wanted], TOLERANCE[torch.bfloat16])
    compiled = torch.compile(lambda q, k, v: function(q, k, v, **knobs), fullgraph=True, backend="aot_eager")
    assert_all_close(
        with_gradients(compiled, *tensors),
        with_gradients(lambda q, k, v: function(q, k, v, **knobs), *tensors),
        TOLERANCE[torch.float64],
    )


def test_a_window_as_long_as_the_row_is_softmax_attention():
    for is_causal in (False, True):
        tensors = draw(1, 2, 63, 8)
        wanted = with_gradients(lambda q, k, v: sdpa(q, k, v, is_causal=is_causal), *tensors)  # noqa: B023
        fast = with_gradients(lambda q, k, v: local(q, k, v, window=62, is_causal=is_causal), *tensors)  # noqa: B023
        assert_all_close(fast, wanted, TOLERANCE[torch.float64])


@pytest.mark.parametrize("n", [5, 63, 100])
def test_two_strided_layers_join_every_key_to_every_later_query(n):
    stride = default_stride(n)
    # With zero logits and the identity as values the output is the pattern itself.
    x = torch.eye(n, dtype=torch.float64)[None, None]
    step = sparse_strided(x, x, x, stride=stride, scaling=0.0, is_causal=True)[0, 0] > 0
    reached = (step.double() @ step.double()) > 0
    assert torch.equal(reached, torch.ones(n, n, dtype=torch.bool).tril())


@pytest.mark.parametrize(("function", "exponent"), [(local, 1.0), (sparse_strided, 1.5), (sparse_fixed, 1.5)])
def test_memory_never_holds_a_square_matrix_and_grows_as_claimed(function, exponent):
    def used(n):
        tensors = draw(1, 1, n, 16, dtype=torch.float32)
        return peak_bytes(lambda: function(*tensors))

    small, large = used(2048), used(8192)
    assert large < 4 * 8192**2 / 8
    assert large <= 1.2 * 4**exponent * max(small, 4 * 2**19)


def test_bad_sizes_and_lengths_are_refused_in_one_line():
    x, y = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 5, 2)
    for call in (
        lambda: sparse_fixed(x, x, x, summary=0),
        lambda: local(x, x, x, window=0),
        lambda: sparse_strided(x, x, x, stride=0),
        lambda: sparse_fixed(x, x, x, stride=2, summary=3),
        lambda: local(x, y, y),
        lambda: sparse_fixed(x, x, torch.zeros(1, 1, 4, 3)),
    ):
        with pytest.raises(RankscopeError, match=r"window|stride|summary|one length|value") as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("function", [sparse_strided, sparse_fixed])
def test_a_default_pattern_holds_some_root_n_keys_for_each_query(function):
    def most_keys(n):
        x = torch.eye(n, dtype=torch.float64)[None, None]
        return int((function(x, x, x, scaling=0.0)[0, 0] > 0).sum(dim=-1).max())

    # Four times the tokens, twice the keys.
    assert most_keys(1024) <= 2.1 * most_keys(256)
