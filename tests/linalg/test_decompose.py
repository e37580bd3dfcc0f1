import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope._errors import RankscopeError
from rankscope._registry import Registry
from rankscope.linalg import _gram, _lapack, decompose
from rankscope.linalg.decompose import METHODS, choose, singular_values
from rankscope.linalg.rank import nuclear_curve, numerical_rank
from reference import spectra as reference

EXACT = {"svd": 1e-12, "svd32": 2e-6, "gram": 1e-8, "gram32": 1e-3}


def attention(n, m, *, heads=3, causal=False, sink=0.0, seed=0, dtype=torch.float32):
    """Softmax of Gaussian logits; ``sink`` raises the first column's."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(heads, n, 16, generator=generator) @ torch.randn(heads, 16, m, generator=generator) / 4
    logits[..., 0] += sink
    if causal:
        logits = logits.masked_fill(torch.ones(n, m).triu(1).bool(), -torch.inf)
    return logits.softmax(-1).to(dtype)


def curve_error(sigma, exact):
    return float((nuclear_curve(sigma.double()) - nuclear_curve(exact)).abs().max())


@pytest.fixture(params=["lapack", "torch"])
def route(request, monkeypatch):
    """Both ways to the eigenvalues: scipy's pointers, and torch alone as if scipy did not export them."""
    if request.param == "torch":
        monkeypatch.setattr(_lapack, "load", lambda dtype: None)
    else:
        assert _lapack.load(torch.float32) is not None
        assert _lapack.load(torch.float64) is not None
    return request.param


def test_jacobi_and_numpy_agree_so_either_may_be_the_yardstick():
    P = attention(17, 11, heads=1)[0].double().numpy()
    np.testing.assert_allclose(reference.singular_values(P), np.linalg.svd(P, compute_uv=False), rtol=1e-11)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (31, 31), (20, 33), (33, 20)])
def test_every_method_equals_jacobi_rotations(method, shape, route):
    P = attention(*shape, heads=2)
    found = decompose.decompose(P, method=method)
    assert found.method == method
    assert found.retries == 0
    assert found.sigma.shape == (2, min(shape))
    assert found.sigma.dtype == torch.float64
    for one, sigma in zip(P, found.sigma, strict=True):
        exact = torch.from_numpy(reference.singular_values(one.numpy()).copy())
        assert curve_error(sigma, exact) <= EXACT[method]
        assert sigma[0].item() == pytest.approx(
            exact[0].item(), rel=1e-10 if METHODS[method].dtype == torch.float64 else 2e-6
        )
        assert (sigma.diff() <= 0).all()
        assert (sigma >= 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [63, 256, 500])
@pytest.mark.parametrize("kind", ["plain", "causal", "sink", "cross"])
def test_every_method_keeps_its_promise_at_length(method, n, kind, route):
    P = attention(n, n // 2 if kind == "cross" else n, causal=kind == "causal", sink=6.0 if kind == "sink" else 0.0)
    exact = torch.from_numpy(np.linalg.svd(P.double().numpy(), compute_uv=False))
    found = decompose.decompose(P, method=method)
    assert found.retries == 0
    assert curve_error(found.sigma, exact) <= min(EXACT[method], METHODS[method].error(n))


def test_centring_takes_the_mean_out_of_the_rounding_floor(route):
    # Nearly even attention, as a fresh model's: one value of 1, and a tail below the root of float32's rounding.
    generator = torch.Generator().manual_seed(0)
    P = (1e-3 * torch.randn(4, 400, 400, generator=generator)).softmax(-1)
    exact = singular_values(P, method="svd")
    plain = torch.linalg.eigvalsh(P.mT @ P).flip(-1).clamp(min=0).sqrt()
    centred = curve_error(singular_values(P, method="gram32"), exact)
    assert centred < 1e-3
    assert centred < 0.1 * curve_error(plain, exact)


def test_wide_and_transposed_have_one_spectrum():
    P = attention(40, 90)
    for method in METHODS:
        wide, tall = singular_values(P, method=method), singular_values(P.mT, method=method)
        torch.testing.assert_close(wide, tall, rtol=0, atol=1e-6 if METHODS[method].dtype == torch.float64 else 3e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_result_does_not_depend_on_the_batch_it_comes_in(method, route):
    # An odd number of entries, so that each matrix of the batch starts at another place of a cache line.
    P = attention(63, 63, heads=5)
    whole = singular_values(P.view(5, 1, 63, 63), method=method)
    assert whole.shape == (5, 1, 63)
    for i in range(5):
        assert torch.equal(whole[i, 0], singular_values(P[i], method=method))


@pytest.mark.parametrize("method", METHODS)
def test_zero_rows_and_zero_matrices_are_fine(method, route):
    P = attention(32, 32, heads=2)
    P[0, 20:] = 0
    P[1] = 0
    found = decompose.decompose(P, method=method)
    assert found.retries == 0
    assert (found.sigma[1] == 0).all()
    assert curve_error(found.sigma[0], torch.linalg.svdvals(P[0].double())) <= EXACT[method]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_taken_to_float32_first(dtype):
    P = attention(64, 64, dtype=dtype)
    assert torch.equal(singular_values(P), singular_values(P.float()))


def test_auto_takes_the_cheapest_method_that_is_exact_enough():
    assert choose(512, 512, 1e-3) == "gram32"
    assert choose(512, 300, 9e-4) == "gram"
    assert choose(2048, 2048, 1e-3) == "gram"
    assert choose(4096, 4096, 1e-1) == "gram"
    assert choose(512, 512, 1e-9) == "svd"
    with pytest.raises(RankscopeError, match="`tolerance` must be at least 1e-12"):
        choose(512, 512, 0.0)
    assert decompose.decompose(attention(16, 16)).method == "gram"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1e-6, 1e-8, 1e-11]), st.integers(2, 40), st.integers(1, 40))
def test_auto_keeps_the_tolerance_it_was_given(seed, tolerance, n, rank):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, rank, generator=generator) @ torch.randn(rank, n, generator=generator)
    P = logits.softmax(-1).double()
    exact = torch.from_numpy(np.linalg.svd(P.numpy(), compute_uv=False))
    assert curve_error(singular_values(P, tolerance=tolerance), exact) <= tolerance


def test_auto_goes_to_svd_where_the_gram_matrix_cannot_be_bounded():
    # Rank 2 of 48: the 46 zeros come back as large as the root of rounding.
    P = attention(48, 2, heads=2, dtype=torch.float64) @ attention(2, 48, heads=2, dtype=torch.float64)
    P = torch.cat([P, attention(48, 48, heads=1, dtype=torch.float64)])
    loose, tight = (decompose.decompose(P, tolerance=tolerance) for tolerance in (1e-5, 1e-8))
    assert (loose.method, loose.refined) == ("gram", 0)
    assert (tight.method, tight.refined, tight.retries) == ("gram", 2, 0)
    assert curve_error(tight.sigma, torch.linalg.svdvals(P)) < 1e-12


@pytest.mark.parametrize("method", ["gram32", "gram"])
def test_squares_that_leave_the_precision_are_redone_by_svd_and_counted(method, route):
    P = attention(24, 24, dtype=torch.float64)
    P[1] *= 1e-200
    found = decompose.decompose(P, method=method)
    assert found.retries == 1
    np.testing.assert_allclose(found.sigma[1], np.linalg.svd(P[1].numpy(), compute_uv=False), rtol=1e-9, atol=1e-216)


@pytest.mark.parametrize("fault", ["loses energy", "moves energy", "does not converge"])
def test_a_method_that_goes_wrong_is_caught_and_redone(fault, monkeypatch):
    def broken(P):
        spectra = _gram.run_gram(P)
        if fault == "loses energy":
            spectra.sigma[1] *= 0.999
        elif fault == "moves energy":  # the trace still holds: only the second identity sees it
            squares = spectra.sigma[1].square()
            spectra.sigma[1] = (squares + (squares.mean() - squares) * 1e-3).sqrt()
        else:
            spectra.sigma[1] = torch.nan
        return spectra

    row = decompose.Method(broken, torch.float64, lambda n: 0.0, True, "broken")
    monkeypatch.setattr(decompose, "METHODS", Registry("method", {"broken": row}))
    P = attention(40, 40)
    found = decompose.decompose(P, method="broken")
    assert found.retries == 1
    assert found.residual < 1e-12
    assert curve_error(found.sigma, torch.linalg.svdvals(P.double())) < 1e-8


def test_an_audit_reports_the_error_and_changes_nothing():
    P = attention(128, 128, sink=4.0)
    plain, audited = (decompose.decompose(P, method="gram32", audit=audit) for audit in ((), (0, 2)))
    assert (plain.audited, plain.audit_error) == (0, 0.0)
    assert audited.audited == 2
    assert torch.equal(plain.sigma, audited.sigma)
    exact = torch.linalg.svdvals(P.double())
    truth = max(curve_error(plain.sigma[i], exact[i]) for i in (0, 2))
    assert audited.audit_error == pytest.approx(truth, abs=1e-9)
    assert 0 < truth < 1e-3
    with pytest.raises(RankscopeError, match="`audit` must hold positions below 3, got 3"):
        decompose.decompose(P, audit=[3])


def test_only_methods_that_resolve_the_numerical_rank_say_so():
    P = attention(256, 256, sink=8.0)
    exact = numerical_rank(torch.linalg.svdvals(P.double()), n=256, m=256)
    for name, method in METHODS.items():
        found = numerical_rank(singular_values(P, method=name), n=256, m=256)
        if method.resolves_numerical_rank:
            assert (found - exact).abs().max() <= 1, name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(method, value, route):
    P = attention(12, 12)
    P[1, 3, 4] = value
    with pytest.raises(RankscopeError, match="`P` must be finite, got NaN or infinity in matrix 1 of 3"):
        singular_values(P, method=method)


@pytest.mark.parametrize(
    ("P", "message"),
    [
        (torch.ones(3), r"`P` must be a floating-point tensor .* got torch.float32 \(3,\)"),
        (torch.ones(3, 3, dtype=torch.int64), "got torch.int64"),
        (torch.ones(2, 0, 3), "`P` must have rows and columns"),
    ],
)
def test_what_is_no_matrix_is_refused(P, message):
    with pytest.raises(RankscopeError, match=message):
        singular_values(P)


def test_an_unknown_method_gets_the_nearest_name():
    with pytest.raises(RankscopeError, match="did you mean 'gram"):
        singular_values(torch.eye(2), method="gramm")


def test_an_empty_batch_is_an_empty_result():
    assert singular_values(torch.empty(0, 4, 6)).shape == (0, 4)


def test_a_matrix_too_large_to_keep_its_buffers_gets_the_same_values(monkeypatch):
    P = attention(96, 96)
    kept = singular_values(P, method="gram32")
    monkeypatch.setattr(_gram, "KEPT_ENTRIES", 0)
    assert torch.equal(kept, singular_values(P, method="gram32"))


def in_thread(function):
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(function()))
    thread.start()
    thread.join()
    return outcome[0]


def test_blas_threads_are_one_inside_and_as_before_after_whoever_enters_first():
    read, write = _lapack._thread_setting()
    before = read()

    def inside():
        with _lapack.single_threaded():
            return read()

    try:
        write(2)
        # From several threads in turn: a setting that obeys only the thread that came first would leave 2.
        assert [inside(), in_thread(inside), inside(), in_thread(inside), read()] == [1, 1, 1, 1, 2]
        with _lapack.single_threaded():
            assert in_thread(inside) == 1
            assert read() == 1
        assert read() == 2
    finally:
        write(before)


def test_the_thread_setting_is_that_of_the_library_whose_pointers_are_called():
    ThreadpoolController = pytest.importorskip("threadpoolctl").ThreadpoolController

    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    ours = [library for library in libraries if "scipy.libs" in library.filepath]
    if not ours:
        pytest.skip("scipy does not bring its own BLAS here")
    with _lapack.single_threaded():
        assert [library.get_num_threads() for library in ours] == [1]


def test_a_signature_of_other_integers_is_not_called():
    from scipy.linalg import cython_lapack

    with pytest.raises(TypeError, match="another signature"):
        _lapack._pointer(cython_lapack, "dsytrd", arguments=9)
    with pytest.raises(TypeError, match="another signature"):
        _lapack._pointer(cython_lapack, "dlamch", arguments=1)
