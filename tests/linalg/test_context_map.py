import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope._errors import RankscopeError
from rankscope.linalg import context_map as module
from rankscope.linalg.context_map import ContextMap
from reference.context_map import context_map_loop

# Relative RMS, as everywhere in this project. bfloat16 inputs are exact in float32, where the work is done.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}


def assert_near(got, expected, dtype):
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    error = (got.double() - expected.double()).square().mean().sqrt() / scale
    assert error <= TOLERANCE[dtype], f"relative RMS {error:.2e}"


def draw(n, m=None, *, dtype=torch.float32, d=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(n, d, generator=generator, dtype=torch.float64)
    key = torch.randn(n if m is None else m, d, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)


def padding(n, seed):
    mask = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.3
    mask[0] = False
    return mask


def assert_everything(P, dense, dtype):
    n, m = dense.shape
    assert P.shape == (n, m)
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(m, 3, generator=generator, dtype=torch.float64)
    Y = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    # What the map was given is float32, so the twin gets the same numbers.
    X, Y = X.to(P.dtype), Y.to(P.dtype)
    assert_near(P.dense(), dense, dtype)
    assert_near(P.rows(slice(n // 3, n // 3 + 2)), dense[n // 3 : n // 3 + 2], dtype)
    assert_near(P.matmul(X), dense @ X.double(), dtype)
    assert_near(P.rmatmul(Y), dense.T @ Y.double(), dtype)
    assert_near(P.gram_matmul(X), dense.T @ (dense @ X.double()), dtype)
    assert_near(P.row_sums(), dense.sum(1), dtype)
    assert_near(P.column_sums(), dense.sum(0), dtype)
    assert_near(P.row_norms_squared(), dense.square().sum(1), dtype)
    assert_near(P.column_norms_squared(), dense.square().sum(0), dtype)
    assert_near(P.row_entropy(), torch.special.entr(dense).sum(1), dtype)
    assert_near(P.diagonal(), dense.diagonal(), dtype)
    assert P.frobenius_squared() == pytest.approx(float(dense.square().sum()), rel=TOLERANCE[dtype])


MASKS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "causal window": {"is_causal": True, "window": 7},
    "window": {"window": 5},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": 0.7},
    "all": {"is_causal": True, "window": 9, "softcap": 2.0, "sinks": -0.3},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n", [1, 63])
@pytest.mark.parametrize("name", MASKS)
def test_everything_equals_the_loops(name, n, dtype):
    query, key = draw(n, dtype=dtype)
    dense = context_map_loop(query, key, 0.7, **MASKS[name])
    assert_everything(ContextMap(query, key, scaling=0.7, **MASKS[name]), dense, dtype)


@pytest.mark.parametrize("name", ["bidirectional", "all"])
def test_padding_is_cut_out_at_500_tokens_and_positions_stay(name):
    query, key = draw(500)
    mask = padding(500, seed=3)
    masks = {"key_padding_mask": mask, "query_padding_mask": mask, **MASKS[name]}
    dense = context_map_loop(query, key, 0.7, **masks)
    assert dense.shape[0] == int((~mask).sum())
    assert_everything(ContextMap(query, key, scaling=0.7, **masks), dense, torch.float32)


@pytest.mark.parametrize(("n", "m"), [(5, 33), (33, 5)])
def test_cross_attention_with_bias_equals_the_loops(n, m):
    query, key = draw(n, m, dtype=torch.float64)
    bias = torch.randn(n, m, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask = padding(m, seed=4)
    dense = context_map_loop(query, key, 0.5, bias=bias, key_padding_mask=mask)
    assert_everything(ContextMap(query, key, bias=bias, key_padding_mask=mask), dense, torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 40),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 50),
    softcap=st.none() | st.floats(0.5, 5),
    sinks=st.none() | st.floats(-3, 3),
    padded=st.booleans(),
    strip=st.sampled_from([16, 64, 2**20]),
    seed=st.integers(0, 2**16),
)
def test_any_mask_and_any_strip_size_equals_the_loops(n, causal, window, softcap, sinks, padded, strip, seed):
    query, key = draw(n, dtype=torch.float64, seed=seed)
    mask = padding(n, seed) if padded else None
    options = {"is_causal": causal, "window": window, "softcap": softcap, "sinks": sinks}
    options |= {"key_padding_mask": mask, "query_padding_mask": mask}
    before = module.STRIP_ENTRIES, module.STRIP_ROWS
    module.STRIP_ENTRIES, module.STRIP_ROWS = strip, (2, 8) if strip < 2**20 else (16, 512)
    try:
        P = ContextMap(query, key, scaling=0.9, **options)
        assert_everything(P, context_map_loop(query, key, 0.9, **options), torch.float64)
    finally:
        module.STRIP_ENTRIES, module.STRIP_ROWS = before


@pytest.mark.parametrize("name", MASKS)
def test_products_are_adjoint_over_many_strips(name):
    query, key = draw(3000, dtype=torch.float64)
    P = ContextMap(query, key, **MASKS[name])
    generator = torch.Generator().manual_seed(5)
    X, Y = (torch.randn(3000, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    PX = P.matmul(X)
    torch.testing.assert_close((PX * Y).sum(), (X * P.rmatmul(Y)).sum(), rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(P.gram_matmul(X), P.rmatmul(PX), rtol=1e-11, atol=1e-13)
    if name not in ("sinks", "all"):
        torch.testing.assert_close(P.row_sums(), torch.ones(3000, dtype=torch.float64), rtol=1e-12, atol=0)


def test_low_temperature_rows_do_not_overflow():
    query, key = draw(200)
    P = ContextMap(query, key, scaling=500.0)
    dense = torch.softmax(500.0 * (query.double() @ key.double().T), -1)
    # Logits of 3,000 carry an absolute error of about 1e-4 in float32, which is a relative one in P.
    assert float((P.dense() - dense).abs().max()) < 2e-3
    assert float((P.row_sums() - 1).abs().max()) < 1e-3


def test_memory_of_a_product_is_a_strip_not_the_matrix():
    query, key = draw(8192, d=8)
    P = ContextMap(query, key)
    assert max(strip.numel() for _, _, strip in P._strips()) <= module.STRIP_ENTRIES < 8192**2 / 16


def test_causal_and_window_skip_what_no_row_sees():
    query, key = draw(8192, d=2)
    entries = {
        name: sum(strip.numel() for _, _, strip in ContextMap(query, key, **masks)._strips())
        for name, masks in {"causal": {"is_causal": True}, "window": {"is_causal": True, "window": 256}}.items()
    }
    assert entries["causal"] < 0.55 * 8192**2
    assert entries["window"] < 0.12 * 8192**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(6, 3)}, "`query` and `key` must have shapes"),
        ({"key": torch.zeros(6, 4, dtype=torch.float64)}, "floats of one dtype"),
        ({"key": torch.zeros(7, 4), "is_causal": True}, "as many queries as keys"),
        ({"window": 0}, "`window` must be at least 1"),
        ({"softcap": 0.0}, "`softcap` must be positive"),
        ({"bias": torch.zeros(6, 5)}, r"`bias` must have shape \(n=6, m=6\)"),
        ({"key_padding_mask": torch.zeros(6)}, "`key_padding_mask` must be bool"),
        ({"key_padding_mask": torch.ones(6, dtype=torch.bool)}, "leave no token"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    with pytest.raises(RankscopeError, match=message):
        ContextMap(**{"query": torch.zeros(6, 4), "key": torch.zeros(6, 4), **change})


def test_names_a_row_that_sees_no_key_and_logits_that_are_not_finite():
    mask = torch.tensor([True, False, False])
    with pytest.raises(RankscopeError, match="query 0 sees no key"):
        ContextMap(torch.zeros(3, 2), torch.zeros(3, 2), key_padding_mask=mask, is_causal=True).row_sums()
    query = torch.zeros(3, 2)
    query[2, 0] = torch.nan
    with pytest.raises(RankscopeError, match="logits of query 2 are not finite"):
        ContextMap(query, torch.zeros(3, 2)).row_sums()


def test_refuses_operands_of_another_length_and_strided_rows():
    P = ContextMap(torch.zeros(3, 2), torch.zeros(5, 2))
    with pytest.raises(RankscopeError, match=r"`X` must have shape \(5, r\)"):
        P.matmul(torch.zeros(3, 1))
    with pytest.raises(RankscopeError, match=r"`Y` must have shape \(3, r\)"):
        P.rmatmul(torch.zeros(5, 1))
    with pytest.raises(RankscopeError, match="slice of step 1"):
        P.rows(slice(0, 3, 2))


def test_float64_operands_make_float64_products_of_the_same_entries():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(70, 8, generator=generator), torch.randn(50, 8, generator=generator)
    X, Y = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (50, 70))
    P = ContextMap(query, key)
    dense = P.dense().double()
    for found, expected in (
        (P.matmul(X), dense @ X),
        (P.rmatmul(Y), dense.T @ Y),
        (P.gram_matmul(X), dense.T @ (dense @ X)),
    ):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert P.matmul(X.float()).dtype == P.matmul(X.bfloat16()).dtype == torch.float32
