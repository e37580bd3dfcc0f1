"""Every registered mechanism keeps the contract; there is no list of exceptions."""

import importlib
import pkgutil

import pytest
import torch

import rankscope.attention
from rankscope._errors import RankscopeError
from rankscope.attention._contract import MECHANISMS
from rankscope.attention.exact import exact_naive

for module in pkgutil.iter_modules(rankscope.attention.__path__):
    importlib.import_module(f"rankscope.attention.{module.name}")

NAMES = sorted(MECHANISMS)
CAUSAL = [name for name in NAMES if MECHANISMS[name].causal]
EVERY = pytest.mark.parametrize("name", NAMES)


def tensors(n=48, m=None, dtype=torch.float64, seed=0, batch=2, heads=2, head_dim=8):
    generator = torch.Generator().manual_seed(seed)
    lengths = (n, m or n, m or n)
    return tuple(
        torch.randn(batch, heads, s, head_dim, dtype=torch.float64, generator=generator).to(dtype) for s in lengths
    )


def call(name, *inputs, seed=0, **keywords):
    mechanism = MECHANISMS[name]
    if mechanism.random:
        keywords["generator"] = torch.Generator().manual_seed(seed)
    return mechanism.function(*inputs, **keywords)


def yardstick(name, *inputs, **keywords):
    """Exact attention with the mechanism's own default of causality."""
    if MECHANISMS[name].causal and "is_causal" not in keywords:
        keywords["is_causal"] = default(name, "is_causal")
    return exact_naive(*inputs, **keywords)


def default(name, keyword):
    import inspect

    return inspect.signature(MECHANISMS[name].function).parameters[keyword].default


def relative_rms(got, wanted):
    return ((got - wanted).square().mean() / wanted.square().mean()).sqrt().item()


def test_the_linformers_and_the_yardsticks_are_in_the_table():
    assert {"exact_naive", "sdpa", "linformer", "linformer_causal"} <= set(NAMES)


@EVERY
def test_output_has_the_querys_shape_and_dtype(name):
    query, key, value = tensors(dtype=torch.float32)
    output = call(name, query, key, value)
    assert output.shape == query.shape
    assert output.dtype == query.dtype


@EVERY
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_changing_padded_tokens_changes_nothing(name, side):
    query, key, value = tensors()
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[0, {"left": slice(0, 11), "right": slice(37, 48), "inside": slice(20, 31)}[side]] = True
    before = call(name, query, key, value, key_padding_mask=mask)
    padded = mask[:, None, :, None]
    after = call(name, query, key.masked_fill(padded, 1e4), value.masked_fill(padded, -1e4), key_padding_mask=mask)
    kept = ~mask[:, None, :, None].expand_as(before)
    torch.testing.assert_close(after[kept], before[kept], rtol=1e-12, atol=1e-12)


@EVERY
@pytest.mark.parametrize("left", [True, False])
def test_adding_padding_leaves_the_unpadded_run(name, left):
    extra, n = 13, 48
    query, key, value = tensors(n)
    wanted = call(name, query, key, value)
    where = (extra, 0) if left else (0, extra)
    grown = [torch.nn.functional.pad(x, (0, 0, *where), value=7.0) for x in (query, key, value)]
    mask = torch.nn.functional.pad(torch.zeros(2, n, dtype=torch.bool), where, value=True)
    got = (
        call(name, *grown, key_padding_mask=mask)[:, :, extra:]
        if left
        else call(name, *grown, key_padding_mask=mask)[:, :, :n]
    )
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@EVERY
def test_a_fully_padded_row_gives_zeros_and_finite_gradients(name):
    inputs = [x.requires_grad_() for x in tensors()]
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[1] = True
    output = call(name, *inputs, key_padding_mask=mask)
    output.square().sum().backward()
    assert output[1].abs().max() == 0
    assert output[0].abs().max() > 0
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_means_no_output_moves_before_a_changed_token(name):
    query, key, value = tensors(60)
    before = call(name, query, key, value, is_causal=True)
    for t in (1, 17, 40, 59):
        changed = []
        for x in (query, key, value):
            x = x.clone()
            x[:, :, t:] = -3 * x[:, :, t:]
            changed.append(x)
        after = call(name, *changed, is_causal=True)
        torch.testing.assert_close(after[:, :, :t], before[:, :, :t], rtol=1e-12, atol=1e-12)
        assert (after[:, :, t:] - before[:, :, t:]).abs().max() > 1e-3


@EVERY
def test_what_cannot_be_causal_does_not_take_the_keyword(name):
    if MECHANISMS[name].causal:
        with pytest.raises(RankscopeError, match="one length"):
            call(name, *tensors(10, 14), is_causal=True)
    else:
        with pytest.raises(TypeError, match="is_causal"):
            call(name, *tensors(), is_causal=True)


@EVERY
def test_an_unknown_keyword_raises(name):
    with pytest.raises(TypeError, match="no_such_option"):
        call(name, *tensors(), no_such_option=1)


@EVERY
def test_cross_attention_works_or_is_refused(name):
    query, key, value = tensors(20, 33)
    if MECHANISMS[name].self_attention_only:
        with pytest.raises(RankscopeError):
            call(name, query, key, value)
    else:
        assert call(name, query, key, value).shape == query.shape


@EVERY
def test_float32_agrees_with_float64(name):
    inputs = tensors()
    wanted = call(name, *inputs)
    got = call(name, *(x.float() for x in inputs))
    assert relative_rms(got.double(), wanted) < 2e-6


@EVERY
def test_bfloat16_agrees_with_float32_on_the_same_inputs(name):
    inputs = tensors(dtype=torch.bfloat16)
    wanted = call(name, *(x.float() for x in inputs))
    got = call(name, *inputs)
    assert got.dtype == torch.bfloat16
    assert relative_rms(got.float(), wanted) < 1e-2


@EVERY
def test_a_mask_of_the_wrong_dtype_or_shape_is_refused(name):
    inputs = tensors()
    with pytest.raises(RankscopeError, match="key_padding_mask"):
        call(name, *inputs, key_padding_mask=torch.zeros(2, 48))
    with pytest.raises(RankscopeError, match="key_padding_mask"):
        call(name, *inputs, key_padding_mask=torch.zeros(2, 47, dtype=torch.bool))


@EVERY
def test_gradients_are_finite_for_logits_of_a_hundred(name):
    inputs = [(10 * x).requires_grad_() for x in tensors(dtype=torch.float32)]
    call(name, *inputs).square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


@EVERY
def test_a_call_leaves_no_state_for_the_next(name):
    long, short = tensors(64), tensors(16)
    first = call(name, *long)
    call(name, *short)
    torch.testing.assert_close(call(name, *long), first, rtol=0, atol=0)


@EVERY
def test_an_exact_mechanism_equals_the_yardstick_and_an_approximate_one_improves_with_its_knob(name):
    mechanism = MECHANISMS[name]
    inputs = tensors(128, batch=4)
    wanted = yardstick(name, *inputs)
    if mechanism.knob is None:
        assert mechanism.exact
        assert relative_rms(call(name, *inputs), wanted) < 1e-12
        return
    errors = [
        sum(relative_rms(call(name, *inputs, seed=seed, **{mechanism.knob: knob}), wanted) for seed in range(4))
        for knob in (4, 16, 64)
    ]
    assert errors[0] > errors[-1], errors


@pytest.mark.parametrize("name", [name for name in NAMES if not MECHANISMS[name].random])
@pytest.mark.parametrize("padded", [True, False])
def test_compiles_into_one_graph(name, padded):
    inputs = tensors(dtype=torch.float32)
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[0, :9] = True
    keywords = {"key_padding_mask": mask} if padded else {}
    compiled = torch.compile(MECHANISMS[name].function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, **keywords), call(name, *inputs, **keywords))
