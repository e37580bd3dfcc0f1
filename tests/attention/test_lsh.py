import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention.exact import sdpa
from rankscope.attention.lsh import draw_rotations, hash_buckets, lsh, lsh_attention
from reference.lsh import bucket_loop, chunk_loop, lsh_loop
from rivals import TOLERANCE, assert_all_close, draw, heads, peak_bytes, relative_error, seeded, with_gradients

FORM = pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])


def run(tensors, rotations, chunk, **options):
    """With two tensors the shared form, with three the separate one."""

    def call(*x):
        query, key, value = x if len(x) == 3 else (x[0], None, x[1])
        return lsh_attention(query, key, value, rotations, chunk=chunk, **options)

    return with_gradients(call, *tensors)


@FORM
@CAUSAL
@pytest.mark.parametrize(("n", "chunk", "rounds"), [(1, 4, 2), (40, 1, 2), (63, 8, 3), (63, 100, 1)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_equals_the_slow_twin_on_the_same_rotations(shared, is_causal, n, chunk, rounds, is_padded):
    tensors = draw(2, 1, n, 4, count=2 if shared else 3)
    rotations = draw_rotations(n, 4, rounds, chunk, seeded(1))
    mask = torch.zeros(2, n, dtype=torch.bool)
    if is_padded:
        mask[0, : n // 3] = True
        mask[1] = True

    def slow(row, *x):
        query, key, value = x if len(x) == 3 else (x[0], None, x[1])
        return lsh_loop(query, key, value, rotations, chunk, 0.5, (~mask[row]).tolist(), is_causal)

    wanted = with_gradients(lambda *x: heads(slow, *x) + 0 * sum(y.sum() for y in x), *tensors)
    fast = run(tensors, rotations, chunk, key_padding_mask=mask if is_padded else None, is_causal=is_causal)
    assert_all_close(fast, wanted, TOLERANCE[torch.float64])


@pytest.mark.parametrize("n", [500, 1000])
def test_hash_of_many_buckets_is_the_loops(n):
    (x,) = draw(1, 2, n, 8, count=1)
    rotations = draw_rotations(n, 8, 2, 4, seeded(2))
    assert len(rotations) == 2
    bucket = hash_buckets(x[0], rotations)
    for round_ in range(2):
        for head in range(2):
            for i in range(0, n, 7):
                assert bucket[round_, head, i] == bucket_loop(x[0, head, i], [R[round_] for R in rotations])


@CAUSAL
def test_one_chunk_is_softmax_attention_in_the_separate_form(is_causal):
    tensors = draw(2, 2, 63, 8)
    wanted = with_gradients(lambda q, k, v: sdpa(q, k, v, is_causal=is_causal), *tensors)
    fast = with_gradients(lambda q, k, v: lsh(q, k, v, generator=seeded(0), chunk=63, is_causal=is_causal), *tensors)
    assert_all_close(fast, wanted, TOLERANCE[torch.float64])


def test_shared_form_sees_itself_only_where_there_is_no_other():
    n = 12
    x, values = draw(1, 1, n, 4, count=1)[0], torch.eye(n, dtype=torch.float64)[None, None]
    x = torch.nn.functional.pad(x, (0, n - 4))
    weights = lsh(x, None, values, generator=seeded(0), chunk=4, is_causal=True)[0, 0]
    assert torch.equal(weights[0], values[0, 0, 0])
    alone = (weights.diagonal() == 1).nonzero().flatten()
    assert not weights.diagonal()[[i for i in range(n) if i not in alone]].any()
    assert 0 < len(alone) < n
    both_ways = lsh(x, None, values, generator=seeded(0), chunk=4)[0, 0]
    assert not both_ways.diagonal().any()


@FORM
def test_content_of_padding_and_of_the_future_never_leaks(shared):
    tensors = draw(1, 2, 60, 8, count=2 if shared else 3, dtype=torch.float32)
    rotations = draw_rotations(60, 8, 3, 8, seeded(1))
    mask = torch.zeros(1, 60, dtype=torch.bool)
    mask[0, 45:] = True
    whole = run(tensors, rotations, 8, key_padding_mask=mask, is_causal=True)
    for x in tensors:
        x[:, :, 45:] = float("nan")
    spoilt = run(tensors, rotations, 8, key_padding_mask=mask, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, spoilt, strict=True))
    alone = run([x[:, :, :45] for x in tensors], rotations, 8, is_causal=True)
    assert_all_close([spoilt[0][:, :, :45]], alone[:1], TOLERANCE[torch.float32])


@FORM
@CAUSAL
def test_a_fully_padded_row_gives_zeros_and_finite_gradients(shared, is_causal):
    tensors = draw(2, 2, 20, 8, count=2 if shared else 3)
    mask = torch.tensor([[True] * 20, [False] * 20])
    rotations = draw_rotations(20, 8, 2, 4, seeded(1))
    for result in run(tensors, rotations, 4, key_padding_mask=mask, is_causal=is_causal):
        assert result.isfinite().all()
        assert not result[0].any()
        assert result[1].any()


@FORM
def test_single_and_half_precision_agree_with_float64(shared):
    tensors = draw(2, 2, 100, 8, count=2 if shared else 3, dtype=torch.bfloat16)
    # Tokens at equal float64 values in every precision, so that all hash alike.
    rotations = [R.bfloat16().double() for R in draw_rotations(100, 8, 2, 16, seeded(1))]
    wanted = run([x.double() for x in tensors], rotations, 16)
    single = run([x.float() for x in tensors], rotations, 16)
    assert_all_close([x.double() for x in single], wanted, TOLERANCE[torch.float32])
    # One chunk: in bfloat16 a token near the border of two buckets may change sides, which is no rounding error.
    rotations = draw_rotations(100, 8, 2, 100, seeded(1))
    wanted = run([x.double() for x in tensors], rotations, 100)
    half = run(tensors, rotations, 100)
    assert half[0].dtype == torch.bfloat16
    assert_all_close([x.double() for x in half], wanted, TOLERANCE[torch.bfloat16])


@FORM
def test_compiles_without_a_graph_break(shared):
    tensors = draw(1, 2, 50, 8, count=2 if shared else 3)
    rotations = draw_rotations(50, 8, 2, 8, seeded(1))

    def call(*x):
        query, key, value = x if len(x) == 3 else (x[0], None, x[1])
        return lsh_attention(query, key, value, rotations, chunk=8, is_causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_all_close(with_gradients(compiled, *tensors), with_gradients(call, *tensors), TOLERANCE[torch.float64])


def test_mean_error_falls_with_rounds():
    tensors = draw(4, 4, 256, 16)
    exact = sdpa(*tensors)
    errors = [relative_error(lsh(*tensors, generator=seeded(3), rounds=r, chunk=16), exact) for r in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2]


def test_memory_grows_with_n_only():
    def used(n):
        x = draw(1, 1, n, 16, dtype=torch.float32)
        return peak_bytes(lambda: lsh(*x, generator=seeded(0), rounds=2))

    small, large = used(2048), used(8192)
    assert large < 4 * 8192**2 / 8
    assert large < 4.8 * small


def test_same_seed_same_output_and_other_seed_other_output():
    tensors = draw(1, 1, 100, 8)
    first, again, other = (lsh(*tensors, generator=seeded(s), chunk=8, rounds=1) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_twins_chunks_hold_whole_sorted_runs():
    (x,) = draw(1, 1, 63, 4, count=1)
    chunks = chunk_loop(x[0, 0], [R[0] for R in draw_rotations(63, 4, 1, 8, seeded(0))], [True] * 63, 8)
    assert sorted(list(chunks.values()).count(c) for c in range(8)) == [7] + [8] * 7


def test_bad_input_is_refused_in_one_line():
    x, y = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 5, 2)
    for call in (
        lambda: lsh(x, x, x, generator=seeded(0), rounds=0),
        lambda: lsh(x, x, x, generator=seeded(0), chunk=0),
        lambda: lsh(x, y, y, generator=seeded(0)),
        lambda: lsh_attention(x, x, x, [torch.zeros(1, 3, 2)]),
    ):
        with pytest.raises(RankscopeError, match=r"rounds|chunk|one length|rotations") as error:
            call()
        assert "\n" not in str(error.value)
