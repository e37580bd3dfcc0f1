"""Exact attention in the place of a model's own changes nothing; what the mechanism can't do is refused by name."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rankscope._errors import RankscopeError
from rankscope.attention._modules import configurations
from rankscope.attention.exact import exact_naive
from rankscope.attention.interface import capture, inspect_model, replace_attention, restore
from reference.attention_map import attention_map
from zoo import MODELS, tiny_inputs, tiny_model

EXACT = 1e-5
SUPPORTED = ["bert", "roberta", "electra", "modernbert", "vit", "whisper", "gpt2", "llama", "albert", "distilbert"]
SUPPORTED += ["qwen3", "gpt_neox", "opt", "deepseek_v3", "bart"]
CASES = [
    (name, padding) for name in SUPPORTED for padding in ((None, "right", "left") if MODELS[name].pads else (None,))
]
CHANGES = {"modernbert": {"local_attention": 64}}


def exact(module, query, key, value, *, key_padding_mask, is_causal, scaling, dropout):  # type: ignore[no-untyped-def]
    assert dropout == 0.0
    return exact_naive(query, key, value, key_padding_mask=key_padding_mask, is_causal=is_causal, scaling=scaling)


def outputs_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def kept(inputs: dict[str, Tensor], output: Tensor) -> Tensor:
    mask = inputs.get("attention_mask")
    return output if mask is None or mask.shape[1] != output.shape[1] else output[mask.bool()]


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_exact_attention_in_place_changes_nothing(name: str, padding: str | None) -> None:
    model, inputs = tiny_model(name, **CHANGES.get(name, {})), tiny_inputs(name, padding=padding)
    expected = outputs_of(model, inputs)
    before = [config._attn_implementation for config in configurations(model)]
    calls: list[str] = []

    def counted(module, *args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(type(module).__name__)
        return exact(module, *args, **kwargs)

    replacement = replace_attention(model, counted)
    torch.testing.assert_close(kept(inputs, outputs_of(model, inputs)), kept(inputs, expected), rtol=EXACT, atol=EXACT)
    assert len(calls) == MODELS[name].maps
    restore(model)
    assert [config._attn_implementation for config in configurations(model)] == before
    assert replacement.name not in AttentionInterface._global_mapping
    assert replacement.name not in AttentionMaskInterface._global_mapping
    assert torch.equal(outputs_of(model, inputs), expected)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_padding_that_arrives_is_the_user_s(name: str) -> None:
    seen: list[Tensor | None] = []

    def look(module, query, key, value, *, key_padding_mask, is_causal, scaling, dropout):  # type: ignore[no-untyped-def]
        seen.append(key_padding_mask)
        assert is_causal is MODELS[name].causal
        assert key.shape == query.shape
        return torch.zeros_like(query)

    for padding in (None, "right", "left"):
        inputs = tiny_inputs(name, padding=padding)
        with replace_attention(model := tiny_model(name), look):
            outputs_of(model, inputs)
        for mask in seen:
            if padding is None:
                assert mask is None
            else:
                assert mask is not None
                assert torch.equal(mask, inputs["attention_mask"] == 0)
        assert len(seen) == 2
        seen.clear()


def test_a_mask_without_padding_is_none() -> None:
    inputs = tiny_inputs("bert")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    def look(module, query, key, value, *, key_padding_mask, is_causal, scaling, dropout):  # type: ignore[no-untyped-def]
        assert key_padding_mask is None
        return query

    with replace_attention(model := tiny_model("bert"), look):
        outputs_of(model, inputs)


def zeros(module, query, key, value, *, key_padding_mask, is_causal, scaling, dropout):  # type: ignore[no-untyped-def]
    return torch.zeros_like(query)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "eager") for name in ("bert", "mistral", "gemma2", "t5", "gpt_oss")),
        *((name, "sdpa") for name in ("bert", "mistral", "t5")),
    ],
)
def test_layers_that_are_not_chosen_keep_exact_attention(name: str, attention: str) -> None:
    inputs = tiny_inputs(name, padding="left")
    model = tiny_model(name, attention=attention)
    expected = outputs_of(model, inputs)
    with replace_attention(model, zeros, modules=[]):
        torch.testing.assert_close(outputs_of(model, inputs), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_chosen_layer_alone_is_replaced(name: str) -> None:
    model, inputs = tiny_model(name), tiny_inputs(name, padding="left")
    expected = outputs_of(model, inputs)
    chosen = [inspect_model(model)[1].module]
    with replace_attention(model, exact, modules=chosen):
        got = outputs_of(model, inputs)
    torch.testing.assert_close(kept(inputs, got), kept(inputs, expected), rtol=EXACT, atol=EXACT)
    called = []

    def counted(module, *args, **kwargs):  # type: ignore[no-untyped-def]
        called.append(module)
        return zeros(module, *args, **kwargs)

    with replace_attention(model, counted, modules=chosen):
        assert not torch.allclose(outputs_of(model, inputs), expected, rtol=1e-2, atol=1e-2)
    assert called == [model.get_submodule(chosen[0])]


@pytest.mark.parametrize(
    ("name", "missing"),
    [("t5", "position_bias"), ("gpt_oss", "sinks"), ("gemma2", "softcap"), ("mistral", "sliding_window")],
)
def test_what_the_mechanism_does_not_take_is_refused_by_name(name: str, missing: str) -> None:
    model = tiny_model(name)
    before = outputs_of(model, tiny_inputs(name))
    with replace_attention(model, zeros), pytest.raises(RankscopeError, match=f"'{missing}'"):
        outputs_of(model, tiny_inputs(name))
    assert torch.equal(outputs_of(model, tiny_inputs(name)), before)


def test_what_the_mechanism_names_it_is_given() -> None:
    def biased(module, query, key, value, *, key_padding_mask, is_causal, scaling, dropout, position_bias):  # type: ignore[no-untyped-def]
        logits = scaling * query @ key.mT + position_bias
        if is_causal:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
        return logits.softmax(dim=-1) @ value

    def windowed(module, query, key, value, *, key_padding_mask, is_causal, scaling, dropout, sliding_window):  # type: ignore[no-untyped-def]
        n = query.shape[-2]
        assert sliding_window == 4
        allowed = [[i - sliding_window < j <= i for j in range(n)] for i in range(n)]
        rows = [
            [attention_map(q.tolist(), k.tolist(), scaling, allowed) for q, k in zip(qs, ks, strict=True)]
            for qs, ks in zip(query, key, strict=True)
        ]
        return torch.tensor(rows) @ value

    for name, function in (("t5", biased), ("mistral", windowed)):
        model, inputs = tiny_model(name), tiny_inputs(name)
        expected = outputs_of(model, inputs)
        with replace_attention(model, function):
            torch.testing.assert_close(outputs_of(model, inputs), expected, rtol=EXACT, atol=EXACT)


def test_a_window_as_long_as_the_text_needs_nothing() -> None:
    model, inputs = tiny_model("mistral", sliding_window=11), tiny_inputs("mistral")
    expected = outputs_of(model, inputs)
    with replace_attention(model, exact):
        torch.testing.assert_close(outputs_of(model, inputs), expected, rtol=EXACT, atol=EXACT)


def test_packed_sequences_and_masks_of_the_user_s_own_are_refused() -> None:
    model, inputs = tiny_model("llama"), tiny_inputs("llama", batch=1)
    packed = {**inputs, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]]), "use_cache": False}
    own = {**inputs, "attention_mask": torch.zeros(1, 1, 11, 11)}
    with replace_attention(model, zeros):
        with pytest.raises(RankscopeError, match="packed sequences"):
            outputs_of(model, packed)
        with pytest.raises(RankscopeError, match="2-D attention_mask"):
            outputs_of(model, own)


def test_a_mechanism_without_padding_refuses_a_padded_batch() -> None:
    def unpadded(module, query, key, value, *, is_causal, scaling, dropout):  # type: ignore[no-untyped-def]
        return exact_naive(query, key, value, scaling=scaling, is_causal=is_causal)

    model = tiny_model("bert")
    expected = outputs_of(model, tiny_inputs("bert"))
    with replace_attention(model, unpadded, mask="none"):
        torch.testing.assert_close(outputs_of(model, tiny_inputs("bert")), expected, rtol=EXACT, atol=EXACT)
        with pytest.raises(RankscopeError, match="the batch is padded"):
            outputs_of(model, tiny_inputs("bert", padding="right"))


def test_mistakes_are_refused_with_the_cure() -> None:
    model = tiny_model("bert")
    with pytest.raises(RankscopeError, match=r"`mask` has no 'paddng': did you mean 'padding'"):
        replace_attention(model, zeros, mask="paddng")
    with pytest.raises(RankscopeError, match=r"did you mean 'encoder.layer.1.attention.self'"):
        replace_attention(model, zeros, modules=["encoder.layer.1.attention.sel"])
    with pytest.raises(RankscopeError, match="no replaced attention"):
        restore(model)
    with pytest.raises(RankscopeError, match="can't be replaced"):
        replace_attention(tiny_model("mpnet"), zeros)
    with replace_attention(model, zeros):
        with pytest.raises(RankscopeError, match="already"):
            replace_attention(model, zeros)
        with pytest.raises(RankscopeError, match="call restore"), capture(model, lambda call: None):
            pass
        with pytest.raises(RankscopeError, match="a copy"):
            outputs_of(copy.deepcopy(model), tiny_inputs("bert"))


def test_two_models_hold_their_own_replacements() -> None:
    first, second, inputs = tiny_model("bert"), tiny_model("bert", seed=1), tiny_inputs("bert")
    expected = outputs_of(second, inputs)
    with replace_attention(first, zeros), replace_attention(second, exact):
        torch.testing.assert_close(outputs_of(second, inputs), expected, rtol=EXACT, atol=EXACT)
        assert not torch.allclose(outputs_of(first, inputs), outputs_of(tiny_model("bert"), inputs))


def test_gradients_reach_the_weights() -> None:
    model, inputs = tiny_model("bert"), tiny_inputs("bert", padding="right")
    model(**inputs).last_hidden_state[inputs["attention_mask"].bool()].square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with replace_attention(model, exact):
        model(**inputs).last_hidden_state[inputs["attention_mask"].bool()].square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4)
    assert len(expected) > 20


def test_nothing_is_left_after_an_exception() -> None:
    def fail(module, query, key, value, **_: object) -> Tensor:  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt

    before = (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping))
    model = tiny_model("bert")
    with pytest.raises(KeyboardInterrupt), replace_attention(model, fail):
        outputs_of(model, tiny_inputs("bert"))
    assert before == (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping))
    assert model.config._attn_implementation == "sdpa"
