"""Captured P is the model's own: against eager's weights, and against the formula on the same query and key."""

import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention import fallback
from rankscope.attention.interface import AttentionCall, capture, find_route, inspect_model, run_captured
from reference.attention_map import attention_map
from zoo import DECODER_LENGTH, FALLBACK, LENGTH, MODELS, PADDED, REACHED, REFUSED, ROUTED, tiny_inputs, tiny_model

CASES = [(name, padding) for name in REACHED for padding in ((None, "right", "left") if name in PADDED else (None,))]
FLOAT32 = 1e-6
BFLOAT16 = 1e-2


def eager_attentions(name: str, inputs: dict, **changes: object) -> list[torch.Tensor]:
    """What a second model with the same weights, loaded as eager, returns as its attentions, in running order."""
    with torch.no_grad():
        outputs = tiny_model(name, attention="eager", **changes)(**inputs, output_attentions=True)
    encoder = list(getattr(outputs, "encoder_attentions", None) or ())
    decoder = getattr(outputs, "decoder_attentions", None) or getattr(outputs, "attentions", None) or ()
    cross = getattr(outputs, "cross_attentions", None) or ()
    if not cross:
        return encoder + list(decoder)
    return encoder + [weights for pair in zip(decoder, cross, strict=True) for weights in pair]


def captured(model: torch.nn.Module, inputs: dict) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    run_captured(model, inputs, calls.append)
    return calls


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_captured_map_is_the_weights_of_eager(name: str, padding: str | None) -> None:
    inputs = tiny_inputs(name, padding=padding)
    expected = eager_attentions(name, inputs)
    calls = captured(tiny_model(name), inputs)
    assert len(calls) == len(expected) == MODELS[name].maps
    for call, weights in zip(calls, expected, strict=True):
        torch.testing.assert_close(call.context_map(), weights, rtol=0, atol=FLOAT32)
        assert call.reached == MODELS[name].reached
        assert weights.amax() > 1.5 / weights.shape[-1], "attention so flat that a lost scaling would not show"


def test_fallback_is_not_mistaken_for_eager_where_the_default_differs() -> None:
    for name in FALLBACK:
        assert {call.reached for call in captured(tiny_model(name), tiny_inputs(name))} == {"fallback"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ROUTED)
def test_half_precision_map_is_the_formula_on_the_same_query_and_key(name: str, dtype: torch.dtype) -> None:
    inputs = tiny_inputs(name, padding="right" if name in PADDED else None)
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    compared = 0
    for call in captured(tiny_model(name).to(dtype), inputs):
        assert call.query is not None
        assert call.query.dtype == dtype
        P, allowed = call.context_map(), call.allowed()
        for head in range(P.shape[1]):
            rows, m = P.shape[2:]
            allowed_rows = bias = None
            if allowed is not None:
                open_ = allowed.expand(*P.shape)[1, head]
                allowed_rows = open_.tolist()
            if call.position_bias is not None:
                bias = call.position_bias.expand(*P.shape)[1, head].double().tolist()
            expected = attention_map(
                call.query[1, head].tolist(),
                call.key_expanded()[1, head].tolist(),
                call.scaling,
                allowed_rows,
                bias,
                call.softcap,
                None if call.sinks is None else float(call.sinks[head]),
            )
            error = (P[1, head].double() - torch.tensor(expected, dtype=torch.float64)).abs().max()
            assert error < BFLOAT16
            assert error < 1e-5, "P is float32 arithmetic on the given query and key"
            compared += rows * m
    assert compared


@pytest.mark.parametrize("name", [name for name in ROUTED if MODELS[name].causal])
def test_no_mass_leaks_to_later_tokens_in_float16(name: str) -> None:
    """Reported as transformers 35151: in float16 the mask's minimum is a small number for float32."""
    for call in captured(tiny_model(name).half(), tiny_inputs(name, padding="right")):
        assert call.context_map().triu(1).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_fully_masked_row_is_uniform_in_half_precision(dtype: torch.dtype) -> None:
    """Taken as it is, float16's minimum leaves such a row to its content, future tokens and padding included."""
    for call in captured(tiny_model("llama").to(dtype), tiny_inputs("llama", padding="left")):
        torch.testing.assert_close(call.context_map()[1, :, :3], torch.full((4, 3, LENGTH), 1 / LENGTH))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_a_map_is_refused_with_the_reason(name: str) -> None:
    model = tiny_model(name)
    with pytest.raises(RankscopeError, match=r"can't be measured: .*(attention|pools|logits|band)"):
        find_route(model, tiny_inputs(name))


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "big_bird"])
def test_what_passes_for_attentions_is_refused_by_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported as transformers 48333: attentions that are logits, a band, or nothing."""
    monkeypatch.setattr(fallback, "NO_MAP", {})
    with pytest.raises(RankscopeError, match=r"logits|band or pooled|returns no attentions"):
        find_route(tiny_model(name), tiny_inputs(name))


def test_layers_are_named_by_module_and_call() -> None:
    """Reported as transformers 41125: shared and hybrid layers need more than an index."""
    calls = captured(tiny_model("albert"), tiny_inputs("albert"))
    assert len({call.module for call in calls}) == 1
    assert [call.call for call in calls] == [0, 1, 2]
    again = captured(tiny_model("bert"), tiny_inputs("bert"))
    assert [(c.module, c.call) for c in again] == [(f"encoder.layer.{i}.attention.self", 0) for i in range(2)]


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_decoder_and_cross_attention_are_told_apart(name: str) -> None:
    """Reported as bertviz 67 and 68."""
    calls = captured(tiny_model(name), tiny_inputs(name))
    encoder_length = 9 if name == "whisper" else LENGTH
    shapes = {("self", "encoder"): (encoder_length,) * 2, ("self", "decoder"): (DECODER_LENGTH,) * 2}
    shapes["cross", "decoder"] = (DECODER_LENGTH, encoder_length)
    kinds = [(call.kind, call.stack) for call in calls]
    assert kinds == [("self", "encoder")] * 2 + [("self", "decoder"), ("cross", "decoder")] * 2
    for call in calls:
        assert tuple(call.context_map().shape[-2:]) == shapes[call.kind, call.stack]


def test_sinks_leave_rows_short_of_one() -> None:
    for call in captured(tiny_model("gpt_oss"), tiny_inputs("gpt_oss")):
        sums = call.context_map().sum(dim=-1)
        assert sums.max() <= 1 + FLOAT32
        assert 0 < sums.mean() < 0.95


def test_grouped_keys_serve_consecutive_query_heads() -> None:
    call = captured(tiny_model("llama"), tiny_inputs("llama"))[0]
    assert call.key is not None
    assert (call.query.shape[1], call.key.shape[1]) == (4, 2)
    for head in range(4):
        assert torch.equal(call.key_expanded()[:, head], call.key[:, head // 2])
        assert torch.equal(call.value_expanded()[:, head], call.value[:, head // 2])


def test_rows_are_rows_of_the_whole_map() -> None:
    for name in ("mistral", "t5", "gpt_oss", "mpnet"):
        for call in captured(tiny_model(name), tiny_inputs(name, padding="left")):
            torch.testing.assert_close(
                call.context_map(slice(2, 5)), call.context_map()[:, :, 2:5], rtol=0, atol=FLOAT32
            )


def test_a_fully_masked_row_is_uniform_and_not_nan() -> None:
    """Reported as pytorch 160064: left padding leaves causal rows that may look nowhere."""
    for call in captured(tiny_model("llama"), tiny_inputs("llama", padding="left")):
        P = call.context_map()
        assert P.isfinite().all()
        torch.testing.assert_close(P[1, :, 0], torch.full((4, LENGTH), 1 / LENGTH))


def test_padding_cut_out_leaves_the_unpadded_map() -> None:
    """Reported as bertviz 101, TransformerLens 240 and trl 3715: padding counted as tokens."""
    model, inputs = tiny_model("bert"), tiny_inputs("bert", padding="right")
    alone = {"input_ids": inputs["input_ids"][1:, :-3]}
    for padded, whole in zip(captured(model, inputs), captured(model, alone), strict=True):
        kept = padded.context_map()[1, :, :-3]
        torch.testing.assert_close(kept[..., :-3], whole.context_map()[0], rtol=0, atol=FLOAT32)
        assert kept[..., -3:].abs().max() == 0


def test_train_mode_gives_the_rows_of_eval_mode() -> None:
    """Reported as transformers 31468: with dropout rows do not sum to 1."""
    model = tiny_model("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.5)
    expected = [call.context_map() for call in captured(model, tiny_inputs("bert"))]
    for call, P in zip(captured(model.train(), tiny_inputs("bert")), expected, strict=True):
        assert torch.equal(call.context_map(), P)


def test_a_misspelt_mask_is_refused_by_name() -> None:
    """Reported as transformers 46132: a misspelt key of a mask is lost without a word."""
    inputs = tiny_inputs("llama", padding="right")
    inputs["attention_masks"] = inputs.pop("attention_mask")
    with pytest.raises(RankscopeError, match=r"'attention_masks'.*did you mean 'attention_mask'"):
        find_route(tiny_model("llama"), inputs)


def test_an_unknown_keyword_that_may_change_the_map_is_refused_by_name() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    class Indexed(LlamaAttention):
        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return super().forward(*args, **kwargs, indices=torch.zeros(1))

    model = tiny_model("llama")
    model.layers[1].self_attn.__class__ = Indexed
    with pytest.raises(RankscopeError, match=r"layers.1.self_attn.*'indices'"):
        find_route(model, tiny_inputs("llama"))


def test_a_term_that_is_not_known_is_found_against_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert import modeling_bert

    from rankscope.attention import _modules

    own = modeling_bert.eager_attention_forward

    def warmer(module, query, *args, **kwargs):  # type: ignore[no-untyped-def]
        return own(module, 2 * query, *args, **kwargs)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", warmer)
    monkeypatch.setattr(_modules, "_eager_functions", {})
    with pytest.raises(RankscopeError, match="differs from the model's own eager weights"):
        find_route(tiny_model("bert"), tiny_inputs("bert"))


def test_packed_positions_make_block_diagonal_maps() -> None:
    model, inputs = tiny_model("llama"), tiny_inputs("llama", batch=1)
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]])
    expected = eager_attentions("llama", {**inputs, "use_cache": False})
    for call, weights in zip(captured(model, inputs), expected, strict=True):
        torch.testing.assert_close(call.context_map(), weights, rtol=0, atol=FLOAT32)
        assert call.context_map()[..., 6:, :6].abs().max() == 0


def test_a_wrapped_model_is_captured_as_it_is() -> None:
    """Reported as TransformerLens 535 and 651: a PEFT-wrapped model is not found."""
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    expected = eager_attentions("llama", tiny_inputs("llama"))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    calls = captured(wrapped, tiny_inputs("llama"))
    for call, weights in zip(calls, expected, strict=True):  # LoRA starts at zero
        torch.testing.assert_close(call.context_map(), weights, rtol=0, atol=FLOAT32)
        assert call.module.startswith("base_model.model.layers.")


def test_every_configuration_of_a_composed_model_is_set() -> None:
    from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

    from zoo import BERT, spread_weights

    def composed(attention: str) -> EncoderDecoderModel:
        encoder = BertModel._from_config(BertConfig(**BERT), attn_implementation=attention)
        config = BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
        model = EncoderDecoderModel(
            encoder=encoder, decoder=BertLMHeadModel._from_config(config, attn_implementation=attention)
        )
        spread_weights(model)
        return model.eval()

    inputs = tiny_inputs("t5", padding="right")
    calls = captured(composed("sdpa"), inputs)
    with torch.no_grad():
        outputs = composed("eager")(**inputs, output_attentions=True)
    pairs = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
    expected = [*outputs.encoder_attentions, *(weights for pair in pairs for weights in pair)]
    assert [call.kind for call in calls] == ["self", "self", "self", "cross", "self", "cross"]
    assert [call.stack for call in calls] == ["encoder"] * 2 + ["decoder"] * 4
    for call, weights in zip(calls, expected, strict=True):
        torch.testing.assert_close(call.context_map(), weights, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("name", list(MODELS))
def test_inspection_says_how_each_module_is_reached(name: str) -> None:
    listed = inspect_model(tiny_model(name))
    assert {item.reached for item in listed} <= {MODELS[name].reached}
    assert all(item.reason or item.reached == "routed" for item in listed)
    if name in REACHED:
        distinct = 1 if name == "albert" else MODELS[name].maps
        assert len(listed) == distinct
        assert [item.module for item in inspect_model(tiny_model(name), tiny_inputs(name))] == [
            item.module for item in listed
        ]


def test_capture_without_a_route_sees_the_users_own_forward() -> None:
    model, seen = tiny_model("gpt2"), []
    with capture(model, lambda call: seen.append((call.module, call.call))) as session, torch.no_grad():
        model(**tiny_inputs("gpt2"))
        model(**tiny_inputs("gpt2"))
    assert seen == [("h.0.attn", 0), ("h.1.attn", 0)] * 2
    assert session.total == 4
