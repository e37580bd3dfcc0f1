"""What a case runs is the mechanism it names, and its error is the true one."""

import pytest
import torch

from rankscope.attention.exact import exact_naive
from rankscope.attention.mechanisms import MECHANISMS
from rankscope.bench.cases import Case, causalities, has_length_knob
from rankscope.bench.subject import attention_of, gaussian, layer_of, padding_mask, prepare, relative_error

SMALL = {"n": 64, "heads": 2, "head_dim": 8}
EVERY = [
    Case(name, k=16 if has_length_knob(name) else None, causal=causal, mode=mode, view=view, **SMALL)
    for name in MECHANISMS
    for causal in causalities(name)
    for mode in ("forward", "train")
    for view in ("attention", "layer")
]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_every_mechanism_runs_in_every_mode_and_view(case):
    prepare(case)()


@pytest.mark.parametrize("name", MECHANISMS)
def test_an_exact_mechanism_has_no_error_and_an_approximate_one_has_some(name):
    causal = max(causalities(name)) if name == "linformer_causal" else False
    case = Case(name, 128, 16 if has_length_knob(name) else None, heads=2, head_dim=8, dtype="float64", causal=causal)
    error = relative_error(case, *gaussian(case))
    assert (error < 1e-12) == MECHANISMS[name].exact


@pytest.mark.parametrize("causal", [False, True])
def test_the_error_is_the_one_of_the_whole_output_where_all_rows_are_compared(causal):
    case = Case("local", 60, 16, heads=2, head_dim=8, dtype="float64", causal=causal)
    query, key, value = gaussian(case)
    got = attention_of(case, 60)(query, key, value)
    wanted = exact_naive(query, key, value, is_causal=causal)
    whole = ((got - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    assert relative_error(case, query, key, value) == pytest.approx(whole, rel=1e-12)


def test_padding_is_left_out_of_output_and_error():
    case = Case("sdpa", 64, heads=2, head_dim=8, dtype="float64", padding=0.25)
    mask = padding_mask(case, 64, "cpu")
    assert mask is not None
    assert mask.sum() == 16
    query, key, value = gaussian(case)
    value[:, :, 48:] = 1e6
    assert relative_error(case, query, key, value) < 1e-12


def test_the_whole_layer_of_linformer_is_its_own_layer_and_gives_the_gradients():
    case = Case("linformer", k=8, view="layer", mode="train", **SMALL)
    assert type(layer_of(case)).__name__ == "LinformerSelfAttention"
    layer = layer_of(case)
    layer(torch.randn(1, 64, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
