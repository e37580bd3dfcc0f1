import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.linalg import workers
from rankscope.linalg.decompose import decompose
from rankscope.linalg.workers import SpectrumPool


def attention(heads, n, m, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(heads, n, m, generator=generator)).softmax(-1)


@pytest.mark.parametrize("method", ["gram32", "gram", "svd"])
def test_any_number_of_workers_gives_the_same_bits_and_statistics(method, monkeypatch):
    monkeypatch.setattr(workers, "TASK", 3 * 63**3)
    monkeypatch.setattr(workers, "AUDIT_EVERY", 4)
    batches = [attention(10, 63, 63, seed) for seed in range(3)] + [attention(4, 40, 63)]
    outcomes = []
    for count in (1, 2, 3):
        with SpectrumPool(count) as pool:
            pending = [pool.decompose(P, method=method) for P in batches]
            outcomes.append(([one.result() for one in pending], pool.statistics))
    first, statistics = outcomes[0]
    assert statistics.matrices == 34
    assert statistics.audited == (9 if method == "gram32" else 0)
    assert (0 < statistics.audit_error < 1e-3) == (method == "gram32")
    for results, others in outcomes[1:]:
        assert others == statistics
        for a, b in zip(first, results, strict=True):
            assert torch.equal(a.sigma, b.sigma)
    for P, result in zip(batches, first, strict=True):
        alone = decompose(P, method=method)
        assert result.sigma.shape == alone.sigma.shape
        torch.testing.assert_close(result.sigma, alone.sigma, rtol=0, atol=1e-4 if method == "gram32" else 1e-7)


def test_results_keep_the_order_of_submission():
    def after(delay, name):
        time.sleep(delay)
        return name

    with SpectrumPool(3) as pool:
        futures = [pool.submit(after, delay, name) for delay, name in ((0.1, "a"), (0.05, "b"), (0.0, "c"))]
        assert [future.result() for future in futures] == ["a", "b", "c"]


def test_asking_twice_counts_once():
    with SpectrumPool(2) as pool:
        pending = pool.decompose(attention(5, 16, 16).view(1, 5, 16, 16))
        assert pending.result() is pending.result()
        assert pending.done()
        assert pending.result().sigma.shape == (1, 5, 16)
        assert pool.statistics.matrices == 5


def test_submission_waits_while_the_limit_is_in_flight():
    gate, entered, most, running = threading.Event(), threading.Semaphore(0), [], []
    lock = threading.Lock()

    def work(P):
        with lock:
            running.append(P)
            most.append(sum(len(one) for one in running))
        entered.release()
        gate.wait(10)
        with lock:
            running.remove(P)

    class Batch(torch.Tensor):
        """Compared by identity, so that ``list.remove`` finds it."""

        __eq__ = object.__eq__
        __hash__ = object.__hash__

    batches = [torch.zeros(2, 3, 3).as_subclass(Batch) for _ in range(5)]
    with SpectrumPool(4, limit=4) as pool:
        submitted = []

        def submit():
            submitted.extend(pool.submit(work, P) for P in batches)

        thread = threading.Thread(target=submit)
        thread.start()
        assert entered.acquire(timeout=10)
        assert entered.acquire(timeout=10)
        assert not entered.acquire(timeout=0.2)
        assert thread.is_alive()
        gate.set()
        thread.join(10)
        assert not thread.is_alive()
    assert len(most) == 5
    assert max(most) == 4


def test_a_batch_above_the_limit_is_let_in_alone():
    with SpectrumPool(1, limit=2) as pool:
        assert pool.submit(len, torch.zeros(7, 2, 2)).result(timeout=10) == 7
        assert pool.decompose(attention(9, 8, 8)).result().sigma.shape == (9, 8)


def test_an_exception_is_raised_where_the_result_is_asked_for():
    P = attention(6, 8, 8)
    P[4, 0, 0] = torch.nan
    with SpectrumPool(2) as pool:
        bad, good = pool.decompose(P), pool.decompose(attention(2, 8, 8))
        assert good.result().sigma.shape == (2, 8)
        with pytest.raises(RankscopeError, match="`P` must be finite"):
            bad.result()
        assert pool.statistics.matrices == 2


def test_each_worker_is_single_threaded_and_the_caller_is_not_touched():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with SpectrumPool(2) as pool:
            assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [2]
    finally:
        torch.set_num_threads(before)


def test_an_error_in_the_block_cancels_what_waits():
    started, done = threading.Event(), []

    def slow():
        started.set()
        time.sleep(0.2)
        done.append(1)

    def fail():
        with SpectrumPool(1) as pool:
            for _ in range(20):
                pool.submit(slow)
            started.wait(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(done) <= 2


# A child of a background job inherits an ignored SIGINT; this one listens whoever starts it.
INTERRUPTED = """
import signal
import torch
from rankscope.linalg.workers import SpectrumPool
signal.signal(signal.SIGINT, signal.default_int_handler)
P = torch.rand(4, 256, 256).softmax(-1)
with SpectrumPool(2, limit=8) as pool:
    print("ready", flush=True)
    while True:
        pool.decompose(P)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="POSIX signals")
def test_an_interrupt_ends_a_blocked_submission():
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0


@pytest.mark.parametrize(("name", "value"), [("workers", 0), ("limit", 0)])
def test_a_pool_of_nothing_is_refused(name, value):
    with pytest.raises(RankscopeError, match=f"`{name}` must be at least 1, got 0"):
        SpectrumPool(**{"workers": 1, name: value})


def test_an_empty_batch_and_an_unknown_method_are_refused_at_once():
    with SpectrumPool(1) as pool:
        with pytest.raises(RankscopeError, match="at least one matrix"):
            pool.decompose(torch.empty(0, 3, 3))
        with pytest.raises(RankscopeError, match="`method` has no 'gramm'"):
            pool.decompose(torch.eye(3), method="gramm")
