"""The cost model grows as each mechanism claims, and names every one of them."""

from dataclasses import replace
from math import log

import pytest

from rankscope.attention.mechanisms import MECHANISMS
from rankscope.bench.cases import Case, causalities, has_length_knob
from rankscope.bench.cost_model import COSTS, Rates, Shape, exact_naive, linformer, predict, sdpa

RATES = Rates(1e11, 1e10)
GROWTH = {"n": 1.0, "n^2": 2.0, "n sqrt(n)": 1.5, "n log n": 1.0}


def case_of(name, n):
    causal = False not in causalities(name)
    return Case(name, n, 128 if has_length_knob(name) else None, causal=causal)


def test_every_mechanism_has_a_cost():
    assert set(COSTS) == set(MECHANISMS)


@pytest.mark.parametrize("name", MECHANISMS)
def test_operations_grow_as_claimed(name):
    # Far out, where the largest power alone is left; LSH as far as it is measured, its hashes grow as n √n.
    short, long = (2**11, 2**15) if name == "lsh" else (2**22, 2**24)
    grown = predict(case_of(name, long), RATES).operations / predict(case_of(name, short), RATES).operations
    assert log(grown) / log(long / short) == pytest.approx(GROWTH[MECHANISMS[name].cost], abs=0.15)


def test_fused_attention_moves_less_than_attention_written_out_and_less_with_more_fast_memory():
    shape = Shape(8192, 64)
    assert sdpa(shape).moved < exact_naive(shape).moved / 10
    assert sdpa(replace(shape, fast=shape.fast * 2)).moved < sdpa(shape).moved
    assert sdpa(shape).operations == exact_naive(shape).operations


def test_linformers_operations_cross_exact_ones_at_twice_k():
    assert linformer(Shape(512, 64, 256)).operations == exact_naive(Shape(512, 64)).operations


@pytest.mark.parametrize("name", MECHANISMS)
def test_training_and_the_whole_layer_cost_more(name):
    case = case_of(name, 1024)
    plain = predict(case, RATES)
    for more in ({"mode": "train"}, {"view": "layer"}):
        found = predict(replace(case, **more), RATES)
        assert found.operations > plain.operations
        assert found.peak_bytes > plain.peak_bytes
    assert plain.seconds == max(plain.seconds_by_operations, plain.seconds_by_bytes)
